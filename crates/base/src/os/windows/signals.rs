//! Interrupts and failed writes. Ctrl-C and Ctrl-Break correspond to SIGINT on Unix. Closing the
//! console, logging off and shutting down correspond to SIGTERM.

use super::{checked, process, terminal};
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use windows_sys::Win32::Foundation::ERROR_PIPE_NOT_CONNECTED;
use windows_sys::Win32::System::Console::{CTRL_BREAK_EVENT, CTRL_C_EVENT, SetConsoleCtrlHandler};
use windows_sys::Win32::System::Diagnostics::Debug::{
    SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX, SetErrorMode,
};

/// Prepares standard output and standard error. Enables colours in a console, and disables the
/// crash dialog. Runs first in `main`.
pub fn prepare_writes() {
    // SAFETY: a plain call on numbers.
    unsafe { SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX) };
    terminal::obey_sequences();
}

/// Does nothing: a write to a closed connection is an error on Windows.
pub fn survive_closed_connections() {}

/// Exit code after the reader of the output has gone, as a Unix shell shows SIGPIPE.
const UNREAD: u32 = 141;

/// Writes to an output. A closed pipe ends the process quietly.
///
/// Text for a console goes through the standard library, which writes UTF-16, regardless of the
/// code page.
pub fn write(output: &mut File, bytes: &[u8], is_terminal: bool) -> io::Result<()> {
    let written = if is_terminal {
        let mut console = io::stdout().lock();
        console.write_all(bytes).and_then(|()| console.flush())
    } else {
        output.write_all(bytes)
    };
    let is_unread = |error: &io::Error| {
        let code = error.raw_os_error().unwrap_or_default() as u32;
        error.kind() == io::ErrorKind::BrokenPipe || code == ERROR_PIPE_NOT_CONNECTED
    };
    if written.as_ref().is_err_and(is_unread) {
        process::end(UNREAD);
    }
    written
}

/// A function called for each event, with `true` if the process has to end. Returns whether it
/// handles the event.
type Handler = Box<dyn Fn(bool) -> bool + Send>;

static HANDLERS: Mutex<Vec<Handler>> = Mutex::new(Vec::new());

fn add(handler: Handler) -> io::Result<()> {
    let mut handlers = HANDLERS.lock().expect("no handler panics");
    if handlers.is_empty() {
        // SAFETY: the function has the signature of a handler and lives as long as the program.
        checked(unsafe { SetConsoleCtrlHandler(Some(on_event), 1) })?;
    }
    handlers.push(handler);
    Ok(())
}

/// Handles a console event, on a thread that the system creates for it.
unsafe extern "system" fn on_event(event: u32) -> i32 {
    let is_end = !matches!(event, CTRL_C_EVENT | CTRL_BREAK_EVENT);
    let handlers = HANDLERS.lock().expect("no handler panics");
    let is_handled = handlers.iter().fold(false, |any, handler| handler(is_end) || any);
    drop(handlers);
    if is_handled && is_end {
        // The system ends the process when this returns, or after some seconds.
        std::thread::sleep(Duration::from_secs(60));
    }
    is_handled.into()
}

/// Sets `stop` at the first event, and also `terminated` if the process has to end.
///
/// Any further event ends the process at once, with exit code 130 or 143.
pub fn flag_interrupts(stop: &Arc<AtomicBool>, terminated: &Arc<AtomicBool>) -> io::Result<()> {
    let (stop, terminated) = (stop.clone(), terminated.clone());
    add(Box::new(move |is_end| {
        if stop.load(Ordering::Relaxed) {
            process::end(if is_end { 143 } else { 130 });
        }
        terminated.store(is_end, Ordering::Relaxed);
        stop.store(true, Ordering::Release);
        true
    }))
}

/// Sets `stop` at each Ctrl-C, which then does not end the process.
pub fn flag_each_interrupt(stop: &Arc<AtomicBool>) -> io::Result<()> {
    let stop = stop.clone();
    add(Box::new(move |is_end| {
        stop.fetch_or(!is_end, Ordering::Relaxed);
        !is_end
    }))
}

/// Waits for an event.
pub struct Interrupts(Receiver<()>);

impl Interrupts {
    /// Starts recording events.
    pub fn watch() -> io::Result<Interrupts> {
        let (sender, receiver) = channel();
        add(Box::new(move |_| sender.send(()).is_ok()))?;
        Ok(Interrupts(receiver))
    }

    /// Waits for the first event.
    pub fn wait(self) {
        let _ = self.0.recv();
    }
}
