//! Vulkan: the loader and its drivers, the device that would be taken, who may open it, how much
//! memory it gives.

use super::host::{Found, Machine};
use super::storage::SMALLEST_27B;
use super::{Asked, Check, Status};
use crate::cli::ui::Ui;
use crate::error::{Fault, Kind, fault_of};
use crate::gemma::Weights;
use crate::runtime::driver::{Use, Verdict};
use crate::runtime::load;
use crate::runtime::options::RunOptions;
use crate::runtime::placement::measure::Task;
use crate::runtime::placement::{self, Device};
use crate::util::units::bytes;
use crate::vulkan::{Choice, DeviceInfo, LIMIT, choose};
use anyhow::Result;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

/// PCI vendors whose graphics have a free Vulkan driver, or their own.
const VENDORS: [(&str, &str, &str); 3] =
    [("0x1002", "AMD", "amdgpu"), ("0x8086", "Intel", "i915"), ("0x10de", "NVIDIA", "nvidia")];
const PAGE: u64 = 4096;

pub fn checks(machine: &dyn Machine, asked: &Asked<'_>, found: &Found) -> Vec<Check> {
    let (nodes, boards) = (render_nodes(machine), boards(machine));
    let nothing = nodes.is_empty() && boards.is_empty();
    let choice = match asked.options.run.device {
        Device::Cpu => return vec![Check::pass("vulkan", "not asked for (--device cpu)")],
        Device::Vulkan(choice) => choice,
        Device::Auto => Choice::Best,
    };
    // What leaves a run without a GPU stops it only where one was asked for.
    let without_gpu = |check: Check| if asked.needs_gpu() { check } else { check.only_warns() };
    let chosen = match found {
        Ok(list) => choose(list, choice),
        Err(e) => {
            if nothing {
                return vec![no_gpu(asked, "")];
            }
            let mut checks = vec![without_gpu(driver(&e.to_string(), fault_of(e), &boards))];
            checks
                .extend(nodes.iter().filter(|n| n.is_refused()).map(|n| without_gpu(n.refused())));
            return checks;
        }
    };
    let list = found.as_deref().unwrap_or_default();
    let names: Vec<String> =
        list.iter().map(|d| format!("vulkan:{} {} ({})", d.index, d.name, d.driver)).collect();
    let mut checks = Vec::new();
    match chosen {
        Ok(device) => {
            checks.push(Check::pass("vulkan", names.join("; ")));
            if device.is_cpu {
                let found = format!("vulkan:{} computes on the processor", device.index);
                checks.push(Check::warn(
                    "gpu",
                    found,
                    "the processor's own kernels are faster: leave --device out, or name a GPU",
                ));
            } else {
                checks.push(Check::pass(
                    "gpu",
                    format!(
                        "vulkan:{} {}, Vulkan {}.{}",
                        device.index, device.name, device.api.0, device.api.1
                    ),
                ));
                checks.push(queue(device));
                checks.push(watchdog(machine));
                checks.push(heap(machine, device));
                checks.extend(gtt(machine, device));
            }
            let tried = trial(&machine.verdict(device), device);
            checks.push(if tried.status == Status::Fail { without_gpu(tried) } else { tried });
        }
        Err(_) if nothing && choice == Choice::Best => {
            checks.push(no_gpu(asked, &names.join("; ")))
        }
        Err(why) => {
            // Where a node is closed to this user, drivers just do not list the device.
            let refused: Vec<&Node> = nodes.iter().filter(|n| n.is_refused()).collect();
            let fault = fault_of(&why);
            let seen = if names.is_empty() {
                why.to_string()
            } else {
                format!("{why} (found: {})", names.join("; "))
            };
            if refused.is_empty() {
                checks.push(without_gpu(driver(&seen, fault, &boards)));
            } else {
                let check = Check::fail(
                    "vulkan",
                    Kind::Device,
                    seen,
                    "the GPU's node may not be opened, so no driver lists it: see below",
                );
                checks.push(without_gpu(check));
            }
        }
    }
    let opened = chosen_is_gpu(list, choice);
    checks.extend(
        permissions(&nodes, opened)
            .map(|check| if check.status == Status::Fail { without_gpu(check) } else { check }),
    );
    checks
}

fn chosen_is_gpu(list: &[DeviceInfo], choice: Choice) -> bool {
    choose(list, choice).is_ok_and(|d| !d.is_cpu)
}

