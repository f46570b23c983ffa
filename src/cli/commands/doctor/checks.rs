//! The checks, in the order of a run. Each check reads a [`MachineFacts`].

use super::{Check, needs_gpu};
use crate::cli::io::ui::Ui;
use crate::compute::cpu::isa::Isa;
use crate::compute::{Choice, DeviceInfo};
use crate::error::{Fault, Kind, fault_of};
use crate::models::Weights;
use crate::os::files::is_writable_directory;
use crate::os::remedies::Remedies;
use crate::runtime::devices::backends::{Npu, NpuSystem, choose};
use crate::runtime::devices::driver::{DriverUse, DriverVerdict};
use crate::runtime::load;
use crate::runtime::options::Device;
use crate::runtime::options::RunOptions;
use crate::runtime::placement;
use crate::runtime::placement::measure::Task;
use crate::runtime::{Model, ModelOptions, Size};
use crate::util::files::read_regular_text;
use crate::util::units::bytes;
use anyhow::Result;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The devices that the Vulkan drivers list.
pub type Listed = Result<Vec<DeviceInfo>>;

/// Facts about a machine. Tests make up their own.
pub struct MachineFacts<'a> {
    /// Directory that contains `/dev` and `/sys`.
    pub root: PathBuf,
    pub remedies: Remedies,
    /// Name of the processor.
    pub processor: Option<String>,
    /// Main memory in bytes.
    pub memory: Option<u64>,
    /// Available main memory in bytes.
    pub available_memory: Option<u64>,
    pub threads: usize,
    /// The architecture as named by [`std::env::consts::ARCH`], and the processor's best
    /// instruction set.
    pub arch: &'static str,
    pub isa: Isa,
    pub listed: Listed,
    /// Returns the outcome of the trial of a device's driver.
    pub verdict: &'a dyn Fn(&DeviceInfo) -> DriverVerdict,
    /// Runs a small model on a device, or on the processor, and compares each kernel with its
    /// scalar twin.
    pub trial: &'a dyn Fn(Option<&DeviceInfo>) -> Result<String>,
    pub npu: NpuSystem,
    pub cache: Option<PathBuf>,
}

impl MachineFacts<'_> {
    /// Returns the render nodes of the graphics drivers.
    fn render_nodes(&self) -> Vec<PathBuf> {
        let nodes = self.remedies.gpu_nodes.map(|nodes| fs::read_dir(self.root.join(nodes)));
        let entries = nodes.into_iter().flatten().flatten();
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        paths.filter(|path| path.to_string_lossy().contains("renderD")).collect()
    }

    /// Returns whether the PCI bus has a GPU of a known vendor. It may have no kernel driver.
    fn has_graphics(&self) -> bool {
        const VENDORS: [&str; 3] = ["0x1002", "0x10de", "0x8086"];
        let devices = fs::read_dir(self.root.join("sys/bus/pci/devices"));
        devices.into_iter().flatten().flatten().any(|device| {
            let text = |name: &str| read_regular_text(&device.path().join(name), 4096).ok();
            text("class").is_some_and(|class| class.starts_with("0x03"))
                && text("vendor").is_some_and(|vendor| VENDORS.contains(&vendor.trim()))
        })
    }
}

/// Memory of Gemma 3 27B in the smallest built-in recipe, in bytes: 9 GB of weights, 1.3 GB of
/// keys, values and activations for a context of a few thousand tokens.
const SMALLEST_27B: u64 = 10_300_000_000;

