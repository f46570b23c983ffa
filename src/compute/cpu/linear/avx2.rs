//! The kernels in AVX2: a tile is four vectors of 8 outputs, and `vpmaddubsw` multiplies each by 4
//! columns.
//!
//! `vpmaddubsw` adds pairs of products into i16 and would saturate. It never does here, with
//! activations in -127..=127:
//! - i4, stored as 0..=15: the two pairs of a step give at most 4 * 15 * 127 = 7620, those of four
//!   steps 30480;
//! - i2, doubled to 0..=6: the four pairs of a step give at most 8 * 6 * 127 = 6096, those of five
//!   steps 30480;
//! - i8: the unsigned side is |q| <= 128 and the activation takes q's sign, so a pair gives at most
//!   2 * 128 * 127 = 32512.

use super::pack::{LINE, TILE};
use super::panel::Panel;
use super::words_x86::Ymm;
use super::{scalar, trellis};
use std::arch::x86_64::*;

/// Raw sums are of q for i8, q + 8 for i4, 2 c = q + 3 for i2.
pub const OFFSETS: [i32; 3] = [0, 8, 3];

/// Outputs of a vector, and vectors of a tile.
const LANES: usize = 8;
const QUARTERS: usize = TILE / LANES;

/// Columns 4 `part` to 4 `part` + 3 of a step's dwords as unsigned bytes; for i8 as signed ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack<const BITS: usize>(w: __m256i, part: usize) -> __m256i {
    match (BITS, part) {
        (8, _) => _mm256_xor_si256(w, _mm256_set1_epi8(-128)),
        (4, 0) => _mm256_and_si256(w, _mm256_set1_epi8(15)),
        (4, _) => _mm256_and_si256(_mm256_srli_epi16::<4>(w), _mm256_set1_epi8(15)),
        // Twice the code: the shifts leave it one bit higher.
        (_, 0) => _mm256_and_si256(_mm256_slli_epi16::<1>(w), _mm256_set1_epi8(6)),
        (_, 1) => _mm256_and_si256(_mm256_srli_epi16::<1>(w), _mm256_set1_epi8(6)),
        (_, 2) => _mm256_and_si256(_mm256_srli_epi16::<3>(w), _mm256_set1_epi8(6)),
        _ => _mm256_and_si256(_mm256_srli_epi16::<5>(w), _mm256_set1_epi8(6)),
    }
}

/// Integer codes of `BITS` bits with `R` rows; see [`super::panel::PanelFn`].
///
/// # Safety
/// The machine has the instructions; the panel and `acc` are as [`super::panel::Panel`] and
/// [`super::panel::PanelFn`] say.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn ints<const BITS: usize, const GROUPED: bool, const R: usize>(
    panel: &Panel,
    acc: *mut f32,
) {
    // SAFETY (of every block below): the caller's promises; together the two runs of rows are the
    // panel's.
    match R {
        7 => unsafe {
            ints_of_rows::<BITS, GROUPED, 4, true>(panel, 0, acc);
            ints_of_rows::<BITS, GROUPED, 3, false>(panel, 4, acc);
        },
        8 => unsafe {
            ints_of_rows::<BITS, GROUPED, 4, true>(panel, 0, acc);
            ints_of_rows::<BITS, GROUPED, 4, false>(panel, 4, acc);
        },
        _ => unsafe { ints_of_rows::<BITS, GROUPED, R, true>(panel, 0, acc) },
    }
}

/// `R` rows of the panel from row `row`. The first to read the panel fetches the next.
///
/// # Safety
/// As for [`ints`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn ints_of_rows<
    const BITS: usize,
    const GROUPED: bool,
    const R: usize,
    const FETCH: bool,
>(
    panel: &Panel,
    row: usize,
    acc: *mut f32,
) {
    let acc = acc.wrapping_add(row * TILE);
    // 16 registers hold the sums and what they are made from: the more rows, the fewer quarters of
    // a tile at once.
    for quarter in (0..QUARTERS).step_by(quarters(R)) {
        match quarters(R) {
            // SAFETY: the caller's promises.
            4 => unsafe {
                ints_in_quarters::<BITS, GROUPED, R, 4, FETCH>(panel, row, quarter, acc)
            },
            // SAFETY: the caller's promises.
            2 => unsafe {
                ints_in_quarters::<BITS, GROUPED, R, 2, FETCH>(panel, row, quarter, acc)
            },
            // SAFETY: the caller's promises.
            _ => unsafe {
                ints_in_quarters::<BITS, GROUPED, R, 1, FETCH>(panel, row, quarter, acc)
            },
        }
    }
}

/// Quarters of a tile that are worked on together.
const fn quarters(rows: usize) -> usize {
    match rows {
        1 | 2 => 4,
        3..=5 => 2,
        _ => 1,
    }
}

/// Steps whose products are added up in 16 bits before they are widened: as many as cannot
/// overflow, see above.
const fn together(bits: usize) -> usize {
    match bits {
        8 => 1,
        4 => 4,
        _ => 5,
    }
}

/// `Q` quarters of the tile, from quarter `first`.
///
/// # Safety
/// As for [`ints`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn ints_in_quarters<
    const BITS: usize,
    const GROUPED: bool,
    const R: usize,
    const Q: usize,
    const FETCH: bool,
