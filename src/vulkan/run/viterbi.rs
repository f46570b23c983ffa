//! Search for trellis codes on the device. It finds the same states as the processor, because all
//! costs are integers.

use super::VulkanExecutor;
use crate::compute::{BufferId, Executor};
use crate::tensor::encode::TileEncoder;
use crate::tensor::trellis::{STATES, TILE, Trellis};
use crate::tensor::viterbi::{STEPS, WEIGHTS, quarters};
use crate::vulkan::lower::Call;
use crate::vulkan::lower::kernels::{self, PathTrellis, Specialise, ViterbiPush, word};
use anyhow::Result;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Most tiles of a submission. By its instructions a laptop's GPU takes a tenth of a second.
const TILES: usize = 1024;
/// Bytes of the paths of all workgroups. A workgroup needs 32 KB for t4, and 512 KB for t2.
const TRACE: usize = 128 << 20;

/// A device that searches for codes. Callers take turns.
pub struct VulkanTiles {
    state: Mutex<State>,
}

struct State {
    device: VulkanExecutor,
    targets: BufferId, // int8 [TILES, 256], in quarters
    trace: BufferId,
    rows: BufferId, // u64 [TILES, 16]
    bytes: Vec<u8>,
}

impl VulkanTiles {
    pub fn new(mut device: VulkanExecutor) -> Result<VulkanTiles> {
        let targets = device.alloc("targets of tiles", TILES * WEIGHTS)?;
        let trace = device.alloc("paths of tiles", TRACE)?;
        let rows = device.alloc("rows of tiles", TILES * TILE * 8)?;
        let state = State { device, targets, trace, rows, bytes: Vec::new() };
        Ok(VulkanTiles { state: Mutex::new(state) })
    }
}

impl fmt::Debug for VulkanTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VulkanTiles")
    }
}

impl TileEncoder for VulkanTiles {
    fn encode(&self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()> {
        // A panic of another caller leaves no state that is read here.
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (wanted, rows) in wanted.chunks(TILES * WEIGHTS).zip(rows.chunks_mut(TILES)) {
            state.encode(trellis, wanted, rows)?;
        }
        Ok(())
    }
}

impl State {
    /// Encodes as many tiles as the buffers hold.
    fn encode(&mut self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()> {
        let State { device, targets, trace, rows: found, bytes } = self;
        bytes.clear();
        bytes.extend(wanted.iter().map(|t| quarters(*t) as u8));
        device.write(*targets, 0, bytes)?;
        let heads = STATES >> trellis.step;
        let groups = (TRACE / (STEPS * heads)).min(rows.len());
        // A thread takes four heads at a time.
        let threads = (heads / 4).min(256) as u32;
        let push = ViterbiPush {
            targets: device.address(*targets),
            trace: device.address(*trace),
            rows: device.address(*found),
            tiles: word(rows.len()),
            _gap: 0,
        };
        let mut call = Call::apart(&kernels::Viterbi { threads }, &push, [groups, 1, 1]);
        let Trellis { step, multiplier, .. } = trellis;
        call.constants.extend(PathTrellis { step, multiplier }.constants());
        device.run_calls(&[call])?;
        device.read(*found, 0, bytemuck::cast_slice_mut(rows))
    }
}
