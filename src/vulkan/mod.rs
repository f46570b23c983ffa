//! Floor 2: the Vulkan executor. Knows plans and formats, no model. The only room that speaks ash.
//!
//! Folders use only those before them:
//! - `device`: instance, device, memory, queue, pipelines from committed SPIR-V;
//! - `lower`: a [`crate::compute::Plan`] becomes kernel calls;
//! - `run`: the executor, which loads weights and records the calls once for each bucket of rows
//!   and pages;
//! - `check`: comparison with the executor on the processor, and a listing of calls without a
//!   device.

mod check;
mod device;
mod lower;
mod run;

pub use check::{CheckedExecutor, InjectedFault, Listed, Listing};
pub use device::choose::{Choice, choose, ranked};
pub use device::matrix::{MatrixShape, SHAPE};
pub use device::pipeline::SHADERS;
pub use device::{ALLOW_CPU_DRIVER, DeviceInfo, MEMORY, Vulkan, validation};
pub use lower::Bucket;
pub use run::{LIMIT, MadeUp, STAGING, VulkanExecutor, VulkanFootprint, VulkanTiles, blocks};
