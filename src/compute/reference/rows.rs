//! Twins of the row-local kernels: plain functions on one row. The CPU executor compiles the same
//! code for each vector width.

use crate::compute::act::ActFormat;
use crate::tensor::{hadamard, math, math::LANES};

/// Block output that a norm adds to the residual stream: `x = (x + rmsnorm(out) * w) * scale`.
#[derive(Clone, Copy)]
pub struct Added<'a> {
    pub out: &'a [f32],
    pub w: &'a [f32],
    pub scale: f32,
}

/// Adds to `x` where something is given, then `out = rmsnorm(x) * w`.
#[inline(always)]
pub fn norm(x: &mut [f32], add: Option<Added<'_>>, w: &[f32], eps: f32, out: &mut [f32]) {
    if let Some(Added { out, w, scale }) = add {
        let inv = math::inv_rms(out, eps);
        for ((x, a), w) in x.iter_mut().zip(out).zip(w) {
            *x = (a * inv).mul_add(*w, *x) * scale;
        }
    }
    let inv = math::inv_rms(x, eps);
    for ((o, x), w) in out.iter_mut().zip(&*x).zip(w) {
        *o = (x * inv) * w;
    }
}

/// Hadamard in place where the format asks for it.
#[inline(always)]
pub fn rotate_input(row: &mut [f32], format: ActFormat) {
    if format.hadamard {
        hadamard::transform(row);
    }
}

/// Scales that are tried for a group of columns. More of them no longer lower the KL divergence of
/// a model from the one without int8 activations (docs/MEASURED.md).
pub const TRIED: usize = 8;

/// 1.5 * 2^23: a float of small size plus this is a whole number.
pub const WHOLE: f32 = 12_582_912.0;

/// Activations that share a scale to int8, halves to even; returns the scale and the sum of the
/// codes. The largest of them becomes 127. With several `tried` it becomes the one of so many
/// numbers from there down that has the least sum of squared errors, and the scale is the one that
/// fits the codes best.
#[inline(always)]
pub fn quantize_group(values: &[f32], codes: &mut [i8], tried: usize) -> (f32, i32) {
    let max = math::max_abs(values);
    if max == 0.0 {
        codes.fill(0);
        return (0.0, 0);
    }
    let top = best_top(max, tried, |inv| errors(values, inv));
    let inv = top / max;
    let mut products = [0f32; LANES];
    for (codes, values) in codes.chunks_mut(LANES).zip(values.chunks(LANES)) {
        for ((c, v), lane) in codes.iter_mut().zip(values).zip(&mut products) {
            let x = v * inv;
            let q = x.round_ties_even().clamp(-127.0, 127.0);
            *c = q as i8;
            *lane = q.mul_add(x, *lane);
        }
    }
    let fit = if tried > 1 { fit(&products, codes) } else { 1.0 };
    (max / top * fit, codes.iter().map(|c| *c as i32).sum())
}

/// Returns the factor of a scale that fits a group's codes to its values by least squares.
/// `products` are the sums of each code times its number before rounding, by lanes.
#[inline(always)]
pub fn fit(products: &[f32; LANES], codes: &[i8]) -> f32 {
    let squares: i32 = codes.iter().map(|c| *c as i32 * *c as i32).sum();
    products.iter().sum::<f32>() / squares as f32
}

/// Squared errors of the codes of values times `inv`, by lanes.
#[inline(always)]
pub fn errors(values: &[f32], inv: f32) -> [f32; LANES] {
    let mut lanes = [0f32; LANES];
    for values in values.chunks(LANES) {
        for (lane, v) in lanes.iter_mut().zip(values) {
            let x = v * inv;
            let error = (x + WHOLE) - WHOLE - x;
            *lane = error.mul_add(error, *lane);
        }
    }
    lanes
}

/// Returns the code of the largest value with the least error. `errors` gives the squared errors in
/// units of a factor's steps, by lanes.
#[inline(always)]
pub fn best_top(max: f32, tried: usize, errors: impl Fn(f32) -> [f32; LANES]) -> f32 {
    let (mut least, mut best) = (f32::INFINITY, 127.0);
    for top in (0..tried).map(|i| 127.0 - i as f32) {
        if tried == 1 {
            break;
        }
        let error = errors(top / max).iter().sum::<f32>() / (top * top);
        if error < least {
            (least, best) = (error, top);
        }
    }
    best
}

/// RMSNorm of one head, then rotation of its halves by the row's angles (`cos` and `sin` are
/// `[head_dim / 2]`).
#[inline(always)]
pub fn norm_rope(head: &mut [f32], w: &[f32], eps: f32, cos: &[f32], sin: &[f32]) {
    let inv = math::inv_rms(head, eps);
    let half = head.len() / 2;
    let (a, b) = head.split_at_mut(half);
    // Equal lengths, said so that the loop has no bounds to check.
    let (b, w_a, w_b, cos, sin) =
        (&mut b[..half], &w[..half], &w[half..][..half], &cos[..half], &sin[..half]);
    for i in 0..half {
        let x = (a[i] * inv) * w_a[i];
        let y = (b[i] * inv) * w_b[i];
        a[i] = x.mul_add(cos[i], -(y * sin[i]));
        b[i] = y.mul_add(cos[i], x * sin[i]);
    }
}

/// RMSNorm of one head without weights.
#[inline(always)]
pub fn norm_head(head: &mut [f32], eps: f32) {
    let inv = math::inv_rms(head, eps);
    head.iter_mut().for_each(|v| *v *= inv);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantised_activations_are_within_half_a_step() {
        let values: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let mut codes = vec![0i8; 100];
        let mut errors = [0.0; 2];
        for (tried, error) in [1, TRIED].into_iter().zip(&mut errors) {
            let (scale, sum) = quantize_group(&values, &mut codes, tried);
            assert_eq!(sum, codes.iter().map(|c| *c as i32).sum::<i32>());
            for (v, c) in values.iter().zip(&codes) {
                let off = v - *c as f32 * scale;
                assert!(tried > 1 || off.abs() <= scale * 0.5001);
                *error += off * off;
            }
            assert_eq!(quantize_group(&[0.0; 4], &mut codes[..4], tried), (0.0, 0));
        }
        assert!(errors[1] < errors[0]);
    }

    #[test]
    fn rope_keeps_lengths_and_norm_makes_them_one() {
        let mut head: Vec<f32> = (0..8).map(|i| i as f32 - 3.0).collect();
        let (sin, cos): (Vec<f32>, Vec<f32>) = (0..4).map(|i| (i as f32 * 0.3).sin_cos()).unzip();
        norm_rope(&mut head, &[1.0; 8], 0.0, &cos, &sin);
        let mean_square = head.iter().map(|v| v * v).sum::<f32>() / 8.0;
        assert!((mean_square - 1.0).abs() < 1e-6);
    }
}
