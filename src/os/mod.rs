//! The operating system, in functions and types that every system can offer.
//!
//! No other room names the interfaces of one system (`std::os`, `libc`, `rustix`, `signal_hook`),
//! except `npu`, whose driver exists on Linux only. A port is one more folder beside `unix` with
//! the same modules:
//!
//! - `files`: positioned reads, private files and directories, file identity, free space;
//! - `machine`: processor, memory and load;
//! - `memory`: huge pages, release of mapped pages;
//! - `process`: limits and ends of processes;
//! - `signals`: interrupts, failed writes;
//! - `terminal`: echo, and the modes that a terminal is left with;
//! - `crash`: ends of the process that no code returns from.
//!
//! Beside them, `cpuinfo` reads text that tests can make up.

pub mod cpuinfo;
#[cfg(unix)]
mod unix;
#[cfg(unix)]
pub use unix::*;
