//! Memory, power profile and the cache directory.

use super::Check;
use super::host::Machine;
use crate::util::units::bytes;
use crate::util::xdg;

/// Bytes that Gemma 3 27B takes at the smallest built-in recipe and a context of a few thousand
/// positions: 9 GB of weights, 1.3 GB of keys, values and activations.
pub const SMALLEST_27B: u64 = 10_300_000_000;

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
    if free >= SMALLEST_27B {
        return Check::pass("memory", found);
    }
    if total < SMALLEST_27B {
        let remedy = format!(
            "too little for Gemma 3 27B, which takes {need} at 9 GB: take a smaller model; which \
             ones fit:"
        );
        return Check::warn("memory", found, remedy).typing(["gemma plan"]);
    }
    let remedy = format!(
        "Gemma 3 27B at 9 GB takes {need}: close other programs, the largest of which are listed by:"
    );
    Check::warn("memory", found, remedy).typing(["ps -eo rss,comm --sort=-rss | head"])
}

/// Returns whether the firmware holds the processor and GPU back; `None` where it has no profiles.
pub fn power(machine: &dyn Machine) -> Option<Check> {
    let now = machine.read("sys/firmware/acpi/platform_profile")?;
    if !["low-power", "quiet", "cool"].contains(&now.as_str()) {
        return Some(Check::pass("power profile", now));
    }
    let choices = machine.read("sys/firmware/acpi/platform_profile_choices").unwrap_or_default();
    let best = if choices.contains("performance") { "performance" } else { "balanced" };
    let remedy =
        "the firmware holds processor and GPU back; with power-profiles-daemon, or without:";
    Some(Check::warn("power profile", now, remedy).typing([
        format!("powerprofilesctl set {best}"),
        format!("echo {best} | sudo tee /sys/firmware/acpi/platform_profile"),
    ]))
}

/// Returns whether compiled kernels and measured costs can be kept between runs.
pub fn cache(machine: &dyn Machine) -> Check {
    let without = "each run compiles its GPU kernels and measures its costs again";
    let Some(path) = xdg::cache() else {
        return Check::warn("cache", "HOME is not set", without)
            .typing(["export HOME=/path/of/yours"]);
    };
    let shown = path.display();
    if machine.is_writable(&path) {
        return Check::pass("cache", shown.to_string());
    }
    Check::warn(
        "cache",
        format!("{shown} cannot be written"),
        format!("{without}; to make the directory yours:"),
    )
    .typing([format!("sudo install -d -o \"$USER\" '{shown}'")])
}
