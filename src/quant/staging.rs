//! The destination of a conversion: complete or not there at all.

use crate::error::{Fault, Kind};
use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Refuses a destination that holds something, or whose disk has no room for `bytes` and the files beside them.
pub fn check_destination(dst: &Path, bytes: u64) -> Result<()> {
    let shown = dst.display();
    if dst.symlink_metadata().is_ok() && !(dst.is_dir() && !dst.is_symlink() && fs::read_dir(dst)?.next().is_none()) {
        return Err(Fault::usage(format!("{shown} exists and is not an empty directory"))
            .help("choose another destination, or remove it first")
            .into());
    }
    if dst.file_name().is_none() {
        return Err(Fault::usage(format!("{shown} does not name a new directory")).help("choose another destination").into());
    }
    let parent = parent_of(dst);
    if !parent.is_dir() {
        return Err(Fault::usage(format!("{} is not a directory", parent.display())).help("create it first").into());
    }
    let needed = bytes + (64 << 20);
    match free_bytes(&parent) {
        Some(free) if free < needed => {
            let gb = |b: u64| b as f64 / 1e9;
            let what = format!("{} has {:.2} GB free, {:.2} GB are needed", parent.display(), gb(free), gb(needed));
            Err(Fault::new(Kind::Usage, what).help("free some space, or choose a destination on another disk").into())
        }
        _ => Ok(()),
    }
}

fn parent_of(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

/// Bytes that this user may still write there; `None` where the system does not say.
fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: plain C data, filled by the call below.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated path and a valid struct.
    (unsafe { libc::statvfs(path.as_ptr(), &mut stat) } == 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The directory beside the destination where files grow; removed unless published.
pub struct Staging {
    path: PathBuf,
    published: bool,
}

impl Staging {
    /// Makes the directory, and clears away what runs that were killed left of the same destination.
    pub fn new(dst: &Path) -> Result<Self> {
        let name = dst.file_name().context("the destination needs a name")?.to_string_lossy();
        let parent = parent_of(dst);
        for entry in fs::read_dir(&parent)?.flatten() {
            let file = entry.file_name();
            let pid = file.to_str().and_then(|f| f.strip_prefix(&format!(".{name}."))?.strip_suffix(".partial")?.parse().ok());
            if pid.is_some_and(|pid| !is_running(pid)) {
                fs::remove_dir_all(entry.path()).with_context(|| format!("removing {}", entry.path().display()))?;
            }
        }
        let path = parent.join(format!(".{name}.{}.partial", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Staging { path, published: false })
    }

    /// A new file in it.
    pub fn create(&self, name: &str) -> Result<Growing> {
        let path = self.path.join(name);
        let file = File::create_new(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Growing { file: BufWriter::with_capacity(1 << 20, file), path })
    }

    /// A whole file in it.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = self.create(name)?;
        file.write_all(bytes)?;
        file.finish()
    }

    /// Renames it to its final name: from here on everything is there.
    pub fn publish(mut self, dst: &Path) -> Result<()> {
        let sync = |dir: &Path| File::open(dir).and_then(|d| d.sync_all()).with_context(|| format!("syncing {}", dir.display()));
        sync(&self.path)?;
        fs::rename(&self.path, dst).with_context(|| format!("moving {} to {}", self.path.display(), dst.display()))?;
        self.published = true;
        sync(&parent_of(dst))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            // Already failing: the first error is the one to tell.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Whether a process of this id lives, whoever owns it.
fn is_running(pid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    pid > 0 && (unsafe { libc::kill(pid, 0) } == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH))
}

/// A file being written.
pub struct Growing {
    file: BufWriter<File>,
    path: PathBuf,
}

impl Growing {
    /// Flushes and makes it durable: a full disk may only show here.
    pub fn finish(self) -> Result<()> {
        let path = self.path;
        let sync = self.file.into_inner().map_err(|e| e.into_error()).and_then(|f| f.sync_all());
        sync.with_context(|| format!("writing {}", path.display()))
    }
}

impl Write for Growing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).map_err(|e| io::Error::new(e.kind(), format!("writing {}: {e}", self.path.display())))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
