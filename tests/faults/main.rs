//! Numbered failures. Each call of a run that [`gemma::testing::Point`] names fails once, in its
//! own run: the n-th read, write, rename and so on, for every n of an undisturbed run. Each run
//! ends with a documented exit code and a message, and leaves no partial file. A second run then
//! ends like the undisturbed one.
//!
//! `GEMMA_FAULTS` is the number of calls tried for each command and kind, spread over all of them
//! (default 8), or `all`. `GEMMA_FAULTS_ONLY=serve:write` selects a command, or one of its kinds.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/server.rs"]
mod server;
#[path = "../common/shell.rs"]
mod shell;
#[path = "../common/terminals.rs"]
mod terminals;

mod commands;
mod served;

use commands::Scenario;
use gemma::testing::{FAIL, FAIL_COUNTS, KINDS, Point};
use shell::Run;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Exit codes that a failure of the system may have. 2, 6, 7 and 8 would blame the user's input.
const CODES: [i32; 4] = [1, 3, 4, 5];

/// Environment of a run.
#[derive(Default)]
struct Faults {
    /// The call that fails.
    fail: Option<String>,
    /// Whether the run counts its calls, in a file of its directory.
    counts: bool,
}

impl Faults {
    fn put(&self, command: &mut Command, dir: &Path) {
        if let Some(fail) = &self.fail {
            command.env(FAIL, fail);
        }
        if self.counts {
            command.env(FAIL_COUNTS, dir.join("counts"));
        }
    }
}

/// Returns the number of calls in an undisturbed run, by kind.
fn counted(dir: &Path) -> [u64; KINDS] {
    let bytes = std::fs::read(dir.join("counts")).unwrap();
    std::array::from_fn(|i| u64::from_ne_bytes(bytes[8 * i..][..8].try_into().unwrap()))
}

/// Returns the paths below a directory, without those below its link to the model.
fn paths(dir: &Path) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).unwrap().map(Result::unwrap) {
            let is_dir = entry.file_type().unwrap().is_dir();
            match is_dir {
                true => open.push(entry.path()),
                false => {
                    let path = entry.path().strip_prefix(dir).unwrap().to_owned();
                    paths.insert(path.to_string_lossy().into_owned());
                }
            }
        }
    }
    paths
}

/// Creates the directory of a trial.
fn directory(scenario: &Scenario, model: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(model, dir.path().join("m")).unwrap();
    (scenario.prepare)(dir.path());
    dir
}

