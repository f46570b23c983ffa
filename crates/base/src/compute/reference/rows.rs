//! Twins of the row-local kernels: plain functions on one row. The CPU executor compiles the same
//! code for each vector width.

use crate::compute::act::{ActFormat, TRIED};
use crate::tensor::hadamard;
use crate::tensor::math::{self, LANES, Scale};

/// Block output that a norm adds to the residual stream: `x = (x + rmsnorm(out) * w) * scale`.
#[derive(Clone, Copy)]
pub struct Added<'a> {
    pub out: &'a [f32],
    pub w: &'a [f32],
    pub scale: f32,
}

/// Applies `add` to `x` if present, then computes `out = rmsnorm(x) * w`.
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

/// Applies the Hadamard transform in place if the format requires it.
#[inline(always)]
pub fn rotate_input(row: &mut [f32], format: ActFormat) {
    if format.hadamard {
        hadamard::transform(row);
    }
}

/// Largest code of an activation.
pub const MAX: f32 = 127.0;

/// 1.5 * 2^23: adding it to a small float rounds to a whole number.
pub const WHOLE: f32 = 12_582_912.0;

/// Quantises activations that share a scale to int8, halves to even. Returns the scale and the sum
/// of the codes.
///
/// With `tried` 1, the largest value becomes 127. Otherwise the codes 127, 126, ... (`tried` of
/// them) are tried for the largest value, and the one with the least sum of squared errors is used.
/// The scale is then the one that fits the codes best. See [`Scale`] for groups of zeros and of
/// non-finite values.
#[inline(always)]
pub fn quantize_group(values: &[f32], codes: &mut [i8], tried: usize) -> (f32, i32) {
    let scale = Scale::of(math::max_abs(values));
    if !scale.has_codes() {
        codes.fill(0);
        return (scale.step(MAX), 0);
    }
    let top = if tried > 1 { best_top(errors(values, scale)) } else { MAX };
    let inv = scale.inverse(top);
    let mut products = [0f32; LANES];
    for (codes, values) in codes.chunks_mut(LANES).zip(values.chunks(LANES)) {
        for ((c, v), lane) in codes.iter_mut().zip(values).zip(&mut products) {
            let x = v * inv;
            let q = x.round_ties_even().clamp(-MAX, MAX);
            *c = q as i8;
            *lane = q.mul_add(x, *lane);
        }
    }
    let fit = if tried > 1 { fit(&products, codes) } else { 1.0 };
    (scale.step(top) * fit, codes.iter().map(|c| *c as i32).sum())
}

/// Returns the correction factor of a scale that fits a group's codes to its values by least
/// squares. `products` are the sums, per lane, of each code times its value before rounding.
#[inline(always)]
pub fn fit(products: &[f32; LANES], codes: &[i8]) -> f32 {
    let squares: i32 = codes.iter().map(|c| *c as i32 * *c as i32).sum();
    products.iter().sum::<f32>() / squares as f32
}

/// Returns the candidate codes for the largest value of a group.
#[inline(always)]
pub fn tops() -> [f32; TRIED] {
    std::array::from_fn(|i| MAX - i as f32)
}

/// Returns the sum of squared errors of a group's codes for each of [`tops`], relative to the code
/// of the largest value.
#[inline(always)]
pub fn errors(values: &[f32], scale: Scale) -> [f32; TRIED] {
    tops().map(|top| {
        let (inverse, mut lanes) = (scale.inverse(top), [0f32; LANES]);
        for values in values.chunks(LANES) {
            for (lane, value) in lanes.iter_mut().zip(values) {
                let x = value * inverse;
                let error = (x + WHOLE) - WHOLE - x;
                *lane = error.mul_add(error, *lane);
            }
        }
        lanes.iter().sum::<f32>() / (top * top)
    })
}

/// Returns the candidate of [`tops`] with the least error, the first one on ties.
#[inline(always)]
pub fn best_top(errors: [f32; TRIED]) -> f32 {
    let (mut least, mut best) = (f32::INFINITY, MAX);
    for (error, top) in errors.into_iter().zip(tops()) {
        if error < least {
            (least, best) = (error, top);
        }
    }
    best
}

/// RMSNorm of one head, then rotation of its halves by the row's angles.
///
/// `cos` and `sin` are `[head_dim / 2]`.
#[inline(always)]
pub fn norm_rope(head: &mut [f32], w: &[f32], eps: f32, cos: &[f32], sin: &[f32]) {
    let inv = math::inv_rms(head, eps);
    let half = head.len() / 2;
    let (a, b) = head.split_at_mut(half);
    // Slices of equal lengths remove the bounds checks from the loop.
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
            for tiny in [0.0, f32::from_bits(1), 7.3e-38, 9e-31] {
                codes.fill(7);
                assert_eq!(quantize_group(&[tiny; 4], &mut codes[..4], tried), (0.0, 0));
                assert_eq!(codes[..4], [0; 4], "{tiny}");
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                codes.fill(7);
                let (scale, sum) = quantize_group(&[1.0, bad, 0.0, -2.0], &mut codes[..4], tried);
                assert!(scale.is_nan() && sum == 0 && codes[..4] == [0; 4], "{bad}");
            }
        }
        assert!(errors[1] < errors[0]);
    }

    /// Pairs are complex numbers, which the rotation turns counter-clockwise.
    #[test]
    fn rope_norms_a_head_and_turns_its_pairs() {
        let (angles, w) = ([0.0, 0.3, 1.2, 2.5f64], [1.0, 0.5, 2.0, 1.5, 3.0, 1.0, 0.25, 0.75f32]);
        let before: Vec<f32> = (0..8).map(|i| i as f32 - 3.0).collect();
        let rms = (before.iter().map(|v| (v * v) as f64).sum::<f64>() / 8.0 + 0.5).sqrt();
        let [cos, sin] = [f64::cos, f64::sin].map(|f| angles.map(|angle| f(angle) as f32));
        let mut head = before.clone();
        norm_rope(&mut head, &w, 0.5, &cos, &sin);
        for (i, angle) in angles.into_iter().enumerate() {
            let [x, y] = [i, i + 4].map(|at| (before[at] * w[at]) as f64 / rms);
            let (length, phase) = (x.hypot(y), y.atan2(x) + angle);
            let off =
                [length * phase.cos() - head[i] as f64, length * phase.sin() - head[i + 4] as f64];
            assert!(off.iter().all(|off| off.abs() < 1e-6), "pair {i}: {off:?}");
        }
    }
}
