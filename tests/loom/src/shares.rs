//! Model of the pools from which the server's clients take shares.

use crate::queue::client;
use crate::serve::pool::SharedPool;
use loom::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Three clients ask for more than the pool has. Each gets its share in the end, and the shares
/// never exceed the pool.
pub fn shares() {
    let (pool, held) = (SharedPool::new(2), Arc::new(AtomicUsize::new(0)));
    let connection = |from: u8| {
        let (pool, held) = (pool.clone(), held.clone());
        move || {
            let share = loom::future::block_on(pool.take(client(from), 1));
            assert!(held.fetch_add(1, Ordering::AcqRel) < 2);
            held.fetch_sub(1, Ordering::AcqRel);
            drop(share);
        }
    };
    let others = [1, 2].map(|from| loom::thread::spawn(connection(from)));
    connection(3)();
    others.into_iter().for_each(|other| other.join().unwrap());
    assert!(pool.try_take(client(1), 1).is_some());
}
