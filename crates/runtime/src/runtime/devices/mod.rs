//! Devices of the machine: the processor, backends and their drivers, locks, and the NPU.

pub mod backends;
pub mod driver;
pub mod lock;
pub mod made_up;
pub mod memory_speed;
pub mod npu;
pub mod processor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
