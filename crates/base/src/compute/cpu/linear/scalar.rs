//! Kernels in plain Rust. They run on machines without a supported instruction set, and are the
//! simplest code that reads the packed layout.

use super::groups::{self, OpenSpan, Openers, Opening, SpanRows};
use super::pack::code_of;
use super::panel::Panel;
use super::tile::{LINE, TILE};
use super::trellis;
use crate::tensor::math;
use half::f16;

/// The raw sums are sums of q itself.
pub const OFFSETS: [i32; 3] = [0; 3];

/// Multiplies integer codes of `BITS` bits by `R` rows; see [`super::panel::PanelFn`].
///
/// # Safety
/// The panel and `acc` are as [`super::panel::Panel`] and [`super::panel::PanelFn`] say.
pub unsafe fn ints<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    let step_cols = 32 / BITS;
    for r in 0..R {
        // SAFETY: `acc` has R rows, and no other code accesses this row.
        let acc = unsafe { &mut *acc.add(r * TILE).cast::<[i32; TILE]>() };
        for step in 0..panel.steps {
            // SAFETY: the panel has `steps` steps of activations and weights.
            let (x, dwords) = unsafe {
                let x = panel.x.add(r * panel.x_stride + step * step_cols);
                (
                    std::slice::from_raw_parts(x.cast::<i8>(), step_cols),
                    &*panel.data.add(step * 2 * LINE).cast::<[[u8; 4]; TILE]>(),
                )
            };
            for (sum, dword) in acc.iter_mut().zip(dwords) {
                for (k, x) in x.iter().enumerate() {
                    *sum = sum.wrapping_add(code_of(BITS as u32, *dword, k) * *x as i32);
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
    // SAFETY: the operations need no instruction set.
    unsafe { groups::open::<Plain>(opening, packed, cols, codes, span) }
}

/// Operations for any processor.
struct Plain;

impl Openers for Plain {
    #[inline(always)]
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE] {
        line.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]) {
        let level = |index: u8| (levels[index as usize & 15] as u8) ^ 0x80;
        bytes.iter_mut().for_each(|d| *d = u32::from_le_bytes(d.to_le_bytes().map(level)));
    }
}

/// Multiplies a span by `R` rows; see [`groups::GroupsFn`].
///
/// # Safety
/// The rows are as [`groups::SpanRows`] says; `acc` has `R` rows.
pub unsafe fn multiply<const R: usize>(span: &OpenSpan, rows: &SpanRows, acc: *mut f32) {
    for group in 0..rows.groups {
        for r in 0..R {
            // SAFETY: the group has these bytes, and the row these columns, this scale and this
            // sum. No other code accesses this row of `acc`.
            let (steps, x, sx, all, acc) = unsafe {
                let steps = rows.bytes.add(group * rows.steps);
                let x = rows.x.add(r * rows.x_stride + group * rows.steps * 4);
                (
                    std::slice::from_raw_parts(steps, rows.steps),
                    std::slice::from_raw_parts(x, rows.steps * 4),
                    *rows.sx.add(r * rows.s_stride + group),
                    *rows.sums.add(r * rows.s_stride + group),
                    &mut *acc.add(r * TILE).cast::<[f32; TILE]>(),
                )
            };
            for (lane, y) in acc.iter_mut().enumerate() {
                let mut sum = -rows.offset * all;
                for (step, x) in steps.iter().zip(x.as_chunks::<4>().0) {
                    let bytes = step[lane].to_le_bytes();
                    sum += bytes.iter().zip(x).map(|(q, x)| *q as i32 * *x as i32).sum::<i32>();
                }
                *y = (sum as f32 * sx).mul_add(span.scales[group][lane], *y);
                if rows.has_min {
                    *y = (all as f32 * sx).mul_add(span.mins[group][lane], *y);
                }
            }
        }
    }
}

/// Multiplies trellis codes by `R` rows; see [`trellis::tiles`].
///
/// # Safety
/// As for [`ints`].
pub unsafe fn tiles<const CODE: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe { trellis::tiles::<[u32; 16], CODE, R, 1, 1, 1>(panel, acc) }
}

