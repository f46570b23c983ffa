//! Advice to the system about memory. A system that ignores it only takes more time or memory.

use memmap2::{Mmap, UncheckedAdvice};
use std::ops::Range;
use std::ptr::NonNull;

/// Asks for huge pages in memory that was just allocated.
///
/// # Safety
/// `start..start + len` is one allocation of the caller's, and `start` is aligned to a page.
pub unsafe fn prefer_huge_pages(start: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the caller's promise; this advice changes no content.
    unsafe {
        libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, len);
}

/// Takes pages of a mapped file out of this process. The next access reads them again.
pub fn release(map: &Mmap, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    // SAFETY: a read-only map of a file: the pages come back from it with the same bytes.
    let _ =
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
}

/// Makes the allocator return large blocks when they are freed, and the free end of each thread's
/// memory. By itself it keeps up to 64 MB for each thread, once a block of 32 MB was freed, and
/// [`release_freed`] does not return them.
pub fn return_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls take no pointer.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
    }
}

/// Gives memory that was freed back to the system, as far as the allocator can.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call takes no pointer, and any thread may make it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
