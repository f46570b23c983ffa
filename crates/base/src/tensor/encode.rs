//! Quantises a matrix a few columns at a time, so that a solver can compensate the errors of coded
//! columns in the targets of the others.

use super::integer::Integer;
use super::product::{View, multiply};
use super::round::{code_of_nearest, f16_nonzero, scale_for};
use super::trellis::{TILE, Trellis};
use super::viterbi::{TOGETHER, Viterbi, WEIGHTS};
use super::{Format, Group, Matrix, Values};
use anyhow::{Context, Result, ensure};
use rayon::prelude::*;
use std::cell::RefCell;
use std::fmt::Debug;
use std::ops::Range;

/// A device for the heavy work of coding. All devices return the same results, bit for bit.
pub trait CodingDevice: Debug + Send + Sync {
    /// Returns the number of weights that `threads` threads trellis-code in about a second.
    fn at_once(&self, threads: usize) -> usize {
        threads * (256 << 10)
    }

    /// Finds the best bits of each row of each tile.
    ///
    /// `wanted` is `[tiles, 16, 16]` in units of the integers.
    fn encode(&self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()>;

    /// Computes `c = keep * c + factor * a b`. `c` is row-major with rows `stride` apart.
    fn multiply(
        &self,
        c: &mut [f32],
        stride: usize,
        keep: f32,
        factor: f32,
        a: View<'_>,
        b: View<'_>,
    ) -> Result<()> {
        multiply(c, stride, keep, factor, a, b);
        Ok(())
    }
}

/// The processor with the threads of rayon's pool.
#[derive(Clone, Copy, Debug)]
pub struct OnProcessor;

thread_local! {
    /// The thread's encoder of each code. Building its tables takes longer than coding a tile.
    static ENCODERS: RefCell<Vec<Viterbi>> = const { RefCell::new(Vec::new()) };
}

impl CodingDevice for OnProcessor {
    fn encode(&self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()> {
        let (tiles, rest) = wanted.as_chunks::<WEIGHTS>();
        ensure!(rest.is_empty() && tiles.len() == rows.len(), "whole tiles are coded");
        rows.par_chunks_mut(TOGETHER).zip(tiles.par_chunks(TOGETHER)).for_each(|(rows, tiles)| {
            ENCODERS.with_borrow_mut(|known| {
                let at = known.iter().position(|v| v.trellis() == trellis).unwrap_or_else(|| {
                    known.push(Viterbi::new(trellis));
                    known.len() - 1
                });
                known[at].encode(tiles, rows);
            });
        });
        Ok(())
    }
}

/// Columns that are coded together.
pub const BLOCK: usize = TILE;

/// Feedback factor of columns that are independent of each other's errors.
const IDENTITY: [f32; BLOCK * BLOCK] = {
    let mut c = [0.0; BLOCK * BLOCK];
    let mut i = 0;
    while i < BLOCK {
        c[i * BLOCK + i] = 1.0;
        i += 1;
    }
    c
};

/// A matrix during the choice of its codes.
///
/// With a Hadamard, all values here are transformed: targets, decoded values and scales.
pub struct Encoder {
    format: Format,
    /// `None` for trellis codes.
    integer: Option<Integer>,
    rows: usize,
    cols: usize,
    scales: Vec<f32>, // [rows, groups]: scales of the integers
    /// Integer codes, one per byte, `[rows, cols]`; for trellis codes the stored tiles.
    codes: Vec<u8>,
}

/// Returns the best scale of a row of Gaussian-like weights, for formats with one scale per row, in
/// units of [`Matrix::code`].
pub fn row_scale(format: Format, row: &[f32]) -> f32 {
    match format.code.spec().values {
        Values::Trellis { trellis, gain } => {
            let mean_square =
                row.iter().map(|v| *v as f64 * *v as f64).sum::<f64>() / row.len() as f64;
            f32::max(mean_square.sqrt() as f32 / trellis.deviation() * gain, f32::MIN_POSITIVE)
        }
        Values::Integer(integer) => {
            let rotated = Format { hadamard: true, ..format };
            scale_for(&integer, rotated, row).to_f32() * integer.unit()
        }
        _ => 1.0,
    }
}

impl Encoder {
    /// Creates an encoder. `scales` `[rows]` are the scales of each row's integers; ignored if each
    /// group has scales, which [`Encoder::begin_group`] chooses.
    pub fn new(format: Format, rows: usize, cols: usize, scales: Vec<f32>) -> Result<Encoder> {
        format.check_cols(cols)?;
        ensure!(format.code.is_coded_by_columns(), "{format} is not coded by columns");
        ensure!(
            cols.is_multiple_of(BLOCK),
            "coding by columns needs a multiple of {BLOCK} columns, got {cols}"
        );
        let groups = format.groups(cols);
        let scales = match format.group {
            Group::Row => scales,
            Group::Cols(_) => vec![0.0; rows * groups],
        };
        ensure!(
            scales.len() == rows * groups,
            "{format} needs {} scales, got {}",
            rows * groups,
            scales.len()
        );
        let (integer, bytes) = match format.code.spec().values {
            Values::Integer(integer) => (Some(integer), rows * cols),
            _ => (None, format.codes_shape(rows, cols).iter().product()),
        };
        Ok(Encoder { format, integer, rows, cols, scales, codes: vec![0; bytes] })
    }

