//! Dense f32 algebra for LDLQ: products, a blocked Cholesky factorisation and triangular solves.
//!
//! Results do not depend on the device or the number of threads: every product adds in the order of
//! [`gemma_base::tensor::product`], and threads only divide the rows and columns of results.

use anyhow::{Result, bail};
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::product::View;
use rayon::prelude::*;
use std::ops::Range;

/// Columns of one step of the blocked algorithms.
const STEP: usize = 128;
/// Columns for which the products with all others are computed at once. Products of this width use
/// any device well.
pub const WIDE: usize = 1024;

/// Returns `a b` as a row-major matrix.
pub fn product(device: &dyn CodingDevice, a: View<'_>, b: View<'_>) -> Result<Vec<f32>> {
    let mut c = vec![0.0; a.rows * b.cols];
    if !c.is_empty() {
        device.multiply(&mut c, b.cols, 0.0, 1.0, a, b)?;
    }
    Ok(c)
}

/// Computes `h += x^T y` with `h` `[n, n]`, `x` and `y` `[rows, n]`. With `symmetric`, only the
/// lower triangle is computed; [`mirror`] copies it.
pub fn add_gram(
    device: &dyn CodingDevice,
    h: &mut [f32],
    n: usize,
    x: &[f32],
    y: &[f32],
    symmetric: bool,
) -> Result<()> {
    let (x, y) = (View::of(x, n), View::of(y, n));
    for start in (0..n).step_by(WIDE) {
        let cols = start..n.min(start + WIDE);
        let first = if symmetric { start } else { 0 };
        let a = x.part(0..x.rows, first..n).transposed();
        device.multiply(&mut h[first * n + start..], n, 1.0, 1.0, a, y.part(0..y.rows, cols))?;
    }
    Ok(())
}

/// Copies the lower triangle to the upper one.
pub fn mirror(h: &mut [f32], n: usize) {
    let turned = transposed(h, n);
    h.par_chunks_mut(n)
        .zip(turned.par_chunks(n))
        .enumerate()
        .for_each(|(i, (row, turned))| row[i..].copy_from_slice(&turned[i..]));
}

/// Returns the transpose of a square matrix.
pub fn transposed(m: &[f32], n: usize) -> Vec<f32> {
    const LINES: usize = 32;
    let mut out = vec![0.0; n * n];
    out.par_chunks_mut(LINES * n).enumerate().for_each(|(strip, out)| {
        let (first, rows) = (strip * LINES, out.len() / n);
        for j in 0..n {
            let column = &m[j * n + first..][..rows];
            column.iter().enumerate().for_each(|(i, v)| out[i * n + j] = *v);
        }
    });
    out
}

/// Replaces the lower triangle of a symmetric positive definite `a` by `C` with `C C^T = a`, and
/// clears the upper one.
///
/// Fails with `a` destroyed if a pivot is not positive.
pub fn cholesky(device: &dyn CodingDevice, a: &mut [f32], n: usize) -> Result<()> {
    assert_eq!(a.len(), n * n);
    for start in (0..n).step_by(STEP) {
        let end = n.min(start + STEP);
        let width = end - start;
        let done = View::of(a, n).part(start..n, 0..start);
        let update = product(device, done, done.part(0..width, 0..start).transposed())?;
        if start > 0 {
            a[start * n..].par_chunks_mut(n).zip(update.par_chunks(width)).for_each(
                |(row, update)| {
                    row[start..end].iter_mut().zip(update).for_each(|(a, u)| *a -= u);
                },
            );
        }
        let corner = cholesky_corner(a, n, start..end)?;
        a[end * n..]
            .par_chunks_mut(n)
            .for_each(|row| solve_lower(&corner, width, &mut row[start..end]));
    }
    (0..n).for_each(|i| a[i * n + i + 1..(i + 1) * n].fill(0.0));
    Ok(())
}

/// Factorises a diagonal block in f64. Returns it as f32 `[width, width]`.
fn cholesky_corner(a: &mut [f32], n: usize, at: Range<usize>) -> Result<Vec<f32>> {
    let width = at.len();
    let mut c = vec![0f64; width * width];
    for i in 0..width {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| c[i * width + k] * c[j * width + k]).sum();
            let rest = a[(at.start + i) * n + at.start + j] as f64 - sum;
            c[i * width + j] = if i > j {
                rest / c[j * width + j]
            } else if rest > 0.0 && rest.is_finite() {
                rest.sqrt()
            } else {
                bail!("the pivot of column {} of {n} is {rest:e}", at.start + i)
            };
        }
    }
    let corner: Vec<f32> = c.iter().map(|v| *v as f32).collect();
    for i in 0..width {
        a[(at.start + i) * n + at.start..][..width].copy_from_slice(&corner[i * width..][..width]);
    }
    Ok(corner)
}

/// Computes `x := x C^-T` for one row and a lower triangular `C`.
fn solve_lower(c: &[f32], width: usize, x: &mut [f32]) {
    for j in 0..width {
        let sum: f32 = (0..j).map(|i| x[i] * c[j * width + i]).sum();
        x[j] = (x[j] - sum) / c[j * width + j];
    }
}

/// Computes `x := x C^-1` for one row and a lower triangular `C`.
pub fn solve_upper(c: &[f32], width: usize, x: &mut [f32]) {
    for j in (0..width).rev() {
        let sum: f32 = (j + 1..width).map(|i| x[i] * c[i * width + j]).sum();
        x[j] = (x[j] - sum) / c[j * width + j];
    }
}

