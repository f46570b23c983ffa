//! Workgroups in any order, and calls between two barriers in any order, compute the same bits. A
//! driver on the processor runs them in one order, GPUs in any. The twins are shuffled too.

use crate::common::vulkan::device;
use crate::pieces::{difference, scores};
use assert_cmd::Command;
use gemma::testing::{NO_BARRIERS, SHUFFLE};
use gemma::vulkan::ALLOW_CPU_DRIVER;
use gemma::vulkan::validation::{VALIDATE, is_installed};

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn the_order_of_workgroups_changes_no_bit() {
    let Some(open) = device() else { return };
    if !open().info().divides_calls {
        eprintln!("SKIPPED: the driver divides no calls");
        return;
    }
    // A driver on the processor compiles the kernels of one format for minutes.
    let want = scores(open(), "i4-g32");
    for seed in 1..3 {
        let found = difference(&scores(open().shuffled(seed), "i4-g32"), &want);
        assert_eq!(found, None, "order {seed}");
    }
}

fn generate() -> Command {
    let mut command = Command::cargo_bin("gemma").unwrap();
    command.args(["generate", "-d", "vulkan", "--temp", "0", "--raw", "-n", "8", "The", "-q"]);
    command.env(ALLOW_CPU_DRIVER, "1").env(VALIDATE, "0");
    command
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_text_with_drafts_is_the_same_in_another_order() {
    if device().is_none() {
        return;
    }
    let want = generate().assert().success().get_output().stdout.clone();
    generate().env(SHUFFLE, "5").assert().success().stdout(want);
}

/// Validation layers of 2023 compare the accesses of different submissions if this is enabled. They
/// do not know that the host waits for semaphores, so only this test enables it.
const SUBMISSIONS: (&str, &str) =
    ("VK_LAYER_ENABLES", "VALIDATION_CHECK_ENABLE_SYNCHRONIZATION_VALIDATION_QUEUE_SUBMIT");

/// The layers check synchronisation: a run without barriers has hazards.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn validation_finds_missing_barriers() {
    if device().is_none() || !is_installed() {
        eprintln!("SKIPPED: no validation layers");
        return;
    }
    let validated = || {
        let mut command = generate();
        command.env(VALIDATE, "1");
        command
    };
    let failed =
        validated().env(NO_BARRIERS, "1").env(SUBMISSIONS.0, SUBMISSIONS.1).assert().failure();
    let said = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(said.contains("SYNC-HAZARD-READ-AFTER-WRITE"), "{said}");
    validated().assert().success();
}
