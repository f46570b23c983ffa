//! Interrupts: the first Ctrl-C asks the process to finish, the second ends it at once.

use crate::error::no_thread;
use crate::os::signals as os;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const INSTALLING: &str = "installing signal handlers";

/// Flags that the first SIGINT or SIGTERM sets. Before `watch` both end the process at once: there
/// is no text yet to keep.
#[derive(Clone, Default)]
pub struct Interrupt {
    stop: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// From here on the first SIGINT or SIGTERM only sets a flag; any further one exits at once
    /// with 130 or 143.
    pub fn watch() -> Result<Self> {
        let interrupt = Interrupt::default();
        os::flag_interrupts(&interrupt.stop, &interrupt.terminated).context(INSTALLING)?;
        Ok(interrupt)
    }

    /// Watches like [`watch`](Self::watch); the first signal also calls `say` at once, on a thread
    /// of its own, which then ends.
    pub fn watch_saying(say: impl FnOnce() + Send + 'static) -> Result<(Self, JoinHandle<()>)> {
        // Before the flags: a caller that finds one set may wait for the thread.
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

    /// From here on SIGINT only sets the flag, which [`reset`](Self::reset) takes back: for a
    /// conversation that outlives its answers.
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
