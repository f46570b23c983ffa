//! Synchronisation types. `tests/loom` builds the modules that use them with loom's types instead,
//! and runs every order of their steps.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub use std::thread;

use std::time::{Duration, Instant};

/// Time that a waiter spins before it yields its core.
///
/// Short, because on a busy machine the awaited thread may be queued for this very core. With 20
/// us, passes of small layers took 3 times as long next to other programs.
const SPIN: Duration = Duration::from_micros(4);
/// Time that a waiter spins and yields before it sleeps.
pub const YIELD: Duration = Duration::from_micros(150);

/// Spins and then yields until a condition holds. Returns `false` after [`YIELD`].
pub fn spin(done: impl Fn() -> bool) -> bool {
    for _ in 0..64 {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..16 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
    }
    while start.elapsed() < YIELD {
        if done() {
            return true;
        }
        thread::yield_now();
    }
    false
}

/// [`std::cell::UnsafeCell`] with accesses that loom can check.
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Calls `read` with a pointer for reading.
    pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Calls `write` with a pointer for writing.
    pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
