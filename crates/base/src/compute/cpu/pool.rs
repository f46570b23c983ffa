//! Persistent worker threads that run one closure together and synchronise at barriers.
//!
//! A waiting thread spins for some microseconds (the usual time between two kernels), then yields
//! (other programs may need the core), then parks (to save power between tokens). A panic in one
//! worker releases the others from their barriers and is passed to the caller.

use crate::error::no_thread;
use crate::util::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use crate::util::sync::thread::{self, JoinHandle, Thread};
use crate::util::sync::{Arc, Mutex, MutexGuard, UnsafeCell, spin};
use anyhow::{Context, Result, ensure};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

type PoolJob = *const (dyn Fn(&Worker<'_>) + Sync);

/// Threads that wait for work. The thread that calls [`Pool::run`] is worker 0.
pub struct Pool {
    shared: Arc<PoolState>,
    threads: Vec<JoinHandle<()>>,
    /// Held while a closure runs, so that callers take turns.
    turn: Mutex<()>,
}

/// One of the threads in a call of [`Pool::run`].
pub struct Worker<'a> {
    /// Index of the worker; 0 is the caller's thread.
    pub index: usize,
    /// Number of workers in this run.
    pub count: usize,
    shared: &'a PoolState,
}

struct PoolState {
    /// Number of the current run. It is written after `job`, so a thread that sees it also sees the
    /// job.
    epoch: AtomicU64,
    job: UnsafeCell<Option<PoolJob>>,
    /// Number of workers, without the caller, that have not finished the current run.
    running: AtomicUsize,
    /// Number of workers that wait at the current barrier, and number of passed barriers.
    arrived: AtomicUsize,
    barriers: AtomicUsize,
    /// Set when a worker has panicked. Workers at barriers then panic too.
    broken: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    seats: Vec<Seat>,
}

// SAFETY: `job` is written by the caller of `run` only while all workers wait for the next epoch,
// and read by them only after an acquiring load of `epoch` that saw the caller's releasing store.
unsafe impl Sync for PoolState {}
// SAFETY: the job pointer is only ever followed while `run` keeps the closure, which is `Sync`,
// alive.
unsafe impl Send for PoolState {}

/// State of one sleeping worker.
#[derive(Default)]
struct Seat {
    asleep: AtomicBool,
    /// The thread to wake. Worker 0 may be another thread in each run.
    thread: Mutex<Option<Thread>>,
}

/// Panic payload of a worker that was released because another worker had panicked.
struct Released;

impl Pool {
    /// Starts `threads - 1` threads. The caller of `run` is the last worker.
    pub fn new(threads: usize) -> Result<Pool> {
        ensure!(threads >= 1, "a thread pool needs at least one thread");
        let shared = Arc::new(PoolState {
            epoch: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            running: AtomicUsize::new(0),
            arrived: AtomicUsize::new(0),
            barriers: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            seats: (0..threads).map(|_| Seat::default()).collect(),
        });
        let mut pool =
            Pool { shared, threads: Vec::with_capacity(threads - 1), turn: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let handle = thread::Builder::new()
                .name(format!("gemma-cpu-{index}"))
                .spawn(move || shared.work(index))
                .with_context(|| format!("starting CPU thread {index} of {threads}"))
                .with_context(no_thread)?;
            *lock(&pool.shared.seats[index].thread) = Some(handle.thread().clone());
            pool.threads.push(handle);
        }
        Ok(pool)
    }

    /// Returns the number of workers in a run.
    pub fn threads(&self) -> usize {
        self.shared.seats.len()
    }

    /// Runs `f` once on every worker, and returns when all have finished. If workers panic, it
    /// panics with the first of their panics. Calls from several threads take turns. A call from
    /// inside `f` would deadlock.
    pub fn run(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let count = self.threads();
        if count > 1 {
            *lock(&shared.seats[0].thread) = Some(thread::current());
            // SAFETY: the lifetime is erased, but `run` returns (or unwinds) only after every
            // worker has finished with `f`.
            let job = unsafe {
                std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), PoolJob>(f)
            };
            // SAFETY: all workers wait for the next epoch, so none reads the cell.
            shared.job.with_mut(|cell| unsafe { *cell = Some(job) });
            shared.running.store(count - 1, Ordering::Relaxed);
            shared.epoch.fetch_add(1, Ordering::Release);
            shared.wake();
        }
        shared.call(f, 0);
        shared.wait(0, || shared.running.load(Ordering::Acquire) == 0);
        shared.arrived.store(0, Ordering::Relaxed);
        shared.broken.store(false, Ordering::Relaxed);
        let panic = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Worker<'_> {
    /// Waits until every worker of the run has called it. All writes before it are visible to all
    /// workers after it.
    pub fn barrier(&self) {
        self.barrier_with(|| {});
    }

    /// [`Worker::barrier`], which calls `idle` repeatedly while it waits.
    pub fn barrier_with(&self, idle: impl Fn()) {
        if self.count == 1 {
            return;
        }
        let shared = self.shared;
        let passed = shared.barriers.load(Ordering::Acquire);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.barriers.store(passed.wrapping_add(1), Ordering::Release);
            shared.wake();
            return;
        }
        let open = || shared.barriers.load(Ordering::Acquire) != passed;
        shared.wait(self.index, || {
            let done = open() || shared.broken.load(Ordering::Acquire);
            if !done {
                idle();
            }
            done
        });
        if !open() {
            resume_unwind(Box::new(Released));
        }
    }

    /// Returns this worker's part of `0..n`. All parts have nearly equal length.
    pub fn share(&self, n: usize) -> std::ops::Range<usize> {
        n * self.index / self.count..n * (self.index + 1) / self.count
    }
}

