//! How fast the processor reads memory, measured and remembered.
//!
//! Other programs only make a measurement slower, so the fastest one of the last weeks counts. It
//! is kept in `memory-speed.json` in the cache directory. A file that is damaged, of another
//! processor or of another number of threads is ignored and replaced.

use crate::runtime::devices::processor;
use gemma_base::compute::cpu::Pool;
use gemma_base::compute::cpu::bandwidth::{PROBE_BYTES, read_bandwidth};
use gemma_base::os::machine;
use gemma_base::util::files::{read_regular, write_whole};
use gemma_base::util::xdg;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Larger files were not written by this program.
const LARGEST: u64 = 1 << 12;
/// Memory may be changed, so that nothing is remembered for longer.
const LONGEST: Duration = Duration::from_secs(60 * 60 * 24 * 30);
/// A measurement below this share of the remembered one was disturbed, or the memory was changed.
const DISTURBED: f64 = 0.85;

/// Origin of a speed that another program keeps from being measured now.
const REMEMBERED: &str = "measured earlier, as memory is busy now";
/// Origin of the first speed, where other programs ran.
const BUSY: &str = "measured while other programs ran";

/// Reading speed of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// 1e9 bytes a second.
    pub gb_per_s: f64,
    /// `measured`, perhaps with a reservation, `assumed` or `given`.
    pub how: &'static str,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    /// The processor and its threads.
    machine: String,
    gb_per_s: f64,
}

/// Returns the speed at which the pool's threads read memory together. It is measured now, unless
/// an earlier measurement was faster.
pub fn memory_speed(pool: &Pool) -> Speed {
    let measured = read_bandwidth(pool, PROBE_BYTES);
    let machine = format!("{}, {} threads", processor::name(), pool.threads());
    let file = xdg::cache().map(|directory| directory.join("memory-speed.json"));
    let kept = file.as_deref().and_then(|file| kept(file, &machine, SystemTime::now()));
    let is_busy = machine::load_average().is_some_and(|load| load > pool.threads() as f64);
    let speed = best(measured, kept, is_busy);
    if let Some(file) = file.filter(|_| kept.is_none_or(|kept| measured > kept)) {
        let kept = Kept { machine, gb_per_s: measured };
        // Without the file each run measures for itself.
        let _ = serde_json::to_vec(&kept).map(|bytes| write_whole(&file, &bytes));
    }
    speed
}

/// Returns the faster one of a measurement, on a machine that may be busy, and a remembered one.
fn best(measured: f64, kept: Option<f64>, is_busy: bool) -> Speed {
    match kept {
        Some(gb_per_s) if measured < DISTURBED * gb_per_s => Speed { gb_per_s, how: REMEMBERED },
        Some(kept) => Speed { gb_per_s: kept.max(measured), how: "measured" },
        None => Speed { gb_per_s: measured, how: if is_busy { BUSY } else { "measured" } },
    }
}

/// Reads what an earlier run measured on this machine.
fn kept(file: &Path, machine: &str, now: SystemTime) -> Option<f64> {
    let written = std::fs::metadata(file).ok()?.modified().ok()?;
    let kept: Kept = serde_json::from_slice(&read_regular(file, LARGEST).ok()?).ok()?;
    let is_fresh = now.duration_since(written).is_ok_and(|age| age < LONGEST);
    let is_speed = kept.gb_per_s.is_normal() && kept.gb_per_s > 0.0;
    (is_fresh && is_speed && kept.machine == machine).then_some(kept.gb_per_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_measurement_counts_and_a_busy_moment_is_said() {
        let speed = |gb_per_s, how| Speed { gb_per_s, how };
        assert_eq!(best(30.0, None, false), speed(30.0, "measured"));
        assert_eq!(best(11.0, None, true), speed(11.0, BUSY));
        assert_eq!(best(29.0, Some(30.0), true), speed(30.0, "measured"));
        assert_eq!(best(31.0, Some(30.0), false), speed(31.0, "measured"));
        assert_eq!(best(11.0, Some(30.0), false), speed(30.0, REMEMBERED));
    }

    #[test]
    fn files_of_other_machines_times_or_shapes_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory-speed.json");
        let now = SystemTime::now();
        assert_eq!(kept(&file, "here", now), None);
        let write = |text: &str| std::fs::write(&file, text).unwrap();
        write(r#"{"machine": "here", "gb_per_s": 30.5}"#);
        assert_eq!(kept(&file, "here", SystemTime::now()), Some(30.5));
        assert_eq!(kept(&file, "elsewhere", SystemTime::now()), None);
        assert_eq!(kept(&file, "here", SystemTime::now() + LONGEST), None);
        for damaged in ["", "{}", r#"{"machine": "here", "gb_per_s": 0}"#] {
            write(damaged);
            assert_eq!(kept(&file, "here", SystemTime::now()), None, "{damaged}");
        }
    }
}
