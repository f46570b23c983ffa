//! The processor, and whether kernels compute what they should.

use super::host::{Found, Machine};
use super::{Check, needs_gpu};
use crate::compute::Choice;
use crate::compute::cpu::isa::Isa;
use crate::runtime::ModelOptions;
use crate::runtime::devices::backends::choose;
use crate::runtime::options::Device;

pub fn processor(machine: &dyn Machine) -> Check {
    let name = machine.read("proc/cpuinfo").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        line.split_once(':').map(|(_, name)| name.trim().to_owned())
    });
    let name = name.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let (threads, best) =
        (machine.threads(), machine.instruction_sets().pop().unwrap_or(Isa::Scalar));
    let plural = if threads == 1 { "" } else { "s" };
    match best {
        Isa::Scalar => Check::warn(
            "processor",
            format!("{name}, {threads} thread{plural}, neither AVX2 nor AVX-512"),
            "drafts, and layers that no GPU takes, run several times slower than on a processor \
             with AVX2; in a virtual machine pass the host's processor through (QEMU: -cpu host)",
        ),
        Isa::Avx2 | Isa::Avx512Vnni => {
            Check::pass("processor", format!("{name}, {threads} thread{plural}, uses {best}"))
        }
    }
}

/// A small model on the processor, and on the GPU that would be taken.
pub fn trials(machine: &dyn Machine, asked: &ModelOptions, found: &Found) -> Vec<Check> {
    let mut checks = vec![match machine.trial(None) {
        Ok(what) => Check::pass("kernels, cpu", what),
        Err(e) => Check::error("kernels, cpu", &e),
    }];
    let choice = match asked.run.device {
        Device::Cpu => return checks,
        Device::Vulkan(choice) => choice,
        Device::Auto => Choice::Best,
    };
    let Some(device) = found.as_ref().ok().and_then(|list| choose(list, choice).ok()) else {
        return checks;
    };
    checks.push(match machine.trial(Some(device)) {
        Ok(what) => Check::pass("kernels, gpu", what),
        Err(e) => {
            let check = Check::error("kernels, gpu", &e);
            // Under auto a device that fails to load gives way; one that computes wrongly would not
            // be noticed.
            let gives_way = !needs_gpu(asked) && check.code != 1;
            let (check, instead) = match gives_way {
                true => (check.only_warns(), "the processor is used instead; "),
                false => (check, ""),
            };
            let remedy = format!("{instead}update the GPU's driver, or use --device cpu");
            Check { remedy: Some(remedy), ..check }
        }
    });
    checks
}
