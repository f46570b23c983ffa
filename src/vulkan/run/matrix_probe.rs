//! Checks whether a device lays the results of its matrix instructions out as the kernels take them
//! to, which Vulkan leaves to the driver.

use crate::vulkan::device::barrier::host_barrier;
use crate::vulkan::device::memory::Block;
use crate::vulkan::device::pipeline::{Pipelines, Shader};
use crate::vulkan::device::queue::Queue;
use crate::vulkan::lower::kernels::{MatrixProbe, MatrixProbePush, Push, Specialise};
use anyhow::Result;
use ash::vk;

/// Lanes of a subgroup and elements of a product that each has.
const PRODUCT: (usize, usize) = (32, 4);

/// Runs `matrix_probe.comp`, whose results go to `block`.
pub fn are_as_expected(
    queue: &mut Queue,
    pipelines: &mut Pipelines,
    block: &Block,
) -> Result<bool> {
    let pipeline = pipelines.get(Shader::MatrixProbe, &MatrixProbe {}.constants())?;
    let (layout, push) = (pipelines.layout, Push::of(&MatrixProbePush { out: block.address }));
    // SAFETY: the block holds the results and lives until they are there.
    let done = queue.once(|device, commands| unsafe {
        device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
        device.cmd_push_constants(commands, layout, vk::ShaderStageFlags::COMPUTE, 0, push.bytes());
        device.cmd_dispatch(commands, 1, 1, 1);
        host_barrier(device, commands);
    })?;
    queue.wait(done)?;
    // SAFETY: the device is done with the block.
    let bytes = unsafe { block.bytes(0, PRODUCT.0 * PRODUCT.1 * 4) };
    Ok(bytes.chunks_exact(4).enumerate().all(|(i, word)| word == expected(i).to_le_bytes()))
}

/// Element `i % 4` of lane `i / 4`: 8 row + column + 113, see the shader.
fn expected(i: usize) -> i32 {
    let (lane, element) = (i / PRODUCT.1, i % PRODUCT.1);
    let (row, column) = (lane / 4 + element / 2 * 8, lane % 4 * 2 + element % 2);
    (8 * row + column + 113) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_the_product_is_expected_once() {
        let mut all: Vec<i32> = (0..PRODUCT.0 * PRODUCT.1).map(expected).collect();
        all.sort_unstable();
        assert_eq!(all, (113..113 + 16 * 8).collect::<Vec<i32>>());
    }
}