/// Multiplies float codes of `BITS` bits by `R` rows.
///
/// # Safety
/// As for [`ints`].
pub unsafe fn floats<const BITS: usize, const R: usize>(panel: &Panel, acc: *mut f32) {
    let step_bytes = if BITS == 16 { LINE } else { 2 * LINE };
    for step in 0..panel.steps {
        let mut w = [0f32; TILE];
        for (lane, w) in w.iter_mut().enumerate() {
            // SAFETY: inside the step.
            let dword = unsafe {
                panel
                    .data
                    .add(step * step_bytes + if BITS == 16 { lane % 16 } else { lane } * 4)
                    .cast::<u32>()
                    .read()
            };
            *w = f32::from_bits(match (BITS, lane < 16) {
                (16, true) => dword << 16,
                (16, false) => dword & 0xffff_0000,
                _ => dword,
            });
        }
        for r in 0..R {
            // SAFETY: R rows of activations and of sums.
            let (x, acc) = unsafe {
                let x = panel.x.add(r * panel.x_stride).cast::<f32>().add(step).read();
                (x, &mut *acc.add(r * TILE).cast::<[f32; TILE]>())
            };
            for (y, w) in acc.iter_mut().zip(w) {
                *y = w.mul_add(x, *y);
            }
        }
    }
}

/// See [`super::panel::FinishFn`].
///
/// # Safety
/// `scales` is a line; `acc` has a row for each of `sx`.
pub unsafe fn finish(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract, and no instruction set is needed.
    unsafe { finish_rows::<Plain>(scales, unit, offset, sx, sums, acc) }
}

/// [`finish`] with the operations of an instruction set.
///
/// # Safety
/// As for [`finish`]. The machine has the instructions of `O`.
#[inline(always)]
pub unsafe fn finish_rows<O: Openers>(
    scales: *const u8,
    unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the line has 32 scales, and no other code accesses `acc` during this call.
    let (scales, acc) = unsafe {
        (
            O::floats(&*scales.cast()),
            std::slice::from_raw_parts_mut(acc.cast::<[f32; TILE]>(), sx.len()),
        )
    };
    let scales = scales.map(|scale| scale * unit);
    for ((acc, sx), sum) in acc.iter_mut().zip(sx).zip(sums) {
        for (y, scale) in acc.iter_mut().zip(scales) {
            let exact = (y.to_bits() as i32).wrapping_sub(offset.wrapping_mul(*sum));
            *y = (exact as f32 * sx) * scale;
        }
    }
}

/// [`finish`] for blocks with minima, which are in a line after the scales.
///
/// # Safety
/// As for [`finish`], with two lines.
#[inline(always)]
pub unsafe fn finish_with_min(
    scales: *const u8,
    _unit: f32,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: the caller upholds the contract, and no instruction set is needed.
    unsafe { finish_rows_with_min::<Plain>(scales, offset, sx, sums, acc) }
}

/// [`finish_with_min`] with the operations of an instruction set.
///
/// # Safety
/// As for [`finish_with_min`]. The machine has the instructions of `O`.
#[inline(always)]
pub unsafe fn finish_rows_with_min<O: Openers>(
    scales: *const u8,
    offset: i32,
    sx: &[f32],
    sums: &[i32],
    acc: *mut f32,
) {
    // SAFETY: there are 32 scales and 32 minima, and no other code accesses `acc` during this call.
    let ([scales, mins], acc) = unsafe {
        (
            [0, 1].map(|line| O::floats(&*scales.add(line * LINE).cast())),
            std::slice::from_raw_parts_mut(acc.cast::<[f32; TILE]>(), sx.len()),
        )
    };
    for ((acc, sx), sum) in acc.iter_mut().zip(sx).zip(sums) {
        let all = *sum as f32 * sx;
        for ((y, scale), min) in acc.iter_mut().zip(scales).zip(mins) {
            let exact = (y.to_bits() as i32).wrapping_sub(offset.wrapping_mul(*sum));
            *y = all.mul_add(min, (exact as f32 * sx) * scale);
        }
    }
}

/// See [`super::panel::GateFn`].
///
/// # Safety
/// Safe for all arguments. The type is shared with kernels that need an instruction set.
pub unsafe fn gate(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]) {
    gate_rows(gate, up);
}

/// Computes [`gate`] for all rows. It is compiled for each instruction set.
#[inline(always)]
pub fn gate_rows(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = math::gelu_tanh(*g) * u;
        }
    }
}
