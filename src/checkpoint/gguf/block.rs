//! How GGUF stores weights: plain floats, or blocks of weights with their scales among them.
//!
//! | type | weights | bytes | value |
//! |------|--------:|------:|-------|
//! | Q4_0 | 32 | 18 | d (q - 8) |
//! | Q4_1 | 32 | 20 | d q + m |
//! | Q5_0 | 32 | 22 | d (q - 16) |
//! | Q5_1 | 32 | 24 | d q + m |
//! | Q8_0 | 32 | 34 | d q |
//! | Q4_K, Q5_K | 256 | 144, 176 | d s q - m t, with 6-bit s and t for each 32 weights |
//! | Q6_K | 256 | 210 | d s (q - 32), with int8 s for each 16 weights |
//!
//! d and m are f16. Q4_0 and Q8_0 hold exactly what our `i4-g32` and `i8-g32` do, only in another
//! order; the others have no equal among our formats and are decoded: exactly to f32, or to the
//! nearest bf16 where a whole matrix is loaded, which takes half the room and adds an error some
//! thousand times below that of the type.
//! Source: ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c (meaning).

use crate::checkpoint::Dtype;
use crate::tensor::{Coding, Format, Matrix};
use crate::util::threads;
use anyhow::Result;
use half::{bf16, f16};
use rayon::prelude::*;
use std::fmt;
use std::ops::Range;

/// A type of tensor that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// Kind, number in the file, spelling, weights and bytes of a block.
const TABLE: [(Kind, u32, &str, usize, usize); 11] = [
    (Kind::F32, 0, "F32", 1, 4),
    (Kind::F16, 1, "F16", 1, 2),
    (Kind::Bf16, 30, "BF16", 1, 2),
    (Kind::Q4_0, 2, "Q4_0", 32, 18),
    (Kind::Q4_1, 3, "Q4_1", 32, 20),
    (Kind::Q5_0, 6, "Q5_0", 32, 22),
    (Kind::Q5_1, 7, "Q5_1", 32, 24),
    (Kind::Q8_0, 8, "Q8_0", 32, 34),
    (Kind::Q4K, 12, "Q4_K", 256, 144),
    (Kind::Q5K, 13, "Q5_K", 256, 176),
    (Kind::Q6K, 14, "Q6_K", 256, 210),
];

/// Types that exist but cannot be read.
const FOREIGN: [(u32, &str); 18] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(TABLE[*self as usize].2)
    }
}

/// Weights decoded by one thread at once.
const RUN: usize = 1 << 20;

impl Kind {
    /// By its number in the file.
    pub fn of(number: u32) -> Option<Kind> {
        TABLE.iter().find(|row| row.1 == number).map(|row| row.0)
    }

