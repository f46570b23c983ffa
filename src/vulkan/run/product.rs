//! Products of dense f32 matrices on the device, with the processor's bits: where the device fuses
//! multiply-adds, which Vulkan leaves open.

use super::VulkanExecutor;
use crate::compute::{BufferId, Executor};
use crate::tensor::product::{self, View, check};
use crate::vulkan::lower::Call;
use crate::vulkan::lower::kernels::{self, ProductPush, word};
use anyhow::Result;
use rayon::prelude::*;

/// Elements along each side of a product from which the device is faster than the processor and the
/// way there and back.
const LEAST: usize = 512;
/// Rows and columns of a workgroup's tile.
const TILE: usize = 128;
/// Floats of the buffer of each matrix. Larger products are made in pieces.
const ROOM: usize = 32 << 20;

/// Room for two factors and their product.
#[derive(Debug)]
pub struct Products {
    buffers: [BufferId; 3],
}

/// A factor as it is sent, and whether neighbours in it are those along the sum.
struct Packed {
    values: Vec<f32>,
    along: bool,
}

/// Some rows of the left factor, with their part of the product.
struct Piece {
    top: usize,
    a: Packed,
    c: Vec<f32>,
}

/// Returns whether the device computes such a product.
pub fn takes(factor: f32, keep: f32, a: View<'_>, b: View<'_>) -> bool {
    let along = |v: View<'_>| v.row_stride == 1 || v.col_stride == 1;
    factor == 1.0
        && (keep == 0.0 || keep == 1.0)
        && along(a)
        && along(b)
        && [a.rows, a.cols, b.cols].iter().all(|n| *n >= LEAST)
        // A tile's worth of each matrix fits its buffer.
        && a.cols <= ROOM / TILE
}

/// Copies a factor whose sums go along its columns.
fn packed(view: View<'_>) -> Packed {
    let along = view.col_stride == 1;
    let lines = if along { view } else { view.transposed() };
    let mut values = vec![0.0; lines.rows * lines.cols];
    values.par_chunks_mut(lines.cols).enumerate().for_each(|(i, line)| {
        line.copy_from_slice(&lines.data[i * lines.row_stride..][..line.len()]);
    });
    Packed { values, along }
}

/// Computes `c = keep * c + a b`, each part of it by `compute` with the device that it locks. No
/// thread of the pool waits for the pool meanwhile: it might be given work that wants the device.
pub fn multiply(
    c: &mut [f32],
    stride: usize,
    keep: bool,
    a: View<'_>,
    b: View<'_>,
    locked: &mut dyn FnMut(
        &mut dyn FnMut(&mut VulkanExecutor, &Products) -> Result<()>,
    ) -> Result<()>,
) -> Result<()> {
    check(c, stride, a, b);
    let most = |limit: usize| (limit / TILE * TILE).max(TILE);
    let across = most(ROOM / a.cols).min(b.cols);
    let down = most((ROOM / a.cols).min(ROOM / across)).min(a.rows);
    for first in (0..b.cols).step_by(across) {
        let cols = first..b.cols.min(first + across);
        let n = cols.len();
        let right = packed(b.part(0..b.rows, cols).transposed());
        let mut pieces: Vec<Piece> = (0..a.rows)
            .step_by(down)
            .map(|top| {
                let rows = top..a.rows.min(top + down);
                let mut piece = vec![0.0; rows.len() * n];
                if keep {
                    let lines =
                        piece.par_chunks_mut(n).zip(c[top * stride + first..].par_chunks(stride));
                    lines.for_each(|(line, c)| line.copy_from_slice(&c[..n]));
                }
                Piece { top, a: packed(a.part(rows, 0..a.cols)), c: piece }
            })
            .collect();
        locked(&mut |device, products| {
            products.run(device, keep, [n, a.cols], &right, &mut pieces)
        })?;
        for piece in &pieces {
            let lines =
                c[piece.top * stride + first..].par_chunks_mut(stride).zip(piece.c.par_chunks(n));
            lines.for_each(|(c, line)| c[..n].copy_from_slice(line));
        }
    }
    Ok(())
}

impl Products {
    pub fn new(device: &mut VulkanExecutor) -> Result<Products> {
        let mut room = |what| device.alloc(what, 4 * ROOM);
        Ok(Products { buffers: [room("left factor")?, room("right factor")?, room("product")?] })
    }

    /// Returns whether the device gives the processor's bits.
    pub fn are_exact(&self, device: &mut VulkanExecutor) -> Result<bool> {
        let (rows, k) = (16, product::SLICE + 5);
        // Numbers whose products and sums all have to be rounded.
        let values: Vec<f32> = (1..=rows * k).map(|i| (i as f32).sqrt().fract() - 0.5).collect();
        let lines: Vec<&[f32]> = values.chunks_exact(k).collect();
        let element = |i: usize| -> f32 {
            let (a, b) = (lines[i / rows], lines[i % rows]);
            let slices = a.chunks(product::SLICE).zip(b.chunks(product::SLICE));
            slices
                .map(|(a, b)| a.iter().zip(b).fold(0f32, |sum, (a, b)| a.mul_add(*b, sum)))
                .fold(0.0, |whole, slice| whole + slice)
        };
        let factor = || Packed { values: values.clone(), along: true };
        let mut pieces = [Piece { top: 0, a: factor(), c: vec![0.0; rows * rows] }];
        self.run(device, false, [rows, k], &factor(), &mut pieces)?;
        Ok(pieces[0].c.iter().enumerate().all(|(i, got)| got.to_bits() == element(i).to_bits()))
    }

    fn run(
        &self,
        device: &mut VulkanExecutor,
        keep: bool,
        [n, k]: [usize; 2],
        right: &Packed,
        pieces: &mut [Piece],
    ) -> Result<()> {
        let [left, other, product] = self.buffers;
        device.write(other, 0, bytemuck::cast_slice(&right.values))?;
        for piece in pieces {
            device.write(left, 0, bytemuck::cast_slice(&piece.a.values))?;
            if keep {
                device.write(product, 0, bytemuck::cast_slice(&piece.c))?;
            }
            let m = piece.c.len() / n;
            let push = ProductPush {
                a: device.address(left),
                b: device.address(other),
                c: device.address(product),
                m: word(m),
                n: word(n),
                k: word(k),
                keep: keep as u32,
            };
            let kernel = kernels::Product { a_along: piece.a.along, b_along: right.along };
            let groups = [n.div_ceil(TILE), m.div_ceil(TILE), 1];
            device.run_calls(&[Call::apart(&kernel, &push, groups)])?;
            device.read(product, 0, bytemuck::cast_slice_mut(&mut piece.c))?;
        }
        Ok(())
    }
}
