//! The processor's memory read speed: measured and cached.
//!
//! Other programs only make a measurement slower, so the fastest one of the last weeks is used. It
//! is stored in `memory-speed.json` in the cache directory. A file that is damaged, or of another
//! processor or thread count, is ignored and replaced.

use gemma_base::compute::cpu::Pool;
use gemma_base::compute::cpu::bandwidth::{probe_bytes, read_bandwidth};
use gemma_base::os::machine;
use gemma_base::util::files::{read_regular, write_whole};
use gemma_base::util::xdg;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Most bytes of a valid file.
const LARGEST: u64 = 1 << 12;
/// Age after which a stored speed is ignored, because the memory may have been changed.
const LONGEST: Duration = Duration::from_secs(60 * 60 * 24 * 30);
/// Below this share of the stored speed, a measurement was disturbed, or the memory was changed.
const DISTURBED: f64 = 0.85;

/// Rounds of the first measurement, spread over time to avoid a temporary disturbance.
const ROUNDS: usize = 3;
const PAUSE: Duration = Duration::from_millis(50);

/// Origin of a stored speed that is faster than the present measurement.
const REMEMBERED: &str = "measured earlier";
/// Origin of a speed that other programs may have reduced.
pub const BUSY: &str = "measured while other programs ran";

/// Read speed of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// In 1e9 bytes per second.
    pub gb_per_s: f64,
    /// Origin: `measured`, possibly with a qualification, `assumed` or `given`.
    pub how: &'static str,
    /// Seconds since an earlier measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_s: Option<u64>,
}

impl Speed {
    pub fn new(gb_per_s: f64, how: &'static str) -> Speed {
        Speed { gb_per_s, how, age_s: None }
    }

