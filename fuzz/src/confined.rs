//! Runs work in a copy of the process, under the limits that the program's child has for this work.
//!
//! The program runs foreign grammars and templates in a child, because they may need unlimited
//! memory and time. The copy ends in the same ways. Its coverage counters are copied back for
//! libFuzzer.

use gemma::os::process::{Exit, limit_processor_time};
use gemma::util::child::{self, ChildLimits};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::LazyLock;
use std::time::Duration;

/// Limit of processor time. Slower inputs are not kept, since other inputs would be made from them.
const LONGEST: Duration = Duration::from_millis(100);

// The linker defines both ends of the compiler's counters.
unsafe extern "C" {
    static mut __start___sancov_cntrs: u8;
    static mut __stop___sancov_cntrs: u8;
}

/// Memory that the copy shares with this process: its counters, and how the work ended.
struct Shared(*mut u8);

// SAFETY: one copy runs at a time, and this process waits for it.
unsafe impl Send for Shared {}
// SAFETY: see above.
unsafe impl Sync for Shared {}

static SHARED: LazyLock<Shared> = LazyLock::new(|| {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping without a fixed address.
    let place =
        unsafe { libc::mmap(std::ptr::null_mut(), counters().len() + 1, access, kind, -1, 0) };
    assert!(place != libc::MAP_FAILED, "no memory for the counters");
    Shared(place.cast())
});

fn counters() -> &'static mut [u8] {
    // SAFETY: both symbols bound one array. libFuzzer reads it between two inputs only.
    unsafe {
        let (start, end) = (&raw mut __start___sancov_cntrs, &raw mut __stop___sancov_cntrs);
        std::slice::from_raw_parts_mut(start, end.offset_from(start) as usize)
    }
}

/// Runs `work` in a copy of this process. The work may panic or exceed its limits. Any other end is
/// a failure.
pub fn confined(limits: ChildLimits, time: Duration, work: impl FnOnce() + Send) {
    let shared = SHARED.0;
    // SAFETY: the copy leaves by `_exit`. Its allocator works: libc resets its locks in `fork`.
    let copy = unsafe { libc::fork() };
    assert!(copy >= 0, "no process for the work");
    if copy == 0 {
        quiet();
        limit_processor_time(time);
        let ended = child::confined(limits, work);
        limit_processor_time(Duration::ZERO);
        // SAFETY: the mapping has this size, and the parent waits.
        unsafe {
            let counters = counters();
            shared.copy_from_nonoverlapping(counters.as_ptr(), counters.len());
            shared.add(counters.len()).write((ended == 0).into());
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: all zeros are times.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a plain call with places for its results.
    while unsafe { libc::wait4(copy, &mut status, 0, &mut usage) } != copy {}
    let seconds =
        |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    let taken = seconds(usage.ru_utime) + seconds(usage.ru_stime);
    match Exit::of_status(ExitStatus::from_raw(status)) {
        Exit::ProcessorTime | Exit::Memory => {}
        Exit::Code(0) => {
            let counters = counters();
            // SAFETY: the copy has ended, and it initialised these bytes.
            let (seen, ended) = unsafe {
                let seen = std::slice::from_raw_parts(shared, counters.len());
                (seen, *shared.add(counters.len()))
            };
            // The program reports a panic of a library as an error of the grammar or template.
            if ended == 1 && taken < LONGEST {
                counters.copy_from_slice(seen);
            }
        }
        other => panic!("the work ended by {other:?}"),
    }
}

/// Undoes libFuzzer's setup of the parent, and makes the copy end with its parent.
fn quiet() {
    let signals = [
        libc::SIGABRT,
        libc::SIGALRM,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGINT,
        libc::SIGSEGV,
        libc::SIGTERM,
        libc::SIGXFSZ,
    ];
    // SAFETY: plain calls. The path is a constant.
    unsafe {
        signals.iter().for_each(|signal| _ = libc::signal(*signal, libc::SIG_DFL));
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
        libc::dup2(null, 2);
    }
}
