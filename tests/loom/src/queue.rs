//! Models of the server's request queue.

use crate::runtime::answers::{AnswerRequest, Text};
use crate::cli::api::error::ApiError;
use crate::serve::pool::Client;
use crate::serve::metrics::Metrics;
use crate::serve::queue::{ClientRequest, Delivery, QueueLimit, RequestQueue};
use crate::sync::mpsc::{Channel, Sender};
use loom::sync::atomic::Ordering;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn client(last: u8) -> Client {
    Client::at(IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)))
}

fn request(from: u8, channel: &Arc<Channel>) -> Vec<ClientRequest> {
    let data = Delivery::new(client(from), 0, Sender::to(channel), Instant::now());
    vec![AnswerRequest { text: Text { history: Vec::new() }, data }]
}

fn queue(most: usize) -> Arc<RequestQueue> {
    let metrics = Arc::new(Metrics::default());
    let queue = Arc::new(RequestQueue::new(QueueLimit::new(most), metrics, Duration::ZERO));
    queue.ready();
    queue
}

/// The engine's thread: takes requests until the queue is closed, then ends the queue. Returns the
/// number of requests that it took.
fn engine(queue: &RequestQueue) -> usize {
    let taken = std::iter::from_fn(|| queue.take(true, |_| 0)).count();
    queue.end(&ApiError::ending());
    taken
}

/// A shutdown during a new request and with a waiting engine. An accepted request is either taken
/// or answered with an error, never both.
pub fn shutdown() {
    let (queue, channel) = (queue(4), Arc::new(Channel::default()));
    let adding = {
        let (queue, channel) = (queue.clone(), channel.clone());
        loom::thread::spawn(move || queue.add(request(1, &channel)).is_ok())
    };
    let ending = {
        let queue = queue.clone();
        loom::thread::spawn(move || queue.end_soon())
    };
    let taken = engine(&queue);
    let accepted = adding.join().unwrap();
    ending.join().unwrap();
    assert_eq!(taken + channel.sent.load(Ordering::Acquire), accepted as usize);
    assert!(queue.add(Vec::new()).is_err());
}

/// Two clients, and an engine that takes all requests. No request waits forever, a client's second
/// request never takes another client's place, and the queue stays within its limit.
pub fn bound() {
    let (queue, channel) = (queue(2), Arc::new(Channel::default()));
    let adding = {
        let (queue, channel) = (queue.clone(), channel.clone());
        loom::thread::spawn(move || {
            (0..2).filter(|_| queue.add(request(1, &channel)).is_ok()).count()
        })
    };
    let other = {
        let (queue, channel) = (queue.clone(), channel.clone());
        loom::thread::spawn(move || {
            queue.add(request(2, &channel)).expect("a place is left for another client");
            queue.take(true, |client| (client != self::client(2)) as usize)
        })
    };
    let first = queue.take(true, |_| 0);
    assert!(first.is_some() && other.join().unwrap().is_some());
    let accepted = 1 + adding.join().unwrap();
    let left = std::iter::from_fn(|| queue.take(false, |_| 0)).count();
    assert_eq!(2 + left, accepted);
}

/// A client disconnects while its request waits. No engine takes the request after that.
pub fn gone() {
    let (queue, channels) = (queue(2), [(); 2].map(|()| Arc::new(Channel::default())));
    queue.add(request(1, &channels[0])).unwrap();
    let leaving = {
        let channel = channels[0].clone();
        loom::thread::spawn(move || channel.is_gone.store(true, Ordering::Release))
    };
    let adding = {
        let (queue, channel) = (queue.clone(), channels[1].clone());
        loom::thread::spawn(move || queue.add(request(2, &channel)).unwrap())
    };
    leaving.join().unwrap();
    assert!(queue.take(true, |_| 0).is_some_and(|request| request.data.client == client(2)));
    adding.join().unwrap();
    assert!(queue.take(false, |_| 0).is_none());
}

/// The engine fails during a new request. An accepted request gets an error.
pub fn failure() {
    let (queue, channel) = (queue(4), Arc::new(Channel::default()));
    let adding = {
        let (queue, channel) = (queue.clone(), channel.clone());
        loom::thread::spawn(move || queue.add(request(1, &channel)).is_ok())
    };
    queue.end(&ApiError::ending());
    let accepted = adding.join().unwrap();
    assert_eq!(channel.sent.load(Ordering::Acquire), accepted as usize);
}
