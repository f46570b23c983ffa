//! Machines that are played: each with one thing wrong.

mod fake;

use super::host::{Directory, Found, Machine};
use super::*;
use crate::cli::args::Cli;
use crate::cli::ui::COLUMNS;
use crate::compute::cpu::isa::Isa;
use crate::error::Fault;
use crate::npu::probe::System;
use crate::runtime::driver::{Use, Verdict};
use crate::runtime::testing::{gpu as made_up_gpu, laptop_gpu};
use crate::vulkan::DeviceInfo;
use clap::Parser;
use fake::Fake;
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};

const GB: u64 = 1_000_000_000;

#[track_caller]
fn find<'a>(checks: &'a [Check], name: &str) -> &'a Check {
    checks.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no {name} in {checks:#?}"))
}

/// The check has this status, and its remedy or its commands name all of `words`.
#[track_caller]
fn is(checks: &[Check], name: &str, status: Status, words: &[&str]) {
    let check = find(checks, name);
    let said = format!(
        "{} {} {}",
        check.found,
        check.remedy.as_deref().unwrap_or(""),
        check.commands.join("\n")
    );
    assert_eq!(check.status, status, "{check:#?}");
    for word in words {
        assert!(said.contains(word), "no {word:?} in {check:#?}");
    }
}

