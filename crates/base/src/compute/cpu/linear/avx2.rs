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

use super::groups::{self, OpenSpan, Openers, Opening, SpanRows};
use super::panel::Panel;
use super::tile::{LINE, TILE};
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
pub unsafe fn ints<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller's promises; together the runs of rows are the panel's.
    unsafe {
        match R {
            7 => {
                ints_of_rows::<BITS, 4, true>(panel, 0, acc);
                ints_of_rows::<BITS, 3, false>(panel, 4, acc);
            }
            8 => {
                ints_of_rows::<BITS, 4, true>(panel, 0, acc);
                ints_of_rows::<BITS, 4, false>(panel, 4, acc);
            }
            _ => ints_of_rows::<BITS, R, true>(panel, 0, acc),
        }
    }
}

/// `R` rows of the panel from row `row`. The first to read the panel fetches the next.
///
/// # Safety
/// As for [`ints`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn ints_of_rows<const BITS: usize, const R: usize, const FETCH: bool>(
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
            4 => unsafe { ints_in_quarters::<BITS, R, 4, FETCH>(panel, row, quarter, acc) },
            // SAFETY: the caller's promises.
            2 => unsafe { ints_in_quarters::<BITS, R, 2, FETCH>(panel, row, quarter, acc) },
            // SAFETY: the caller's promises.
            _ => unsafe { ints_in_quarters::<BITS, R, 1, FETCH>(panel, row, quarter, acc) },
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
unsafe fn ints_in_quarters<const BITS: usize, const R: usize, const Q: usize, const FETCH: bool>(
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
                *packed = unsafe { _mm256_load_si256(data.add((first + q) * LANES * 4).cast()) };
            }
            // Part by part, so that an activation is spread once for all quarters and few vectors
            // are alive.
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
                        *pairs = _mm256_add_epi16(*pairs, products::<BITS>(w, x));
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
            let place = acc.wrapping_add(r * TILE + q * LANES).cast::<__m256i>();
            // SAFETY: `acc` has R rows.
            unsafe {
                _mm256_storeu_si256(place, _mm256_add_epi32(_mm256_loadu_si256(place), *sum));
            }
        }
    }
}

/// Sums of pairs of products of bytes. Weights of 8 bits have a sign, others not.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<const BITS: usize>(w: __m256i, x: __m256i) -> __m256i {
    match BITS {
        8 => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
        _ => _mm256_maddubs_epi16(w, x),
    }
}

/// See [`groups::OpenFn`].
///
/// # Safety
/// The machine has the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn open(opening: &Opening, packed: &[u8], cols: usize, span: &mut OpenSpan) {
    // SAFETY: the caller's promise.
    unsafe { groups::open::<Eight>(opening, packed, cols, span) }
}

/// Vectors of 32 bytes.
struct Eight;

impl Openers for Eight {
    #[inline(always)]
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE] {
        let mut out = [0.0; TILE];
        for (eight, out) in line.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: the caller's promise; eight f16.
            unsafe {
                let scales = scales_of_eight(eight.as_ptr().cast(), 1.0);
                _mm256_storeu_ps(out.as_mut_ptr(), scales);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]) {
        // SAFETY: the caller's promise; four vectors.
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

/// A span with `R` rows; see [`groups::GroupsFn`]. `LARGEST` is the largest byte of the span.
///
/// # Safety
/// The machine has the instructions; the rows are as [`groups::SpanRows`] says; `acc` has `R` rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn multiply<const LARGEST: usize, const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
) {
    (0..rows.groups).for_each(|group| rows.fetch(group));
    // SAFETY: the caller's promises; together the runs of rows are all.
    unsafe {
        match R {
            7 => {
                multiply_rows::<LARGEST, 4>(span, rows, 0, acc);
                multiply_rows::<LARGEST, 3>(span, rows, 4, acc);
            }
            8 => {
                multiply_rows::<LARGEST, 4>(span, rows, 0, acc);
                multiply_rows::<LARGEST, 4>(span, rows, 4, acc);
            }
            _ => multiply_rows::<LARGEST, R>(span, rows, 0, acc),
        }
    }
}

