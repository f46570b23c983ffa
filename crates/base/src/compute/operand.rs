//! Identifiers of operands: buffers, weights and row sets.

/// A buffer of the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// A weight matrix loaded into the executor, in the layout that its kernels need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightId(pub u32);

/// Which rows an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSet {
    /// All live rows of the step.
    All,
    /// The rows with requested logits, renumbered from 0.
    Selected,
    /// This number of slots per live row, ordered by row.
    Slots(usize),
}
