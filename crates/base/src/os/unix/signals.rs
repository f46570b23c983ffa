//! Signals: interrupts, and failed writes.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Chooses what signals of failed writes do. Runs first in `main`.
///
/// SIGPIPE gets its default action back (Rust ignores it), so that `gemma ... | head` ends quietly.
/// SIGXFSZ is ignored: a write beyond a limit on file sizes then fails like one to a full disk, and
/// an output that is still in memory is not lost with it.
pub fn prepare_writes() {
    // SAFETY: no thread exists yet; SIG_DFL and SIG_IGN install no code of this program.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Makes a write to a closed connection fail instead of ending the process: what uses the network
/// calls this first. Rust's vectored writes to sockets raise SIGPIPE.
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

/// Opens a descriptor that cannot be written to in the place of a closed standard output, so that
/// writing fails. Rust's runtime would open /dev/null there and lose all output without an error.
/// Runs before Rust's runtime does.
pub extern "C" fn mark_closed_stdout() {
    // SAFETY: plain system calls on numbers; descriptor 1 is unused if it is closed.
    unsafe {
        if libc::fcntl(1, libc::F_GETFD) != -1 {
            return;
        }
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        if null >= 0 && null != 1 {
            libc::dup2(null, 1);
            // Descriptor 0 was closed too, and may stay open like this.
            if null > 2 {
                libc::close(null);
            }
        }
    }
}

/// Raises `stop` at the first SIGINT or SIGTERM, and `terminated` too at a SIGTERM. Any further one
/// ends the process at once, with exit code 130 or 143.
pub fn flag_interrupts(stop: &Arc<AtomicBool>, terminated: &Arc<AtomicBool>) -> io::Result<()> {
    for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
        // Order matters: the exit looks at the flag before the next handler raises it.
        register_conditional_shutdown(signal, code, stop.clone())?;
        register(signal, stop.clone())?;
    }
    register(SIGTERM, terminated.clone())?;
    Ok(())
}

/// Raises `stop` at each SIGINT, which no longer ends the process.
pub fn flag_each_interrupt(stop: &Arc<AtomicBool>) -> io::Result<()> {
    register(SIGINT, stop.clone()).map(drop)
}

/// SIGINT and SIGTERM, to be waited for.
pub struct Interrupts(signal_hook::iterator::Signals);

impl Interrupts {
    /// Notes both signals from here on.
    pub fn watch() -> io::Result<Interrupts> {
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map(Interrupts)
    }

    /// Waits for the first of them.
    pub fn wait(mut self) {
        let _ = self.0.forever().next();
    }
}
