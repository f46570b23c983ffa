//! Unix domain sockets: sockets with a path instead of an address.

use rustix::fs::Mode;
use rustix::process::umask;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Connects to a socket, with this timeout for reads and writes.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<impl Read + Write + use<>> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

/// Listens at a path to which only this user can connect.
///
/// Replaces a socket that an ended process left there. Fails if a process listens there, or if the
/// path is not a socket.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    remove_stale(path)?;
    // The umask ensures that other users cannot connect between creation and a change of
    // permissions.
    let before = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            let what = "there is a file, and not a socket";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
    }
}
