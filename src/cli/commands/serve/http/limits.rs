//! Limits of what requests take outside the engine, each shared by all clients.

use super::super::pool::SharedPool;
use super::body::BodyLimits;
use crate::util::json;
use crate::vision::PictureLimits;
use std::sync::Arc;
use std::time::Duration;

/// Least bytes of memory for the preparation of requests; bytes for answers, and for images.
const MEMORY: usize = 512_000_000;
/// Requests that are prepared at once.
const PREPARING: usize = 8;
/// Grammars that are compiled at once.
const COMPILING: usize = 2;
/// Images that are read at once. The tower computes one at a time while the other is decoded.
const VIEWING: usize = 2;
/// Threads that prepare requests, compile grammars and read images.
pub const WORKERS: usize = PREPARING + COMPILING + VIEWING;

/// Limits of an image: a file of 20 MB, and 40 million pixels. A decoder takes at most 16 bytes for
/// a pixel.
pub const PICTURES: PictureLimits = PictureLimits { bytes: 20 << 20, pixels: 40_000_000 };

/// Pools of resources that requests share outside the engine.
pub struct SharedLimits {
    /// Bytes of memory for the preparation of requests.
    pub preparing: Arc<SharedPool>,
    /// Bytes of memory for answers, from the request until they are sent.
    pub answers: Arc<SharedPool>,
    /// Bytes of memory for the soft tokens of images, from the request until it is answered.
    pub images: Arc<SharedPool>,
    /// Threads that prepare requests.
    pub threads: Arc<SharedPool>,
    /// Threads that compile grammars.
    pub compilers: Arc<SharedPool>,
    /// Threads that read images. A client has one, so that clients take turns.
    pub viewers: Arc<SharedPool>,
}

impl SharedLimits {
    /// Makes the limits for bodies of at most `body` bytes.
    pub fn new(body: usize) -> SharedLimits {
        SharedLimits {
            preparing: SharedPool::new(MEMORY.max(4 * json::memory(body))),
            answers: SharedPool::new(MEMORY),
            images: SharedPool::new(MEMORY),
            threads: SharedPool::new(PREPARING),
            compilers: SharedPool::new(COMPILING),
            viewers: SharedPool::new(VIEWING),
        }
    }

    /// Returns the limits of bodies.
    pub fn bodies(&self, most: usize, patience: Duration) -> BodyLimits {
        BodyLimits { most, patience, memory: self.preparing.clone() }
    }
}
