//! Operating-system functions and types that every system can provide.
//!
//! Only this module uses interfaces of one system (`std::os`, `libc`, `rustix`, `signal_hook`,
//! `windows_sys`). The exception is `npu`, since its driver exists on Linux only. Each system has
//! one folder, `unix` or `windows`, with the same modules:
//!
//! - `files`: positioned reads, locks, private directories, file identity, free space;
//! - `machine`: processor, memory and load;
//! - `memory`: huge pages, release of mapped pages;
//! - `process`: limits and ends of processes;
//! - `signals`: interrupts, failed writes;
//! - `sockets`: sockets with a path;
//! - `terminal`: echo, and restoring the terminal's modes;
//! - `crash`: reports of crashes that no code returns from;
//! - `places`: directories of the user.
//!
//! The files next to these folders hold the types that all systems share.

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
