//! The kernels in AVX2, with and without `vpdpbusd` of AVX-VNNI; see [`ymm`].

use super::groups::{self, OpenSpan, Openers, Opening};
use super::panel::Panel;
use super::scalar;
use super::tile::{LINE, TILE};
use super::ymm::{LANES, QUARTERS};
use std::arch::x86_64::*;

/// Defines a module with the kernels of an instruction set. Some are the same for both sets.
macro_rules! kernels {
    ($module:ident, $dot:ty, $words:ty, $offsets:expr, #[$features:meta]) => {
        pub mod $module {
            use super::super::groups::{OpenSpan, SpanRows};
            use super::super::panel::Panel;
            use super::super::words_x86::Ymm;
            use super::super::{trellis, ymm};

            pub use super::{finish, finish_with_min, floats, gate, open};

            /// Offsets in the raw sums of codes of 8, 4 and 2 bits, relative to sums of q (for 2
            /// bits, of 2 c).
            pub const OFFSETS: [i32; 3] = $offsets;

            /// See [`ymm::ints`].
            ///
            /// # Safety
            /// As there.
            #[$features]
            pub unsafe fn ints<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
                // SAFETY: the caller upholds the contract.
                unsafe { ymm::ints::<$dot, BITS, R>(panel, acc) }
            }

            /// See [`ymm::multiply`].
            ///
            /// # Safety
            /// As there.
            #[$features]
            pub unsafe fn multiply<const LARGEST: usize, const STEPS: usize, const R: usize>(
                span: &OpenSpan,
                rows: &SpanRows,
                acc: *mut f32,
            ) {
                // SAFETY: the caller upholds the contract.
                unsafe { ymm::multiply::<$dot, LARGEST, STEPS, R>(span, rows, acc) }
            }

            /// See [`ymm::multiply_packed`].
            ///
            /// # Safety
            /// As there.
            #[$features]
            pub unsafe fn multiply_packed<const BITS: usize, const STEPS: usize, const R: usize>(
                span: &OpenSpan,
                rows: &SpanRows,
                acc: *mut f32,
            ) {
                // SAFETY: the caller upholds the contract.
                unsafe { ymm::multiply_packed::<$dot, BITS, STEPS, R>(span, rows, acc) }
            }

            /// Multiplies trellis codes by `R` rows; see [`trellis::tiles`].
            ///
            /// # Safety
            /// As there.
            #[$features]
            pub unsafe fn tiles<const CODE: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
                // SAFETY: the caller upholds the contract.
                unsafe {
                    // Chosen by measurement: the sums of 8 outputs times rows fill the registers.
                    match R {
                        1 => trellis::tiles::<$words, CODE, R, 4, 1, 0>(panel, acc),
                        2..=4 => trellis::tiles::<$words, CODE, R, 2, 1, 1>(panel, acc),
                        _ => trellis::tiles::<$words, CODE, R, 1, 1, 1>(panel, acc),
                    }
                }
            }
        }
    };
}

kernels!(pairs, ymm::Pairs, Ymm<false>, [0, 8, 3], #[target_feature(enable = "avx2,fma,f16c")]);
kernels!(
    vnni,
    ymm::Vnni,
    Ymm<true>,
    [128, 8, 3],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
);

/// See [`groups::OpenFn`].
///
/// # Safety
/// The machine has the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn open(
    opening: &Opening,
    packed: &[u8],
    cols: usize,
    codes: bool,
    span: &mut OpenSpan,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { groups::open::<Eight>(opening, packed, cols, codes, span) }
}

/// Operations on vectors of 32 bytes.
struct Eight;

impl Openers for Eight {
    #[inline(always)]
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE] {
        let mut out = [0.0; TILE];
        for (eight, out) in line.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: the caller upholds the contract, and each part has eight f16.
            unsafe {
                let scales = scales_of_eight(eight.as_ptr().cast(), 1.0);
                _mm256_storeu_ps(out.as_mut_ptr(), scales);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]) {
        // SAFETY: the caller upholds the contract, and `bytes` has four vectors.
        unsafe {
            let levels =
                _mm_xor_si128(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(-128));
            let levels = _mm256_broadcastsi128_si256(levels);
            for quarter in bytes.as_chunks_mut::<LANES>().0 {
                let index = _mm256_loadu_si256(quarter.as_ptr().cast());
                let level = _mm256_shuffle_epi8(levels, index);
                _mm256_storeu_si256(quarter.as_mut_ptr().cast(), level);
            }
        }
    }
}

