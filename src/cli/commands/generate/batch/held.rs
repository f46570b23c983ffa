//! Answers of an earlier run that a file holds.

use std::collections::{HashMap, VecDeque};

/// A line of the file: an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAnswer {
    /// Where it begins, in bytes.
    pub at: u64,
    /// Bytes with the line break.
    pub len: u64,
    pub failed: bool,
}

/// Answers that a file holds, by the record's id, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Done(pub HashMap<String, VecDeque<HeldAnswer>>);

impl Done {
    /// The next answer to a record of this id.
    pub fn take(&mut self, id: &serde_json::Value) -> Option<HeldAnswer> {
        self.0.get_mut(&id.to_string())?.pop_front()
    }
}
