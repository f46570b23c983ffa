//! The memory that `gemma plan` predicts, and the memory that a run uses.

use super::{gemma, run};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Relative error that the plan may have without drafts, and with them. The times of a run choose
/// its draft model and the rows of its passes. The logits of each row take 1 MB.
const ERRORS: [(&str, f64); 2] = [("off", 0.05), ("auto", 0.15)];

/// Returns the peak private memory of a process in bytes, after it has ended.
fn peak(mut child: Child) -> u64 {
    let path = format!("/proc/{}/status", child.id());
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let private = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kb = private.and_then(|v| v.trim().trim_end_matches(" kB").parse::<u64>().ok());
        most = most.max(kb.unwrap_or(0) * 1024);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(child.wait().unwrap().success());
    most
}

#[test]
#[ignore = "needs Google's weights: scripts/real-gemma.sh"]
fn plan_says_what_a_process_takes() {
    for context in ["512", "4096"] {
        let plan = run(gemma(&["plan", "--json", "-c", context], "cpu")).json();
        let bytes = |name: &str| plan["process"][name].as_u64().expect("the plan has it");
        for (source, error) in ERRORS {
            let drafts = if source == "off" { bytes("drafts") } else { 0 };
            let planned = bytes("peak") - drafts;
            let mut command = gemma(&["generate", "--raw", "-c", context, "-n", "40"], "cpu");
            command.args(["--temp", "0", "--draft", source, "-p", "The capital of France is"]);
            let taken = peak(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
            let ratio = planned as f64 / taken as f64;
            println!(
                "context {context}, drafts {source}: {planned} planned, {taken} taken, {ratio:.3}"
            );
            assert!((ratio - 1.0).abs() <= error, "{planned} planned, {taken} taken");
        }
    }
}
