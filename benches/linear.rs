//! Speed of the CPU linear kernels: `cargo bench --bench linear [-- FORMAT...]`.
//!
//! Each line is one format, matrix size and thread count: microseconds of one pass at one row,
//! weights per second, GB/s and their share of the speed of a plain read loop over the same number
//! of bytes, and c(M) = time at M rows / time at one row.
//!
//! Several matrices are used in turn so that the whole set has the stated size: 384 MB comes from
//! memory, 24 MB from the L3 cache, 640 KB from L2. Times are medians. The numbers of rows
//! alternate, so that other load of the machine affects all of them.

use gemma::compute::act::{ActValues, ActView};
use gemma::compute::cpu::bandwidth::read_bandwidth;
use gemma::compute::cpu::isa::Isa;
use gemma::compute::cpu::linear::{OutputPlace, PackedMatrix, linear};
use gemma::compute::cpu::pool::Pool;
use gemma::tensor::{Format, Matrix, StoredMatrix};
use half::f16;
use std::time::Instant;

const ROWS: [usize; 8] = [1, 2, 4, 8, 12, 16, 32, 128];

/// Minimum of bytes read in one measurement.
const SHORTEST: usize = 8 << 20;

/// Shares a raw pointer among the workers, which write disjoint columns.
struct Out(*mut f32);
// SAFETY: see above.
unsafe impl Sync for Out {}
impl Out {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

fn main() {
    let mut picked: Vec<String> =
        std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if picked.is_empty() {
        picked = [
            "i4-row", "i4-g32", "i4-g128", "i8-row", "i8a-row", "i2-row", "i2-g128", "t2-row",
            "t2.5-row", "t3-row", "t4-row", "bf16", "f32",
        ]
        .map(String::from)
        .to_vec();
    }
    let isa = std::env::var("GEMMA_ISA").map_or(Isa::detect(), |name| {
        let known = Isa::all_supported().into_iter().find(|isa| isa.to_string() == name);
        known.unwrap_or_else(|| panic!("this machine has no {name}"))
    });
    println!("isa {isa}; GB/s counts weights and scales; roof = read loop over as many bytes");
    for (set, label, (n, k)) in [
        (384 << 20, "memory", (4096, 5376)),
        (24 << 20, "L3", (1536, 1280)),
        (640 << 10, "L2", (256, 1280)),
    ] {
        for threads in [1, 2] {
            let pool = Pool::new(threads).unwrap();
            println!("\n{label}: {} KB of [{n}, {k}], {threads} thread(s)", set >> 10);
            println!(
                "{:9} {:>8} {:>7} {:>6} {:>5}   c(M) at M = {:?}",
                "format",
                "us",
                "Gw/s",
                "GB/s",
                "roof",
                &ROWS[1..]
            );
            for spelled in &picked {
                let format: Format = spelled.parse().unwrap();
                let one = matrix(format, n, k);
                let copies = (set / one.bytes()).max(1);
                let packed: Vec<PackedMatrix> = (0..copies)
                    .map(|_| PackedMatrix::load(&StoredMatrix::of(&one), isa).unwrap())
                    .collect();
                let roof = read_bandwidth(&pool, set);
                let times = measure(isa, &pool, &packed, format);
                let bytes = packed[0].bytes() as f64;
                let c: Vec<String> =
                    times[1..].iter().map(|t| format!("{:.2}", t / times[0])).collect();
                let speed = bytes / times[0] / 1e9;
                let weights = (n * k) as f64 / times[0] / 1e9;
                let us = times[0] * 1e6;
                println!(
                    "{spelled:9} {us:8.1} {weights:7.1} {speed:6.1} {:4.0}%   {}",
                    100.0 * speed / roof,
                    c.join("  ")
                );
            }
        }
    }
}

fn matrix(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let mut seed = 1u32;
    let mut byte = || {
        seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
        (seed >> 24) as u8
    };
    let mut codes: Vec<u8> =
        (0..format.codes_shape(rows, cols).iter().product()).map(|_| byte()).collect();
    if !format.code.is_integer() {
        codes.fill(0x3c); // a small positive float in both formats
    }
    Matrix::new(
        format,
        rows,
        cols,
        codes,
        f16::ONE.to_le_bytes().repeat(rows * format.row_side(cols) / 2),
    )
    .unwrap()
}

/// Returns the median seconds of one matrix at each row count.
fn measure(isa: Isa, pool: &Pool, packed: &[PackedMatrix], format: Format) -> Vec<f64> {
    let most = ROWS[ROWS.len() - 1];
    let (n, k) = (packed[0].rows(), packed[0].cols());
    let ints: Vec<i8> = (0..most * k).map(|i| (i * 31 % 255) as i8).map(|x| x.max(-127)).collect();
    let floats = vec![0.5f32; most * k];
    let groups = format.groups(k);
    let (scales, sums) = (vec![0.01; most * groups], vec![3; most * groups]);
    let mut out = vec![0f32; most * n];
    let out = Out(out.as_mut_ptr());
    let mut samples = vec![Vec::new(); ROWS.len()];
    let rounds = 9;
    for round in 0..rounds + 1 {
        for (samples, rows) in samples.iter_mut().zip(ROWS) {
            let values = if format.code.is_integer() {
                ActValues::I8(&ints)
            } else {
                ActValues::F32(&floats)
            };
            let act = ActView { rows, cols: k, values, scales: &scales, sums: &sums };
            // With many rows, a part of the set is enough.
            let used = &packed[..packed.len().div_ceil(1 + rows / 16)];
            let repeats = (SHORTEST / (used.len() * packed[0].bytes())).max(1);
            let pass = |act: &ActView<'_>, repeats: usize| {
                pool.run(&|worker| {
                    for matrix in (0..repeats).flat_map(|_| used) {
                        let tiles = worker.share(matrix.tiles());
                        // SAFETY: workers have disjoint tiles; `out` has rows * n floats.
                        unsafe { linear(isa, matrix, act, tiles, OutputPlace::of(out.get(), n)) };
                        worker.barrier();
                    }
                })
            };
            // An untimed pass first brings the caches into the state that a pass over this set
            // leaves.
            pass(&ActView { rows: 1, ..act }, 1);
            let start = Instant::now();
            pass(&act, repeats);
            if round > 0 {
                samples.push(start.elapsed().as_secs_f64() / (repeats * used.len()) as f64);
            }
        }
    }
    samples
        .into_iter()
        .map(|mut s| {
            s.sort_by(f64::total_cmp);
            s[rounds / 2]
        })
        .collect()
}
