//! Integer codes in vectors of 32 bytes, written once for AVX2 and AVX-VNNI.
//!
//! A tile is four vectors of 8 outputs, its quarters. Codes with a scale for each row are unpacked
//! in registers, and so are codes with a scale for each group at few rows. At more rows the latter
//! come from an opened span, whose bytes are read again for every four rows.
//!
//! No loop of these kernels holds a closure: the compiler does not inline intrinsics into one.

use super::groups::{OpenSpan, SpanRows, split};
use super::panel::{FRACTION, Panel, fetch};
use super::tile::{LINE, TILE};
use std::arch::x86_64::*;

/// Outputs of a vector, and vectors of a tile.
pub const LANES: usize = 8;
pub const QUARTERS: usize = TILE / LANES;

/// Bytes of a step: four columns of each output.
const STEP: usize = 2 * LINE;
/// Steps of the widest run that is unrolled.
const CHUNK: usize = 8;

/// How an instruction set multiplies unsigned bytes of weights, at most `LARGEST`, with signed ones
/// of activations, in -127..=127. Implementations are zero-cost only inside a function compiled for
/// their instruction set.
pub trait Dot {
    /// Whether bytes of weights are taken with a sign, less 128.
    fn takes_sign(largest: usize) -> bool;
    /// Steps whose products a sum holds before it is widened to 32 bits: as many as cannot
    /// overflow.
    fn steps(largest: usize) -> usize;
    /// Adds the products of a step.
    /// # Safety
    /// The machine has the instructions.
    unsafe fn add<const LARGEST: usize>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i;
    /// # Safety
    /// The machine has the instructions.
    unsafe fn widen(sum: __m256i) -> __m256i;
}

/// `vpmaddubsw` adds pairs of products in 16 bits and would saturate. It never does: see
/// [`Dot::steps`], and signed weights are at most 128 with an activation that takes their sign.
pub struct Pairs;

impl Dot for Pairs {
    #[inline(always)]
    fn takes_sign(largest: usize) -> bool {
        largest > 127
    }
    #[inline(always)]
    fn steps(largest: usize) -> usize {
        if largest > 127 { 1 } else { i16::MAX as usize / (2 * largest * 127) }
    }
    #[inline(always)]
    unsafe fn add<const LARGEST: usize>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let products = match LARGEST {
                ..=127 => _mm256_maddubs_epi16(w, x),
                _ => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
            };
            _mm256_add_epi16(sum, products)
        }
    }
    #[inline(always)]
    unsafe fn widen(sum: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) }
    }
}

/// `vpdpbusd` adds four products in 32 bits.
pub struct Vnni;

