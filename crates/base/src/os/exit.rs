//! Ends of processes: those of children, and the crashes of this one.

use std::sync::OnceLock;

/// Cause of a process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The process ended by itself, with this code.
    Code(i32),
    /// It used up its processor time.
    ProcessorTime,
    /// It accessed memory that it has not, or gave itself up, as it does where memory is refused.
    Memory,
    /// Another fault of its own, such as an instruction that the processor does not have.
    Fault,
    /// Another process or the system ended it.
    Outside,
}

/// Cause of an end of this process that no code returns from.
pub enum Crash {
    /// A page of a mapped file could not be read. The name is missing where the system does not
    /// tell it.
    Unreadable(Option<String>),
    /// An allocation was refused.
    OutOfMemory,
}

/// Reports a crash to standard error with [`say`](super::crash::say) and returns the exit code. It
/// must not allocate when memory was refused.
pub type CrashReport = fn(&Crash) -> u8;

/// The report of this process; empty in children and tests.
pub(super) static REPORT: OnceLock<CrashReport> = OnceLock::new();

/// Reports a crash and returns the exit code.
pub(super) fn report(crash: &Crash) -> u8 {
    REPORT.get().map_or(1, |report| report(crash))
}
