//! Kernels in NEON. A tile is eight vectors of 4 outputs. `sdot` multiplies a vector by 4 columns
//! of one row of activations, `smmla` (i8mm) multiplies half a vector by 8 columns of two rows.
//!
//! Both need signed bytes, to which all codes are unpacked, and add products in 32 bits. Columns
//! are processed in eights. The sizes of blocks of sums are derived from the 32 registers, because
//! no ARM64 processor was available for measurements.

use super::groups::{self, OpenSpan, Openers, Opening, SpanRows};
use super::panel::Panel;
use super::tile::{LINE, TILE};
use super::words_neon::Quad;
use super::{scalar, trellis};
use crate::compute::cpu::neon::Neon;
use crate::compute::cpu::simd::Lanes;
use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

pub use super::scalar::gate;

/// The raw sums are sums of q for i8, of q + 8 for i4, and of 2 c = q + 3 for i2.
pub const OFFSETS: [i32; 3] = [0, 8, 3];

/// Outputs in a vector.
const LANES: usize = 4;

/// Runs the body for each row, unrolled. Sums with a variable index would not stay in registers.
macro_rules! each_row {
    ($r:ident $body:block) => { unrolled!($r in R, [0 1 2 3 4 5 6 7], $body) };
}

/// Runs the body for each vector, unrolled.
macro_rules! each_vector {
    ($q:ident $body:block) => { unrolled!($q in Q, [0 1 2 3 4 5 6 7], $body) };
}

macro_rules! unrolled {
    ($i:ident in $end:ident, [$($n:literal)*], $body:block) => {
        $({ const $i: usize = $n; if $i < $end $body })*
    };
}

/// Returns the number of vectors of a tile that are computed together: at most 16 registers have
/// sums.
const fn vectors(rows: usize) -> usize {
    match rows {
        1 => 8,
        2..=4 => 4,
        _ => 2,
    }
}

/// Calls a kernel for all vectors of the tile, with the number of vectors per call and the first of
/// them.
macro_rules! over_tile {
    ($kernel:ident[$($constant:expr),*]($($arg:expr),*)) => {
        for first in (0..TILE / LANES).step_by(vectors(R)) {
            match vectors(R) {
                8 => $kernel::<$({ $constant },)* R, 8>($($arg,)* first),
                4 => $kernel::<$({ $constant },)* R, 4>($($arg,)* first),
                _ => $kernel::<$({ $constant },)* R, 2>($($arg,)* first),
            }
        }
    };
}

/// Defines the kernels that differ between the instruction sets.
macro_rules! kernels {
    ($module:ident, $pairs:literal, #[$features:meta]) => {
        pub mod $module {
            use super::super::{OpenSpan, SpanRows, panel::Panel};
            use super::{LANES, TILE, ints_in_vectors, multiply_in_vectors, vectors};

            pub use super::{OFFSETS, finish, finish_with_min, floats, gate, open, tiles};

            /// Multiplies integer codes of `BITS` bits by `R` rows; see
            /// [`PanelFn`](super::super::PanelFn).
            ///
            /// # Safety
            /// The machine has the instructions; the panel and `acc` are as [`Panel`] and
            /// [`PanelFn`](super::super::PanelFn) say.
            #[$features]
            pub unsafe fn ints<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
                // SAFETY: the caller upholds the contract.
                unsafe { over_tile!(ints_in_vectors[$pairs, BITS](panel, acc)) }
            }

            /// Multiplies a span by `R` rows; see [`GroupsFn`](super::super::GroupsFn). `BITS` is 8
            /// if bytes may exceed 127, otherwise 7.
            ///
            /// # Safety
            /// The machine has the instructions; the rows are as [`SpanRows`] says; `acc` has `R`
            /// rows.
            #[$features]
            pub unsafe fn multiply<const BITS: usize, const R: usize>(
                span: &OpenSpan,
                rows: &SpanRows,
                acc: *mut f32,
            ) {
                (0..rows.groups).for_each(|group| rows.fetch(group, 0));
                // SAFETY: the caller upholds the contract.
                unsafe { over_tile!(multiply_in_vectors[$pairs, BITS](span, rows, acc)) }
            }
        }
    };
}

