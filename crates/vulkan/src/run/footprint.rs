//! Memory footprint of the executor: the rules of its allocations, without a device.

use super::upload;
use crate::device::DeviceInfo;
use crate::device::memory::{Cuts, check_piece, rounded};
use crate::lower::layout::sizes;
use crate::lower::sizes::{OwnSizes, key_block};
use anyhow::Result;
use gemma_base::compute::dry::{Footprint, Pieces};
use gemma_base::compute::{KvFormat, Plan, StepLayout};
use gemma_base::tensor::Format;

/// Bytes in addition to the arenas: staging while weights are loaded, and readback. On a discrete
/// GPU at least half of it is host memory, which leaves room for the driver's allocations.
const STAGING: u64 = upload::STAGING + READBACK + RESULTS;
/// Bytes of one readback.
pub const READBACK: u64 = 8 << 20;
/// Bytes of results that a pass copies to the host in its own submission: lists of the best tokens
/// of many rows.
pub const RESULTS: u64 = 1 << 20;
/// Returns the sizes of the blocks that are allocated for these pieces: of weights, then of
/// buffers.
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

/// Counts the device memory that an executor uses.
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

    fn staging(&self) -> u64 {
        STAGING
    }

    fn key_block(&self) -> fn(KvFormat) -> usize {
        key_block
    }

    fn lists_best(&self) -> bool {
        true
    }
}
