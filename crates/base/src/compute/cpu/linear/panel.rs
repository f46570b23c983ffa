//! Signatures of the kernels: part of a tile of weights, and the activations that it is multiplied
//! with.

use super::tile::{LINE, TILE};
use crate::compute::cpu::simd::prefetch;

/// Input of a kernel: a run of steps, and the activations that meet it.
pub struct Panel {
    pub data: *const u8,
    pub steps: usize,
    /// The first row's activations where the panel starts, and bytes from row to row.
    pub x: *const u8,
    pub x_stride: usize,
    /// Bytes to fetch meanwhile: `panel >> ahead_shift` bytes from here.
    pub ahead: *const u8,
    pub ahead_shift: u32,
}

impl Panel {
    /// Fetches the share of the next panel that belongs to `bytes` bytes at `offset`.
    #[inline(always)]
    pub fn fetch(&self, offset: usize, bytes: usize) {
        for line in (0..(bytes >> self.ahead_shift).max(1)).step_by(LINE) {
            prefetch(self.ahead.wrapping_add((offset >> self.ahead_shift) + line));
        }
    }
}

/// Parts of a line in which rates of fetching are counted: a division for each share would cost as
/// much as the products of a row.
pub const FRACTION: usize = 1 << 16;

/// Fetches share `n` of what begins at `ahead`.
///
/// A share has `rate` parts of a line, halved `halvings` times.
#[inline(always)]
pub fn fetch(ahead: *const u8, rate: usize, n: usize, halvings: u32) {
    let line = |n: usize| ((n * rate) >> halvings) / FRACTION;
    for line in line(n)..line(n + 1) {
        prefetch(ahead.wrapping_add(line * LINE));
    }
}

/// Adds a panel's products with `R` rows to `acc[R][TILE]`: f32, or raw i32 sums of integers.
pub type PanelFn = unsafe fn(panel: &Panel, acc: *mut f32);
/// Turns `acc[rows][TILE]` from raw sums into products: line of scales, unit, offset, row scales,
/// row sums, rows, acc.
pub type FinishFn =
    unsafe fn(scales: *const u8, unit: f32, offset: i32, sx: &[f32], sums: &[i32], acc: *mut f32);
/// `gate = gelu_tanh(gate) * up`, element by element.
pub type GateFn = unsafe fn(gate: &mut [[f32; TILE]], up: &[[f32; TILE]]);
