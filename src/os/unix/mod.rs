//! Linux and the other Unix systems.

pub mod crash;
pub mod files;
pub mod machine;
pub mod memory;
pub mod process;
pub mod signals;
pub mod terminal;
