//! Interface of an accelerator device, in the terms of the driver: buffers, contexts, commands.
//!
//! [`super::raw::RawAccel`] implements it with the driver, and [`super::host::HostModelAccel`] with
//! a model of the device. All other code is the same for both.

use super::uapi::{AieMetadata, FirmwareVersion};
use std::fmt;
use std::time::Duration;

/// An error number of the system, and the action that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errno {
    pub code: i32,
    pub what: &'static str,
}

impl Errno {
    pub const fn new(code: i32, what: &'static str) -> Errno {
        Errno { code, what }
    }

    /// Returns a remedy, if one is known.
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
                Some("the amdxdna driver is too old: use Linux 6.14 or newer")
            }
            libc::ENOSPC | libc::EBUSY => {
                Some("other programs use all contexts of the NPU: end them")
            }
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

/// Purpose of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BoKind {
    /// Address space that contains all device buffers. A process has one heap, created before all
    /// other buffers.
    Heap,
    /// Images and instruction streams, in the heap.
    Device,
    /// Data that both host and device read and write.
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
    /// Address in the device's address space.
    pub address: u64,
}

/// Size of the heap in bytes, which is also its alignment.
pub const HEAP_BYTES: usize = 64 << 20;

/// Direction in which memory is made coherent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    ToDevice,
    FromDevice,
}

/// Properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub metadata: AieMetadata,
    pub firmware: FirmwareVersion,
}

/// An open device. It does not track buffers and contexts: their owners must destroy them.
pub trait Accel: Send {
    /// Returns a name for messages, such as `host model` or `/dev/accel/accel0`.
    fn describe(&self) -> String;
    /// Returns whether this is a device and not a model of one.
    fn is_real_device(&self) -> bool;
    fn info(&mut self) -> Outcome<Info>;
    fn create_bo(&mut self, kind: BoKind, bytes: usize) -> Outcome<Bo>;
    fn close_bo(&mut self, bo: Bo);
    /// Returns the host's memory of a buffer.
    fn bytes(&mut self, bo: &Bo) -> &mut [u8];
    fn sync(&mut self, bo: &Bo, direction: Sync, offset: usize, bytes: usize) -> Outcome<()>;
    /// Creates a context of `tiles` tiles. Returns its handle.
    fn create_context(&mut self, tiles: u32) -> Outcome<u32>;
    fn configure(&mut self, context: u32, image: &Bo, function: u8) -> Outcome<()>;
    fn destroy_context(&mut self, context: u32);
    /// Submits a command. Returns its number for [`Accel::wait`].
    fn execute(&mut self, context: u32, command: &Bo, buffers: &[u32]) -> Outcome<u64>;
    /// Waits at most `limit` until a command has ended, in any state.
    fn wait(&mut self, context: u32, number: u64, limit: Duration) -> Outcome<()>;
}
