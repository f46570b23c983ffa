//! Threads where they can be had. Under a limit on a user's processes none may be, and then the
//! work is done by whoever wanted to hand it out, or refused.

use std::io::Result;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Work that a thread does, or that is done.
pub enum Task<'scope, T> {
    Beside(ScopedJoinHandle<'scope, T>),
    Done(T),
}

impl<T> Task<'_, T> {
    /// The result; a panic of the thread goes on here.
    pub fn join(self) -> T {
        match self {
            Task::Beside(thread) => {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
            Task::Done(result) => result,
        }
    }
}

/// Does the work on a thread of its own, or before it returns where there is no thread to be had.
/// The work must not wait for something that the caller does later.
pub fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Task<'scope, T> {
    let (work, take) = offer(work);
    match Builder::new().spawn_scoped(scope, work) {
        Ok(thread) => Task::Beside(thread),
        Err(_) => Task::Done(take()),
    }
}

/// A closure to hand out, and the same one to keep: whichever is called first does the work, and
/// the other one must not be called. A thread that cannot be started swallows what it was given.
fn offer<T>(
    work: impl FnOnce() -> T + Send,
) -> (impl FnOnce() -> T + Send, impl FnOnce() -> T + Send) {
    let shared = Arc::new(Mutex::new(Some(work)));
    let other = shared.clone();
    let take = |from: &Mutex<Option<_>>| {
        let taken = from.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.expect("one of both is called")
    };
    (move || take(&shared)(), move || take(&other)())
}

/// A thread that works beside the caller, or the reason why there is none.
pub fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().spawn_scoped(scope, work)
}

/// Refuses where so many threads cannot be had: for libraries that panic then.
pub fn check(count: usize) -> Result<()> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        // All of them are there at the same time.
        let held = gate.lock();
        let all: Result<Vec<_>> = (0..count).map(|_| start(scope, || drop(gate.lock()))).collect();
        drop(held);
        all.map(drop)
    })
}

/// To be called before the first parallel iterator outside a pool of its own. Rayon's common pool
/// panics where its threads cannot be started, now and at each later use: then it is the calling
/// thread alone.
pub fn prepare_common_pool() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let common = rayon::ThreadPoolBuilder::new();
        if rayon::ThreadPoolBuilder::new().build().is_err() {
            // Fails where somebody has started it before, and then it works.
            let _ = common.num_threads(1).use_current_thread().build_global();
        }
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
            tasks.into_iter().map(Task::join).sum::<i32>() + Task::Done(10).join()
        });
        assert_eq!((*count.lock().unwrap(), sum), (1, 16));
    }
}
