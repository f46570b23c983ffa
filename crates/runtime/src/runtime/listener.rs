//! Receiver of notes while a session opens and runs. Nothing in `runtime` prints.

/// Receives notes for the user.
pub trait Listener {
    /// Reports something that the user should know. The same words need to be shown only once.
    fn note(&self, text: &str);

    /// Reports a detail of level 1 or 2, for verbose output.
    fn detail(&self, level: u8, text: &str);

    /// Returns whether notes reach anybody: some cost a measurement.
    fn hears_notes(&self) -> bool;

    /// Begins to show how much of `bytes` is loaded, until what is returned is dropped; `None`
    /// where nobody looks.
    fn loading(&self, label: &str, bytes: u64) -> Option<Box<dyn LoadingBar>>;
}

/// Shows how far loading has come.
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
