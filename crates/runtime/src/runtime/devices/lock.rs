//! Lock on a GPU: one process at a time. Two processes that load at the same time would each use
//! the memory that the other one counted on.
//!
//! A lock only works between processes of one user, because any user could hold a shared file
//! forever. Processes of different users load concurrently. If one finds too little memory, it ends
//! with exit code 5.

use crate::runtime::Listener;
use anyhow::{Context, Result};
use gemma_base::error::{Fault, Kind};
use gemma_base::os::files as os;
use gemma_base::util::xdg;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// `--device-lock`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceLock {
    /// Wait until the other process has ended
    #[default]
    Wait,
    /// Fail with exit code 4
    Fail,
    /// Run both processes
    Off,
}

/// Locks that this process holds until it ends or calls [`release`], by file.
static HELD: Mutex<Vec<(PathBuf, File)>> = Mutex::new(Vec::new());

/// Locks the device with this name and index for this process, unless already locked.
pub fn acquire(how: DeviceLock, name: &str, index: usize, listener: &dyn Listener) -> Result<()> {
    if how == DeviceLock::Off {
        return Ok(());
    }
    let directory = directory(xdg::runtime(), &std::env::temp_dir())?;
    let path = file(&directory, name, index);
    let mut held = HELD.lock().expect("no thread panics while it holds this");
    if held.iter().any(|(other, _)| *other == path) {
        return Ok(());
    }
    let file = lock(&path, name, how, listener)?;
    held.push((path, file));
    Ok(())
}

/// Releases all devices. No model of this process may be on one.
pub fn release() {
    HELD.lock().expect("no thread panics while it holds this").clear();
}

/// Locks `path`. The file holds the id of the process that locked it last.
fn lock(path: &Path, name: &str, how: DeviceLock, listener: &dyn Listener) -> Result<File> {
    let failed = || cannot_lock(path);
    // The file is kept when the process ends, because another process may be waiting on this inode.
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = os::open_no_link(&mut options, path).with_context(failed)?;
    match os::try_lock(&file) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut number = String::new();
            // A process that has just taken the lock may not have written its id yet.
            let _ = (&file).take(20).read_to_string(&mut number);
            let other = match number.trim().parse::<u32>() {
                Ok(number) => format!("process {number} is using {name}"),
                Err(_) => format!("another process is using {name}"),
            };
            if how == DeviceLock::Fail {
                let fault = Fault::new(Kind::Device, other);
                return Err(fault
                    .help("--device-lock wait waits for it, off runs at the same time")
                    .into());
            }
            listener.note(&format!(
                "{other}: waiting for it to end (--device-lock off does not wait; the lock is {})",
                path.display()
            ));
            os::lock(&file).with_context(failed)?;
        }
        Err(TryLockError::Error(e)) => return Err(e).with_context(failed),
    }
    // Only used for the message above.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

fn cannot_lock(path: &Path) -> Fault {
    Fault::new(Kind::Device, format!("cannot lock {}", path.display()))
        .help("--device-lock off uses the device without a lock")
}

/// Returns a directory where only this user can create files: `$XDG_RUNTIME_DIR`, or `gemma-UID` in
/// the temporary directory.
fn directory(runtime: Option<PathBuf>, temporary: &Path) -> Result<PathBuf> {
    let is_private = |directory: &PathBuf| os::is_private_directory(directory).unwrap_or(false);
    if let Some(runtime) = runtime.filter(is_private) {
        return Ok(runtime);
    }
    let directory = os::user_directory(temporary);
    let failed = || cannot_lock(&directory);
    match os::create_private_directory(&directory) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e).with_context(failed),
        _ => {}
    }
    match os::is_private_directory(&directory).with_context(failed)? {
        true => Ok(directory),
        false => {
            let what = format!("{} is open to other users", directory.display());
            let help = "remove it, or set XDG_RUNTIME_DIR to a directory of yours alone";
            Err(Fault::new(Kind::Device, what).help(help).into())
        }
    }
}

/// Returns the lock file of a device.
pub fn file(directory: &Path, name: &str, index: usize) -> PathBuf {
    let clean: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    directory.join(format!("gemma-{clean}-{index}.lock"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Silence;
    use gemma_base::error::fault_of;

    /// Access rights of others are not checked on Windows.
    #[cfg(unix)]
    #[test]
    fn locks_lie_where_no_other_user_may_write() {
        let (runtime, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let find = || directory(Some(runtime.path().to_owned()), temporary.path());
        assert_eq!(find().unwrap(), runtime.path());
        os::share_directory(runtime.path(), true);
        let own = find().unwrap();
        assert!(own.starts_with(temporary.path()));
        assert!(os::is_private_directory(&own).unwrap());
        assert_eq!(find().unwrap(), own, "again");
        os::share_directory(&own, true);
        let fault = |error: anyhow::Error| fault_of(&error).unwrap().clone();
        assert_eq!(fault(find().unwrap_err()).kind, Kind::Device);
        std::fs::remove_dir(&own).unwrap();
        std::fs::create_dir(temporary.path().join("elsewhere")).unwrap();
        os::symlink("elsewhere", &own);
        assert_eq!(fault(find().unwrap_err()).kind, Kind::Device);
        std::fs::remove_file(&own).unwrap();
        assert_eq!(directory(None, temporary.path()).unwrap(), own);
    }

    #[test]
    fn the_process_that_has_the_device_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path(), "A GPU", 0);
        let lock = |how| lock(&path, "A GPU", how, &Silence);
        let held = lock(DeviceLock::Wait).unwrap();
        let error = lock(DeviceLock::Fail).unwrap_err();
        let text = format!("process {} is using A GPU", std::process::id());
        assert_eq!(fault_of(&error).unwrap().what, text);
        drop(held);
        lock(DeviceLock::Fail).unwrap();
    }
}
