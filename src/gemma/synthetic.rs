//! Made-up weights: any shape, any format, the same for the same seed. They cost no memory until a matrix is asked for.

use super::Role;
use crate::tensor::trellis::Trellis;
use crate::tensor::{Code, Format, Matrix};
use anyhow::Result;
use half::{bf16, f16};
use std::collections::HashMap;

/// Below this many bytes a second thread costs more than it brings.
const SMALL: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Synthetic {
    formats: HashMap<(Role, usize), Format>,
    seed: u64,
}

/// A stream of 64-bit numbers (splitmix64).
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

impl Synthetic {
    /// `format_of` is asked for each matrix of so many layers.
    pub fn new(n_layers: usize, format_of: impl Fn(Role, usize) -> Format, seed: u64) -> Self {
        let layers = |role: Role| 0..if role.is_layer() { n_layers } else { 1 };
        let matrices = Role::MATRICES.into_iter().flat_map(|role| layers(role).map(move |layer| (role, layer)));
        Synthetic { formats: matrices.map(|(role, layer)| ((role, layer), format_of(role, layer))).collect(), seed }
    }

    pub fn format(&self, role: Role, layer: usize) -> Format {
        self.formats[&(role, layer)]
    }

    fn stream(&self, role: Role, layer: usize, row: usize) -> Stream {
        let mut mix = Stream(self.seed ^ (role as u64) << 56 ^ (layer as u64) << 40 ^ row as u64);
        Stream(mix.next())
    }

    /// Uniform weights of variance 1 / cols, so that activations neither vanish nor explode.
    pub fn matrix(&self, role: Role, layer: usize, rows: usize, cols: usize) -> Result<Matrix<'static>> {
        let format = self.format(role, layer);
        format.check_cols(cols)?;
        let limit = (3.0 / cols as f32).sqrt();
        let row_bytes = format.row_bytes(cols);
        let mut codes = vec![0u8; format.stored_rows(rows) * row_bytes];
        let threads = if codes.len() < SMALL { 1 } else { std::thread::available_parallelism().map_or(1, |n| n.get()) };
        let rows_each = rows.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, chunk) in codes.chunks_mut(rows_each * row_bytes).enumerate() {
                scope.spawn(move || {
                    for (i, row) in chunk.chunks_exact_mut(row_bytes).enumerate() {
                        fill(format.code, row, limit, self.stream(role, layer, part * rows_each + i));
                    }
                });
            }
        });
        let largest = match (format.code, Trellis::of(format.code)) {
            (_, Some(trellis)) => trellis.deviation() * f32::sqrt(3.0),
            (Code::I8, _) => 127.0,
            (Code::I8a, _) => 127.5,
            (Code::I4, _) => 8.0,
            _ => 1.5,
        };
        let mut stream = self.stream(role, layer, rows);
        // A little spread, so that a kernel that mixes up its scales is caught.
        let mut scale = || f16::from_f32(limit / largest * (1.0 + 0.25 * stream.unit()));
        let scales: Vec<f16> = match format.code {
            Code::I8a => (0..rows).flat_map(|_| [scale(), f16::from_f32(-limit)]).collect(),
            _ => (0..rows * format.groups(cols)).map(|_| scale()).collect(),
        };
        Matrix::new(format, rows, cols, codes, scales)
    }

    /// Norm weights between -1/4 and 1/4.
    pub fn vector(&self, role: Role, layer: usize, cols: usize) -> Vec<f32> {
        let mut stream = self.stream(role, layer, 0);
        (0..cols).map(|_| stream.unit() / 4.0).collect()
    }
}

/// One row of codes.
fn fill(code: Code, row: &mut [u8], limit: f32, mut stream: Stream) {
    match code {
        Code::F32 => row.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = (stream.unit() * limit).to_le_bytes()),
        Code::Bf16 => {
            row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = bf16::from_f32(stream.unit() * limit).to_le_bytes());
        }
        _ => {
            for bytes in row.chunks_mut(8) {
                bytes.copy_from_slice(&stream.next().to_le_bytes()[..bytes.len()]);
            }
            if code == Code::I8 {
                // -128 is no code.
                row.iter_mut().filter(|b| **b == 0x80).for_each(|b| *b = 0);
            }
        }
    }
}
