//! Models of the thread pool of the CPU kernels.

use crate::compute::pool::Pool;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// Plain memory. Loom fails if two threads access it without synchronisation.
struct Plain(UnsafeCell<usize>);

// SAFETY: loom watches every access.
unsafe impl Sync for Plain {}

impl Plain {
    fn new() -> Plain {
        Plain(UnsafeCell::new(0))
    }

    fn get(&self) -> usize {
        // SAFETY: loom fails if another thread writes at the same time.
        self.0.with(|value| unsafe { *value })
    }

    fn set(&self, new: usize) {
        // SAFETY: loom fails if another thread reads or writes at the same time.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}

/// Both workers see the caller's writes, and the caller sees theirs. The pool ends while its thread
/// may be asleep.
pub fn two_runs() {
    let pool = Pool::new(2).unwrap();
    let parts = [Plain::new(), Plain::new()];
    for run in 1..=2 {
        pool.run(&|worker| {
            let part = &parts[worker.index];
            assert_eq!(part.get(), run - 1);
            part.set(run);
        });
        assert!(parts.iter().all(|part| part.get() == run));
    }
}

/// Callers on two threads take turns.
pub fn two_callers() {
    let pool = Arc::new(Pool::new(2).unwrap());
    let part = Arc::new(Plain::new());
    let run = |pool: &Pool, part: &Plain| {
        pool.run(&|worker| {
            if worker.index == 1 {
                part.set(part.get() + 1);
            }
        })
    };
    let other = {
        let (pool, part) = (pool.clone(), part.clone());
        loom::thread::spawn(move || run(&pool, &part))
    };
    run(&pool, &part);
    other.join().unwrap();
    assert_eq!(part.get(), 2);
}

/// Writes before a barrier are seen after it, twice in a row.
fn phases(threads: usize, barriers: usize) {
    let pool = Pool::new(threads).unwrap();
    let parts: Vec<Plain> = (0..threads).map(|_| Plain::new()).collect();
    pool.run(&|worker| {
        for phase in 1..=barriers {
            // Another worker's part, so that only the barrier orders the two accesses.
            parts[(worker.index + phase) % threads].set(phase);
            worker.barrier();
        }
        assert_eq!(parts[worker.index].get(), barriers);
    });
}

pub fn barrier() {
    phases(2, 2);
}

pub fn three() {
    phases(3, 1);
}

/// A panic releases the worker at the barrier, reaches the caller, and leaves the pool usable.
pub fn panic() {
    for bad in 0..2 {
        let pool = Pool::new(2).unwrap();
        let run = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|worker| {
                if worker.index == bad {
                    resume_unwind(Box::new("expected"));
                }
                worker.barrier();
            })
        }));
        let panic = run.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"expected"));
        let ran = AtomicUsize::new(0);
        pool.run(&|worker| {
            worker.barrier();
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 2);
    }
}
