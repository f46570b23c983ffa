//! Memory barriers: one function for each pair of stages that exchange data through memory.

use ash::vk::{self, AccessFlags2 as A, PipelineStageFlags2 as S};
use gemma_base::testing;

/// Makes all earlier writes of kernels and copies visible to all later kernels and copies.
pub fn barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let (stages, writes) =
        (S::COMPUTE_SHADER | S::ALL_TRANSFER, A::SHADER_STORAGE_WRITE | A::TRANSFER_WRITE);
    between(
        device,
        commands,
        (stages, writes),
        (stages, A::SHADER_STORAGE_READ | A::TRANSFER_READ | writes),
    );
}

/// Makes earlier writes of kernels visible to later kernels.
pub fn kernel_barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let after = A::SHADER_STORAGE_READ | A::SHADER_STORAGE_WRITE;
    between(
        device,
        commands,
        (S::COMPUTE_SHADER, A::SHADER_STORAGE_WRITE),
        (S::COMPUTE_SHADER, after),
    );
}

/// Makes earlier writes of copies visible to later kernels.
pub fn copied_barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    between(
        device,
        commands,
        (S::ALL_TRANSFER, A::TRANSFER_WRITE),
        (S::COMPUTE_SHADER, A::SHADER_STORAGE_READ),
    );
}

/// Makes all earlier writes visible to the host after the submission.
pub fn host_barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let before = (S::COMPUTE_SHADER | S::ALL_TRANSFER, A::SHADER_STORAGE_WRITE | A::TRANSFER_WRITE);
    between(device, commands, before, (S::HOST, A::HOST_READ));
}

fn between(device: &ash::Device, commands: vk::CommandBuffer, before: (S, A), after: (S, A)) {
    if testing::fault(testing::NO_BARRIERS).is_some() {
        return;
    }
    let all = [vk::MemoryBarrier2::default()
        .src_stage_mask(before.0)
        .src_access_mask(before.1)
        .dst_stage_mask(after.0)
        .dst_access_mask(after.1)];
    // SAFETY: the callers are recording `commands`.
    unsafe {
        device.cmd_pipeline_barrier2(commands, &vk::DependencyInfo::default().memory_barriers(&all))
    };
}