    /// Chooses the scales of a group of columns from its targets `[rows, group_cols]`. Must be
    /// called before the group's first block.
    pub fn begin_group(&mut self, group: usize, targets: &[f32]) {
        let width = self.format.group_cols(self.cols);
        let groups = self.format.groups(self.cols);
        let (format, Some(integer)) = (self.format, self.integer) else { return };
        self.scales.par_chunks_mut(groups).zip(targets.par_chunks(width)).for_each(
            |(scales, targets)| {
                scales[group] = scale_for(&integer, format, targets).to_f32() * integer.unit();
            },
        );
    }

    /// Codes blocks of 16 columns from `targets` into `decoded`, both `[rows, 16 * blocks]`.
    /// `device` codes trellis codes; other codes allow only one block per call.
    pub fn encode(
        &mut self,
        device: &dyn CodingDevice,
        blocks: Range<usize>,
        targets: &[f32],
        decoded: &mut [f32],
    ) -> Result<()> {
        assert!(
            targets.len() == self.rows * BLOCK * blocks.len()
                && decoded.len() == targets.len()
                && blocks.end <= self.cols / BLOCK
        );
        match self.format.code.trellis() {
            Some(trellis) => self.encode_tiles(device, trellis, blocks, targets, decoded)?,
            None => self.encode_in_turn(blocks.start, targets, &IDENTITY, decoded),
        }
        Ok(())
    }

    /// Codes the columns of a block one by one, from the last to the first.
    ///
    /// Errors of coded columns adjust the targets of the remaining ones. `c` is the block's lower
    /// triangular factor `[16, 16]`; its column j weights the errors that adjust column j. Trellis
    /// codes choose all columns at once and cannot do this.
    pub fn encode_in_turn(
        &mut self,
        block: usize,
        targets: &[f32],
        c: &[f32],
        decoded: &mut [f32],
    ) {
        let Encoder { format, integer: Some(integer), cols, scales, codes, .. } = self else {
            panic!("trellis codes are not coded in turn");
        };
        let (first, integer) = (block * BLOCK, *integer);
        let (groups, group) = (format.groups(*cols), first / format.group_cols(*cols));
        let rows = codes.par_chunks_mut(*cols).zip(scales.par_chunks(groups)).with_min_len(64);
        let values = targets.par_chunks(BLOCK).zip(decoded.par_chunks_mut(BLOCK));
        rows.zip(values).for_each(|((codes, scales), (targets, decoded))| {
            let scale = scales[group] / integer.unit();
            let mut errors = [0f32; BLOCK];
            for j in (0..BLOCK).rev() {
                let feedback: f32 = (j + 1..BLOCK).map(|i| errors[i] * c[i * BLOCK + j]).sum();
                (codes[first + j], decoded[j]) =
                    code_of_nearest(&integer, targets[j] + feedback / c[j * BLOCK + j], scale);
                errors[j] = targets[j] - decoded[j];
            }
        });
    }

    fn encode_tiles(
        &mut self,
        device: &dyn CodingDevice,
        trellis: Trellis,
        blocks: Range<usize>,
        targets: &[f32],
        decoded: &mut [f32],
    ) -> Result<()> {
        let (tile_bytes, tile_cols) = (trellis.tile_bytes(), self.cols / TILE);
        let (n, width) = (blocks.len(), TILE * blocks.len());
        // Rows of the last tile past the end of the matrix have the target 0.
        let mut wanted = vec![0f32; self.rows.next_multiple_of(TILE) * width];
        let of_rows = wanted.par_chunks_mut(TILE * width).zip(targets.par_chunks(TILE * width));
        let of_rows = of_rows.zip(self.scales.par_chunks(TILE)).with_min_len(32usize.div_ceil(n));
        of_rows.for_each(|((wanted, targets), scales)| {
            for (row, (targets, scale)) in targets.chunks_exact(width).zip(scales).enumerate() {
                for (tile, targets) in targets.chunks_exact(TILE).enumerate() {
                    let wanted = &mut wanted[tile * WEIGHTS + row * TILE..][..TILE];
                    wanted.iter_mut().zip(targets).for_each(|(w, t)| *w = t / scale);
                }
            }
        });
        let mut rows = vec![[0; TILE]; wanted.len() / WEIGHTS];
        device.encode(trellis, &wanted, &mut rows)?;
        let codes = self.codes.par_chunks_mut(tile_cols * tile_bytes).zip(rows.par_chunks(n));
        let values = self.scales.par_chunks(TILE).zip(decoded.par_chunks_mut(TILE * width));
        let each = codes.zip(values).with_min_len(32usize.div_ceil(n));
        each.for_each(|((codes, rows), (scales, decoded))| {
            let codes = codes[blocks.start * tile_bytes..].chunks_exact_mut(tile_bytes);
            for (i, (tile, rows)) in codes.zip(rows).enumerate() {
                tile.fill(0);
                rows.iter().enumerate().for_each(|(row, bits)| trellis.set_row(tile, row, *bits));
                let decoded = decoded.chunks_exact_mut(width).zip(scales).enumerate();
                for (row, (decoded, scale)) in decoded {
                    let decoded = &mut decoded[i * TILE..][..TILE];
                    let integers = trellis.decode_row(tile, row);
                    decoded.iter_mut().zip(integers).for_each(|(d, q)| *d = q as f32 * scale);
                }
            }
        });
        Ok(())
    }

