//! Floor 2: the Vulkan executor. Knows plans and formats, no model. The only room that speaks ash.
//!
//! A [`crate::compute::Plan`] becomes kernel calls (`call`), recorded once for each bucket of rows and pages (`executor`); what varies
//! from pass to pass is in the step buffer. Kernels are committed SPIR-V, specialised when first used (`pipeline`).

mod call;
pub mod device;
mod executor;
mod layout;
mod memory;
mod pipeline;
mod push;
mod queue;
mod timing;
mod upload;

pub use device::{ALLOW_CPU_DRIVER, Choice, DeviceInfo, MEMORY, Vulkan, choose};
pub use executor::VulkanExecutor;
pub use queue::LOSE_AFTER;
