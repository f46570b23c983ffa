//! The dispatch list: the operations of one forward pass, in order, as data. Executors run it. This
//! module knows no device.
//!
//! Parameters are plain values fixed at recording time. Values that change from step to step
//! (tokens, positions, tree, row counts) are in the step buffer (`step.rs`), so a recorded plan
//! never changes.

use super::op::Op;
use super::operand::RowSet;

/// A recorded plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub u32);

/// The part of a model that a matrix belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// An embedding table. A pass reads only single rows of it.
    Embedding,
    Layer(u16),
    /// The output head, also if it is the embedding table.
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
    /// Returns whether row r of the output depends only on row r of the inputs. Two such dispatches
    /// in sequence need no barrier between them.
    pub fn is_row_local(&self) -> bool {
        use Op::*;
        matches!(self.op, Embed(_) | Concat(_) | Norm(_) | Prepare(_) | Choose(_) | Combine(_))
    }

    /// Returns whether the dispatch reads whole weight matrices.
    pub fn reads_weights(&self) -> bool {
        matches!(self.op, Op::Linear(_) | Op::GateUp(_))
    }

    /// Returns the row set that the dispatch works on.
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

/// All dispatches of a pass.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub dispatches: Vec<Dispatch>,
}

impl Plan {
    pub fn push(&mut self, label: &'static str, layer: Option<u16>, op: Op) {
        self.dispatches.push(Dispatch { op, label, layer });
    }
}
