//! Staging directory of a conversion. Because of it, the destination DST appears complete or not at
//! all.
//!
//! During the run, all files are in `.DST.partial` in the same directory. `files/` becomes DST,
//! `journal` lists the finished tensors and rows, `side` has the scales of the finished rows, and
//! `state` has the solver's state. `lock` is locked by the one process that may use the directory.
//! In a directory that others can write to, such as /tmp, another user may have made
//! `.DST.partial`. It must therefore belong to this user, and no file in it is opened through a
//! symbolic link.

use anyhow::{Context, Result};
use gemma_base::error::{Fault, Kind};
use gemma_base::os::files as os;
use gemma_base::util::files::{parent_of, rename_new};
use gemma_base::util::units;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Refuses a destination that is not empty or cannot be made. With `file`, the destination must not
/// exist.
pub fn check_destination(dst: &Path, file: bool) -> Result<()> {
    let shown = dst.display();
    if file && dst.symlink_metadata().is_ok() {
        return Err(Fault::usage(format!("{shown} exists"))
            .help("choose another destination, or remove it first")
            .into());
    }
    if dst.symlink_metadata().is_ok()
        && !(dst.is_dir() && !dst.is_symlink() && fs::read_dir(dst)?.next().is_none())
    {
        return Err(Fault::usage(format!("{shown} exists and is not an empty directory"))
            .help("choose another destination, or remove it first")
            .into());
    }
    if dst.file_name().is_none() {
        return Err(Fault::usage(format!("{shown} does not name a new directory"))
            .help("choose another destination")
            .into());
    }
    let parent = parent_of(dst);
    if !parent.is_dir() {
        let fault = Fault::new(Kind::Failure, format!("{} is not a directory", parent.display()));
        return Err(fault.help(format!("make it first: mkdir -p {}", parent.display())).into());
    }
    Ok(())
}

/// Refuses a disk with less than `bytes` of free space.
pub fn check_space(dst: &Path, bytes: u64) -> Result<()> {
    let (parent, needed) = (parent_of(dst), bytes + (16 << 20));
    match os::free_bytes(parent) {
        Some(free) if free < needed => {
            let what = format!(
                "{} has {} free, {} are needed",
                parent.display(),
                units::bytes(free),
                units::bytes(needed)
            );
            Err(Fault::new(Kind::Failure, what)
                .help("free some space, or choose a destination on another disk")
                .into())
        }
        _ => Ok(()),
    }
}

/// Returns the error for a destination that was made by another program during the run.
fn appeared(result: &Path, dst: &Path) -> Fault {
    let what = format!("{} appeared during the run and was not replaced", dst.display());
    Fault::new(Kind::Failure, what).help(format!(
        "move it away and repeat the command, which moves the finished result {} there",
        result.display()
    ))
}

/// Returns the staging directory, which is in the same directory as `dst`.
pub fn partial_of(dst: &Path) -> PathBuf {
    let name = dst.file_name().unwrap_or_default().to_string_lossy();
    dst.with_file_name(format!(".{name}.partial"))
}

/// Removes the staging directory of a run that was killed after it had moved its result to `dst`.
/// That run may have removed parts of the directory already.
pub fn sweep(dst: &Path) {
    let root = partial_of(dst);
    let is_empty = |directory: &Path| fs::read_dir(directory).map(|mut all| all.next().is_none());
    let is_moved = match is_empty(&root.join("files")) {
        Ok(is_empty) => is_empty,
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    };
    let is_there = dst.is_file() || is_empty(dst).is_ok_and(|is_empty| !is_empty);
    if is_moved && is_there && os::is_own_directory(&root).unwrap_or(false) {
        // A directory that stays does no harm, so errors are ignored.
        if let Ok(staging) = Staging::lock(root, dst) {
            staging.discard();
        }
    }
}

/// Opens a file of a staging directory for reading. Returns `None` if it is missing, a link or not
/// a file.
pub fn open_staged(path: &Path) -> Option<File> {
    os::open_no_link(File::options().read(true), path).ok()
}

/// The staging directory, which is locked by this process until the value is dropped.
pub struct Staging {
    root: PathBuf,
    _lock: Lock,
}

fn ignore_existing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}

/// Refuses a path that is not a directory or belongs to another user.
fn check_own(directory: &Path) -> Result<()> {
    let shown = directory.display();
    let is_own = os::is_own_directory(directory).with_context(|| format!("looking at {shown}"))?;
    if !is_own {
        let fault = Fault::usage(format!("{shown} is not a directory of this user"));
        return Err(fault.help("choose a destination in a directory of your own").into());
    }
    Ok(())
}

/// A locked file. Dropping the value unlocks it.
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough to unlock: a child process that is just starting may have a copy of
        // the descriptor.
        let _ = os::unlock(&self.0);
    }
}

