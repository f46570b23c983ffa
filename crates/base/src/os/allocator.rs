//! The system's allocator with an optional limit. It notes each refusal, since Rust then aborts.

use super::crash::note_refusal;
use crate::testing::{self, PAGE, Point};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// The system's allocator.
pub struct Allocator;

static IS_LIMITED: AtomicBool = AtomicBool::new(false);
/// Bytes that may still be allocated, if there is a limit.
static LEFT: AtomicI64 = AtomicI64::new(0);

/// Limits further allocations to `more` bytes in total. On Unix, the system limits the process.
#[cfg(windows)]
pub fn limit(more: u64) {
    LEFT.store(more.min(i64::MAX as u64) as i64, Ordering::Relaxed);
    IS_LIMITED.store(true, Ordering::Relaxed);
}

/// Subtracts bytes from the limit. Returns `false` if fewer are left.
fn takes(bytes: usize) -> bool {
    if !IS_LIMITED.load(Ordering::Relaxed) {
        return true;
    }
    let is_left = LEFT.fetch_sub(bytes as i64, Ordering::Relaxed) >= bytes as i64;
    if !is_left {
        gives(bytes);
    }
    is_left
}

/// Adds freed bytes back to the limit.
fn gives(bytes: usize) {
    if IS_LIMITED.load(Ordering::Relaxed) {
        LEFT.fetch_add(bytes as i64, Ordering::Relaxed);
    }
}

/// Returns whether a test or the limit refuses an allocation of `size` bytes. `more` is the
/// increase in allocated bytes.
fn is_refused(size: usize, more: usize) -> bool {
    (size >= PAGE && testing::fails(Point::Alloc)) || !takes(more)
}

fn noted(pointer: *mut u8) -> *mut u8 {
    if pointer.is_null() {
        note_refusal();
    }
    pointer
}

// SAFETY: every call passes its own arguments to the system's allocator and returns its result.
// Nothing here unwinds or allocates.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size(), layout.size()) {
            return noted(std::ptr::null_mut());
        }
        // SAFETY: the caller upholds this function's contract.
        noted(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size(), layout.size()) {
            return noted(std::ptr::null_mut());
        }
        // SAFETY: the caller upholds this function's contract.
        noted(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        gives(layout.size());
        // SAFETY: the caller upholds this function's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let old = layout.size();
        if size > old && is_refused(size, size - old) {
            return noted(std::ptr::null_mut());
        }
        gives(old.saturating_sub(size));
        // SAFETY: the caller upholds this function's contract.
        noted(unsafe { System.realloc(pointer, layout, size) })
    }
}
