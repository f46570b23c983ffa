//! Advice to the system about memory. Ignored advice costs only time or memory.

use memmap2::Mmap;
use std::ops::Range;
use std::ptr::NonNull;
use windows_sys::Win32::System::Memory::{GetProcessHeap, HeapCompact, VirtualUnlock};

/// Does nothing: large pages need a privilege that users do not have.
///
/// # Safety
/// Safe for any argument. On other systems the range must be one allocation of the caller.
pub unsafe fn prefer_huge_pages(_: NonNull<u8>, _: usize) {}

/// Removes pages of a mapped file from this process. The next access reads them again.
pub fn release(map: &Mmap, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    // SAFETY: the map is a read-only file mapping, so the pages are read again with the same bytes.
    // The call fails for pages that are not locked, but removes them anyway.
    unsafe { VirtualUnlock(map[range.clone()].as_ptr().cast(), range.len()) };
}

/// Does nothing, because the heap itself returns large freed blocks to the system.
pub fn return_freed() {}

/// Returns freed memory to the system, as far as the allocator can.
pub fn release_freed() {
    // SAFETY: the handle is that of the process's heap, which is always valid.
    unsafe { HeapCompact(GetProcessHeap(), 0) };
}