/// Copies a square block on the diagonal of `c`.
pub fn corner(c: &[f32], n: usize, at: Range<usize>) -> Vec<f32> {
    at.clone().flat_map(|i| &c[i * n + at.start..i * n + at.end]).copied().collect()
}

/// Computes `m := m (C C^T)^-1` with `m` `[rows, n]` and `C` a Cholesky factor.
pub fn solve(device: &dyn CodingDevice, m: &mut [f32], c: &[f32], n: usize) -> Result<()> {
    for forward in [true, false] {
        let steps = |range: Range<usize>, step| -> Vec<Range<usize>> {
            let all = range.clone().step_by(step).map(|at| at..range.end.min(at + step));
            if forward { all.collect() } else { all.rev().collect() }
        };
        for wide in steps(0..n, WIDE) {
            // The columns that were solved before the wide block come first, then those inside it.
            let outside = if forward { 0..wide.start } else { wide.end..n };
            subtract(device, m, c, n, forward, outside, wide.clone())?;
            for at in steps(wide.clone(), STEP) {
                let inside = if forward { wide.start..at.start } else { at.end..wide.end };
                subtract(device, m, c, n, forward, inside, at.clone())?;
                let corner = corner(c, n, at.clone());
                m.par_chunks_mut(n).for_each(|row| match forward {
                    true => solve_lower(&corner, at.len(), &mut row[at.clone()]),
                    false => solve_upper(&corner, at.len(), &mut row[at.clone()]),
                });
            }
        }
    }
    Ok(())
}

/// Subtracts the contribution of the solved columns `solved` from the columns `at`.
fn subtract(
    device: &dyn CodingDevice,
    m: &mut [f32],
    c: &[f32],
    n: usize,
    forward: bool,
    solved: Range<usize>,
    at: Range<usize>,
) -> Result<()> {
    if solved.is_empty() {
        return Ok(());
    }
    let factor = match forward {
        true => View::of(c, n).part(at.clone(), solved.clone()).transposed(),
        false => View::of(c, n).part(solved.clone(), at.clone()),
    };
    let view = View::of(m, n);
    let update = product(device, view.part(0..view.rows, solved), factor)?;
    m.par_chunks_mut(n).zip(update.par_chunks(at.len())).for_each(|(row, update)| {
        row[at.clone()].iter_mut().zip(update).for_each(|(m, u)| *m -= u)
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_base::tensor::encode::OnProcessor;

    fn numbers(n: usize, mut state: u64) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    /// A well-conditioned symmetric matrix.
    fn gram(n: usize) -> Vec<f32> {
        let x = numbers(2 * n * n, 5);
        let mut h = vec![0.0; n * n];
        add_gram(&OnProcessor, &mut h, n, &x, &x, true).unwrap();
        mirror(&mut h, n);
        (0..n).for_each(|i| h[i * n + i] += 1.0);
        h
    }

    #[test]
    fn a_gram_matrix_is_the_sum_of_outer_products() {
        let (n, rows) = (700, 40);
        let (x, y) = (numbers(rows * n, 1), numbers(rows * n, 2));
        for symmetric in [true, false] {
            let y = if symmetric { &x } else { &y };
            let mut h = vec![0.0; n * n];
            add_gram(&OnProcessor, &mut h, n, &x, y, symmetric).unwrap();
            for (i, j) in [(0, 0), (3, 1), (699, 5), (650, 649), (600, 520)] {
                let want: f64 = (0..rows).map(|r| x[r * n + i] as f64 * y[r * n + j] as f64).sum();
                assert!((h[i * n + j] as f64 - want).abs() < 1e-4, "{symmetric} {i} {j}");
            }
        }
    }

    #[test]
    fn a_factor_times_its_transpose_is_the_matrix() {
        for n in [1, 100, 128, 300] {
            let h = gram(n);
            let mut c = h.clone();
            cholesky(&OnProcessor, &mut c, n).unwrap();
            let back =
                product(&OnProcessor, View::of(&c, n), View::of(&c, n).transposed()).unwrap();
            let largest = h.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(h.iter().zip(&back).all(|(a, b)| (a - b).abs() < 1e-5 * largest), "{n}");
        }
    }

    #[test]
    fn an_indefinite_matrix_is_refused() {
        let mut h = gram(200);
        h[150 * 200 + 150] = -1.0;
        assert!(
            cholesky(&OnProcessor, &mut h, 200).unwrap_err().to_string().contains("column 150")
        );
        let mut h = gram(8);
        h[5 * 8 + 5] = f32::NAN;
        assert!(cholesky(&OnProcessor, &mut h, 8).is_err());
    }

    #[test]
    fn a_solution_multiplies_back() {
        for n in [5, 128, 300] {
            let h = gram(n);
            let mut c = h.clone();
            cholesky(&OnProcessor, &mut c, n).unwrap();
            let want = numbers(7 * n, 9);
            let mut m = product(&OnProcessor, View::of(&want, n), View::of(&h, n)).unwrap();
            solve(&OnProcessor, &mut m, &c, n).unwrap();
            assert!(want.iter().zip(&m).all(|(a, b)| (a - b).abs() < 1e-3), "{n}");
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let n = 300;
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut c = gram(n);
                cholesky(&OnProcessor, &mut c, n).unwrap();
                let mut m = numbers(50 * n, 3);
                solve(&OnProcessor, &mut m, &c, n).unwrap();
                (c, m)
            })
        };
        assert!(run(1) == run(2) && run(1) == run(3));
    }
}
