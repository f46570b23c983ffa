//! Random weights of any shape and format, deterministic in the seed. They use no memory until a
//! matrix is requested.

use super::{Role, TensorSpec};
use anyhow::Result;
use gemma_base::tensor::integer::Integer;
use gemma_base::tensor::{Code, Format, Matrix, SideKind, Source, StoredMatrix, Values, side};
use gemma_base::util::threads;
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::HashMap;

/// Bytes that a thread generates at once.
const PIECE: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Synthetic {
    formats: HashMap<(Role, usize), Format>,
    seed: u64,
}

/// A stream of 64-bit numbers (splitmix64).
struct RandomStream(u64);

/// Increment of a stream's state.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl RandomStream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns the stream without its first `n` numbers.
    fn skip(self, n: usize) -> RandomStream {
        RandomStream(self.0.wrapping_add((n as u64).wrapping_mul(STEP)))
    }

    /// Returns a number uniform in -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

impl Synthetic {
    /// Creates weights; `format_of` returns the format of each matrix.
    pub fn new(
        tensors: &[TensorSpec],
        format_of: impl Fn(Role, usize) -> Format,
        seed: u64,
    ) -> Self {
        let matrices = tensors.iter().filter(|t| t.is_matrix());
        let formats = matrices.map(|t| ((t.role, t.layer), format_of(t.role, t.layer))).collect();
        Synthetic { formats, seed }
    }

    pub fn format(&self, role: Role, layer: usize) -> Format {
        self.formats[&(role, layer)]
    }

    fn stream(&self, role: Role, layer: usize, row: usize) -> RandomStream {
        let mut mix =
            RandomStream(self.seed ^ (role as u64) << 56 ^ (layer as u64) << 40 ^ row as u64);
        RandomStream(mix.next())
    }

    /// Generates uniform weights of variance 1 / cols, so that activations neither vanish nor
    /// explode.
    pub fn matrix(
        &self,
        role: Role,
        layer: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix<'static>> {
        let stored = self.stored(role, layer, rows, cols)?;
        let mut codes = vec![0; stored.code_bytes()];
        let mut side = vec![0; stored.side_bytes()];
        let fill = |source: &dyn Source, bytes: &mut [u8]| {
            threads::prepare_common_pool();
            let pieces = bytes.par_chunks_mut(PIECE).enumerate();
            pieces.try_for_each(|(i, piece)| source.read_at(i * PIECE, piece))
        };
        fill(&*stored.codes, &mut codes)?;
        stored.side.iter().try_for_each(|source| fill(&**source, &mut side))?;
        Matrix::new(stored.format, rows, cols, codes, side)
    }

    /// Returns a matrix with weights that are generated when they are read.
    pub fn stored(
        &self,
        role: Role,
        layer: usize,
        rows: usize,
        cols: usize,
    ) -> Result<StoredMatrix<'_>> {
        let format = self.format(role, layer);
        format.check_cols(cols)?;
        let limit = (3.0 / cols as f32).sqrt();
        let kind = format.code.spec().side;
        let largest = match format.code.spec().values {
            Values::Trellis { trellis, .. } => trellis.deviation() * f32::sqrt(3.0),
            Values::Integer(Integer { levels: Some(levels), .. }) => -levels[0] as f32,
            Values::Integer(integer) if kind.has_min() => (integer.high - integer.low) / 2.0,
            Values::Integer(integer) => integer.shift - integer.low,
            Values::Grid(grid) => grid.deviation() * grid.unit * f32::sqrt(3.0),
            Values::Float => 1.0,
        };
        let codes = SyntheticCodes {
            weights: self,
            tensor: (role, layer),
            code: format.code,
            row_bytes: format.row_bytes(cols),
            limit,
        };
        let stream = self.stream(role, layer, rows).0;
        let side = SyntheticSide { stream, kind, unit: limit / largest, least: -limit };
        Ok(StoredMatrix { format, rows, cols, codes: Box::new(codes), side: Some(Box::new(side)) })
    }

    /// Generates factors between 3/4 and 5/4.
    pub fn vector(&self, role: Role, layer: usize, cols: usize) -> Vec<f32> {
        let mut stream = self.stream(role, layer, 0);
        (0..cols).map(|_| 1.0 + stream.unit() / 4.0).collect()
    }
}

/// Codes of a matrix. Each row has its own stream of random numbers.
struct SyntheticCodes<'a> {
    weights: &'a Synthetic,
    tensor: (Role, usize),
    code: Code,
    row_bytes: usize,
    limit: f32,
}

impl Source for SyntheticCodes<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let (mut at, mut out) = (at, out);
        while !out.is_empty() {
            let (row, from) = (at / self.row_bytes, at % self.row_bytes);
            let (part, rest) = out.split_at_mut(out.len().min(self.row_bytes - from));
            at += part.len();
            fill(
                self.code,
                from,
                part,
                self.limit,
                self.weights.stream(self.tensor.0, self.tensor.1, row),
            );
            out = rest;
        }
        Ok(())
    }
}

/// Side of a matrix. Scales vary a little, so that tests catch a kernel that mixes them up.
struct SyntheticSide {
    stream: u64,
    kind: SideKind,
    unit: f32,
    least: f32,
}