kernels!(one_row, false, #[target_feature(enable = "neon,dotprod")]);
kernels!(two_rows, true, #[target_feature(enable = "neon,dotprod,i8mm")]);

/// Adds to each sum the products of its four bytes of `w` with bytes 4 `PART` to 4 `PART` + 3 of
/// `x`.
///
/// # Safety
/// As for [`dot`].
#[inline(always)]
unsafe fn dot_part<const PART: usize>(sums: int32x4_t, w: int8x16_t, x: int8x8_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: as for `dot`.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) sums,
            in(vreg) w,
            in(vreg) x,
            const PART,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Adds to the 2 x 2 sums the products of both rows of `x` with both rows of `w`, of eight bytes
/// each.
///
/// # Safety
/// The machine has i8mm, for which the caller is compiled.
#[inline(always)]
unsafe fn dots(sums: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: as for `dot`.
    unsafe {
        asm!(
            "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums,
            in(vreg) x,
            in(vreg) w,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Returns eight columns of the outputs of `Q` vectors as signed bytes, four per register. They are
/// the columns from 8 `PART` on of a step of `BITS` bits. `BITS` is 7 for opened bytes below 128.
/// `data` is the first vector's part of the step.
///
/// # Safety
/// The steps of these columns can be read.
#[inline(always)]
unsafe fn eight<const BITS: usize, const PART: usize, const Q: usize>(
    data: *const u8,
) -> [[int8x16_t; 2]; Q] {
    // SAFETY: the caller upholds the contract, and every ARM64 processor has NEON.
    from_fn(|q| unsafe {
        let place = data.add(q * 4 * LANES);
        let (bytes, next) = (vld1q_u8(place), place.wrapping_add(2 * LINE));
        // Twice the code, because it is shifted down by one bit less.
        let twice = |shifted| vandq_u8(shifted, vdupq_n_u8(6));
        let columns = match (BITS, PART) {
            (8, _) => [bytes, vld1q_u8(next)].map(|v| veorq_u8(v, vdupq_n_u8(0x80))),
            (7, _) => [bytes, vld1q_u8(next)],
            (4, _) => [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)],
            (_, 0) => [twice(vshlq_n_u8::<1>(bytes)), twice(vshrq_n_u8::<1>(bytes))],
            _ => [twice(vshrq_n_u8::<3>(bytes)), twice(vshrq_n_u8::<5>(bytes))],
        };
        columns.map(|v| vreinterpretq_s8_u8(v))
    })
}

/// Adds the products of eight columns with `R` rows. With `PAIRS`, the sums of two rows and two
/// outputs share a register, see [`sums_of`].
///
/// # Safety
/// The machine has the instructions; eight columns of each row can be read.
#[inline(always)]
unsafe fn add_products<const PAIRS: bool, const R: usize, const Q: usize>(
    sums: &mut [[int32x4_t; Q]; R],
    w: [[int8x16_t; 2]; Q],
    x: *const i8,
    x_stride: usize,
) {
    // SAFETY: the caller upholds the contract, and every ARM64 processor has NEON.
    unsafe {
        let row = |r: usize| vld1_s8(x.add(r * x_stride));
        let halves = w.map(|w| {
            let [a, b] = w.map(|v| vreinterpretq_s32_s8(v));
            [vzip1q_s32(a, b), vzip2q_s32(a, b)].map(|v| vreinterpretq_s8_s32(v))
        });
        each_row!(Y {
            if PAIRS && (Y | 1) < R {
                if Y % 2 == 0 {
                    let x = vcombine_s8(row(Y), row(Y + 1));
                    each_vector!(X {
                        sums[Y][X] = dots(sums[Y][X], x, halves[X][0]);
                        sums[Y + 1][X] = dots(sums[Y + 1][X], x, halves[X][1]);
                    });
                }
            } else {
                let x = row(Y);
                each_vector!(X { sums[Y][X] = dot_part::<0>(sums[Y][X], w[X][0], x); });
                each_vector!(X { sums[Y][X] = dot_part::<1>(sums[Y][X], w[X][1], x); });
            }
        });
    }
}

/// Returns the sums of row `r` with the outputs of vector `q`.
#[inline(always)]
fn sums_of<const PAIRS: bool, const R: usize, const Q: usize>(
    sums: &[[int32x4_t; Q]; R],
    r: usize,
    q: usize,
) -> int32x4_t {
    let (above, below) = (r / 2 * 2, r / 2 * 2 + 1);
    if !PAIRS || below >= R {
        return sums[r][q];
    }
    // SAFETY: NEON is in every ARM64 processor.
    unsafe {
        let [a, b] = [sums[above][q], sums[below][q]].map(|v| vreinterpretq_s64_s32(v));
        vreinterpretq_s32_s64(if r == above { vzip1q_s64(a, b) } else { vzip2q_s64(a, b) })
    }
}

/// Computes `Q` vectors of the tile, starting at vector `first`.
///
/// # Safety
/// The machine has the instructions; the panel and `acc` are as [`Panel`] and
/// [`super::panel::PanelFn`] say.
#[inline(always)]
unsafe fn ints_in_vectors<const PAIRS: bool, const BITS: usize, const R: usize, const Q: usize>(
    panel: &Panel,
    acc: *mut f32,
    first: usize,
) {
    // A step of i8 has four columns. The columns of a row are a multiple of eight.
    let (steps, cols) = if BITS == 8 { (2, 8) } else { (1, 32 / BITS) };
    debug_assert!(panel.steps.is_multiple_of(steps));
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); Q]; R];
        for i in 0..panel.steps / steps {
            let at = i * steps * 2 * LINE;
            if first == 0 {
                panel.fetch(at, steps * 2 * LINE);
            }
            let data = panel.data.add(at + first * 4 * LANES);
            let x = panel.x.add(i * cols).cast::<i8>();
            add_products::<PAIRS, R, Q>(&mut sums, eight::<BITS, 0, Q>(data), x, panel.x_stride);
            if cols == 16 {
                let (w, x) = (eight::<BITS, 1, Q>(data), x.add(8));
                add_products::<PAIRS, R, Q>(&mut sums, w, x, panel.x_stride);
            }
        }
        each_row!(Y {
            each_vector!(X {
                let place = acc.add(Y * TILE + (first + X) * LANES).cast();
                let sum = sums_of::<PAIRS, R, Q>(&sums, Y, X);
                vst1q_s32(place, vaddq_s32(vld1q_s32(place), sum));
            });
        });
    }
}