impl Dot for Vnni {
    #[inline(always)]
    fn takes_sign(_largest: usize) -> bool {
        false
    }
    #[inline(always)]
    fn steps(_largest: usize) -> usize {
        usize::MAX
    }
    #[inline(always)]
    unsafe fn add<const LARGEST: usize>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_dpbusd_avx_epi32(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn widen(sum: __m256i) -> __m256i {
        sum
    }
}

/// The bytes of four columns of an activation, in each lane.
#[inline(always)]
unsafe fn spread(x: *const u8) -> __m256i {
    // SAFETY: the caller has four bytes.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// Steps of weights, four columns each.
trait Steps {
    /// Whether the number of steps may be a variable. A constant lets the compiler unroll the loop,
    /// and then sums of many rows leave the registers.
    const ROLLED: bool;
    /// Adds the products of a run of steps with the rows of `x` to sums of 32 bits.
    ///
    /// `Q` quarters from `first` are computed. `steps` holds the first step and their number. A run
    /// is at most [`CHUNK`] long and crosses no chunk.
    ///
    /// # Safety
    /// The machine has the instructions of `D`. There are these steps, and rows of as many
    /// activations, `x_stride` bytes apart.
    unsafe fn add<D: Dot, const LARGEST: usize, const R: usize, const Q: usize>(
        &self,
        steps: (usize, usize),
        first: usize,
        x: *const u8,
        x_stride: usize,
        sums: &mut [[__m256i; Q]; R],
    );
}

/// Weights as the products take them.
#[inline(always)]
unsafe fn signed<D: Dot, const LARGEST: usize>(w: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { if D::takes_sign(LARGEST) { _mm256_xor_si256(w, _mm256_set1_epi8(-128)) } else { w } }
}

#[inline(always)]
unsafe fn widen<D: Dot, const R: usize, const Q: usize>(
    narrow: &[[__m256i; Q]; R],
    sums: &mut [[__m256i; Q]; R],
) {
    for r in 0..R {
        for q in 0..Q {
            // SAFETY: the caller's promise.
            unsafe { sums[r][q] = _mm256_add_epi32(sums[r][q], D::widen(narrow[r][q])) };
        }
    }
}

/// An opened span.
struct Opened(*const u8);

impl Steps for Opened {
    const ROLLED: bool = true;
    #[inline(always)]
    unsafe fn add<D: Dot, const LARGEST: usize, const R: usize, const Q: usize>(
        &self,
        (from, n): (usize, usize),
        first: usize,
        x: *const u8,
        x_stride: usize,
        sums: &mut [[__m256i; Q]; R],
    ) {
        let data = self.0.wrapping_add(from * STEP + first * 32);
        // SAFETY: the caller's promises.
        unsafe {
            let run = D::steps(LARGEST);
            if run >= CHUNK {
                let mut narrow = [[_mm256_setzero_si256(); Q]; R];
                for step in 0..n {
                    let mut w = [_mm256_setzero_si256(); Q];
                    for q in 0..Q {
                        w[q] = signed::<D, LARGEST>(_mm256_load_si256(
                            data.add(step * STEP + q * 32).cast(),
                        ));
                    }
                    for r in 0..R {
                        let x = spread(x.add(r * x_stride + 4 * step));
                        for q in 0..Q {
                            narrow[r][q] = D::add::<LARGEST>(narrow[r][q], w[q], x);
                        }
                    }
                }
                return widen::<D, R, Q>(&narrow, sums);
            }
            // The weights of a run stay in registers for all rows, whose narrow sums are short.
            for start in (0..n).step_by(run) {
                let mut w = [[_mm256_setzero_si256(); Q]; CHUNK / 2];
                for step in 0..run {
                    for q in 0..Q {
                        let place = data.add((start + step) * STEP + q * 32);
                        w[step][q] = signed::<D, LARGEST>(_mm256_load_si256(place.cast()));
                    }
                }
                for r in 0..R {
                    let mut narrow = [_mm256_setzero_si256(); Q];
                    for step in 0..run {
                        let x = spread(x.add(r * x_stride + 4 * (start + step)));
                        for q in 0..Q {
                            narrow[q] = D::add::<LARGEST>(narrow[q], w[step][q], x);
                        }
                    }
                    for q in 0..Q {
                        sums[r][q] = _mm256_add_epi32(sums[r][q], D::widen(narrow[q]));
                    }
                }
            }
        }
    }
}

/// Packed codes of `BITS` bits. With `TWICE` codes of 2 bits are doubled, since they lie between
/// whole numbers.
struct Planes<const BITS: usize, const TWICE: bool> {
    low: *const u8,
    high: *const u8,
}

/// The bits of step `K` of a chunk in a plane of `BITS` bits.
#[inline(always)]
unsafe fn part<const BITS: usize, const K: usize>(plane: *const u8) -> __m256i {
    // SAFETY: the caller has a plane's chunk.
    unsafe {
        let word = _mm256_load_si256(plane.add(K * BITS / 8 * STEP).cast());
        let mask = _mm256_set1_epi8(((1u32 << BITS) - 1) as i8);
        match K * BITS % 8 {
            0 => _mm256_and_si256(word, mask),
            1 => _mm256_and_si256(_mm256_srli_epi16::<1>(word), mask),
            2 => _mm256_and_si256(_mm256_srli_epi16::<2>(word), mask),
            3 => _mm256_and_si256(_mm256_srli_epi16::<3>(word), mask),
            4 => _mm256_and_si256(_mm256_srli_epi16::<4>(word), mask),
            5 => _mm256_and_si256(_mm256_srli_epi16::<5>(word), mask),
            6 => _mm256_and_si256(_mm256_srli_epi16::<6>(word), mask),
            _ => _mm256_and_si256(_mm256_srli_epi16::<7>(word), mask),
        }
    }
}

impl<const BITS: usize, const TWICE: bool> Planes<BITS, TWICE> {
    /// Steps after which the places of bits in the planes come again.
    const PERIOD: usize = match BITS {
        8 => 1,
        4 => 2,
        2 | 6 => 4,
        _ => 8,
    };

    /// The bytes of step `base` + `K`; `base` is a multiple of the period.
    #[inline(always)]
    unsafe fn get<const K: usize>(&self, base: usize, lane: usize) -> __m256i {
        // SAFETY: the caller has this step.
        unsafe {
            macro_rules! at {
                ($plane:ident, $bits:literal) => {
                    part::<$bits, K>(self.$plane.add(base * $bits / 8 * STEP + lane))
                };
            }
            let w = match BITS {
                2 => at!(low, 2),
                3 => _mm256_or_si256(at!(low, 2), _mm256_slli_epi16::<2>(at!(high, 1))),
                4 => at!(low, 4),
                5 => _mm256_or_si256(at!(low, 4), _mm256_slli_epi16::<4>(at!(high, 1))),
                6 => _mm256_or_si256(at!(low, 4), _mm256_slli_epi16::<4>(at!(high, 2))),
                _ => at!(low, 8),
            };
            if TWICE && BITS == 2 { _mm256_add_epi8(w, w) } else { w }
        }
    }
}

impl<const BITS: usize, const TWICE: bool> Steps for Planes<BITS, TWICE> {
    const ROLLED: bool = Self::PERIOD < CHUNK;

    #[inline(always)]
    unsafe fn add<D: Dot, const LARGEST: usize, const R: usize, const Q: usize>(
        &self,
        (from, n): (usize, usize),
        first: usize,
        x: *const u8,
        x_stride: usize,
        sums: &mut [[__m256i; Q]; R],
    ) {
        let run = D::steps(LARGEST).min(CHUNK);
        // Half a period where a group has four steps.
        let start = from % Self::PERIOD;
        let end = if Self::PERIOD < CHUNK { Self::PERIOD } else { start + n };
        let lane = first * 32;
        // SAFETY: the caller's promises.
        unsafe {
            let mut narrow = [[_mm256_setzero_si256(); Q]; R];
            let mut base = from - start;
            while base < from + n {
                unrolled!(K in [0 1 2 3 4 5 6 7] {
                    if (start..end).contains(&K) {
                        let mut w = [_mm256_setzero_si256(); Q];
                        for q in 0..Q {
                            w[q] = signed::<D, LARGEST>(self.get::<K>(base, lane + q * 32));
                        }
                        for r in 0..R {
                            let x = spread(x.add(r * x_stride + 4 * (base + K - from)));
                            for q in 0..Q {
                                narrow[r][q] = D::add::<LARGEST>(narrow[r][q], w[q], x);
                            }
                        }
                        if run < CHUNK && (K + 1).is_multiple_of(run) {
                            widen::<D, R, Q>(&narrow, sums);
                            narrow = [[_mm256_setzero_si256(); Q]; R];
                        }
                    }
                });
                base += Self::PERIOD;
            }
            if run >= CHUNK {
                widen::<D, R, Q>(&narrow, sums);
            }
        }
    }
}

/// Adds the exact sums of a group, times both scales, to the outputs.
#[inline(always)]
unsafe fn end<D: Dot, const LARGEST: usize, const R: usize, const Q: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    (group, row, first): (usize, usize, usize),
    sums: &[[__m256i; Q]; R],
    acc: *mut f32,
) {
    let offset = if D::takes_sign(LARGEST) { rows.offset - 128 } else { rows.offset };
    // SAFETY: every row has a scale and a sum for this group. `acc` has R rows of a tile's outputs,
    // and so have a group's lines.
    unsafe {
        for r in 0..R {
            let at = (row + r) * rows.s_stride + group;
            let (sx, all) = (*rows.sx.add(at), *rows.sums.add(at));
            let (scale_x, extra) = (_mm256_set1_ps(sx), _mm256_set1_epi32(offset * all));
            let all = _mm256_set1_ps(all as f32 * sx);
            for q in 0..Q {
                let lane = (first + q) * LANES;
                let place = acc.add(r * TILE + lane);
                let exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[r][q], extra));
                let product = _mm256_mul_ps(exact, scale_x);
                let scale = _mm256_load_ps(span.scales.as_ptr().add(group).cast::<f32>().add(lane));
                let mut y = _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(place));
                if rows.has_min {
                    let min = _mm256_load_ps(span.mins.as_ptr().add(group).cast::<f32>().add(lane));
                    y = _mm256_fmadd_ps(all, min, y);
                }
                _mm256_storeu_ps(place, y);
            }
        }
    }
}

