//! Machines that are played: each with one thing wrong.

mod fake;

use super::host::{Found, Machine};
use super::*;
use crate::cli::commands::Cli;
use crate::cli::io::ui::COLUMNS;
use crate::compute::DeviceInfo;
use crate::compute::cpu::isa::Isa;
use crate::error::Fault;
use crate::runtime::devices::backends::NpuSystem;
use crate::runtime::devices::driver::{DriverUse, DriverVerdict};
use crate::runtime::devices::testing::{gpu as made_up_gpu, laptop_gpu};
use crate::runtime::model::shapes::{MadeUpFormats, Shape};
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
    let expected = [
        "processor",
        "memory",
        "vulkan",
        "gpu",
        "gpu memory",
        "gpu driver",
        "kernels, cpu",
        "kernels, gpu",
        "npu",
        "power profile",
        "cache",
    ];
    assert_eq!(names, expected);
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
    let install = ["libvulkan.so.1", "AMD", "sudo apt install libvulkan1", "sudo dnf install"];
    let checks = fake.examine(&[]);
    is(&checks, "vulkan", Status::Warn, &install);
    assert_eq!((exit_code(&checks), fake.tried.take()), (0, vec!["cpu".to_owned()]));
    for options in ["-d vulkan", "-d vulkan:0", "--gpu-layers all", "--gpu-layers 4"] {
        let checks = fake.examine(&options.split(' ').collect::<Vec<_>>());
        is(&checks, "vulkan", Status::Fail, &install);
        assert_eq!(exit_code(&checks), 4, "{options:?}");
        let shown = text(&checks, COLUMNS);
        assert!(shown.ends_with("a run would stop: 1 failure, exit code 4\n"), "{shown}");
    }
    for options in [&["-d", "cpu"][..], &["-d", "vulkan", "--gpu-layers", "0"]] {
        assert_eq!(exit_code(&fake.examine(options)), 0, "{options:?}");
    }
    // The graphics on the bus decide what to install.
    let warns = |words: &[&str]| is(&fake.examine(&[]), "vulkan", Status::Warn, words);
    let board = "sys/bus/pci/devices/0000:c5:00.0";
    fake.remove(&format!("{board}/driver"));
    warns(&["no kernel driver", "sudo modprobe amdgpu"]);
    fake.put(&format!("{board}/vendor"), "0x10de\n");
    fake.link(&format!("{board}/driver"), "../drivers/nvidia");
    warns(&["NVIDIA", "sudo apt install nvidia-driver"]);
    fake.remove(board);
    warns(&["no GPU is on the bus", "mesa-vulkan-drivers"]);
    // With no node either there is nothing that a driver could serve.
    fake.remove("dev/dri");
    let (bare, asked) = (fake.examine(&[]), fake.examine(&["-d", "vulkan"]));
    is(&bare, "vulkan", Status::Pass, &["no GPU is on the bus, and none is needed"]);
    is(&asked, "vulkan", Status::Fail, &["no GPU is on the bus", "--device cpu"]);
}

#[test]
fn a_node_that_may_not_be_opened_is_named_with_its_group() {
    // Drivers do not list the devices that they may not open.
    let fake = Fake { refused: true, devices: Ok(Vec::new()), ..Fake::laptop() };
    let join = "sudo usermod -aG render \"$USER\"";
    let words = ["/dev/dri/renderD128", "ermission denied", join, "log out"];
    is(&fake.examine(&[]), "permissions", Status::Warn, &words);
    let checks = fake.examine(&["-d", "vulkan"]);
    is(&checks, "permissions", Status::Fail, &[]);
    assert_eq!(exit_code(&checks), 4);
    // The group is that of the node.
    let node = fake.root.path().join("dev/dri/renderD128");
    let id = crate::os::files::group_id(&node).unwrap();
    fake.put("etc/group", &format!("other:x:{}:\ngraphics:x:{id}:me\n", id + 1));
    is(&fake.examine(&[]), "permissions", Status::Warn, &["sudo usermod -aG graphics \"$USER\""]);
    // A driver that opens the GPU by nodes of its own needs none of these.
    let nvidia = Fake { refused: true, ..Fake::laptop() };
    assert!(nvidia.examine(&[]).iter().all(|c| c.status == Status::Pass));
}