#[test]
fn a_machine_with_nothing_wrong_passes_everything() {
    let fake = Fake::laptop();
    let checks = fake.examine(&[]);
    assert!(checks.iter().all(|c| c.status == Status::Pass), "{checks:#?}");
    assert_eq!(
        (exit_code(&checks), fake.tried.take()),
        (0, vec!["cpu".to_owned(), "AMD Radeon 780M".into()])
    );
    assert!(text(&checks, COLUMNS).ends_with("nothing stands in the way of a run\n"));
    let names: Vec<&str> = checks.iter().map(|c| c.name).collect();
    for name in [
        "processor",
        "memory",
        "vulkan",
        "gpu",
        "gpu memory",
        "gtt",
        "permissions",
        "kernels, cpu",
        "kernels, gpu",
        "npu",
    ]
    .into_iter()
    .chain(["gpu queue", "gpu watchdog", "gpu driver"])
    {
        assert!(names.contains(&name), "{names:?}");
    }
    for name in ["locked memory", "power profile", "cpu frequency", "power supply", "disk"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let json = report(&checks, None);
    assert_eq!(
        (&json["fail"], &json["warn"], json["pass"].as_u64()),
        (&0.into(), &0.into(), Some(checks.len() as u64))
    );
    assert_eq!(
        (&json["checks"][0]["status"], &json["checks"][0]["remedy"]),
        (&"PASS".into(), &Value::Null)
    );
}

#[test]
fn without_a_vulkan_loader_only_a_run_that_asks_for_a_gpu_stops() {
    let no_loader = Fault::new(Kind::Device, "no Vulkan library on this machine: libvulkan.so.1")
        .help("install a Vulkan driver");
    let fake = Fake { devices: Err(no_loader), ..Fake::laptop() };
    let install = [
        "libvulkan.so.1",
        "AMD",
        "sudo apt install libvulkan1 mesa-vulkan-drivers",
        "sudo dnf install vulkan-loader",
    ];
    let checks = fake.examine(&[]);
    is(&checks, "vulkan", Status::Warn, &install);
    assert_eq!((exit_code(&checks), fake.tried.take()), (0, vec!["cpu".to_owned()]));
    for options in [
        &["-d", "vulkan"][..],
        &["-d", "vulkan:0"],
        &["--gpu-layers", "all"],
        &["--gpu-layers", "4"],
    ] {
        let checks = fake.examine(options);
        is(&checks, "vulkan", Status::Fail, &install);
        assert_eq!(exit_code(&checks), 4, "{options:?}");
        let shown = text(&checks, COLUMNS);
        assert!(shown.ends_with("a run would stop: 1 failure, exit code 4\n"), "{shown}");
    }
    for options in [&["-d", "cpu"][..], &["-d", "vulkan", "--gpu-layers", "0"]] {
        assert_eq!(exit_code(&fake.examine(options)), 0, "{options:?}");
    }
    // What is on the bus decides what to install.
    fake.remove("sys/bus/pci/devices/0000:c5:00.0/driver");
    is(&fake.examine(&[]), "vulkan", Status::Warn, &["no kernel driver", "sudo modprobe amdgpu"]);
    fake.put("sys/bus/pci/devices/0000:c5:00.0/vendor", "0x10de\n");
    fake.link("sys/bus/pci/devices/0000:c5:00.0/driver", "../drivers/nvidia");
    is(&fake.examine(&[]), "vulkan", Status::Warn, &["NVIDIA", "sudo apt install nvidia-driver"]);
    fake.remove("sys/bus/pci/devices/0000:c5:00.0");
    is(
        &fake.examine(&[]),
        "vulkan",
        Status::Warn,
        &["no GPU is on the bus", "mesa-vulkan-drivers"],
    );
    // With no node either there is nothing that a driver could serve.
    fake.remove("dev/dri");
    let checks = fake.examine(&[]);
    is(&checks, "vulkan", Status::Pass, &["no GPU is on the bus", "the processor computes"]);
    assert!(find(&checks, "vulkan").commands.is_empty());
    is(
        &fake.examine(&["-d", "vulkan"]),
        "vulkan",
        Status::Fail,
        &["no GPU is on the bus", "--device cpu"],
    );
}

#[test]
fn a_node_that_may_not_be_opened_is_named_with_its_group() {
    // As drivers do it: what they may not open they do not list.
    let fake = Fake { refused: true, devices: Ok(Vec::new()), ..Fake::laptop() };
    let checks = fake.examine(&[]);
    is(
        &checks,
        "permissions",
        Status::Warn,
        &[
            "/dev/dri/renderD128",
            "ermission denied",
            "sudo usermod -aG render \"$USER\"",
            "log out",
        ],
    );
    is(&checks, "vulkan", Status::Warn, &["may not be opened"]);
    let checks = fake.examine(&["-d", "vulkan"]);
    is(&checks, "permissions", Status::Fail, &[]);
    assert_eq!(exit_code(&checks), 4);
    // The group is that of the node.
    let id = std::os::unix::fs::MetadataExt::gid(
        &std::fs::metadata(fake.root.path().join("dev/dri/renderD128")).unwrap(),
    );
    fake.put("etc/group", &format!("other:x:{}:\ngraphics:x:{id}:me\n", id + 1));
    is(&fake.examine(&[]), "permissions", Status::Warn, &["sudo usermod -aG graphics \"$USER\""]);
    // A driver that opens the GPU by nodes of its own needs none of these.
    let nvidia = Fake { refused: true, ..Fake::laptop() };
    is(&nvidia.examine(&[]), "permissions", Status::Pass, &[]);
}

#[test]
fn a_driver_on_the_processor_alone_is_no_gpu() {
    let lavapipe =
        || DeviceInfo { is_cpu: true, is_integrated: false, ..made_up_gpu("llvmpipe", 24 * GB) };
    let fake = Fake { devices: Ok(vec![lavapipe()]), ..Fake::laptop() };
    let checks = fake.examine(&[]);
    is(
        &checks,
        "vulkan",
        Status::Warn,
        &["computes on the processor", "llvmpipe", "sudo apt install"],
    );
    assert_eq!((exit_code(&checks), fake.tried.take()), (0, vec!["cpu".to_owned()]));
    assert_eq!(exit_code(&fake.examine(&["-d", "vulkan"])), 4);
    // By name it is taken, and that it is slow is said.
    let checks = fake.examine(&["-d", "vulkan:0"]);
    is(&checks, "gpu", Status::Warn, &["computes on the processor"]);
    assert_eq!(exit_code(&checks), 0);
    let relic = Fake {
        devices: Ok(vec![DeviceInfo {
            missing: vec!["int8 in shaders"],
            ..made_up_gpu("relic", GB)
        }]),
        ..Fake::laptop()
    };
    is(&relic.examine(&[]), "vulkan", Status::Warn, &["relic lacks int8 in shaders"]);
}

#[test]
fn a_tiny_heap_is_said_with_what_makes_it_larger() {
    let tiny = |memory| Fake {
        devices: Ok(vec![made_up_gpu("AMD Radeon 780M", memory)]),
        ..Fake::laptop()
    };
    // Three quarters of 32.8 GB, in pages of 4 KiB.
    let pages = 32_000_000u64 * 1024 / 4 * 3 / 4096;
    let fake = tiny(2 * GB);
    is(
        &fake.examine(&[]),
        "gpu memory",
        Status::Warn,
        &[&format!("pages_limit={pages} page_pool_size={pages}"), "update-initramfs", "2.00 GB"],
    );
    assert_eq!(exit_code(&fake.examine(&[])), 0);
    fake.put("proc/meminfo", "MemTotal: 2500000 kB\nMemAvailable: 2000000 kB\n");
    let checks = fake.examine(&[]);
    is(&checks, "gpu memory", Status::Warn, &["too little memory"]);
    is(&checks, "memory", Status::Warn, &["too little for Gemma 3 27B", "gemma plan"]);
    let full = DeviceInfo { available: Some(GB), ..made_up_gpu("AMD Radeon 780M", 21 * GB) };
    is(
        &Fake { devices: Ok(vec![full]), ..Fake::laptop() }.examine(&[]),
        "gpu memory",
        Status::Warn,
        &["1.00 GB free", "fuser"],
    );
    let board = DeviceInfo { is_integrated: false, ..made_up_gpu("board", 8 * GB) };
    is(
        &Fake { devices: Ok(vec![board]), ..Fake::laptop() }.examine(&[]),
        "gpu memory",
        Status::Warn,
        &["gemma plan 27b --recipe 9gb"],
    );
    let fake = Fake::laptop();
    fake.put("sys/module/amdgpu/parameters/gttsize", "4096\n");
    is(
        &fake.examine(&[]),
        "gtt",
        Status::Warn,
        &["amdgpu.gttsize=4096", "grep -rs gttsize /etc/modprobe.d"],
    );
    fake.put("sys/module/amdgpu/parameters/gttsize", "-1\n");
    fake.put("sys/module/ttm/parameters/pages_limit", "1000000\n");
    is(
        &fake.examine(&[]),
        "gtt",
        Status::Warn,
        &["ttm.pages_limit 4.10 GB", "grep -rs pages_limit"],
    );
}

#[test]
fn how_the_gpu_is_driven_is_said() {
    let fake = Fake::laptop();
    let checks = fake.examine(&[]);
    is(&checks, "gpu queue", Status::Pass, &["for computing alone", "subgroups of 32"]);
    is(&checks, "gpu watchdog", Status::Pass, &["10 s", "0.2 s"]);
    is(&checks, "gpu driver", Status::Pass, &["came through", "int8 matrices of 16x16x16"]);
    let drawing =
        Fake { devices: Ok(vec![DeviceInfo { draws: true, ..laptop_gpu() }]), ..Fake::laptop() };
    is(&drawing.examine(&[]), "gpu queue", Status::Pass, &["also draws"]);
    let plain =
        Fake { verdict: Verdict { shapes: Vec::new(), ..fake.verdict.clone() }, ..Fake::laptop() };
    is(&plain.examine(&[]), "gpu driver", Status::Pass, &["lists no int8 matrices"]);
}

#[test]
fn a_watchdog_is_read_as_the_kernel_reads_it() {
    let fake = Fake::laptop();
    let with = |setting: &str| {
        fake.put("sys/module/amdgpu/parameters/lockup_timeout", setting);
        fake.examine(&[])
    };
    for (setting, words) in [
        ("0", "10 s"),
        ("2000", "2 s"),
        ("5000,3000,1,1", "3 s"),
        ("-1", "off"),
        ("-1,4000", "4 s"),
    ] {
        is(&with(setting), "gpu watchdog", Status::Pass, &[words, "0.2 s"]);
    }
    for setting in ["500", "10000,900,10000,10000"] {
        is(
            &with(setting),
            "gpu watchdog",
            Status::Warn,
            &["may lose the GPU", "grep -rs lockup_timeout /etc/modprobe.d"],
        );
    }
    fake.put("proc/sys/kernel/osrelease", "7.0.3-arch1\n");
    is(&with(""), "gpu watchdog", Status::Pass, &["2 s", "0.2 s"]);
    // Other drivers do not say.
    fake.remove("sys/module/amdgpu/parameters/lockup_timeout");
    let checks = fake.examine(&[]);
    assert!(!find(&checks, "gpu watchdog").found.contains("amdgpu"), "{checks:?}");
}

#[test]
fn a_driver_that_did_not_come_through_its_trial_is_said_with_what_makes_another() {
    let tried = |allows| Fake {
        verdict: Verdict {
            allows,
            why: Some("was ended by signal 11".into()),
            shapes: Vec::new(),
            file: Some("/home/me/.cache/gemma/driver-1.json".into()),
        },
        ..Fake::laptop()
    };
    let words = ["signal 11", "update the driver", "rm '/home/me/.cache/gemma/driver-1.json'"];
    let slower = tried(Use::WithoutMatrices);
    is(&slower.examine(&["-d", "vulkan"]), "gpu driver", Status::Warn, &words);
    is(&slower.examine(&[]), "gpu driver", Status::Warn, &["without its matrix instructions"]);
    let none = tried(Use::NotAtAll);
    is(&none.examine(&[]), "gpu driver", Status::Warn, &words);
    let checks = none.examine(&["-d", "vulkan"]);
    is(&checks, "gpu driver", Status::Fail, &["is not used"]);
    assert_eq!(exit_code(&checks), 4);
}

/// With a model the same rules as at loading say where it runs, and whether.
#[test]
fn a_model_is_placed_as_a_run_would_place_it() {
    let shape = crate::runtime::shapes::Shape::B4;
    let formats = crate::runtime::shapes::Formats {
        weights: Some("i4-g32".parse().unwrap()),
        ..Default::default()
    };
    let weights = shape.weights(&formats).unwrap();
    let judge = |memory: u64, options: &[&str], available: u64| {
        let typed = Cli::parse_from([&["gemma", "doctor"], options].concat());
        let super::super::args::Command::Doctor(doctor) = typed.command else { unreachable!() };
        let found: Found = Ok(vec![made_up_gpu("GPU", memory)]);
        let run = &doctor.model.run.settled().unwrap();
        gpu::fits("model", &weights, 2048, run, &found, Some(available), &Ui::plain())
            .unwrap_or_else(|e| Check::error("model", &e))
    };
    assert_eq!(judge(8 * GB, &[], 16 * GB).status, Status::Pass);
    let split = judge(3 * GB / 2, &[], 16 * GB);
    assert!(split.status == Status::Warn && split.found.contains("of 34 layers"), "{split:?}");
    for (memory, options, available) in [
        (3 * GB / 2, &["--gpu-layers", "all"][..], 16 * GB),
        (GB / 8, &["-d", "vulkan"], 16 * GB),
        (8 * GB, &["-d", "cpu"], GB),
    ] {
        let check = judge(memory, options, available);
        assert!(
            check.status == Status::Fail && check.code == 5 && check.remedy.is_some(),
            "{check:?}"
        );
    }
}

#[test]
fn a_gpu_that_fails_or_computes_wrongly_is_found_out() {
    let lost = Fault::new(Kind::Device, "the GPU was lost while computing");
    let fake = Fake { trial: Err(lost), ..Fake::laptop() };
    is(
        &fake.examine(&[]),
        "kernels, gpu",
        Status::Warn,
        &["lost", "the processor is used instead", "--device cpu"],
    );
    assert_eq!(exit_code(&fake.examine(&["-d", "vulkan"])), 4);
}

#[test]
fn little_locked_memory_matters_to_an_npu_alone() {
    let fake = Fake::laptop();
    is(&fake.examine(&[]), "locked memory", Status::Pass, &["only an NPU"]);
    fake.npu();
    let checks = fake.examine(&[]);
    is(
        &checks,
        "locked memory",
        Status::Warn,
        &["8.39 MB", "ulimit -l unlimited", "/etc/security/limits.d/90-memlock.conf"],
    );
    is(&checks, "npu", Status::Warn, &["/dev/accel/accel0", "goes on without"]);
    is(&checks, "npu array", Status::Warn, &["build.sh"]);
    assert_eq!(exit_code(&checks), 0);
    let rich = Fake { locked: u64::MAX, ..Fake::laptop() };
    rich.npu();
    is(&rich.examine(&[]), "locked memory", Status::Pass, &["unlimited"]);
    assert!(fake.examine(&["--npu", "off"]).iter().all(|c| c.status == Status::Pass));
    // On the bus, and no driver.
    let bare = Fake::laptop();
    bare.put("sys/bus/pci/devices/0000:c6:00.1/vendor", "0x1022\n");
    bare.put("sys/bus/pci/devices/0000:c6:00.1/device", "0x1502\n");
    is(&bare.examine(&[]), "npu", Status::Warn, &["no driver", "sudo modprobe amdxdna"]);
}

#[test]
fn what_saves_power_is_said() {
    let fake = Fake::laptop();
    fake.put("sys/firmware/acpi/platform_profile", "low-power\n");
    fake.cpufreq("amd-pstate-epp", "powersave", Some("power"));
    fake.put("sys/class/power_supply/BAT0/status", "Discharging\n");
    fake.put("sys/class/drm/card1/device/power_dpm_force_performance_level", "low\n");
    let checks = fake.examine(&[]);
    is(
        &checks,
        "power profile",
        Status::Warn,
        &["powerprofilesctl set performance", "tee /sys/firmware/acpi/platform_profile"],
    );
    is(&checks, "cpu frequency", Status::Warn, &["echo balance_performance"]);
    is(&checks, "power supply", Status::Warn, &["plug"]);
    is(
        &checks,
        "gpu clocks",
        Status::Warn,
        &["cd /sys/class/drm/card1/device", "echo auto |", "power_dpm_force_performance_level"],
    );
    let old = Fake::laptop();
    old.remove("sys/devices/system/cpu/cpu0/cpufreq");
    old.cpufreq("acpi-cpufreq", "powersave", None);
    is(&old.examine(&[]), "cpu frequency", Status::Warn, &["echo schedutil"]);
    // A server says nothing of all this.
    old.remove("sys");
    assert!(!old.examine(&[]).iter().any(|c| matches!(
        c.name,
        "power profile" | "cpu frequency" | "power supply" | "gpu clocks"
    )));
}

#[test]
fn memory_processor_and_disk_have_their_remedies() {
    let fake = Fake { isa: vec![Isa::Scalar], room: (GB, false), ..Fake::laptop() };
    fake.put("proc/meminfo", "MemTotal: 32000000 kB\nMemAvailable: 4000000 kB\n");
    let checks = fake.examine(&[]);
    is(&checks, "processor", Status::Warn, &["AVX2", "-cpu host"]);
    is(&checks, "memory", Status::Warn, &["close other programs", "ps -eo rss,comm"]);
    is(&checks, "disk", Status::Warn, &["/home/me/.cache/gemma", "sudo install -d -o \"$USER\""]);
    let fake = Fake { room: (5_000_000, true), ..Fake::laptop() };
    is(&fake.examine(&[]), "disk", Status::Warn, &["5.00 MB free", "du -xh"]);
    fake.remove("proc/meminfo");
    is(&fake.examine(&[]), "memory", Status::Warn, &["/proc"]);
}

#[test]
fn swap_in_use_and_what_is_kept_of_prompts_are_said() {
    let fake = Fake { kept: (2, 24_000_000), ..Fake::laptop() };
    let memory = |swap: &str| format!("MemTotal: 32000000 kB\nMemAvailable: 28000000 kB\n{swap}");
    fake.put("proc/meminfo", &memory("SwapTotal: 16000000 kB\nSwapFree: 15000000 kB\n"));
    let checks = fake.examine(&[]);
    is(&checks, "swap", Status::Pass, &["1.02 GB of 16.4 GB in use"]);
    let kept = checks.iter().find(|c| c.found.contains("drafts")).unwrap();
    assert!(
        kept.found.contains("24.0 MB in 2 files")
            && kept.commands == ["rm -r '/home/me/.cache/gemma'"],
        "{kept:?}"
    );
    fake.put("proc/meminfo", &memory("SwapTotal: 16000000 kB\nSwapFree: 2000000 kB\n"));
    is(&fake.examine(&[]), "swap", Status::Warn, &["14.3 GB of 16.4 GB", "VmSwap"]);
    fake.put("proc/meminfo", &memory("SwapTotal: 0 kB\nSwapFree: 0 kB\n"));
    is(&fake.examine(&[]), "swap", Status::Pass, &["none"]);
    // Nothing is kept: there is nothing to clear.
    let empty = Fake::laptop().examine(&[]);
    assert!(empty.iter().all(|c| c.commands.is_empty()));
}
