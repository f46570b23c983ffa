//! Memory for weights: aligned to cache lines, on huge pages where the system offers them (fewer
//! address translations, and the hardware prefetcher need not stop every 4 KB).

use crate::os;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Bytes aligned to lines, on huge pages where the system offers them.
pub struct Lines {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain bytes, owned.
unsafe impl Send for Lines {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lines {}

/// Bytes of a cache line and of the widest vector.
const ALIGN: usize = 64;
/// Size and alignment of a huge page; smaller buffers are only aligned to lines.
const HUGE_PAGE: usize = 2 << 20;

impl Lines {
    fn layout(len: usize) -> Layout {
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { ALIGN };
        Layout::from_size_align(len, align)
            .expect("a matrix in memory has no more than isize::MAX bytes")
    }

    /// `len` zero bytes, every page of them touched.
    pub fn zeroed(len: usize) -> Lines {
        if len == 0 {
            return Lines { start: NonNull::dangling(), len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        if len >= HUGE_PAGE {
            // SAFETY: the range was just allocated, and starts on a page.
            unsafe { os::memory::prefer_huge_pages(start, len) };
        }
        // SAFETY: `len` bytes were allocated.
        unsafe { start.write_bytes(0, len) };
        Lines { start, len }
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

impl Drop for Lines {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated with the same layout.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) };
        }
    }
}
