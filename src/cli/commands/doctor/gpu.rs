//! Vulkan: the loader and its drivers, the device that a run would take, its memory, and the nodes
//! that this user may not open.

use super::host::{Found, Machine};
use super::system::SMALLEST_27B;
use super::{Check, needs_gpu};
use crate::cli::io::ui::Ui;
use crate::compute::{Choice, DeviceInfo};
use crate::error::{Fault, Kind, fault_of};
use crate::models::Weights;
use crate::os::files::group_id;
use crate::runtime::ModelOptions;
use crate::runtime::devices::backends::choose;
use crate::runtime::devices::driver::{DriverUse, DriverVerdict};
use crate::runtime::load;
use crate::runtime::options::Device;
use crate::runtime::options::RunOptions;
use crate::runtime::placement;
use crate::runtime::placement::measure::Task;
use crate::util::units::bytes;
use anyhow::Result;
use std::io::ErrorKind;
use std::path::Path;

/// PCI vendors of graphics: id, name, kernel module.
const VENDORS: [(&str, &str, &str); 3] =
    [("0x1002", "AMD", "amdgpu"), ("0x8086", "Intel", "i915"), ("0x10de", "NVIDIA", "nvidia")];
const PAGE: u64 = 4096;

/// Returns the checks of the GPU that a run would take. Without a GPU a run stops only where the
/// options ask for one.
pub fn checks(machine: &dyn Machine, asked: &ModelOptions, found: &Found) -> Vec<Check> {
    let choice = match asked.run.device {
        Device::Cpu => return vec![Check::pass("vulkan", "not asked for (--device cpu)")],
        Device::Vulkan(choice) => choice,
        Device::Auto => Choice::Best,
    };
    let list = found.as_deref().unwrap_or_default();
    let names: Vec<String> =
        list.iter().map(|d| format!("vulkan:{} {} ({})", d.index, d.name, d.driver)).collect();
    let names = names.join("; ");
    let mut checks = match found.as_ref().map(|list| choose(list, choice)) {
        Ok(Ok(device)) => [Check::pass("vulkan", names)]
            .into_iter()
            .chain(of_device(machine, device))
            .chain([trial(&machine.verdict(device), device)])
            .collect(),
        Ok(Err(why)) => missing(machine, asked, &why, &names, choice),
        Err(why) => missing(machine, asked, why, &names, Choice::Best),
    };
    if !needs_gpu(asked) {
        checks = checks.into_iter().map(Check::only_warns).collect();
    }
    checks
}

fn of_device(machine: &dyn Machine, device: &DeviceInfo) -> Vec<Check> {
    let name = format!("vulkan:{}", device.index);
    if device.is_cpu {
        let remedy = "the processor's own kernels are faster: leave --device out, or name a GPU";
        return vec![Check::warn("gpu", format!("{name} computes on the processor"), remedy)];
    }
    let found = format!("{name} {}, Vulkan {}.{}", device.name, device.api.0, device.api.1);
    vec![Check::pass("gpu", found), memory(machine, device)]
}

/// Returns why no device can be taken, and what to install or to open.
fn missing(
    machine: &dyn Machine,
    asked: &ModelOptions,
    why: &anyhow::Error,
    names: &str,
    choice: Choice,
) -> Vec<Check> {
    let (refused, boards) = (refused_nodes(machine), boards(machine));
    let others = if names.is_empty() { String::new() } else { format!(" (found: {names})") };
    let is_bare = boards.is_empty() && machine.list("dev/dri").is_empty();
    if is_bare && choice == Choice::Best {
        let found = format!("no GPU is on the bus{others}");
        let remedy = "use --device cpu, and leave --gpu-layers out";
        return match needs_gpu(asked) {
            true => vec![Check::fail("vulkan", Kind::Device, found, remedy)],
            false => vec![Check::pass("vulkan", format!("{found}, and none is needed"))],
        };
    }
    let check = driver(format!("{why}{others}"), fault_of(why), &boards);
    // Drivers do not list a device whose node may not be opened.
    [check].into_iter().chain(refused).collect()
}

/// Returns what to install for the graphics on the bus.
fn driver(found: String, fault: Option<&Fault>, boards: &[Board]) -> Check {
    let check = |remedy: &str| Check::fail("vulkan", Kind::Device, found, remedy);
    let mesa = [
        "sudo apt install libvulkan1 mesa-vulkan-drivers  # Debian",
        "sudo dnf install vulkan-loader mesa-vulkan-drivers # Fedora",
    ];
    let Some(board) = boards.first() else {
        let other = fault.and_then(|f| f.help.as_deref()).unwrap_or("use --device cpu");
        return check(&format!("no GPU is on the bus that this program knows; {other}"))
            .typing(mesa);
    };
    let Board { slot, name, module, has_driver } = board;
    if !has_driver {
        let remedy = format!("the {name} graphics at {slot} have no kernel driver; to load it:");
        return check(&remedy)
            .typing([format!("sudo modprobe {module}"), format!("sudo dmesg | grep -i {module}")]);
    }
    if *module == "nvidia" {
        let remedy = "install NVIDIA's driver, which has its own Vulkan driver (containers: \
                      NVIDIA_DRIVER_CAPABILITIES must name graphics):";
        return check(remedy).typing([
            "sudo apt install nvidia-driver  # Debian",
            "sudo ubuntu-drivers install  # Ubuntu",
        ]);
    }
    check(&format!("install the loader and Mesa's driver for the {name} graphics:")).typing(mesa)
}

