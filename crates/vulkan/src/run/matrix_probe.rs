//! Checks in which lanes a device puts the elements of a matrix product. Vulkan leaves that to the
//! driver, but `linear_few` and `linear_many` depend on it.

use super::commands::bind;
use crate::device::barrier::host_barrier;
use crate::device::memory::Block;
use crate::device::pipeline::{Pipelines, Shader};
use crate::device::queue::Queue;
use crate::lower::kernels::{MatrixProbe, MatrixProbePush, Push, Specialise};
use anyhow::Result;

/// Lanes of a subgroup, and elements of a product in each.
const PRODUCT: (usize, usize) = (32, 4);

/// Runs `matrix_probe.comp`, which writes to `block`. Returns whether each element is in the lane
/// that the kernels expect.
pub fn are_as_expected(
    queue: &mut Queue,
    pipelines: &mut Pipelines,
    block: &Block,
) -> Result<bool> {
    let pipeline = pipelines.get(Shader::MatrixProbe, &MatrixProbe {}.constants())?;
    let (layout, push) = (pipelines.layout, Push::of(&MatrixProbePush { out: block.address }));
    // SAFETY: the block has room for the results and outlives the wait.
    let done = queue.once(|device, commands| unsafe {
        bind(device, commands, layout, pipeline, &push);
        device.cmd_dispatch(commands, 1, 1, 1);
        host_barrier(device, commands);
    })?;
    queue.wait(done)?;
    // SAFETY: the wait above ended the only use of the block.
    let bytes = unsafe { block.bytes(0, PRODUCT.0 * PRODUCT.1 * 4) };
    Ok(bytes.chunks_exact(4).enumerate().all(|(i, word)| word == expected(i).to_le_bytes()))
}

/// Returns the expected element `i % 4` of lane `i / 4`: 8 row + column + 113, see the shader.
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
