//! Device memory: arenas of large blocks that are divided into pieces, and host memory that both
//! sides can access.

use super::{DeviceInfo, Gpu, failed};
use anyhow::Result;
use ash::vk;
use gemma_base::error::{Fault, Kind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Alignment of an arena's pieces in bytes: a cache line of any device, and the widest load.
const ALIGN: u64 = 256;
/// Largest size of a block, unless one piece is larger.
const BLOCK: u64 = 1 << 30;

/// One allocation with one buffer over it.
pub struct Block {
    gpu: Arc<Gpu>,
    memory: vk::DeviceMemory,
    pub buffer: vk::Buffer,
    pub address: u64,
    pub size: u64,
    /// Bytes that were requested from the device for it.
    requested: u64,
    /// Host mapping; null if there is none.
    pub host: *mut u8,
}

/// Total bytes requested from a device.
#[derive(Debug, Default)]
pub struct Requested {
    live: AtomicU64,
    peak: AtomicU64,
}

impl Requested {
    fn add(&self, bytes: u64) {
        let now = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the bytes held now, and the peak.
    pub fn bytes(&self) -> (u64, u64) {
        (self.live.load(Ordering::Relaxed), self.peak.load(Ordering::Relaxed))
    }
}

// SAFETY: the mapping is plain memory that no thread owns.
unsafe impl Send for Block {}
// SAFETY: a shared block's mapping is only accessible through `Block::bytes`, which is unsafe: its
// callers uphold exclusive access.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates a block of this kind. `what` is its name in errors.
    pub fn new(gpu: &Arc<Gpu>, what: &str, size: u64, kind: Place) -> Result<Block> {
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::INDIRECT_BUFFER;
        let info = vk::BufferCreateInfo::default().size(size).usage(usage);
        let device = &gpu.device;
        // SAFETY: `info` is complete; the buffer is freed below or by `drop`.
        let buffer = unsafe { device.create_buffer(&info, None) }.map_err(|e| failed(what, e))?;
        // SAFETY: the buffer was created above.
        let needs = unsafe { device.get_buffer_memory_requirements(buffer) };
        let mut flags =
            vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let mut last = vk::Result::ERROR_OUT_OF_DEVICE_MEMORY;
        for index in kind.types(&gpu.memory_types, needs.memory_type_bits) {
            let allocate = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(index)
                .push_next(&mut flags);
            // SAFETY: `types` only returns types that the buffer supports.
            match unsafe { device.allocate_memory(&allocate, None) } {
                Ok(memory) => {
                    gpu.requested.add(needs.size);
                    let (gpu, requested, host) = (gpu.clone(), needs.size, std::ptr::null_mut());
                    let made = Block { gpu, memory, buffer, address: 0, size, requested, host };
                    return made.bind(what, kind != Place::Device);
                }
                Err(e) => last = e,
            }
        }
        // SAFETY: nothing uses the buffer.
        unsafe { device.destroy_buffer(buffer, None) };
        match last {
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                let what = format!("{} has no room for {what}: {size} bytes more", gpu.info.name);
                Err(Fault::new(Kind::Memory, what)
                    .help(
                        "give fewer --gpu-layers, lower --ctx-size, \
                        use a smaller model (gemma quantize --target-size), or --device cpu",
                    )
                    .into())
            }
            other => Err(failed(what, other)),
        }
    }

    fn bind(mut self, what: &str, map: bool) -> Result<Block> {
        let device = &self.gpu.device;
        // SAFETY: `new` created both, the memory fits the buffer, and `self` frees them.
        unsafe {
            device.bind_buffer_memory(self.buffer, self.memory, 0).map_err(|e| failed(what, e))?;
            let info = vk::BufferDeviceAddressInfo::default().buffer(self.buffer);
            self.address = device.get_buffer_device_address(&info);
            if map {
                let at =
                    device.map_memory(self.memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
                self.host = at.map_err(|e| failed(what, e))?.cast();
            }
        }
        Ok(self)
    }

    /// Returns the host's view of `len` bytes.
    ///
    /// # Safety
    /// The device neither reads nor writes these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes(&self, offset: u64, len: usize) -> &mut [u8] {
        let end = offset.checked_add(len as u64);
        assert!(!self.host.is_null() && end.is_some_and(|end| end <= self.size));
        // SAFETY: inside the mapping, checked above; exclusive by the contract of this function.
        unsafe { std::slice::from_raw_parts_mut(self.host.add(offset as usize), len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the owner waits for the device before it drops a block.
        unsafe {
            self.gpu.device.destroy_buffer(self.buffer, None);
            self.gpu.device.free_memory(self.memory, None);
        }
        self.gpu.requested.live.fetch_sub(self.requested, Ordering::Relaxed);
    }
}

/// Kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Device memory, fast for kernels.
    Device,
    /// Host memory that the host writes and the device reads. Cached, because the system copies
    /// files into it.
    Upload,
    /// Host memory that the device writes and the host reads.
    Readback,
}

impl Place {
    /// Returns the suitable memory types, the best first.
    fn types(self, all: &vk::PhysicalDeviceMemoryProperties, allowed: u32) -> Vec<u32> {
        use vk::MemoryPropertyFlags as F;
        let shared = F::HOST_VISIBLE | F::HOST_COHERENT;
        let wishes = match self {
            Place::Device => [F::DEVICE_LOCAL, F::empty()],
            Place::Upload | Place::Readback => [shared | F::HOST_CACHED, shared],
        };
        let types = &all.memory_types[..all.memory_type_count as usize];
        let mut list = Vec::new();
        for wish in wishes {
            for (i, t) in types.iter().enumerate() {
                let fits = allowed >> i & 1 == 1 && t.property_flags.contains(wish);
                // Memory for other purposes, such as protected memory, has additional flags.
                let plain = !t
                    .property_flags
                    .intersects(F::PROTECTED | F::LAZILY_ALLOCATED | F::DEVICE_COHERENT_AMD);
                if fits && plain && !list.contains(&(i as u32)) {
                    list.push(i as u32);
                }
            }
        }
        list
    }
}

/// A piece of an arena.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub arena: ArenaUse,
    pub block: usize,
    pub offset: u64,
    pub bytes: u64,
    pub address: u64,
}

