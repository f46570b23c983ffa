//! Signals: a closed pipe ends the process, the first Ctrl-C asks it to finish, the second ends it
//! at once.

use crate::error::no_thread;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What signals of failed writes do, called first thing in main.
///
/// SIGPIPE gets its default action back (Rust ignores it), so that `gemma ... | head` ends quietly.
/// SIGXFSZ is ignored: a write beyond a limit on file sizes then fails like one to a full disk, and
/// an output that is still in memory is not lost with it.
pub fn of_failed_writes() {
    #[cfg(unix)]
    // SAFETY: no thread exists yet; SIG_DFL and SIG_IGN install no code of ours.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Puts a descriptor that cannot be written where standard output is closed, so that writing to it
/// fails. Rust's runtime would put /dev/null there, and all that is written would be lost without a
/// word. Has to run before Rust's runtime does.
#[cfg(unix)]
pub extern "C" fn mark_closed_stdout() {
    // SAFETY: plain system calls on numbers; nobody uses descriptor 1 if it is closed.
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

/// Set by the first SIGINT or SIGTERM. Before `watch` both end the process at once: there is no
/// text yet to keep.
#[derive(Clone, Default)]
pub struct Interrupt {
    stop: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// From here on the first SIGINT or SIGTERM only sets a flag; any further one exits at once
    /// with 130 or 143.
    pub fn watch() -> Result<Self> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag::{register, register_conditional_shutdown};
        let interrupt = Interrupt::default();
        let install = || -> std::io::Result<()> {
            for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
                // Order matters: the exit looks at the flag before the next handler sets it.
                register_conditional_shutdown(signal, code, interrupt.stop.clone())?;
                register(signal, interrupt.stop.clone())?;
            }
            register(SIGTERM, interrupt.terminated.clone())?;
            Ok(())
        };
        install().context("installing signal handlers")?;
        Ok(interrupt)
    }

    /// The same, and the first signal calls `say` at once, on a thread of its own, which then ends.
    pub fn watch_saying(say: impl FnOnce() + Send + 'static) -> Result<(Self, JoinHandle<()>)> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        // Before the flags: whoever finds one set may wait for the thread.
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])
            .context("installing signal handlers")?;
        let interrupt = Self::watch()?;
        let wait = move || {
            if signals.forever().next().is_some() {
                say();
            }
        };
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(wait)
            .with_context(no_thread)?;
        Ok((interrupt, thread))
    }

    /// From here on SIGINT only sets the flag, which [`reset`](Self::reset) takes back: for a
    /// conversation that outlives its answers.
    pub fn watch_answers() -> Result<Self> {
        let interrupt = Interrupt::default();
        signal_hook::flag::register(signal_hook::consts::SIGINT, interrupt.stop.clone())
            .context("installing signal handlers")?;
        Ok(interrupt)
    }

    /// As if no signal had come.
    pub fn reset(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Set once a signal came.
    pub fn flag(&self) -> &AtomicBool {
        &self.stop
    }

    /// The exit code that the signal asks for.
    pub fn exit_code(&self) -> Option<u8> {
        let set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        set(&self.stop).then(|| if set(&self.terminated) { 143 } else { 130 })
    }
}
