//! Threads under a per-user process limit. If a thread cannot be started, the caller does the work
//! itself or refuses it.

use std::io::Result;
use std::sync::{Arc, Mutex, Once, PoisonError, mpsc};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Work on its own thread, or already done by the caller.
pub enum ScopedTask<'scope, T> {
    Running(ScopedJoinHandle<'scope, T>),
    Done(T),
}

impl<T> ScopedTask<'_, T> {
    /// Waits for the result. A panic of the thread is propagated.
    pub fn join(self) -> T {
        match self {
            ScopedTask::Running(thread) => {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
            ScopedTask::Done(result) => result,
        }
    }
}

/// Does the work on its own thread, or before returning if no thread can be started.
///
/// The work must not wait for later actions of the caller.
pub fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedTask<'scope, T> {
    let (work, take) = offer(work);
    match Builder::new().spawn_scoped(scope, work) {
        Ok(thread) => ScopedTask::Running(thread),
        Err(_) => ScopedTask::Done(take()),
    }
}

/// Returns two closures for the same work: one for a thread and one for the caller. Only one of
/// them may be called. A thread that cannot be started drops its closure.
fn offer<T>(
    work: impl FnOnce() -> T + Send,
) -> (impl FnOnce() -> T + Send, impl FnOnce() -> T + Send) {
    let shared = Arc::new(Mutex::new(Some(work)));
    let other = shared.clone();
    let take = |from: &Mutex<Option<_>>| {
        let taken = from.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.expect("only one closure is called")
    };
    (move || take(&shared)(), move || take(&other)())
}

/// Starts a thread.
pub fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().spawn_scoped(scope, work)
}

/// Returns an error if `count` threads cannot be started at once. Some libraries panic in that
/// case.
pub fn check(count: usize) -> Result<()> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        // The gate keeps all threads alive at the same time.
        let held = gate.lock();
        let all: Result<Vec<_>> = (0..count).map(|_| start(scope, || drop(gate.lock()))).collect();
        drop(held);
        all.map(drop)
    })
}

/// Starts Rayon's common pool.
///
/// Rayon panics at every use if its threads cannot be started. The pool therefore gets threads that
/// already run, or only the calling thread.
pub fn prepare_common_pool() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (give, taken) = mpsc::channel::<rayon::ThreadBuilder>();
        let taken = Arc::new(Mutex::new(taken));
        let started = (0..threads).try_for_each(|_| {
            let taken = taken.clone();
            let work = move || {
                let work = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                // Without work items, the pool has the calling thread alone.
                work.into_iter().for_each(rayon::ThreadBuilder::run);
            };
            Builder::new().spawn(work).map(drop)
        });
        let common = rayon::ThreadPoolBuilder::new();
        // Both calls fail if the pool was already started, which is fine.
        let _ = match started {
            Ok(()) => {
                let give = |work| {
                    give.send(work).map_err(|_| std::io::Error::other("a started thread is gone"))
                };
                common.num_threads(threads).spawn_handler(give).build_global()
            }
            Err(_) => common.num_threads(1).use_current_thread().build_global(),
        };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_once_by_either() {
        let count = Mutex::new(0);
        let (given, kept) = offer(|| *count.lock().unwrap() += 1);
        drop(given);
        kept();
        let sum = std::thread::scope(|scope| {
            let tasks: Vec<_> = (0..4).map(|i| spawn(scope, move || i)).collect();
            tasks.into_iter().map(ScopedTask::join).sum::<i32>() + ScopedTask::Done(10).join()
        });
        assert_eq!((*count.lock().unwrap(), sum), (1, 16));
    }
}
