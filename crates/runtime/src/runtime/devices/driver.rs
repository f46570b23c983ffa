//! Trials of GPU drivers. A child process tries a driver before its first use, because some drivers
//! crash or hang.
//!
//! The child first tries the driver with matrix instructions, and if that fails, without. The first
//! successful mode is used; otherwise the driver is not used.
//!
//! The result is cached by the device's identity, so that each driver is tried once. Temporary
//! results, such as too little memory, are not cached: the run itself reports the error.

use crate::runtime::Listener;
use anyhow::{Result, ensure};
use gemma_base::compute::DeviceInfo;
use gemma_base::os::process::{Exit, describe_exit, wait_for_output};
use gemma_base::testing;
use gemma_base::util::files::{read_regular, write_whole};
use gemma_base::util::{child, hex, xdg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// First argument of a child process that tries a driver; followed by `whole` or `plain`, and the
/// device's index.
const TRY: &str = "--try-driver";
/// Time limits of a child in seconds. A GPU's kernels compile in a few seconds, or wait for those
/// of another program. A driver on the processor is slower.
const SECONDS: f64 = 60.0;
const SECONDS_OF_CPU: f64 = 600.0;
/// Polling interval of a child.
const LOOK: Duration = Duration::from_millis(5);
/// Version of the file format.
const VERSION: u32 = 1;
/// Most bytes of a verdict's file.
const LARGEST: u64 = 1 << 16;

/// Functions of a driver that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverUse {
    Whole,
    WithoutMatrices,
    NotAtAll,
}

/// Result of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverVerdict {
    pub allows: DriverUse,
    /// How the child ended when it tried more than is allowed.
    pub why: Option<String>,
    /// Int8 matrix shapes that the device lists.
    pub shapes: Vec<String>,
    /// File that stores the verdict; `None` if the next trial may have another result.
    #[serde(skip)]
    pub file: Option<PathBuf>,
}

impl DriverVerdict {
    /// Returns a note for the user about a driver that is not fully used.
    pub fn note(&self, device: &DeviceInfo) -> Option<String> {
        let why = self.why.as_deref().unwrap_or_default();
        let name = &device.name;
        match self.allows {
            DriverUse::Whole => None,
            DriverUse::WithoutMatrices => Some(format!(
                "{name} is used without its matrix instructions, and slower: \
                    a trial of its driver with them {why}"
            )),
            DriverUse::NotAtAll => Some(format!("{name} is not used: a trial of its driver {why}")),
        }
    }

    /// Returns the remedy for that note.
    pub fn remedy(&self) -> String {
        let again = self
            .file
            .as_ref()
            .map_or(String::new(), |f| format!("; for another trial: rm '{}'", f.display()));
        format!("update the driver, which is then tried again{again}")
    }
}

/// Returns the verdict of an earlier trial, if there was one.
pub fn known(device: &DeviceInfo) -> Option<DriverVerdict> {
    VerdictFile::of(&device.identity, xdg::cache()).load()
}

/// Verdicts that this process knows, by key.
static KNOWN: Mutex<Option<HashMap<String, DriverVerdict>>> = Mutex::new(None);

/// Returns how far a device's driver is used. If there is no earlier trial, runs and reports one.
pub fn verdict(device: &DeviceInfo, listener: &dyn Listener) -> DriverVerdict {
    let kept = VerdictFile::of(&device.identity, xdg::cache());
    let mut known = KNOWN.lock().expect("no thread panics while it holds this");
    let known = known.get_or_insert_default();
    if let Some(verdict) = known.get(&kept.key) {
        return verdict.clone();
    }
    let verdict = kept.load().unwrap_or_else(|| {
        listener.detail(
            1,
            &format!("trying the driver of {} in a process of its own, once", device.name),
        );
        let patience = testing::fault(testing::PATIENCE).and_then(|v| v.parse().ok());
        let patience = patience.unwrap_or(if device.is_cpu { SECONDS_OF_CPU } else { SECONDS });
        let mut verdict =
            judge(device.offers_matrices, |whole| try_in_child(device.index, whole, patience));
        kept.save(&mut verdict);
        // A driver that cannot be used at all is reported by the caller as an error with the same
        // text.
        if let (DriverUse::WithoutMatrices, Some(note)) = (verdict.allows, verdict.note(device)) {
            listener.note(&note);
        }
        verdict
    });
    known.insert(kept.key, verdict.clone());
    verdict
}

/// How a child process ended.
#[derive(Debug)]
enum ChildEnd {
    /// Success, with the matrix shapes that the device lists.
    Through(Vec<String>),
    /// Failure caused by the driver, with a description.
    Fatal(String),
    /// Other failure, with a description: says nothing about the driver.
    Unknown(String),
}

