//! The Vulkan executor. Knows plans and formats, no model. The only room that speaks ash.
//!
//! A [`crate::compute::Plan`] becomes kernel calls (`call`), recorded once for each bucket of rows
//! and pages (`executor`); what varies from pass to pass is in the step buffer. Kernels are
//! committed SPIR-V, specialised when first used (`pipeline`).

mod barrier;
mod call;
mod check;
mod choose;
mod compare;
mod cut;
pub mod device;
mod executor;
mod fill;
mod finish;
mod footprint;
mod hazards;
mod kernels;
mod layout;
mod linear;
mod listing;
mod matrix;
mod memory;
mod outputs;
mod pipeline;
mod queue;
mod timing;
mod upload;
pub mod validation;
mod viterbi;

pub use call::Bucket;
pub use check::{CheckedExecutor, InjectedFault};
pub use choose::{Choice, choose, ranked};
pub use cut::LIMIT;
pub use device::{ALLOW_CPU_DRIVER, DeviceInfo, MEMORY, Vulkan};
pub use executor::{MadeUp, VulkanExecutor};
pub use footprint::{STAGING, VulkanFootprint, blocks};
pub use listing::{Listed, Listing};
pub use matrix::{MatrixShape, SHAPE};
pub use pipeline::SHADERS;
pub use viterbi::VulkanTiles;