/// `R` rows from row `row` with `Q` quarters from `first`. Groups have `STEPS` steps, or where that
/// is 0 a multiple of [`CHUNK`].
#[inline(always)]
unsafe fn block<
    D: Dot,
    S: Steps,
    const LARGEST: usize,
    const STEPS: usize,
    const R: usize,
    const Q: usize,
>(
    steps: &S,
    span: &OpenSpan,
    rows: &SpanRows,
    (row, first): (usize, usize),
    (part, halvings): (usize, u32),
    acc: *mut f32,
) {
    let x = rows.x.wrapping_add(row * rows.x_stride).cast::<u8>();
    let acc = acc.wrapping_add(row * TILE);
    // SAFETY: the caller's promises.
    unsafe {
        macro_rules! group {
            ($group:expr, $from:expr) => {{
                let (group, from) = ($group, $from);
                rows.fetch(part * rows.groups + group, halvings);
                let mut sums = [[_mm256_setzero_si256(); Q]; R];
                let n = if S::ROLLED { rows.steps } else { STEPS };
                if STEPS > 0 {
                    let x = x.add(from * 4);
                    steps.add::<D, LARGEST, R, Q>((from, n), first, x, rows.x_stride, &mut sums);
                } else {
                    for from in (from..from + rows.steps).step_by(CHUNK) {
                        let (range, x) = ((from, CHUNK), x.add(from * 4));
                        steps.add::<D, LARGEST, R, Q>(range, first, x, rows.x_stride, &mut sums);
                    }
                }
                end::<D, LARGEST, R, Q>(span, rows, (group, row, first), &sums, acc);
            }};
        }
        if STEPS == 4 {
            for chunk in 0..rows.groups / 2 {
                group!(2 * chunk, chunk * CHUNK);
                group!(2 * chunk + 1, chunk * CHUNK + 4);
            }
        } else {
            for group in 0..rows.groups {
                group!(group, group * rows.steps);
            }
        }
    }
}

