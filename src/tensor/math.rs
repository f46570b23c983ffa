//! Float primitives with a fixed order of operations, so that every kernel built from them gives
//! the same bits.
//!
//! Sums run in 16 lanes (lane = index mod 16) and fold in halves. Compiled with any vector width
//! the result is the same: lanes never mix before the fold, and every multiply-add is fused.

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

/// Sum of squares of a row.
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

/// 1 / sqrt(mean square + eps): what RMSNorm multiplies by.
#[inline(always)]
pub fn inv_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt()
}

/// Largest magnitude in a row; exact in any order.
#[inline(always)]
pub fn max_abs(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            let a = block[i].abs();
            lanes[i] = if a > lanes[i] { a } else { lanes[i] };
        }
    }
    rest.iter().map(|v| v.abs()).chain(lanes).fold(0.0, |m, v| if v > m { v } else { m })
}

/// e^x to about 1 unit in the last place (Cephes' polynomial), clamped to the finite range.
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
    // n + 127 comes to lie in the lowest bits of a float of that size; a conversion that saturates
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

/// `cap tanh(x / cap)`.
#[inline(always)]
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    cap * (1.0 - 2.0 / (1.0 + exp(2.0 * (x / cap))))
}

/// KL divergence of the distribution with logits `q` from that with logits `p`, in nats: sum of p
/// (ln p - ln q).
pub fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let (ln_p, ln_q) = (*p as f64 - p_sum, *q as f64 - q_sum);
        ln_p.exp() * (ln_p - ln_q)
    });
    terms.sum::<f64>().max(0.0)
}

/// ln of the sum of e^logit.
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
    }
}
