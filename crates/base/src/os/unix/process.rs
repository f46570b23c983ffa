//! Processes: limits and exit reasons.

pub use crate::os::exit::Exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{ChildStdout, Command, ExitStatus};
use std::time::Duration;

/// Returns a path to the running program, even after its file was replaced.
pub fn own_program() -> Option<PathBuf> {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { Some(link) } else { std::env::current_exe().ok() }
}

/// Prevents Ctrl-C at a terminal from reaching a child, since the parent handles it.
pub fn shield_from_terminal(child: &mut Command) {
    child.process_group(0);
}

impl Exit {
    /// Returns the reason for a process's end.
    pub fn of_status(status: ExitStatus) -> Exit {
        match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (_, Some(libc::SIGPROF | libc::SIGXCPU)) => Exit::ProcessorTime,
            (_, Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS)) => Exit::Memory,
            (_, Some(libc::SIGFPE | libc::SIGILL | libc::SIGSYS | libc::SIGTRAP)) => Exit::Fault,
            _ => Exit::Outside,
        }
    }
}

/// Describes a process's end in words that follow the process's name.
pub fn describe_exit(status: ExitStatus) -> String {
    let signal = status.signal().unwrap_or(0);
    match Exit::of_status(status) {
        Exit::Code(code) => format!("failed with exit code {code}"),
        Exit::Memory | Exit::Fault => format!("was ended by signal {signal}"),
        Exit::ProcessorTime | Exit::Outside => format!("was stopped by signal {signal}"),
    }
}

/// Waits for output of a child, or for its end. Returns `false` if neither came within `limit`,
/// which is below a second.
pub fn wait_for_output(output: &ChildStdout, limit: Duration) -> bool {
    let timeout = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    let mut waiting = [PollFd::new(output, PollFlags::IN)];
    // A read reports the cause if `poll` failed.
    poll(&mut waiting, Some(&timeout)).map_or(true, |ready| ready > 0)
}

/// Limits the address space of this process to `more` bytes beyond its present size.
///
/// Also disables core dumps. Returns whether the limit is set.
pub fn limit_memory(more: u64) -> bool {
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let Some(now) = address_space() else { return false };
    let most = getrlimit(Resource::As).maximum.unwrap_or(u64::MAX).min(now + more);
    setrlimit(Resource::As, Rlimit { current: Some(most), maximum: Some(most) }).is_ok()
}

/// Returns the bytes of address space that this process has.
fn address_space() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').next()?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64).filter(|bytes| *bytes > 0)
}

/// Sets a limit of `more` processor time, after which this process ends; zero removes the limit.
/// Returns whether the limit is set.
pub fn limit_processor_time(more: Duration) -> bool {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let value = libc::timeval {
        tv_sec: more.as_secs() as i64,
        tv_usec: more.subsec_micros() as libc::suseconds_t,
    };
    let timer = libc::itimerval { it_interval: none, it_value: value };
    // SAFETY: a plain system call on local values.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) == 0 }
}

/// Returns the processor time that this thread has used.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Gives the calling thread the lowest priority, if the system has thread priorities.
pub fn give_way() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 19);
}

/// Raises this process's limit on open files and connections to the system's maximum.
pub fn raise_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Returns the bytes of memory that this process may lock; `u64::MAX` without a limit.
pub fn lockable_memory() -> u64 {
    getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX)
}
