//! The NPU and what it lacks. A run without an NPU is complete.

use super::Check;
use super::host::Machine;
use crate::npu::layout::Shape;
use crate::npu::probe::Probe;
use crate::runtime::ModelOptions;
use crate::runtime::npu::Npu;

/// Head dimension of the 27B model, which chooses the array.
const HEAD_DIM: usize = 128;

pub fn check(machine: &dyn Machine, asked: &ModelOptions) -> Check {
    if matches!(asked.run.npu, Npu::Off | Npu::Model(_)) {
        return Check::pass("npu", "no device was asked for (--npu)");
    }
    let system = machine.npu();
    let shape = Shape::new(HEAD_DIM).expect("a kernel is built for it");
    if let Some(probe) = system.probe(shape).first() {
        return device(machine, probe);
    }
    match system.nothing() {
        (what, None) => Check::pass("npu", format!("none, and none is needed: {what}")),
        (what, Some(remedy)) => Check::warn("npu", what, remedy).typing(["sudo modprobe amdxdna"]),
    }
}

fn device(machine: &dyn Machine, probe: &Probe) -> Check {
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
