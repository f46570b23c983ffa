//! The row-local kernels: the twins' own code, compiled for each instruction set.

use super::simd::{Lanes, for_each_isa};
use crate::compute::memory::Buffers;
use crate::compute::plan::{Act, BufferId, Op};
use crate::compute::reference::{self, rows};

for_each_isa! {
    /// See [`rows::norm`].
    pub fn norm(x: &mut [f32], add: Option<(&[f32], &[f32])>, w: &[f32], eps: f32, out: &mut [f32]) = norm_body
}

#[inline(always)]
fn norm_body<L: Lanes>(x: &mut [f32], add: Option<(&[f32], &[f32])>, w: &[f32], eps: f32, out: &mut [f32]) {
    rows::norm(x, add, w, eps, out);
}

for_each_isa! {
    /// See [`reference::prepare`].
    pub fn prepare(buffers: &Buffers, input: BufferId, act: &Act, row: usize) = prepare_body
}

#[inline(always)]
fn prepare_body<L: Lanes>(buffers: &Buffers, input: BufferId, act: &Act, row: usize) {
    reference::prepare(buffers, input, act, row);
}

for_each_isa! {
    /// See [`reference::rope`].
    pub fn rope(buffers: &Buffers, op: &Op, max_rows: usize, row: usize) = rope_body
}

#[inline(always)]
fn rope_body<L: Lanes>(buffers: &Buffers, op: &Op, max_rows: usize, row: usize) {
    reference::rope(buffers, op, max_rows, row);
}