impl PoolState {
    /// Main loop of one thread.
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            let next = || self.epoch.load(Ordering::Acquire) != seen;
            self.wait(index, || next() || self.stop.load(Ordering::Acquire));
            if !next() {
                return;
            }
            seen += 1;
            // SAFETY: the epoch was seen with acquire, so the write of the job happened before.
            if let Some(job) = self.job.with(|cell| unsafe { *cell }) {
                // SAFETY: `run` keeps the closure alive until `running` is zero, and this thread
                // counts there until `call` has returned.
                self.call(unsafe { &*job }, index);
            }
            if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.wake_seat(0);
            }
        }
    }

    /// Runs the closure as one worker, and stores its panic for the caller.
    fn call(&self, f: &(dyn Fn(&Worker<'_>) + Sync), index: usize) {
        let worker = Worker { index, count: self.seats.len(), shared: self };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(&worker))) {
            if !panic.is::<Released>() {
                lock(&self.panic).get_or_insert(panic);
            }
            self.broken.store(true, Ordering::Release);
            self.wake();
        }
    }

    /// Waits for a condition that other workers make true before they call `wake`.
    fn wait(&self, index: usize, done: impl Fn() -> bool) {
        if spin(&done) {
            return;
        }
        let seat = &self.seats[index];
        loop {
            seat.asleep.store(true, Ordering::Relaxed);
            // Either this thread sees the condition now, or the waking thread sees `asleep`: it has
            // a fence after it makes the condition true.
            fence(Ordering::SeqCst);
            if done() {
                seat.asleep.store(false, Ordering::Relaxed);
                return;
            }
            thread::park();
        }
    }

    fn wake(&self) {
        fence(Ordering::SeqCst);
        for index in 0..self.seats.len() {
            self.wake_unfenced(index);
        }
    }

    fn wake_seat(&self, index: usize) {
        fence(Ordering::SeqCst);
        self.wake_unfenced(index);
    }

    fn wake_unfenced(&self, index: usize) {
        let seat = &self.seats[index];
        let is_asleep = seat.asleep.load(Ordering::Relaxed)
            && (seat.asleep)
                .compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !is_asleep {
            return;
        }
        if let Some(thread) = &*lock(&seat.thread) {
            thread.unpark();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::sync::YIELD;

    #[test]
    fn every_worker_runs_each_job_once_and_barriers_order_them() {
        for threads in 1..=4 {
            let pool = Pool::new(threads).unwrap();
            let slots: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=200 {
                pool.run(&|worker| {
                    assert_eq!(worker.count, threads);
                    for phase in 0..3 {
                        // Relaxed ordering is used on purpose: only the barrier must make the
                        // writes of other workers visible.
                        slots[worker.index].store(round * 10 + phase, Ordering::Relaxed);
                        worker.barrier();
                        for slot in &slots {
                            assert_eq!(slot.load(Ordering::Relaxed), round * 10 + phase);
                        }
                        worker.barrier();
                    }
                });
                if round % 50 == 0 {
                    thread::sleep(4 * YIELD); // long enough for the workers to park
                }
            }
        }
    }

    #[test]
    fn a_panic_frees_the_others_and_reaches_the_caller() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    if worker.index == bad {
                        resume_unwind(Box::new(format!("worker {bad}")));
                    }
                    worker.barrier();
                });
            }))
            .unwrap_err();
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("worker {bad}")));
            let ran = AtomicUsize::new(0);
            pool.run(&|worker| {
                worker.barrier();
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(&|worker| {
                            inside.fetch_add(1, Ordering::Relaxed);
                            worker.barrier();
                            assert_eq!(inside.load(Ordering::Relaxed), 2);
                            worker.barrier();
                            inside.fetch_sub(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert!(Pool::new(0).is_err());
    }

    #[test]
    fn shares_cover_everything_once() {
        let pool = Pool::new(3).unwrap();
        let seen: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
        pool.run(&|worker| {
            worker.share(10).for_each(|i| _ = seen[i].fetch_add(1, Ordering::Relaxed))
        });
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }
}
