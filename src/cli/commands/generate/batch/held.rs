//! Answers of an earlier run in an output file.

use std::collections::{HashMap, VecDeque};

/// An answer, which is a line of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAnswer {
    /// Offset of its first byte in the file.
    pub at: u64,
    /// Length in bytes, including the line break.
    pub len: u64,
    pub failed: bool,
}

/// Answers in a file by the record's id, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Done(pub HashMap<String, VecDeque<HeldAnswer>>);

impl Done {
    /// Removes and returns the next answer to a record with this id.
    pub fn take(&mut self, id: &serde_json::Value) -> Option<HeldAnswer> {
        self.0.get_mut(&id.to_string())?.pop_front()
    }
}
