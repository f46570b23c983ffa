//! Signatures of the kernels. A kernel multiplies a part of a tile of weights by activations.

use super::tile::{LINE, TILE};
use crate::compute::cpu::simd::prefetch;

/// Input of a kernel: some steps of weights, and the activations by which they are multiplied.
pub struct Panel {
    pub data: *const u8,
    pub steps: usize,
    /// The first row's activations at the start of the panel, and bytes between rows.
    pub x: *const u8,
    pub x_stride: usize,
    /// Bytes to prefetch during the call: the panel's bytes `>> ahead_shift`, from this address on.
    pub ahead: *const u8,
    pub ahead_shift: u32,
}

impl Panel {
    /// Prefetches the share of the next panel that corresponds to `bytes` bytes at `offset`.
    #[inline(always)]
    pub fn fetch(&self, offset: usize, bytes: usize) {
        for line in (0..(bytes >> self.ahead_shift).max(1)).step_by(LINE) {
            prefetch(self.ahead.wrapping_add((offset >> self.ahead_shift) + line));
        }
    }
}

/// Fractions of a line that are the unit of prefetch rates. A division for each share would cost as
/// much as the products of a row.
pub const FRACTION: usize = 1 << 16;

/// Prefetches share `n` of the memory that begins at `ahead`.
///
/// A share has `rate` fractions of a line, halved `halvings` times.
#[inline(always)]
pub fn fetch(ahead: *const u8, rate: usize, n: usize, halvings: u32) {
    let line = |n: usize| ((n * rate) >> halvings) / FRACTION;
    for line in line(n)..line(n + 1) {
        prefetch(ahead.wrapping_add(line * LINE));
    }
}

/// Adds a panel's products with `R` rows to `acc[R][TILE]`: f32 values, or raw i32 sums of
/// integers.
pub type PanelFn = unsafe fn(panel: &Panel, acc: *mut f32);
/// Converts `acc[rows][TILE]` from raw sums to products. The arguments are line of scales, unit,
/// offset, row scales, row sums, and acc.
pub type FinishFn =
    unsafe fn(scales: *const u8, unit: f32, offset: i32, sx: &[f32], sums: &[i32], acc: *mut f32);
/// Computes `gate = gelu_tanh(gate) * up`, element by element.
pub type GateFn = unsafe fn(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]);