#[test]
fn a_driver_on_the_processor_alone_is_no_gpu() {
    let lavapipe =
        DeviceInfo { is_cpu: true, is_integrated: false, ..made_up_gpu("llvmpipe", 24 * GB) };
    let fake = Fake { devices: Ok(vec![lavapipe]), ..Fake::laptop() };
    let checks = fake.examine(&[]);
    let words = ["computes on the processor", "llvmpipe", "sudo apt install"];
    is(&checks, "vulkan", Status::Warn, &words);
    assert_eq!((exit_code(&checks), fake.tried.take()), (0, vec!["cpu".to_owned()]));
    assert_eq!(exit_code(&fake.examine(&["-d", "vulkan"])), 4);
    // Named, it is taken with a warning that it is slow.
    let checks = fake.examine(&["-d", "vulkan:0"]);
    is(&checks, "gpu", Status::Warn, &["computes on the processor"]);
    assert_eq!(exit_code(&checks), 0);
    let relic = DeviceInfo { missing: vec!["int8 in shaders"], ..made_up_gpu("relic", GB) };
    let fake = Fake { devices: Ok(vec![relic]), ..Fake::laptop() };
    is(&fake.examine(&[]), "vulkan", Status::Warn, &["relic lacks int8 in shaders"]);
}

#[test]
fn a_tiny_heap_is_said_with_what_makes_it_larger() {
    let gpu = |device| Fake { devices: Ok(vec![device]), ..Fake::laptop() };
    let warns = |fake: &Fake, words: &[&str]| {
        is(&fake.examine(&[]), "gpu memory", Status::Warn, words);
    };
    let tiny = gpu(made_up_gpu("AMD Radeon 780M", 2 * GB));
    // Three quarters of 32.8 GB, in pages of 4 KiB.
    let pages = 32_000_000u64 * 1024 / 4 * 3 / 4096;
    let options = format!("pages_limit={pages} page_pool_size={pages}");
    warns(&tiny, &[&options, "update-initramfs", "2.00 GB", "gttsize"]);
    assert_eq!(exit_code(&tiny.examine(&[])), 0);
    tiny.put("proc/meminfo", "MemTotal: 2500000 kB\nMemAvailable: 2000000 kB\n");
    warns(&tiny, &["too little memory"]);
    is(&tiny.examine(&[]), "memory", Status::Warn, &["too little for Gemma 3 27B", "gemma plan"]);
    let full = DeviceInfo { available: Some(GB), ..made_up_gpu("AMD Radeon 780M", 21 * GB) };
    warns(&gpu(full), &["1.00 GB free", "fuser"]);
    let board = DeviceInfo { is_integrated: false, ..made_up_gpu("board", 8 * GB) };
    warns(&gpu(board), &["gemma plan 27b --recipe 9gb"]);
}

#[test]
fn a_driver_that_did_not_come_through_its_trial_is_said_with_what_makes_another() {
    let tried = |allows| Fake {
        verdict: DriverVerdict {
            allows,
            why: Some("was ended by signal 11".into()),
            shapes: Vec::new(),
            file: Some("/home/me/.cache/gemma/driver-1.json".into()),
        },
        ..Fake::laptop()
    };
    let words = ["signal 11", "update the driver", "rm '/home/me/.cache/gemma/driver-1.json'"];
    let slower = tried(DriverUse::WithoutMatrices);
    is(&slower.examine(&["-d", "vulkan"]), "gpu driver", Status::Warn, &words);
    is(&slower.examine(&[]), "gpu driver", Status::Warn, &["without its matrix instructions"]);
    let none = tried(DriverUse::NotAtAll);
    is(&none.examine(&[]), "gpu driver", Status::Warn, &words);
    let checks = none.examine(&["-d", "vulkan"]);
    is(&checks, "gpu driver", Status::Fail, &["is not used"]);
    assert_eq!(exit_code(&checks), 4);
}

