//! Facts about the machine, if the system reports them. Linux does in /proc.

use super::cpuinfo;
use std::collections::BTreeMap;
use std::fs::{read_dir, read_to_string};
use std::path::Path;

/// Returns the name of the processor.
pub fn processor_name() -> Option<String> {
    cpuinfo::processor_name(&read_to_string("/proc/cpuinfo").ok()?)
}

/// Returns the bytes of main memory.
pub fn memory() -> Option<u64> {
    kibibytes("MemTotal")
}

/// Returns the bytes of main memory that programs can allocate without swapping.
pub fn available_memory() -> Option<u64> {
    kibibytes("MemAvailable")
}

/// Returns the average number of running and waiting processes over the last minute.
pub fn load_average() -> Option<f64> {
    read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Returns the total bytes of the processor's last-level caches.
pub fn last_level_cache() -> Option<u64> {
    cache_below(Path::new("/sys/devices/system/cpu"))
}

/// Adds up the largest caches of the processors in a sysfs directory, each shared cache once.
fn cache_below(cpus: &Path) -> Option<u64> {
    let mut largest: BTreeMap<String, u64> = BTreeMap::new();
    for cpu in read_dir(cpus).ok()?.flatten() {
        let indices = read_dir(cpu.path().join("cache")).into_iter().flatten().flatten();
        let caches = indices.filter_map(|index| {
            let text = |name: &str| read_to_string(index.path().join(name)).ok();
            let kib: u64 = text("size")?.trim().strip_suffix('K')?.parse().ok()?;
            Some((kib, text("shared_cpu_list")?))
        });
        if let Some((kib, shared)) = caches.max() {
            largest.insert(shared, kib * 1024);
        }
    }
    (!largest.is_empty()).then(|| largest.into_values().fold(0, u64::saturating_add))
}

fn kibibytes(name: &str) -> Option<u64> {
    let text = read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_last_level_cache_counts_once() {
        let root = tempfile::tempdir().unwrap();
        let write = |cpu: usize, index: usize, size: &str, shared: &str| {
            let directory = root.path().join(format!("cpu{cpu}/cache/index{index}"));
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("size"), size).unwrap();
            std::fs::write(directory.join("shared_cpu_list"), shared).unwrap();
        };
        assert_eq!(cache_below(root.path()), None);
        assert_eq!(cache_below(&root.path().join("absent")), None);
        for cpu in 0..4 {
            write(cpu, 0, "32K\n", &format!("{cpu}\n"));
            write(cpu, 3, "8192K\n", if cpu < 2 { "0-1\n" } else { "2-3\n" });
        }
        std::fs::create_dir(root.path().join("cpufreq")).unwrap();
        assert_eq!(cache_below(root.path()), Some(16 << 20));
        write(4, 0, "garbage", "4");
        assert_eq!(cache_below(root.path()), Some(16 << 20));
    }
}