/// Nothing on the bus, and no node: there is nothing to install.
fn no_gpu(asked: &Asked<'_>, others: &str) -> Check {
    let others = if others.is_empty() { String::new() } else { format!(" (found: {others})") };
    let found = format!("no GPU is on the bus{others}");
    match asked.needs_gpu() {
        true => Check::fail(
            "vulkan",
            Kind::Device,
            found,
            "use --device cpu, and leave --gpu-layers out",
        ),
        false => Check::pass(
            "vulkan",
            format!("{found}, and none is needed: the processor computes everything"),
        ),
    }
}

/// No driver for a GPU: what to install depends on what is on the bus.
fn driver(found: &str, fault: Option<&Fault>, boards: &[Board]) -> Check {
    let check = |remedy: &str| Check::fail("vulkan", Kind::Device, found, remedy);
    let mesa = [
        "sudo apt install libvulkan1 mesa-vulkan-drivers  # Debian",
        "sudo dnf install vulkan-loader mesa-vulkan-drivers # Fedora",
    ];
    match boards {
        [] => {
            let other = fault.and_then(|f| f.help.as_deref()).unwrap_or("use --device cpu");
            check(&format!("no GPU is on the bus that this program knows; {other}")).typing(mesa)
        }
        [board, ..] if board.driver.is_none() => check(&format!(
            "the {} graphics at {} have no kernel driver: load it, and see why it did not load \
                itself:",
            board.name, board.slot
        ))
        .typing([
            format!(
                "sudo modprobe \
            {}",
                board.module
            ),
            format!(
                "sudo dmesg | grep -i \
            {}",
                board.module
            ),
        ]),
        [board, ..] if board.module == "nvidia" => check(
            "NVIDIA's own driver brings its Vulkan driver (containers: \
                NVIDIA_DRIVER_CAPABILITIES must name graphics):",
        )
        .typing([
            "sudo apt install nvidia-driver  # \
                    Debian",
            "sudo ubuntu-drivers install  \
                    # Ubuntu",
        ]),
        [board, ..] => check(&format!(
            "install the loader and Mesa's driver for the {} \
            graphics:",
            board.name
        ))
        .typing(mesa),
    }
}

/// Graphics on the bus.
struct Board {
    slot: String,
    name: &'static str,
    module: &'static str,
    driver: Option<String>,
}

fn boards(machine: &dyn Machine) -> Vec<Board> {
    let one = |slot: String| {
        let of = |file: &str| machine.read(&format!("sys/bus/pci/devices/{slot}/{file}"));
        let vendor = of("vendor")?;
        let (_, name, module) = *VENDORS.iter().find(|(id, ..)| *id == vendor)?;
        // Class 03: display controllers.
        of("class")?.starts_with("0x03").then_some(())?;
        let driver = machine.root().join(format!("sys/bus/pci/devices/{slot}/driver"));
        let driver = std::fs::read_link(driver)
            .ok()
            .and_then(|d| d.file_name()?.to_str().map(str::to_owned));
        Some(Board { slot, name, module, driver })
    };
    machine.list("sys/bus/pci/devices").into_iter().filter_map(one).collect()
}

/// A render node, and what opening it gave.
struct Node {
    path: String,
    error: Option<std::io::Error>,
    /// Who may, as far as /etc/group says.
    group: String,
}

impl Node {
    fn is_refused(&self) -> bool {
        self.error.as_ref().is_some_and(|e| e.kind() == ErrorKind::PermissionDenied)
    }

    fn refused(&self) -> Check {
        let why = self.error.as_ref().map_or(String::new(), |e| format!(": {e}"));
        let remedy = format!(
            "it belongs to the group {}: join it, then log out and in again (containers: \
                --group-add {})",
            self.group, self.group
        );
        Check::fail("permissions", Kind::Device, format!("{}{why}", self.path), remedy)
            .typing([format!("sudo usermod -aG {} \"$USER\"", self.group)])
    }
}

fn render_nodes(machine: &dyn Machine) -> Vec<Node> {
    let names = machine.list("dev/dri").into_iter().filter(|n| n.starts_with("renderD"));
    names
        .map(|name| {
            let path = machine.root().join("dev/dri").join(&name);
            Node {
                error: machine.open(&path).err(),
                group: group_of(machine, &path),
                path: format!("/dev/dri/{name}"),
            }
        })
        .collect()
}

