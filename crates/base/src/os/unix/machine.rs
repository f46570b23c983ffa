//! Facts about the machine, where the system tells them: Linux does in /proc.

use super::cpuinfo;
use std::fs::read_to_string;

/// Returns the name of the processor.
pub fn processor_name() -> Option<String> {
    cpuinfo::processor_name(&read_to_string("/proc/cpuinfo").ok()?)
}

/// Returns the bytes of main memory.
pub fn memory() -> Option<u64> {
    kibibytes("MemTotal")
}

/// Returns the bytes of main memory that programs can still get without swapping.
pub fn available_memory() -> Option<u64> {
    kibibytes("MemAvailable")
}

/// Returns the processes that ran or wanted to, on average over the last minute.
pub fn load_average() -> Option<f64> {
    read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

fn kibibytes(name: &str) -> Option<u64> {
    let text = read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}
