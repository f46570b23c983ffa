//! Identity and state of files, which each system reads in its own way.

use serde::{Deserialize, Serialize};

/// Length, times and identity of an open file. Equal stamps mean equal bytes: no program can set
/// the time at which an inode changed. A file inside the binary has a length only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub(super) bytes: u64,
    /// Time when the content changed: seconds since 1970, and nanoseconds. On Windows, seconds are
    /// zero and the number counts 100 ns since 1601.
    pub(super) modified: (i64, i64),
    /// Time when the inode changed.
    pub(super) changed: (i64, i64),
    pub(super) inode: u64,
    pub(super) device: u64,
}

impl Stamp {
    /// Leaves out the number of the device, which may change when the machine starts again.
    pub fn on_any_device(self) -> Stamp {
        Stamp { device: 0, ..self }
    }

    /// Returns the stamp of so many bytes in memory.
    pub fn of_bytes(bytes: u64) -> Stamp {
        Stamp { bytes, ..Stamp::default() }
    }
}

/// Error of opening anything but a regular file where one is needed.
pub const NOT_REGULAR: &str = "it is not a regular file";

/// Identity of a regular file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    pub(super) device: u64,
    pub(super) inode: u64,
}