/// Runs all checks, in the order of a run.
pub fn all(machine: &MachineFacts<'_>, options: &ModelOptions, ui: &Ui) -> Vec<Check> {
    let choice = match options.run.device {
        Device::Cpu => None,
        Device::Vulkan(choice) => Some(choice),
        Device::Auto => Some(Choice::Best),
    };
    let device = choice.map(|choice| match &machine.listed {
        Ok(listed) => choose(listed, choice),
        Err(error) => Err(copy(error)),
    });
    let mut checks = vec![processor(machine), memory(machine)];
    let mut gpu = match &device {
        None => vec![Check::pass("vulkan", "not used (--device cpu)")],
        Some(Ok(device)) => of_device(machine, device),
        Some(Err(why)) => without_device(machine, why, options),
    };
    if !needs_gpu(options) {
        gpu = gpu.into_iter().map(Check::only_warns).collect();
    }
    checks.extend(gpu);
    checks.push(match (machine.trial)(None) {
        Ok(found) => Check::pass("kernels, cpu", found),
        Err(error) => Check::error("kernels, cpu", &error),
    });
    if let Some(Ok(device)) = device {
        checks.push(gpu_kernels((machine.trial)(Some(device)), options));
    }
    checks.push(npu(machine, options));
    checks.push(cache(machine));
    if options.model.is_some() {
        checks.push(model(machine, options, ui).unwrap_or_else(|e| Check::error("model", &e)));
    }
    checks
}

fn copy(error: &anyhow::Error) -> anyhow::Error {
    let fault = fault_of(error).cloned();
    fault.unwrap_or_else(|| Fault::new(Kind::Device, error.to_string())).into()
}

fn processor(machine: &MachineFacts<'_>) -> Check {
    let name = machine.processor.as_deref().unwrap_or(machine.arch);
    let threads = machine.threads;
    let found = format!("{name}, {threads} thread{}", if threads == 1 { "" } else { "s" });
    if machine.isa != Isa::Scalar {
        return Check::pass("processor", format!("{found}, uses {}", machine.isa));
    }
    let (lacks, faster) = match machine.arch {
        "x86_64" => (
            "neither AVX2 nor AVX-512",
            "with AVX2; in a virtual machine pass the host's processor through (QEMU: -cpu host)",
        ),
        "aarch64" => (
            "no dotprod instructions",
            "with dotprod, which Arm's cores have since Cortex-A55, A75 and Neoverse N1",
        ),
        _ => ("no optimised kernels", "on x86-64 with AVX2 or ARM64 with dotprod"),
    };
    let remedy =
        format!("layers on the processor and drafts are several times slower than {faster}");
    Check::warn("processor", format!("{found}, {lacks}"), remedy)
}

fn memory(machine: &MachineFacts<'_>) -> Check {
    let (Some(total), Some(free)) = (machine.memory, machine.available_memory) else {
        let found = "unknown: the system does not report it";
        return Check::warn("memory", found, machine.remedies.unknown_memory);
    };
    let found = format!("{}, {} of it available", bytes(total), bytes(free));
    if free >= SMALLEST_27B {
        return Check::pass("memory", found);
    }
    let need = format!("Gemma 3 27B at 9 GB needs {}", bytes(SMALLEST_27B));
    match total < SMALLEST_27B {
        true => {
            Check::warn("memory", found, format!("{need}: choose a smaller model. To list them:"))
                .typing(["gemma plan"])
        }
        false => {
            Check::warn("memory", found, format!("{need}: close other programs. The largest:"))
                .typing([machine.remedies.largest_processes])
        }
    }
}

/// Checks the GPU that a run would use.
fn of_device(machine: &MachineFacts<'_>, device: &DeviceInfo) -> Vec<Check> {
    let name = format!("vulkan:{}", device.index);
    let (major, minor) = device.api;
    let found = format!("{name} {}, {}, Vulkan {major}.{minor}", device.name, device.driver);
    if device.is_cpu {
        let remedy = "this program's own kernels are faster: omit --device, or name a GPU";
        return vec![Check::warn("vulkan", format!("{found} computes on the processor"), remedy)];
    }
    let verdict = (machine.verdict)(device);
    let driver = match (verdict.allows, verdict.note(device)) {
        (DriverUse::NotAtAll, Some(note)) => {
            Check::fail("gpu driver", Kind::Device, note, verdict.remedy())
        }
        (_, Some(note)) => Check::warn("gpu driver", note, verdict.remedy()),
        (_, None) => Check::pass("gpu driver", "passed a trial in a separate process"),
    };
    vec![Check::pass("vulkan", found), gpu_memory(machine, device), driver]
}