/// Returns eight scales, multiplied by the code's unit.
///
/// # Safety
/// `scales` points to eight f16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales_of_eight(scales: *const u8, unit: f32) -> __m256 {
    // SAFETY: the caller upholds the contract.
    let halves = unsafe { _mm_loadu_si128(scales.cast()) };
    _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(unit))
}

/// Returns the number of quarters of a tile that are computed together.
const fn quarters(rows: usize) -> usize {
    match rows {
        1 | 2 => 4,
        3..=5 => 2,
        _ => 1,
    }
}

/// Multiplies float codes of `BITS` bits by `R` rows.
///
/// # Safety
/// As for [`ymm::ints`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn floats<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    for quarter in (0..QUARTERS).step_by(quarters(R)) {
        match quarters(R) {
            // SAFETY: the caller upholds the contract.
            4 => unsafe { floats_in_quarters::<BITS, R, 4>(panel, quarter, acc) },
            // SAFETY: the caller upholds the contract.
            2 => unsafe { floats_in_quarters::<BITS, R, 2>(panel, quarter, acc) },
            // SAFETY: the caller upholds the contract.
            _ => unsafe { floats_in_quarters::<BITS, R, 1>(panel, quarter, acc) },
        }
    }
}

/// Computes `Q` quarters of the tile, starting at quarter `first`.
///
/// # Safety
/// As for [`ymm::ints`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn floats_in_quarters<const BITS: usize, const R: usize, const Q: usize>(
    panel: &Panel,
    first: usize,
    acc: *mut f32,
) {
    let step_bytes = if BITS == 16 { LINE } else { 2 * LINE };
    let mut y = [[_mm256_setzero_ps(); Q]; R];
    let place = |r: usize, q: usize| acc.wrapping_add(r * TILE + (first + q) * LANES);
    for (r, y) in y.iter_mut().enumerate() {
        for (q, y) in y.iter_mut().enumerate() {
            // SAFETY: `acc` has R rows.
            *y = unsafe { _mm256_loadu_ps(place(r, q)) };
        }
    }
    for step in 0..panel.steps {
        if first == 0 && (step * step_bytes).is_multiple_of(2 * LINE) {
            panel.fetch(step * step_bytes, 2 * LINE);
        }
        let data = panel.data.wrapping_add(step * step_bytes);
        for q in 0..Q {
            let quarter = first + q;
            let w = if BITS == 16 {
                // SAFETY: the panel has this step.
                let both = unsafe { _mm256_load_si256(data.add(quarter % 2 * LANES * 4).cast()) };
                _mm256_castsi256_ps(match quarter {
                    0 | 1 => _mm256_slli_epi32::<16>(both),
                    _ => _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32)),
                })
            } else {
                // SAFETY: the panel has this step.
                unsafe { _mm256_load_ps(data.add(quarter * LANES * 4).cast()) }
            };
            for (r, y) in y.iter_mut().enumerate() {
                // SAFETY: every row has this column.
                let x = _mm256_set1_ps(unsafe {
                    panel.x.add(r * panel.x_stride).cast::<f32>().add(step).read()
                });
                y[q] = _mm256_fmadd_ps(w, x, y[q]);
            }
        }
    }
    for (r, y) in y.iter().enumerate() {
        for (q, y) in y.iter().enumerate() {
            // SAFETY: `acc` has R rows.
            unsafe { _mm256_storeu_ps(place(r, q), *y) };
        }
    }
}

/// See [`super::panel::FinishFn`].
///
/// # Safety
/// The machine has the instructions; `scales` is a line; `acc` has a row for each of `sx`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn finish(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    for (r, (sx, sum)) in sx.iter().zip(sums).enumerate() {
        let (sx, extra) = (_mm256_set1_ps(*sx), _mm256_set1_epi32(offset.wrapping_mul(*sum)));
        for q in 0..QUARTERS {
            // SAFETY: `acc` has this row; `scales` has 32 scales.
            unsafe {
                let place = acc.add(r * TILE + q * LANES);
                let exact = _mm256_sub_epi32(_mm256_loadu_si256(place.cast()), extra);
                let scale = scales_of_eight(scales.add(q * LANES * 2), unit);
                _mm256_storeu_ps(
                    place,
                    _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(exact), sx), scale),
                );
            }
        }
    }
}

/// [`finish`] for formats with minima; see [`scalar::finish_with_min`].
///
/// # Safety
/// As for [`finish`], with two lines.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn finish_with_min(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { scalar::finish_with_min(scales, unit, offset, sx, sums, acc) }
}

/// See [`super::panel::GateFn`].
///
/// # Safety
/// The machine has the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn gate(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]) {
    scalar::gate_rows(gate, up);
}