/// Decides the verdict. `try_child` tries the driver with matrix instructions (true) or without. In
/// the verdict, `file` is empty, but not `None`, if it should be stored.
fn judge(offers_matrices: bool, mut try_child: impl FnMut(bool) -> ChildEnd) -> DriverVerdict {
    let mut verdict = DriverVerdict {
        allows: DriverUse::NotAtAll,
        why: None,
        shapes: Vec::new(),
        file: Some(PathBuf::new()),
    };
    let steps = [(true, DriverUse::Whole), (false, DriverUse::WithoutMatrices)];
    for (matrices, allows) in steps.into_iter().filter(|(matrices, _)| offers_matrices || *matrices)
    {
        match try_child(matrices) {
            ChildEnd::Through(shapes) => return DriverVerdict { allows, shapes, ..verdict },
            ChildEnd::Fatal(why) => {
                verdict = DriverVerdict { allows: DriverUse::NotAtAll, why: Some(why), ..verdict }
            }
            // The run itself will encounter the same error, or none.
            ChildEnd::Unknown(why) => {
                verdict = DriverVerdict { allows, why: Some(why), file: None, ..verdict }
            }
        }
    }
    verdict
}

/// Tries a device's driver in a child process.
fn try_in_child(index: usize, whole: bool, patience: f64) -> ChildEnd {
    let how = if whole { "whole" } else { "plain" };
    match child::command(&[TRY, how, &index.to_string()]) {
        Ok(mut command) => end_of(&mut command, patience),
        Err(error) => ChildEnd::Unknown(format!("could not be started: {error:#}")),
    }
}

/// Runs a child process with a time limit of `patience` seconds.
fn end_of(command: &mut Command, patience: f64) -> ChildEnd {
    let unknown = |what: &str, e: std::io::Error| ChildEnd::Unknown(format!("{what}: {e}"));
    // Messages printed by the driver are not shown.
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(e) => return unknown("could not be started", e),
    };
    let mut output = child.stdout.take().expect("it is piped");
    let (start, mut printed, mut is_open) = (Instant::now(), Vec::new(), true);
    let status = loop {
        // A driver may print more than a pipe holds.
        let has_output = is_open && wait_for_output(&output, LOOK);
        if has_output {
            let mut part = [0; 4096];
            let length = output.read(&mut part).unwrap_or(0);
            is_open = length > 0;
            printed.extend_from_slice(&part[..length]);
            printed.drain(..printed.len().saturating_sub(LARGEST as usize));
        }
        match child.try_wait() {
            Ok(Some(status)) if !(has_output && is_open) => break status,
            Ok(None) if start.elapsed().as_secs_f64() > patience => {
                let _ = child.kill();
                // A child that waits in the kernel may end later or never, so a thread waits for
                // it.
                let _ = std::thread::Builder::new().spawn(move || child.wait());
                return ChildEnd::Fatal(format!("did not end within {patience} s"));
            }
            Ok(None) if !is_open => std::thread::sleep(LOOK),
            Ok(_) => {}
            Err(e) => return unknown("could not be waited for", e),
        }
    };
    let report = || {
        // The driver may print too, so the report is the last line.
        let printed = String::from_utf8_lossy(&printed);
        match printed.lines().last().map(serde_json::from_str) {
            Some(Ok(shapes)) => ChildEnd::Through(shapes),
            _ => ChildEnd::Unknown("said nothing".into()),
        }
    };
    ending(status).unwrap_or_else(report)
}

/// Returns how a child ended; `None` on success.
fn ending(status: ExitStatus) -> Option<ChildEnd> {
    match Exit::of_status(status) {
        Exit::Code(0) => None,
        Exit::Memory | Exit::Fault => Some(ChildEnd::Fatal(describe_exit(status))),
        _ => Some(ChildEnd::Unknown(describe_exit(status))),
    }
}

/// The file of a verdict.
pub struct VerdictFile {
    path: Option<PathBuf>,
    key: String,
}

#[derive(Serialize, Deserialize)]
struct VerdictRecord {
    v: u32,
    key: String,
    #[serde(flatten)]
    verdict: DriverVerdict,
}

impl VerdictFile {
    /// Returns the file of a device by its [identity](DeviceInfo::identity).
    pub fn of(identity: &str, directory: Option<PathBuf>) -> VerdictFile {
        let digest = hex(&Sha256::digest(identity)[..8]);
        let path = directory.map(|d| d.join(format!("driver-{digest}.json")));
        VerdictFile { path, key: identity.to_owned() }
    }