impl Source for SyntheticSide {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let draws = if self.kind.groups() > 1 { 4 } else { 1 };
        let bytes = self.kind.bytes().max(1);
        let mut stream = RandomStream(self.stream).skip(at / bytes * draws);
        let (mut from, mut out) = (at % bytes, out);
        while !out.is_empty() {
            let element = self.element(&mut stream);
            let (part, rest) = out.split_at_mut(out.len().min(bytes - from));
            part.copy_from_slice(&element[from..][..part.len()]);
            (from, out) = (0, rest);
        }
        Ok(())
    }
}

impl SyntheticSide {
    /// Generates an element. Its minima make the mean weight of each group 0.
    fn element(&self, stream: &mut RandomStream) -> [u8; side::BYTES] {
        let mut element = [0; side::BYTES];
        let spread = 1.0 + 0.25 * stream.unit();
        if self.kind.groups() > 1 {
            let draws = [stream.next(), stream.next(), stream.next()];
            element.copy_from_slice(&bytemuck::cast_slice(&draws)[..side::BYTES]);
        }
        let twice = |byte: u8| byte & 15 | byte << 4;
        // Standard deviation of the integers.
        let integers = match self.kind {
            SideKind::None | SideKind::Scale | SideKind::ScaleMin => 1.0,
            SideKind::SixBitMin => {
                element.copy_within(4..8, 8);
                element[12..16].iter_mut().for_each(|byte| *byte = twice(*byte));
                36.4
            }
            SideKind::FourBitMin => {
                element[4..].iter_mut().for_each(|byte| *byte = twice(*byte));
                8.8
            }
            SideKind::EightBit => 73.9,
            SideKind::SixBit | SideKind::SixBitSplit => 18.5,
            SideKind::FourBit | SideKind::FourBitWide => 18.5,
        };
        let half = |value: f32| f16::from_f32(value / integers).to_le_bytes();
        element[..2].copy_from_slice(&half(self.unit * spread));
        if self.kind == SideKind::ScaleMin {
            element[2..4].copy_from_slice(&half(self.least));
        } else if self.kind.has_min() {
            element[2..4].copy_from_slice(&half(-self.least * spread));
        }
        element
    }
}

/// Fills `out`, which starts at byte `at` of a row of N-byte values. `next` returns the values,
/// starting with the first one that begins at or after `at`.
fn pieces<const N: usize>(at: usize, out: &mut [u8], mut next: impl FnMut() -> [u8; N]) {
    let head = (N - at % N) % N;
    let (head, body) = out.split_at_mut(head.min(out.len()));
    if !head.is_empty() {
        head.copy_from_slice(&next()[at % N..][..head.len()]);
    }
    let (whole, tail) = body.as_chunks_mut::<N>();
    whole.iter_mut().for_each(|value| *value = next());
    if !tail.is_empty() {
        tail.copy_from_slice(&next()[..tail.len()]);
    }
}

/// Fills part of a row of codes, from byte `at`.
fn fill(code: Code, at: usize, part: &mut [u8], limit: f32, stream: RandomStream) {
    match code {
        Code::F32 => {
            let mut stream = stream.skip(at / 4);
            pieces(at, part, || (stream.unit() * limit).to_le_bytes());
        }
        Code::Bf16 => {
            let mut stream = stream.skip(at / 2);
            pieces(at, part, || bf16::from_f32(stream.unit() * limit).to_le_bytes());
        }
        _ => {
            let mut stream = stream.skip(at / 8);
            pieces(at, part, || stream.next().to_le_bytes());
            if code == Code::I8 {
                // The formats have no code -128.
                part.iter_mut().filter(|b| **b == 0x80).for_each(|b| *b = 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device reads pieces, the processor reads whole matrices; the bytes must be equal.
    #[test]
    fn pieces_of_a_matrix_are_parts_of_the_whole() {
        for format in ["f32", "bf16", "i8-row", "i8a-row", "i4-g32", "i2-g32", "t3-row"] {
            let format: Format = format.parse().unwrap();
            let (rows, cols) = (35, 192);
            let tensor = TensorSpec { role: Role::Up, layer: 1, rows, cols, stack: 1 };
            let synthetic = Synthetic::new(&[tensor], |_, _| format, 5);
            let stored = synthetic.stored(Role::Up, 1, rows, cols).unwrap();
            let whole = synthetic.matrix(Role::Up, 1, rows, cols).unwrap();
            let sides: [(&dyn Source, &[u8]); 2] =
                [(&*stored.codes, &whole.codes), (&**stored.side.as_ref().unwrap(), &whole.side)];
            for (source, whole) in sides {
                for (at, len) in [
                    (0, 1),
                    (1, 7),
                    (3, 200),
                    (190, 5),
                    (47, 48),
                    (whole.len().saturating_sub(3), 3),
                ] {
                    if at + len <= whole.len() {
                        let mut part = vec![9; len];
                        source.read_at(at, &mut part).unwrap();
                        assert_eq!(part, whole[at..at + len], "{format}, {len} bytes at {at}");
                    }
                }
            }
        }
    }
}
