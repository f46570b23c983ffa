//! A machine that is played.

use super::*;

/// A laptop with a Radeon 780M and 32 GB on which nothing is wrong.
pub struct Fake {
    pub root: tempfile::TempDir,
    pub devices: Result<Vec<DeviceInfo>, Fault>,
    pub refused: bool,
    pub locked: u64,
    pub writable: bool,
    pub isa: Vec<Isa>,
    pub trial: Result<(), Fault>,
    pub tried: RefCell<Vec<String>>,
    pub verdict: DriverVerdict,
}

impl Fake {
    pub fn laptop() -> Fake {
        let fake = Fake {
            root: tempfile::tempdir().unwrap(),
            devices: Ok(vec![laptop_gpu()]),
            refused: false,
            locked: 8 << 20,
            writable: true,
            isa: vec![Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni],
            trial: Ok(()),
            tried: RefCell::default(),
            verdict: DriverVerdict {
                allows: DriverUse::Whole,
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
        fake.put("sys/firmware/acpi/platform_profile", "balanced\n");
        fake.put("sys/firmware/acpi/platform_profile_choices", "low-power balanced performance\n");
        fake
    }

    pub fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn link(&self, path: &str, to: &str) {
        crate::os::files::symlink(to, self.root.path().join(path));
    }

    pub fn remove(&self, path: &str) {
        let path = self.root.path().join(path);
        if path.is_dir() {
            std::fs::remove_dir_all(path).unwrap()
        } else {
            std::fs::remove_file(path).unwrap()
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
        let crate::cli::commands::Command::Doctor(doctor) = typed.command else { unreachable!() };
        let model = doctor.model.settled().unwrap();
        let checks = examine(self, &model, &self.vulkan(), &Ui::plain());
        // Whatever is wrong, the words fit a terminal, and each thing wrong has something to do
        // about it.
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

impl Machine for Fake {
    fn root(&self) -> &Path {
        self.root.path()
    }

    fn vulkan(&self) -> Found {
        self.devices.clone().map_err(Into::into)
    }

    fn open(&self, node: &Path) -> io::Result<()> {
        assert!(node.exists());
        if self.refused { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
    }

    fn verdict(&self, _: &DeviceInfo) -> DriverVerdict {
        self.verdict.clone()
    }

    fn locked(&self) -> u64 {
        self.locked
    }

    fn is_writable(&self, directory: &Path) -> bool {
        assert!(directory.ends_with("gemma"));
        self.writable
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

    fn npu(&self) -> NpuSystem {
        NpuSystem {
            root: self.root().to_owned(),
            arrays: vec![PathBuf::from("/nowhere")],
            locked: self.locked,
        }
    }
}
