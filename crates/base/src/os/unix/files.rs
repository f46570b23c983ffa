//! Files and directories: positioned reads, identity, owners and modes, free space.

pub use crate::os::identity::{FileId, NOT_REGULAR, Stamp};
use rustix::fs::{Access, OFlags, access, fcntl_getfl, statvfs};
use std::fs::{DirBuilder, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Fills `out` with the file's bytes from offset `at`. Keeps the file's position.
pub fn read_exact_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    file.read_exact_at(out, at)
}

impl Stamp {
    /// Reads the stamp of an open file.
    pub fn of_file(file: &File) -> io::Result<Stamp> {
        let meta = file.metadata()?;
        Ok(Stamp {
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            inode: meta.ino(),
            device: meta.dev(),
        })
    }
}

impl FileId {
    fn of_metadata(meta: &Metadata) -> Option<FileId> {
        meta.is_file().then(|| FileId { device: meta.dev(), inode: meta.ino() })
    }

    /// Returns the identity of an open file; `None` unless it is a regular file.
    pub fn of_file(file: &File) -> io::Result<Option<FileId>> {
        Ok(FileId::of_metadata(&file.metadata()?))
    }

    /// Returns the identity of the file at a path; `None` unless it is a regular file.
    pub fn of_path(path: &Path) -> io::Result<Option<FileId>> {
        Ok(FileId::of_metadata(&std::fs::metadata(path)?))
    }

    /// Returns the identity of standard input's file; `None` unless it is a regular file.
    pub fn of_stdin() -> io::Result<Option<FileId>> {
        FileId::of_file(&File::from(io::stdin().as_fd().try_clone_to_owned()?))
    }
}

/// Opens a regular file.
///
/// Fails for anything else without waiting: opening a pipe can block forever, and a device may have
/// no end.
pub fn open_regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_checked(options, OFlags::NONBLOCK, path, std::fs::metadata(path))
}

/// Opens a regular file like [`open_regular`]. Fails if the last part of the path is a symbolic
/// link.
pub fn open_no_link(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    open_checked(options, flags, path, std::fs::symlink_metadata(path))
}

fn open_checked(
    options: &mut OpenOptions,
    flags: OFlags,
    path: &Path,
    found: io::Result<Metadata>,
) -> io::Result<File> {
    let check = |meta: Metadata| match meta.is_file() {
        true => Ok(()),
        false => Err(io::Error::other(NOT_REGULAR)),
    };
    // The path is checked first, since opening some devices has side effects. The open file is
    // checked too, because the path may have changed in between.
    found.map_or(Ok(()), check)?;
    let file = options.custom_flags(flags.bits() as i32).open(path)?;
    check(file.metadata()?)?;
    Ok(file)
}

/// Returns whether a path names a device or a pipe without an entry in the file system. Only
/// Windows has such names.
pub fn is_device_name(_: &Path) -> bool {
    false
}

/// Locks a file for this process. Waits until no other process holds the lock.
pub fn lock(file: &File) -> io::Result<()> {
    file.lock()
}

/// Locks a file for this process, unless another process holds the lock.
pub fn try_lock(file: &File) -> Result<(), TryLockError> {
    file.try_lock()
}

/// Unlocks a file.
pub fn unlock(file: &File) -> io::Result<()> {
    file.unlock()
}

/// Atomically replaces `path` by a temporary file.
pub fn persist(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.persist(path)?;
    Ok(())
}

/// Creates a directory that only this user may enter.
pub fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// Creates a directory and its missing parents, for this user only.
pub fn create_private_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Returns whether the path is a directory of this user, not a symbolic link.
pub fn is_own_directory(path: &Path) -> io::Result<bool> {
    let meta = path.symlink_metadata()?;
    Ok(meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw())
}

/// Returns whether the path is a directory of this user that no other user may write to.
pub fn is_private_directory(path: &Path) -> io::Result<bool> {
    Ok(is_own_directory(path)? && path.symlink_metadata()?.permissions().mode() & 0o022 == 0)
}

/// Returns whether the path is a directory of this user that no other user may enter or list.
pub fn is_closed_directory(path: &Path) -> io::Result<bool> {
    Ok(is_own_directory(path)? && path.symlink_metadata()?.permissions().mode() & 0o077 == 0)
}

/// Returns the path of this user's directory among the temporary files of all users.
pub fn user_directory(temporary: &Path) -> PathBuf {
    temporary.join(format!("gemma-{}", rustix::process::geteuid()))
}

