//! Records calls, and copies to host-visible memory.

use crate::device::barrier::{barrier, host_barrier};
use crate::device::memory::Block;
use crate::device::queue::Queue;
use crate::lower::Call;
use crate::lower::kernels::Push;
use anyhow::Result;
use ash::vk;

/// Binds a pipeline and its arguments.
pub fn bind(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    push: &Push,
) {
    // SAFETY: the callers are recording `commands`; pipeline and layout live as long as the
    // executor.
    unsafe {
        device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
        device.cmd_push_constants(commands, layout, vk::ShaderStageFlags::COMPUTE, 0, push.bytes());
    }
}

/// Records a complete call.
pub fn dispatch(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    call: &Call,
) {
    bind(device, commands, layout, pipeline, &call.push);
    let [x, y, z] = call.groups;
    // SAFETY: the addresses in a call are those of live buffers.
    unsafe { device.cmd_dispatch(commands, x, y, z) };
}

/// Copies bytes of a buffer from offset `start` through host memory, and waits for the copy.
pub fn read_back(
    queue: &mut Queue,
    from: vk::Buffer,
    start: u64,
    through: &Block,
    bytes: &mut [u8],
) -> Result<()> {
    let copy = vk::BufferCopy { src_offset: start, dst_offset: 0, size: bytes.len() as u64 };
    // SAFETY: the caller checked that both buffers hold the bytes.
    let done = queue.once(|device, commands| unsafe {
        barrier(device, commands);
        device.cmd_copy_buffer(commands, from, through.buffer, &[copy]);
        host_barrier(device, commands);
    })?;
    queue.wait(done)?;
    // SAFETY: the wait above ended the copy, and no other command uses the block.
    bytes.copy_from_slice(unsafe { through.bytes(0, bytes.len()) });
    Ok(())
}
