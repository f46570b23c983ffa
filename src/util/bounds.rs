//! Bounds for evaluating what a stranger wrote in a language of its own: a chat template can ask
//! for any amount of memory, stack and time, and the library that evaluates it bounds none of them.
//!
//! Time: the evaluation has a thread of its own, which is left behind when it takes too long.
//! Memory: the program's [`Allocator`] refuses such a thread more than its part. A refused
//! allocation, like a stack that overflows, ends the process: Rust offers no way back from either.
//! So the thread is known as one that evaluates ([`evaluated`]), and the program's handler of such
//! ends says whose fault it was.

use super::threads;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

/// The system's allocator. It refuses threads that evaluate more than their part, and remembers
/// that it refused.
pub struct Allocator;

/// What a thread may still take; the largest number where nothing bounds it.
const UNBOUNDED: usize = usize::MAX;

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(UNBOUNDED) };
    /// Bytes that it was refused last; 0 once it had as many since.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
    static EVALUATED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Whether this thread may have so many bytes more; then they are its own.
fn take(bytes: usize) -> bool {
    let left = LEFT.get();
    if left == UNBOUNDED {
        return true;
    }
    match left.checked_sub(bytes) {
        Some(left) => LEFT.set(left),
        None => REFUSED.set(bytes.max(1)),
    }
    left >= bytes
}

fn give_back(bytes: usize) {
    let left = LEFT.get();
    if left != UNBOUNDED {
        // Never as much as means unbounded.
        LEFT.set(left.saturating_add(bytes).min(UNBOUNDED - 1));
    }
}

/// What the system returned for so many bytes, noted.
fn noted(pointer: *mut u8, bytes: usize) -> *mut u8 {
    let refused = REFUSED.get();
    if pointer.is_null() {
        REFUSED.set(bytes);
        give_back(bytes);
    } else if refused > 0 && refused <= bytes {
        // Whoever was refused went on. A report of the end itself takes less.
        REFUSED.set(0);
    }
    pointer
}

// SAFETY: every call goes to the system's allocator with its own arguments, or returns null, which
// is how an allocator refuses. Nothing here unwinds or allocates: the thread's cells are constants
// without destructors.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        noted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        noted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let new = noted(unsafe { System.realloc(pointer, layout, size) }, size);
        if !new.is_null() {
            give_back(layout.size());
        }
        new
    }
}

/// What this thread evaluates, in words; `None` on all others.
pub fn evaluated() -> Option<&'static str> {
    EVALUATED.get()
}

/// Whether the last thing that this thread asked memory for was refused it.
pub fn was_refused() -> bool {
    REFUSED.get() > 0
}

/// What an evaluation may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub memory: usize,
    pub stack: usize,
    pub time: Duration,
}

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// It took longer than it may.
    Time,
    /// The library that evaluates it panicked.
    Panic,
}

/// Evaluates within bounds; `what` says what, as the beginning of a sentence. Where no thread can
/// be had the caller's evaluates, and nobody looks at the time.
pub fn evaluate<T: Send + 'static>(
    what: &'static str,
    bounds: Bounds,
    evaluation: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Excess> {
    let (given, kept) = threads::offer(move || {
        let before = (LEFT.replace(bounds.memory), EVALUATED.replace(Some(what)));
        let result = catch_unwind(AssertUnwindSafe(evaluation)).map_err(|_| Excess::Panic);
        LEFT.set(before.0);
        EVALUATED.set(before.1);
        result
    });
    let (send, receive) = channel();
    let thread = Builder::new().name("evaluation".into()).stack_size(bounds.stack);
    // Who gave up waiting takes no result.
    match thread.spawn(move || drop(send.send(given()))) {
        Ok(_) => match receive.recv_timeout(bounds.time) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(Excess::Time),
            Err(RecvTimeoutError::Disconnected) => Err(Excess::Panic),
        },
        Err(_) => kept(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds =
        Bounds { memory: 1 << 20, stack: 1 << 20, time: Duration::from_secs(600) };

    #[test]
    fn a_part_is_taken_given_back_and_refused() {
        LEFT.set(100);
        assert!(take(60) && !take(41) && was_refused());
        give_back(60);
        assert!(take(100) && !take(1));
        LEFT.set(UNBOUNDED);
        REFUSED.set(0);
        assert!(take(usize::MAX));
    }

    #[test]
    fn results_panics_and_what_never_ends() {
        assert_eq!(evaluate("x", BOUNDS, || 7), Ok(7));
        assert_eq!(evaluate("x", BOUNDS, || evaluated() == Some("x")), Ok(true));
        assert_eq!(evaluate("x", BOUNDS, || -> u8 { panic!("of a library") }), Err(Excess::Panic));
        let (_keep, never) = channel::<u8>();
        let no_time = Bounds { time: Duration::ZERO, ..BOUNDS };
        assert_eq!(evaluate("x", no_time, move || never.recv().is_ok()), Err(Excess::Time));
        assert_eq!(evaluated(), None);
    }
}
