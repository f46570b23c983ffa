//! Linux and the other Unix systems.

mod cpuinfo;
pub mod crash;
#[cfg(all(feature = "testing", target_os = "linux"))]
mod faults;
pub mod files;
pub mod machine;
pub mod memory;
pub mod places;
pub mod process;
pub mod signals;
pub mod sockets;
pub mod terminal;