/// Checks a run with a failure, and the run after it. Returns an error if one of them is wrong.
fn trial(scenario: &Scenario, model: &Path, whole: &Whole, fail: &str) -> Result<(), String> {
    let dir = directory(scenario, model);
    let run = (scenario.run)(dir.path(), &Faults { fail: Some(fail.to_owned()), counts: false });
    let is_muted = fail.starts_with("message@");
    // An output that cannot be opened is reported as wrong usage.
    let may_blame = fail.starts_with("open@");
    judge(&run, &whole.run, is_muted, may_blame)?;
    // A batch writes the failure of a record into its answer, and `--resume` computes it again.
    let has_failed_records = scenario.resumes
        && (scenario.result)(dir.path()).is_some_and(|answers| {
            String::from_utf8_lossy(&answers).contains(r#""finish_reason":"error""#)
        });
    if run.code == 0 && !has_failed_records && (scenario.result)(dir.path()) != whole.result {
        return Err("exit code 0 and another result".to_owned());
    }
    if let Some(partial) = (scenario.result)(dir.path())
        && Some(&partial) != whole.result.as_ref()
        && !scenario.resumes
    {
        return Err(format!("a partial result of {} bytes", partial.len()));
    }
    let left: Vec<_> = paths(dir.path())
        .into_iter()
        .filter(|path| !whole.paths.contains(path) && !scenario.keeps(path))
        .collect();
    if !left.is_empty() {
        return Err(format!("left {left:?}: {}", run.err));
    }
    let is_whole = (scenario.result)(dir.path()) == whole.result;
    let again = (scenario.run)(dir.path(), &Faults::default());
    // `quantize` refuses to replace a result.
    if again.code == 2 && is_whole && whole.result.is_some() {
        return Ok(());
    }
    if again.code != 0 {
        return Err(format!("the second run: {again:?}, after {run:?}"));
    }
    if again.out != whole.run.out && !scenario.resumes {
        return Err(format!("the second run wrote {:?}", String::from_utf8_lossy(&again.out)));
    }
    if (scenario.result)(dir.path()) != whole.result {
        return Err(format!("the second run has another result, after {run:?}"));
    }
    Ok(())
}

/// Checks exit code, message and standard output of a run with a failure.
fn judge(run: &Run, whole: &Run, is_muted: bool, may_blame: bool) -> Result<(), String> {
    match run.code {
        0 if run.out == whole.out => return Ok(()),
        0 => return Err(format!("exit code 0 and another output: {run:?}")),
        2 if may_blame => {}
        code if !CODES.contains(&code) => return Err(format!("exit code {code}: {run:?}")),
        _ => {}
    }
    // On a terminal the word is coloured.
    if !is_muted && !run.err.replace("\u{1b}[0m", "").contains("error: ") {
        return Err(format!("no message: {run:?}"));
    }
    if run.err.contains("panicked") {
        return Err(format!("a panic: {run:?}"));
    }
    match whole.out.starts_with(&run.out) {
        true => Ok(()),
        false => Err(format!("wrong output: {run:?}")),
    }
}

/// An undisturbed run.
struct Whole {
    run: Run,
    result: Option<Vec<u8>>,
    paths: BTreeSet<String>,
}

/// Returns the numbers from 1 to `met` to try: all, or `limit` of them, spread evenly.
fn numbers(met: u64, limit: Option<u64>) -> Vec<u64> {
    let count = limit.unwrap_or(met).min(met);
    let nth = |i: u64| 1 + i * (met - 1) / (count - 1).max(1);
    (0..count).map(nth).collect()
}

/// Runs all trials of a command and prints a line for each kind. Returns the number of failed
/// trials.
fn check(scenario: &Scenario) -> usize {
    check_with(scenario, scenario.points, "", trial)
}

type Trial = fn(&Scenario, &Path, &Whole, &str) -> Result<(), String>;

/// The same for these kinds of calls, with `suffix` after the number of the call.
fn check_with(scenario: &Scenario, points: &[Point], suffix: &str, trial: Trial) -> usize {
    let only = std::env::var("GEMMA_FAULTS_ONLY").unwrap_or_default();
    let (only_name, only_kind) = only.split_once(':').unwrap_or((&only, ""));
    if !only_name.is_empty() && only_name != scenario.name {
        return 0;
    }
    let limit = match std::env::var("GEMMA_FAULTS") {
        Ok(all) if all == "all" => None,
        Ok(limit) => Some(limit.parse().unwrap()),
        Err(_) => Some(8),
    };
    let models = tempfile::tempdir().unwrap();
    let model = commands::model(&models.path().join("model"));
    let dir = directory(scenario, &model);
    std::fs::write(dir.path().join("counts"), [0; 8 * KINDS]).unwrap();
    let run = (scenario.run)(dir.path(), &Faults { fail: None, counts: true });
    assert_eq!(run.code, 0, "{run:?}");
    let met = counted(dir.path());
    std::fs::remove_file(dir.path().join("counts")).unwrap();
    let result = (scenario.result)(dir.path());
    let whole = Whole { run, result, paths: paths(dir.path()) };

    let mut trials = Vec::new();
    for (point, name) in Point::ALL {
        let is_on = points.contains(&point);
        if is_on && (only_kind.is_empty() || only_kind == name) {
            assert!(met[point as usize] > 0, "{}: no {name} is met", scenario.name);
            let numbers = numbers(met[point as usize], limit);
            trials.extend(numbers.into_iter().map(|n| (point, format!("{name}@{n}{suffix}"))));
        }
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((point, fail)) = trials.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(what) = trial(scenario, &model, &whole, fail) {
                        wrong.lock().unwrap().push((*point, format!("{fail}: {what}")));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    for (point, name) in Point::ALL {
        let tried = trials.iter().filter(|(of, _)| *of == point).count();
        let bad = wrong.iter().filter(|(of, _)| *of == point).count();
        if tried > 0 {
            let met = met[point as usize];
            let verb = if suffix == "!" { "killed" } else { "failed" };
            eprintln!("{:18} {name:8} {met:6} met {tried:6} {verb} {bad:4} wrong", scenario.name);
        }
    }
    for (_, what) in wrong.iter().take(12) {
        eprintln!("{}: {}", scenario.name, what.chars().take(1500).collect::<String>());
    }
    wrong.len()
}

/// Kills a run at a call and runs it again until it ends. Returns an error if the result is wrong.
fn killed(scenario: &Scenario, model: &Path, whole: &Whole, fail: &str) -> Result<(), String> {
    let dir = directory(scenario, model);
    let run = (scenario.run)(dir.path(), &Faults { fail: Some(fail.to_owned()), counts: false });
    // `timeout` dies by the signal that killed its child.
    if ![0, 137].contains(&run.code) {
        return Err(format!("{run:?}"));
    }
    let again = (scenario.run)(dir.path(), &Faults::default());
    // The result of a killed run may already be complete. `quantize` then refuses to replace it.
    let is_whole = (scenario.result)(dir.path()) == whole.result;
    // A cache's temporary file stays until a later run finds that it is old.
    let is_new = |p: &String| !whole.paths.contains(p) && !p.starts_with(".cache/gemma/.tmp");
    let names: Vec<_> = paths(dir.path()).into_iter().filter(is_new).collect();
    match (is_whole, again.code, &names[..]) {
        (true, 0 | 2, []) => Ok(()),
        _ => Err(format!("whole: {is_whole}, left {names:?}, the second run: {again:?}")),
    }
}

#[test]
fn generate_ends_as_documented() {
    assert_eq!(check(&commands::GENERATE) + check(&commands::GENERATE_FILE), 0);
}

#[test]
fn quantize_ends_as_documented() {
    assert_eq!(check(&commands::QUANTIZE), 0);
}

#[test]
fn a_batch_ends_as_documented() {
    assert_eq!(check(&commands::BATCH), 0);
}

#[test]
fn what_is_killed_is_continued_to_the_same_bytes() {
    const CALLS: &[Point] = &[Point::Open, Point::Read, Point::Write, Point::Sync, Point::Rename];
    let wrong = [&commands::QUANTIZE, &commands::BATCH].map(|s| check_with(s, CALLS, "!", killed));
    assert_eq!(wrong, [0, 0]);
}

#[test]
fn chat_ends_as_documented() {
    assert_eq!(check(&commands::CHAT), 0);
}

#[test]
fn serve_answers_or_ends_as_documented() {
    assert_eq!(check(&commands::SERVE), 0);
}

#[test]
fn a_lost_device_ends_as_documented() {
    if common::vulkan::device().is_some() {
        let wrong = [&commands::GENERATE_VULKAN, &commands::SERVE_VULKAN].map(check);
        assert_eq!(wrong, [0, 0]);
    }
}
