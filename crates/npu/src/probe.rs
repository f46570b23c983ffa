//! Probe of the machine's NPUs: the conditions for using them, each with a remedy if it is not met.

#[cfg(all(unix, feature = "npu"))]
use super::{accel::Accel, layout::KernelShape, manifest, raw::RawAccel};
use gemma_base::os::process::lockable_memory;
use std::fs;
#[cfg(all(unix, feature = "npu"))]
use std::path::Path;
use std::path::PathBuf;

/// PCI ids of NPU1.
const VENDOR: u32 = 0x1022;
const DEVICE: u32 = 0x1502;
/// Minimum of lockable memory in bytes for useful buffers.
const LOCKED: u64 = 256 << 20;
/// Head dimension of the 27B model, which selects the array.
#[cfg(all(unix, feature = "npu"))]
const HEAD_DIM: usize = 128;

/// Returns the directories with built arrays, in order of search.
pub fn directories() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = var("XDG_DATA_HOME").or_else(|| var("HOME").map(|h| h.join(".local/share")));
    let system = ["/usr/local/share", "/usr/share"].map(PathBuf::from);
    home.into_iter().chain(system).map(|d| d.join("gemma/npu")).collect()
}

/// A condition for using an NPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub name: &'static str,
    /// State of the condition.
    pub what: String,
    /// Remedy; `None` if the condition is met.
    pub remedy: Option<String>,
}

/// An accelerator of this machine with its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpuProbe {
    /// `/dev/accel/accelN`
    pub path: PathBuf,
    pub findings: Vec<Finding>,
}

impl NpuProbe {
    pub fn is_usable(&self) -> bool {
        self.findings.iter().all(|f| f.remedy.is_none())
    }
}

/// Directories and limits of a machine. Tests use their own.
#[derive(Clone, Debug)]
pub struct NpuSystem {
    pub root: PathBuf,
    /// Directories of built arrays.
    pub arrays: Vec<PathBuf>,
    /// Bytes of memory that may be locked.
    pub locked: u64,
}

impl NpuSystem {
    /// Returns the system of this machine.
    pub fn here() -> NpuSystem {
        NpuSystem::at("/".into(), lockable_memory())
    }

    /// Returns a system with its files below `root`.
    pub fn at(root: PathBuf, locked: u64) -> NpuSystem {
        NpuSystem { root, arrays: directories(), locked }
    }

    fn id(&self, name: &str, what: &str) -> Option<u32> {
        let text =
            fs::read_to_string(self.root.join(format!("sys/class/accel/{name}/device/{what}")))
                .ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    }

    /// Returns the names of accelerators with the ids of NPU1, in order.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.join("sys/class/accel")).into_iter().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
        names.retain(|n| {
            self.id(n, "vendor") == Some(VENDOR) && self.id(n, "device") == Some(DEVICE)
        });
        names.sort();
        names
    }

    /// Returns whether the device is on the PCI bus, with or without a driver.
    fn on_the_bus(&self) -> bool {
        let hex = |path: PathBuf| {
            fs::read_to_string(path)
                .ok()
                .and_then(|t| u32::from_str_radix(t.trim().trim_start_matches("0x"), 16).ok())
        };
        let entries = fs::read_dir(self.root.join("sys/bus/pci/devices")).into_iter().flatten();
        entries.flatten().any(|e| {
            hex(e.path().join("vendor")) == Some(VENDOR)
                && hex(e.path().join("device")) == Some(DEVICE)
        })
    }

    /// Returns every NPU of the machine, with each condition for a run of the 27B model.
    pub fn probe(&self) -> Vec<NpuProbe> {
        self.names().into_iter().map(|name| self.probe_one(&name)).collect()
    }

    /// Returns the reason why no NPU can be probed, and a remedy.
    pub fn nothing(&self) -> (String, Option<String>) {
        if cfg!(windows) {
            return ("this program uses NPUs on Linux only".into(), None);
        }
        if self.on_the_bus() {
            let remedy = "load the amdxdna driver: Linux 6.14 or newer has it (modprobe amdxdna), \
                with AMD's NPU firmware installed";
            return ("an NPU is on the bus, but it has no driver".into(), Some(remedy.into()));
        }
        ("no AMD NPU of the first generation (PCI 1022:1502: Phoenix, Hawk Point)".into(), None)
    }

    fn probe_one(&self, name: &str) -> NpuProbe {
        let path = self.root.join("dev/accel").join(name);
        let mut findings = Vec::new();
        let mut add = |name, what: String, remedy: Option<&str>| {
            findings.push(Finding { name, what, remedy: remedy.map(str::to_owned) });
        };
        match self.id(name, "revision") {
            Some(0) => add("revision", "0".into(), None),
            Some(other) => add(
                "revision",
                format!("{other:#x}"),
                Some("only revision 0 is known: use --npu off"),
            ),
            None => add("revision", "unknown".into(), Some("/sys must be readable")),
        }
        let locked = if self.locked == u64::MAX {
            "unlimited".into()
        } else {
            format!("{} MiB", self.locked >> 20)
        };
        add(
            "locked memory",
            locked,
            (self.locked < LOCKED)
                .then_some("raise the limit (ulimit -l unlimited, or limits.conf)"),
        );
        #[cfg(all(unix, feature = "npu"))]
        findings.extend(self.device_findings(&path));
        #[cfg(not(all(unix, feature = "npu")))]
        findings.push(Finding {
            name: "program",
            what: "built without NPU support".into(),
            remedy: Some("build it with the cargo feature npu, on Linux".into()),
        });
        NpuProbe { path, findings }
    }

    /// Opens a device and searches for its array. Returns the findings.
    #[cfg(all(unix, feature = "npu"))]
    fn device_findings(&self, path: &Path) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut add = |name, what: String, remedy: Option<&str>| {
            findings.push(Finding { name, what, remedy: remedy.map(str::to_owned) });
        };
        match RawAccel::open(path) {
            Err(e) => add(
                "access",
                e.to_string(),
                Some(e.remedy().unwrap_or("see the messages of amdxdna in dmesg")),
            ),
            Ok(mut accel) => {
                add("access", "may be opened".into(), None);
                match accel.info() {
                    Ok(info) => {
                        let v = info.firmware;
                        add(
                            "firmware",
                            format!("{}.{}.{}.{}", v.major, v.minor, v.patch, v.build),
                            None,
                        );
                    }
                    Err(e) => add(
                        "firmware",
                        e.to_string(),
                        Some(e.remedy().unwrap_or("install AMD's NPU firmware (linux-firmware)")),
                    ),
                }
            }
        }
        let shape = KernelShape::new(HEAD_DIM).expect("a kernel is built for it");
        match manifest::find(&self.arrays, shape)
            .and_then(|dir| manifest::load(&dir, shape).map(|_| dir))
        {
            Ok(dir) => {
                add("array", dir.join(manifest::file_name(shape)).display().to_string(), None)
            }
            Err(e) => add("array", "missing".into(), Some(&format!("{e:#}"))),
        }
        findings
    }
}

