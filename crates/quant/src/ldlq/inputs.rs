//! Second moments of a linear layer's inputs, and their cross moments with the inputs in the
//! source.

use super::linalg::{add_gram, cholesky, mirror, solve, transposed};
use anyhow::Result;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::hadamard;
use rayon::prelude::*;
use std::ops::Range;

/// Limit for the columns of a matrix of second moments. Wider inputs are cut into equal blocks,
/// which are treated as independent. 21504 columns make three blocks of 7168, which takes a ninth
/// of the time.
const WIDEST: usize = 8192;

/// Returns the columns of a block. The last block may be narrower.
pub fn block_width(cols: usize) -> usize {
    // The width is a multiple of the Hadamard width, so that each transform is inside one block.
    cols.div_ceil(cols.div_ceil(WIDEST).max(1)).next_multiple_of(hadamard::WIDTH).min(cols)
}

/// Damping: the share of the mean diagonal that is added to the diagonal.
const DAMPING: f32 = 0.01;

/// Attempts at a factorisation. Each attempt has ten times the damping of the previous one.
const TRIES: usize = 5;

/// Second moments of one block of columns, as sums over tokens.
#[derive(Clone)]
pub struct ColumnBlock {
    pub cols: Range<usize>,
    h: Vec<f32>,             // [n, n]: inputs in the quantised model
    cross: Option<Vec<f32>>, // [n, n]: inputs in the source times those
}

/// Second moments of the inputs of some linear layers.
#[derive(Clone)]
pub struct Inputs {
    cols: usize,
    blocks: Vec<ColumnBlock>,
}

/// Factorised moments of a block of columns.
pub struct Factor {
    pub cols: Range<usize>,
    /// `[n, n]`, lower triangular: `C C^T` is the matrix of damped second moments.
    pub c: Vec<f32>,
    /// `[n, n]`: cross moments minus second moments, times the inverse of the damped second
    /// moments. The weights times this matrix are added to the weights.
    pub correction: Option<Vec<f32>>,
}

impl Inputs {
    /// Returns the moments of zero tokens. With `corrected`, cross moments with the source are
    /// summed too.
    pub fn new(cols: usize, corrected: bool) -> Inputs {
        let width = block_width(cols);
        let blocks = (0..cols).step_by(width).map(|start| {
            let cols = start..cols.min(start + width);
            let area = cols.len() * cols.len();
            ColumnBlock { cols, h: vec![0.0; area], cross: corrected.then(|| vec![0.0; area]) }
        });
        Inputs { cols, blocks: blocks.collect() }
    }

    /// Adds tokens. `source` (if corrected) and `made` are their inputs in the source and in the
    /// quantised model, f32 `[tokens,
    pub fn add(
        &mut self,
        device: &dyn CodingDevice,
        source: Option<&[f32]>,
        made: &[f32],
        window: usize,
    ) -> Result<()> {
        let tokens: Vec<usize> = (0..made.len() / self.cols).filter(|t| t % window != 0).collect();
        self.add_tokens(device, source, made, &tokens)
    }

    /// Like [`Inputs::add`], but includes all tokens.
    pub fn add_all(
        &mut self,
        device: &dyn CodingDevice,
        source: Option<&[f32]>,
        made: &[f32],
    ) -> Result<()> {
        let tokens: Vec<usize> = (0..made.len() / self.cols).collect();
        self.add_tokens(device, source, made, &tokens)
    }

    fn add_tokens(
        &mut self,
        device: &dyn CodingDevice,
        source: Option<&[f32]>,
        made: &[f32],
        tokens: &[usize],
    ) -> Result<()> {
        let cols = self.cols;
        if tokens.is_empty() {
            return Ok(());
        }
        let cut = |x: &[f32], block: &Range<usize>| -> Vec<f32> {
            tokens.iter().flat_map(|t| &x[t * cols..][block.clone()]).copied().collect()
        };
        for block in &mut self.blocks {
            let (n, made) = (block.cols.len(), cut(made, &block.cols));
            add_gram(device, &mut block.h, n, &made, &made, true)?;
            if let (Some(cross), Some(source)) = (&mut block.cross, source) {
                add_gram(device, cross, n, &cut(source, &block.cols), &made, false)?;
            }
        }
        Ok(())
    }

    /// Returns all moments multiplied by `share`.
    pub fn share(&self, share: f32) -> Inputs {
        let times = |values: &Vec<f32>| values.par_iter().map(|v| v * share).collect();
        let blocks = self.blocks.iter().map(|block| ColumnBlock {
            cols: block.cols.clone(),
            h: times(&block.h),
            cross: block.cross.as_ref().map(times),
        });
        Inputs { cols: self.cols, blocks: blocks.collect() }
    }

    /// Adds `share` of the mean diagonal to the diagonal, so that errors in all directions have a
    /// cost.
    pub fn add_floor(&mut self, share: f32) {
        for block in &mut self.blocks {
            damp(&mut block.h, block.cols.len(), share);
        }
    }

    /// Factorises the moments, after a Hadamard transform if `transformed`.
    ///
    /// Returns a note for the log if damping had to be raised. If no damping is sufficient, columns
    /// are treated as independent.
    pub fn factor(
        self,
        device: &dyn CodingDevice,
        transformed: bool,
    ) -> Result<(Vec<Factor>, Option<String>)> {
        let solved: Result<Vec<_>> =
            self.blocks.into_par_iter().map(|block| block.factor(device, transformed)).collect();
        let (factors, notes): (Vec<Factor>, Vec<_>) = solved?.into_iter().unzip();
        Ok((factors, notes.into_iter().flatten().last()))
    }
}

