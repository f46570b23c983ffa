//! An unknown driver is tried once by a child process. If the child dies, the program only prints a
//! line.

use crate::common;
use assert_cmd::Command;
use common::vulkan::device;
use gemma::testing::{PATIENCE, TRIAL};
use gemma::vulkan::ALLOW_CPU_DRIVER;
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;
use std::path::{Path, PathBuf};

fn generate(device: &str, cache: &Path) -> Command {
    let mut command = Command::cargo_bin("gemma").unwrap();
    command.args([
        "generate", "-d", device, "--draft", "off", "--temp", "0", "--raw", "-n", "4", "The",
    ]);
    command.env(ALLOW_CPU_DRIVER, "1").env("XDG_CACHE_HOME", cache);
    command
}

/// Returns a cache without verdicts. It has the kernels that other tests have compiled, since
/// lavapipe needs half a minute for them.
fn fresh_cache() -> tempfile::TempDir {
    let fresh = tempfile::tempdir().unwrap();
    let new = fresh.path().join("gemma");
    std::fs::create_dir(&new).unwrap();
    let old = gemma::util::xdg::cache().and_then(|d| std::fs::read_dir(d).ok());
    for entry in old.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("pipelines-") {
            std::fs::copy(entry.path(), new.join(entry.file_name())).unwrap();
        }
    }
    fresh
}

/// Returns the files with verdicts.
fn kept(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache.join("gemma")).into_iter().flatten();
    let paths = entries.map(|e| e.unwrap().path());
    paths.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("driver-")).collect()
}

/// Counts the lines that say that a driver is not used. Checks that nothing else is said about it.
fn lines_about_the_trial(stderr: &[u8]) -> usize {
    String::from_utf8_lossy(stderr).lines().filter(|line| line.contains("trial")).count()
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_driver_that_came_through_is_not_tried_again() {
    if device().is_none() {
        return;
    }
    let cache = fresh_cache();
    let first = generate("vulkan", cache.path()).assert().success();
    assert_eq!(lines_about_the_trial(&first.get_output().stderr), 0);
    let files = kept(cache.path());
    assert_eq!(files.len(), 1);
    let verdict = std::fs::read(&files[0]).unwrap();
    // A child would die now.
    let again = generate("vulkan", cache.path()).env(TRIAL, "abort").assert().success();
    assert_eq!(again.get_output().stdout, first.get_output().stdout);
    assert_eq!(std::fs::read(&files[0]).unwrap(), verdict);
    // A damaged verdict does not count. The next child's verdict replaces it.
    for damage in [&verdict[..verdict.len() / 2], b"{}", b""] {
        std::fs::write(&files[0], damage).unwrap();
        let mended = generate("vulkan", cache.path()).assert().success();
        assert_eq!(mended.get_output().stdout, first.get_output().stdout);
        assert_eq!(std::fs::read(&files[0]).unwrap(), verdict);
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_driver_that_kills_or_stops_the_child_is_not_used_and_that_is_remembered() {
    if device().is_none() {
        return;
    }
    for (fault, why) in [("abort", "signal 6"), ("hang", "did not end within 1 s")] {
        let cache = fresh_cache();
        let trial = || {
            let mut command = generate("vulkan", cache.path());
            command.env(TRIAL, fault).env(PATIENCE, "1");
            command
        };
        let says = || {
            contains("is not used").and(contains(why)).and(contains("help: ")).and(contains("rm '"))
        };
        let out = trial().assert().code(4).stderr(says());
        assert_eq!(lines_about_the_trial(&out.get_output().stderr), 2, "the error and its help");
        assert!(out.get_output().stdout.is_empty());
        // Without the fault now: the verdict is used and no child runs.
        generate("vulkan", cache.path()).assert().code(4).stderr(says());
        // After the file is removed, as the help suggests, the driver is tried again.
        let files = kept(cache.path());
        assert_eq!(files.len(), 1);
        std::fs::remove_file(&files[0]).unwrap();
        generate("vulkan", cache.path()).assert().success();
    }
}

/// With `auto`, the processor replaces a GPU that cannot be used, and one line says so.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn under_auto_the_processor_takes_its_place() {
    let Some(open) = device() else { return };
    drop(open);
    let cache = fresh_cache();
    let bench = || {
        // Large enough to gain from a GPU.
        let mut command = Command::cargo_bin("gemma").unwrap();
        command.args([
            "bench",
            "--synthetic",
            "270m",
            "--format-weights",
            "i8-row",
            "--draft",
            "off",
        ]);
        command.args(["--only", "decode", "-r", "1", "-p", "4", "-n", "2"]);
        command.env(ALLOW_CPU_DRIVER, "1").env("XDG_CACHE_HOME", cache.path()).env(TRIAL, "abort");
        command
    };
    let out = bench().assert().success();
    let said = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
    assert_eq!(lines_about_the_trial(said.as_bytes()), 1, "{said}");
    assert!(said.contains("instead: all layers on the processor"), "{said}");
}

/// A trial that failed with an error is repeated, and the run reports the error.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn an_error_of_the_child_is_no_verdict() {
    if device().is_none() {
        return;
    }
    let cache = fresh_cache();
    let out = generate("vulkan", cache.path()).env(TRIAL, "fail").assert().success();
    assert!(lines_about_the_trial(&out.get_output().stderr) <= 1);
    assert!(kept(cache.path()).is_empty());
    generate("vulkan", cache.path()).assert().success();
    assert_eq!(kept(cache.path()).len(), 1);
}