/// Purpose of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaUse {
    Weights,
    Buffers,
}

/// Returns the allocated bytes of a piece of this size.
pub fn rounded(bytes: u64) -> u64 {
    bytes.max(4).next_multiple_of(ALIGN)
}

/// Fails for a piece that is larger than the device's largest allocation.
pub fn check_piece(device: &DeviceInfo, what: &str, bytes: u64) -> Result<()> {
    let most = device.max_allocation;
    if bytes <= most {
        return Ok(());
    }
    let what =
        format!("{what} takes {bytes} bytes, {} gives at most {most} at a time", device.name);
    Err(Fault::new(Kind::Memory, what).help("lower --ctx-size, or use --device cpu").into())
}

/// Returns the sizes of blocks that these pieces fill in order. A block only exceeds `most` for a
/// larger piece.
fn blocks_for(pieces: &[u64], most: u64) -> VecDeque<u64> {
    let mut blocks = VecDeque::new();
    for piece in pieces {
        match blocks.back_mut() {
            Some(last) if *last + piece <= most => *last += piece,
            _ => blocks.push_back(*piece),
        }
    }
    blocks
}

/// Bookkeeping of an arena without its memory: the block of each piece, and the sizes of new
/// blocks.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    /// Sizes of the blocks so far.
    pub blocks: Vec<u64>,
    /// Sizes of future blocks, if their pieces are known.
    expected: VecDeque<u64>,
    is_planned: bool,
    /// Used bytes of the last block.
    taken: u64,
    /// Bytes of all pieces.
    pub total: u64,
}

impl Cuts {
    /// Plans blocks for these pieces in this order, so that no byte is wasted. `most` is the
    /// largest allocation in bytes.
    pub fn expect(&mut self, pieces: &[u64], most: u64) {
        self.expected = blocks_for(pieces, BLOCK.min(most));
        self.is_planned = true;
    }

