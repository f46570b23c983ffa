//! Memory and disk.

use super::Check;
use super::host::Machine;
use crate::util::units::bytes;

/// What Gemma 3 27B at the smallest built-in recipe takes at a context of a few thousand positions:
/// 9 GB of weights, 1.3 of keys, values and activations.
pub const SMALLEST_27B: u64 = 10_300_000_000;
/// Room that a directory should have: what drafts learn of a target is at most 12 MB, a device's
/// kernels a few.
const ROOM: u64 = 100_000_000;

pub fn memory(machine: &dyn Machine) -> Check {
    let (Some(total), Some(free)) = (machine.memory("MemTotal"), machine.memory("MemAvailable"))
    else {
        return Check::warn(
            "memory",
            "unknown: /proc/meminfo cannot be read",
            "mount /proc (containers: --security-opt systempaths=unconfined)",
        );
    };
    let found = format!("{}, {} of it available", bytes(total), bytes(free));
    let need = bytes(SMALLEST_27B);
    match (total >= SMALLEST_27B, free >= SMALLEST_27B) {
        (true, true) => Check::pass("memory", found),
        (true, false) => Check::warn(
            "memory",
            found,
            format!(
                "Gemma 3 27B at 9 GB takes {need}: close other programs (who holds most: below); \
                    smaller models may fit as it is"
            ),
        )
        .typing(["ps -eo rss,comm --sort=-rss | head"]),
        (false, _) => Check::warn(
            "memory",
            found,
            format!(
                "too little for Gemma 3 27B, which takes {need} at 9 GB: take a smaller model; \
                which ones fit:"
            ),
        )
        .typing(["gemma plan"]),
    }
}

/// Whether other programs lie in swap: weights that follow them there make each token take seconds.
pub fn swap(machine: &dyn Machine) -> Option<Check> {
    let of = |field: &str| machine.memory(field);
    let (total, all, free) = (of("MemTotal")?, of("SwapTotal")?, of("SwapFree")?);
    let used = all.saturating_sub(free);
    if all == 0 {
        return Some(Check::pass(
            "swap",
            "none: a model that does not fit is refused before it is loaded",
        ));
    }
    let found = format!("{} of {} in use", bytes(used), bytes(all));
    if used < total / 4 {
        return Some(Check::pass("swap", found));
    }
    let remedy = "memory was short: programs that come back from there take it again, and weights \
                  that go there make each token take seconds. Close what is not needed; who lies \
                  there:";
    let command = "grep -H VmSwap /proc/[0-9]*/status | sort -k2 -n | tail";
    Some(Check::warn("swap", found, remedy).typing([command]))
}

/// Places for what is kept between runs.
pub fn directories(machine: &dyn Machine) -> Vec<Check> {
    machine
        .directories()
        .into_iter()
        .map(|directory| {
            let (purpose, without) = (directory.purpose, directory.without);
            let Some(path) = directory.path else {
                return Check::warn(
                    "disk",
                    format!("no place for {purpose}: HOME is not set"),
                    without,
                )
                .typing(["export HOME=/path/of/yours"]);
            };
            let shown = path.display();
            match machine.room(&path) {
                Err(e) => Check::warn("disk", format!("{shown} ({purpose}): {e}"), without),
                Ok((_, false)) => Check::warn(
                    "disk",
                    format!("{shown} ({purpose}) cannot be written"),
                    format!("{without}; to give it to you:"),
                )
                .typing([format!("sudo install -d -o \"$USER\" '{shown}'")]),
                Ok((free, true)) if free < ROOM => {
                    let remedy =
                        format!("{without}; make room ({} or more): what takes it:", bytes(ROOM));
                    Check::warn(
                        "disk",
                        format!("{shown} ({purpose}): only {} free", bytes(free)),
                        remedy,
                    )
                    .typing([format!("du -xh --max-depth=2 '{shown}' | sort -h | tail")])
                }
                Ok((free, true)) => {
                    let (files, size) = machine.contents(&path);
                    let free = format!("{} free", bytes(free));
                    let Some(private) = directory.private.filter(|_| files > 0) else {
                        return Check::pass("disk", format!("{shown} ({purpose}): {free}"));
                    };
                    let held = format!(
                        "{} in {files} file{}",
                        bytes(size),
                        if files == 1 { "" } else { "s" }
                    );
                    let found =
                        format!("{shown} ({purpose}): {held}, {free}; {private}. To clear it:");
                    Check::pass("disk", found).typing([format!("rm -r '{shown}'")])
                }
            }
        })
        .collect()
}
