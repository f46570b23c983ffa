//! The terminal's modes: its echo, and restoring the modes when a signal ends the process.

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp,
    tcsetattr,
};
use signal_hook::consts::{SIGHUP, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, Write, stderr, stdin};
use std::sync::OnceLock;

/// Terminal modes that a crash restores.
static BEFORE: OnceLock<Termios> = OnceLock::new();

/// Guard during which the terminal does not echo typed keys.
///
/// The keys stay in the input for the next prompt. Only Ctrl-C and similar keys act at once.
pub struct Unechoed(Option<Termios>);

impl Unechoed {
    /// Turns the echo off.
    pub fn begin() -> Unechoed {
        let Ok(before) = tcgetattr(stdin()) else { return Unechoed(None) };
        let mut silent = before.clone();
        let lines = LocalModes::ICANON | LocalModes::IEXTEN;
        silent.local_modes.remove(LocalModes::ECHO | LocalModes::ECHONL | lines);
        silent.input_modes.remove(InputModes::ICRNL);
        silent.special_codes[SpecialCodeIndex::VMIN] = 1;
        silent.special_codes[SpecialCodeIndex::VTIME] = 0;
        // Ignored: if the terminal refuses, it continues to echo.
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

/// Restores the terminal's current modes when SIGTERM, SIGHUP, SIGQUIT or a crash ends the process.
/// The line editor and [`Unechoed`] change the modes, and signals run no destructors.
pub fn restore_at_signals() -> io::Result<()> {
    let modes = tcgetattr(stdin())?;
    let before = BEFORE.get_or_init(|| modes);
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGQUIT])?;
    let watch = move || {
        for signal in signals.forever() {
            if is_in_foreground() {
                let _ = tcsetattr(stdin(), OptionalActions::Now, before);
                // Turns off the line editor's bracketed paste mode, and ends the line.
                let _ = stderr().write_all(b"\x1b[?2004l\r\n");
            }
            // Ends the process with the signal's default action.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch)?;
    Ok(())
}

/// Restores the modes that [`restore_at_signals`] saved, if it was called.
pub(super) fn restore() {
    if let Some(modes) = BEFORE.get() {
        let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
    }
}

/// Returns whether this process may change the terminal. A process in the background would be
/// stopped for trying.
fn is_in_foreground() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == rustix::process::getpgrp())
}
