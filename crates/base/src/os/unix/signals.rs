//! Signals: interrupts, and failed writes.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Sets the actions for signals of failed writes. Runs first in `main`.
///
/// SIGPIPE gets its default action, which Rust disables, so that `gemma ... | head` ends quietly.
/// SIGXFSZ is ignored: a write beyond a file size limit then fails like a write to a full disk. The
/// process keeps running, so output in memory is not lost.
pub fn prepare_writes() {
    // SAFETY: no other thread exists yet. SIG_DFL and SIG_IGN install no code of this program.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Makes a write to a closed connection an error instead of the end of the process.
///
/// Code that uses the network calls this first, since Rust's vectored socket writes raise SIGPIPE.
pub fn survive_closed_connections() {
    // SAFETY: SIG_IGN installs no code of this program.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}

/// Writes to an output. A closed pipe ends the process by SIGPIPE.
pub fn write(output: &mut File, bytes: &[u8], _is_terminal: bool) -> io::Result<()> {
    output.write_all(bytes)
}

/// Opens a non-writable descriptor in place of a closed standard output, so that writes fail.
///
/// Rust's runtime would open /dev/null there and silently discard all output. Runs before Rust's
/// runtime.
pub extern "C" fn mark_closed_stdout() {
    // SAFETY: plain system calls on numbers; descriptor 1 is unused if it is closed.
    unsafe {
        if libc::fcntl(1, libc::F_GETFD) != -1 {
            return;
        }
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        if null >= 0 && null != 1 {
            libc::dup2(null, 1);
            // Descriptor 0 was closed too; it may stay open on the same file.
            if null > 2 {
                libc::close(null);
            }
        }
    }
}

/// Sets `stop` at the first SIGINT or SIGTERM, and also `terminated` at a SIGTERM.
///
/// Any further signal ends the process at once, with exit code 130 or 143.
pub fn flag_interrupts(stop: &Arc<AtomicBool>, terminated: &Arc<AtomicBool>) -> io::Result<()> {
    for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
        // Order matters: this handler checks the flag before the next handler sets it.
        register_conditional_shutdown(signal, code, stop.clone())?;
        register(signal, stop.clone())?;
    }
    register(SIGTERM, terminated.clone())?;
    Ok(())
}

/// Sets `stop` at each SIGINT, which then does not end the process.
pub fn flag_each_interrupt(stop: &Arc<AtomicBool>) -> io::Result<()> {
    register(SIGINT, stop.clone()).map(drop)
}

/// Waits for SIGINT or SIGTERM.
pub struct Interrupts(signal_hook::iterator::Signals);

impl Interrupts {
    /// Starts recording both signals.
    pub fn watch() -> io::Result<Interrupts> {
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map(Interrupts)
    }

    /// Waits for the first signal.
    pub fn wait(mut self) {
        let _ = self.0.forever().next();
    }
}
