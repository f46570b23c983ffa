//! Twins of the int8 cache: quantisation of keys, values and queries, and the score of one key.
//!
//! A key or value is quantised once, when its row is evaluated. Uncommitted rows are therefore read
//! with the same codes as later from the cache. Scores multiply integer codes. Codes of queries
//! have 16 bits, so that only the cache loses precision. Their integer sums are exact in any order.

use super::rows;
use crate::tensor::math::{self, Scale};
use half::f16;

/// Largest code of a query.
const QUERY_MAX: f32 = 32767.0;

/// Returns the scale of a group with largest magnitude `max`: `max / 127` as f16. NaN if f16 cannot
/// represent it.
#[inline(always)]
pub fn scale_of(max: f32) -> f16 {
    let scale = f16::from_f32(Scale::of(max).step(rows::MAX));
    if scale.is_finite() { scale } else { f16::NAN }
}

/// Returns the factor from a value to its code; `None` if all codes are 0.
///
/// It is the inverse of the stored scale, not of the scale before rounding to f16.
#[inline(always)]
pub fn inverse(scale: f16) -> Option<f32> {
    (scale.to_f32() > 0.0).then(|| 1.0 / scale.to_f32())
}

/// Quantises one group of a key or value to int8, halves to even. Returns the scale.
pub fn quantize_group(values: &[f32], codes: &mut [i8]) -> f16 {
    let scale = scale_of(math::max_abs(values));
    let Some(inv) = inverse(scale) else {
        codes.fill(0);
        return scale;
    };
    for (c, v) in codes.iter_mut().zip(values) {
        *c = (v * inv).round_ties_even() as i8;
    }
    scale
}

/// Quantises a query to 16 bits. Returns the scale of its codes.
#[inline(always)]
pub fn quantize_query(q: &[f32], codes: &mut [i16]) -> f32 {
    let scale = Scale::of(math::max_abs(q));
    let inv = scale.inverse(QUERY_MAX);
    // The factor is 0 if there are no codes. Then the product is 0 or NaN, and the cast makes it 0.
    for (c, q) in codes.iter_mut().zip(q) {
        *c = (q * inv).round_ties_even() as i16;
    }
    scale.step(QUERY_MAX)
}

/// Returns the dot product of a query's codes with a key's, with one of `scales` per group.
///
/// The integer sum of a group fits i32. Groups are added in order.
pub fn dot(query: &[i16], key: impl Fn(usize) -> i8, scales: impl Iterator<Item = f32>) -> f32 {
    let mut sum = 0f32;
    let scales: Vec<f32> = scales.collect();
    let group = query.len() / scales.len();
    for (g, scale) in scales.into_iter().enumerate() {
        let whole: i32 =
            (g * group..(g + 1) * group).map(|d| query[d] as i32 * key(d) as i32).sum();
        sum = scale.mul_add(whole as f32, sum);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_within_half_a_step_of_the_stored_scale() {
        for size in [1e-3f32, 1.0, 50.0, 3e4] {
            let values: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin() * size).collect();
            let mut codes = [0i8; 32];
            let scale = quantize_group(&values, &mut codes).to_f32();
            for (v, c) in values.iter().zip(codes) {
                assert!((v - c as f32 * scale).abs() <= scale * 0.5001, "{v} as {c} * {scale}");
            }
        }
    }

    #[test]
    fn sizes_without_a_scale_give_zeros_or_nan() {
        let mut query = [7i16; 3];
        for tiny in [0.0, f32::from_bits(1), 7.3e-38, 9e-31] {
            let mut codes = [7i8; 4];
            assert_eq!((quantize_group(&[tiny; 4], &mut codes), codes), (f16::ZERO, [0; 4]));
            assert_eq!((quantize_query(&[tiny; 3], &mut query), query), (0.0, [0; 3]));
        }
        for huge in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65520.0 * 127.0, 1e20] {
            let mut codes = [7i8; 4];
            let scale = quantize_group(&[1.0, -huge, 0.0, huge], &mut codes);
            assert!(scale.is_nan() && codes == [0; 4], "{huge}");
        }
        let mut codes = [7i8; 4];
        let largest = f16::MAX.to_f32() * 127.0;
        let scale = quantize_group(&[largest, -largest, 0.0, 1.0], &mut codes);
        assert_eq!((scale, codes), (f16::MAX, [127, -127, 0, 0]));
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(quantize_query(&[0.5, bad, 1.0], &mut query).is_nan());
            assert_eq!(query, [0; 3]);
        }
        quantize_query(&[-2.0, 1.0, 2.0], &mut query);
        assert_eq!(query, [-32767, 16384, 32767]);
    }

    /// The largest possible sums of one group fit i32, with either sign.
    #[test]
    fn integer_sums_fit() {
        let dot = dot(&[-32767; 32], |_| -128, std::iter::once(1.0));
        assert_eq!(dot, (32 * 32767 * 128) as f32);
    }
}
