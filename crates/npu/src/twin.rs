//! The kernel in Rust: the same operations as in `npu-kernels/flash_partial.h`, with the same bits.
//! `tests/npu/kernel.rs` compiles the C++ source and compares. The host model runs this kernel.

use super::layout::{self, ABI, KernelShape, MAGIC, MAX_ROWS, NONE, OBJECT};
use half::bf16;

const LOWEST: f32 = -120.0;

/// The state of one core.
pub struct Twin {
    shape: KernelShape,
    q: Vec<f32>,      // [rows, head_dim]
    keys: Vec<f32>,   // [head_dim, keys]
    values: Vec<f32>, // [keys, head_dim]
    m: [f32; MAX_ROWS],
    l: [[f32; 4]; MAX_ROWS],
    o: Vec<f32>, // [rows, head_dim]
    limits: [u32; MAX_ROWS],
    rows: usize,
    serial: u32,
    done: u32,
}

impl Twin {
    pub fn new(shape: KernelShape) -> Twin {
        let (rows, dim) = (shape.rows(), shape.head_dim);
        Twin {
            shape,
            q: vec![0.0; rows * dim],
            keys: vec![0.0; shape.keys() * dim],
            values: vec![0.0; shape.keys() * dim],
            m: [NONE; MAX_ROWS],
            l: [[0.0; 4]; MAX_ROWS],
            o: vec![0.0; rows * dim],
            limits: [0; MAX_ROWS],
            rows: 0,
            serial: 0,
            done: 0,
        }
    }
}

fn element(object: &[u8], index: usize) -> f32 {
    bf16::from_bits(u16::from_le_bytes([object[2 * index], object[2 * index + 1]])).to_f32()
}

/// Returns 2^x for -120 <= x <= 0. It is exact at 0.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let whole = x.round_ties_even();
    let f = x - whole;
    let mut p = f * 0.055_009_01_f32;
    p += 0.242_211_16_f32;
    p *= f;
    p += 0.693_282_96_f32;
    p *= f;
    p += 1.0;
    p * f32::from_bits(((whole as i32 + 127) as u32) << 23)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn lowered(a: f32, b: f32) -> f32 {
    exp2(larger(a - b, LOWEST))
}

/// Rounds a finite number to bf16 and returns it as f32.
#[inline(always)]
fn rounded(v: f32) -> f32 {
    let bits = v.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Computes attention over one tile of `KEYS` keys for all rows of a core.
#[inline(always)]
fn tile_body<const KEYS: usize>(t: &mut Twin) {
    let dim = t.shape.head_dim;
    let keys = t.keys.as_chunks::<KEYS>().0;
    // A row that does not attend to this tile keeps its state.
    for r in (0..t.rows).filter(|r| t.limits[*r] > t.done).collect::<Vec<_>>() {
        let mut s = [0f32; KEYS];
        for (q, k) in t.q[r * dim..][..dim].iter().zip(keys) {
            for j in 0..KEYS {
                s[j] += q * k[j];
            }
        }
        // The kernel computes the maximum in this order: columns first, then (0, 2), (1, 3), and
        // both.
        let mut most = [s[0], s[1], s[2], s[3]];
        for j in 4..KEYS {
            most[j % 4] = larger(most[j % 4], s[j]);
        }
        let most = larger(larger(most[0], most[2]), larger(most[1], most[3]));
        let m = larger(t.m[r], most);
        let factor = lowered(t.m[r], m);
        t.m[r] = m;
        let p = s.map(|s| rounded(lowered(s, m)));
        let l = &mut t.l[r];
        l.iter_mut().for_each(|l| *l *= factor);
        for j in 0..KEYS {
            l[j % 4] += p[j];
        }
        let o = &mut t.o[r * dim..][..dim];
        o.iter_mut().for_each(|o| *o *= factor);
        for (p, v) in p.iter().zip(t.values.chunks_exact(dim)) {
            for (o, v) in o.iter_mut().zip(v) {
                *o += p * v;
            }
        }
    }
    t.done += 1;
}

fn tile(t: &mut Twin) {
    match t.shape.keys() {
        16 => tile_body::<16>(t),
        _ => tile_body::<8>(t),
    }
}

/// [`tile_body`] with AVX2. Products and sums stay separate operations, so no bit changes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn tile_avx2(t: &mut Twin) {
    tile(t);
}

/// The kernel of one core.
pub trait Core: Send {
    /// Reads a header. Returns the number of tiles after the queries.
    fn begin(&mut self, header: &[u8]) -> usize;
    fn query(&mut self, object: &[u8]);
    fn tile(&mut self, object: &[u8]);
    /// Writes the result.
    fn end(&mut self, out: &mut [u8]);
}

impl Core for Twin {
    fn begin(&mut self, header: &[u8]) -> usize {
        let word = |i| layout::word(header, i);
        let known = word(0) == MAGIC && word(1) == ABI && word(2) as usize == self.shape.head_dim;
        let rows = word(4) as usize;
        let good = known && [0, 4, 16, 32].contains(&rows) && rows <= self.shape.rows();
        self.rows = if good { rows } else { 0 };
        self.serial = if good { word(5) } else { 0 };
        self.limits = if good { layout::limits(header) } else { [0; MAX_ROWS] };
        self.done = 0;
        if known { word(3) as usize } else { 0 }
    }

    fn query(&mut self, object: &[u8]) {
        for row in 0..self.shape.rows() {
            for d in 0..self.shape.head_dim {
                self.q[row * self.shape.head_dim + d] =
                    element(object, layout::query_at(self.shape, row, d));
            }
        }
        self.m = [NONE; MAX_ROWS];
        self.l = [[0.0; 4]; MAX_ROWS];
        self.o.fill(0.0);
    }

    fn tile(&mut self, object: &[u8]) {
        if self.limits[..self.rows].iter().all(|limit| *limit <= self.done) {
            self.done += 1;
            return;
        }
        let (dim, keys) = (self.shape.head_dim, self.shape.keys());
        for key in 0..keys {
            for d in 0..dim {
                self.keys[d * keys + key] = element(object, layout::key_at(self.shape, key, d));
                self.values[key * dim + d] = element(object, layout::value_at(self.shape, key, d));
            }
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the condition above has checked that the processor has AVX2.
            return unsafe { tile_avx2(self) };
        }
        tile(self);
    }

    fn end(&mut self, out: &mut [u8]) {
        let (dim, rows) = (self.shape.head_dim, self.shape.rows());
        let mut put =
            |index: usize, word: u32| out[4 * index..][..4].copy_from_slice(&word.to_le_bytes());
        for r in 0..rows {
            for d in 0..dim {
                put(layout::out_at(self.shape, r, d), self.o[r * dim + d].to_bits());
            }
        }
        for r in 0..MAX_ROWS {
            let mine = r < self.rows;
            let l = self.l[r];
            put(rows * dim + r, if mine { self.m[r] } else { NONE }.to_bits());
            put(
                rows * dim + MAX_ROWS + r,
                if mine { (l[0] + l[2]) + (l[1] + l[3]) } else { 0.0 }.to_bits(),
            );
        }
        let echo = [MAGIC, ABI, self.done, self.rows as u32, self.serial];
        (0..16).for_each(|i| put(rows * dim + 2 * MAX_ROWS + i, echo.get(i).copied().unwrap_or(0)));
    }
}

const _: () = assert!(OBJECT == 2 * 2 * 2048);
