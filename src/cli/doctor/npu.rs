//! The NPU: its node, driver and firmware, and the memory that it locks. A run without one is
//! complete.

use super::gpu::group_of;
use super::host::Machine;
use super::{Asked, Check};
use crate::npu::layout::Shape;
use crate::npu::probe::{Finding, LOCKED, Probe};
use crate::runtime::npu::Npu;
use crate::util::units::bytes;
use std::path::Path;

/// The array that is asked for: that of the 27B model.
const HEAD_DIM: usize = 128;

pub fn checks(machine: &dyn Machine, asked: &Asked<'_>) -> Vec<Check> {
    let locked = machine.locked();
    let limit = if locked == u64::MAX { "unlimited".to_owned() } else { bytes(locked) };
    if matches!(asked.options.run.npu, Npu::Off | Npu::Model(_)) {
        return vec![
            Check::pass("npu", "no device was asked for (--npu)"),
            Check::pass("locked memory", limit),
        ];
    }
    let system = machine.npu();
    let shape = Shape::new(HEAD_DIM).expect("a kernel is built for it");
    let found = system.probe(shape);
    let Some(probe) = found.first() else {
        let (what, remedy) = system.nothing();
        let npu = match remedy {
            None => Check::pass("npu", format!("none, and none is needed: {what}")),
            Some(remedy) => Check::warn("npu", what, remedy).typing(["sudo modprobe amdxdna"]),
        };
        return vec![
            npu,
            Check::pass("locked memory", format!("{limit}; only an NPU would want more")),
        ];
    };
    let mut checks = vec![device(machine, probe)];
    checks
        .extend(probe.findings.iter().filter_map(|finding| trouble(machine, &probe.path, finding)));
    checks.push(match locked < LOCKED {
        true => Check::warn(
            "locked memory",
            limit,
            format!(
                "the NPU's buffers want {} or more; for this shell first, then for every login:",
                bytes(LOCKED)
            ),
        )
        .typing([
            "ulimit -l unlimited",
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf",
        ]),
        false => Check::pass("locked memory", limit),
    });
    checks
}

fn device(machine: &dyn Machine, probe: &Probe) -> Check {
    let path = shown(machine, &probe.path);
    let of =
        |name: &str| probe.findings.iter().find(|f| f.name == name).map_or("", |f| f.what.as_str());
    if probe.is_usable() {
        let what = format!(
            "{path}, firmware {}; --npu auto measures whether it pays (nobody has run this on one \
                yet)",
            of("firmware")
        );
        return Check::pass("npu", what);
    }
    Check::warn(
        "npu",
        format!("{path} cannot be used as it is"),
        "a run goes on without it; what it lacks:",
    )
}

/// One condition that is not met; the limit on locked memory is a check of its own.
fn trouble(machine: &dyn Machine, node: &Path, finding: &Finding) -> Option<Check> {
    let remedy = finding.remedy.as_ref().filter(|_| finding.name != "locked memory")?;
    let (name, commands): (&'static str, Vec<String>) = match finding.name {
        "access" if finding.what.contains("ermission") => (
            "npu access",
            vec![format!(
                "sudo usermod -aG {} \"$USER\"  # then log in again",
                group_of(machine, node)
            )],
        ),
        "access" => ("npu access", vec!["sudo dmesg | grep -i amdxdna".into()]),
        "firmware" => ("npu firmware", vec!["uname -r; sudo dmesg | grep -i amdxdna".into()]),
        "array" => ("npu array", Vec::new()),
        _ => ("npu revision", Vec::new()),
    };
    Some(Check::warn(name, finding.what.clone(), remedy.clone()).typing(commands))
}

/// A path as the machine itself would name it.
fn shown(machine: &dyn Machine, path: &Path) -> String {
    path.strip_prefix(machine.root())
        .map_or_else(|_| path.display().to_string(), |p| format!("/{}", p.display()))
}
