//! Kernels in AVX-512 with VNNI: `vpdpbusd` multiplies 16 outputs by 4 columns at once.
//!
//! Weights stay unsigned (q + offset), because the instruction needs one unsigned operand. The
//! offset is subtracted again by means of the sums of the activations, which are known in advance.
//! The activations of a row are 4-byte broadcasts for both halves of the tile.

use super::groups::{self, OpenSpan, Openers, Opening, SpanRows, split};
use super::panel::Panel;
use super::tile::{LINE, TILE};
use super::words_x86::Zmm;
use super::{scalar, trellis};
use std::arch::x86_64::*;

/// The raw sums are sums of q + 128, q + 8, and 2 c = q + 3.
pub const OFFSETS: [i32; 3] = [128, 8, 3];

/// Returns columns 4 `part` to 4 `part` + 3 of a step's dwords as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn unpack<const BITS: usize>(w: __m512i, part: usize) -> __m512i {
    match (BITS, part) {
        (8, _) => w,
        (4, 0) => _mm512_and_si512(w, _mm512_set1_epi8(15)),
        (4, _) => _mm512_and_si512(_mm512_srli_epi16::<4>(w), _mm512_set1_epi8(15)),
        // Twice the code, because it is shifted down by one bit less.
        (_, 0) => _mm512_and_si512(_mm512_slli_epi16::<1>(w), _mm512_set1_epi8(6)),
        (_, 1) => _mm512_and_si512(_mm512_srli_epi16::<1>(w), _mm512_set1_epi8(6)),
        (_, 2) => _mm512_and_si512(_mm512_srli_epi16::<3>(w), _mm512_set1_epi8(6)),
        _ => _mm512_and_si512(_mm512_srli_epi16::<5>(w), _mm512_set1_epi8(6)),
    }
}

/// Multiplies integer codes of `BITS` bits by `R` rows; see [`super::panel::PanelFn`].
///
/// # Safety
/// The machine has the instructions; the panel and `acc` are as [`super::panel::Panel`] and
/// [`super::panel::PanelFn`] say.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn ints<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // `vpdpbusd` takes 5 cycles, and two start per cycle. With few rows, a single sum per output
    // would therefore wait for itself.
    match R {
        // SAFETY: the caller upholds the contract.
        1 => unsafe { ints_in_sets::<BITS, R, 4>(panel, acc) },
        // SAFETY: the caller upholds the contract.
        2..=4 => unsafe { ints_in_sets::<BITS, R, 2>(panel, acc) },
        // SAFETY: the caller upholds the contract.
        _ => unsafe { ints_in_sets::<BITS, R, 1>(panel, acc) },
    }
}

/// [`ints`] with the parts of successive steps in `SETS` independent sums per output.
///
/// # Safety
/// As for [`ints`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn ints_in_sets<const BITS: usize, const R: usize, const SETS: usize>(
    panel: &Panel,
    acc: *mut f32,
) {
    let parts = 8 / BITS;
    let step_cols = 4 * parts;
    let mut data = panel.data;
    let mut x = panel.x;
    let mut sums = [[[_mm512_setzero_si512(); 2]; R]; SETS];
    let step = |data: *const u8,
                x: *const u8,
                first: usize,
                sums: &mut [[[__m512i; 2]; R]; SETS]| {
        panel.fetch(data as usize - panel.data as usize, 2 * LINE);
        // SAFETY: the panel has this step.
        let w =
            unsafe { [_mm512_load_si512(data.cast()), _mm512_load_si512(data.add(LINE).cast())] };
        for part in 0..parts {
            let w = [unpack::<BITS>(w[0], part), unpack::<BITS>(w[1], part)];
            for (r, sum) in sums[(first + part) % SETS].iter_mut().enumerate() {
                // SAFETY: every row has the columns of this step.
                let x =
                    unsafe { x.add(r * panel.x_stride + 4 * part).cast::<i32>().read_unaligned() };
                let x = _mm512_set1_epi32(x);
                *sum = [_mm512_dpbusd_epi32(sum[0], w[0], x), _mm512_dpbusd_epi32(sum[1], w[1], x)];
            }
        }
    };
    let unroll = (SETS / parts).max(1);
    let mut left = panel.steps;
    while left >= unroll {
        for u in 0..unroll {
            step(
                data.wrapping_add(u * 2 * LINE),
                x.wrapping_add(u * step_cols),
                u * parts,
                &mut sums,
            );
        }
        data = data.wrapping_add(unroll * 2 * LINE);
        x = x.wrapping_add(unroll * step_cols);
        left -= unroll;
    }
    while left > 0 {
        step(data, x, 0, &mut sums);
        data = data.wrapping_add(2 * LINE);
        x = x.wrapping_add(step_cols);
        left -= 1;
    }
    for set in 1..SETS {
        for r in 0..R {
            for half in 0..2 {
                sums[0][r][half] = _mm512_add_epi32(sums[0][r][half], sums[set][r][half]);
            }
        }
    }
    for (r, sums) in sums[0].iter().enumerate() {
        for (half, sum) in sums.iter().enumerate() {
            // SAFETY: `acc` has R rows of two vectors.
            unsafe {
                let place = acc.add(r * TILE + half * 16).cast::<__m512i>();
                _mm512_storeu_si512(place, _mm512_add_epi32(_mm512_loadu_si512(place), *sum));
            }
        }
    }
}

