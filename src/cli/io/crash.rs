//! Ends that no code returns from: a mapped file that shrinks or cannot be read, and memory that the
//! system refuses. Each prints an error like any other, and has its exit code, instead of a
//! signal's name.

use crate::error::Kind;
use rustix::termios::{OptionalActions, Termios, tcsetattr};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// How the terminal is to be left, where somebody changes its modes.
static TERMINAL: OnceLock<Termios> = OnceLock::new();

/// From here on such an end leaves the terminal in these modes.
pub fn leave_terminal(modes: &Termios) {
    // Who comes second wants what the first one wanted: the modes before anything was changed.
    let _ = TERMINAL.set(modes.clone());
}

/// The system's allocator. It notes that an allocation was refused: Rust aborts then.
pub struct Allocator;

static REFUSED: AtomicBool = AtomicBool::new(false);

fn noted(pointer: *mut u8) -> *mut u8 {
    if pointer.is_null() {
        REFUSED.store(true, Ordering::Relaxed);
    }
    pointer
}

// SAFETY: every call goes to the system's allocator with its own arguments and result. Nothing here
// unwinds or allocates.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        noted(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        noted(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        noted(unsafe { System.realloc(pointer, layout, size) })
    }
}

/// Installs the handlers.
pub fn watch() {
    let handlers: [(i32, extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void)); 2] =
        [(libc::SIGBUS, on_bus_error), (libc::SIGABRT, on_abort)];
    for (signal, handler) in handlers {
        // SAFETY: plain data that is filled here; the handlers have the signature that SA_SIGINFO
        // asks for, and live as long as the program.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// A page of a mapping could not be read: its file became shorter, or its disk failed.
///
/// The signal is the reading instruction's own: the thread was not inside an allocation or a lock
/// of the library, so that this may open files and allocate.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure, and for SIGBUS it has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // What another process sent, or a misaligned address, is none of this.
    if code != libc::BUS_ADRERR {
        return die_of(signal);
    }
    let file = mapped_file(address).unwrap_or_else(|| "a file that is in use".into());
    let file = crate::cli::io::ui::clean(&file);
    say_and_exit(
        Kind::Model,
        &format!("{file} became shorter while it was read, or its disk failed"),
        "fetch the file again, and let nothing write to it while it is used",
    )
}

/// The file that is mapped at this address.
fn mapped_file(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        ends.is_some_and(|(start, end)| (number(start)..number(end)).contains(&address))
    })?;
    // Address, permissions, offset, device, inode, and a path that may have spaces.
    line.find('/').map(|at| line[at..].trim_end_matches(" (deleted)").to_owned())
}

/// The standard library aborts where an allocation was refused or a stack overflowed. Nothing here
/// allocates: there may be no memory for it.
extern "C" fn on_abort(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if REFUSED.load(Ordering::Relaxed) {
        say(&[
            "error: there is not enough memory, or a limit such as ulimit -v forbids more\n",
            "help: gemma plan shows what a model needs; a smaller --ctx-size needs less\n",
        ]);
        exit(Kind::Memory)
    } else {
        die_of(signal)
    }
}

fn say_and_exit(kind: Kind, what: &str, help: &str) -> ! {
    say(&["error: ", what, "\nhelp: ", help, "\n"]);
    exit(kind)
}

/// The bytes of messages go out one by one: a signal's handler has no buffers.
fn say(parts: &[&str]) {
    for part in parts {
        // SAFETY: the bytes are alive; a failure to say something has nowhere to be reported.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
}

/// Without destructors and exit handlers: other threads run on meanwhile.
fn exit(kind: Kind) -> ! {
    if let Some(modes) = TERMINAL.get() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, modes);
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(kind.exit_code())) }
}

/// What the signal does without a handler.
fn die_of(signal: i32) {
    // SAFETY: plain calls on numbers; returning from the handler repeats what raised the signal.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a file");
        std::fs::write(&path, [7; 100]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: nobody else knows the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let named = mapped_file(map.as_ptr() as usize + 50).unwrap();
        assert_eq!(std::path::Path::new(&named), path.canonicalize().unwrap());
        assert_eq!(mapped_file(1), None);
    }
}
