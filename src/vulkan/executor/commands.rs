//! What is recorded: calls, and copies to where the host sees them.

use super::super::barrier::{barrier, host_barrier};
use super::super::call::Call;
use super::super::memory::Block;
use super::super::queue::Queue;
use anyhow::Result;
use ash::vk;

/// Records one call.
pub fn dispatch(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    call: &Call,
) {
    // SAFETY: the pipeline and its layout live as long as the executor; addresses are of live
    // buffers.
    unsafe {
        device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
        device.cmd_push_constants(commands, layout, vk::ShaderStageFlags::COMPUTE, 0, call.push.bytes());
        device.cmd_dispatch(commands, call.groups[0], call.groups[1], call.groups[2]);
    }
}

/// Copies bytes of a buffer from `start` on to where the host sees them, and waits for that.
pub fn read_back(queue: &mut Queue, from: vk::Buffer, start: u64, through: &Block, bytes: &mut [u8]) -> Result<()> {
    let copy = vk::BufferCopy { src_offset: start, dst_offset: 0, size: bytes.len() as u64 };
    // SAFETY: the caller checked that the buffer holds the bytes, and they go through in one.
    let done = queue.once(|device, commands| unsafe {
        barrier(device, commands);
        device.cmd_copy_buffer(commands, from, through.buffer, &[copy]);
        host_barrier(device, commands);
    })?;
    queue.wait(done)?;
    // SAFETY: the copy is done.
    bytes.copy_from_slice(unsafe { through.bytes(0, bytes.len()) });
    Ok(())
}
