//! Advice to the system about memory. Ignored advice costs only time or memory.

use memmap2::{Mmap, UncheckedAdvice};
use std::ops::Range;
use std::ptr::NonNull;

/// Requests huge pages for memory that was just allocated.
///
/// # Safety
/// `start..start + len` is one allocation of the caller, and `start` is aligned to a page.
pub unsafe fn prefer_huge_pages(start: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the caller upholds this function's contract; this advice changes no content.
    unsafe {
        libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, len);
}

/// Removes pages of a mapped file from this process. The next access reads them again.
pub fn release(map: &Mmap, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    // SAFETY: the map is a read-only file mapping, so the pages are read again with the same bytes.
    let _ =
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
}

/// Makes the allocator return large freed blocks and the free end of each thread's memory.
///
/// By default it keeps up to 64 MB per thread after a block of 32 MB was freed, and
/// [`release_freed`] does not return them.
pub fn return_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls take no pointer.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
    }
}

/// Returns freed memory to the system, as far as the allocator can.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call has no pointer arguments, and any thread may make it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