/// Returns whether this user may create files in a directory.
pub fn is_writable_directory(path: &Path) -> bool {
    access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// Returns the free bytes on a directory's disk that this user may write.
pub fn free_bytes(directory: &Path) -> Option<u64> {
    let stat = statvfs(directory).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Makes the names in a directory durable.
///
/// Does nothing if this user cannot read it or its file system cannot sync directories.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let synced = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Ok(()),
        directory => directory?.sync_all(),
    };
    synced.or_else(|error| match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::Unsupported => Ok(()),
        _ => Err(error),
    })
}

/// Sets a temporary file's permissions to those of the file at `path`, or of a new file.
pub fn take_permissions(builder: &mut tempfile::Builder, path: &Path) {
    let mode = std::fs::metadata(path).map_or(0o666, |meta| meta.permissions().mode() & 0o777);
    builder.permissions(Permissions::from_mode(mode));
}

/// Duplicates a descriptor of this process. The copy shares its position and append mode.
///
/// Returns `None` if the descriptor is not writable.
pub fn writable_descriptor(number: i32) -> io::Result<Option<File>> {
    if number < 0 {
        return Err(rustix::io::Errno::BADF.into());
    }
    // SAFETY: the number is only looked up and copied; a closed descriptor is an error.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, 3)?;
    let is_writable = fcntl_getfl(&copy)? & OFlags::RWMODE != OFlags::RDONLY;
    Ok(is_writable.then(|| File::from(copy)))
}

/// Creates a symbolic link at `path`.
pub fn make_symlink(to: impl AsRef<Path>, path: impl AsRef<Path>) -> io::Result<()> {
    std::os::unix::fs::symlink(to, path)
}

/// Creates a symbolic link at `path` for a test.
#[cfg(any(test, feature = "testing"))]
pub fn symlink(to: impl AsRef<Path>, path: impl AsRef<Path>) {
    make_symlink(to, path).unwrap();
}

/// Allows other users to write to a directory, or forbids it.
#[cfg(any(test, feature = "testing"))]
pub fn share_directory(path: &Path, with_others: bool) {
    let mode = if with_others { 0o777 } else { 0o700 };
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_private_directory_is_own_real_and_closed() {
        let root = tempfile::tempdir().unwrap();
        let own = user_directory(root.path());
        assert!(is_private_directory(&own).is_err());
        create_private_directory(&own).unwrap();
        assert!(is_private_directory(&own).unwrap());
        assert!(is_closed_directory(&own).unwrap());
        share_directory(&own, true);
        assert!(is_own_directory(&own).unwrap() && !is_private_directory(&own).unwrap());
        assert!(!is_closed_directory(&own).unwrap());
        let link = root.path().join("link");
        symlink(&own, &link);
        assert!(!is_own_directory(&link).unwrap());
    }

    #[test]
    fn a_pipe_or_a_device_is_refused_and_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let [pipe, link, file] = ["pipe", "link", "file"].map(|name| root.path().join(name));
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        symlink("pipe", &link);
        let options: [fn(&mut OpenOptions) -> &mut OpenOptions; 4] = [
            |options| options.read(true),
            |options| options.write(true).create(true),
            |options| options.read(true).append(true).create(true),
            |options| options.read(true).write(true),
        ];
        for set in options {
            let mut options = File::options();
            set(&mut options);
            for path in [&*pipe, &*link, Path::new("/dev/null"), root.path()] {
                let refused = open_regular(&mut options, path).unwrap_err();
                assert_eq!(refused.to_string(), NOT_REGULAR, "{}", path.display());
                assert!(open_no_link(&mut options, path).is_err());
            }
            std::fs::write(&file, "text").unwrap();
            assert!(open_regular(&mut options, &file).is_ok());
            assert!(open_no_link(&mut options, &file).is_ok());
        }
    }

    #[test]
    fn a_file_has_one_identity_under_all_names() {
        let root = tempfile::tempdir().unwrap();
        let [a, b, link] = ["a", "b", "link"].map(|name| root.path().join(name));
        std::fs::write(&a, "text").unwrap();
        std::fs::write(&b, "text").unwrap();
        symlink("a", &link);
        let id = |path: &Path| FileId::of_path(path).unwrap().unwrap();
        assert_eq!(
            (id(&a), id(&link)),
            (FileId::of_file(&File::open(&a).unwrap()).unwrap().unwrap(), id(&a))
        );
        assert_ne!(id(&a), id(&b));
        assert_eq!(FileId::of_path(root.path()).unwrap(), None);
        let mut options = File::options();
        options.read(true);
        assert!(options.open(&link).is_ok() && open_no_link(&mut options, &link).is_err());
    }
}
