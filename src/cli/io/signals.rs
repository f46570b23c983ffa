//! Interrupts: the first Ctrl-C asks the process to finish, the second ends it at once.

use crate::error::no_thread;
use crate::os::signals as os;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const INSTALLING: &str = "installing signal handlers";

/// Flags that the first SIGINT or SIGTERM sets.
///
/// Before `watch`, both signals end the process at once: there is no text yet to keep.
#[derive(Clone, Default)]
pub struct Interrupt {
    stop: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// Starts watching: the first SIGINT or SIGTERM only sets a flag.
    ///
    /// A further one exits at once with 130 or 143.
    pub fn watch() -> Result<Self> {
        let interrupt = Interrupt::default();
        os::flag_interrupts(&interrupt.stop, &interrupt.terminated).context(INSTALLING)?;
        Ok(interrupt)
    }

    /// Watches like [`watch`](Self::watch).
    ///
    /// The first signal also calls `say` on another thread, which then ends.
    pub fn watch_saying(say: impl FnOnce() + Send + 'static) -> Result<(Self, JoinHandle<()>)> {
        // This comes before the flags, because a caller that finds a flag set may wait for the
        // thread.
        let signals = os::Interrupts::watch().context(INSTALLING)?;
        let interrupt = Self::watch()?;
        let wait = move || {
            signals.wait();
            say();
        };
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(wait)
            .with_context(no_thread)?;
        Ok((interrupt, thread))
    }

    /// Starts watching SIGINT only: it sets the flag, and [`reset`](Self::reset) clears it.
    ///
    /// This is for a chat, which continues after an interrupted answer.
    pub fn watch_answers() -> Result<Self> {
        let interrupt = Interrupt::default();
        os::flag_each_interrupt(&interrupt.stop).context(INSTALLING)?;
        Ok(interrupt)
    }

    /// Clears the flag.
    pub fn reset(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Returns the flag that a signal sets.
    pub fn flag(&self) -> &AtomicBool {
        &self.stop
    }

    /// Returns the exit code that the signal asks for.
    pub fn exit_code(&self) -> Option<u8> {
        let set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        set(&self.stop).then(|| if set(&self.terminated) { 143 } else { 130 })
    }
}