impl Staging {
    /// Creates the directory or opens an existing one. Refuses one that another process uses.
    pub fn open(dst: &Path) -> Result<Staging> {
        let root = partial_of(dst);
        let failed = || format!("creating {}", root.display());
        os::create_private_directory(&root).or_else(ignore_existing).with_context(failed)?;
        check_own(&root)?;
        fs::create_dir(root.join("files")).or_else(ignore_existing).with_context(failed)?;
        check_own(&root.join("files"))?;
        Staging::lock(root, dst)
    }

    /// Locks a staging directory that exists.
    fn lock(root: PathBuf, dst: &Path) -> Result<Staging> {
        let failed = || format!("creating {}", root.display());
        let busy = || {
            let fault =
                Fault::usage(format!("another gemma quantize is at work on {}", dst.display()));
            fault.help("wait for it, or choose another destination")
        };
        let path = root.join("lock");
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let lock = os::open_no_link(&mut options, &path).with_context(failed)?;
        match os::try_lock(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy().into()),
            Err(TryLockError::Error(e)) => {
                return Err(e).with_context(|| format!("locking {}", path.display()));
            }
        }
        // The process that held the lock may have removed the file between the two calls.
        if os::FileId::of_path(&path).ok().flatten() != os::FileId::of_file(&lock)? {
            return Err(busy().into());
        }
        Ok(Staging { root, _lock: Lock(lock) })
    }

    /// Returns the directory of the result's files.
    pub fn files(&self) -> PathBuf {
        self.root.join("files")
    }

    pub fn journal(&self) -> PathBuf {
        self.root.join("journal")
    }

    /// Returns the file with the scales of finished rows of an unfinished tensor.
    pub fn side(&self) -> PathBuf {
        self.root.join("side")
    }

    /// Returns the file with the solver's state after a complete layer.
    pub fn state(&self) -> PathBuf {
        self.root.join("state")
    }

    /// Writes a whole file of the result.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = StagedFile::open(&self.files().join(name), 0)?;
        file.write_all(bytes)?;
        file.sync()
    }

    /// Removes all files of the result.
    pub fn empty(&self) -> Result<()> {
        let files = self.files();
        fs::remove_dir_all(&files)
            .and_then(|()| fs::create_dir(&files))
            .with_context(|| format!("emptying {}", files.display()))
    }

    /// Moves the files, or the only file, to the destination, and removes the rest. A file or
    /// directory that has appeared at the destination is not replaced. The result then stays in the
    /// staging directory.
    pub fn publish(self, file: Option<&str>, dst: &Path) -> Result<()> {
        let sync = |dir: &Path| {
            os::sync_directory(dir).with_context(|| format!("syncing {}", dir.display()))
        };
        let files = self.files();
        sync(&files)?;
        let (moved, result) = match file.map(|name| files.join(name)) {
            Some(file) => (rename_new(&file, dst), file),
            // A rename replaces an empty directory, and fails for anything else.
            None => (fs::rename(&files, dst), files),
        };
        use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
        moved.map_err(|error| match error.kind() {
            AlreadyExists | DirectoryNotEmpty | NotADirectory => appeared(&result, dst).into(),
            _ => {
                let what = format!("moving {} to {}", result.display(), dst.display());
                anyhow::Error::from(error).context(what)
            }
        })?;
        sync(parent_of(dst)).with_context(|| {
            format!("{} is complete, but a power cut may lose its name", dst.display())
        })?;
        self.discard();
        Ok(())
    }

    /// Removes the staging directory.
    pub fn discard(self) {
        // Errors are ignored: the result is complete, and a later run removes the rest.
        let _ = fs::remove_dir_all(&self.root);
        if cfg!(windows) {
            // The name of the lock may remain until the file is closed.
            drop(self._lock);
            let _ = fs::remove_dir(self.root);
        }
    }
}

/// A file of the staging directory that is being written.
pub struct StagedFile {
    file: BufWriter<File>,
    path: PathBuf,
    /// Name of the current tensor, for errors.
    label: String,
}

impl StagedFile {
    /// Opens or creates a file and truncates it to `keep` bytes.
    pub fn open(path: &Path, keep: u64) -> Result<StagedFile> {
        let open = || {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            let mut file = os::open_no_link(&mut options, path)?;
            file.set_len(keep)?;
            file.seek(SeekFrom::Start(keep))?;
            Ok::<_, io::Error>(file)
        };
        let file = open().with_context(|| format!("cannot open {}", path.display()))?;
        Ok(StagedFile {
            file: BufWriter::with_capacity(1 << 20, file),
            path: path.to_owned(),
            label: "the file".into(),
        })
    }

    /// Sets the name of the tensor that is written next, for errors.
    pub fn begin(&mut self, tensor: &str) {
        self.label = format!("tensor `{tensor}`");
    }

    pub fn write_all(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        self.check(written)
    }

    pub fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        self.check(flushed)
    }

    /// Flushes the file and syncs it to disk. The error of a full disk may appear only here.
    pub fn sync(&mut self) -> Result<()> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        self.check(synced)
    }

    fn check(&self, result: io::Result<()>) -> Result<()> {
        result.with_context(|| format!("cannot write {} to {}", self.label, self.path.display()))
    }
}
