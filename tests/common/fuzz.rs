//! Fuzzing by mutation, for parsers of foreign bytes.
//!
//! It is deterministic. Tests run a few thousand rounds; GEMMA_FUZZ_SECONDS sets a time instead.

#![allow(dead_code)]

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::time::{Duration, Instant};

/// Values at the edges of arithmetic.
const EDGES: [u32; 12] =
    [0, 1, 3, 4, 0x7f, 0xff, 0xffff, 0x1_0000, 0x7fff_ffff, 0x8000_0000, 0xffff_fff8, u32::MAX];

/// Returns one of the seeds, mutated in a few places: bits, words, counts, cuts, and pieces that
/// are moved, repeated or taken from another seed.
fn mutate(rng: &mut SmallRng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[rng.random_range(0..seeds.len())].clone();
    for _ in 0..rng.random_range(1..=6) {
        let len = bytes.len().max(1);
        let at = rng.random_range(0..len);
        let word = at / 4 * 4;
        match rng.random_range(0..8) {
            _ if bytes.is_empty() => bytes.push(rng.random()),
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 if word + 4 <= len => {
                let edge = EDGES[rng.random_range(0..EDGES.len())];
                bytes[word..word + 4].copy_from_slice(&edge.to_le_bytes());
            }
            3 if word + 4 <= len => {
                let old = u32::from_le_bytes(bytes[word..word + 4].try_into().unwrap());
                let new = old.wrapping_add(rng.random_range(0..64)).wrapping_sub(32);
                bytes[word..word + 4].copy_from_slice(&new.to_le_bytes());
            }
            4 => bytes.truncate(if rng.random() { at } else { word }),
            5 => {
                let n = rng.random_range(0..=64.min(len - at));
                let piece = bytes[at..at + n].to_vec();
                let to = rng.random_range(0..=bytes.len());
                bytes.splice(to..to, piece);
            }
            6 => {
                let other = &seeds[rng.random_range(0..seeds.len())];
                let from = rng.random_range(0..other.len()) / 4 * 4;
                let n = rng.random_range(0..=64).min(other.len() - from).min(len - word);
                bytes[word..word + n].copy_from_slice(&other[from..from + n]);
            }
            _ => {
                let n = rng.random_range(0..=48.min(len - at));
                bytes.drain(at..at + n);
            }
        }
    }
    bytes
}

/// Passes mutated seeds to `target`, which returns whether it accepted them.
///
/// A panic fails the test. Returns the numbers of rounds and of accepted inputs.
pub fn run(
    name: &str,
    seeds: &[Vec<u8>],
    rounds: u64,
    target: &mut dyn FnMut(&[u8]) -> bool,
) -> (u64, u64) {
    let limit = std::env::var("GEMMA_FUZZ_SECONDS")
        .ok()
        .map(|s| Duration::from_secs(s.parse().expect("a number of seconds")));
    let (start, mut done, mut accepted) = (Instant::now(), 0, 0);
    while limit.map_or(done < rounds, |limit| start.elapsed() < limit) {
        // Each round has its own seed, so that it can be repeated alone.
        let bytes = mutate(&mut SmallRng::seed_from_u64(done), seeds);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target(&bytes)));
        accepted += outcome
            .unwrap_or_else(|_| panic!("{name}: round {done} of {} bytes", bytes.len()))
            as u64;
        done += 1;
    }
    eprintln!("{name}: {done} rounds, {accepted} accepted, {:.0} s", start.elapsed().as_secs_f64());
    (done, accepted)
}
