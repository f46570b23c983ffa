//! Faults that tests inject by environment variables. They exist only with the feature `testing`,
//! which the package enables in its own dev-dependencies.
//!
//! [`FAIL`] makes numbered calls to the system or a GPU fail. Calls are counted where they leave
//! the program: `os::faults` replaces C library functions, and the allocator and the Vulkan queue
//! call [`fails`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes calls fail: a kind and numbers, as in `write@3`. See [`FaultPlan`].
pub const FAIL: &str = "GEMMA_FAIL_CALL";
/// Names a file of [`KINDS`] counters of eight bytes. All processes of a run count in it together,
/// and a test reads it afterwards. Without it, each process counts alone.
pub const FAIL_COUNTS: &str = "GEMMA_FAIL_COUNTS";
/// Makes a kernel's result wrong: the four numbers of an `InjectedFault` of `vulkan`.
pub const WRONG_RESULT: &str = "GEMMA_VULKAN_FAULT";
/// Disables the kernels `linear_few` and `linear_many`, to measure their gain.
pub const GENERAL_KERNELS: &str = "GEMMA_VULKAN_GENERAL_KERNELS";
/// Makes commands of the NPU's software model fail: a kind and the first command, as in `abort@3`,
/// see `NpuFault` of `npu::host`.
pub const NPU_FAULT: &str = "GEMMA_FAIL_NPU";
/// Makes the child process that probes a driver die (`abort`), die when it queries matrix shapes
/// (`abort-whole`), fail (`fail`) or hang (`hang`).
pub const TRIAL: &str = "GEMMA_VULKAN_TRIAL";
/// Time limit of that child in seconds.
pub const PATIENCE: &str = "GEMMA_VULKAN_PATIENCE";
/// Makes the kernel with this label, such as `qkv`, skip the last part of its work.
pub const CUT_WORK: &str = "GEMMA_CUT_WORK";
/// Shuffles the workgroups of kernels with this seed.
pub const SHUFFLE: &str = "GEMMA_VULKAN_SHUFFLE";
/// Disables memory barriers.
pub const NO_BARRIERS: &str = "GEMMA_VULKAN_NO_BARRIERS";

/// Returns the value of one of these variables.
pub fn fault(variable: &str) -> Option<String> {
    if cfg!(feature = "testing") { std::env::var(variable).ok() } else { None }
}

/// A call that can fail on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// An allocation of at least a page, since the system refuses whole pages.
    Alloc,
    Open,
    Read,
    /// A write to anything but standard error.
    Write,
    /// A write to standard error.
    Message,
    Sync,
    Rename,
    /// A mapping of a file.
    Map,
    /// A page of a mapped file: reading it raises SIGBUS, as a failing disk does.
    Page,
    /// A submission to a GPU.
    Submit,
    /// A wait for the end of a submission.
    Fence,
}

/// Number of kinds of [`Point`].
pub const KINDS: usize = 11;

impl Point {
    /// All kinds with their names, in the order of the counters.
    pub const ALL: [(Point, &str); KINDS] = [
        (Point::Alloc, "alloc"),
        (Point::Open, "open"),
        (Point::Read, "read"),
        (Point::Write, "write"),
        (Point::Message, "message"),
        (Point::Sync, "sync"),
        (Point::Rename, "rename"),
        (Point::Map, "map"),
        (Point::Page, "page"),
        (Point::Submit, "submit"),
        (Point::Fence, "fence"),
    ];
}

/// Smallest allocation that counts as [`Point::Alloc`].
pub const PAGE: usize = 4096;

/// Calls that fail: `KIND@GAP[,GAP...]`, then nothing, `+`, `*` or `!`.
///
/// `write@3` is the third write; `submit@60,9` is the 60th submission and the ninth after it. After
/// the last gap no further call fails. With `+` every further call fails, with `*` the last gap
/// repeats. With `!` the call kills the process, like `kill -9`.
#[derive(Debug, PartialEq, Eq)]
pub struct FaultPlan {
    point: Point,
    gaps: Vec<u64>,
    then: Then,
}

#[derive(Debug, PartialEq, Eq)]
enum Then {
    Nothing,
    All,
    Repeat,
    Kill,
}

impl FaultPlan {
    fn parse(text: &str) -> Option<FaultPlan> {
        let (kind, numbers) = text.split_once('@')?;
        let point = Point::ALL.into_iter().find(|(_, name)| *name == kind)?.0;
        let (numbers, then) = [('+', Then::All), ('*', Then::Repeat), ('!', Then::Kill)]
            .into_iter()
            .find_map(|(suffix, then)| Some((numbers.strip_suffix(suffix)?, then)))
            .unwrap_or((numbers, Then::Nothing));
        let gaps = numbers.split(',').map(|gap| gap.parse().ok().filter(|gap| *gap > 0));
        Some(FaultPlan { point, gaps: gaps.collect::<Option<_>>()?, then })
    }

