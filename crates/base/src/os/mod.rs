//! The operating system, in functions and types that every system can offer.
//!
//! No other room names the interfaces of one system (`std::os`, `libc`, `rustix`, `signal_hook`,
//! `windows_sys`), except `npu`, whose driver exists on Linux only. A system is one folder, `unix`
//! or `windows`, with the same modules:
//!
//! - `files`: positioned reads, locks, private directories, file identity, free space;
//! - `machine`: processor, memory and load;
//! - `memory`: huge pages, release of mapped pages;
//! - `process`: limits and ends of processes;
//! - `signals`: interrupts, failed writes;
//! - `sockets`: sockets with a path;
//! - `terminal`: echo, and the modes that a terminal is left with;
//! - `crash`: ends of the process that no code returns from;
//! - `places`: directories of the user.
//!
//! The files beside the folders hold the types that all systems share.

mod allocator;
mod exit;
mod identity;
pub mod remedies;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub use unix::*;
#[cfg(windows)]
pub use windows::*;