/// `R` rows from row `row`.
///
/// # Safety
/// As for [`multiply`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_rows<const LARGEST: usize, const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    row: usize,
    acc: *mut f32,
) {
    let acc = acc.wrapping_add(row * TILE);
    for quarter in (0..QUARTERS).step_by(quarters(R)) {
        match quarters(R) {
            // SAFETY: the caller's promises.
            4 => unsafe { multiply_quarters::<LARGEST, R, 4>(span, rows, row, quarter, acc) },
            // SAFETY: the caller's promises.
            2 => unsafe { multiply_quarters::<LARGEST, R, 2>(span, rows, row, quarter, acc) },
            // SAFETY: the caller's promises.
            _ => unsafe { multiply_quarters::<LARGEST, R, 1>(span, rows, row, quarter, acc) },
        }
    }
}

/// `Q` quarters of the tile, from quarter `first`.
///
/// # Safety
/// As for [`multiply`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_quarters<const LARGEST: usize, const R: usize, const Q: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    row: usize,
    first: usize,
    acc: *mut f32,
) {
    let signed = LARGEST > 127;
    // Steps whose products are added up in 16 bits: as many as cannot overflow.
    let together = if signed { 1 } else { i16::MAX as usize / (2 * LARGEST * 127) };
    let (ones, flip) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
    let offset = if signed { rows.offset - 128 } else { rows.offset };
    for group in 0..rows.groups {
        let mut sums = [[_mm256_setzero_si256(); Q]; R];
        for start in (0..rows.steps).step_by(together) {
            let mut pairs = [[_mm256_setzero_si256(); Q]; R];
            for step in start..rows.steps.min(start + together) {
                let step = group * rows.steps + step;
                let mut w = [_mm256_setzero_si256(); Q];
                for (q, w) in w.iter_mut().enumerate() {
                    let data = rows.bytes.wrapping_add(step).cast::<i32>();
                    // SAFETY: the span has this step.
                    *w = unsafe { _mm256_load_si256(data.add((first + q) * LANES).cast()) };
                    if signed {
                        *w = _mm256_xor_si256(*w, flip);
                    }
                }
                for (r, pairs) in pairs.iter_mut().enumerate() {
                    let x = rows.x.wrapping_add((row + r) * rows.x_stride + 4 * step);
                    // SAFETY: every row has the columns of this step.
                    let x = _mm256_set1_epi32(unsafe { x.cast::<i32>().read_unaligned() });
                    for (pairs, w) in pairs.iter_mut().zip(w) {
                        let products =
                            if signed { products::<8>(w, x) } else { products::<4>(w, x) };
                        *pairs = _mm256_add_epi16(*pairs, products);
                    }
                }
            }
            for (sums, pairs) in sums.iter_mut().zip(&pairs) {
                for (sum, pairs) in sums.iter_mut().zip(pairs) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*pairs, ones));
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let at = (row + r) * rows.s_stride + group;
            // SAFETY: every row has a scale and a sum for this group.
            let (sx, all) = unsafe { (*rows.sx.add(at), *rows.sums.add(at)) };
            let extra = _mm256_set1_epi32(offset * all);
            for (q, sum) in sums.iter().enumerate() {
                let lane = (first + q) * LANES;
                // SAFETY: `acc` has R rows of a tile's outputs, and so have a group's lines.
                unsafe {
                    let place = acc.add(r * TILE + lane);
                    let exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(*sum, extra));
                    let product = _mm256_mul_ps(exact, _mm256_set1_ps(sx));
                    let scale = _mm256_load_ps(span.scales[group].as_ptr().add(lane));
                    let mut y = _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(place));
                    if rows.has_min {
                        let min = _mm256_load_ps(span.mins[group].as_ptr().add(lane));
                        y = _mm256_fmadd_ps(_mm256_set1_ps(all as f32 * sx), min, y);
                    }
                    _mm256_storeu_ps(place, y);
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
