//! Failures of a Vulkan device end with the documented exit code, a remedy, and the text so far.

use crate::common;
use assert_cmd::Command;
use common::vulkan::device;
use gemma::testing::{FAIL, FAIL_COUNTS, KINDS, Point};
use gemma::vulkan::{ALLOW_CPU_DRIVER, MEMORY};
use std::ffi::OsStr;

fn generate(device: &str) -> Command {
    let mut command = Command::cargo_bin("gemma").unwrap();
    command.args([
        "generate", "-d", device, "--draft", "off", "--temp", "0", "--raw", "-n", "60", "The", "-q",
    ]);
    command.env(ALLOW_CPU_DRIVER, "1");
    command
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_lost_device_is_exit_4_and_keeps_the_text_so_far() {
    if device().is_none() {
        return;
    }
    let whole = generate("vulkan").assert().success().get_output().stdout.clone();
    let (mut kept, mut early) = (0, 0);
    for after in [1, 4, 21, 51, 61, 71] {
        let out = generate("vulkan").env(FAIL, format!("submit@{after}+")).output().unwrap();
        if out.status.success() {
            continue;
        }
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(4), "after {after}, {}: {said}", out.status);
        assert!(said.contains("lost") && said.contains("help: "), "{said}");
        // The line is ended, so that a prompt of the shell begins a new one.
        let text = out.stdout.strip_suffix(b"\n").unwrap_or(&out.stdout);
        assert!(whole.starts_with(text), "after {after}: {:?}", String::from_utf8_lossy(text));
        kept += !out.stdout.is_empty() as usize;
        early += out.stdout.is_empty() as usize;
    }
    assert!(
        kept > 0 && early > 0,
        "{kept} losses while writing, {early} before: the moments tried miss a case"
    );
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn what_does_not_fit_is_exit_5_with_the_bytes() {
    if device().is_none() {
        return;
    }
    generate("vulkan").env(MEMORY, "100000000").assert().code(5).stderr(
        predicates::str::contains("for weights").and(predicates::str::contains("--ctx-size")),
    );
}

/// A second process waits for the one that uses the device.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_device_in_use_is_waited_for_or_refused() {
    use std::io::{BufRead, BufReader};
    let Some(open) = device() else { return };
    let info = open().info().clone();
    let runtime = tempfile::tempdir().unwrap();
    let lock = std::fs::File::create(gemma::runtime::devices::lock::file(
        runtime.path(),
        &info.name,
        info.index,
    ))
    .unwrap();
    lock.lock().unwrap();
    std::fs::write(
        gemma::runtime::devices::lock::file(runtime.path(), &info.name, info.index),
        "4711\n",
    )
    .unwrap();
    // A device that is lost at once ends all commands that use the device.
    let generate = || {
        let mut command = generate("vulkan");
        command.env("XDG_RUNTIME_DIR", runtime.path()).env(FAIL, "submit@1+");
        command
    };
    let refused = generate().args(["--device-lock", "fail"]).assert().code(4);
    refused.stderr(
        predicates::str::contains("process 4711")
            .and(predicates::str::contains("--device-lock wait")),
    );
    generate()
        .args(["--device-lock", "off"])
        .assert()
        .code(4)
        .stderr(predicates::str::contains("lost"));

    let mut waiting = std::process::Command::new(assert_cmd::cargo::cargo_bin("gemma"));
    waiting
        .args(["generate", "-d", "vulkan", "--draft", "off", "--raw", "-n", "1", "The"])
        .env(ALLOW_CPU_DRIVER, "1");
    waiting.env("XDG_RUNTIME_DIR", runtime.path()).env(FAIL, "submit@1+");
    let mut child = waiting
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(|l| l.unwrap());
    assert!(said.any(|line| line.contains("waiting for it to end")));
    drop(lock);
    assert!(said.any(|line| line.contains("lost")));
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

use predicates::prelude::PredicateBooleanExt;

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn no_driver_is_exit_4_where_a_gpu_was_asked_for_and_nothing_under_auto() {
    let none = |command: &mut Command| {
        command.env("VK_DRIVER_FILES", "/nonexistent").env("VK_ICD_FILENAMES", "/nonexistent");
    };
    let mut named = generate("vulkan");
    none(&mut named);
    named.assert().code(4).stderr(predicates::str::contains("help: "));
    let mut auto = generate("auto");
    none(&mut auto);
    auto.assert().success();
    if device().is_some() {
        generate("vulkan:9").assert().code(4).stderr(predicates::str::contains("gemma devices"));
    }
}

/// The error of a device that is lost during a long prompt names the likely cause and a remedy.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_device_lost_in_a_long_prompt_names_cause_and_remedy() {
    if device().is_none() {
        return;
    }
    let prompt = "The river was wide and slow. ".repeat(100);
    let generate = |prompt: &str, name: &str, value: &OsStr| {
        let mut command = Command::cargo_bin("gemma").unwrap();
        command.args(["generate", "-d", "vulkan", "--draft", "off", "--raw", "-n", "1", "-q"]);
        command.arg(prompt).env(ALLOW_CPU_DRIVER, "1").env(name, value).output().unwrap()
    };
    let lost = |after: u64| {
        let out = generate(&prompt, FAIL, format!("submit@{after}+").as_ref());
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    // A short prompt needs a pass and a copy of its scores, after the submissions that load the
    // model. The long prompt's first pass has about the same number as that pass.
    let dir = tempfile::tempdir().unwrap();
    let counts = dir.path().join("counts");
    std::fs::write(&counts, [0; 8 * KINDS]).unwrap();
    assert!(generate("The", FAIL_COUNTS, counts.as_ref()).status.success());
    let counts = std::fs::read(counts).unwrap();
    let short = u64::from_ne_bytes(counts[8 * Point::Submit as usize..][..8].try_into().unwrap());
    let moments = (short - 1..short + 60).chain(1..short - 1);
    let in_a_pass = moments.map(lost).find(|(_, said)| said.contains("a pass over"));
    let (code, said) = in_a_pass.expect("no loss in a pass");
    assert_eq!(code, Some(4));
    // The number of tokens in a pass depends on the device.
    for words in [
        "the GPU was lost in a pass over ",
        " tokens",
        "0.2 s",
        "dmesg",
        "lockup_timeout",
        "--device cpu",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}
