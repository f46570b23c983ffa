//! Block-wise rounding with linear feedback (LDLQ).
//!
//! The method is from Chee et al. 2023 (arXiv 2307.13304), in the form of QuIP#. It computes the
//! codes of a matrix from its weights and the second moments of its inputs. The targets are
//! corrected for inputs that are quantised too.
//!
//! `C C^T` is the matrix of second moments, so the output error of a row is `|(w - q) C|^2`.
//! Columns are coded from the last to the first, sixteen at a time. The target of a block is its
//! weights plus the feedback from the errors of later columns. The block's own rounding error
//! remains, weighted by its diagonal block of `C`.

mod inputs;
pub mod linalg;

pub use inputs::{Factor, Inputs, block_width};

use anyhow::Result;
use gemma_base::tensor::encode::{CodingDevice, Encoder, row_scale};
use gemma_base::tensor::product::View;
use gemma_base::tensor::{Format, Group, Matrix};
use linalg::{WIDE, corner, product, solve_upper};
use rayon::prelude::*;
use std::ops::Range;

/// Columns coded at once.
const BLOCK: usize = 16;
/// Columns between two sums over all later columns. Groups end at multiples of it.
const SPAN: usize = 128;
/// Rows on which scales are tried before all rows are coded.
const SAMPLE: usize = 64;
/// Least rows of a strip that one thread codes, unless the matrix has fewer. While a device
/// searches for the codes of some strips, threads compute the targets of others.
const STRIP: usize = 512;
/// Factors that are tried on the scale that was chosen without data.
const SCALES: [f32; 6] = [0.86, 0.93, 1.0, 1.07, 1.15, 1.25];

/// Returns whether [`solve_matrix`] supports this format and number of columns.
pub fn can_solve(format: Format, cols: usize) -> bool {
    format.code.is_coded_by_columns() && cols.is_multiple_of(SPAN)
}

/// A coded matrix and its loss.
pub struct Solved {
    pub matrix: Matrix<'static>,
    /// Squared output error over squared output on the calibration text: `|(w - q) C|^2 / |w C|^2`.
    pub loss: f64,
}

/// Codes `w`, f32 `[rows, cols]`. If the format has a Hadamard transform, it must have been applied
/// to `w` and `factors`.
///
/// With `try_scales`, one common factor for all scales is chosen on a sample of the rows. Without
/// it, each row is independent. `device` encodes trellis codes and multiplies.
pub fn solve_matrix(
    device: &dyn CodingDevice,
    format: Format,
    rows: usize,
    cols: usize,
    mut w: Vec<f32>,
    factors: &[Factor],
    try_scales: bool,
) -> Result<Solved> {
    assert!(w.len() == rows * cols && can_solve(format, cols));
    correct(device, &mut w, cols, factors)?;
    let mut scales = vec![1.0; rows];
    if format.group == Group::Row {
        scales = w.par_chunks(cols).map(|row| row_scale(format, row)).collect();
        if try_scales {
            let best = best_scale(device, format, rows, cols, &w, &scales, factors)?;
            scales.iter_mut().for_each(|s| *s *= best);
        }
    }
    let CodedColumns { encoder, fits } = code(device, format, cols, w, &scales, factors)?;
    let refit = format.group == Group::Row;
    let (mut loss, mut power) = (0.0, 0.0);
    for fit in &fits {
        loss += fit.loss(refit);
        power += fit.wanted;
    }
    let stored: Vec<f32> = fits.iter().zip(scales).map(|(fit, s)| s * fit.factor()).collect();
    Ok(Solved {
        matrix: encoder.finish(refit.then_some(&stored))?,
        loss: if power > 0.0 { loss / power } else { 0.0 },
    })
}

/// Corrects the targets `w` so that they reproduce the source's outputs on the inputs of the
/// quantised model.
fn correct(
    device: &dyn CodingDevice,
    w: &mut [f32],
    cols: usize,
    factors: &[Factor],
) -> Result<()> {
    for Factor { cols: at, correction, .. } in factors {
        let (Some(correction), n) = (correction, at.len()) else { continue };
        let whole = View::of(w, cols);
        let m = product(device, whole.part(0..whole.rows, at.clone()), View::of(correction, n))?;
        w.par_chunks_mut(cols)
            .zip(m.par_chunks(n))
            .for_each(|(w, m)| w[at.clone()].iter_mut().zip(m).for_each(|(w, m)| *w += m));
    }
    Ok(())
}

