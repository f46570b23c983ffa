//! The console's modes: escape sequences, and echo.

use std::io::{self, stderr, stdin, stdout};
use std::os::windows::io::AsRawHandle;
use std::sync::OnceLock;
use windows_sys::Win32::Foundation::HANDLE;
use windows_sys::Win32::System::Console::{
    CONSOLE_MODE, ENABLE_ECHO_INPUT, ENABLE_VIRTUAL_TERMINAL_PROCESSING, GetConsoleMode,
    SetConsoleMode,
};

/// Modes of standard input that a crash restores.
static BEFORE: OnceLock<CONSOLE_MODE> = OnceLock::new();

/// Returns the modes of a console; `None` if the handle is not a console.
fn modes(handle: HANDLE) -> Option<CONSOLE_MODE> {
    let mut modes = 0;
    // SAFETY: the call writes to `modes` only; a handle that is not a console is an error.
    (unsafe { GetConsoleMode(handle, &mut modes) } != 0).then_some(modes)
}

fn set_modes(handle: HANDLE, modes: CONSOLE_MODE) {
    // SAFETY: a plain call. A console that refuses keeps its modes.
    unsafe { SetConsoleMode(handle, modes) };
}

/// Enables escape sequences for colours and cursors on standard output and standard error.
pub(super) fn obey_sequences() {
    for handle in [stdout().as_raw_handle(), stderr().as_raw_handle()] {
        if let Some(modes) = modes(handle) {
            set_modes(handle, modes | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
        }
    }
}

/// Guard during which the console does not echo typed keys; they wait for the next prompt.
pub struct Unechoed(Option<CONSOLE_MODE>);

impl Unechoed {
    /// Turns the echo off.
    pub fn begin() -> Unechoed {
        let handle = stdin().as_raw_handle();
        let before = modes(handle);
        if let Some(before) = before {
            set_modes(handle, before & !ENABLE_ECHO_INPUT);
        }
        Unechoed(before)
    }
}

impl Drop for Unechoed {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            set_modes(stdin().as_raw_handle(), before);
        }
    }
}

/// Saves the console's current modes, which a crash restores. An event that ends the process also
/// closes the console, so it restores nothing.
pub fn restore_at_signals() -> io::Result<()> {
    if let Some(modes) = modes(stdin().as_raw_handle()) {
        BEFORE.get_or_init(|| modes);
    }
    Ok(())
}

/// Restores the modes that [`restore_at_signals`] saved, if it was called.
pub(super) fn restore() {
    if let Some(modes) = BEFORE.get() {
        set_modes(stdin().as_raw_handle(), *modes);
    }
}
