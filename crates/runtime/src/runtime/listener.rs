//! Receiver of notes while a session opens and runs. `runtime` itself prints nothing.

/// Receives notes for the user.
pub trait Listener {
    /// Reports something that the user should know. Repeated texts need to be shown only once.
    fn note(&self, text: &str);

    /// Reports a detail of level 1 or 2, for verbose output.
    fn detail(&self, level: u8, text: &str);

    /// Returns whether notes are shown, because some notes require a measurement.
    fn hears_notes(&self) -> bool;

    /// Starts a progress display for loading `bytes`, which ends when the result is dropped.
    /// Returns `None` if nothing is displayed.
    fn loading(&self, label: &str, bytes: u64) -> Option<Box<dyn LoadingBar>>;
}

/// A progress display for loading.
pub trait LoadingBar: Send {
    fn set(&self, bytes: u64);
}

/// Drops all notes.
pub struct Silence;

impl Listener for Silence {
    fn note(&self, _: &str) {}

    fn detail(&self, _: u8, _: &str) {}

    fn hears_notes(&self) -> bool {
        false
    }

    fn loading(&self, _: &str, _: u64) -> Option<Box<dyn LoadingBar>> {
        None
    }
}
