//! What checks ask of a machine.

use crate::cli::io::ui::Ui;
use crate::compute::DeviceInfo;
use crate::compute::cpu::isa::Isa;
use crate::os::files::is_writable_directory;
use crate::os::process::lockable_memory;
use crate::runtime::Silence;
use crate::runtime::devices::backends::{self, NpuSystem, backend_of};
use crate::runtime::devices::driver::DriverVerdict;
use crate::runtime::devices::processor::default_threads;
use crate::runtime::options::RunOptions;
use crate::runtime::trial;
use anyhow::Result;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// The driver's answer.
pub type Found = Result<Vec<DeviceInfo>>;

/// A machine, real or played.
pub trait Machine {
    /// Where `/proc`, `/sys`, `/dev` and `/etc` hang.
    fn root(&self) -> &Path;
    /// What the Vulkan driver lists.
    fn vulkan(&self) -> Found;
    /// What came of the trial of a device's driver.
    fn verdict(&self, device: &DeviceInfo) -> DriverVerdict;
    /// Opens a device node as a driver would.
    fn open(&self, node: &Path) -> io::Result<()>;
    /// Bytes of memory that may be locked.
    fn locked(&self) -> u64;
    /// Whether files can be made in a directory, or in the nearest one above it that exists.
    fn is_writable(&self, directory: &Path) -> bool;
    fn threads(&self) -> usize;
    /// The best last.
    fn instruction_sets(&self) -> Vec<Isa>;
    /// Runs a small model on a device (`None`: the processor), each kernel against its scalar twin.
    fn trial(&self, device: Option<&DeviceInfo>) -> Result<String>;

    /// A file below the root, trimmed; `None` where it cannot be read.
    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root().join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Names in a directory below the root, sorted.
    fn list(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root().join(path)).into_iter().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// A field of /proc/meminfo in bytes.
    fn memory(&self, field: &str) -> Option<u64> {
        let text = self.read("proc/meminfo")?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':').map(str::to_owned))?;
        Some(value.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
    }

    /// The NPU's part of it.
    fn npu(&self) -> NpuSystem {
        NpuSystem::at(self.root().to_owned(), self.locked())
    }
}

/// This one.
pub struct Here {
    run: RunOptions,
}

impl Here {
    pub fn new(run: &RunOptions) -> Here {
        Here { run: run.clone() }
    }
}

impl Machine for Here {
    fn root(&self) -> &Path {
        Path::new("/")
    }

    fn vulkan(&self) -> Found {
        backends::probe()
    }

    fn verdict(&self, device: &DeviceInfo) -> DriverVerdict {
        backend_of(device).diagnose(device, &Silence)
    }

    fn open(&self, node: &Path) -> io::Result<()> {
        File::options().read(true).write(true).open(node).map(drop)
    }

    fn locked(&self) -> u64 {
        lockable_memory()
    }

    fn is_writable(&self, directory: &Path) -> bool {
        let parent = directory.ancestors().find(|d| d.is_dir()).unwrap_or(Path::new("/"));
        is_writable_directory(parent)
    }

    fn threads(&self) -> usize {
        self.run.threads.unwrap_or_else(default_threads)
    }

    fn instruction_sets(&self) -> Vec<Isa> {
        Isa::all_supported()
    }

    fn trial(&self, device: Option<&DeviceInfo>) -> Result<String> {
        trial::run(&self.run, device, &Ui::plain())
    }
}