    /// Returns the size of the new block that a piece of `bytes` needs; `None` if the last block
    /// has room.
    pub fn opens(&self, bytes: u64, most: u64) -> Option<u64> {
        if self.blocks.last().is_some_and(|size| self.taken + bytes <= *size) {
            return None;
        }
        // Without a plan, block sizes double, so that small models get small blocks. With a plan,
        // an unplanned piece gets a block of its own size.
        let step = || match self.is_planned {
            true => bytes,
            false => self.total.next_power_of_two().clamp(1 << 22, BLOCK).min(most),
        };
        Some(self.expected.front().copied().unwrap_or_else(step).max(bytes))
    }

    /// Allocates a piece in the last block, or in the block that was just opened for it. Returns
    /// the block's index and the offset in it.
    pub fn take(&mut self, bytes: u64, opened: Option<u64>) -> (usize, u64) {
        if let Some(size) = opened {
            self.expected.pop_front();
            self.blocks.push(size);
            self.taken = 0;
        }
        let offset = self.taken;
        self.taken += bytes;
        self.total += bytes;
        (self.blocks.len() - 1, offset)
    }
}

/// Blocks that are added on demand and freed together.
pub struct Arena {
    gpu: Arc<Gpu>,
    kind: ArenaUse,
    pub blocks: Vec<Block>,
    cuts: Cuts,
}

impl Arena {
    pub fn new(gpu: &Arc<Gpu>, kind: ArenaUse) -> Arena {
        Arena { gpu: gpu.clone(), kind, blocks: Vec::new(), cuts: Cuts::default() }
    }

    /// Plans blocks for these pieces, see [`Cuts::expect`].
    pub fn expect(&mut self, pieces: &[u64]) {
        self.cuts.expect(pieces, self.gpu.info.max_allocation);
    }

    /// Returns the bytes of all pieces.
    pub fn total(&self) -> u64 {
        self.cuts.total
    }

    /// Returns the bytes of all blocks.
    pub fn allocated(&self) -> u64 {
        self.blocks.iter().map(|b| b.size).sum()
    }

    /// Allocates `bytes` at a multiple of 256 bytes. The content is undefined.
    pub fn alloc(&mut self, what: &str, bytes: u64) -> Result<Span> {
        let bytes = rounded(bytes);
        let opens = self.cuts.opens(bytes, self.gpu.info.max_allocation);
        if let Some(size) = opens {
            check_piece(&self.gpu.info, what, bytes)?;
            self.blocks.push(Block::new(&self.gpu, what, size, Place::Device)?);
        }
        let (block, offset) = self.cuts.take(bytes, opens);
        Ok(Span {
            arena: self.kind,
            block,
            offset,
            bytes,
            address: self.blocks[block].address + offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_blocks_hold_their_pieces_without_a_gap() {
        assert!(blocks_for(&[], 100).is_empty());
        assert_eq!(blocks_for(&[40, 60, 1, 250, 30, 70, 5], 100), [100, 1, 250, 100, 5]);
        let cut = |pieces: &[u64], planned: &[u64]| {
            let mut cuts = Cuts::default();
            cuts.expect(planned, 100);
            let places: Vec<(usize, u64)> =
                pieces.iter().map(|p| cuts.take(*p, cuts.opens(*p, 100))).collect();
            (cuts.blocks, places)
        };
        let all = [40, 60, 1, 250, 30];
        assert_eq!(
            cut(&all, &all),
            (vec![100, 1, 250, 30], vec![(0, 0), (0, 40), (1, 0), (2, 0), (3, 0)])
        );
        // An unplanned allocation gets a block of its own size.
        assert_eq!(
            cut(&[40, 60, 7, 9], &[40, 60]),
            (vec![100, 7, 9], vec![(0, 0), (0, 40), (1, 0), (2, 0)])
        );
    }

    #[test]
    fn blocks_grow_by_doubling_without_a_plan() {
        let mut cuts = Cuts::default();
        for _ in 0..40 {
            let opens = cuts.opens(1 << 20, 1 << 30);
            cuts.take(1 << 20, opens);
        }
        assert_eq!(cuts.blocks, [4, 4, 8, 16, 32].map(|mib: u64| mib << 20));
    }
}