    /// Stacks encoders of row ranges vertically. All but the last hold whole tiles of rows.
    pub fn below(parts: Vec<Encoder>) -> Result<Encoder> {
        let first = parts.first().context("a matrix has rows")?;
        let (format, cols) = (first.format, first.cols);
        let scales = parts.iter().flat_map(|part| &part.scales).copied().collect();
        let rows = parts.iter().map(|part| part.rows).sum();
        let codes = parts.iter().flat_map(|part| &part.codes).copied().collect();
        Ok(Encoder { format, integer: first.integer, rows, cols, scales, codes })
    }

    /// Joins encoders of column ranges from left to right.
    pub fn side_by_side(parts: Vec<Encoder>) -> Result<Encoder> {
        let first = parts.first().context("a matrix has columns")?;
        let (format, integer, rows) = (first.format, first.integer, first.rows);
        let lines = if integer.is_some() { rows } else { rows.div_ceil(TILE) };
        let codes: Vec<&[u8]> = parts.iter().map(|part| &part.codes[..]).collect();
        let scales: Vec<&[f32]> = parts.iter().map(|part| &part.scales[..]).collect();
        let scales = match format.group {
            Group::Row => first.scales.clone(),
            Group::Cols(_) => interleaved(rows, &scales),
        };
        let (codes, cols) = (interleaved(lines, &codes), parts.iter().map(|part| part.cols).sum());
        Ok(Encoder { format, integer, rows, cols, scales, codes })
    }

    /// Returns the matrix. `scales` `[rows, groups]`, if present, replace the scales that were used
    /// to choose the codes.
    pub fn finish(self, scales: Option<&[f32]>) -> Result<Matrix<'static>> {
        let Encoder { format, integer, rows, cols, codes, .. } = self;
        let (scales, unit) = (scales.unwrap_or(&self.scales), format.code.unit());
        let side: Vec<u8> =
            scales.iter().flat_map(|s| f16_nonzero(s / unit).to_le_bytes()).collect();
        let codes = match integer {
            None => codes,
            Some(integer) => {
                let mut packed = vec![0; rows * format.row_bytes(cols)];
                integer.pack(&codes, &mut packed);
                packed
            }
        };
        Matrix::new(format, rows, cols, codes, side)
    }
}

/// Joins matrices of `lines` lines horizontally.
fn interleaved<T: Copy>(lines: usize, parts: &[&[T]]) -> Vec<T> {
    let line = |i: usize| {
        parts.iter().flat_map(move |part| {
            let width = part.len() / lines;
            &part[i * width..][..width]
        })
    };
    (0..lines).flat_map(line).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::super::quantize::{gaussian, quantize};
    use super::*;

    /// Without feedback, coding by columns and by rows gives the same result.
    #[test]
    fn columns_and_rows_agree() {
        let (rows, cols) = (19, 256);
        let x = gaussian(rows * cols, 11);
        for format in Format::written().filter(|format| format.code.is_coded_by_columns()) {
            let whole = quantize(format, rows, cols, &x).unwrap();
            let scales = match format.group {
                Group::Row if format.code.is_trellis() => {
                    x.chunks_exact(cols).map(|row| row_scale(format, row)).collect()
                }
                Group::Row => {
                    (0..rows).map(|row| whole.factors(row, 0).scale * format.code.unit()).collect()
                }
                Group::Cols(_) => Vec::new(),
            };
            let mut encoder = Encoder::new(format, rows, cols, scales).unwrap();
            let width = format.group_cols(cols);
            let part = |from: usize, n: usize| -> Vec<f32> {
                x.chunks_exact(cols).flat_map(|row| row[from..from + n].to_vec()).collect()
            };
            let mut decoded = vec![0.0; rows * BLOCK];
            for block in (0..cols / BLOCK).rev() {
                let at = block * BLOCK;
                if format.group != Group::Row && (at + BLOCK).is_multiple_of(width) {
                    encoder.begin_group(at / width, &part(at / width * width, width));
                }
                encoder
                    .encode(&OnProcessor, block..block + 1, &part(at, BLOCK), &mut decoded)
                    .unwrap();
            }
            let first = decoded[..BLOCK].to_vec();
            let got = encoder.finish(None).unwrap();
            // Whole rows of trellis codes have their scales refitted to the codes.
            assert!(
                got.codes == whole.codes && (got.side == whole.side || format.code.is_trellis()),
                "{format}"
            );
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * a.abs();
            assert!(first.iter().zip(&got.dequantize()[..BLOCK]).all(near), "{format}");
        }
    }
}
