//! Resources that all clients share: memory and threads.
//!
//! One client gets at most half of each, so that some is left for others. A client is an API key,
//! or an address if the server has no keys. See [`SharedPool`].

use crate::util::sync::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};
use tokio::sync::Notify;

/// A client, for fairness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// SHA-256 of an API key.
    Key([u8; 32]),
    Address(IpAddr),
}

/// The address of a connection. Its requests carry it as an extension.
#[derive(Clone, Copy)]
pub struct Peer(pub IpAddr);

impl Client {
    /// Returns the client at an address.
    ///
    /// With IPv6 this is a /64 network, because a host can choose any address in it.
    pub fn at(address: IpAddr) -> Client {
        Client::Address(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 64 << 64).into()),
            v4 => v4,
        })
    }
}

/// A pool of units (bytes, threads). Clients take shares of it.
pub struct SharedPool {
    total: usize,
    used: Mutex<Used>,
    freed: Notify,
}

#[derive(Default)]
struct Used {
    all: usize,
    /// Units of each client; clients without a share are left out.
    by_client: HashMap<Client, usize>,
}

/// A client's share of a pool. Dropping it returns the units.
pub struct PoolShare {
    pool: Arc<SharedPool>,
    client: Client,
    units: usize,
}

impl SharedPool {
    /// Makes a pool of `total` units, at least 2.
    pub fn new(total: usize) -> Arc<SharedPool> {
        Arc::new(SharedPool { total, used: Mutex::default(), freed: Notify::new() })
    }

    /// Returns the limit of one client, in units.
    pub fn most(&self) -> usize {
        self.total / 2
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a share of at most [`most`](Self::most) units. Returns `None` if too few are free.
    pub fn try_take(self: &Arc<Self>, client: Client, units: usize) -> Option<PoolShare> {
        let mut used = self.used();
        let own = used.by_client.get(&client).copied().unwrap_or(0);
        if used.all + units > self.total || own + units > self.most() {
            return None;
        }
        used.all += units;
        used.by_client.insert(client, own + units);
        Some(PoolShare { pool: self.clone(), client, units })
    }

    /// Waits for a share. The caller must not hold another share of the same pool.
    pub async fn take(self: &Arc<Self>, client: Client, units: usize) -> PoolShare {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            // Units that are returned from now on end the wait.
            freed.as_mut().enable();
            if let Some(share) = self.try_take(client, units.min(self.most())) {
                return share;
            }
            freed.await;
        }
    }
}

impl PoolShare {
    /// Returns `units` to the pool, or all if the share has fewer.
    pub fn give_back(&mut self, units: usize) {
        self.shrink(self.units.saturating_sub(units));
    }

    /// Returns all but `units` to the pool.
    ///
    /// A share never grows, because two requests that hold some units and wait for more could wait
    /// for each other.
    pub fn shrink(&mut self, units: usize) {
        let freed = self.units.saturating_sub(units);
        self.units -= freed;
        let mut used = self.pool.used();
        used.all -= freed;
        if let Some(own) = used.by_client.get_mut(&self.client) {
            *own -= freed;
            if *own == 0 {
                used.by_client.remove(&self.client);
            }
        }
        drop(used);
        self.pool.freed.notify_waiters();
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> Client {
        Client::at(address.parse().unwrap())
    }

    #[test]
    fn a_client_has_at_most_half() {
        let shared = SharedPool::new(10);
        let (a, b) = (at("127.0.0.1"), at("127.0.0.2"));
        let first = shared.try_take(a, 3).unwrap();
        assert!(shared.try_take(a, 3).is_none());
        let second = shared.try_take(a, 2).unwrap();
        assert!(shared.try_take(b, 6).is_none());
        let third = shared.try_take(b, 5).unwrap();
        assert!(shared.try_take(at("::1"), 1).is_none(), "all are taken");
        drop(first);
        assert_eq!(shared.used().all, 7);
        assert_eq!(shared.used().by_client[&a], 2);
        let mut third = third;
        third.shrink(2);
        assert_eq!((third.units, shared.used().all), (2, 4));
        third.shrink(3);
        assert_eq!((third.units, shared.used().by_client[&b]), (2, 2), "a share does not grow");
        third.give_back(1);
        assert_eq!((third.units, shared.used().by_client[&b]), (1, 1));
        drop((second, third));
        assert_eq!(shared.used().all, 0);
        assert!(shared.used().by_client.is_empty());
    }

    #[test]
    fn addresses_of_one_network_are_one_client() {
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:1"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
    }

    #[test]
    fn who_waits_is_woken_by_what_is_freed() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let shared = SharedPool::new(4);
            let client = at("127.0.0.1");
            let held = shared.take(client, 2).await;
            let waiting = shared.take(client, 1);
            let free = async { drop(held) };
            let (share, ()) = futures_util::future::join(waiting, free).await;
            assert_eq!(share.units, 1);
        });
    }
}
