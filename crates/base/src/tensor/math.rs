//! Float primitives with a fixed order of operations, so that every kernel built from them returns
//! the same bits.
//!
//! Sums use 16 lanes (lane = index mod 16), which are then folded in halves. The result is the same
//! for any vector width: lanes never mix before the fold, and every multiply-add is fused.

/// Lanes of every blocked sum.
pub const LANES: usize = 16;

/// Folds the lanes in halves: 16 -> 8 -> 4 -> 2 -> 1.
#[inline(always)]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Returns the sum of squares of a row.
#[inline(always)]
pub fn sum_squares(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = block[i].mul_add(block[i], lanes[i]);
        }
    }
    for (i, v) in rest.iter().enumerate() {
        lanes[i] = v.mul_add(*v, lanes[i]);
    }
    fold(lanes)
}

/// Returns 1 / sqrt(mean square + eps), the factor of RMSNorm.
///
/// NaN if the sum of squares is not finite, because its inverse would turn the row into zeros.
#[inline(always)]
pub fn inv_rms(x: &[f32], eps: f32) -> f32 {
    let mean = sum_squares(x) / x.len() as f32 + eps;
    if mean.is_finite() { 1.0 / mean.sqrt() } else { f32::NAN }
}

/// Returns the bits of a float's magnitude. Infinity is above all numbers, and NaN above infinity.
#[inline(always)]
pub fn magnitude(v: f32) -> u32 {
    v.to_bits() & 0x7fff_ffff
}

/// Returns the largest magnitude in a row; exact in any order. NaN if the row has a NaN.
#[inline(always)]
pub fn max_abs(x: &[f32]) -> f32 {
    let mut lanes = [0u32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = lanes[i].max(magnitude(block[i]));
        }
    }
    f32::from_bits(rest.iter().map(|v| magnitude(*v)).chain(lanes).fold(0, u32::max))
}

/// Returns the largest number of a row; NaN if the row has a NaN or an infinity.
#[inline(always)]
pub fn max_finite(x: &[f32]) -> f32 {
    let mut lanes = [f32::MIN; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
        }
    }
    let max = rest.iter().chain(&lanes).fold(f32::MIN, |m, v| if *v > m { *v } else { m });
    if max_abs(x).is_finite() { max } else { f32::NAN }
}

/// Largest magnitude of floats that are quantised with a common factor.
///
/// Handles maxima from which no finite factor can be computed. The only place that divides by a
/// maximum.
#[derive(Clone, Copy, Debug)]
pub struct Scale(f32); // 0, a number of at least LEAST, or NaN

impl Scale {
    /// Smallest maximum with nonzero codes. Its inverse times the largest code is finite.
    const LEAST: f32 = 1e-30;

    /// Returns the scale of floats with this [`max_abs`]; NaN if the maximum is not finite.
    #[inline(always)]
    pub fn of(max: f32) -> Scale {
        Scale(match max.is_finite() {
            true if max < Self::LEAST => 0.0,
            true => max,
            false => f32::NAN,
        })
    }

    /// Returns whether codes can be nonzero. Otherwise all codes are 0, and the step is 0 or NaN.
    #[inline(always)]
    pub fn has_codes(self) -> bool {
        self.0 > 0.0
    }

    /// Returns the float that code 1 represents if the largest float has the code `top`.
    #[inline(always)]
    pub fn step(self, top: f32) -> f32 {
        self.0 / top
    }

    /// Returns the factor from a float to its code; 0 if there are no codes.
    #[inline(always)]
    pub fn inverse(self, top: f32) -> f32 {
        if self.has_codes() { top / self.0 } else { 0.0 }
    }
}

/// Returns e^x to about 1 unit in the last place (Cephes' polynomial), clamped to the finite range.
///
/// Vectorises; -inf gives about 1e-38.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r + 1.0);
    // Adding the constant places n + 127 in the lowest bits of the float. A saturating conversion
    // would not vectorise.
    y * f32::from_bits((n + (12_582_912.0 + 127.0)).to_bits() << 23)
}

/// GELU in its tanh form: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, computed as `x / (1 +
/// e^-2u)`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    let u = 0.797_884_6 * (0.044_715 * x * x).mul_add(x, x);
    x / (1.0 + exp(-2.0 * u))
}

/// Returns `cap tanh(x / cap)`; NaN for an infinite `x`, which only results from an overflow.
#[inline(always)]
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    let y = cap * (1.0 - 2.0 / (1.0 + exp(2.0 * (x / cap))));
    if x.is_finite() { y } else { f32::NAN }
}

/// Returns the KL divergence of the distribution with logits `q` from that with logits `p`, in
/// nats: the sum of p (ln p - ln q).
pub fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let (ln_p, ln_q) = (*p as f64 - p_sum, *q as f64 - q_sum);
        ln_p.exp() * (ln_p - ln_q)
    });
    terms.sum::<f64>().max(0.0)
}

/// Returns ln of the sum of e^logit.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v)) as f64;
    let sum: f64 = logits.iter().map(|v| libm::exp(*v as f64 - max)).sum();
    max + libm::log(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let want = (x as f64).exp();
            assert!((exp(x) as f64 - want).abs() <= want * 2.5e-7, "exp({x})");
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn gelu_matches_its_definition() {
        for i in -600..600 {
            let x = i as f64 / 50.0;
            let want = x / 2.0
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
            assert!((gelu_tanh(x as f32) as f64 - want).abs() < 2e-6, "gelu({x})");
        }
    }

    #[test]
    fn sums_cover_ragged_tails() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 - 18.0).collect();
        assert_eq!(sum_squares(&x), x.iter().map(|v| v * v).sum::<f32>());
        assert_eq!(max_abs(&x), 18.0);
        assert_eq!(max_finite(&x), 18.0);
    }

    #[test]
    fn maxima_pass_on_what_is_not_finite() {
        for at in [0, 15, 16, 36] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x: Vec<f32> = (0..37).map(|i| i as f32 - 18.0).collect();
                x[at] = bad;
                assert_eq!(max_abs(&x).is_nan(), bad.is_nan());
                assert!(!max_abs(&x).is_finite() && max_finite(&x).is_nan());
                assert!(inv_rms(&x, 1e-6).is_nan(), "{bad} at {at}");
            }
        }
        assert!(inv_rms(&[1e30; 4], 1e-6).is_nan(), "squares that overflow");
        assert_eq!(max_finite(&[-3.0, f32::MIN, -5.0]), -3.0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(soft_cap(bad, 30.0).is_nan());
            assert!(!gelu_tanh(bad).is_finite());
        }
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn scales_have_finite_factors_or_none() {
        for max in [1e-30f32, 7.3e-30, 1.0, f32::MAX] {
            for top in [120.0, 127.0, 32767.0] {
                let scale = Scale::of(max);
                assert!(scale.has_codes());
                assert_eq!((scale.step(top), scale.inverse(top)), (max / top, top / max));
                assert!(scale.inverse(top).is_finite() && scale.inverse(top) > 0.0);
            }
        }
        for max in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 7.3e-38, 9.9e-31] {
            let scale = Scale::of(max);
            assert_eq!((scale.has_codes(), scale.step(127.0)), (false, 0.0));
            assert_eq!(scale.inverse(127.0), 0.0);
        }
        for max in [f32::NAN, f32::INFINITY] {
            let scale = Scale::of(max);
            assert!(!scale.has_codes() && scale.step(127.0).is_nan());
            assert_eq!(scale.inverse(127.0), 0.0);
        }
    }
}
