//! Sizes of the buffers that the executor has beside those of the plans.

use super::finish::EPILOGUE_BYTES;
use crate::compute::{Attention, KvFormat, Op, PageRange, Plan, StepLayout, WeightId};

/// Room for partial results of attention.
const PARTIALS: usize = 64 << 20;

/// Counters of what the last workgroups of a call do, see `finish.rs`.
pub const COUNTS: usize = 8192;

/// Channels of a key that lie together: as many as a lane loads at once, 16 bytes.
pub fn key_block(format: KvFormat) -> usize {
    16 / format.bytes()
}

/// Sizes of the buffers beside those of the plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnSizes {
    /// Bytes of gate, and of up.
    gate: usize,
    pub partial_floats: usize,
    /// Layers of one commit.
    layers: usize,
    /// Calls that have an epilogue.
    pub epilogues: usize,
}

impl OwnSizes {
    /// What a plan needs.
    pub fn of(plan: &Plan, layout: StepLayout, rows_of: impl Fn(WeightId) -> usize) -> OwnSizes {
        let mut sizes = OwnSizes { partial_floats: PARTIALS / 4, layers: 1, gate: 0, epilogues: 0 };
        let mut attentions = 0;
        let epilogue = |op: &Op| match op {
            Op::Attention(attention) => !attention.is_partial(),
            op => matches!(op, Op::Rope(_) | Op::Norm(_)),
        };
        // Those of a plan with other buffers, such as one that an NPU takes part in, are others.
        sizes.epilogues = 2 * plan.dispatches.iter().filter(|d| epilogue(&d.op)).count();
        for op in plan.dispatches.iter().map(|d| &d.op) {
            match op {
                Op::GateUp(op) => {
                    sizes.gate = sizes.gate.max(layout.max_rows * rows_of(op.gate) * 4)
                }
                // One row needs a partial for every page; more rows are split only as far as there
                // is room.
                Op::Attention(Attention { n_heads, kv, range: PageRange::All, .. }) => {
                    let floats =
                        n_heads * (kv.pages.count.next_power_of_two() + 1) * (kv.head_dim + 2);
                    sizes.partial_floats = sizes.partial_floats.max(floats);
                    attentions += 1;
                }
                Op::Commit(commit) => sizes.layers = sizes.layers.max(commit.layers.len()),
                _ => {}
            }
        }
        sizes.layers = sizes.layers.max(attentions);
        sizes
    }

    /// Enough for both.
    pub fn and(self, other: OwnSizes) -> OwnSizes {
        OwnSizes {
            gate: self.gate.max(other.gate),
            partial_floats: self.partial_floats.max(other.partial_floats),
            layers: self.layers.max(other.layers),
            epilogues: self.epilogues.max(other.epilogues),
        }
    }

    /// Label and bytes of each, in the order of allocation.
    pub fn buffers(self) -> [(&'static str, usize); 6] {
        let (partials, layers, epilogues) =
            (self.partial_floats * 4, self.layers * 48, self.epilogues * EPILOGUE_BYTES);
        [
            ("gate", self.gate),
            ("up", self.gate),
            ("attention partials", partials),
            ("layers", layers),
            ("epilogues", epilogues),
            ("counts", COUNTS * 4),
        ]
    }
}
