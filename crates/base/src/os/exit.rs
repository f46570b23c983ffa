//! Reasons for the end of a child process, and crashes of this process.

use std::sync::OnceLock;

/// Reason for a process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The process ended by itself, with this code.
    Code(i32),
    /// It used up its processor time.
    ProcessorTime,
    /// It accessed unmapped memory, or aborted because an allocation was refused.
    Memory,
    /// Another fault of its own, such as an illegal instruction.
    Fault,
    /// Another process or the system ended it.
    Outside,
}

/// Reason for an end of this process without a return from `main`.
pub enum Crash {
    /// A page of a mapped file could not be read. Holds the file's name if the system reports it.
    Unreadable(Option<String>),
    /// An allocation was refused.
    OutOfMemory,
}

/// Function that reports a crash to standard error with [`say`](super::crash::say) and returns the
/// exit code. It must not allocate after an allocation was refused.
pub type CrashReport = fn(&Crash) -> u8;

/// Crash report of this process; unset in children and tests.
pub(super) static REPORT: OnceLock<CrashReport> = OnceLock::new();

/// Reports a crash and returns the exit code.
pub(super) fn report(crash: &Crash) -> u8 {
    REPORT.get().map_or(1, |report| report(crash))
}
