//! Host buffers that several threads write at once, each to its own range.

use super::operand::BufferId;
use anyhow::{Context, Result, ensure};
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

struct Allocation {
    ptr: NonNull<u8>,
    layout: Layout,
}

/// Zeroed, aligned buffers addressed by [`BufferId`].
#[derive(Default)]
pub struct Buffers {
    list: Vec<Allocation>,
}

// SAFETY: the memory is plain bytes owned by this struct. The contracts of `slice` and `slice_mut`
// say who may touch which range.
unsafe impl Send for Buffers {}
// SAFETY: as above.
unsafe impl Sync for Buffers {}

impl Buffers {
    /// Allocates a zeroed buffer of at least `bytes` bytes.
    ///
    /// Allocations of this alignment touch their pages, so the system commits them at once.
    pub fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let layout = Layout::from_size_align(bytes.max(1).next_multiple_of(ALIGN), ALIGN)?;
        // SAFETY: the layout is not empty.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })
            .with_context(|| format!("no memory for {label}: {bytes} bytes"))?;
        self.list.push(Allocation { ptr, layout });
        Ok(BufferId(self.list.len() as u32 - 1))
    }

    /// Returns the size of one buffer in bytes.
    pub fn len(&self, id: BufferId) -> usize {
        self.list[id.0 as usize].layout.size()
    }

    /// Returns the total size of all buffers in bytes.
    pub fn total(&self) -> usize {
        self.list.iter().map(|b| b.layout.size()).sum()
    }

    /// Returns the address of `len` elements from `start`.
    ///
    /// For writers that share a buffer in a pattern that slices cannot express.
    #[inline(always)]
    pub fn part<T: Pod>(&self, id: BufferId, start: usize, len: usize) -> *mut T {
        let end = start.checked_add(len).and_then(|n| n.checked_mul(size_of::<T>()));
        assert!(end.is_some_and(|n| n <= self.len(id)), "{start} + {len} leaves buffer {}", id.0);
        // SAFETY: start lies inside the allocation, checked above.
        unsafe { self.list[id.0 as usize].ptr.as_ptr().cast::<T>().add(start) }
    }

    /// Returns `len` elements from `start`.
    ///
    /// # Safety
    /// No thread writes these elements while the slice lives.
    #[inline(always)]
    pub unsafe fn slice<T: Pod>(&self, id: BufferId, start: usize, len: usize) -> &[T] {
        // SAFETY: in bounds (checked), aligned, any bits are a valid T; no writer by contract.
        unsafe { std::slice::from_raw_parts(self.part(id, start, len), len) }
    }

    /// Returns `len` elements from `start` for writing.
    ///
    /// # Safety
    /// No other code reads or writes these elements while the slice lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut<T: Pod>(&self, id: BufferId, start: usize, len: usize) -> &mut [T] {
        // SAFETY: in bounds (checked), aligned, any bits are a valid T; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(self.part(id, start, len), len) }
    }

    /// Copies bytes into a buffer. Fails if they do not fit.
    pub fn write(&mut self, id: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        ensure!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len(id)),
            "write of {} bytes at {offset} leaves the buffer",
            bytes.len()
        );
        // SAFETY: `&mut self` excludes every other user.
        unsafe { self.slice_mut(id, offset, bytes.len()) }.copy_from_slice(bytes);
        Ok(())
    }

    /// Copies bytes out of a buffer. Fails if the range exceeds the buffer.
    pub fn read(&self, id: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        ensure!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len(id)),
            "read of {} bytes at {offset} leaves the buffer",
            bytes.len()
        );
        // SAFETY: writers exist only inside `run`, which borrows the executor exclusively.
        bytes.copy_from_slice(unsafe { self.slice(id, offset, bytes.len()) });
        Ok(())
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for buffer in &self.list {
            // SAFETY: allocated by `alloc` with this layout.
            unsafe { dealloc(buffer.ptr.as_ptr(), buffer.layout) };
        }
    }
}