/// See [`groups::OpenFn`].
///
/// # Safety
/// The machine has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
pub unsafe fn open(
    opening: &Opening,
    packed: &[u8],
    cols: usize,
    codes: bool,
    span: &mut OpenSpan,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { groups::open::<Wide>(opening, packed, cols, codes, span) }
}

/// Operations on vectors of 64 bytes.
struct Wide;

impl Openers for Wide {
    #[inline(always)]
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE] {
        let mut out = [0.0; TILE];
        // SAFETY: the caller upholds the contract, and a line has 32 f16.
        unsafe {
            for (half, scales) in line_of_scales(line.as_ptr().cast(), 1.0).iter().enumerate() {
                _mm512_storeu_ps(out.as_mut_ptr().add(half * 16), *scales);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]) {
        // SAFETY: the caller upholds the contract, and a line has two vectors.
        unsafe {
            let levels =
                _mm_xor_si128(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(-128));
            for half in 0..2 {
                let place = bytes.as_mut_ptr().add(half * 16).cast();
                let index = _mm512_loadu_si512(place);
                let level = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), index);
                _mm512_storeu_si512(place, level);
            }
        }
    }
}

/// Multiplies a span by `R` rows; see [`groups::GroupsFn`].
///
/// # Safety
/// The machine has the instructions; the rows are as [`groups::SpanRows`] says; `acc` has `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn multiply<const R: usize>(span: &OpenSpan, rows: &SpanRows, acc: *mut f32) {
    // SAFETY: `acc` has R rows of two vectors.
    let mut y = unsafe { load_rows::<R>(acc) };
    let mut data = rows.bytes.cast::<u8>();
    let mut x = rows.x;
    for group in 0..rows.groups {
        // SAFETY: every row has a sum for this group.
        let mut sums = unsafe { begin::<R>(rows, group) };
        for _ in 0..rows.steps {
            // SAFETY: the span has this step.
            let w = unsafe {
                [_mm512_load_si512(data.cast()), _mm512_load_si512(data.add(LINE).cast())]
            };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: every row has the columns of this step.
                let x = unsafe { x.add(r * rows.x_stride).cast::<i32>().read_unaligned() };
                let x = _mm512_set1_epi32(x);
                *sums =
                    [_mm512_dpbusd_epi32(sums[0], w[0], x), _mm512_dpbusd_epi32(sums[1], w[1], x)];
            }
            (data, x) = (data.wrapping_add(2 * LINE), x.wrapping_add(4));
        }
        // SAFETY: every row has a scale and a sum for this group.
        unsafe { end::<R>(span, rows, group, &sums, &mut y) };
    }
    // SAFETY: `acc` has R rows of two vectors.
    unsafe { store_rows::<R>(&y, acc) };
}

/// Returns the bits of step `K` of eight in a plane of `BITS` bits.
///
/// # Safety
/// The machine has the instructions; `plane` has eight steps.
#[inline(always)]
unsafe fn part<const BITS: usize, const K: usize>(plane: *const u8) -> [__m512i; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mask = _mm512_set1_epi8(((1u32 << BITS) - 1) as i8);
        let mut words = [mask; 2];
        for (half, word) in words.iter_mut().enumerate() {
            let place = plane.add((K * BITS / 8 * 2 + half) * LINE);
            let dwords = _mm512_load_si512(place.cast());
            let shifted = match K * BITS % 8 {
                0 => dwords,
                1 => _mm512_srli_epi16::<1>(dwords),
                2 => _mm512_srli_epi16::<2>(dwords),
                3 => _mm512_srli_epi16::<3>(dwords),
                4 => _mm512_srli_epi16::<4>(dwords),
                5 => _mm512_srli_epi16::<5>(dwords),
                6 => _mm512_srli_epi16::<6>(dwords),
                _ => _mm512_srli_epi16::<7>(dwords),
            };
            *word = _mm512_and_si512(shifted, *word);
        }
        words
    }
}

/// Returns the bytes of step `K` of eight. The planes of the codes begin at `low` and `high`.
///
/// # Safety
/// As for [`part`].
#[inline(always)]
unsafe fn step_bytes<const BITS: usize, const K: usize>(
    low: *const u8,
    high: *const u8,
) -> [__m512i; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match BITS {
            2 => part::<2, K>(low),
            3 => join::<2>(part::<2, K>(low), part::<1, K>(high)),
            4 => part::<4, K>(low),
            5 => join::<4>(part::<4, K>(low), part::<1, K>(high)),
            _ => join::<4>(part::<4, K>(low), part::<2, K>(high)),
        }
    }
}

