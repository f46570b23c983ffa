//! Windows.

pub mod crash;
pub mod files;
#[cfg(target_env = "gnu")]
mod fmaf;
pub mod machine;
pub mod memory;
mod owner;
pub mod places;
pub mod process;
pub mod signals;
pub mod sockets;
pub mod terminal;

/// Converts the result of a call that returns zero on failure.
fn checked(result: i32) -> std::io::Result<()> {
    if result == 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Encodes a text for the system: UTF-16 with a terminating zero.
fn wide(text: impl AsRef<std::ffi::OsStr>) -> Vec<u16> {
    use std::os::windows::ffi::OsStrExt;
    text.as_ref().encode_wide().chain([0]).collect()
}