>(
    panel: &Panel,
    row: usize,
    first: usize,
    acc: *mut f32,
) {
    let parts = 8 / BITS;
    let ones = _mm256_set1_epi16(1);
    let acc = acc.wrapping_add(first * LANES);
    let mut data = panel.data;
    let mut x = panel.x.wrapping_add(row * panel.x_stride);
    for block in 0..panel.blocks {
        let scales = data.wrapping_add(first * LANES * 2);
        data = data.wrapping_add(if GROUPED { LINE } else { 0 });
        let mut sums = [[_mm256_setzero_si256(); Q]; R];
        for start in (0..panel.steps).step_by(together(BITS)) {
            let mut pairs = [[_mm256_setzero_si256(); Q]; R];
            for _ in start..panel.steps.min(start + together(BITS)) {
                if FETCH && first == 0 {
                    panel.fetch(data as usize - panel.data as usize, 2 * LINE);
                }
                let mut packed = [_mm256_setzero_si256(); Q];
                for (q, packed) in packed.iter_mut().enumerate() {
                    // SAFETY: the panel has this step.
                    *packed =
                        unsafe { _mm256_load_si256(data.add((first + q) * LANES * 4).cast()) };
                }
                // Part by part, so that an activation is spread once for all quarters and few
                // vectors are alive.
                for part in 0..parts {
                    let mut w = packed;
                    for w in &mut w {
                        *w = unpack::<BITS>(*w, part);
                    }
                    for (r, pairs) in pairs.iter_mut().enumerate() {
                        // SAFETY: every row has the columns of this step.
                        let x = unsafe {
                            x.add(r * panel.x_stride + 4 * part).cast::<i32>().read_unaligned()
                        };
                        let x = _mm256_set1_epi32(x);
                        for (pairs, w) in pairs.iter_mut().zip(w) {
                            let products = if BITS == 8 {
                                _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                            } else {
                                _mm256_maddubs_epi16(w, x)
                            };
                            *pairs = _mm256_add_epi16(*pairs, products);
                        }
                    }
                }
                data = data.wrapping_add(2 * LINE);
                x = x.wrapping_add(4 * parts);
            }
            for (sums, pairs) in sums.iter_mut().zip(&pairs) {
                for (sum, pairs) in sums.iter_mut().zip(pairs) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*pairs, ones));
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (q, sum) in sums.iter().enumerate() {
                let place = acc.wrapping_add(r * TILE + q * LANES);
                if GROUPED {
                    // SAFETY: grouped panels come with scales and sums of rows and groups, and a
                    // line of weight scales in each block; `acc` has R rows.
                    unsafe {
                        let sx = _mm256_set1_ps(*panel.sx.add((row + r) * panel.groups + block));
                        let offset = OFFSETS[3 - BITS.ilog2() as usize];
                        let extra = _mm256_set1_epi32(
                            offset * *panel.sums.add((row + r) * panel.groups + block),
                        );
                        let scale = scales_of_eight(
                            scales.add(q * LANES * 2),
                            if BITS == 2 { 0.5 } else { 1.0 },
                        );
                        let product =
                            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(*sum, extra)), sx);
                        _mm256_storeu_ps(
                            place,
                            _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(place)),
                        );
                    }
                } else {
                    // SAFETY: `acc` has R rows.
                    unsafe {
                        let place = place.cast::<__m256i>();
                        _mm256_storeu_si256(
                            place,
                            _mm256_add_epi32(_mm256_loadu_si256(place), *sum),
                        );
                    }
                }
            }
        }
    }
}

/// Eight scales, times the code's unit.
///
/// # Safety
/// `scales` points to eight f16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales_of_eight(scales: *const u8, unit: f32) -> __m256 {
    // SAFETY: the caller's promise.
    let halves = unsafe { _mm_loadu_si128(scales.cast()) };
    _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(unit))
}

/// Trellis codes with `R` rows; see [`trellis::tiles`].
///
/// # Safety
/// As for [`ints`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn tiles<const CODE: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe {
        // Measured; sums of 8 outputs times rows fill the registers as in `quarters`.
        match R {
            1 => trellis::tiles::<Ymm, CODE, R, 4, 1, 0>(panel, acc),
            2 => trellis::tiles::<Ymm, CODE, R, 2, 1, 1>(panel, acc),
            3 | 4 => trellis::tiles::<Ymm, CODE, R, 2, 1, 1>(panel, acc),
            _ => trellis::tiles::<Ymm, CODE, R, 1, 1, 1>(panel, acc),
        }
    }
}

/// Float codes of `BITS` bits with `R` rows.
///
/// # Safety
/// As for [`ints`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn floats<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    for quarter in (0..QUARTERS).step_by(quarters(R)) {
        match quarters(R) {
            // SAFETY: the caller's promises.
            4 => unsafe { floats_in_quarters::<BITS, R, 4>(panel, quarter, acc) },
            // SAFETY: the caller's promises.
            2 => unsafe { floats_in_quarters::<BITS, R, 2>(panel, quarter, acc) },
            // SAFETY: the caller's promises.
            _ => unsafe { floats_in_quarters::<BITS, R, 1>(panel, quarter, acc) },
        }
    }
}

/// `Q` quarters of the tile, from quarter `first`.
///
/// # Safety
/// As for [`ints`].
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

/// The same with minima; see [`scalar::finish_with_min`].
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
    // SAFETY: the caller's promises.
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
