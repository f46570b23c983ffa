//! The Vulkan executor. It knows plans and formats, but no model. Only this crate uses ash.
//!
//! Folders only use those listed before them:
//! - `device`: instance, device, memory, queue, pipelines from committed SPIR-V;
//! - `lower`: converts a [`gemma_base::compute::Plan`] to kernel calls;
//! - `run`: the executor, which loads weights and records the calls once per bucket of rows and
//!   pages;
//! - `check`: comparison of each result with its scalar twin.

mod check;
mod device;
mod lower;
mod run;

pub use check::{CheckedExecutor, InjectedFault};
pub use device::choose::{Choice, choose, ranked};
pub use device::matrix::{MatrixShape, SHAPE, best_shape};
pub use device::pipeline::{Constants, SHADERS, Shader};
pub use device::{ALLOW_CPU_DRIVER, DeviceInfo, MEMORY, Vulkan, validation};
pub use lower::layout::{DeviceMatrix, Packing, code_number};
pub use lower::sizes::OwnSizes;
pub use lower::{Access, Bucket, Call, Lowering, Own, kernels};
pub use run::{
    BLOCK_ROWS, LIMIT, MadeUp, VulkanCoding, VulkanDense, VulkanExecutor, VulkanFootprint, blocks,
};