    /// Returns the path of the file; `None` without a cache directory.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Reads the verdict of an earlier trial. Returns `None` for a damaged or unrelated file.
    pub fn load(&self) -> Option<DriverVerdict> {
        let path = self.path.as_ref()?;
        let read = || -> Result<DriverVerdict> {
            let content: VerdictRecord = serde_json::from_slice(&read_regular(path, LARGEST)?)?;
            ensure!(
                content.v == VERSION && content.key == self.key,
                "it belongs to another device or driver"
            );
            Ok(DriverVerdict { file: Some(path.clone()), ..content.verdict })
        };
        read().ok()
    }

    /// Stores a verdict if it should be stored. If that fails, the next run repeats the trial.
    fn save(&self, verdict: &mut DriverVerdict) {
        let keep = verdict.file.take().and(self.path.as_ref());
        let content = VerdictRecord { v: VERSION, key: self.key.clone(), verdict: verdict.clone() };
        verdict.file = keep
            .filter(|path| {
                let bytes = serde_json::to_vec(&content).expect("strings and numbers");
                write_whole(path, &bytes).is_ok()
            })
            .cloned();
    }
}

/// Returns the device's index, and whether to try its matrix instructions, if this process was
/// started to try a driver.
pub fn trial_of(argv: &[OsString]) -> Option<(usize, bool)> {
    let [_, option, how, index] = argv else { return None };
    let index = index.to_str().and_then(|i| i.parse().ok()).filter(|_| option == TRY)?;
    Some((index, how == "whole"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn through(shapes: &[&str]) -> ChildEnd {
        ChildEnd::Through(shapes.iter().map(|s| s.to_string()).collect())
    }

    #[cfg(unix)]
    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    /// Returns the allowed use for these ends of trials, and whether the verdict is stored.
    fn judged(
        offers: bool,
        trial_with: fn() -> ChildEnd,
        trial_without: fn() -> ChildEnd,
    ) -> (DriverUse, bool) {
        let verdict =
            judge(offers, |matrices| if matrices { trial_with() } else { trial_without() });
        (verdict.allows, verdict.file.is_some())
    }

    #[test]
    fn a_driver_is_used_as_far_as_a_child_came_through() {
        let [well, died, erred]: [fn() -> ChildEnd; 3] = [
            || through(&["16x8x32"]),
            || ChildEnd::Fatal("was ended by signal 6".into()),
            || ChildEnd::Unknown("failed".into()),
        ];
        // Without matrix instructions there is no second mode, so no second child.
        let none = || -> ChildEnd { unreachable!() };
        assert_eq!(judged(false, well, none), (DriverUse::Whole, true));
        assert_eq!(judged(false, died, none), (DriverUse::NotAtAll, true));
        assert_eq!(judged(false, erred, none), (DriverUse::Whole, false));
        assert_eq!(judged(true, well, none), (DriverUse::Whole, true));
        assert_eq!(judged(true, died, well), (DriverUse::WithoutMatrices, true));
        assert_eq!(judged(true, died, died), (DriverUse::NotAtAll, true));
        // An error is reported by the run, and the next run tries again.
        assert_eq!(judged(true, erred, well), (DriverUse::WithoutMatrices, false));
        assert_eq!(judged(true, erred, erred), (DriverUse::WithoutMatrices, false));
        assert_eq!(judged(true, died, erred), (DriverUse::WithoutMatrices, false));
        assert_eq!(judged(true, erred, died), (DriverUse::NotAtAll, false));
    }

    // The children of these two tests are shell scripts.
    #[cfg(unix)]
    #[test]
    fn children_end_in_a_report_by_the_drivers_fault_or_otherwise() {
        let end = |script: &str| match end_of(&mut shell(script), 60.0) {
            ChildEnd::Through(shapes) => format!("through {}", shapes.join(" ")),
            ChildEnd::Fatal(why) => format!("fatal: {why}"),
            ChildEnd::Unknown(why) => format!("unknown: {why}"),
        };
        assert_eq!(
            end(r#"echo the driver says hello; echo '["16x16x16", "16x8x32"]'"#),
            "through 16x16x16 16x8x32"
        );
        // More output than a pipe holds.
        let much = "head -c 300000 /dev/zero | tr '\\0' 'x'; echo; echo '[\"1x2x3\"]'";
        assert_eq!(end(much), "through 1x2x3");
        for (signal, number) in [("ABRT", 6), ("SEGV", 11), ("ILL", 4)] {
            assert_eq!(
                end(&format!("kill -{signal} $$")),
                format!("fatal: was ended by signal {number}")
            );
        }
        assert_eq!(end("kill -TERM $$"), "unknown: was stopped by signal 15");
        assert_eq!(end("kill -KILL $$"), "unknown: was stopped by signal 9");
        assert_eq!(end("echo '[]'; exit 4"), "unknown: failed with exit code 4");
        assert_eq!(end("echo hello"), "unknown: said nothing");
        let absent = end_of(&mut Command::new("/nonexistent/gemma"), 60.0);
        assert!(
            matches!(&absent, ChildEnd::Unknown(why) if why.starts_with("could not be started")),
            "{absent:?}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_child_that_hangs_is_ended() {
        let pid = tempfile::NamedTempFile::new().unwrap();
        let script = format!("echo $$ > {}; while :; do sleep 1; done", pid.path().display());
        let end = end_of(&mut shell(&script), 0.5);
        assert!(
            matches!(&end, ChildEnd::Fatal(why) if why == "did not end within 0.5 s"),
            "{end:?}"
        );
        let pid = std::fs::read_to_string(pid.path()).unwrap();
        let is_there = || std::fs::exists(format!("/proc/{}", pid.trim())).unwrap();
        assert!((0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            !is_there()
        }));
    }

    fn device(identity: &str) -> DeviceInfo {
        DeviceInfo { identity: identity.into(), ..crate::runtime::devices::testing::laptop_gpu() }
    }

    #[test]
    fn verdicts_are_kept_by_device_and_driver() {
        let root = tempfile::tempdir().unwrap();
        let kept = |identity: &str| VerdictFile::of(identity, Some(root.path().join("gemma")));
        let judged =
            |end: fn() -> ChildEnd| judge(true, |whole| if whole { end() } else { through(&[]) });
        assert_eq!(kept("radv 25.1").load(), None);
        let mut verdict = judged(|| ChildEnd::Fatal("was ended by signal 11".into()));
        kept("radv 25.1").save(&mut verdict);
        assert_eq!(verdict.file, kept("radv 25.1").path);
        assert_eq!(kept("radv 25.1").load().as_ref(), Some(&verdict));
        assert_eq!(kept("radv 25.2").load(), None, "another driver is another one");
        assert_eq!(
            verdict.note(&device("")).unwrap(),
            format!(
                "{} is used without its matrix instructions, and slower: \
                    a trial of its driver with them was ended by signal 11",
                device("").name
            )
        );
        assert!(
            verdict
                .remedy()
                .contains(&format!("rm '{}'", verdict.file.as_ref().unwrap().display()))
        );
        // An unknown end is not stored. Without a directory, no verdict is stored.
        let mut verdict = judged(|| ChildEnd::Unknown("failed".into()));
        kept("nvidia").save(&mut verdict);
        assert_eq!((verdict.file, kept("nvidia").load()), (None, None));
        let mut verdict = judge(true, |_| through(&["16x8x32"]));
        let nowhere = VerdictFile { path: None, key: "x".into() };
        nowhere.save(&mut verdict);
        assert_eq!((verdict.allows, verdict.file, nowhere.load()), (DriverUse::Whole, None, None));
        assert_eq!(std::fs::read_dir(root.path().join("gemma")).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_damaged_or_of_something_else_counts_as_none() {
        let root = tempfile::tempdir().unwrap();
        let kept = VerdictFile::of("radv", Some(root.path().into()));
        let path = kept.path.clone().unwrap();
        kept.save(&mut judge(true, |_| through(&["16x16x16"])));
        let good = std::fs::read(&path).unwrap();
        let known = kept.load().unwrap();
        assert_eq!(
            (known.allows, known.shapes, known.why),
            (DriverUse::Whole, vec!["16x16x16".to_owned()], None)
        );
        let text = String::from_utf8(good.clone()).unwrap();
        let other_key = text.replace("radv", "nvidia");
        let other_version = text.replace("\"v\":1", "\"v\":2");
        let other_use = text.replace("whole", "sometimes");
        let all = BTreeSet::from([&text, &other_key, &other_version, &other_use]);
        assert_eq!(all.len(), 4, "the changes change something");
        let cut = [0, 1, good.len() / 2, good.len() - 1].map(|n| good[..n].to_vec());
        let noise = [
            vec![0; 100],
            vec![b'['; 60_000],
            vec![b' '; 1 << 17],
            b"null".to_vec(),
            vec![0xff, 0xfe],
        ];
        for bytes in cut
            .into_iter()
            .chain(noise)
            .chain([other_key, other_version, other_use].map(String::into_bytes))
        {
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(
                kept.load(),
                None,
                "{}",
                String::from_utf8_lossy(&bytes[..bytes.len().min(200)])
            );
        }
        // A trial then rewrites it.
        kept.save(&mut judge(true, |_| through(&["16x16x16"])));
        assert_eq!(std::fs::read(&path).unwrap(), good);
    }
}
