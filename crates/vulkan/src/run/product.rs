//! Products of dense f32 matrices on the device, with the processor's bits. This requires that the
//! device fuses multiply-adds, which Vulkan leaves open.

use super::VulkanExecutor;
use super::workgroups::{Unordered, Workgroups};
use crate::device::barrier::{barrier, host_barrier};
use crate::device::memory::{Block, Place};
use crate::lower::Call;
use crate::lower::kernels::{self, ProductPush, word};
use anyhow::Result;
use ash::vk;
use gemma_base::tensor::product::{self, View, check};
use rayon::prelude::*;
use std::borrow::Cow;

/// Least elements along each side of a product for which the device is faster than the processor,
/// including the transfers.
const LEAST: usize = 512;
/// Rows and columns of a workgroup's tile.
const TILE: usize = 128;
/// Buffer sizes in floats: some rows of the left factor, some columns of the right one, and their
/// product.
const LEFT: usize = 16 << 20;
const RIGHT: usize = 64 << 20;
const PRODUCT: usize = 16 << 20;
/// Number of parts of an upload in flight.
const PARTS: usize = 4;
/// Threads that copy to and from host-visible memory.
const COPIERS: usize = 4;

/// Buffers for two factors and their product, on the device and for transfers.
pub struct Products {
    left: Block,
    right: Block,
    product: Block,
    up: Block,
    down: Block,
}

/// A factor in upload order, and whether neighbours in it are neighbours in the sum.
struct Packed<'a> {
    values: Cow<'a, [f32]>,
    along: bool,
}

/// Some rows of the left factor, with their part of the product.
struct ProductRows<'a> {
    top: usize,
    a: Packed<'a>,
    c: Vec<f32>,
}

/// Returns whether the device supports this product.
pub fn takes(factor: f32, keep: f32, a: View<'_>, b: View<'_>) -> bool {
    let along = |v: View<'_>| v.row_stride == 1 || v.col_stride == 1;
    factor == 1.0
        && (keep == 0.0 || keep == 1.0)
        && along(a)
        && along(b)
        && [a.rows, a.cols, b.cols].iter().all(|n| *n >= LEAST)
        // A tile of each matrix must fit its buffer.
        && a.cols <= LEFT / TILE
}

