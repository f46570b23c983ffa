//! Weights from the host to the device: a ring of staging memory, filled while the device unpacks what came before.

use super::device::Gpu;
use super::layout::{DeviceMatrix, Packing, code_number, sizes};
use super::memory::{Arena, Block, Place};
use super::pipeline::{Pipelines, Shader};
use super::push::Push;
use super::queue::{Queue, barrier};
use crate::tensor::{Code, Matrix};
use anyhow::{Context, Result, ensure};
use ash::vk;
use rayon::prelude::*;
use std::sync::Arc;

/// Staging blocks and their size.
const RING: usize = 3;
const STAGE: usize = 32 << 20;
/// Bytes that a thread copies at a time.
const COPY: usize = 1 << 20;
/// Bytes of all staging blocks.
pub const STAGING: u64 = (RING * STAGE) as u64;

pub struct Uploader {
    stages: Vec<Block>,
    /// Submission that a block was last used by.
    used: [u64; RING],
    next: usize,
}

impl Uploader {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Uploader> {
        let stages = (0..RING).map(|_| Block::new(gpu, "staging", STAGE as u64, Place::Upload)).collect::<Result<_>>()?;
        Ok(Uploader { stages, used: [0; RING], next: 0 })
    }

    /// Copies `bytes` into a free block and submits what `record` does with it.
    fn stage(
        &mut self,
        queue: &mut Queue,
        bytes: &[u8],
        record: impl FnOnce(&ash::Device, vk::CommandBuffer, &Block),
    ) -> Result<()> {
        let i = self.next;
        self.next = (i + 1) % RING;
        queue.wait(self.used[i])?;
        let block = &self.stages[i];
        // SAFETY: the submission that used the block is done.
        let to = unsafe { block.bytes(0, bytes.len()) };
        // One thread neither reads a file's pages nor writes memory as fast as the bus takes them.
        to.par_chunks_mut(COPY).zip(bytes.par_chunks(COPY)).for_each(|(to, from)| to.copy_from_slice(from));
        self.used[i] = queue.once(|device, commands| record(device, commands, block))?;
        Ok(())
    }

    /// Sends a matrix and packs it as the kernels like it.
    pub fn load(
        &mut self,
        label: &str,
        matrix: &Matrix<'_>,
        arena: &mut Arena,
        queue: &mut Queue,
        pipelines: &mut Pipelines,
    ) -> Result<DeviceMatrix> {
        let (format, rows, cols) = (matrix.format, matrix.rows, matrix.cols);
        format.check_cols(cols).with_context(|| format!("loading {label}"))?;
        let packing = Packing::of(format, rows, cols)?;
        let bytes = packing.map_or(matrix.codes.len(), |p| p.bytes());
        let [code_size, scale_size] = sizes(format, rows, cols)?;
        let scale_bytes: &[u8] = bytemuck::cast_slice(&matrix.scales);
        ensure!(bytes as u64 <= code_size && scale_bytes.len() as u64 <= scale_size, "{label} is larger than its shape");
        let codes = arena.alloc(label, code_size)?;
        let scales = arena.alloc(label, scale_size)?;
        let target = arena.blocks[codes.block].buffer;
        match packing {
            None => self.copy(queue, &matrix.codes, target, codes.offset)?,
            Some(p) => {
                let constants = vec![(4, code_number(format.code))];
                let pipeline = pipelines.get(Shader::Repack, &constants)?;
                let layout = pipelines.layout;
                let rows_each = (STAGE / p.from_bytes.max(1)).max(1);
                for (i, part) in matrix.codes.chunks(rows_each * p.from_bytes).enumerate() {
                    let words = part.len() / p.from_bytes * p.row_words();
                    let to = codes.address + (i * rows_each * p.row_words() * 4) as u64;
                    self.stage(queue, part, |device, commands, block| {
                        let push = Push::new().at(block.address).at(to);
                        let push = push.word(words).word(p.row_words()).word(p.step_words).word(p.from_bytes);
                        let groups = words.div_ceil(256) as u32;
                        let across = groups.min(4096);
                        // SAFETY: pipeline and memory live as long as the executor, which waits before it drops them.
                        unsafe {
                            device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
                            device.cmd_push_constants(commands, layout, vk::ShaderStageFlags::COMPUTE, 0, push.bytes());
                            device.cmd_dispatch(commands, across, groups.div_ceil(across), 1);
                        }
                        barrier(device, commands);
                    })?;
                }
            }
        }
        let block = arena.blocks[scales.block].buffer;
        self.copy(queue, scale_bytes, block, scales.offset)?;
        debug_assert!(format.code != Code::F32 || packing.is_none());
        let bytes = (bytes + scale_bytes.len()) as u64;
        Ok(DeviceMatrix { format, rows, cols, codes: codes.address, scales: scales.address, bytes })
    }

    fn copy(&mut self, queue: &mut Queue, bytes: &[u8], target: vk::Buffer, offset: u64) -> Result<()> {
        for (i, part) in bytes.chunks(STAGE).enumerate() {
            let copy = vk::BufferCopy { src_offset: 0, dst_offset: offset + (i * STAGE) as u64, size: part.len() as u64 };
            // SAFETY: the target has room for all of `bytes`.
            self.stage(queue, part, |device, commands, block| unsafe {
                device.cmd_copy_buffer(commands, block.buffer, target, &[copy]);
                barrier(device, commands);
            })?;
        }
        Ok(())
    }
}
