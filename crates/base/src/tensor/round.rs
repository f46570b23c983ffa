//! Rounds weights to integers, and finds a group's scale with the least squared error.

use super::integer::{Integer, ScaleRule};
use super::{Format, Group};
use half::f16;

/// Returns the stored scale of one group of weights.
pub fn scale_for(integer: &Integer, format: Format, group: &[f32]) -> f16 {
    let absmax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
    if absmax == 0.0 {
        return f16::ZERO;
    }
    let ScaleRule::Search { gauss_step, first, step, steps, both_signs } = integer.scale else {
        return f16_nonzero(absmax / integer.high);
    };
    if format.hadamard && format.group == Group::Row {
        let mean_square =
            group.iter().map(|v| *v as f64 * *v as f64).sum::<f64>() / group.len() as f64;
        return f16_nonzero(gauss_step * mean_square.sqrt() as f32);
    }
    let signs = if both_signs { &[1f32, -1.0][..] } else { &[1.0] };
    let candidates = (0..=steps)
        .flat_map(|i| signs.iter().map(move |sign| sign * absmax / (first + i as f32 * step)));
    search_scale(integer, group, candidates)
}

/// Returns the candidate scale with the least squared error, the first one on ties.
fn search_scale(integer: &Integer, group: &[f32], candidates: impl Iterator<Item = f32>) -> f16 {
    let mut best: Option<(f32, f16)> = None;
    for candidate in candidates {
        let scale = f16_nonzero(candidate);
        let error = squared_error(integer, group, scale.to_f32());
        if best.is_none_or(|(least, _)| error < least) {
            best = Some((error, scale));
        }
    }
    best.map_or(f16::ZERO, |(_, scale)| scale)
}

/// Returns a group's sum of squared rounding errors for one scale. Uses eight lanes to vectorise.
fn squared_error(integer: &Integer, group: &[f32], scale: f32) -> f32 {
    let Integer { low, high, shift, .. } = *integer;
    let inverse = 1.0 / scale;
    let square = |v: f32| {
        let e = v - (round_clamped(v * inverse + shift, low, high) - shift) * scale;
        e * e
    };
    let mut lanes = [0f32; 8];
    let (blocks, rest) = group.as_chunks::<8>();
    for block in blocks {
        for i in 0..8 {
            lanes[i] += square(block[i]);
        }
    }
    rest.iter().map(|v| square(*v)).sum::<f32>() + lanes.iter().sum::<f32>()
}

/// Returns the nearest integer in `low..=high`, halves to even.
///
/// Avoids a function call per value: adding 1.5 * 2^23 drops the fraction.
#[inline(always)]
fn round_clamped(v: f32, low: f32, high: f32) -> f32 {
    const DROP: f32 = 12_582_912.0;
    let v = if v < low { low } else { v };
    let v = if v > high { high } else { v };
    (v + DROP) - DROP
}

/// Converts a scale to f16 without underflow or overflow.
pub fn f16_nonzero(scale: f32) -> f16 {
    let tiny = f16::MIN_POSITIVE_SUBNORMAL.to_f32();
    let magnitude = scale.abs().clamp(tiny, f16::MAX.to_f32());
    f16::from_f32(magnitude.copysign(scale))
}

/// Returns the stored code nearest to `value`, and the value it decodes to; halves round to even.
///
/// With a scale of zero, everything decodes to zero.
#[inline(always)]
pub fn code_of_nearest(integer: &Integer, value: f32, scale: f32) -> (u8, f32) {
    if scale == 0.0 {
        return (integer.zero_code(), 0.0);
    }
    let c = round_clamped(value / scale + integer.shift, integer.low, integer.high);
    ((c as i32 + integer.zero) as u8, (c - integer.shift) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_with_halves_to_even() {
        for i in -4000..4000 {
            let v = i as f32 / 16.0;
            assert_eq!(
                round_clamped(v, -127.0, 127.0),
                v.round_ties_even().clamp(-127.0, 127.0),
                "{v}"
            );
        }
        assert_eq!(round_clamped(f32::MAX, 0.0, 3.0), 3.0);
    }
}
