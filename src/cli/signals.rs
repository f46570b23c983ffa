//! Signals: a closed pipe ends the process, the first Ctrl-C asks it to finish, the second ends it at once.

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Gives SIGPIPE its default action back (Rust ignores it), so that `gemma ... | head` ends quietly.
pub fn default_sigpipe() {
    #[cfg(unix)]
    // SAFETY: called first thing in main, before any thread exists; SIG_DFL installs no code of ours.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// Set by the first SIGINT or SIGTERM. Before `watch` both end the process at once: there is no text yet to keep.
#[derive(Clone, Default)]
pub struct Interrupt {
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// From here on the first SIGINT or SIGTERM only sets a flag; a second one of its kind exits at once with 130 or 143.
    pub fn watch() -> Result<Self> {
        let interrupt = Interrupt::default();
        for (signal, code, flag) in [
            (signal_hook::consts::SIGINT, 130, &interrupt.interrupted),
            (signal_hook::consts::SIGTERM, 143, &interrupt.terminated),
        ] {
            // Order matters: the exit looks at the flag before the second handler sets it.
            signal_hook::flag::register_conditional_shutdown(signal, code, flag.clone())
                .context("installing a signal handler")?;
            signal_hook::flag::register(signal, flag.clone()).context("installing a signal handler")?;
        }
        Ok(interrupt)
    }

    /// True once a signal came.
    pub fn is_set(&self) -> bool {
        self.exit_code().is_some()
    }

    /// The exit code that the signal asks for.
    pub fn exit_code(&self) -> Option<u8> {
        if self.terminated.load(Ordering::Relaxed) {
            return Some(143);
        }
        self.interrupted.load(Ordering::Relaxed).then_some(130)
    }
}