/// Returns the factor of the scales with the least loss on a sample of rows, spread evenly.
fn best_scale(
    device: &dyn CodingDevice,
    format: Format,
    rows: usize,
    cols: usize,
    w: &[f32],
    scales: &[f32],
    factors: &[Factor],
) -> Result<f32> {
    let n = SAMPLE.min(rows);
    let picked: Vec<usize> = (0..n).map(|i| i * rows / n).collect();
    let sample: Vec<f32> = picked.iter().flat_map(|r| &w[r * cols..][..cols]).copied().collect();
    // All factors are tried at the same time, because a GPU is used better with more rows.
    let tried: Vec<f32> =
        SCALES.iter().flat_map(|m| picked.iter().map(move |r| scales[*r] * m)).collect();
    let run = code(device, format, cols, sample.repeat(SCALES.len()), &tried, factors)?;
    let losses = run.fits.chunks_exact(n).map(|fits| fits.iter().map(|fit| fit.loss(true)).sum());
    let mut best = (f64::INFINITY, 1.0);
    for (loss, multiple) in losses.zip(SCALES) {
        if loss < best.0 {
            best = (loss, multiple);
        }
    }
    Ok(best.1)
}

/// Sums that compare a coded row with its target, in units of squared output.
#[derive(Clone, Copy, Default)]
struct RowFit {
    wanted: f64, // |w C|^2
    coded: f64,  // |q C|^2
    cross: f64,  // (w C) . (q C)
}

impl RowFit {
    fn add(&mut self, other: RowFit) {
        self.wanted += other.wanted;
        self.coded += other.coded;
        self.cross += other.cross;
    }

    /// Returns the factor of the row's scale that minimises the loss.
    fn factor(&self) -> f32 {
        if self.coded > 0.0 && self.cross > 0.0 { (self.cross / self.coded) as f32 } else { 1.0 }
    }

    fn loss(&self, refit: bool) -> f64 {
        let f = if refit { self.factor() as f64 } else { 1.0 };
        (self.wanted - 2.0 * f * self.cross + f * f * self.coded).max(0.0)
    }
}

struct CodedColumns {
    encoder: Encoder,
    fits: Vec<RowFit>, // [rows]
}

/// Codes all columns with feedback. The columns of different factors are coded at the same time.
fn code(
    device: &dyn CodingDevice,
    format: Format,
    cols: usize,
    w: Vec<f32>,
    scales: &[f32],
    factors: &[Factor],
) -> Result<CodedColumns> {
    let parts: Vec<Vec<f32>> = match factors.len() {
        1 => vec![w],
        _ => factors
            .par_iter()
            .map(|f| w.chunks_exact(cols).flat_map(|row| &row[f.cols.clone()]).copied().collect())
            .collect(),
    };
    let coded: Result<Vec<CodedColumns>> = parts
        .into_par_iter()
        .zip(factors)
        .map(|(part, factor)| {
            let (n, c) = (factor.cols.len(), &factor.c);
            let strip = (scales.len() * factors.len()).div_ceil(rayon::current_num_threads());
            let strip = strip.max(STRIP).next_multiple_of(BLOCK);
            code_columns(device, format, n, c, part, scales, strip)
        })
        .collect();
    let mut fits = vec![RowFit::default(); scales.len()];
    let mut encoders = Vec::new();
    for part in coded? {
        fits.iter_mut().zip(part.fits).for_each(|(fit, of_part)| fit.add(of_part));
        encoders.push(part.encoder);
    }
    Ok(CodedColumns { encoder: Encoder::side_by_side(encoders)?, fits })
}

