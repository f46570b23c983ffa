//! What the executor takes of a device's memory: by the same rules, without the device.

use super::call::LAYER_BYTES;
use super::device::DeviceInfo;
use super::finish::EPILOGUE_BYTES;
use super::layout::sizes;
use super::memory::{Cuts, check_piece, rounded};
use super::upload;
use crate::compute::dry::{Footprint, Pieces};
use crate::compute::{Attention, KvFormat, Op, PageRange, Plan, StepLayout, WeightId};
use crate::tensor::Format;
use anyhow::Result;

/// Bytes beside the arenas: staging while weights are loaded, and what comes back. Where a device
/// has memory of its own half of it and more is host memory, which leaves room for what the driver
/// takes for itself.
pub const STAGING: u64 = upload::STAGING + READBACK + RESULTS;
/// Bytes that come back at a time.
pub const READBACK: u64 = 8 << 20;
/// Bytes of a pass's results that are copied behind it in the same submission: lists of the best
/// tokens of many rows.
pub const RESULTS: u64 = 1 << 20;
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
            (self.partial_floats * 4, self.layers * LAYER_BYTES, self.epilogues * EPILOGUE_BYTES);
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

/// Sizes of the blocks that a device is asked for where these pieces are foreseen: of weights, then
/// of buffers.
pub fn blocks(pieces: &Pieces, device: &DeviceInfo) -> [Vec<u64>; 2] {
    [&pieces.weights, &pieces.buffers].map(|pieces| {
        let mut cuts = Cuts::default();
        cuts.expect(pieces, device.max_allocation);
        for piece in pieces {
            let opens = cuts.opens(*piece, device.max_allocation);
            cuts.take(*piece, opens);
        }
        cuts.blocks
    })
}

/// A device's share of memory, counted.
pub struct VulkanFootprint {
    device: DeviceInfo,
    /// Rows of each matrix.
    rows: Vec<usize>,
    own: Option<OwnSizes>,
}

impl VulkanFootprint {
    pub fn new(device: &DeviceInfo) -> VulkanFootprint {
        VulkanFootprint { device: device.clone(), rows: Vec::new(), own: None }
    }
}

impl Footprint for VulkanFootprint {
    fn weight(
        &mut self,
        label: &str,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<u64>> {
        format.check_cols(cols)?;
        self.rows.push(rows);
        let pieces = sizes(format, rows, cols)?.map(rounded);
        pieces.iter().try_for_each(|bytes| check_piece(&self.device, label, *bytes))?;
        Ok(pieces.to_vec())
    }

    fn buffer(&mut self, label: &str, bytes: usize) -> Result<u64> {
        let bytes = rounded(bytes as u64);
        check_piece(&self.device, label, bytes)?;
        Ok(bytes)
    }

    fn recorded(&mut self, plan: &Plan, layout: StepLayout) -> Result<Vec<u64>> {
        let needed = OwnSizes::of(plan, layout, |w| self.rows[w.0 as usize])
            .and(self.own.unwrap_or_default());
        if self.own == Some(needed) {
            return Ok(Vec::new());
        }
        self.own = Some(needed);
        needed.buffers().into_iter().map(|(label, bytes)| self.buffer(label, bytes)).collect()
    }

    fn max_rows(&self) -> usize {
        self.device.max_rows()
    }

    fn key_block(&self) -> fn(KvFormat) -> usize {
        key_block
    }

    fn lists_best(&self) -> bool {
        true
    }
}
