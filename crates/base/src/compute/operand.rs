//! Names of what operations work on: buffers, weights and rows.

/// A buffer of the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// A weight matrix loaded into the executor, in whatever layout its kernels want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightId(pub u32);

/// Which rows an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSet {
    /// All live rows of the step.
    All,
    /// The rows whose logits were asked for, renumbered from 0.
    Selected,
    /// This number of slots of each live row: those of the first row, then of the second.
    Slots(usize),
}
