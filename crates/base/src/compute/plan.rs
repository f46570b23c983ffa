//! The dispatch list: what one forward pass does, in order, as data. Executors run it; nothing here
//! knows a device.
//!
//! Parameters are plain values fixed at recording time. Everything that changes from step to step
//! (tokens, positions, tree, row counts) is read from the step buffer (`step.rs`), so a recorded
//! plan never changes.

use super::op::Op;
use super::operand::RowSet;

/// A recorded plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub u32);

/// Where in a model something belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// A table of which a pass looks up a few rows and reads no more.
    Embedding,
    Layer(u16),
    /// Also an embedding table that serves as the head.
    Head,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    pub op: Op,
    /// Name in the profile, such as `qkv` or `gate_up`.
    pub label: &'static str,
    pub layer: Option<u16>,
}

impl Dispatch {
    /// True where row r of the output depends on row r of the inputs alone: neighbours need no
    /// barrier between them.
    pub fn is_row_local(&self) -> bool {
        use Op::*;
        matches!(self.op, Embed(_) | Concat(_) | Norm(_) | Prepare(_) | Choose(_) | Combine(_))
    }

    /// True where matrices of weights are read whole.
    pub fn reads_weights(&self) -> bool {
        matches!(self.op, Op::Linear(_) | Op::GateUp(_))
    }

    /// The rows it works on.
    pub fn rows(&self) -> RowSet {
        match &self.op {
            Op::Norm(norm) => norm.rows,
            Op::Prepare(prepare) => prepare.rows,
            Op::Linear(linear) => linear.rows,
            Op::Cap(_) | Op::Best(_) => RowSet::Selected,
            _ => RowSet::All,
        }
    }
}

/// A whole pass.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub dispatches: Vec<Dispatch>,
}

impl Plan {
    pub fn push(&mut self, label: &'static str, layer: Option<u16>, op: Op) {
        self.dispatches.push(Dispatch { op, label, layer });
    }
}