impl ColumnBlock {
    fn factor(
        self,
        device: &dyn CodingDevice,
        transformed: bool,
    ) -> Result<(Factor, Option<String>)> {
        let ColumnBlock { cols, mut h, mut cross } = self;
        let n = cols.len();
        mirror(&mut h, n);
        if transformed {
            let offset = cols.start;
            transform_both(&mut h, n, offset);
            cross.iter_mut().for_each(|cross| transform_both(cross, n, offset));
        }
        if let Some(cross) = &mut cross {
            cross.par_iter_mut().zip(&h).for_each(|(g, h)| *g -= h);
        }
        let (c, tries) = factor(device, h, n);
        let note = (tries > 0).then(|| match tries < TRIES {
            true => format!("columns {cols:?}: damping raised {tries} times"),
            false => format!("columns {cols:?}: correlations ignored"),
        });
        let mut correction = cross.filter(|_| tries < TRIES);
        if let Some(shift) = &mut correction {
            solve(device, shift, &c, n)?;
        }
        Ok((Factor { cols, c, correction }, note))
    }
}

/// Returns the factor of a damped matrix, and how often the damping was raised. After [`TRIES`]
/// failures it is the factor of the diagonal.
fn factor(device: &dyn CodingDevice, h: Vec<f32>, n: usize) -> (Vec<f32>, usize) {
    let mut share = DAMPING;
    for tries in 0..TRIES {
        let mut c = h.clone();
        damp(&mut c, n, share);
        if cholesky(device, &mut c, n).is_ok() {
            return (c, tries);
        }
        share *= 10.0;
    }
    let mean = mean_diagonal(&h, n);
    let mut c = vec![0.0; n * n];
    for i in 0..n {
        let d = h[i * n + i];
        c[i * n + i] = (if d.is_finite() && d > 0.0 { d + DAMPING * mean } else { mean }).sqrt();
    }
    (c, TRIES)
}

fn damp(h: &mut [f32], n: usize, share: f32) {
    let add = share * mean_diagonal(h, n);
    (0..n).for_each(|i| h[i * n + i] += add);
}

/// Returns the mean of the finite entries of the diagonal, or 1 if their sum is not positive.
fn mean_diagonal(h: &[f32], n: usize) -> f32 {
    let sum: f64 = (0..n).map(|i| h[i * n + i] as f64).filter(|d| d.is_finite()).sum();
    if sum > 0.0 { (sum / n as f64) as f32 } else { 1.0 }
}

/// Computes `T h T^T`. The signs of the transform depend on `offset`, the index of the first
/// column.
fn transform_both(h: &mut Vec<f32>, n: usize, offset: usize) {
    for _ in 0..2 {
        h.par_chunks_mut(n).for_each(|row| hadamard::transform_at(row, offset));
        *h = transposed(h, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ldlq::linalg::product;
    use gemma_base::tensor::encode::OnProcessor;
    use gemma_base::tensor::product::View;

    fn numbers(n: usize, mut state: u64) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn a_factor_holds_the_moments_of_all_tokens_but_the_first() {
        let (cols, tokens) = (256, 600);
        let x = numbers(cols * tokens, 3);
        let mut inputs = Inputs::new(cols, false);
        inputs.add(&OnProcessor, None, &x, 200).unwrap();
        let (factors, note) = inputs.factor(&OnProcessor, false).unwrap();
        assert!(note.is_none() && factors.len() == 1);
        let c = &factors[0].c;
        let back =
            product(&OnProcessor, View::of(c, cols), View::of(c, cols).transposed()).unwrap();
        let moment = |i: usize, j: usize| -> f64 {
            (0..tokens)
                .filter(|t| t % 200 != 0)
                .map(|t| x[t * cols + i] as f64 * x[t * cols + j] as f64)
                .sum()
        };
        let mean = (0..cols).map(|i| moment(i, i)).sum::<f64>() / cols as f64;
        for (i, j) in [(0, 0), (5, 3), (255, 255), (17, 200)] {
            let want = moment(i, j) + if i == j { mean * DAMPING as f64 } else { 0.0 };
            assert!((back[i * cols + j] as f64 - want).abs() < 1e-3 * mean, "{i} {j}");
        }
    }

    #[test]
    fn transformed_moments_are_those_of_transformed_inputs() {
        let (cols, tokens) = (256, 400);
        let x = numbers(cols * tokens, 4);
        let mut turned = x.clone();
        turned.chunks_exact_mut(cols).for_each(hadamard::transform);
        let factor = |x: &[f32], transformed| {
            let mut inputs = Inputs::new(cols, false);
            inputs.add(&OnProcessor, None, x, usize::MAX).unwrap();
            inputs.factor(&OnProcessor, transformed).unwrap().0.remove(0).c
        };
        let (a, b) = (factor(&x, true), factor(&turned, false));
        assert!(
            a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-2),
            "moments in both domains must agree"
        );
    }

    #[test]
    fn hopeless_moments_fall_back_and_say_so() {
        let mut inputs = Inputs::new(128, true);
        let mut x = numbers(128 * 50, 8);
        x[300] = f32::NAN;
        inputs.add(&OnProcessor, Some(&x), &x, usize::MAX).unwrap();
        let (factors, note) = inputs.factor(&OnProcessor, false).unwrap();
        assert!(note.unwrap().contains("correlations ignored"));
        assert!(factors[0].c.iter().all(|v| v.is_finite()) && factors[0].correction.is_none());
    }
}