/// Codes the columns of one factor `[n, n]`, from the last to the first. Strips of rows are coded
/// in parallel.
fn code_columns(
    device: &dyn CodingDevice,
    format: Format,
    n: usize,
    c: &[f32],
    w: Vec<f32>,
    scales: &[f32],
    strip: usize,
) -> Result<CodedColumns> {
    let rows = scales.len();
    let mut error = w; // weights, then weights minus decoded codes
    let mut decoded = vec![0.0; rows * n];
    let encoders: Result<Vec<Encoder>> = scales
        .chunks(strip)
        .map(|scales| Encoder::new(format, scales.len(), n, scales.to_vec()))
        .collect();
    let mut encoders = encoders?;
    for start in (0..n).step_by(WIDE).rev() {
        let wide = start..n.min(start + WIDE);
        // Feedback from the columns after the wide block.
        let later = View::of(&error, n).part(0..rows, wide.end..n);
        let feedback = product(device, later, View::of(c, n).part(wide.end..n, wide.clone()))?;
        let strips = error.par_chunks_mut(strip * n).zip(decoded.par_chunks_mut(strip * n));
        let strips = strips.zip(feedback.par_chunks(strip * wide.len()));
        strips.zip(&mut encoders).try_for_each(|(((error, decoded), feedback), encoder)| {
            code_wide(device, format, encoder, n, c, wide.clone(), error, decoded, feedback)
        })?;
    }
    let fits = measure(device, n, c, &error, &decoded)?;
    Ok(CodedColumns { encoder: Encoder::below(encoders)?, fits })
}

/// Codes a wide block of columns for a strip of rows. `error` and `decoded` are f32 `[rows, n]`.
/// `far` is the feedback from the columns after the block, `[rows, wide]`.
fn code_wide(
    device: &dyn CodingDevice,
    format: Format,
    encoder: &mut Encoder,
    n: usize,
    c: &[f32],
    wide: Range<usize>,
    error: &mut [f32],
    decoded: &mut [f32],
    far: &[f32],
) -> Result<()> {
    let rows = error.len() / n;
    let mut targets = vec![0.0; rows * BLOCK];
    let mut codes = vec![0.0; rows * BLOCK];
    let mut feedback = vec![0.0; rows * SPAN];
    for span in wide.clone().step_by(SPAN).rev() {
        let end = wide.end.min(span + SPAN);
        // Feedback from the columns after the span.
        let lines = feedback.chunks_exact_mut(SPAN).zip(far.chunks_exact(wide.len()));
        lines.for_each(|(f, far)| {
            f[..end - span].copy_from_slice(&far[span - wide.start..end - wide.start])
        });
        if end < wide.end {
            let later = View::of(error, n).part(0..rows, end..wide.end);
            let near = View::of(c, n).part(end..wide.end, span..end);
            device.multiply(&mut feedback, SPAN, 1.0, 1.0, later, near)?;
        }
        for start in (span..end).step_by(BLOCK).rev() {
            let at = start - span;
            if let Group::Cols(width) = format.group
                && (start + BLOCK).is_multiple_of(width as usize)
            {
                let group = start + BLOCK - width as usize..start + BLOCK;
                let index = group.start / width as usize;
                let targets = group_targets(device, n, c, group, end, &feedback, error)?;
                encoder.begin_group(index, &targets);
            }
            if start + BLOCK < end {
                let later = View::of(error, n).part(0..rows, start + BLOCK..end);
                let part = View::of(c, n).part(start + BLOCK..end, start..start + BLOCK);
                device.multiply(&mut feedback[at..], SPAN, 1.0, 1.0, later, part)?;
            }
            let corner = corner(c, n, start..start + BLOCK);
            let block = start / BLOCK;
            for (r, target) in targets.chunks_exact_mut(BLOCK).enumerate() {
                target.copy_from_slice(&feedback[r * SPAN + at..][..BLOCK]);
                solve_upper(&corner, BLOCK, target);
                target.iter_mut().zip(&error[r * n + start..]).for_each(|(t, w)| *t += w);
            }
            match format.code.is_trellis() {
                true => encoder.encode(device, block..block + 1, &targets, &mut codes)?,
                false => encoder.encode_in_turn(block, &targets, &corner, &mut codes),
            }
            let lines = error.chunks_exact_mut(n).zip(decoded.chunks_exact_mut(n));
            for ((error, decoded), codes) in lines.zip(codes.chunks_exact(BLOCK)) {
                decoded[start..][..BLOCK].copy_from_slice(codes);
                error[start..][..BLOCK].iter_mut().zip(codes).for_each(|(e, q)| *e -= q);
            }
        }
    }
    Ok(())
}

