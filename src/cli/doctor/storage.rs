//! Memory and disk.

use super::Check;
use super::host::Machine;
use crate::cli::ui::bytes;

/// What Gemma 3 27B at the smallest built-in recipe takes at a context of a few thousand positions: 9 GB of weights, 1.3 of keys, values
/// and activations.
pub const SMALLEST_27B: u64 = 10_300_000_000;
/// Room that a directory should have: what drafts learn of a target is at most 12 MB, a device's kernels a few.
const ROOM: u64 = 100_000_000;

pub fn memory(machine: &dyn Machine) -> Check {
    let (Some(total), Some(free)) = (machine.memory("MemTotal"), machine.memory("MemAvailable")) else {
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
                "Gemma 3 27B at 9 GB takes {need}: close other programs (who holds most: below); smaller models may fit as it is"
            ),
        )
        .typing(["ps -eo rss,comm --sort=-rss | head"]),
        (false, _) => Check::warn(
            "memory",
            found,
            format!("too little for Gemma 3 27B, which takes {need} at 9 GB: take a smaller model; gemma plan says what fits"),
        )
        .typing(["gemma plan --synthetic 12b --format-weights i4-g32"]),
    }
}

/// Places for what is kept between runs.
pub fn directories(machine: &dyn Machine) -> Vec<Check> {
    machine
        .directories()
        .into_iter()
        .map(|directory| {
            let (purpose, without) = (directory.purpose, directory.without);
            let Some(path) = directory.path else {
                return Check::warn("disk", format!("no place for {purpose}: HOME is not set"), without)
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
                    let remedy = format!("{without}; make room ({} or more): what takes it:", bytes(ROOM));
                    Check::warn("disk", format!("{shown} ({purpose}): only {} free", bytes(free)), remedy)
                        .typing([format!("du -xh --max-depth=2 '{shown}' | sort -h | tail")])
                }
                Ok((free, true)) => Check::pass("disk", format!("{shown} ({purpose}): {} free", bytes(free))),
            }
        })
        .collect()
}
