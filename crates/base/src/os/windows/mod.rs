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

/// Returns the result of a call that returns zero where it fails.
fn checked(result: i32) -> std::io::Result<()> {
    if result == 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns a text as the system takes it: UTF-16 that ends with a zero.
fn wide(text: impl AsRef<std::ffi::OsStr>) -> Vec<u16> {
    use std::os::windows::ffi::OsStrExt;
    text.as_ref().encode_wide().chain([0]).collect()
}
