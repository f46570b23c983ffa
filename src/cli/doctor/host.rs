//! What checks ask of a machine.

use crate::cli::ui::Ui;
use crate::compute::cpu::isa::Isa;
use crate::npu::manifest;
use crate::npu::probe::System;
use crate::runtime::Silence;
use crate::runtime::driver::{self, Verdict};
use crate::runtime::options::{MemoryPlace, RunOptions};
use crate::runtime::processor::default_threads;
use crate::runtime::trial;
use crate::util::xdg;
use crate::vulkan::{DeviceInfo, Vulkan};
use anyhow::Result;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The driver's answer.
pub type Found = Result<Vec<DeviceInfo>>;

/// A directory that the program keeps files in.
#[derive(Clone, Debug)]
pub struct Directory {
    /// What for.
    pub purpose: &'static str,
    /// `None` where the environment names no place.
    pub path: Option<PathBuf>,
    /// What is lost without it, and how to go without.
    pub without: &'static str,
    /// What in it is nobody else's business.
    pub private: Option<&'static str>,
}

/// A machine, real or played.
pub trait Machine {
    /// Where `/proc`, `/sys`, `/dev` and `/etc` hang.
    fn root(&self) -> &Path;
    /// What the Vulkan driver lists.
    fn vulkan(&self) -> Found;
    /// What came of the trial of a device's driver.
    fn verdict(&self, device: &DeviceInfo) -> Verdict;
    /// Opens a device node as a driver would.
    fn open(&self, node: &Path) -> io::Result<()>;
    /// Bytes of memory that may be locked.
    fn locked(&self) -> u64;
    /// Bytes free where a directory is or would be made, and whether it can be written.
    fn room(&self, directory: &Path) -> io::Result<(u64, bool)>;
    fn directories(&self) -> Vec<Directory>;
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

    /// Files in a directory and below, and their bytes.
    fn contents(&self, directory: &Path) -> (usize, u64) {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let sizes = entries.filter_map(|entry| {
            let meta = entry.metadata().ok()?;
            Some(if meta.is_dir() { self.contents(&entry.path()) } else { (1, meta.len()) })
        });
        sizes.fold((0, 0), |(n, bytes), (more, size)| (n + more, bytes + size))
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
    fn npu(&self) -> System {
        System {
            root: self.root().to_owned(),
            arrays: manifest::directories(),
            locked: self.locked(),
        }
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
        Vulkan::open().and_then(|v| v.devices())
    }

    fn verdict(&self, device: &DeviceInfo) -> Verdict {
        driver::verdict(device, &Silence)
    }

    fn open(&self, node: &Path) -> io::Result<()> {
        File::options().read(true).write(true).open(node).map(drop)
    }

    fn locked(&self) -> u64 {
        System::here().locked
    }

    fn room(&self, directory: &Path) -> io::Result<(u64, bool)> {
        use std::os::unix::ffi::OsStrExt;
        // What is not there yet would be made in the nearest directory that is.
        let there = directory.ancestors().find(|d| d.is_dir()).unwrap_or(Path::new("/"));
        let name = std::ffi::CString::new(there.as_os_str().as_bytes())?;
        // SAFETY: zeros are a valid statvfs, which the call fills; the name ends in zero.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if unsafe { libc::statvfs(name.as_ptr(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the name ends in zero.
        let writable = unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) } == 0;
        Ok((stat.f_bavail.saturating_mul(stat.f_frsize), writable))
    }

    fn directories(&self) -> Vec<Directory> {
        vec![
            Directory {
                purpose: "compiled GPU kernels, trials of drivers and measured costs",
                path: xdg::cache(),
                without: "each run compiles its GPU kernels again",
                private: None,
            },
            Directory {
                purpose: "what drafts have learnt",
                path: MemoryPlace::On.directory(true),
                without: "drafts learn anew in each run",
                private: Some("it holds fragments of prompts and answers, readable by you alone"),
            },
        ]
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
