//! Prefetch of weights while a worker waits for other workers.

use super::linear::LINE;
use super::simd::prefetch_far;
use std::cell::Cell;

/// Limit for the bytes that are prefetched for one dispatch: a part of the smallest second-level
/// cache.
const MOST: usize = 128 << 10;
/// Lines that are prefetched between two checks of the barrier.
const LINES: usize = 4;

/// The weights that a worker will read next, in parts.
#[derive(Default)]
pub struct Idle<'a> {
    parts: [&'a [u8]; 3],
    /// Bytes that were prefetched.
    fetched: Cell<usize>,
}

impl<'a> Idle<'a> {
    /// Returns the first bytes of matrices that are read one after the other.
    pub fn in_turn(parts: impl Iterator<Item = &'a [u8]>) -> Idle<'a> {
        let mut left = MOST;
        let mut ahead = Idle::default();
        for (place, part) in ahead.parts.iter_mut().zip(parts) {
            *place = &part[..part.len().min(left)];
            left -= place.len();
        }
        ahead
    }

    /// Returns the first bytes of two matrices that are read in alternation.
    pub fn by_turns(parts: [&'a [u8]; 2]) -> Idle<'a> {
        let [a, b] = parts.map(|part| &part[..part.len().min(MOST / 2)]);
        Idle { parts: [a, b, &[]], ..Idle::default() }
    }

    /// Prefetches the next few lines.
    pub fn fetch(&self) {
        let mut from = self.fetched.get();
        self.fetched.set(from + LINES * LINE);
        for part in self.parts {
            if let Some(part) = part.get(from..) {
                part.chunks(LINE).take(LINES).for_each(|line| prefetch_far(line.as_ptr()));
                return;
            }
            from -= part.len();
        }
    }
}
