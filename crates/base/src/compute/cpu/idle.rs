//! Weights that a worker fetches while it waits for others.

use super::linear::LINE;
use super::simd::prefetch_far;
use std::cell::Cell;

/// Most bytes that are fetched for one dispatch: a part of the smallest second-level cache.
const MOST: usize = 128 << 10;
/// Lines that are fetched between two looks at the barrier.
const LINES: usize = 4;

/// The weights that a worker reads next, in parts.
#[derive(Default)]
pub struct Idle<'a> {
    parts: [&'a [u8]; 3],
    /// Bytes fetched.
    fetched: Cell<usize>,
}

impl<'a> Idle<'a> {
    /// The beginnings of some matrices, which are read one after the other.
    pub fn in_turn(parts: impl Iterator<Item = &'a [u8]>) -> Idle<'a> {
        let mut left = MOST;
        let mut ahead = Idle::default();
        for (place, part) in ahead.parts.iter_mut().zip(parts) {
            *place = &part[..part.len().min(left)];
            left -= place.len();
        }
        ahead
    }

    /// The beginnings of two matrices, which are read by turns.
    pub fn by_turns(parts: [&'a [u8]; 2]) -> Idle<'a> {
        let [a, b] = parts.map(|part| &part[..part.len().min(MOST / 2)]);
        Idle { parts: [a, b, &[]], ..Idle::default() }
    }

    /// Fetches a little more.
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
