//! Checks of made-up machines. Each has one problem.

use super::checks::{self, MachineFacts};
use super::*;
use crate::cli::commands::{Cli, CliCommand};
use crate::cli::io::ui::COLUMNS;
use crate::compute::DeviceInfo;
use crate::compute::cpu::isa::Isa;
use crate::error::Fault;
use crate::os::remedies::Remedies;
use crate::runtime::devices::backends::NpuSystem;
use crate::runtime::devices::driver::{DriverUse, DriverVerdict};
use crate::runtime::devices::testing::{gpu as made_up_gpu, laptop_gpu};
use crate::runtime::model::shapes::{MadeUpFormats, Shape};
use clap::Parser;
use std::path::PathBuf;

const GB: u64 = 1_000_000_000;

/// A laptop with a Radeon 780M and 32 GB, without problems.
struct Laptop {
    root: tempfile::TempDir,
    listed: Result<Vec<DeviceInfo>, Fault>,
    arch: &'static str,
    isa: Isa,
    /// Main memory and available memory, in bytes.
    memory: [u64; 2],
    remedies: Remedies,
    verdict: DriverVerdict,
    trial: Result<(), Fault>,
    cache: Option<PathBuf>,
}

impl Laptop {
    fn new() -> Laptop {
        let root = tempfile::tempdir().unwrap();
        let cache = Some(root.path().join("cache"));
        let verdict = DriverVerdict {
            allows: DriverUse::Whole,
            why: None,
            shapes: vec!["16x16x16".into()],
            file: None,
        };
        let listed = Ok(vec![laptop_gpu()]);
        let (arch, isa, trial) = ("x86_64", Isa::Avx512Vnni, Ok(()));
        let (memory, remedies) = ([32_768_000_000, 28 * GB], remedies::UNIX);
        let laptop = Laptop { root, listed, arch, isa, memory, remedies, verdict, trial, cache };
        laptop.put("dev/dri/renderD128", "");
        laptop
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn with_machine<T>(&self, run: impl FnOnce(&MachineFacts<'_>) -> T) -> T {
        let root = self.root.path().to_owned();
        run(&MachineFacts {
            remedies: self.remedies,
            processor: Some("AMD Ryzen 7 7840HS".into()),
            memory: Some(self.memory[0]),
            available_memory: Some(self.memory[1]),
            threads: 16,
            arch: self.arch,
            isa: self.isa,
            listed: self.listed.clone().map_err(Into::into),
            verdict: &|_| self.verdict.clone(),
            trial: &|device| match device {
                Some(_) => Ok(self.trial.clone().map(|()| "as it should be".to_owned())?),
                None => Ok("as it should be".to_owned()),
            },
            npu: NpuSystem { root: root.clone(), arrays: vec!["/nowhere".into()], locked: 8 << 20 },
            cache: self.cache.clone(),
            root,
        })
    }

    fn examine(&self, options: &[&str]) -> Vec<Check> {
        let checks =
            self.with_machine(|machine| checks::all(machine, &typed(options), &Ui::plain()));
        let shown = text(&checks, COLUMNS);
        let fits = |line: &str| line.chars().count() <= COLUMNS || line.contains('\'');
        assert!(shown.lines().all(fits), "{shown}");
        for check in &checks {
            assert_eq!(check.status == Status::Pass, check.remedy.is_none(), "{check:?}");
            assert_eq!(check.status == Status::Fail, check.code != 0, "{check:?}");
        }
        checks
    }
}

fn typed(options: &[&str]) -> ModelOptions {
    let typed = Cli::parse_from([&["gemma", "doctor"], options].concat());
    let CliCommand::Doctor(doctor) = typed.command else { unreachable!() };
    doctor.model.settled().unwrap()
}

/// Asserts that the check has this status, and that its texts contain all of `words`.
#[track_caller]
fn assert_check(checks: &[Check], name: &str, status: Status, words: &[&str]) {
    let check = checks.iter().find(|c| c.name == name);
    let check = check.unwrap_or_else(|| panic!("no {name} in {checks:#?}"));
    let remedy = check.remedy.as_deref().unwrap_or("");
    let texts = format!("{} {remedy} {}", check.found, check.commands.join("\n"));
    assert_eq!(check.status, status, "{check:#?}");
    for word in words {
        assert!(texts.contains(word), "no {word:?} in {check:#?}");
    }
}

#[test]
fn a_machine_with_nothing_wrong_passes_everything() {
    let checks = Laptop::new().examine(&[]);
    assert!(checks.iter().all(|c| c.status == Status::Pass), "{checks:#?}");
    assert_eq!(exit_code(&checks), 0);
    assert!(text(&checks, COLUMNS).ends_with("nothing would stop a run\n"));
    let json = report(&checks, None);
    assert_eq!(json["pass"].as_u64(), Some(checks.len() as u64));
    assert_eq!(json["checks"][0]["status"], "PASS");
    assert_eq!(json["checks"][0]["remedy"], Value::Null);
}

#[test]
fn without_a_driver_only_a_run_that_asks_for_a_gpu_stops() {
    let no_loader = Fault::new(Kind::Device, "no Vulkan library on this machine: libvulkan.so.1");
    let laptop = Laptop { listed: Err(no_loader), ..Laptop::new() };
    let install = ["libvulkan.so.1", "sudo apt install libvulkan1", "sudo dnf install"];
    let checks = laptop.examine(&[]);
    assert_check(&checks, "vulkan", Status::Warn, &install);
    assert_eq!(exit_code(&checks), 0);
    for options in ["-d vulkan", "-d vulkan:0", "--gpu-layers all", "--gpu-layers 4"] {
        let checks = laptop.examine(&options.split(' ').collect::<Vec<_>>());
        assert_check(&checks, "vulkan", Status::Fail, &install);
        assert_eq!(exit_code(&checks), 4, "{options:?}");
        let shown = text(&checks, COLUMNS);
        assert!(shown.ends_with("a run would stop: 1 failure, exit code 4\n"), "{shown}");
    }
    for options in [&["-d", "cpu"][..], &["-d", "vulkan", "--gpu-layers", "0"]] {
        assert_eq!(exit_code(&laptop.examine(options)), 0, "{options:?}");
    }
    std::fs::remove_file(laptop.root.path().join("dev/dri/renderD128")).unwrap();
    assert_check(&laptop.examine(&[]), "vulkan", Status::Pass, &["none is needed"]);
    let checks = laptop.examine(&["-d", "vulkan"]);
    assert_check(&checks, "vulkan", Status::Fail, &["there is no GPU", "--device cpu"]);
}

#[test]
fn a_driver_on_the_processor_is_no_gpu() {
    let lavapipe =
        DeviceInfo { is_cpu: true, is_integrated: false, ..made_up_gpu("llvmpipe", 24 * GB) };
    let laptop = Laptop { listed: Ok(vec![lavapipe]), ..Laptop::new() };
    let words = ["computes on the processor", "sudo apt install"];
    assert_check(&laptop.examine(&[]), "vulkan", Status::Warn, &words);
    assert_eq!(exit_code(&laptop.examine(&["-d", "vulkan"])), 4);
    let checks = laptop.examine(&["-d", "vulkan:0"]);
    assert_check(&checks, "vulkan", Status::Warn, &["llvmpipe", "omit --device"]);
    // If there is no GPU, no driver is missing. A card without a driver is a problem.
    std::fs::remove_file(laptop.root.path().join("dev/dri/renderD128")).unwrap();
    assert_check(&laptop.examine(&[]), "vulkan", Status::Pass, &["there is no GPU"]);
    laptop.put("sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n");
    laptop.put("sys/bus/pci/devices/0000:00:02.0/vendor", "0x1234\n");
    assert_check(&laptop.examine(&[]), "vulkan", Status::Pass, &["there is no GPU"]);
    laptop.put("sys/bus/pci/devices/0000:00:02.0/vendor", "0x10de\n");
    assert_check(&laptop.examine(&[]), "vulkan", Status::Warn, &words);
    let relic = DeviceInfo { missing: vec!["int8 in shaders"], ..made_up_gpu("relic", GB) };
    let laptop = Laptop { listed: Ok(vec![relic]), ..Laptop::new() };
    assert_check(&laptop.examine(&[]), "vulkan", Status::Warn, &["relic lacks int8 in shaders"]);
}

#[test]
fn a_gpu_with_little_memory_has_a_remedy() {
    let warns = |device: DeviceInfo, words: &[&str]| {
        let laptop = Laptop { listed: Ok(vec![device]), ..Laptop::new() };
        assert_check(&laptop.examine(&[]), "gpu memory", Status::Warn, words);
    };
    // Three quarters of 32.8 GB, in pages of 4 KiB.
    let pages = 32_000_000u64 * 1024 / 4 * 3 / 4096;
    let options = format!("pages_limit={pages} page_pool_size={pages}");
    warns(made_up_gpu("Radeon", 2 * GB), &[&options, "update-initramfs", "2.00 GB"]);
    let full = DeviceInfo { available: Some(GB), ..made_up_gpu("Radeon", 21 * GB) };
    warns(full, &["1.00 GB free", "fuser"]);
    let board = DeviceInfo { is_integrated: false, ..made_up_gpu("board", 8 * GB) };
    warns(board, &["gemma plan 27b --recipe 9gb"]);
}

#[test]
fn a_driver_that_failed_its_trial_is_reported() {
    let tried = |allows| {
        let verdict = DriverVerdict {
            allows,
            why: Some("was ended by signal 11".into()),
            shapes: Vec::new(),
            file: Some("/home/me/.cache/gemma/driver-1.json".into()),
        };
        Laptop { verdict, ..Laptop::new() }
    };
    let words = ["signal 11", "update the driver", "rm '/home/me/.cache/gemma/driver-1.json'"];
    let checks = tried(DriverUse::WithoutMatrices).examine(&["-d", "vulkan"]);
    assert_check(&checks, "gpu driver", Status::Warn, &words);
    assert_check(&tried(DriverUse::NotAtAll).examine(&[]), "gpu driver", Status::Warn, &words);
    let checks = tried(DriverUse::NotAtAll).examine(&["-d", "vulkan"]);
    assert_check(&checks, "gpu driver", Status::Fail, &["is not used"]);
    assert_eq!(exit_code(&checks), 4);
}

#[test]
fn remedies_for_windows_have_its_words() {
    let no_loader = Fault::new(Kind::Device, "no Vulkan library on this machine: vulkan-1.dll");
    let laptop = Laptop { remedies: remedies::WINDOWS, ..Laptop::new() };
    let laptop = Laptop { listed: Err(no_loader), cache: None, memory: [32 * GB, GB], ..laptop };
    let checks = laptop.examine(&[]);
    assert_check(&checks, "vulkan", Status::Warn, &["vulkan-1.dll", "AMD, Intel or NVIDIA"]);
    assert_check(&checks, "memory", Status::Warn, &["Get-Process"]);
    assert_check(&checks, "cache", Status::Warn, &["$env:LOCALAPPDATA = "]);
    let small = Ok(vec![made_up_gpu("Radeon", 2 * GB)]);
    let checks = Laptop { listed: small, ..laptop }.examine(&[]);
    assert_check(&checks, "gpu memory", Status::Warn, &["gemma plan 27b --recipe 9gb"]);
    assert!(!text(&checks, COLUMNS).contains("sudo"));
}

/// Loading decides by the same rules where a model runs and whether it fits.
#[test]
fn a_model_is_placed_as_a_run_would_place_it() {
    let formats = MadeUpFormats { weights: Some("i4-g32".parse().unwrap()), ..Default::default() };
    let weights = Shape::B4.weights(&formats).unwrap();
    let judge = |memory: u64, options: &[&str], available: u64| {
        let listed = Ok(vec![made_up_gpu("GPU", memory)]);
        let laptop = Laptop { listed, memory: [32 * GB, available], ..Laptop::new() };
        let run = typed(options).run;
        laptop
            .with_machine(|machine| checks::fits(machine, &weights, 2048, &run, &Ui::plain()))
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

/// An NPU is known on Linux only.
#[cfg(unix)]
#[test]
fn failures_of_kernels_memory_processor_cache_and_npu_have_remedies() {
    let lost = Fault::new(Kind::Device, "the GPU was lost while computing");
    let laptop = Laptop { trial: Err(lost), isa: Isa::Scalar, cache: None, ..Laptop::new() };
    let laptop = Laptop { memory: [32 * GB, 4 * GB], ..laptop };
    for (file, text) in [("vendor", "0x1022"), ("device", "0x1502"), ("revision", "0x00")] {
        laptop.put(&format!("sys/class/accel/accel0/device/{file}"), text);
    }
    laptop.put("dev/accel/accel0", "");
    let checks = laptop.examine(&[]);
    let words = ["lost", "the processor is used instead", "--device cpu"];
    assert_check(&checks, "kernels, gpu", Status::Warn, &words);
    assert_check(&checks, "processor", Status::Warn, &["AVX2", "-cpu host"]);
    assert_check(&checks, "memory", Status::Warn, &["close other programs", "ps -eo rss,comm"]);
    assert_check(&checks, "cache", Status::Warn, &["HOME is not set"]);
    let lacks = ["/dev/accel/accel0", "works without", "locked memory: 8 MiB", "build.sh"];
    assert_check(&checks, "npu", Status::Warn, &lacks);
    assert_eq!(exit_code(&checks), 0);
    assert_eq!(exit_code(&laptop.examine(&["-d", "vulkan"])), 4);
}

#[test]
fn a_slow_arm64_processor_gets_advice_of_its_own() {
    let laptop = Laptop { arch: "aarch64", isa: Isa::Scalar, ..Laptop::new() };
    let words = ["16 threads, no dotprod", "than with dotprod"];
    assert_check(&laptop.examine(&[]), "processor", Status::Warn, &words);
}