/// With a model the same rules as at loading say where it runs, and whether.
#[test]
fn a_model_is_placed_as_a_run_would_place_it() {
    let formats = MadeUpFormats { weights: Some("i4-g32".parse().unwrap()), ..Default::default() };
    let weights = Shape::B4.weights(&formats).unwrap();
    let judge = |memory: u64, options: &[&str], available: u64| {
        let typed = Cli::parse_from([&["gemma", "doctor"], options].concat());
        let crate::cli::commands::Command::Doctor(doctor) = typed.command else { unreachable!() };
        let found: Found = Ok(vec![made_up_gpu("GPU", memory)]);
        let run = &doctor.model.run.settled().unwrap();
        gpu::fits(&weights, 2048, run, &found, Some(available), &Ui::plain())
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
        assert_eq!((check.status, check.code), (Status::Fail, 5), "{check:?}");
        assert!(check.remedy.is_some(), "{check:?}");
    }
}

#[test]
fn a_gpu_that_fails_or_computes_wrongly_is_found_out() {
    let lost = Fault::new(Kind::Device, "the GPU was lost while computing");
    let fake = Fake { trial: Err(lost), ..Fake::laptop() };
    let words = ["lost", "the processor is used instead", "--device cpu"];
    is(&fake.examine(&[]), "kernels, gpu", Status::Warn, &words);
    assert_eq!(exit_code(&fake.examine(&["-d", "vulkan"])), 4);
}

#[test]
fn an_npu_is_named_with_all_that_it_lacks() {
    let fake = Fake::laptop();
    fake.npu();
    let checks = fake.examine(&[]);
    let lacks = ["/dev/accel/accel0", "goes on without", "locked memory: 8 MiB", "build.sh"];
    is(&checks, "npu", Status::Warn, &lacks);
    assert_eq!(exit_code(&checks), 0);
    assert!(fake.examine(&["--npu", "off"]).iter().all(|c| c.status == Status::Pass));
    // On the bus, and no driver.
    let bare = Fake::laptop();
    bare.put("sys/bus/pci/devices/0000:c6:00.1/vendor", "0x1022\n");
    bare.put("sys/bus/pci/devices/0000:c6:00.1/device", "0x1502\n");
    is(&bare.examine(&[]), "npu", Status::Warn, &["no driver", "sudo modprobe amdxdna"]);
}

#[test]
fn memory_processor_power_and_cache_have_their_remedies() {
    let fake = Fake { isa: vec![Isa::Scalar], writable: false, ..Fake::laptop() };
    fake.put("proc/meminfo", "MemTotal: 32000000 kB\nMemAvailable: 4000000 kB\n");
    fake.put("sys/firmware/acpi/platform_profile", "low-power\n");
    let checks = fake.examine(&[]);
    is(&checks, "processor", Status::Warn, &["AVX2", "-cpu host"]);
    is(&checks, "memory", Status::Warn, &["close other programs", "ps -eo rss,comm"]);
    let profile = ["powerprofilesctl set performance", "tee /sys/firmware/acpi/platform_profile"];
    is(&checks, "power profile", Status::Warn, &profile);
    is(&checks, "cache", Status::Warn, &["cannot be written", "sudo install -d -o \"$USER\""]);
    fake.remove("proc/meminfo");
    is(&fake.examine(&[]), "memory", Status::Warn, &["/proc"]);
    // Servers have no profile.
    fake.remove("sys/firmware");
    assert!(!fake.examine(&[]).iter().any(|c| c.name == "power profile"));
}