/// Calls a kernel for `R` rows and all quarters, in blocks whose sums stay in registers.
///
/// A call has the rows and quarters of its block, the first of each, and the number of the block.
/// The last argument is how often the blocks halve what each of them fetches.
macro_rules! over_rows {
    ($r:ident, $block:ident) => {
        match $r {
            1 => $block!(1, 4, 0, 0, (0, 0)),
            2 => $block!(2, 4, 0, 0, (0, 0)),
            3 => over_rows!(halves $block 3, 0, 0, 1),
            4 => over_rows!(halves $block 4, 0, 0, 1),
            5 => {
                over_rows!(halves $block 3, 0, 0, 2);
                over_rows!(halves $block 2, 3, 2, 2);
            }
            6 => {
                over_rows!(halves $block 3, 0, 0, 2);
                over_rows!(halves $block 3, 3, 2, 2);
            }
            7 => {
                over_rows!(halves $block 4, 0, 0, 2);
                over_rows!(halves $block 3, 4, 2, 2);
            }
            _ => {
                over_rows!(halves $block 4, 0, 0, 2);
                over_rows!(halves $block 4, 4, 2, 2);
            }
        }
    };
    (halves $block:ident $rows:literal, $row:literal, $part:literal, $halvings:literal) => {
        for half in 0..2 {
            $block!($rows, 2, $row, 2 * half, ($part + half, $halvings));
        }
    };
}

/// All rows and quarters.
#[inline(always)]
unsafe fn blocks<D: Dot, S: Steps, const LARGEST: usize, const STEPS: usize, const R: usize>(
    steps: &S,
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
) {
    macro_rules! block {
        ($rows:literal, $quarters:literal, $row:expr, $first:expr, $part:expr) => {
            // SAFETY: the caller's promises.
            unsafe {
                let at = ($row, $first);
                block::<D, S, LARGEST, STEPS, $rows, $quarters>(steps, span, rows, at, $part, acc)
            }
        };
    }
    over_rows!(R, block);
}

