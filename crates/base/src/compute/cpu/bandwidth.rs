//! Speed at which this machine reads memory. It is the upper limit of the speed of decoding.

use super::lines::Lines;
use super::pool::Pool;
use crate::os::machine;
use std::time::Instant;

/// Minimum of bytes to read for a measurement.
pub const PROBE_BYTES: usize = 256 << 20;

/// Returns the bytes to read for a measurement of the processor's memory: twice the size of its
/// caches, but at most an eighth of the free memory.
pub fn probe_bytes() -> usize {
    let twice = machine::last_level_cache().map_or(0, |bytes| bytes.saturating_mul(2));
    let most = machine::available_memory().map_or(u64::MAX, |bytes| bytes / 8);
    usize::try_from(twice.min(most)).unwrap_or(usize::MAX).max(PROBE_BYTES)
}

/// Passes over the buffer. The fastest one counts, because other programs only slow a pass down.
/// Parts of a pass are not measured, because the fastest of many small parts may come from a cache.
const PASSES: usize = 9;

/// Returns the GB/s (1e9 bytes) at which all threads of the pool together read a buffer of about
/// `bytes`. Each thread reads its own part.
pub fn read_bandwidth(pool: &Pool, bytes: usize) -> f64 {
    let words = (bytes / 8).max(pool.threads() * 1024);
    let buffer = Lines::zeroed(words * 8);
    let data: &[u64] = bytemuck::cast_slice(buffer.bytes());
    let seconds = (0..PASSES)
        .map(|_| {
            let start = Instant::now();
            pool.run(&|worker| {
                std::hint::black_box(sum(&data[worker.share(data.len())]));
            });
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    (data.len() * 8) as f64 / seconds / 1e9
}

/// Returns the wrapping sum. It uses enough lanes to keep all loads in flight.
fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if super::isa::Isa::Avx2.is_supported() {
        // SAFETY: the machine has AVX2.
        return unsafe { sum_avx2(data) };
    }
    sum_lanes(data)
}

/// # Safety
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(data: &[u64]) -> u64 {
    sum_lanes(data)
}

#[inline(always)]
fn sum_lanes(data: &[u64]) -> u64 {
    let mut lanes = [0u64; 32];
    let (blocks, rest) = data.as_chunks::<32>();
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane = lane.wrapping_add(*value);
        }
    }
    lanes.iter().chain(rest).fold(0, |sum, value| sum.wrapping_add(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_byte_at_some_speed() {
        assert_eq!(sum(&[3; 100]), 300);
        assert!(probe_bytes() >= PROBE_BYTES);
        let speed = read_bandwidth(&Pool::new(2).unwrap(), 1 << 20);
        assert!(speed.is_finite() && speed > 0.0);
    }
}
