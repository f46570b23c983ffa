//! Processes: limits and exit reasons.

use super::checked;
use crate::os::allocator;
pub use crate::os::exit::Exit;
use std::os::windows::io::AsRawHandle;
use std::os::windows::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdout, Command, ExitStatus};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use windows_sys::Win32::Foundation::{
    ERROR_NOT_ENOUGH_QUOTA, FILETIME, HANDLE, STATUS_ACCESS_VIOLATION, STATUS_CONTROL_C_EXIT,
    STATUS_HEAP_CORRUPTION, STATUS_IN_PAGE_ERROR, STATUS_NO_MEMORY, STATUS_STACK_BUFFER_OVERRUN,
    STATUS_STACK_OVERFLOW,
};
use windows_sys::Win32::System::Pipes::PeekNamedPipe;
use windows_sys::Win32::System::Threading::{
    CREATE_NEW_PROCESS_GROUP, GetCurrentProcess, GetCurrentThread, GetProcessTimes, GetThreadTimes,
    SetThreadPriority, THREAD_PRIORITY_LOWEST, TerminateProcess,
};

/// Polling interval for output and processor time.
const LOOK: Duration = Duration::from_millis(1);

/// Returns a path to the running program. Its file cannot be replaced while it runs.
pub fn own_program() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// Prevents Ctrl-C at a terminal from reaching a child, since the parent handles it.
pub fn shield_from_terminal(child: &mut Command) {
    child.creation_flags(CREATE_NEW_PROCESS_GROUP);
}

impl Exit {
    /// Returns the reason for a process's end.
    ///
    /// The exit code of a process ended by a fault is the exception's number. Rust's abort uses the
    /// number of a buffer overrun.
    pub fn of_status(status: ExitStatus) -> Exit {
        let code = status.code().unwrap_or_default();
        // The highest digit of an exception number with severity error.
        let is_exception = code as u32 >> 28 == 0xC;
        match code {
            _ if code as u32 == ERROR_NOT_ENOUGH_QUOTA => Exit::ProcessorTime,
            STATUS_CONTROL_C_EXIT => Exit::Outside,
            STATUS_ACCESS_VIOLATION
            | STATUS_HEAP_CORRUPTION
            | STATUS_IN_PAGE_ERROR
            | STATUS_NO_MEMORY
            | STATUS_STACK_BUFFER_OVERRUN
            | STATUS_STACK_OVERFLOW => Exit::Memory,
            _ if is_exception => Exit::Fault,
            code => Exit::Code(code),
        }
    }
}

/// Describes a process's end in words that follow the process's name.
pub fn describe_exit(status: ExitStatus) -> String {
    let code = status.code().unwrap_or_default();
    match Exit::of_status(status) {
        Exit::Code(code) => format!("failed with exit code {code}"),
        Exit::Memory | Exit::Fault => format!("was ended by exception {code:#010X}"),
        Exit::ProcessorTime | Exit::Outside => format!("was stopped with exit code {code:#010X}"),
    }
}

/// Ends this process at once, without destructors and exit handlers.
pub fn end(code: u32) -> ! {
    // SAFETY: the pseudo handle is always valid.
    unsafe { TerminateProcess(GetCurrentProcess(), code) };
    unreachable!("the call above does not return for this process")
}