    /// Describes the origin.
    pub fn origin(&self) -> String {
        let Some(age) = self.age_s else { return self.how.to_owned() };
        let ago = match age {
            s if s < 90 * 60 => format!("{} minutes ago", s / 60),
            s if s < 36 * 3600 => format!("{} hours ago", s / 3600),
            s => format!("{} days ago", s / 86_400),
        };
        format!("measured {ago}, as other programs use the memory now")
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct KeptSpeed {
    /// Processor and number of threads.
    machine: String,
    gb_per_s: f64,
    /// Whether other programs were running.
    #[serde(default)]
    busy: bool,
}

/// Returns the combined read speed of the pool's threads. Measures it now, but prefers a faster
/// earlier measurement.
pub fn memory_speed(pool: &Pool) -> Speed {
    let processor = machine::processor_name();
    let processor = processor.as_deref().unwrap_or(std::env::consts::ARCH);
    // Earlier versions stored the speed of a buffer that partly fit in caches.
    let machine = format!("{processor}, {} threads, beyond the caches", pool.threads());
    let file = xdg::cache().map(|directory| directory.join("memory-speed.json"));
    let kept = file.as_deref().and_then(|file| kept(file, &machine, SystemTime::now()));
    let is_busy = machine::load_average().is_some_and(|load| load > pool.threads() as f64);
    let bytes = probe_bytes();
    let mut measured = read_bandwidth(pool, bytes);
    if kept.as_ref().is_none_or(|(kept, _)| kept.busy) {
        for _ in 1..ROUNDS {
            std::thread::sleep(PAUSE);
            measured = measured.max(read_bandwidth(pool, bytes));
        }
    }
    let speed = best(measured, kept.as_ref(), is_busy);
    if let Some(file) = file.filter(|_| is_news(measured, kept.as_ref(), is_busy)) {
        let kept = KeptSpeed { machine, gb_per_s: measured, busy: is_busy };
        // If the file cannot be written, every run measures again.
        let _ = serde_json::to_vec(&kept).map(|bytes| write_whole(&file, &bytes));
    }
    speed
}

/// Returns the faster of the present measurement and a stored one.
fn best(measured: f64, kept: Option<&(KeptSpeed, Duration)>, is_busy: bool) -> Speed {
    let now = if is_busy { BUSY } else { "measured" };
    match kept {
        Some((kept, age)) if measured < DISTURBED * kept.gb_per_s => {
            Speed { age_s: Some(age.as_secs()), ..Speed::new(kept.gb_per_s, REMEMBERED) }
        }
        Some((kept, _)) => {
            let how = if kept.busy { now } else { "measured" };
            Speed::new(kept.gb_per_s.max(measured), how)
        }
        None => Speed::new(measured, now),
    }
}

/// Returns whether to store a measurement: it is faster, or undisturbed while the stored one was
/// not.
fn is_news(measured: f64, kept: Option<&(KeptSpeed, Duration)>, is_busy: bool) -> bool {
    kept.is_none_or(|(kept, _)| {
        let is_surer = kept.busy && !is_busy && measured >= DISTURBED * kept.gb_per_s;
        measured > kept.gb_per_s || is_surer
    })
}

/// Reads the stored measurement of this machine and its age.
fn kept(file: &Path, machine: &str, now: SystemTime) -> Option<(KeptSpeed, Duration)> {
    let written = std::fs::metadata(file).ok()?.modified().ok()?;
    let kept: KeptSpeed = serde_json::from_slice(&read_regular(file, LARGEST).ok()?).ok()?;
    let age = now.duration_since(written).ok().filter(|age| *age < LONGEST)?;
    let is_speed = kept.gb_per_s.is_normal() && kept.gb_per_s > 0.0;
    (is_speed && kept.machine == machine).then_some((kept, age))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_measurement_counts_and_a_busy_moment_is_said() {
        let old = |gb_per_s, busy| {
            let kept = KeptSpeed { machine: String::new(), gb_per_s, busy };
            (kept, Duration::from_secs(7200))
        };
        let (calm, busy) = (old(30.0, false), old(30.0, true));
        let speed = Speed::new;
        assert_eq!(best(30.0, None, false), speed(30.0, "measured"));
        assert_eq!(best(11.0, None, true), speed(11.0, BUSY));
        assert_eq!(best(29.0, Some(&calm), true), speed(30.0, "measured"));
        assert_eq!(best(31.0, Some(&calm), false), speed(31.0, "measured"));
        assert_eq!(best(29.0, Some(&busy), true), speed(30.0, BUSY));
        assert_eq!(best(29.0, Some(&busy), false), speed(30.0, "measured"));
        let earlier = best(11.0, Some(&calm), false);
        assert_eq!(earlier, Speed { age_s: Some(7200), ..speed(30.0, REMEMBERED) });
        assert!(earlier.origin().contains("2 hours ago"), "{}", earlier.origin());
        assert_eq!(speed(11.0, BUSY).origin(), BUSY);
        let is_kept = |measured, kept, is_busy| is_news(measured, kept, is_busy);
        assert!(is_kept(11.0, None, true) && is_kept(31.0, Some(&calm), true));
        assert!(!is_kept(29.0, Some(&calm), false) && !is_kept(29.0, Some(&busy), true));
        assert!(is_kept(29.0, Some(&busy), false) && !is_kept(11.0, Some(&busy), false));
    }

    #[test]
    fn files_of_other_machines_times_or_shapes_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory-speed.json");
        let now = SystemTime::now();
        let speed = |machine: &str, now| kept(&file, machine, now).map(|(kept, _)| kept.gb_per_s);
        assert_eq!(speed("here", now), None);
        let write = |text: &str| std::fs::write(&file, text).unwrap();
        write(r#"{"machine": "here", "gb_per_s": 30.5}"#);
        assert_eq!(speed("here", SystemTime::now()), Some(30.5));
        assert_eq!(speed("elsewhere", SystemTime::now()), None);
        assert_eq!(speed("here", SystemTime::now() + LONGEST), None);
        let later = SystemTime::now() + Duration::from_secs(60);
        assert!(kept(&file, "here", later).unwrap().1.as_secs() >= 59);
        for damaged in ["", "{}", r#"{"machine": "here", "gb_per_s": 0}"#] {
            write(damaged);
            assert_eq!(speed("here", SystemTime::now()), None, "{damaged}");
        }
    }
}