    /// The spelling of a type that cannot be read.
    pub fn foreign(number: u32) -> Option<&'static str> {
        FOREIGN.iter().find(|row| row.0 == number).map(|row| row.1)
    }

    /// All that can be read, for people.
    pub fn names() -> String {
        TABLE.map(|row| row.2).join(", ")
    }

    /// By the name that it has there.
    pub fn named(name: &str) -> Option<Kind> {
        TABLE.iter().find(|row| row.2 == name).map(|row| row.0)
    }

    /// Its number in the file.
    pub fn number(self) -> u32 {
        TABLE[self as usize].1
    }

    /// Weights of one block, 1 for plain floats.
    pub fn weights(self) -> usize {
        TABLE[self as usize].3
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        TABLE[self as usize].4
    }

    /// Bytes of `n` weights, whole blocks.
    pub fn bytes_of(self, n: usize) -> usize {
        n / self.weights() * self.bytes()
    }

    /// The type of plain floats.
    pub fn dtype(self) -> Option<Dtype> {
        match self {
            Kind::F32 => Some(Dtype::F32),
            Kind::F16 => Some(Dtype::F16),
            Kind::Bf16 => Some(Dtype::BF16),
            _ => None,
        }
    }

    /// The format that holds the same values to the bit.
    pub fn format(self) -> Option<Format> {
        match self {
            Kind::F32 => Some(Format::F32),
            Kind::Bf16 => Some(Format::BF16),
            Kind::Q4_0 => Some(Format::I4_G32),
            Kind::Q8_0 => Some(Format::I8_G32),
            _ => None,
        }
    }

    /// For executors that decode blocks as [`Kind::matrix`] does; the number is that of the file.
    pub fn coding(self) -> Coding {
        Coding::Blocks { number: self.number(), weights: self.weights(), bytes: self.bytes() }
    }

    /// Blocks to floats, exactly as ggml computes them (multiplications and subtractions in f32,
    /// none fused).
    pub fn decode(self, data: &[u8], out: &mut [f32]) {
        assert_eq!(data.len(), self.bytes_of(out.len()), "{self} of {} weights", out.len());
        let blocks = data.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.weights()));
        match self {
            Kind::F32 => {
                blocks.for_each(|(b, o)| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            }
            Kind::F16 => blocks.for_each(|(b, o)| o[0] = float(b, 0)),
            Kind::Bf16 => {
                blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32())
            }
            Kind::Q4_0 => blocks.for_each(|(b, o)| {
                small(&b[2..], None, o, |q| (q as i32 - 8) as f32 * float(b, 0))
            }),
            Kind::Q4_1 => blocks.for_each(|(b, o)| {
                small(&b[4..], None, o, |q| q as f32 * float(b, 0) + float(b, 2))
            }),
            Kind::Q5_0 => blocks.for_each(|(b, o)| {
                small(&b[6..], Some(&b[2..6]), o, |q| (q as i32 - 16) as f32 * float(b, 0))
            }),
            Kind::Q5_1 => {
                blocks.for_each(|(b, o)| {
                    small(&b[8..], Some(&b[4..8]), o, |q| q as f32 * float(b, 0) + float(b, 2))
                });
            }
            Kind::Q8_0 => blocks.for_each(|(b, o)| {
                let d = float(b, 0);
                o.iter_mut().zip(&b[2..]).for_each(|(o, q)| *o = *q as i8 as f32 * d);
            }),
            Kind::Q4K => blocks.for_each(|(b, o)| k45(b, &b[16..144], None, o)),
            Kind::Q5K => blocks.for_each(|(b, o)| k45(b, &b[48..176], Some(&b[16..48]), o)),
            Kind::Q6K => blocks.for_each(|(b, o)| k6(b, o)),
        }
    }

    /// Rows as a matrix: to the bit where a format of ours allows that, else the nearest bf16.
    /// Codes go to the memory of `codes`, whose contents do not matter: fresh memory costs more
    /// time than conversion.
    pub fn matrix(
        self,
        rows: usize,
        cols: usize,
        data: &[u8],
        threads: usize,
        mut codes: Vec<u8>,
    ) -> Result<Matrix<'static>> {
        anyhow::ensure!(
            data.len() == rows * self.bytes_of(cols),
            "{self} [{rows}, {cols}] is not of {} bytes",
            data.len()
        );
        let n = rows * cols;
        match self {
            Kind::Q4_0 | Kind::Q8_0 => {
                let (format, width) =
                    if self == Kind::Q4_0 { (Format::I4_G32, 16) } else { (Format::I8_G32, 32) };
                codes.resize(n / 32 * width, 0);
                spread(data, self.bytes(), &mut codes, width, threads, |blocks, codes| {
                    for (block, codes) in
                        blocks.chunks_exact(self.bytes()).zip(codes.chunks_exact_mut(width))
                    {
                        match self {
                            Kind::Q4_0 => interleave(&block[2..], codes),
                            _ => codes.copy_from_slice(&block[2..]),
                        }
                    }
                });
                threads::prepare_common_pool();
                let blocks = data.par_chunks_exact(self.bytes()).with_min_len(RUN / 32);
                let scales: Vec<f16> = blocks.map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
                Matrix::new(format, rows, cols, codes, scales)
            }
            _ => {
                codes.resize(2 * n, 0);
                spread(
                    data,
                    self.bytes(),
                    &mut codes,
                    2 * self.weights(),
                    threads,
                    |blocks, codes| {
                        let mut values = [0f32; 256];
                        let values = &mut values[..self.weights()];
                        for (block, codes) in blocks
                            .chunks_exact(self.bytes())
                            .zip(codes.chunks_exact_mut(2 * self.weights()))
                        {
                            self.decode(block, values);
                            let codes = codes.as_chunks_mut::<2>().0;
                            codes
                                .iter_mut()
                                .zip(&*values)
                                .for_each(|(code, v)| *code = bf16::from_f32(*v).to_le_bytes());
                        }
                    },
                );
                Matrix::new(Format::BF16, rows, cols, codes, Vec::new())
            }
        }
    }

    /// Rows of a matrix of ours as blocks: those of [`Kind::format`] and, with each scale repeated,
    /// those of wider groups.
    pub fn encode(self, matrix: &Matrix<'_>, rows: Range<usize>) -> Vec<u8> {
        let blocks = matrix.cols / self.weights();
        let mut out = Vec::with_capacity(rows.len() * self.bytes_of(matrix.cols));
        for row in rows {
            let (codes, scales) = (matrix.row(row), matrix.row_scales(row));
            for (i, codes) in codes.chunks_exact(codes.len() / blocks).enumerate() {
                out.extend_from_slice(&scales[i * scales.len() / blocks].to_le_bytes());
                match self {
                    Kind::Q4_0 => {
                        let at = out.len();
                        out.resize(at + 16, 0);
                        separate(codes, &mut out[at..]);
                    }
                    _ => out.extend_from_slice(codes),
                }
            }
        }
        out
    }
}

