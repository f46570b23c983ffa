//! Speed of the search for trellis codes: `cargo bench --bench trellis [-- -d vulkan] [TILES]`.
//!
//! Each line is one code: weights per second (on the processor, for one core), mean squared error
//! on a unit Gaussian, and a digest of the codes, which is the same on every device. A calibrated
//! matrix of 4096 rows uses calls of 256 tiles.

use gemma::tensor::encode::{CodingDevice, OnProcessor};
use gemma::tensor::trellis::TILE;
use gemma::tensor::viterbi::WEIGHTS;
use gemma::tensor::{Code, Values};
use gemma::vulkan::{Choice, VulkanCoding, VulkanExecutor};
use sha2::{Digest, Sha256};
use std::time::Instant;

fn main() {
    let mut words = std::env::args().skip(1).filter(|a| a != "--bench").peekable();
    let on_gpu = words.next_if_eq("-d").and_then(|_| words.next()).is_some_and(|d| d == "vulkan");
    let count = words.next().map(|n| n.parse().expect("a number of tiles"));
    if !on_gpu {
        return measure(&OnProcessor, count.unwrap_or(2048), usize::MAX);
    }
    let count = count.unwrap_or(32_768);
    let tiles = VulkanCoding::new(VulkanExecutor::open(Choice::Best).unwrap()).unwrap();
    for call in [64, 256, 1024, usize::MAX] {
        println!("calls of {} tiles", call.min(count));
        measure(&tiles, count, call);
    }
}

/// Prints the speed for `count` tiles, in calls of `call` tiles.
fn measure(tiles: &dyn CodingDevice, count: usize, call: usize) {
    let call = call.min(count);
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    println!("{:6} {:>12} {:>10}  digest", "code", "weights/s", "error");
    for code in [Code::T2, Code::T25, Code::T3, Code::T4] {
        let Values::Trellis { trellis, gain } = code.spec().values else { continue };
        let scale = trellis.deviation() / gain;
        let wanted: Vec<f32> = gaussian(count * WEIGHTS).map(|x| x * scale).collect();
        let mut rows = vec![[0; TILE]; count];
        // The first tiles include the time for tables and pipelines, so they are not timed.
        let warm = count.min(4);
        tiles.encode(trellis, &wanted[..warm * WEIGHTS], &mut rows[..warm]).unwrap();
        let start = Instant::now();
        one.install(|| {
            for (wanted, rows) in wanted.chunks(call * WEIGHTS).zip(rows.chunks_mut(call)) {
                tiles.encode(trellis, wanted, rows).unwrap();
            }
        });
        let speed = wanted.len() as f64 / start.elapsed().as_secs_f64();
        let (mut square, mut cross, mut coded) = (0f64, 0f64, 0f64);
        for (tile, rows) in wanted.chunks_exact(WEIGHTS).zip(&rows) {
            for (row, targets) in tile.chunks_exact(TILE).enumerate() {
                let integers = trellis.decode(rows[(row + TILE - 1) % TILE], rows[row]);
                for (t, q) in targets.iter().zip(integers) {
                    let (t, q) = (*t as f64, q as f64);
                    (square, cross, coded) = (square + t * t, cross + t * q, coded + q * q);
                }
            }
        }
        let error = (square - cross * cross / coded) / square;
        let digest = Sha256::digest(bytemuck::cast_slice::<_, u8>(rows.as_flattened()));
        println!("{code:6?} {speed:12.0} {error:10.5}  {:02x?}", &digest[..6]);
    }
}

/// Returns numbers of a unit Gaussian. They are the same every time.
fn gaussian(n: usize) -> impl Iterator<Item = f32> {
    let mut state = 7u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f32 + 0.5) / (1u64 << 31) as f32
    };
    (0..n).map(move |_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos())
}
