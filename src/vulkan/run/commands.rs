//! What is recorded: calls, and copies to where the host sees them.

use crate::vulkan::device::barrier::{barrier, host_barrier};
use crate::vulkan::device::memory::Block;
use crate::vulkan::device::queue::Queue;
use crate::vulkan::lower::Call;
use anyhow::Result;
use ash::vk;
use std::ops::Range;

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
        device.cmd_push_constants(
            commands,
            layout,
            vk::ShaderStageFlags::COMPUTE,
            0,
            call.push.bytes(),
        );
        device.cmd_dispatch(commands, call.groups[0], call.groups[1], call.groups[2]);
    }
}

/// The axis along which a call has most workgroups.
pub fn axis(groups: [u32; 3]) -> usize {
    (0..3).rev().max_by_key(|i| groups[*i]).expect("there are three")
}

/// Records the workgroups `parts` along the longest axis of a call, whose kernel is divisible.
pub fn dispatch_part(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    call: &Call,
    parts: Range<u32>,
) {
    let (mut base, mut count, along) = ([0; 3], call.groups, axis(call.groups));
    (base[along], count[along]) = (parts.start, parts.end - parts.start);
    // SAFETY: as above; all that is dispatched lies within the call.
    unsafe {
        device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
        device.cmd_push_constants(
            commands,
            layout,
            vk::ShaderStageFlags::COMPUTE,
            0,
            call.push.bytes(),
        );
        device.cmd_dispatch_base(commands, base[0], base[1], base[2], count[0], count[1], count[2]);
    }
}

/// Copies bytes of a buffer from `start` on to where the host sees them, and waits for that.
pub fn read_back(
    queue: &mut Queue,
    from: vk::Buffer,
    start: u64,
    through: &Block,
    bytes: &mut [u8],
) -> Result<()> {
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