/// Returns the targets of a group of columns before any of it is coded, f32 `[rows, group]`. The
/// scale of the group is chosen for them. `feedback` is that of the columns after the span, which
/// ends at `end`.
fn group_targets(
    device: &dyn CodingDevice,
    n: usize,
    c: &[f32],
    group: Range<usize>,
    end: usize,
    feedback: &[f32],
    error: &[f32],
) -> Result<Vec<f32>> {
    let (width, rows, at) = (group.len(), error.len() / n, group.start % SPAN);
    let mut targets: Vec<f32> =
        feedback.chunks_exact(SPAN).flat_map(|row| &row[at..at + width]).copied().collect();
    if group.end < end {
        let later = View::of(error, n).part(0..rows, group.end..end);
        let part = View::of(c, n).part(group.end..end, group.clone());
        device.multiply(&mut targets, width, 1.0, 1.0, later, part)?;
    }
    let corner = corner(c, n, group.clone());
    targets.par_chunks_mut(width).enumerate().for_each(|(r, target)| {
        solve_upper(&corner, width, target);
        target.iter_mut().zip(&error[r * n + group.start..]).for_each(|(t, w)| *t += w);
    });
    Ok(targets)
}

/// Returns the sums over the columns of one factor that compare each row with its target.
fn measure(
    device: &dyn CodingDevice,
    n: usize,
    c: &[f32],
    error: &[f32],
    decoded: &[f32],
) -> Result<Vec<RowFit>> {
    let rows = error.len() / n;
    let mut fits = vec![RowFit::default(); rows];
    for start in (0..n).step_by(WIDE) {
        let end = n.min(start + WIDE);
        let strip = View::of(c, n).part(start..n, start..end);
        let columns = |x| View::of(x, n).part(0..rows, start..n);
        let lost = product(device, columns(error), strip)?;
        let coded = product(device, columns(decoded), strip)?;
        let width = end - start;
        fits.par_iter_mut().enumerate().for_each(|(r, fit)| {
            for (e, q) in lost[r * width..][..width].iter().zip(&coded[r * width..][..width]) {
                let (q, w) = (*q as f64, (*e + *q) as f64);
                fit.add(RowFit { wanted: w * w, coded: q * q, cross: w * q });
            }
        });
    }
    Ok(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_base::tensor::encode::OnProcessor;

    /// Rows are independent once their scales are known, however many there are.
    #[test]
    fn strips_change_no_byte() {
        let (rows, cols) = (2 * STRIP + 24, 2 * SPAN);
        let mut state = 1u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let w: Vec<f32> = (0..rows * cols).map(|_| number()).collect();
        let mut c = vec![0.0; cols * cols];
        for i in 0..cols {
            (0..i).for_each(|j| c[i * cols + j] = 0.1 * number());
            c[i * cols + i] = 1.5 + number() / 2.0;
        }
        let factors = [Factor { cols: 0..cols, c, correction: None }];
        let format: Format = "t2-row".parse().unwrap();
        let solve = |rows: Range<usize>| {
            let part = w[rows.start * cols..rows.end * cols].to_vec();
            solve_matrix(&OnProcessor, format, rows.len(), cols, part, &factors, false).unwrap()
        };
        let (whole, at) = (solve(0..rows), 640);
        let (a, b) = (solve(0..at).matrix, solve(at..rows).matrix);
        assert!(rows > at + STRIP / 2);
        assert!(whole.matrix.codes[..] == [&a.codes[..], &b.codes[..]].concat());
        assert!(whole.matrix.side[..] == [&a.side[..], &b.side[..]].concat());
        assert!(whole.loss > 0.0 && whole.loss < 0.2, "{}", whole.loss);
    }
}
