//! One process at a time on a GPU: two that load at once would each take the memory that the other
//! counted on.

use super::Listener;
use crate::error::{Fault, Kind};
use crate::util::xdg;
use anyhow::{Context, Result};
use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// `--device-lock`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceLock {
    /// Until the other one has ended
    #[default]
    Wait,
    /// Not at all: exit 4
    Fail,
    /// Both run
    Off,
}

/// Locks that this process holds, until it ends: by file.
static HELD: Mutex<Vec<(PathBuf, File)>> = Mutex::new(Vec::new());

/// Takes the device of this name and number for this process, unless it has it already.
pub fn acquire(how: DeviceLock, name: &str, index: usize, listener: &dyn Listener) -> Result<()> {
    if how == DeviceLock::Off {
        return Ok(());
    }
    let path = file(&xdg::runtime().unwrap_or_else(std::env::temp_dir), name, index);
    let mut held = HELD.lock().expect("no thread panics while it holds this");
    if held.iter().any(|(other, _)| *other == path) {
        return Ok(());
    }
    let what = || {
        Fault::new(Kind::Device, format!("cannot lock {}", path.display()))
            .help("--device-lock off uses the device without a lock")
    };
    // Kept when the process ends: a lock is on the open file, and whoever waits has it open.
    // One that another user made can be read at least, and that is enough.
    // Among the temporary files a link may be anybody's, and a pipe would be waited for.
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let own = options.clone().write(true).create(true).truncate(false).open(&path);
    let file = own.or_else(|_| options.open(&path)).with_context(what)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) if how == DeviceLock::Wait => {
            listener.note(&format!(
                "another process is using {name}: waiting for it to end \
                (--device-lock off runs beside it)"
            ));
            file.lock().with_context(what)?;
        }
        Err(TryLockError::WouldBlock) => {
            let fault = Fault::new(Kind::Device, format!("another process is using {name}"));
            return Err(fault.help("--device-lock wait waits for it, off runs beside it").into());
        }
        Err(TryLockError::Error(e)) => return Err(e).with_context(what),
    }
    held.push((path, file));
    Ok(())
}

/// The file that stands for a device: in `$XDG_RUNTIME_DIR`, or among the temporary files where
/// there is none.
pub fn file(directory: &Path, name: &str, index: usize) -> PathBuf {
    let clean: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    directory.join(format!("gemma-{clean}-{index}.lock"))
}