    /// Returns the first of the calls `first..first + count` that fails, counted from 1.
    fn first_failure(&self, first: u64, count: u64) -> Option<u64> {
        let calls = first..first + count;
        let mut failure = 0;
        for gap in &self.gaps {
            failure += gap;
            if calls.contains(&failure) {
                return Some(failure);
            }
        }
        let next = match self.then {
            Then::Nothing | Then::Kill => return None,
            Then::All => first.max(failure),
            Then::Repeat => {
                let gap = self.gaps[self.gaps.len() - 1];
                failure + first.saturating_sub(failure).div_ceil(gap) * gap
            }
        };
        calls.contains(&next).then_some(next)
    }
}

/// Faults that [`prepare`] read from the environment.
struct Faults {
    plan: Option<FaultPlan>,
    counts: &'static [AtomicU64; KINDS],
}

static FAULTS: OnceLock<Faults> = OnceLock::new();
static COUNTS: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];

/// Reads [`FAIL`] and [`FAIL_COUNTS`]. Earlier calls are not counted.
pub fn prepare() {
    if !cfg!(feature = "testing") {
        return;
    }
    let plan = fault(FAIL).map(|text| {
        FaultPlan::parse(&text).unwrap_or_else(|| panic!("{FAIL}={text}: KIND@GAP[,GAP...][+|*|!]"))
    });
    let counts = fault(FAIL_COUNTS).map_or(&COUNTS, |path| shared_counts(&path));
    let _ = FAULTS.set(Faults { plan, counts });
}

/// Maps the file of counters for the rest of the process.
fn shared_counts(path: &str) -> &'static [AtomicU64; KINDS] {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 8 * KINDS as u64, "{path}");
    // SAFETY: the test that created the file reads it only after this process, and never shortens
    // it.
    let map = Box::leak(Box::new(unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap()));
    // SAFETY: the map has the size of the array, starts at a page, and is never unmapped. Any bits
    // are valid counters.
    unsafe { &*map.as_ptr().cast() }
}

/// Counts a call and returns whether it must fail. Does not allocate or lock.
#[inline]
pub fn fails(point: Point) -> bool {
    first_failure(point, 1).is_some()
}

/// Counts `count` calls and returns the index, from 0, of the first that must fail.
#[inline]
pub fn first_failure(point: Point, count: u64) -> Option<u64> {
    if !cfg!(feature = "testing") {
        return None;
    }
    let faults = FAULTS.get()?;
    let before = faults.counts[point as usize].fetch_add(count, Ordering::Relaxed);
    let plan = faults.plan.as_ref().filter(|plan| plan.point == point)?;
    Some(plan.first_failure(before + 1, count)? - before - 1)
}

/// Returns whether a failing call kills the process instead of returning an error.
pub fn is_deadly() -> bool {
    let plan = FAULTS.get().and_then(|faults| faults.plan.as_ref());
    plan.is_some_and(|plan| plan.then == Then::Kill)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the failing calls of the first 20, computed one by one and from longer ranges.
    fn failures(plan: &str) -> Vec<u64> {
        let plan = FaultPlan::parse(plan).unwrap();
        let one_by_one: Vec<_> = (1..=20).filter(|n| plan.first_failure(*n, 1).is_some()).collect();
        for first in 1..=20 {
            let expected = one_by_one.iter().find(|n| **n >= first).copied();
            assert_eq!(plan.first_failure(first, 21 - first), expected, "{plan:?} from {first}");
        }
        one_by_one
    }

    #[test]
    fn plans_name_calls() {
        assert_eq!(failures("write@3"), [3]);
        assert_eq!(failures("submit@6,9"), [6, 15]);
        assert_eq!(failures("read@17+"), [17, 18, 19, 20]);
        assert_eq!(failures("fence@2,5*"), [2, 7, 12, 17]);
        assert_eq!(failures("sync@4!"), [4]);
        for wrong in ["write", "write@", "write@0", "write@1,", "wrote@1", "write@-1", "write@1-"] {
            assert_eq!(FaultPlan::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn kinds_stand_in_the_order_of_their_counters() {
        for (i, (point, _)) in Point::ALL.into_iter().enumerate() {
            assert_eq!(point as usize, i);
        }
    }
}
