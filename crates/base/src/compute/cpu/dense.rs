//! Row operations of dense float networks, such as image towers: norms, GELU and softmax.
//!
//! Every row is computed independently in a fixed order of operations, so that all instruction sets
//! and all divisions among threads have the same bits.

use super::each_isa::for_each_isa;
use super::simd::Lanes;
use crate::tensor::math::{LANES, exp, fold, gelu_tanh, max_finite, sum_squares};

/// Sums a row in [`LANES`] lanes.
#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += block[i];
        }
    }
    for (i, v) in rest.iter().enumerate() {
        lanes[i] += v;
    }
    fold(lanes)
}

for_each_isa! {
    /// LayerNorm of rows of `weight.len()` values, in place: `(x - mean) / sqrt(variance + eps) *
    /// weight + bias`.
    pub fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) = layer_norm_body
}

#[inline(always)]
fn layer_norm_body<L: Lanes>(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let mean = sum(row) / row.len() as f32;
        row.iter_mut().for_each(|v| *v -= mean);
        let factor = 1.0 / (sum_squares(row) / row.len() as f32 + eps).sqrt();
        for ((v, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
            *v = (*v * factor).mul_add(*weight, *bias);
        }
    }
}

for_each_isa! {
    /// RMSNorm of rows of `width` values, in place: `x / sqrt(mean square + eps) * weight`. An
    /// empty `weight` is all ones.
    pub fn rms_norm(x: &mut [f32], width: usize, weight: &[f32], eps: f32) = rms_norm_body
}

#[inline(always)]
fn rms_norm_body<L: Lanes>(x: &mut [f32], width: usize, weight: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(width) {
        let factor = 1.0 / (sum_squares(row) / width as f32 + eps).sqrt();
        row.iter_mut().for_each(|v| *v *= factor);
        row.iter_mut().zip(weight).for_each(|(v, weight)| *v *= weight);
    }
}

for_each_isa! {
    /// GELU in its tanh form of each value, in place.
    pub fn gelu(x: &mut [f32]) = gelu_body
}

#[inline(always)]
fn gelu_body<L: Lanes>(x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v = gelu_tanh(*v));
}

for_each_isa! {
    /// Softmax of `scale * x` for rows of `width` values, in place. A row that is not finite
    /// becomes NaN.
    pub fn softmax(x: &mut [f32], width: usize, scale: f32) = softmax_body
}

#[inline(always)]
fn softmax_body<L: Lanes>(x: &mut [f32], width: usize, scale: f32) {
    for row in x.chunks_exact_mut(width) {
        row.iter_mut().for_each(|v| *v *= scale);
        let max = max_finite(row);
        row.iter_mut().for_each(|v| *v = exp(*v - max));
        let factor = 1.0 / sum(row);
        row.iter_mut().for_each(|v| *v *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cpu::Isa;

    /// Three rows of `width` values with one large value.
    fn rows(width: usize) -> Vec<f32> {
        let mut rows: Vec<f32> =
            (0..3 * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0).collect();
        rows[width / 2] = 40.0;
        rows
    }

    /// Runs an operation on each instruction set. All must return the bits of the first.
    fn on_all(width: usize, run: impl Fn(Isa, &mut [f32])) -> Vec<f32> {
        let mut results = Isa::all_supported().into_iter().map(|isa| {
            let mut x = rows(width);
            run(isa, &mut x);
            (isa, x)
        });
        let (_, first) = results.next().unwrap();
        for (isa, other) in results {
            let same = first.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{isa:?} differs at width {width}");
        }
        first
    }

    fn close(got: &[f32], want: impl Fn(&[f64], usize) -> f64, width: usize) {
        let x = rows(width);
        for (i, got) in got.iter().enumerate() {
            let row: Vec<f64> =
                x[i / width * width..][..width].iter().map(|v| f64::from(*v)).collect();
            let want = want(&row, i % width);
            assert!((f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} {want}");
        }
    }

    #[test]
    fn rows_equal_their_definitions_on_all_instruction_sets() {
        for width in [1, 7, 16, 72, 100] {
            let weight: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 / 64.0).collect();
            let bias: Vec<f32> = (0..width).map(|i| i as f32 / 32.0 - 1.0).collect();
            let mean = |row: &[f64]| row.iter().sum::<f64>() / width as f64;
            let got = on_all(width, |isa, x| layer_norm(isa, x, &weight, &bias, 1e-3));
            let norm = |row: &[f64], i: usize| {
                let variance = row.iter().map(|v| (v - mean(row)).powi(2)).sum::<f64>();
                let factor = (variance / width as f64 + f64::from(1e-3f32)).sqrt();
                (row[i] - mean(row)) / factor * f64::from(weight[i]) + f64::from(bias[i])
            };
            close(&got, norm, width);
            let got = on_all(width, |isa, x| rms_norm(isa, x, width, &weight, 1e-3));
            let rms = |row: &[f64], i: usize| {
                let square = row.iter().map(|v| v * v).sum::<f64>() / width as f64;
                row[i] / (square + f64::from(1e-3f32)).sqrt() * f64::from(weight[i])
            };
            close(&got, rms, width);
            let got = on_all(width, |isa, x| softmax(isa, x, width, 0.25));
            let soft = |row: &[f64], i: usize| {
                let sum: f64 = row.iter().map(|v| (0.25 * v - 0.25 * row[i]).exp()).sum();
                1.0 / sum
            };
            close(&got, soft, width);
            let got = on_all(width, gelu);
            let gelu = |row: &[f64], i: usize| {
                let x = row[i];
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            };
            close(&got, gelu, width);
        }
    }

    #[test]
    fn a_row_that_is_not_finite_has_no_weights() {
        let mut x = vec![0.0, f32::INFINITY, 1.0, 2.0];
        softmax(Isa::Scalar, &mut x, 2, 1.0);
        assert!(x[..2].iter().all(|v| v.is_nan()) && x[2..].iter().all(|v| v.is_finite()));
    }
}
