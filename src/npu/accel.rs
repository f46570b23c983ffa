//! What an accelerator device offers, in the terms of the driver: buffers, contexts, commands.
//! [`super::raw::RawAccel`] is the driver, [`super::host::HostModelAccel`] a model of it;
//! everything above is the same for both.

use super::uapi::{AieMetadata, FirmwareVersion};
use std::fmt;
use std::time::Duration;

/// An error number of the system, and what was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errno {
    pub code: i32,
    pub what: &'static str,
}

impl Errno {
    pub const fn new(code: i32, what: &'static str) -> Errno {
        Errno { code, what }
    }

    /// What may help, where something does.
    pub fn remedy(&self) -> Option<&'static str> {
        match self.code {
            libc::ENOMEM | libc::EAGAIN => {
                Some("raise the limit on locked memory (ulimit -l unlimited)")
            }
            libc::EACCES | libc::EPERM => Some(
                "add yourself to the group that owns /dev/accel (often render) and log in again",
            ),
            libc::ENODEV | libc::ENXIO => {
                Some("the device is gone: reload the amdxdna driver or restart the machine")
            }
            libc::ENOTTY | libc::EOPNOTSUPP => {
                Some("the amdxdna driver is too old: Linux 6.14 or newer has what is needed")
            }
            libc::ENOSPC | libc::EBUSY => Some("other programs hold the NPU's contexts: end them"),
            _ => None,
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, std::io::Error::from_raw_os_error(self.code))
    }
}

impl std::error::Error for Errno {}

pub type Outcome<T> = Result<T, Errno>;

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BoKind {
    /// The memory that device buffers are taken from; one a process, and the first of all.
    Heap,
    /// Images and instruction streams, in the heap.
    Device,
    /// Data that both sides read and write.
    Share,
    /// A command packet.
    Command,
}

/// A buffer object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bo {
    pub handle: u32,
    pub kind: BoKind,
    pub bytes: usize,
    /// As the device sees it.
    pub address: u64,
}

/// Most bytes of the heap, and its alignment.
pub const HEAP_BYTES: usize = 64 << 20;

/// Which way memory is made coherent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    ToDevice,
    FromDevice,
}

/// What a device says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub metadata: AieMetadata,
    pub firmware: FirmwareVersion,
}

/// An open device. Whatever is created is destroyed by its owner; [`Accel`] itself keeps count of
/// nothing.
pub trait Accel: Send {
    /// Such as `host model` or `/dev/accel/accel0`.
    fn describe(&self) -> String;
    /// Whether this is a device and not a model of one.
    fn is_real_device(&self) -> bool;
    fn info(&mut self) -> Outcome<Info>;
    fn create_bo(&mut self, kind: BoKind, bytes: usize) -> Outcome<Bo>;
    fn close_bo(&mut self, bo: Bo);
    /// The host's view of a buffer.
    fn bytes(&mut self, bo: &Bo) -> &mut [u8];
    fn sync(&mut self, bo: &Bo, direction: Sync, offset: usize, bytes: usize) -> Outcome<()>;
    /// A context of so many tiles; returns its handle.
    fn create_context(&mut self, tiles: u32) -> Outcome<u32>;
    fn configure(&mut self, context: u32, image: &Bo, function: u8) -> Outcome<()>;
    fn destroy_context(&mut self, context: u32);
    /// Hands a command to the device; returns its number, to be waited for.
    fn execute(&mut self, context: u32, command: &Bo, buffers: &[u32]) -> Outcome<u64>;
    /// Waits for a command to end, however it ends, and no longer than `limit`.
    fn wait(&mut self, context: u32, number: u64, limit: Duration) -> Outcome<()>;
}
