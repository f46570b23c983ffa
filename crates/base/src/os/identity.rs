//! Identity and time stamps of files, which each system reads differently.

use serde::{Deserialize, Serialize};

/// Length, times and identity of an open file.
///
/// Equal stamps mean equal content, since no program can set an inode's change time. The stamp of a
/// file inside the binary has a length only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub(super) bytes: u64,
    /// Modification time: seconds and nanoseconds since 1970. On Windows the seconds are zero, and
    /// the second number counts units of 100 ns since 1601.
    pub(super) modified: (i64, i64),
    /// Change time of the inode.
    pub(super) changed: (i64, i64),
    pub(super) inode: u64,
    pub(super) device: u64,
}

impl Stamp {
    /// Clears the device number, which may change when the machine restarts.
    pub fn on_any_device(self) -> Stamp {
        Stamp { device: 0, ..self }
    }

    /// Returns the stamp of `bytes` bytes in memory.
    pub fn of_bytes(bytes: u64) -> Stamp {
        Stamp { bytes, ..Stamp::default() }
    }
}

/// Error for opening a device, pipe or directory where a regular file is required.
pub const NOT_REGULAR: &str = "it is not a regular file";

/// Identity of a regular file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    pub(super) device: u64,
    pub(super) inode: u64,
}
