//! Dense networks, such as image towers, on a device. See [`gemma_base::compute::dense`].
//!
//! Matrices stay on the device in their file's type. Registers and scores also stay if they are
//! small for the device. Products, norms and softmax use the order of the processor's kernels.
//! Results have the processor's bits if the device fuses multiply-adds and rounds divisions and
//! roots correctly.

mod calls;
#[cfg(test)]
mod tests;

use super::VulkanExecutor;
use super::workgroups::{Unordered, Workgroups};
use crate::device::barrier::{barrier, host_barrier, kernel_barrier};
use crate::device::memory::{Arena, ArenaUse, Block, Place, Span};
use crate::lower::Call;
use crate::lower::hazards::Hazards;
use anyhow::{Context, Result};
use ash::vk;
use calls::{DenseMatrix, Places, TILE};
use gemma_base::compute::dense::{
    DenseDevice, DenseNetwork, DenseOp, DenseValues, DenseWeights, MatrixNumber,
};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes per part of an upload, and number of parts in flight.
const PART: usize = 16 << 20;
const PARTS: usize = 2;
/// Threads that copy to host-visible memory.
const COPIERS: usize = 4;
/// Most bytes of attention scores, and their largest share of the device's memory (as a divisor).
const SCORES: u64 = 1 << 30;
const SHARE_OF_SCORES: u64 = 16;
/// Share of the device's memory (as a divisor) that registers and scores may keep between images.
const SHARE_OF_ROOM: u64 = 32;
/// Multiply-adds of the first submission. Later ones double in size until one takes [`LONG`],
/// because drivers treat a submission of seconds as a device loss.
const FIRST_WORK: u64 = 2 << 30;
const LONG: Duration = Duration::from_millis(80);

/// A device that runs dense networks, one after the other.
pub struct VulkanDense {
    state: Mutex<DenseState>,
}

/// The matrices of a network.
struct Resident {
    identity: [u8; 32],
    arena: Arena,
    matrices: Vec<DenseMatrix>,
}

struct DenseState {
    // Dropped first: it waits for the device.
    device: VulkanExecutor,
    resident: Option<Resident>,
    /// Registers, vectors, scores and factors of the network that ran last.
    room: Vec<Block>,
    up: Block,
    down: Option<Block>,
    /// Submissions that read each part of `up`.
    sent: [u64; PARTS],
    /// Multiply-adds per submission.
    work: u64,
    /// Most bytes of attention scores.
    most_scores: u64,
}

impl fmt::Debug for VulkanDense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VulkanDense")
    }
}

impl VulkanDense {
    /// Prepares a device. It may be shared with other executors of this process.
    ///
    /// # Errors
    /// A [`Fault`] if there is no room for staging.
    pub fn new(device: VulkanExecutor) -> Result<VulkanDense> {
        let up = Block::new(&device.gpu, "staging", (PARTS * PART) as u64, Place::Upload)?;
        let (resident, room, down, sent) = (None, Vec::new(), None, [0; PARTS]);
        let info = device.info();
        let most_scores = SCORES.min(info.memory / SHARE_OF_SCORES).min(info.max_allocation);
        let work = FIRST_WORK;
        let state = DenseState { device, resident, room, up, down, sent, work, most_scores };
        Ok(VulkanDense { state: Mutex::new(state) })
    }