/// Combines the lower and higher bits of codes.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn join<const LOW_BITS: u32>(low: [__m512i; 2], high: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        [
            _mm512_or_si512(low[0], _mm512_slli_epi16::<LOW_BITS>(high[0])),
            _mm512_or_si512(low[1], _mm512_slli_epi16::<LOW_BITS>(high[1])),
        ]
    }
}

/// [`multiply`] for packed codes of `BITS` bits in [`SpanRows::bytes`]. Groups have `STEPS` steps.
/// If `STEPS` is 0, they have a multiple of eight.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn multiply_packed<const BITS: usize, const STEPS: usize, const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    acc: *mut f32,
) {
    let (low_bits, high_bits) = const { split(BITS as u32) };
    let [low_chunk, high_chunk] = [low_bits, high_bits].map(|bits| bits as usize * 2 * LINE);
    let mut low = rows.bytes.cast::<u8>();
    let mut high = low.wrapping_add(rows.groups * rows.steps / 8 * low_chunk);
    let mut x = rows.x;
    let chunks = if STEPS > 0 { 1 } else { rows.steps / 8 };
    let mut group = 0;
    // SAFETY: the span has these steps and groups, and every row their activations; `acc` has R
    // rows.
    unsafe {
        let mut y = load_rows::<R>(acc);
        while group < rows.groups {
            let mut sums = begin::<R>(rows, group);
            for _ in 0..chunks {
                unrolled!(K in [0 1 2 3 4 5 6 7] {
                    if STEPS == 4 && K == 4 {
                        end::<R>(span, rows, group, &sums, &mut y);
                        group += 1;
                        sums = begin::<R>(rows, group);
                    }
                    let w = step_bytes::<BITS, K>(low, high);
                    for r in 0..R {
                        let x = x.add(r * rows.x_stride + 4 * K).cast::<i32>().read_unaligned();
                        let x = _mm512_set1_epi32(x);
                        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w[0], x);
                        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w[1], x);
                    }
                });
                (low, high) = (low.wrapping_add(low_chunk), high.wrapping_add(high_chunk));
                x = x.wrapping_add(32);
            }
            end::<R>(span, rows, group, &sums, &mut y);
            group += 1;
        }
        store_rows::<R>(&y, acc);
    }
}

/// Loads the current outputs.
///
/// # Safety
/// The machine has the instructions; `acc` has `R` rows of two vectors.
#[inline(always)]
unsafe fn load_rows<const R: usize>(acc: *const f32) -> [[__m512; 2]; R] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut y = [[_mm512_setzero_ps(); 2]; R];
        for r in 0..R {
            let row = acc.add(r * TILE);
            y[r] = [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))];
        }
        y
    }
}

/// # Safety
/// As for [`load_rows`].
#[inline(always)]
unsafe fn store_rows<const R: usize>(y: &[[__m512; 2]; R], acc: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        for r in 0..R {
            let row = acc.add(r * TILE);
            _mm512_storeu_ps(row, y[r][0]);
            _mm512_storeu_ps(row.add(16), y[r][1]);
        }
    }
}

/// Returns the initial sums of a group, which subtract the offset of its weights. Prefetches the
/// group's share of the next span.
///
/// # Safety
/// The machine has the instructions; every row has a sum for this group.
#[inline(always)]
unsafe fn begin<const R: usize>(rows: &SpanRows, group: usize) -> [[__m512i; 2]; R] {
    rows.fetch(group, 0);
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [[_mm512_setzero_si512(); 2]; R];
        for r in 0..R {
            let all = *rows.sums.add(r * rows.s_stride + group);
            sums[r] = [_mm512_set1_epi32(-rows.offset * all); 2];
        }
        sums
    }
}

/// Multiplies the exact sums of a group by both scales and adds them to the outputs.
///
/// # Safety
/// The machine has the instructions; every row has a scale and a sum for this group.
#[inline(always)]
unsafe fn end<const R: usize>(
    span: &OpenSpan,
    rows: &SpanRows,
    group: usize,
    sums: &[[__m512i; 2]; R],
    y: &mut [[__m512; 2]; R],
) {
    // SAFETY: the caller upholds the contract. A group's lines are two vectors, aligned to 64
    // bytes.
    unsafe {
        let scales = load_line(span.scales.as_ptr().add(group));
        for r in 0..R {
            let scale_x = _mm512_set1_ps(*rows.sx.add(r * rows.s_stride + group));
            for half in 0..2 {
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][half]), scale_x);
                y[r][half] = _mm512_fmadd_ps(product, scales[half], y[r][half]);
            }
        }
        if rows.has_min {
            let mins = load_line(span.mins.as_ptr().add(group));
            for r in 0..R {
                let at = r * rows.s_stride + group;
                let all = _mm512_set1_ps(*rows.sums.add(at) as f32 * *rows.sx.add(at));
                for half in 0..2 {
                    y[r][half] = _mm512_fmadd_ps(all, mins[half], y[r][half]);
                }
            }
        }
    }
}

