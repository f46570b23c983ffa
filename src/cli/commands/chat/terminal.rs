//! The terminal's own state: its width, what it echoes, and how it is left when a signal ends the
//! process.

use anyhow::{Context, Result};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Write, stderr, stdin, stdout};

/// Columns of the window at this moment; 0 where the terminal does not say.
pub fn columns() -> usize {
    tcgetwinsize(stdout()).map_or(0, |size| size.ws_col.into())
}

/// While this lives, typed keys are not echoed; they wait for the next prompt.
pub struct Unechoed(Option<Termios>);

impl Unechoed {
    pub fn begin() -> Unechoed {
        let Ok(before) = tcgetattr(stdin()) else { return Unechoed(None) };
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO | LocalModes::ECHONL);
        // A terminal that cannot be told echoes, as it did before.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &silent);
        Unechoed(Some(before))
    }
}

impl Drop for Unechoed {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}

/// Puts the terminal back as it is now before SIGTERM, SIGHUP or SIGQUIT ends the process. The line
/// editor and [`Unechoed`] change its modes, and a signal's default action runs no destructor.
pub fn restore_at_signals() -> Result<()> {
    let before = tcgetattr(stdin()).context("reading the terminal's modes")?;
    crate::cli::io::crash::leave_terminal(&before);
    let mut signals =
        Signals::new([SIGTERM, SIGHUP, SIGQUIT]).context("installing signal handlers")?;
    let watch = move || {
        for signal in signals.forever() {
            if in_foreground() {
                let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
                // The line editor had bracketed paste switched on, and stands in the middle of a
                // line.
                let _ = stderr().write_all(b"\x1b[?2004l\r\n");
            }
            // It ends the process as it would have ended without a handler.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).context("starting a thread")?;
    Ok(())
}

/// Whether the terminal is this process's to change: one in the background would be stopped for
/// trying.
fn in_foreground() -> bool {
    // SAFETY: neither call takes a pointer; a terminal that is gone makes the first return -1.
    unsafe { libc::tcgetpgrp(libc::STDIN_FILENO) == libc::getpgrp() }
}
