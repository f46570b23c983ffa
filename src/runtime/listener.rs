//! Who is told what happens while a session opens and runs: this room prints nothing.

/// Hears what the user may want to know.
pub trait Listener {
    /// Something that the user should know; the same words need to be said only once.
    fn note(&self, text: &str);

    /// Something for those who want details: at level 1, or at level 2 for those who want more.
    fn detail(&self, level: u8, text: &str);

    /// Whether notes reach anybody: some cost a measurement.
    fn hears_notes(&self) -> bool;

    /// Begins to show how much of `bytes` is loaded, until what is returned is dropped; `None`
    /// where nobody looks.
    fn loading(&self, label: &str, bytes: u64) -> Option<Box<dyn Loading>>;
}

/// Shows how far loading has come.
pub trait Loading: Send {
    fn set(&self, bytes: u64);
}

/// Hears nothing: for trials of what might be.
pub struct Silence;

impl Listener for Silence {
    fn note(&self, _: &str) {}

    fn detail(&self, _: u8, _: &str) {}

    fn hears_notes(&self) -> bool {
        false
    }

    fn loading(&self, _: &str, _: u64) -> Option<Box<dyn Loading>> {
        None
    }
}
