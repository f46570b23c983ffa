//! Crashes that no code returns from: a mapped file that shrinks or cannot be read, and memory that
//! the system refuses. [`watch`] installs handlers that print a message and end with an exit code.

use super::terminal;
pub use crate::os::allocator::Allocator;
use crate::os::exit::{self, REPORT};
pub use crate::os::exit::{Crash, CrashReport};
use std::sync::atomic::{AtomicBool, Ordering};

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Notes a refused allocation, for the handler of the abort that follows.
pub fn note_refusal() {
    REFUSED.store(true, Ordering::Relaxed);
}

/// Installs the handlers.
pub fn watch(report: CrashReport) {
    let _ = REPORT.set(report);
    let handlers: [(i32, extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void)); 2] =
        [(libc::SIGBUS, on_bus_error), (libc::SIGABRT, on_abort)];
    for (signal, handler) in handlers {
        // SAFETY: the structure is plain data that is filled here. The handlers have the signature
        // that SA_SIGINFO requires, and live as long as the program.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Writes parts of a message to standard error, without allocating or locking.
pub fn say(parts: &[&str]) {
    for part in parts {
        // SAFETY: the bytes are alive. A failed write cannot be reported.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
}

/// Handles SIGBUS: a page of a mapping could not be read.
///
/// The reading instruction raised the signal, so the thread was not inside an allocation or a lock
/// of the library. The handler may therefore open files and allocate.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure, and for SIGBUS it has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    match code {
        libc::BUS_ADRERR => end(&Crash::Unreadable(mapped_file(address))),
        // A misaligned address, or a signal from another process.
        _ => die_of(signal),
    }
}

/// Handles SIGABRT, which the standard library raises after a refused allocation or a stack
/// overflow. Does not allocate, since memory may be exhausted.
extern "C" fn on_abort(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if REFUSED.load(Ordering::Relaxed) { end(&Crash::OutOfMemory) } else { die_of(signal) }
}

/// Returns the name of the file that is mapped at this address.
fn mapped_file(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        ends.is_some_and(|(start, end)| (number(start)..number(end)).contains(&address))
    })?;
    // Address, permissions, offset, device, inode, and a path that may contain spaces.
    line.find('/').map(|at| line[at..].trim_end_matches(" (deleted)").to_owned())
}

/// Ends the process without destructors and exit handlers, because other threads still run.
fn end(crash: &Crash) -> ! {
    let code = exit::report(crash);
    terminal::restore();
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Performs the signal's default action.
fn die_of(signal: i32) {
    // SAFETY: plain calls on numbers. Returning from the handler repeats the cause of the signal.
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
        // SAFETY: no other code accesses the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let named = mapped_file(map.as_ptr() as usize + 50).unwrap();
        assert_eq!(std::path::Path::new(&named), path.canonicalize().unwrap());
        assert_eq!(mapped_file(1), None);
    }
}