/// Computes `Q` vectors of the tile, starting at vector `first`.
///
/// # Safety
/// The machine has the instructions; the rows are as [`SpanRows`] says; `acc` has `R` rows.
#[inline(always)]
unsafe fn multiply_in_vectors<
    const PAIRS: bool,
    const BITS: usize,
    const R: usize,
    const Q: usize,
>(
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
    first: usize,
) {
    let offset = if BITS == 8 { rows.offset - 128 } else { rows.offset };
    // SAFETY: the caller upholds the contract.
    unsafe {
        for group in 0..rows.groups {
            let mut sums = [[vdupq_n_s32(0); Q]; R];
            for i in 0..rows.steps / 2 {
                let step = group * rows.steps + 2 * i;
                let data = rows.bytes.add(step).cast::<u8>().add(first * 4 * LANES);
                let (w, x) = (eight::<BITS, 0, Q>(data), rows.x.add(4 * step));
                add_products::<PAIRS, R, Q>(&mut sums, w, x, rows.x_stride);
            }
            let row = |r: usize| {
                let at = r * rows.s_stride + group;
                (*rows.sx.add(at), *rows.sums.add(at), acc.add(r * TILE + first * LANES))
            };
            let scales = span.scales[group].as_ptr().add(first * LANES);
            each_row!(Y {
                let (sx, all, acc) = row(Y);
                let extra = vdupq_n_s32(offset * all);
                each_vector!(X {
                    let exact = vsubq_s32(sums_of::<PAIRS, R, Q>(&sums, Y, X), extra);
                    let product = vmulq_n_f32(vcvtq_f32_s32(exact), sx);
                    let (scale, place) = (vld1q_f32(scales.add(X * LANES)), acc.add(X * LANES));
                    vst1q_f32(place, vfmaq_f32(vld1q_f32(place), product, scale));
                });
            });
            if rows.has_min {
                let mins = span.mins[group].as_ptr().add(first * LANES);
                for (sx, all, acc) in (0..R).map(row) {
                    for lane in (0..Q * LANES).step_by(LANES) {
                        let (min, place) = (vld1q_f32(mins.add(lane)), acc.add(lane));
                        vst1q_f32(place, vfmaq_n_f32(vld1q_f32(place), min, all as f32 * sx));
                    }
                }
            }
        }
    }
}