/// # Safety
/// The machine has the instructions; the line can be read.
#[inline(always)]
unsafe fn load_line(line: *const [f32; TILE]) -> [__m512; 2] {
    let line = line.cast::<f32>();
    // SAFETY: the caller upholds the contract, and lines are aligned to 64 bytes.
    unsafe { [_mm512_load_ps(line), _mm512_load_ps(line.add(16))] }
}

/// Returns the 32 scales of a line, multiplied by the code's unit.
///
/// # Safety
/// `scales` is a line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn line_of_scales(scales: *const u8, unit: f32) -> [__m512; 2] {
    // SAFETY: the caller upholds the contract.
    let halves = unsafe {
        [_mm256_loadu_si256(scales.cast()), _mm256_loadu_si256(scales.add(LINE / 2).cast())]
    };
    halves.map(|half| _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(unit)))
}

/// Multiplies trellis codes by `R` rows; see [`trellis::tiles`].
///
/// # Safety
/// As for [`ints`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn tiles<const CODE: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        // The fastest form of each, chosen by measurement.
        match R {
            1 => trellis::tiles::<Zmm, CODE, R, 2, 2, 0>(panel, acc),
            2 => trellis::tiles::<Zmm, CODE, R, 2, 2, 1>(panel, acc),
            _ => trellis::tiles::<Zmm, CODE, R, 1, 1, 1>(panel, acc),
        }
    }
}

/// Multiplies float codes of `BITS` bits by `R` rows.
///
/// # Safety
/// As for [`ints`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn floats<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    let step_bytes = if BITS == 16 { LINE } else { 2 * LINE };
    let mut y = [[_mm512_setzero_ps(); 2]; R];
    for (r, y) in y.iter_mut().enumerate() {
        // SAFETY: `acc` has R rows of two vectors.
        *y = unsafe {
            [_mm512_loadu_ps(acc.add(r * TILE)), _mm512_loadu_ps(acc.add(r * TILE + 16))]
        };
    }
    for step in 0..panel.steps {
        if (step * step_bytes).is_multiple_of(2 * LINE) {
            panel.fetch(step * step_bytes, 2 * LINE);
        }
        let data = panel.data.wrapping_add(step * step_bytes);
        let w = if BITS == 16 {
            // SAFETY: the panel has this step.
            let both = unsafe { _mm512_load_si512(data.cast()) };
            let high = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(high)]
        } else {
            // SAFETY: the panel has this step.
            unsafe { [_mm512_load_ps(data.cast()), _mm512_load_ps(data.add(LINE).cast())] }
        };
        for (r, y) in y.iter_mut().enumerate() {
            // SAFETY: every row has this column.
            let x = _mm512_set1_ps(unsafe {
                panel.x.add(r * panel.x_stride).cast::<f32>().add(step).read()
            });
            *y = [_mm512_fmadd_ps(w[0], x, y[0]), _mm512_fmadd_ps(w[1], x, y[1])];
        }
    }
    for (r, y) in y.iter().enumerate() {
        // SAFETY: `acc` has R rows of two vectors.
        unsafe {
            _mm512_storeu_ps(acc.add(r * TILE), y[0]);
            _mm512_storeu_ps(acc.add(r * TILE + 16), y[1]);
        }
    }
}

/// See [`super::panel::FinishFn`].
///
/// # Safety
/// The machine has the instructions; `scales` is a line; `acc` has a row for each of `sx`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub unsafe fn finish(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    let scales = unsafe { line_of_scales(scales, unit) };
    for (r, (sx, sum)) in sx.iter().zip(sums).enumerate() {
        let (sx, extra) = (_mm512_set1_ps(*sx), _mm512_set1_epi32(offset.wrapping_mul(*sum)));
        for (half, scale) in scales.iter().enumerate() {
            // SAFETY: `acc` has this row.
            unsafe {
                let place = acc.add(r * TILE + half * 16);
                let exact = _mm512_sub_epi32(_mm512_loadu_si512(place.cast()), extra);
                _mm512_storeu_ps(
                    place,
                    _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(exact), sx), *scale),
                );
            }
        }
    }
}

/// [`finish`] for formats with minima; see [`scalar::finish_with_min`].
///
/// # Safety
/// As for [`finish`], with two lines.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
pub unsafe fn gate(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]) {
    scalar::gate_rows(gate, up);
}
