//! Measures how fast a device reads its memory and receives data from the host.

use super::VulkanExecutor;
use super::commands::bind;
use crate::device::barrier::barrier;
use crate::device::memory::{Block, Place};
use crate::device::pipeline::{self, Shader};
use crate::lower::kernels::{Push, Read, ReadPush, Specialise};
use ash::vk;
use std::time::Instant;

/// Passes over the memory in one submission.
const READS: u64 = 8;

impl VulkanExecutor {
    /// Returns the bytes per second at which kernels read the weights; `None` for too few weights.
    pub(super) fn measure_reads(&mut self) -> Option<f64> {
        // Kernels read existing weights, because memory without content may have no pages.
        let block =
            self.weights.blocks.iter().max_by_key(|b| b.size).filter(|b| b.size >= 256 << 20)?;
        let (bytes, address) = (block.size.min(1 << 30) & !32767, block.address);
        let sink = self.addresses[self.own?.partials.0 as usize];
        let (pipeline, layout) = {
            let mut made = pipeline::lock(&self.pipelines);
            (made.get(Shader::Read, &Read {}.constants()).ok()?, made.layout)
        };
        let push = Push::of(&ReadPush { from: address, sink });
        let mut seconds = Vec::new();
        // Clocks rise from their idle state within some tenths of a second.
        let begin = Instant::now();
        while seconds.len() < 6 || begin.elapsed().as_secs_f64() < 0.4 {
            let start = Instant::now();
            // SAFETY: the block holds `bytes` bytes and lives as long as the executor.
            let done = self.queue.once(|device, commands| unsafe {
                bind(device, commands, layout, pipeline, &push);
                for _ in 0..READS {
                    device.cmd_dispatch(commands, (bytes / 32768) as u32, 1, 1);
                    barrier(device, commands);
                }
            });
            self.queue.wait(done.ok()?).ok()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        let best = seconds.into_iter().fold(f64::INFINITY, f64::min);
        Some((bytes * READS) as f64 / best)
    }

    /// Returns the bytes per second from host memory to the device.
    pub(super) fn measure_uploads(&mut self) -> Option<f64> {
        let target = self.spans[self.own?.partials.0 as usize];
        let stage =
            Block::new(&self.gpu, "staging", target.bytes.min(32 << 20), Place::Upload).ok()?;
        let to = self.block(&target).buffer;
        let copy = [vk::BufferCopy { src_offset: 0, dst_offset: target.offset, size: stage.size }];
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            let start = Instant::now();
            // SAFETY: both ranges have this size, and both blocks outlive the wait. Partials have
            // no content between passes.
            let done = self.queue.once(|device, commands| unsafe {
                for _ in 0..READS {
                    barrier(device, commands);
                    device.cmd_copy_buffer(commands, stage.buffer, to, &copy);
                }
                barrier(device, commands);
            });
            self.queue.wait(done.ok()?).ok()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Some((stage.size * READS) as f64 / best)
    }
}
