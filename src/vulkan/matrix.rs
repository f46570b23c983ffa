//! Matrix instructions: the shapes that a device lists, and whether they lay their results out as
//! the kernels take them to, which Vulkan leaves to the driver.

use super::barrier::host_barrier;
use super::memory::Block;
use super::pipeline::{Pipelines, Shader};
use super::push::Push;
use super::queue::Queue;
use anyhow::Result;
use ash::vk;

/// An M x K matrix of int8 times a K x N one, by a subgroup, into int32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// The shape that the kernels are written for.
pub const SHAPE: MatrixShape = MatrixShape { m: 16, n: 8, k: 32 };

impl std::fmt::Display for MatrixShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

/// Those of a driver's list that multiply signed int8 exactly, each once.
pub fn int8_shapes(list: &[vk::CooperativeMatrixPropertiesKHR<'_>]) -> Vec<MatrixShape> {
    let mut shapes = Vec::new();
    for s in list {
        let types = [(s.a_type, vk::ComponentTypeKHR::SINT8), (s.b_type, vk::ComponentTypeKHR::SINT8)];
        let sums = [(s.c_type, vk::ComponentTypeKHR::SINT32), (s.result_type, vk::ComponentTypeKHR::SINT32)];
        let shape = MatrixShape { m: s.m_size, n: s.n_size, k: s.k_size };
        let fits = types.iter().chain(&sums).all(|(has, wanted)| has == wanted) && s.scope == vk::ScopeKHR::SUBGROUP;
        if fits && !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// Lanes of a subgroup and elements of a product that each has.
const PRODUCT: (usize, usize) = (32, 4);

/// Runs `matrix_probe.comp`, whose results go to `block`.
pub fn are_as_expected(queue: &mut Queue, pipelines: &mut Pipelines, block: &Block) -> Result<bool> {
    let pipeline = pipelines.get(Shader::MatrixProbe, &Vec::new())?;
    let (layout, push) = (pipelines.layout, Push::new().at(block.address));
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
    fn shapes_of_other_types_are_passed_over() {
        use vk::ComponentTypeKHR as T;
        let of = |m, a, c| vk::CooperativeMatrixPropertiesKHR {
            m_size: m,
            n_size: 8,
            k_size: 32,
            a_type: a,
            b_type: a,
            c_type: c,
            result_type: c,
            scope: vk::ScopeKHR::SUBGROUP,
            ..Default::default()
        };
        let block = vk::CooperativeMatrixPropertiesKHR { scope: vk::ScopeKHR::WORKGROUP, ..of(64, T::SINT8, T::SINT32) };
        let list = [of(16, T::FLOAT16, T::FLOAT32), of(16, T::SINT8, T::SINT32), of(16, T::SINT8, T::SINT32), block];
        assert_eq!(int8_shapes(&list), [SHAPE]);
        assert_eq!(SHAPE.to_string(), "16x8x32");
        assert_eq!(int8_shapes(&[of(16, T::UINT8, T::SINT32)]), []);
    }

    #[test]
    fn every_element_of_the_product_is_expected_once() {
        let mut all: Vec<i32> = (0..PRODUCT.0 * PRODUCT.1).map(expected).collect();
        all.sort_unstable();
        assert_eq!(all, (113..113 + 16 * 8).collect::<Vec<i32>>());
    }
}
