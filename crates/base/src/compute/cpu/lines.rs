//! Memory for weights, aligned to cache lines and on huge pages if the system has them. Huge pages
//! need fewer address translations, and the hardware prefetcher does not stop every 4 KB.

use crate::os;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes that are aligned to cache lines, on huge pages if the system has them.
pub struct Lines {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory allocated.
    _block: Option<Arc<LineBlock>>,
}

// SAFETY: the value consists of plain bytes, and no other `Lines` has any of them.
unsafe impl Send for Lines {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lines {}

/// Bytes in a cache line and in the widest vector.
const ALIGN: usize = 64;
/// Size and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a block that small matrices share. A small matrix alone would be on small pages.
const SHARED: usize = 2 * HUGE_PAGE;

/// Memory from the allocator, which is freed on drop.
struct LineBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the pointer is only used to free the memory.
unsafe impl Send for LineBlock {}
// SAFETY: as above.
unsafe impl Sync for LineBlock {}

impl LineBlock {
    /// Allocates `len` bytes. `len` must not be 0.
    fn new(len: usize) -> Arc<LineBlock> {
        let layout = Layout::from_size_align(len, HUGE_PAGE)
            .expect("a matrix in memory has no more than isize::MAX bytes");
        // SAFETY: the layout is not empty.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: the range was just allocated, and starts on a page.
        unsafe { os::memory::prefer_huge_pages(start, len) };
        Arc::new(LineBlock { start, layout })
    }
}

impl Drop for LineBlock {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Blocks for small matrices, and the used bytes of each. A block exists as long as one of its
/// matrices.
static OPEN: Mutex<Vec<(Weak<LineBlock>, usize)>> = Mutex::new(Vec::new());

impl Lines {
    /// Allocates `len` zero bytes, and writes to all of their pages.
    pub fn zeroed(len: usize) -> Lines {
        if len == 0 {
            return Lines { start: NonNull::dangling(), len, _block: None };
        }
        let (block, offset) = Self::place(len);
        // SAFETY: the block has `len` bytes from the offset on, which no other code uses.
        let start = unsafe {
            let start = block.start.add(offset);
            start.write_bytes(0, len);
            start
        };
        Lines { start, len, _block: Some(block) }
    }

    /// Returns a block with `len` free bytes, and their offset.
    fn place(len: usize) -> (Arc<LineBlock>, usize) {
        if len >= HUGE_PAGE {
            return (LineBlock::new(len), 0);
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(block, _)| block.strong_count() > 0);
        // Uses the first block with enough room, so that small matrices fill the space that larger
        // ones leave.
        for (block, used) in open.iter_mut() {
            if *used + len <= SHARED
                && let Some(block) = block.upgrade()
            {
                let offset = *used;
                *used += len.next_multiple_of(ALIGN);
                return (block, offset);
            }
        }
        let block = LineBlock::new(SHARED);
        open.push((Arc::downgrade(&block), len.next_multiple_of(ALIGN)));
        (block, 0)
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_pieces_are_apart_aligned_and_zero() {
        let sizes = [0, 1, 64, 1 << 20, 3 << 20, 3 << 20, 9 << 20, 5];
        let mut all = sizes.map(Lines::zeroed);
        for (i, lines) in all.iter_mut().enumerate() {
            let address = lines.bytes().as_ptr() as usize;
            assert!(address.is_multiple_of(ALIGN) || lines.bytes().is_empty());
            assert!(lines.bytes().iter().all(|byte| *byte == 0));
            lines.bytes_mut().fill(i as u8 + 1);
        }
        for (i, (lines, len)) in all.iter().zip(sizes).enumerate() {
            assert_eq!(lines.bytes().len(), len);
            assert!(lines.bytes().iter().all(|byte| *byte == i as u8 + 1));
        }
    }
}
