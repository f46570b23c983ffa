//! Advice to the system about memory. A system that ignores it only takes more time or memory.

use memmap2::Mmap;
use std::ops::Range;
use std::ptr::NonNull;
use windows_sys::Win32::System::Memory::{GetProcessHeap, HeapCompact, VirtualUnlock};

/// Does nothing: large pages need a privilege that users do not have.
///
/// # Safety
/// Safe for any argument; the other systems ask for one allocation of the caller's.
pub unsafe fn prefer_huge_pages(_: NonNull<u8>, _: usize) {}

/// Takes pages of a mapped file out of this process. The next access reads them again.
pub fn release(map: &Mmap, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    // SAFETY: a read-only map of a file: the pages come back from it with the same bytes. The call
    // fails for pages that are not locked, and takes them out all the same.
    unsafe { VirtualUnlock(map[range.clone()].as_ptr().cast(), range.len()) };
}

/// Does nothing: the heap returns large blocks by itself.
pub fn return_freed() {}

/// Gives memory that was freed back to the system, as far as the allocator can.
pub fn release_freed() {
    // SAFETY: the handle is that of the process's heap, which is always valid.
    unsafe { HeapCompact(GetProcessHeap(), 0) };
}