/// Name of the group that a file belongs to.
pub fn group_of(machine: &dyn Machine, path: &std::path::Path) -> String {
    let name = || {
        let id = std::fs::metadata(path).ok()?.gid().to_string();
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

/// Who may open the GPU; nothing to say where there are no nodes and no GPU needs them.
fn permissions(nodes: &[Node], opened: bool) -> Option<Check> {
    let good = nodes.iter().find(|n| n.error.is_none());
    match (good, nodes.first()) {
        (Some(node), _) => Some(Check::pass("permissions", format!("{} may be opened", node.path))),
        // NVIDIA's driver has nodes of its own.
        (None, _) if opened => Some(Check::pass("permissions", "the driver opens the GPU")),
        (None, Some(node)) if node.is_refused() => Some(node.refused()),
        (None, Some(node)) => {
            let why = node.error.as_ref().map_or(String::new(), |e| e.to_string());
            Some(
                Check::warn(
                    "permissions",
                    format!("{}: {why}", node.path),
                    "see what the kernel says of it:",
                )
                .typing(["sudo dmesg | grep -i drm"]),
            )
        }
        (None, None) => None,
    }
}

/// How kernels reach the device.
fn queue(device: &DeviceInfo) -> Check {
    let queue = match device.draws {
        true => "the one that also draws".to_owned(),
        false => "one for computing alone".to_owned(),
    };
    Check::pass("gpu queue", format!("{queue}, subgroups of {}", device.subgroup))
}

/// Milliseconds after which amdgpu takes a submission for a hang where nobody says otherwise, and
/// since which version of Linux.
const LOCKUP: [(u32, i64); 2] = [(7, 2000), (0, 10_000)];

/// After what time the kernel would take a pass for a hang, against the time that one is given.
fn watchdog(machine: &dyn Machine) -> Check {
    let bound =
        format!("passes go out in pieces that are estimated to take at most {LIMIT} s each");
    let Some(setting) = machine.read("sys/module/amdgpu/parameters/lockup_timeout") else {
        return Check::pass("gpu watchdog", bound);
    };
    let release = machine.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let major: u32 = release.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let default = LOCKUP.iter().find(|(since, _)| major >= *since).map_or(0, |(_, ms)| *ms);
    // One number for all queues, or those of graphics, computing, copies and video: 0 stands for
    // the default, a negative one for no limit.
    let given: Vec<i64> = setting.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    let timeouts =
        given.iter().take(2).map(|ms| if *ms == 0 { default } else { *ms }).filter(|ms| *ms > 0);
    let unlimited = !given.is_empty() && given.iter().take(2).all(|ms| *ms < 0);
    let shortest = timeouts.min().unwrap_or(default);
    if unlimited {
        return Check::pass(
            "gpu watchdog",
            format!("off (amdgpu.lockup_timeout={setting}); {bound}"),
        );
    }
    let seconds = shortest as f64 / 1000.0;
    let found = format!("amdgpu takes what runs for {seconds} s for a hang; {bound}");
    if seconds >= 5.0 * LIMIT {
        return Check::pass("gpu watchdog", found);
    }
    let remedy = "amdgpu.lockup_timeout is so short that a long prompt may lose the GPU: take it \
        out, and restart; where it is set:";
    Check::warn("gpu watchdog", found, remedy)
        .typing(["grep -rs lockup_timeout /etc/modprobe.d /etc/default/grub /proc/cmdline"])
}

/// What came of the driver's trial.
fn trial(verdict: &Verdict, device: &DeviceInfo) -> Check {
    let shapes = match &verdict.shapes[..] {
        [] if device.offers_matrices => "it lists no int8 matrices".into(),
        [] => "it has no matrix instructions".into(),
        shapes => format!("int8 matrices of {}", shapes.join(", ")),
    };
    match (verdict.allows, verdict.note(device)) {
        (Use::NotAtAll, Some(note)) => {
            Check::fail("gpu driver", Kind::Device, note, verdict.remedy())
        }
        (_, Some(note)) => Check::warn("gpu driver", note, verdict.remedy()),
        (_, None) => Check::pass(
            "gpu driver",
            format!("came through a trial in a process of its own; {shapes}"),
        ),
    }
}

/// The memory that the device offers, against what the smallest 27B takes.
fn heap(machine: &dyn Machine, device: &DeviceInfo) -> Check {
    let (all, free) = (device.memory, device.free());
    let found = format!(
        "{} in all, {} free, at most {} at a time",
        bytes(all),
        bytes(free),
        bytes(device.max_allocation)
    );
    let need = bytes(SMALLEST_27B);
    if free >= SMALLEST_27B {
        return Check::pass("gpu memory", found);
    }
    if all >= SMALLEST_27B {
        let remedy = format!(
            "Gemma 3 27B at 9 GB takes {need}: close what holds the rest, or some layers run on \
                the processor; who has the GPU open:"
        );
        return Check::warn("gpu memory", found, remedy)
            .typing(["sudo fuser -v /dev/dri/renderD*"]);
    }
    if !device.is_integrated {
        let remedy = format!(
            "Gemma 3 27B at 9 GB takes {need}: the layers that do not fit run on the processor; \
                how many, and how fast:"
        );
        return Check::warn("gpu memory", found, remedy).typing(["gemma plan 27b --recipe 9gb"]);
    }
    let remedy = format!(
        "less than the {need} that Gemma 3 27B takes at 9 GB, so layers go to the processor"
    );
    let total = machine.memory("MemTotal").unwrap_or(0);
    // More than three quarters would leave the system too little.
    if total / 4 * 3 <= all {
        return Check::warn(
            "gpu memory",
            found,
            format!("{remedy}; the machine has too little memory to give the GPU more"),
        );
    }
    let pages = total / 4 * 3 / PAGE;
    Check::warn(
        "gpu memory",
        found,
        format!("{remedy}: let graphics have three quarters of the memory, and restart"),
    )
    .typing(pages_limit(pages))
}

/// Lets the kernel hand out so many pages to graphics.
fn pages_limit(pages: u64) -> Vec<String> {
    vec![
        format!(
            "echo 'options ttm pages_limit={pages} page_pool_size={pages}' | sudo tee \
                /etc/modprobe.d/gemma-ttm.conf"
        ),
        "sudo update-initramfs -u  # Fedora: sudo dracut -f".into(),
    ]
}

/// What the kernel lets AMD's graphics have of the machine's memory.
fn gtt(machine: &dyn Machine, device: &DeviceInfo) -> Option<Check> {
    let cards = machine
        .list("sys/class/drm")
        .into_iter()
        .filter(|name| name.starts_with("card") && !name.contains('-'));
    let number = |path: String| machine.read(&path)?.parse::<i64>().ok();
    let card = cards
        .into_iter()
        .find(|card| number(format!("sys/class/drm/{card}/device/mem_info_gtt_total")).is_some())?;
    let of = |file: &str| {
        number(format!("sys/class/drm/{card}/device/{file}")).unwrap_or(0).max(0) as u64
    };
    let (vram, gtt, used) =
        (of("mem_info_vram_total"), of("mem_info_gtt_total"), of("mem_info_gtt_used"));
    let limit = number("sys/module/amdgpu/parameters/gttsize".into()).filter(|mib| *mib >= 0);
    let pages = number("sys/module/ttm/parameters/pages_limit".into())
        .filter(|pages| *pages > 0)
        .map(|pages| pages as u64 * PAGE);
    let pages_text = pages.map_or(String::new(), |p| format!(", ttm.pages_limit {}", bytes(p)));
    let found = format!(
        "{card}: {} VRAM, {} GTT ({} used){pages_text}",
        bytes(vram),
        bytes(gtt),
        bytes(used)
    );
    let total = machine.memory("MemTotal").unwrap_or(0);
    // By default graphics may have half of the memory.
    let half = total / 2;
    match limit {
        Some(mib) if device.is_integrated && (mib as u64) << 20 < half => Some(
            Check::warn(
                "gtt",
                format!(
                    "{found}, \
                amdgpu.gttsize={mib}"
                ),
                "this option holds \
                graphics below the usual half of the memory: take it out, and restart; where it is \
                set:",
            )
            .typing(["grep -rs gttsize /etc/modprobe.d /etc/default/grub /proc/cmdline"]),
        ),
        _ if device.is_integrated && pages.is_some_and(|p| p < half) => Some(
            Check::warn(
                "gtt",
                found,
                "ttm.pages_limit holds graphics below the usual half of the \
                memory: take it out or raise it, and restart; where it is set:",
            )
            .typing(["grep -rs pages_limit /etc/modprobe.d /etc/default/grub /proc/cmdline"]),
        ),
        _ => Some(Check::pass("gtt", found)),
    }
}

/// Where weights would run and whether they fit: what `generate` finds out before it loads them.
pub fn fits(
    name: &'static str,
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
            name,
            described,
            "layers on the processor slow the others down: lower --ctx-size or --kv q8, or \
                quantise further",
        ),
        false => Check::pass(name, described),
    })
}