/// Waits for output of a child, or for its end. Returns `false` if neither came within `limit`,
/// which is below a second.
pub fn wait_for_output(output: &ChildStdout, limit: Duration) -> bool {
    let start = Instant::now();
    loop {
        let (none, mut bytes) = (null_mut(), 0);
        // SAFETY: the handle is that of an open pipe, and the call writes to `bytes` only.
        let looked =
            unsafe { PeekNamedPipe(output.as_raw_handle(), null_mut(), 0, none, &mut bytes, none) };
        // A read reports the cause of an error.
        if looked == 0 || bytes > 0 {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// Limits this process's allocations to `more` bytes beyond its present size. Returns whether the
/// limit is set.
pub fn limit_memory(more: u64) -> bool {
    allocator::limit(more);
    true
}

/// Sets a limit of `more` processor time, after which this process ends; zero removes the limit.
/// Returns whether the limit is set.
pub fn limit_processor_time(more: Duration) -> bool {
    /// Processor time in nanoseconds at which the process ends.
    static END: AtomicU64 = AtomicU64::new(u64::MAX);
    static WATCH: OnceLock<bool> = OnceLock::new();
    let end = if more.is_zero() { u64::MAX } else { (process_time() + more).as_nanos() as u64 };
    END.store(end, Ordering::Relaxed);
    *WATCH.get_or_init(|| {
        let watch = || loop {
            std::thread::sleep(LOOK);
            if process_time().as_nanos() as u64 >= END.load(Ordering::Relaxed) {
                self::end(ERROR_NOT_ENOUGH_QUOTA);
            }
        };
        std::thread::Builder::new().name("time limit".into()).spawn(watch).is_ok()
    })
}

/// A function that writes the times of a thread or a process: creation, end, kernel, user.
type Times = unsafe extern "system" fn(
    HANDLE,
    *mut FILETIME,
    *mut FILETIME,
    *mut FILETIME,
    *mut FILETIME,
) -> i32;

/// Returns the processor time of the thread or process of a handle.
///
/// # Safety
/// `times` accepts this kind of handle, and the handle is valid.
unsafe fn processor_time(times: Times, handle: HANDLE) -> Duration {
    let (mut created, mut ended) = (FILETIME::default(), FILETIME::default());
    let (mut kernel, mut user) = (FILETIME::default(), FILETIME::default());
    // SAFETY: the caller upholds this function's contract; the call writes to the four structures.
    let told = unsafe { times(handle, &mut created, &mut ended, &mut kernel, &mut user) };
    // In units of 100 ns.
    let units =
        |time: FILETIME| u64::from(time.dwHighDateTime) << 32 | u64::from(time.dwLowDateTime);
    checked(told)
        .map_or(Duration::ZERO, |()| Duration::from_nanos(100 * (units(kernel) + units(user))))
}

/// Returns the processor time that this process has used.
fn process_time() -> Duration {
    // SAFETY: the pseudo handle is that of this process.
    unsafe { processor_time(GetProcessTimes, GetCurrentProcess()) }
}

/// Returns the processor time that this thread has used.
pub fn thread_time() -> Duration {
    // SAFETY: the pseudo handle is that of this thread.
    unsafe { processor_time(GetThreadTimes, GetCurrentThread()) }
}

/// Gives the calling thread a low priority.
pub fn give_way() {
    // SAFETY: the pseudo handle is that of this thread.
    unsafe { SetThreadPriority(GetCurrentThread(), THREAD_PRIORITY_LOWEST) };
}

/// Does nothing: Windows has no such limit.
pub fn raise_open_files() {}

/// Returns the bytes of memory that this process may lock; `u64::MAX` without a limit.
pub fn lockable_memory() -> u64 {
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::windows::process::ExitStatusExt;

    #[test]
    fn exceptions_are_told_from_exit_codes() {
        let end = |code: u32| {
            let status = ExitStatus::from_raw(code);
            (Exit::of_status(status), describe_exit(status))
        };
        assert_eq!(end(4), (Exit::Code(4), "failed with exit code 4".into()));
        let words = |code: &str| format!("was ended by exception {code}");
        assert_eq!(end(0xC000_0005), (Exit::Memory, words("0xC0000005")));
        assert_eq!(end(0xC000_0409).0, Exit::Memory);
        assert_eq!(end(0xC000_001D), (Exit::Fault, words("0xC000001D")));
        assert_eq!(end(u32::MAX).0, Exit::Code(-1));
        assert_eq!(end(0xC000_013A).0, Exit::Outside);
        assert_eq!(end(ERROR_NOT_ENOUGH_QUOTA).0, Exit::ProcessorTime);
    }
}