/// Graphics on the bus.
struct Board {
    slot: String,
    name: &'static str,
    module: &'static str,
    has_driver: bool,
}

fn boards(machine: &dyn Machine) -> Vec<Board> {
    let board = |slot: String| {
        let at = format!("sys/bus/pci/devices/{slot}");
        let vendor = machine.read(&format!("{at}/vendor"))?;
        let (_, name, module) = *VENDORS.iter().find(|(id, ..)| *id == vendor)?;
        // Class 03: display controllers.
        machine.read(&format!("{at}/class"))?.starts_with("0x03").then_some(())?;
        let has_driver = machine.root().join(at).join("driver").is_symlink();
        Some(Board { slot, name, module, has_driver })
    };
    machine.list("sys/bus/pci/devices").into_iter().filter_map(board).collect()
}

/// Returns the render nodes that this user may not open.
fn refused_nodes(machine: &dyn Machine) -> Vec<Check> {
    let nodes = machine.list("dev/dri").into_iter().filter(|n| n.starts_with("renderD"));
    let refused = nodes.filter_map(|name| {
        let path = machine.root().join("dev/dri").join(&name);
        let error = machine.open(&path).err()?;
        (error.kind() == ErrorKind::PermissionDenied).then_some(())?;
        let group = group_of(machine, &path);
        let remedy = format!(
            "it belongs to the group {group}: join it, then log out and in again (containers: \
             --group-add {group})"
        );
        let found = format!("/dev/dri/{name}: {error}");
        let check = Check::fail("permissions", Kind::Device, found, remedy);
        Some(check.typing([format!("sudo usermod -aG {group} \"$USER\"")]))
    });
    refused.collect()
}

/// Returns the name of the group that a file belongs to.
fn group_of(machine: &dyn Machine, path: &Path) -> String {
    let name = || {
        let id = group_id(path)?.to_string();
        let groups = machine.read("etc/group")?;
        groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)? == id).then(|| name.to_owned())
        })
    };
    // A node that belongs to root is one that udev has not handed to a group.
    name().filter(|name| name != "root").unwrap_or_else(|| "render".into())
}

/// Returns the outcome of the driver's trial.
fn trial(verdict: &DriverVerdict, device: &DeviceInfo) -> Check {
    match (verdict.allows, verdict.note(device)) {
        (DriverUse::NotAtAll, Some(note)) => {
            Check::fail("gpu driver", Kind::Device, note, verdict.remedy())
        }
        (_, Some(note)) => Check::warn("gpu driver", note, verdict.remedy()),
        (_, None) => Check::pass("gpu driver", "came through a trial in a process of its own"),
    }
}

/// Compares the memory that the device offers with what the smallest 27B takes.
fn memory(machine: &dyn Machine, device: &DeviceInfo) -> Check {
    let (all, free, need) = (device.memory, device.free(), bytes(SMALLEST_27B));
    let found = format!("{} in all, {} free", bytes(all), bytes(free));
    if free >= SMALLEST_27B {
        return Check::pass("gpu memory", found);
    }
    let warn = |remedy: &str| {
        let remedy = format!("Gemma 3 27B at 9 GB takes {need}; {remedy}");
        Check::warn("gpu memory", found, remedy)
    };
    if all >= SMALLEST_27B {
        return warn("close the programs that hold the rest:")
            .typing(["sudo fuser -v /dev/dri/renderD*"]);
    }
    if !device.is_integrated {
        return warn("the layers that do not fit run on the processor; how many, and how fast:")
            .typing(["gemma plan 27b --recipe 9gb"]);
    }
    // More than three quarters would leave the system too little.
    let most = machine.memory("MemTotal").unwrap_or(0) / 4 * 3;
    if most <= all {
        return warn("the machine has too little memory to give the GPU more");
    }
    let pages = most / PAGE;
    let options = format!("options ttm pages_limit={pages} page_pool_size={pages}");
    warn("let graphics have three quarters of the memory, undo options that give less, restart:")
        .typing([
            &format!("echo '{options}' | sudo tee /etc/modprobe.d/gemma-ttm.conf"),
            "sudo update-initramfs -u  # Fedora: sudo dracut -f",
            "grep -rs -e gttsize -e pages_limit /etc/modprobe.d /etc/default/grub /proc/cmdline",
        ])
}

/// Where weights would run and whether they fit: what `generate` finds out before it loads them.
pub fn fits(
    weights: &Weights,
    context: usize,
    run: &RunOptions,
    found: &Found,
    available: Option<u64>,
    ui: &Ui,
) -> Result<Check> {
    let task = Task {
        weights,
        context,
        kv: load::kv_format(weights, run.kv)?,
        sequences: 1,
        prefixes: 0,
        npu: run.npu.is_asked(),
    };
    let devices = || match found {
        Ok(list) => Ok(list.clone()),
        Err(e) => Err(fault_of(e)
            .cloned()
            .unwrap_or_else(|| Fault::new(Kind::Device, e.to_string()))
            .into()),
    };
    let placement = placement::candidates_among(&task, run, devices, ui)?.swap_remove(0);
    placement::check_memory(&placement, available)?;
    let described = placement.describe();
    let split = placement.device.is_some() && placement.layout.cpu.layers > 0;
    Ok(match split {
        true => Check::warn(
            "model",
            described,
            "layers on the processor slow the others down: lower --ctx-size or --kv q8, or \
                quantise further",
        ),
        false => Check::pass("model", described),
    })
}