/// Explains why no GPU can be used: no permission, no driver, or no GPU.
fn without_device(
    machine: &MachineFacts<'_>,
    why: &anyhow::Error,
    options: &ModelOptions,
) -> Vec<Check> {
    let (nodes, remedies) = (machine.render_nodes(), &machine.remedies);
    let is_any = matches!(options.run.device, Device::Auto | Device::Vulkan(Choice::Best));
    let has_none = nodes.is_empty() && remedies.gpu_nodes.is_some() && !machine.has_graphics();
    let is_bare = machine.listed.as_ref().map_or(true, |all| all.iter().all(|d| d.is_cpu));
    if has_none && is_any && is_bare {
        let found = "there is no GPU (/dev/dri is empty)";
        return vec![match needs_gpu(options) {
            true => Check::fail("vulkan", Kind::Device, found, "use --device cpu"),
            false => Check::pass("vulkan", format!("{found}, and none is needed")),
        }];
    }
    let missing = Check::fail("vulkan", Kind::Device, why.to_string(), remedies.install_vulkan)
        .typing(remedies.install_vulkan_commands.iter().copied());
    std::iter::once(missing).chain(nodes.iter().filter_map(|node| permission(node))).collect()
}

/// Reports a device node that this user may not open. Drivers do not list its device.
fn permission(node: &Path) -> Option<Check> {
    let error = File::options().read(true).write(true).open(node).err()?;
    (error.kind() == ErrorKind::PermissionDenied).then(|| {
        let remedy = "join the group of the node, usually render, \
                      then log out and in again (containers: --group-add render):";
        Check::fail("permissions", Kind::Device, format!("{}: {error}", node.display()), remedy)
            .typing(["sudo usermod -aG render \"$USER\""])
    })
}

/// Compares the memory of a GPU with the needs of the smallest 27B.
fn gpu_memory(machine: &MachineFacts<'_>, device: &DeviceInfo) -> Check {
    let (all, free) = (device.memory, device.free());
    let found = format!("{} in all, {} free", bytes(all), bytes(free));
    if free >= SMALLEST_27B {
        return Check::pass("gpu memory", found);
    }
    let warn = |remedy: &str| {
        let need = bytes(SMALLEST_27B);
        Check::warn("gpu memory", found, format!("Gemma 3 27B at 9 GB needs {need}; {remedy}"))
    };
    if all >= SMALLEST_27B {
        return warn(machine.remedies.gpu_users)
            .typing(machine.remedies.gpu_users_commands.iter().copied());
    }
    // An integrated GPU may use three quarters of the memory. The kernel counts it in pages of
    // 4 KiB.
    let most = machine.memory.unwrap_or(0) / 4 * 3;
    if !device.is_integrated || most <= all || !machine.remedies.has_gpu_limit {
        return warn("the layers that do not fit run on the processor. How many, and how fast:")
            .typing(["gemma plan 27b --recipe 9gb"]);
    }
    let pages = most / 4096;
    let options = format!("options ttm pages_limit={pages} page_pool_size={pages}");
    warn("let the GPU use three quarters of the memory (AMD), then restart:").typing([
        &format!("echo '{options}' | sudo tee /etc/modprobe.d/gemma-ttm.conf"),
        "sudo update-initramfs -u  # Fedora: sudo dracut -f",
    ])
}

fn gpu_kernels(trial: Result<String>, options: &ModelOptions) -> Check {
    let error = match trial {
        Ok(found) => return Check::pass("kernels, gpu", found),
        Err(error) => error,
    };
    let check = Check::error("kernels, gpu", &error);
    // If a device fails to load, --device auto uses the processor. Wrong results would not be
    // noticed, so they stay a failure.
    let (check, instead) = match !needs_gpu(options) && check.code != 1 {
        true => (check.only_warns(), "the processor is used instead; "),
        false => (check, ""),
    };
    let remedy = format!("{instead}update the GPU's driver, or use --device cpu");
    Check { remedy: Some(remedy), ..check }
}

