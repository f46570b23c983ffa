//! A machine that is played.

use super::*;

/// A laptop with a Radeon 780M and 32 GB on which nothing is wrong.
pub struct Fake {
    pub root: tempfile::TempDir,
    pub devices: Result<Vec<DeviceInfo>, Fault>,
    pub refused: bool,
    pub locked: u64,
    pub room: (u64, bool),
    pub kept: (usize, u64),
    pub isa: Vec<Isa>,
    pub trial: Result<(), Fault>,
    pub tried: RefCell<Vec<String>>,
    pub verdict: Verdict,
}

impl Fake {
    pub fn laptop() -> Fake {
        let fake = Fake {
            root: tempfile::tempdir().unwrap(),
            devices: Ok(vec![laptop_gpu()]),
            refused: false,
            locked: 8 << 20,
            room: (50 * GB, true),
            kept: (0, 0),
            isa: vec![Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni],
            trial: Ok(()),
            tried: RefCell::default(),
            verdict: Verdict {
                allows: Use::Whole,
                why: None,
                shapes: vec!["16x16x16".into()],
                file: None,
            },
        };
        fake.put(
            "proc/meminfo",
            "MemTotal: 32000000 kB\nMemFree: 1 kB\nMemAvailable: 28000000 kB\n",
        );
        fake.put("proc/cpuinfo", "processor : 0\nmodel name : AMD Ryzen 7 7840HS\n");
        fake.put("etc/group", "root:x:0:\nvideo:x:44:\n");
        fake.put("dev/dri/renderD128", "");
        fake.put("sys/bus/pci/devices/0000:c5:00.0/vendor", "0x1002\n");
        fake.put("sys/bus/pci/devices/0000:c5:00.0/class", "0x030000\n");
        fake.link("sys/bus/pci/devices/0000:c5:00.0/driver", "../../../bus/pci/drivers/amdgpu");
        fake.put("sys/class/drm/card1/device/mem_info_vram_total", "536870912\n");
        fake.put("sys/class/drm/card1/device/mem_info_gtt_total", "16384000000\n");
        fake.put("sys/class/drm/card1/device/power_dpm_force_performance_level", "auto\n");
        fake.put("sys/module/amdgpu/parameters/gttsize", "-1\n");
        fake.put("sys/module/ttm/parameters/pages_limit", "4000000\n");
        fake.put("sys/module/amdgpu/parameters/lockup_timeout", "\n");
        fake.put("proc/sys/kernel/osrelease", "6.12.48+deb13-amd64\n");
        fake.put("sys/firmware/acpi/platform_profile", "balanced\n");
        fake.put("sys/firmware/acpi/platform_profile_choices", "low-power balanced performance\n");
        fake.cpufreq("amd-pstate-epp", "powersave", Some("balance_performance"));
        fake.put("sys/class/power_supply/BAT0/type", "Battery\n");
        fake.put("sys/class/power_supply/BAT0/status", "Charging\n");
        fake
    }

    pub fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn link(&self, path: &str, to: &str) {
        std::os::unix::fs::symlink(to, self.root.path().join(path)).unwrap();
    }

    pub fn remove(&self, path: &str) {
        let path = self.root.path().join(path);
        if path.is_dir() {
            std::fs::remove_dir_all(path).unwrap()
        } else {
            std::fs::remove_file(path).unwrap()
        }
    }

    pub fn cpufreq(&self, driver: &str, governor: &str, preference: Option<&str>) {
        let at = "sys/devices/system/cpu/cpu0/cpufreq";
        self.put(&format!("{at}/scaling_driver"), driver);
        self.put(&format!("{at}/scaling_governor"), governor);
        if let Some(preference) = preference {
            self.put(&format!("{at}/energy_performance_preference"), preference);
        }
    }

    /// An NPU with its node.
    pub fn npu(&self) {
        for (file, text) in [("vendor", "0x1022"), ("device", "0x1502"), ("revision", "0x00")] {
            self.put(&format!("sys/class/accel/accel0/device/{file}"), text);
        }
        self.put("dev/accel/accel0", "");
    }

    pub fn examine(&self, options: &[&str]) -> Vec<Check> {
        let typed = Cli::parse_from([&["gemma", "doctor"], options].concat());
        let crate::cli::args::Command::Doctor(doctor) = typed.command else { unreachable!() };
        let model = doctor.model.settled().unwrap();
        let asked = Asked { options: &model };
        let checks = examine(self, &asked, &self.vulkan(), &Ui::plain());
        // Whatever is wrong, the words fit a terminal, and each thing wrong has something to do
        // about it.
        let fits = |checks: &[Check], columns: usize| {
            let shown = text(checks, columns);
            assert!(
                shown.lines().all(|l| l.chars().count() <= columns || l.contains('\'')),
                "{shown}"
            );
        };
        fits(&checks, COLUMNS);
        // A path in a command may be longer than a narrow line.
        let without: Vec<Check> =
            checks.iter().map(|c| Check { commands: Vec::new(), ..c.clone() }).collect();
        fits(&without, 60);
        for check in &checks {
            assert_eq!(check.status == Status::Pass, check.remedy.is_none(), "{check:?}");
            assert_eq!(check.status == Status::Fail, check.code != 0, "{check:?}");
        }
        checks
    }
}

impl Machine for Fake {
    fn root(&self) -> &Path {
        self.root.path()
    }

    fn vulkan(&self) -> Found {
        self.devices.clone().map_err(Into::into)
    }

    fn open(&self, node: &Path) -> io::Result<()> {
        assert!(node.exists());
        if self.refused { Err(io::Error::from_raw_os_error(libc::EACCES)) } else { Ok(()) }
    }

    fn verdict(&self, _: &DeviceInfo) -> Verdict {
        self.verdict.clone()
    }

    fn locked(&self) -> u64 {
        self.locked
    }

    fn room(&self, directory: &Path) -> io::Result<(u64, bool)> {
        assert!(directory.ends_with("gemma"));
        Ok(self.room)
    }

    fn contents(&self, _: &Path) -> (usize, u64) {
        self.kept
    }

    fn directories(&self) -> Vec<Directory> {
        let of = |purpose, private| Directory {
            purpose,
            path: Some("/home/me/.cache/gemma".into()),
            without: "each run compiles them",
            private,
        };
        vec![of("kernels", None), of("what drafts have learnt", Some("fragments of prompts"))]
    }

    fn threads(&self) -> usize {
        16
    }

    fn instruction_sets(&self) -> Vec<Isa> {
        self.isa.clone()
    }

    fn trial(&self, device: Option<&DeviceInfo>) -> Result<String> {
        self.tried.borrow_mut().push(device.map_or("cpu".into(), |d| d.name.clone()));
        if device.is_some() {
            self.trial.clone()?;
        }
        Ok("as it should be".into())
    }

    fn npu(&self) -> System {
        System {
            root: self.root().to_owned(),
            arrays: vec![PathBuf::from("/nowhere")],
            locked: self.locked,
        }
    }
}