/// A span with `R` rows; see [`super::groups::GroupsFn`]. `LARGEST` is the largest byte of the
/// span, `STEPS` as in [`block`].
///
/// # Safety
/// The machine has the instructions of `D`; the rows are as [`SpanRows`] says; `acc` has `R` rows.
#[inline(always)]
pub unsafe fn multiply<D: Dot, const LARGEST: usize, const STEPS: usize, const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
) {
    let steps = Opened(rows.bytes.cast());
    // SAFETY: the caller's promises.
    unsafe { blocks::<D, _, LARGEST, STEPS, R>(&steps, span, rows, acc) }
}

/// The same where [`SpanRows::bytes`] are the packed codes, of `BITS` bits and `cols` columns.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
pub unsafe fn multiply_packed<D: Dot, const BITS: usize, const STEPS: usize, const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
) {
    let low: *const u8 = rows.bytes.cast();
    let cols = rows.groups * rows.steps * 4;
    let high = low.wrapping_add(cols * split(BITS as u32).0 as usize * TILE / 8);
    let steps = Planes::<BITS, false> { low, high };
    // SAFETY: the caller's promises.
    unsafe {
        match BITS {
            2..=4 => blocks::<D, _, 15, STEPS, R>(&steps, span, rows, acc),
            5 => blocks::<D, _, 31, STEPS, R>(&steps, span, rows, acc),
            _ => blocks::<D, _, 63, STEPS, R>(&steps, span, rows, acc),
        }
    }
}

/// Integer codes of `BITS` bits with `R` rows; see [`super::panel::PanelFn`].
///
/// # Safety
/// The machine has the instructions of `D`; the panel and `acc` are as [`Panel`] and
/// [`super::panel::PanelFn`] say.
#[inline(always)]
pub unsafe fn ints<D: Dot, const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    macro_rules! block {
        ($rows:literal, $quarters:literal, $row:expr, $first:expr, $part:expr) => {
            // SAFETY: the caller's promises.
            unsafe { ints_block::<D, BITS, $rows, $quarters>(panel, ($row, $first), $part, acc) }
        };
    }
    over_rows!(R, block);
}

/// `R` rows from row `row` with `Q` quarters from `first`.
#[inline(always)]
unsafe fn ints_block<D: Dot, const BITS: usize, const R: usize, const Q: usize>(
    panel: &Panel,
    (row, first): (usize, usize),
    (part, halvings): (usize, u32),
    acc: *mut f32,
) {
    let place = |r: usize, q: usize| {
        acc.wrapping_add((row + r) * TILE + (first + q) * LANES).cast::<__m256i>()
    };
    let x = panel.x.wrapping_add(row * panel.x_stride);
    let planes = Planes::<BITS, true> { low: panel.data, high: panel.data };
    let dwords = panel.steps * 8 / BITS;
    let chunks = dwords / CHUNK;
    let ahead = ((panel.steps * STEP) >> panel.ahead_shift) / LINE;
    let rate = ahead * FRACTION / chunks.max(1);
    // SAFETY: the caller's promises.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); Q]; R];
        macro_rules! add {
            ($from:expr, $n:expr) => {{
                let (place, x, stride) = (($from, $n), x.add($from * 4), panel.x_stride);
                match BITS {
                    8 => planes.add::<D, 255, R, Q>(place, first, x, stride, &mut sums),
                    4 => planes.add::<D, 15, R, Q>(place, first, x, stride, &mut sums),
                    _ => planes.add::<D, 6, R, Q>(place, first, x, stride, &mut sums),
                }
            }};
        }
        for chunk in 0..chunks {
            fetch(panel.ahead, rate, part * chunks + chunk, halvings);
            add!(chunk * CHUNK, CHUNK);
        }
        for step in (chunks * CHUNK..dwords).step_by(8 / BITS) {
            add!(step, 8 / BITS);
        }
        for r in 0..R {
            for q in 0..Q {
                let all = _mm256_add_epi32(_mm256_loadu_si256(place(r, q)), sums[r][q]);
                _mm256_storeu_si256(place(r, q), all);
            }
        }
    }
}