/// See [`groups::OpenFn`].
///
/// # Safety
/// Safe for all arguments. The type is shared with kernels that need an instruction set.
pub unsafe fn open(
    opening: &Opening,
    packed: &[u8],
    cols: usize,
    codes: bool,
    span: &mut OpenSpan,
) {
    // SAFETY: the operations only need NEON.
    unsafe { groups::open::<Four>(opening, packed, cols, codes, span) }
}

/// Operations on vectors of 16 bytes.
struct Four;

impl Openers for Four {
    #[inline(always)]
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE] {
        let mut out = [0.0; TILE];
        for (half, out) in line.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: sixteen each.
            unsafe { Neon::load_f16(half.as_ptr().cast()).store(out.as_mut_ptr()) };
        }
        out
    }
    #[inline(always)]
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]) {
        // SAFETY: the caller upholds the contract, and all accesses are vectors of 16 bytes.
        unsafe {
            let levels = veorq_u8(vld1q_u8(levels.as_ptr().cast()), vdupq_n_u8(0x80));
            for four in bytes.as_chunks_mut::<LANES>().0 {
                let place = four.as_mut_ptr().cast();
                vst1q_u8(place, vqtbl1q_u8(levels, vld1q_u8(place)));
            }
        }
    }
}

/// Multiplies trellis codes by `R` rows; see [`trellis::tiles`].
///
/// # Safety
/// The machine has dotprod; otherwise as for [`one_row::ints`].
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn tiles<const CODE: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match R {
            1 => trellis::tiles::<Quad, CODE, R, 4, 1, 0>(panel, acc),
            2 => trellis::tiles::<Quad, CODE, R, 4, 1, 1>(panel, acc),
            _ => trellis::tiles::<Quad, CODE, R, 2, 1, 1>(panel, acc),
        }
    }
}

/// Multiplies float codes of `BITS` bits by `R` rows.
///
/// # Safety
/// As for [`one_row::ints`], on every ARM64 processor.
pub unsafe fn floats<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe { over_tile!(floats_in_vectors[BITS](panel, acc)) }
}

/// Computes `Q` vectors of the tile, starting at vector `first`.
///
/// # Safety
/// As for [`floats`].
#[inline(always)]
unsafe fn floats_in_vectors<const BITS: usize, const R: usize, const Q: usize>(
    panel: &Panel,
    acc: *mut f32,
    first: usize,
) {
    let step_bytes = if BITS == 16 { LINE } else { 2 * LINE };
    let place = |r: usize, q: usize| acc.wrapping_add(r * TILE + (first + q) * LANES);
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut y: [[_; Q]; R] = from_fn(|r| from_fn(|q| vld1q_f32(place(r, q))));
        for step in 0..panel.steps {
            if first == 0 && (step * step_bytes).is_multiple_of(2 * LINE) {
                panel.fetch(step * step_bytes, 2 * LINE);
            }
            let data = panel.data.add(step * step_bytes);
            let w: [_; Q] = from_fn(|q| match (BITS, first + q) {
                (16, vector) => {
                    let both = vld1q_u32(data.add(vector % 4 * LINE / 4).cast());
                    vreinterpretq_f32_u32(match vector {
                        ..4 => vshlq_n_u32::<16>(both),
                        _ => vandq_u32(both, vdupq_n_u32(0xffff_0000)),
                    })
                }
                (_, vector) => vld1q_f32(data.add(vector * 4 * LANES).cast()),
            });
            for (r, y) in y.iter_mut().enumerate() {
                let x = *panel.x.add(r * panel.x_stride).cast::<f32>().add(step);
                for (y, w) in y.iter_mut().zip(w) {
                    *y = vfmaq_n_f32(*y, w, x);
                }
            }
        }
        for (r, y) in y.iter().enumerate() {
            for (q, y) in y.iter().enumerate() {
                vst1q_f32(place(r, q), *y);
            }
        }
    }
}

/// See [`super::panel::FinishFn`].
///
/// # Safety
/// As for [`scalar::finish`].
pub unsafe fn finish(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { scalar::finish_rows::<Four>(scales, unit, offset, sx, sums, acc) }
}

/// [`finish`] for formats with minima; see [`scalar::finish_with_min`].
///
/// # Safety
/// As for [`finish`], with two lines.
pub unsafe fn finish_with_min(
    scales: *const u8,
    _unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { scalar::finish_rows_with_min::<Four>(scales, offset, sx, sums, acc) }
}
