//! The NPU and what it lacks. A run without an NPU is complete.

use super::Check;
use super::host::Machine;
use crate::runtime::ModelOptions;
use crate::runtime::devices::backends::{Npu, NpuProbe};

pub fn check(machine: &dyn Machine, asked: &ModelOptions) -> Check {
    if matches!(asked.run.npu, Npu::Off | Npu::Model) {
        return Check::pass("npu", "no device was asked for (--npu)");
    }
    let system = machine.npu();
    if let Some(probe) = system.probe().first() {
        return device(machine, probe);
    }
    match system.nothing() {
        (what, None) => Check::pass("npu", format!("none, and none is needed: {what}")),
        (what, Some(remedy)) => Check::warn("npu", what, remedy).typing(["sudo modprobe amdxdna"]),
    }
}

fn device(machine: &dyn Machine, probe: &NpuProbe) -> Check {
    let path = probe.path.strip_prefix(machine.root()).unwrap_or(&probe.path).display();
    if probe.is_usable() {
        let what = format!("/{path}; --npu auto measures whether it pays (not yet run on one)");
        return Check::pass("npu", what);
    }
    let lacks = probe.findings.iter().filter_map(|finding| {
        let remedy = finding.remedy.as_ref()?;
        Some(format!("{}: {}: {remedy}", finding.name, finding.what))
    });
    let remedy = format!("a run goes on without it; {}", lacks.collect::<Vec<_>>().join("; "));
    Check::warn("npu", format!("/{path} cannot be used as it is"), remedy)
        .typing(["sudo dmesg | grep -i amdxdna"])
}