/// Opens the first NPU.
#[cfg(all(unix, feature = "npu"))]
pub fn open_first(system: &NpuSystem) -> anyhow::Result<RawAccel> {
    let Some(name) = system.names().into_iter().next() else {
        let (what, remedy) = system.nothing();
        anyhow::bail!("{what}{}", remedy.map_or(String::new(), |r| format!(": {r}")));
    };
    let path: &Path = &system.root.join("dev/accel").join(name);
    RawAccel::open(path).map_err(|e| {
        let remedy = e.remedy().map_or(String::new(), |r| format!(" ({r})"));
        anyhow::anyhow!("{}: {e}{remedy}", path.display())
    })
}

#[cfg(all(test, unix, feature = "npu"))]
mod tests {
    use super::*;

    fn system(root: &Path) -> NpuSystem {
        NpuSystem { root: root.to_owned(), arrays: vec![root.join("arrays")], locked: 8 << 20 }
    }

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn each_condition_has_its_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let here = system(root);
        assert!(
            here.probe().is_empty() && here.nothing().1.is_none() && open_first(&here).is_err()
        );
        put(root, "sys/bus/pci/devices/0000:c6:00.1/vendor", "0x1022\n");
        put(root, "sys/bus/pci/devices/0000:c6:00.1/device", "0x1502\n");
        assert!(here.nothing().1.unwrap().contains("amdxdna"));
        // The first accelerator is a newer NPU, which must be ignored.
        for (name, device, revision) in [("accel0", "0x17f0", "0x10"), ("accel1", "0x1502", "0x00")]
        {
            put(root, &format!("sys/class/accel/{name}/device/vendor"), "0x1022\n");
            put(root, &format!("sys/class/accel/{name}/device/device"), device);
            put(root, &format!("sys/class/accel/{name}/device/revision"), revision);
        }
        let found = here.probe();
        assert_eq!(found.len(), 1);
        assert!(found[0].path.ends_with("dev/accel/accel1") && !found[0].is_usable());
        let finding =
            |name: &str| found[0].findings.iter().find(|f| f.name == name).unwrap().clone();
        assert_eq!(finding("revision").remedy, None);
        assert!(finding("access").what.contains("No such file"));
        assert!(
            finding("locked memory").what == "8 MiB"
                && finding("locked memory").remedy.unwrap().contains("ulimit")
        );
        assert!(finding("array").remedy.unwrap().contains("build.sh"));
        // The file can be opened but is not an NPU, so the query of the firmware version fails.
        fs::create_dir_all(root.join("dev/accel")).unwrap();
        std::os::unix::fs::symlink("/dev/null", root.join("dev/accel/accel1")).unwrap();
        let found = here.probe();
        let finding =
            |name: &str| found[0].findings.iter().find(|f| f.name == name).unwrap().clone();
        assert!(
            finding("access").remedy.is_none()
                && finding("firmware").remedy.unwrap().contains("6.14")
        );
        assert_eq!(here.names(), ["accel1"]);
        put(root, "sys/class/accel/accel1/device/revision", "0x10");
        assert!(here.probe()[0].findings[0].remedy.is_some());
    }
}