/// Cuts input and output at the same blocks and works on the pieces side by side.
fn spread(
    data: &[u8],
    block: usize,
    out: &mut [u8],
    width: usize,
    threads: usize,
    work: impl Fn(&[u8], &mut [u8]) + Sync,
) {
    let blocks = data.len() / block;
    let each = blocks.div_ceil(threads.max(1)).max(RUN / 32);
    std::thread::scope(|scope| {
        for (data, out) in data.chunks(each * block).zip(out.chunks_mut(each * width)) {
            let work = &work;
            threads::spawn(scope, move || work(data, out));
        }
    });
}

/// The f16 at byte `at`.
fn float(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// ggml puts weight j and weight j + 16 into one byte; we put neighbours there.
fn interleave(from: &[u8], to: &mut [u8]) {
    for j in 0..8 {
        let (a, b) = (from[2 * j], from[2 * j + 1]);
        to[j] = a & 15 | b << 4;
        to[j + 8] = a >> 4 | b & 0xf0;
    }
}

/// The way back.
fn separate(from: &[u8], to: &mut [u8]) {
    for j in 0..8 {
        let (low, high) = (from[j], from[j + 8]);
        to[2 * j] = low & 15 | high << 4;
        to[2 * j + 1] = low >> 4 | high & 0xf0;
    }
}

/// 32 weights of 4 bits, with a fifth in `high`.
fn small(low: &[u8], high: Option<&[u8]>, out: &mut [f32], value: impl Fn(u8) -> f32) {
    let high = high.map_or(0, |h| u32::from_le_bytes([h[0], h[1], h[2], h[3]]));
    for j in 0..16 {
        out[j] = value(low[j] & 15 | ((high >> j & 1) as u8) << 4);
        out[j + 16] = value(low[j] >> 4 | ((high >> (j + 16) & 1) as u8) << 4);
    }
}

/// 256 weights of 4 bits, with a fifth in `high`; scales and minima of 6 bits are packed into bytes
/// 4..16.
fn k45(block: &[u8], low: &[u8], high: Option<&[u8]>, out: &mut [f32]) {
    let (d, m) = (float(block, 0), float(block, 2));
    let packed = &block[4..16];
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            ),
        };
        let (scale, min) = (d * scale as f32, m * min as f32);
        let low = &low[group / 2 * 32..][..32];
        for (j, o) in out.iter_mut().enumerate() {
            let fifth = high.map_or(0, |h| (h[j] >> group & 1) << 4);
            *o = scale * (low[j] >> (4 * (group % 2)) & 15 | fifth) as f32 - min;
        }
    }
}

/// 256 weights of 6 bits: four in `low`, two in `high`; a signed scale for each 16.
fn k6(block: &[u8], out: &mut [f32]) {
    let d = float(block, 208);
    let (lows, highs, scales) = (&block[..128], &block[128..192], &block[192..208]);
    // 16 weights share a scale, a shift and neighbouring bytes.
    for (i, out) in out.chunks_exact_mut(16).enumerate() {
        let (half, quarter, j) = (i / 8, i / 2 % 4, i % 2 * 16);
        let scale = d * scales[i] as i8 as f32;
        let (low, high) =
            (&lows[64 * half + 32 * (quarter % 2) + j..][..16], &highs[32 * half + j..][..16]);
        let (low_shift, high_shift) = (4 * (quarter / 2), 2 * quarter);
        for ((o, low), high) in out.iter_mut().zip(low).zip(high) {
            let code = low >> low_shift & 15 | (high >> high_shift & 3) << 4;
            *o = scale * (code as i32 - 32) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!((row.0 as usize, Kind::of(row.1)), (i, Some(row.0)));
            assert!(Kind::foreign(row.1).is_none(), "{}", row.2);
        }
    }

    #[test]
    fn nibbles_go_there_and_back() {
        let from: Vec<u8> = (0..16).map(|i| (i * 37 + 11) as u8).collect();
        let (mut ours, mut back) = ([0; 16], [0; 16]);
        interleave(&from, &mut ours);
        for col in 0..32 {
            let want = from[col % 16] >> (4 * (col / 16)) & 15;
            assert_eq!(ours[col / 2] >> (4 * (col % 2)) & 15, want, "{col}");
        }
        separate(&ours, &mut back);
        assert_eq!(from, back);
    }
}