/// Returns a factor with contiguous sums along its columns.
fn packed(view: View<'_>) -> Packed<'_> {
    let along = view.col_stride == 1;
    let lines = if along { view } else { view.transposed() };
    if lines.row_stride == lines.cols {
        return Packed { values: Cow::Borrowed(&lines.data[..lines.rows * lines.cols]), along };
    }
    let mut values = vec![0.0; lines.rows * lines.cols];
    values.par_chunks_mut(lines.cols).enumerate().for_each(|(i, line)| {
        line.copy_from_slice(&lines.data[i * lines.row_stride..][..line.len()]);
    });
    Packed { values: Cow::Owned(values), along }
}

/// Copies with new threads, because the caller may hold the device.
fn copy(to: &mut [u8], from: &[u8]) {
    let part = from.len().div_ceil(COPIERS).max(1 << 20);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// Runs work with the locked device.
pub type Run<'a> = &'a mut dyn FnMut(&mut VulkanExecutor, &Products) -> Result<()>;

/// Computes `c = keep * c + a b`.
///
/// `locked` runs each part with the device locked. While the device is locked, no thread of the
/// pool waits for the pool, because it might be given work that needs the device.
pub fn multiply(
    c: &mut [f32],
    stride: usize,
    keep: bool,
    a: View<'_>,
    b: View<'_>,
    locked: &mut dyn FnMut(Run<'_>) -> Result<()>,
) -> Result<()> {
    check(c, stride, a, b);
    let most = |limit: usize| (limit / TILE * TILE).max(TILE);
    let across = most((RIGHT / a.cols).min(PRODUCT / TILE)).min(b.cols);
    let down = most((LEFT / a.cols).min(PRODUCT / across)).min(a.rows);
    for first in (0..b.cols).step_by(across) {
        let cols = first..b.cols.min(first + across);
        let n = cols.len();
        let right = packed(b.part(0..b.rows, cols).transposed());
        let piece = |top: usize, c: &[f32]| {
            let rows = top..a.rows.min(top + down);
            let mut part = vec![0.0; rows.len() * n];
            if keep {
                let lines =
                    part.par_chunks_mut(n).zip(c[top * stride + first..].par_chunks(stride));
                lines.for_each(|(line, c)| line.copy_from_slice(&c[..n]));
            }
            ProductRows { top, a: packed(a.part(rows, 0..a.cols)), c: part }
        };
        let mut pieces: Vec<ProductRows<'_>> =
            (0..a.rows).step_by(down).map(|top| piece(top, c)).collect();
        locked(&mut |device, products| products.run(device, keep, a.cols, &right, &mut pieces))?;
        for piece in &pieces {
            let place = c[piece.top * stride + first..].par_chunks_mut(stride);
            let lines = place.zip(piece.c.par_chunks(n));
            lines.for_each(|(c, line)| c[..n].copy_from_slice(line));
        }
    }
    Ok(())
}

impl Products {
    pub fn new(device: &VulkanExecutor) -> Result<Products> {
        let room =
            |what, floats: usize, place| Block::new(&device.gpu, what, 4 * floats as u64, place);
        Ok(Products {
            left: room("left factor", LEFT, Place::Device)?,
            right: room("right factor", RIGHT, Place::Device)?,
            product: room("product", PRODUCT, Place::Device)?,
            up: room("factors on their way", LEFT, Place::Upload)?,
            down: room("a product on its way", PRODUCT, Place::Readback)?,
        })
    }

    /// Returns whether the device computes the processor's bits.
    pub fn are_exact(&self, device: &mut VulkanExecutor) -> Result<bool> {
        let (rows, k) = (16, product::SLICE + 5);
        // Numbers for which all products and sums are rounded.
        let values: Vec<f32> = (1..=rows * k).map(|i| (i as f32).sqrt().fract() - 0.5).collect();
        let lines: Vec<&[f32]> = values.chunks_exact(k).collect();
        let element = |i: usize| -> f32 {
            let (a, b) = (lines[i / rows], lines[i % rows]);
            let slices = a.chunks(product::SLICE).zip(b.chunks(product::SLICE));
            slices
                .map(|(a, b)| a.iter().zip(b).fold(0f32, |sum, (a, b)| a.mul_add(*b, sum)))
                .fold(0.0, |whole, slice| whole + slice)
        };
        let factor = || Packed { values: Cow::Borrowed(&values), along: true };
        let mut pieces = [ProductRows { top: 0, a: factor(), c: vec![0.0; rows * rows] }];
        self.run(device, false, k, &factor(), &mut pieces)?;
        Ok(pieces[0].c.iter().enumerate().all(|(i, got)| got.to_bits() == element(i).to_bits()))
    }

    /// Computes pieces with sums of `k` terms.
    fn run(
        &self,
        device: &mut VulkanExecutor,
        keep: bool,
        k: usize,
        right: &Packed<'_>,
        pieces: &mut [ProductRows<'_>],
    ) -> Result<()> {
        self.send(device, &self.right, &right.values)?;
        let n = right.values.len() / k;
        for piece in pieces {
            self.send(device, &self.left, &piece.a.values)?;
            if keep {
                self.send(device, &self.product, &piece.c)?;
            }
            let m = piece.c.len() / n;
            let push = ProductPush {
                a: self.left.address,
                b: self.right.address,
                c: self.product.address,
                m: word(m),
                n: word(n),
                k: word(k),
                keep: keep as u32,
            };
            let kernel = kernels::Product { a_along: piece.a.along, b_along: right.along };
            let call = Call::apart(&kernel, &push, [n.div_ceil(TILE), m.div_ceil(TILE), 1]);
            let (layout, pipelines) = device.kernels(std::slice::from_ref(&call))?;
            let mut parts = Unordered::new(device.shuffle);
            parts.add(pipelines[0], &call, Workgroups::all(&call));
            let bytes = bytemuck::cast_slice_mut::<f32, u8>(&mut piece.c);
            let size = bytes.len() as u64;
            let back = [vk::BufferCopy { src_offset: 0, dst_offset: 0, size }];
            // SAFETY: the blocks live as long as `self`, which waits below, and have room for a
            // piece.
            let done = device.queue.once(|device, commands| unsafe {
                barrier(device, commands);
                parts.record(device, commands, layout);
                barrier(device, commands);
                device.cmd_copy_buffer(commands, self.product.buffer, self.down.buffer, &back);
                host_barrier(device, commands);
            })?;
            device.queue.wait(done)?;
            // SAFETY: the wait above ended the copy.
            copy(bytes, unsafe { self.down.bytes(0, bytes.len()) });
        }
        Ok(())
    }

    /// Copies floats to a block on the device. While one part is in flight, the next is written.
    fn send(&self, device: &mut VulkanExecutor, to: &Block, values: &[f32]) -> Result<()> {
        let part = LEFT / PARTS;
        let mut sent = [0; PARTS];
        for (i, values) in values.chunks(part).enumerate() {
            let bytes = bytemuck::cast_slice::<f32, u8>(values);
            let from = (i % PARTS * 4 * part) as u64;
            device.queue.wait(sent[i % PARTS])?;
            // SAFETY: the wait above ended the copy of the previous content.
            copy(unsafe { self.up.bytes(from, bytes.len()) }, bytes);
            let range = [vk::BufferCopy {
                src_offset: from,
                dst_offset: (4 * i * part) as u64,
                size: bytes.len() as u64,
            }];
            // SAFETY: both blocks have room for the values, and live as long as `self`.
            sent[i % PARTS] = device.queue.once(|device, commands| unsafe {
                barrier(device, commands);
                device.cmd_copy_buffer(commands, self.up.buffer, to.buffer, &range);
                barrier(device, commands);
            })?;
        }
        sent.into_iter().try_for_each(|copy| device.queue.wait(copy))
    }
}
