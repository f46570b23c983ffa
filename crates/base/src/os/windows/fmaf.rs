//! Correctly rounded `fmaf`. `f32::mul_add` calls the C library's `fmaf` if the processor's
//! instruction is not compiled in, and the one in mingw-w64 rounds twice. The linker substitutes
//! this function, see `build.rs`.

/// Returns `x * y + z`, rounded once.
#[unsafe(no_mangle)]
pub extern "C" fn __wrap_fmaf(x: f32, y: f32, z: f32) -> f32 {
    // The product of two floats is exact in a double.
    let (product, z) = (f64::from(x) * f64::from(y), f64::from(z));
    let sum = product + z;
    let part = sum - product;
    // `sum + rest` is the exact sum.
    let rest = (product - (sum - part)) + (z - part);
    let bits = sum.to_bits();
    if rest == 0.0 || !sum.is_finite() || bits & 1 == 1 {
        return sum as f32;
    }
    // Round to odd, so that the final rounding to a float sees that the sum is inexact.
    f64::from_bits(if (rest > 0.0) == (sum > 0.0) { bits + 1 } else { bits - 1 }) as f32
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    use std::hint::black_box;

    /// Returns a float as an integer and its exponent of two.
    fn parts(x: f32) -> (i128, i32) {
        let (bits, exponent) = (x.to_bits() & 0x7f_ffff, (x.to_bits() >> 23 & 255) as i32);
        let magnitude = if exponent == 0 { bits } else { bits | 0x80_0000 };
        let sign = if x.is_sign_negative() { -1 } else { 1 };
        (sign * i128::from(magnitude), exponent.max(1) - 150)
    }

    /// Returns `integer * 2^power`, rounded to the nearest float, ties to even.
    fn nearest(integer: i128, power: i32) -> f32 {
        let magnitude = integer.unsigned_abs();
        let bits = 128 - magnitude.leading_zeros() as i32;
        // Number of bits below the float's last bit.
        let drop = (bits - 24).max(-149 - power).max(0);
        if drop >= 127 {
            return if integer < 0 { -0.0 } else { 0.0 };
        }
        let (kept, rest) = (magnitude >> drop, magnitude & ((1 << drop) - 1));
        let half = if drop == 0 { 1 } else { 1 << (drop - 1) };
        let up = rest > half || (rest == half && drop > 0 && kept & 1 == 1);
        let rounded = (kept + u128::from(up)) as f64 * 2f64.powi(power + drop);
        (if integer < 0 { -rounded } else { rounded }) as f32
    }

    /// Returns `x * y + z`, computed with integers and rounded once. The exponents of the terms may
    /// differ by at most 70.
    fn exact(x: f32, y: f32, z: f32) -> f32 {
        let ((a, i), (b, j), (c, k)) = (parts(x), parts(y), parts(z));
        let power = (i + j).min(k);
        let sum = ((a * b) << (i + j - power)) + (c << (k - power));
        if sum == 0 { x * y + z } else { nearest(sum, power) }
    }

    fn assert_exact(x: f32, y: f32, z: f32) {
        let (found, expected) = (black_box(x).mul_add(black_box(y), black_box(z)), exact(x, y, z));
        assert_eq!(found.to_bits(), expected.to_bits(), "{x:e} * {y:e} + {z:e}");
    }

    #[test]
    fn a_product_and_sum_are_rounded_once() {
        // The sum is near the midpoint of two floats, by less than the precision of a double.
        let tiny = f32::from_bits(1);
        for (x, y, z) in [
            (1.0 + f32::EPSILON, 1.0 + f32::EPSILON, 2f32.powi(-60)),
            (1.0 + f32::EPSILON, 1.0 - f32::EPSILON / 2.0, -2f32.powi(-60)),
            (2f32.powi(-12) + 2f32.powi(-35), 2f32.powi(-12), 1.0),
            (2f32.powi(-12) - 2f32.powi(-36), 2f32.powi(-12), 1.0),
            (2f32.powi(-30), 2f32.powi(-30), 1.0 + f32::EPSILON),
            (tiny, 0.5, tiny),
            (tiny, -0.5, 3.0 * tiny),
            (f32::MIN_POSITIVE, 1.0 - f32::EPSILON / 2.0, tiny),
        ] {
            for (x, y) in [(x, y), (-x, y)] {
                assert_exact(x, y, z);
                assert_exact(x, y, -z);
            }
        }
        let mut random = SmallRng::seed_from_u64(7);
        let mut float = |exponents: std::ops::Range<u32>| {
            let mantissa = [0, 1, 0x7f_ffff, random.random::<u32>() & 0x7f_ffff];
            let mantissa = mantissa[random.random_range(0..4)];
            let sign = random.random::<u32>() & 1 << 31;
            f32::from_bits(sign | random.random_range(exponents) << 23 | mantissa)
        };
        for _ in 0..200_000 {
            assert_exact(float(120..134), float(120..134), float(90..160));
            // Results in the subnormal range.
            assert_exact(float(40..90), float(40..60), float(0..30));
        }
    }

    #[test]
    fn infinities_and_numbers_that_are_none_pass_through() {
        let sum = |x: f32, y: f32, z: f32| black_box(x).mul_add(black_box(y), black_box(z));
        assert_eq!(sum(f32::MAX, 2.0, -f32::MAX), f32::MAX);
        assert_eq!(sum(f32::MAX, f32::MAX, -f32::MAX), f32::INFINITY);
        assert_eq!(sum(f32::INFINITY, 1.0, 1.0), f32::INFINITY);
        assert!(sum(f32::INFINITY, 0.0, 1.0).is_nan() && sum(1.0, 1.0, f32::NAN).is_nan());
        assert_eq!(sum(-1.0, 0.0, 0.0).to_bits(), 0);
        assert_eq!(sum(-0.0, 1.0, -0.0).to_bits(), (-0f32).to_bits());
    }
}