    /// Locks the state. It stays usable after a panic, because each run writes everything it reads.
    fn lock(&self) -> MutexGuard<'_, DenseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DenseDevice for VulkanDense {
    fn load(&self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<u64> {
        let mut state = self.lock();
        state.load(network, weights)?;
        Ok(state.resident.as_ref().map_or(0, |resident| resident.arena.allocated()))
    }

    fn run(&self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<Vec<f32>> {
        let mut state = self.lock();
        state.load(network, weights)?;
        let result = state.run(network)?;
        state.release();
        Ok(result)
    }
}

/// Copies with several threads.
fn copy(to: &mut [u8], from: &[u8]) {
    let part = from.len().div_ceil(COPIERS).max(1 << 20);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// Returns the number of query rows with scores that fit in `most` bytes, a multiple of [`TILE`],
/// and the bytes of the scores and factors of these rows.
fn rows_together(network: &DenseNetwork, most: u64) -> (usize, [u64; 2]) {
    let (mut rows, mut heads) = (1, 0);
    for op in &network.ops {
        if let DenseOp::Attention(attention) = op {
            rows = rows.max(network.rows(attention.q));
            heads = heads.max(attention.heads.queries);
        }
    }
    let line = 4 * (rows * heads) as u64;
    let fit = (most / line.max(1)) as usize / TILE * TILE;
    let tile = fit.max(TILE).min(rows);
    (tile, [line * tile as u64, 4 * (heads * tile) as u64])
}

impl DenseState {
    /// Uploads the matrices of a network and compiles its kernels, unless they are on the device.
    fn load(&mut self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<()> {
        if self.resident.as_ref().is_some_and(|known| known.identity == network.identity) {
            return Ok(());
        }
        self.resident = None;
        self.settle()?;
        let numbers = || (0..network.matrices.len()).map(MatrixNumber);
        let mut arena = Arena::new(&self.device.gpu, ArenaUse::Weights);
        arena.expect(&numbers().map(|matrix| weights.bytes(matrix)).collect::<Vec<u64>>());
        let mut matrices = Vec::new();
        for matrix in numbers() {
            let values = weights.read(matrix)?;
            let (bytes, kind) = bytes_of(&values);
            let Span { block, offset, address, .. } =
                arena.alloc("the image tower", bytes.len() as u64)?;
            matrices.push(DenseMatrix { address, kind });
            self.send(arena.blocks[block].buffer, offset, bytes)?;
        }
        self.settle()?;
        // Compiled here, so that the first image need not wait for it.
        let places = Places {
            network,
            registers: &vec![0; network.registers.len()],
            matrices: &matrices,
            vectors: &vec![0; network.vectors.len()],
            scores: 0,
            factors: 0,
            tile: rows_together(network, self.most_scores).0,
        };
        self.device.kernels(&places.calls())?;
        self.resident = Some(Resident { identity: network.identity, arena, matrices });
        Ok(())
    }

    /// Waits for all uploads.
    fn settle(&self) -> Result<()> {
        self.sent.into_iter().try_for_each(|part| self.device.queue.wait(part))
    }

    /// Copies bytes to a buffer on the device. While one part is in flight, the next is written.
    fn send(&mut self, to: vk::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        for (i, bytes) in bytes.chunks(PART).enumerate() {
            let slot = if self.sent[0] <= self.sent[1] { 0 } else { 1 };
            self.device.queue.wait(self.sent[slot])?;
            let from = (slot * PART) as u64;
            // SAFETY: the wait above ended the copy of the previous content.
            copy(unsafe { self.up.bytes(from, bytes.len()) }, bytes);
            let size = bytes.len() as u64;
            let dst_offset = offset + (i * PART) as u64;
            let range = [vk::BufferCopy { src_offset: from, dst_offset, size }];
            // SAFETY: the target has room for the bytes, and callers wait before they drop it.
            self.sent[slot] = self.device.queue.once(|device, commands| unsafe {
                barrier(device, commands);
                device.cmd_copy_buffer(commands, self.up.buffer, to, &range);
                barrier(device, commands);
            })?;
        }
        Ok(())
    }

    /// Makes block `i` of the room at least this large.
    fn reserve(&mut self, i: usize, bytes: u64) -> Result<()> {
        let place = |what, bytes| Block::new(&self.device.gpu, what, bytes, Place::Device);
        let bytes = bytes.max(256);
        if i == self.room.len() {
            self.room.push(place("rows of an image tower", bytes)?);
        } else if self.room[i].size < bytes {
            self.room[i] = place("rows of an image tower", bytes)?;
        }
        Ok(())
    }

    /// Frees the room unless it is small for the device. No command uses it after a run.
    fn release(&mut self) {
        let bytes: u64 = self.room.iter().map(|block| block.size).sum();
        if bytes > self.device.info().memory / SHARE_OF_ROOM {
            self.room.clear();
        }
    }

    fn run(&mut self, network: &DenseNetwork) -> Result<Vec<f32>> {
        let count = network.registers.len();
        let (tile, [scores, factors]) = rows_together(network, self.most_scores);
        self.settle()?;
        for (i, [rows, width]) in network.registers.iter().enumerate() {
            self.reserve(i, 4 * (rows * width) as u64)?;
        }
        self.reserve(count, scores)?;
        self.reserve(count + 1, factors)?;
        // Each vector starts at a multiple of 4 floats.
        let mut packed: Vec<f32> = Vec::new();
        let mut offsets = Vec::new();
        for vector in &network.vectors {
            offsets.push(4 * packed.len() as u64);
            packed.extend(vector);
            packed.resize(packed.len().next_multiple_of(4), 0.0);
        }
        self.reserve(count + 2, 4 * packed.len() as u64)?;
        self.send(self.room[count + 2].buffer, 0, bytemuck::cast_slice(&packed))?;
        for (register, values) in &network.inputs {
            self.send(self.room[register.0].buffer, 0, bytemuck::cast_slice(values))?;
        }
        let registers: Vec<u64> = self.room[..count].iter().map(|block| block.address).collect();
        let start = self.room[count + 2].address;
        let places = Places {
            network,
            registers: &registers,
            matrices: &self.resident.as_ref().context("loaded before")?.matrices,
            vectors: &offsets.iter().map(|offset| start + offset).collect::<Vec<u64>>(),
            scores: self.room[count].address,
            factors: self.room[count + 1].address,
            tile,
        };
        let calls = places.calls();
        self.submit(&calls)?;
        self.read(network)
    }

    /// Runs calls in order, in submissions of limited work.
    fn submit(&mut self, calls: &[Call]) -> Result<()> {
        let (layout, pipelines) = self.device.kernels(calls)?;
        let shuffle = self.device.shuffle;
        let mut from = 0;
        while from < calls.len() {
            let (mut end, mut work) = (from, 0);
            while end < calls.len() && (end == from || work + calls[end].work <= self.work) {
                work += calls[end].work;
                end += 1;
            }
            let start = Instant::now();
            let done = self.device.queue.once(|device, commands| {
                barrier(device, commands);
                let (mut parts, mut hazards) = (Unordered::new(shuffle), Hazards::default());
                for (call, pipeline) in calls[from..end].iter().zip(&pipelines[from..end]) {
                    if hazards.meets(call) {
                        parts.record(device, commands, layout);
                        kernel_barrier(device, commands);
                    }
                    parts.add(*pipeline, call, Workgroups::all(call));
                }
                parts.record(device, commands, layout);
            })?;
            self.device.queue.wait(done)?;
            let elapsed = start.elapsed();
            match elapsed < LONG {
                true if 2 * work > self.work => self.work *= 2,
                false if elapsed > 2 * LONG => self.work = (self.work / 2).max(FIRST_WORK / 16),
                _ => {}
            }
            from = end;
        }
        Ok(())
    }

    /// Reads the output of a network.
    fn read(&mut self, network: &DenseNetwork) -> Result<Vec<f32>> {
        let [rows, width] = network.registers[network.output.0];
        let mut values = vec![0f32; rows * width];
        let size = 4 * values.len() as u64;
        if self.down.as_ref().is_none_or(|down| down.size < size) {
            let what = "soft tokens of an image";
            self.down = Some(Block::new(&self.device.gpu, what, size, Place::Readback)?);
        }
        let down = self.down.as_ref().context("made above")?;
        let from = self.room[network.output.0].buffer;
        let range = [vk::BufferCopy { src_offset: 0, dst_offset: 0, size }];
        // SAFETY: both blocks have room for the output, and the wait below ends the copy.
        let done = self.device.queue.once(|device, commands| unsafe {
            barrier(device, commands);
            device.cmd_copy_buffer(commands, from, down.buffer, &range);
            host_barrier(device, commands);
        })?;
        self.device.queue.wait(done)?;
        let bytes = bytemuck::cast_slice_mut::<f32, u8>(&mut values);
        // SAFETY: the wait above ended the copy.
        bytes.copy_from_slice(unsafe { down.bytes(0, bytes.len()) });
        Ok(values)
    }
}

/// Returns the bytes of values, and their B_TYPE in `dense_product`.
fn bytes_of<'a>(values: &'a DenseValues<'_>) -> (&'a [u8], u32) {
    match values {
        DenseValues::F32(values) => (bytemuck::cast_slice(values), 0),
        DenseValues::F16(bytes) => (bytes, 1),
        DenseValues::Bf16(bytes) => (bytes, 2),
    }
}
