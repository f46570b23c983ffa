//! Sizes of the executor's own buffers.

use super::LAYER_BYTES;
use super::experts::choice_words;
use gemma_base::compute::{Attention, KvFormat, Op, PageRange, Plan, StepLayout, WeightId};

/// Total channels of partial attention results that fit. A power of two, like most numbers of rows,
/// heads, pages and channels.
const PARTIALS: usize = 16 << 20;
/// Most floats of partial results, because kernels count their bytes in 32 bits.
const MOST_PARTIALS: usize = 1 << 29;

/// Bytes of an epilogue's arguments, including the address of the counters.
pub const EPILOGUE_BYTES: usize = 128;
/// Number of counters for epilogues, see `finish.rs`.
pub const COUNTS: usize = 8192;

/// Returns the number of contiguous channels of a key: 16 bytes, which a lane loads at once.
pub fn key_block(format: KvFormat) -> usize {
    16 / format.bytes()
}

/// Returns the floats of `n` partial results of a head and a page: the channels, the largest score,
/// and the sum of exponentials.
pub fn partial_floats(n: usize, head_dim: usize) -> usize {
    n * (head_dim + 2)
}

/// Sizes of the executor's own buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnSizes {
    /// Bytes of gate, and of up.
    gate: usize,
    pub partial_floats: usize,
    /// Words of the choices of experts.
    choices: usize,
    /// Number of layers in a commit.
    layers: usize,
    /// Number of calls with an epilogue.
    pub epilogues: usize,
}

impl OwnSizes {
    /// Returns the sizes that a plan needs. `rows_of` returns the rows of a matrix.
    pub fn of(plan: &Plan, layout: StepLayout, rows_of: impl Fn(WeightId) -> usize) -> OwnSizes {
        let mut sizes = OwnSizes { layers: 1, ..OwnSizes::default() };
        let mut attentions = 0;
        let epilogue = |op: &Op| match op {
            Op::Attention(attention) => !attention.is_partial(),
            op => matches!(op, Op::Rope(_) | Op::Norm(_)),
        };
        // Doubled, because a plan with other buffers, such as one with an NPU, has other epilogues.
        // One more is for all layers whose rows are shared.
        sizes.epilogues = 1 + 2 * plan.dispatches.iter().filter(|d| epilogue(&d.op)).count();
        for op in plan.dispatches.iter().map(|d| &d.op) {
            match op {
                Op::GateUp(op) => {
                    sizes.gate = sizes.gate.max(layout.max_rows * rows_of(op.gate) * 4)
                }
                Op::Experts(op) if op.is_gated() => {
                    let slots = layout.max_rows.next_power_of_two() * op.used;
                    let floats = slots * rows_of(op.first()) / op.experts;
                    sizes.gate = sizes.gate.max(floats * 4);
                    sizes.choices = sizes.choices.max(choice_words(slots));
                }
                // One row needs a partial result per page. More rows are split as far as there is
                // room.
                Op::Attention(Attention { n_heads, kv, range: PageRange::All, .. }) => {
                    let one_row = n_heads * (kv.pages.count.next_power_of_two() + 1);
                    let n = one_row.max(PARTIALS / kv.head_dim);
                    let floats = partial_floats(n, kv.head_dim).min(MOST_PARTIALS);
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

    /// Returns the larger of both sizes.
    pub fn and(self, other: OwnSizes) -> OwnSizes {
        OwnSizes {
            gate: self.gate.max(other.gate),
            choices: self.choices.max(other.choices),
            partial_floats: self.partial_floats.max(other.partial_floats),
            layers: self.layers.max(other.layers),
            epilogues: self.epilogues.max(other.epilogues),
        }
    }

    /// Returns the label and bytes of each buffer, in the order of allocation.
    pub fn buffers(self) -> [(&'static str, usize); 7] {
        let (partials, layers, epilogues) =
            (self.partial_floats * 4, self.layers * LAYER_BYTES, self.epilogues * EPILOGUE_BYTES);
        [
            ("gate", self.gate),
            ("up", self.gate),
            ("attention partials", partials),
            ("layers", layers),
            ("epilogues", epilogues),
            ("counts", COUNTS * 4),
            ("choices of experts", self.choices * 4),
        ]
    }
}