/// Checks the NPU. Problems are only warnings, because a run works without an NPU.
fn npu(machine: &MachineFacts<'_>, options: &ModelOptions) -> Check {
    if matches!(options.run.npu, Npu::Off | Npu::Model) {
        return Check::pass("npu", "not used (--npu)");
    }
    let Some(probe) = machine.npu.probe().into_iter().next() else {
        return match machine.npu.nothing() {
            (found, None) => Check::pass("npu", format!("none, and none is needed: {found}")),
            (found, Some(remedy)) => {
                Check::warn("npu", found, remedy).typing(["sudo modprobe amdxdna"])
            }
        };
    };
    let path = probe.path.display();
    if probe.is_usable() {
        return Check::pass("npu", format!("{path}; this program has never run on one"));
    }
    let lacks = probe.findings.iter().filter_map(|finding| {
        let remedy = finding.remedy.as_ref()?;
        Some(format!("{}: {}: {remedy}", finding.name, finding.what))
    });
    let remedy = format!("a run works without it; {}", lacks.collect::<Vec<_>>().join("; "));
    Check::warn("npu", format!("{path} cannot be used"), remedy)
        .typing(["sudo dmesg | grep -i amdxdna"])
}

/// Checks that compiled kernels and measured times can be stored for later runs.
fn cache(machine: &MachineFacts<'_>) -> Check {
    let without = "each run compiles its GPU kernels and measures the times of passes again";
    let Some(path) = &machine.cache else {
        let Remedies { home, set_home, .. } = machine.remedies;
        return Check::warn("cache", format!("{home} is not set"), without).typing([set_home]);
    };
    let shown = path.display();
    let existing = path.ancestors().find(|directory| directory.is_dir());
    match existing.map(is_writable_directory) {
        Some(true) => Check::pass("cache", shown.to_string()),
        _ => Check::warn("cache", format!("{shown} cannot be written"), format!("{without}:"))
            .typing([format!("{} '{shown}'", machine.remedies.own_directory)]),
    }
}

/// Checks that the model opens, has a tokenizer, and fits.
fn model(machine: &MachineFacts<'_>, options: &ModelOptions, ui: &Ui) -> Result<Check> {
    let model = Model::open(options.model.as_deref(), ui)?;
    model.tokenizer(ui)?;
    let (run, size) = (&options.run, Size::of(&model.weights)?);
    let context = load::context(run.context, 4096, model.config(), ui);
    let check = fits(machine, &model.weights, context, run, ui)?;
    let (name, size, bits) = (&model.name, bytes(size.bytes), size.bits_per_weight());
    let found = format!("{name}, {size} at {bits:.2} bits per weight: {}", check.found);
    Ok(Check { found, ..check })
}

/// Places weights as a run would, and reports the devices.
pub fn fits(
    machine: &MachineFacts<'_>,
    weights: &Weights,
    context: usize,
    run: &RunOptions,
    ui: &Ui,
) -> Result<Check> {
    let kv = load::kv_format(weights, run.kv)?;
    let npu = run.npu.is_asked();
    let task = Task { weights, context, kv, sequences: 1, prefixes: 0, npu };
    let devices = || machine.listed.as_ref().map(Vec::clone).map_err(copy);
    let placement = placement::candidates_among(&task, run, devices, ui)?.swap_remove(0);
    placement::check_memory(&placement, machine.available_memory)?;
    let described = placement.describe();
    Ok(match placement.device.is_some() && placement.layout.cpu.layers > 0 {
        true => Check::warn(
            "model",
            described,
            "layers on the processor slow the others down: lower --ctx-size, use --kv q8, \
             or use a smaller format",
        ),
        false => Check::pass("model", described),
    })
}
