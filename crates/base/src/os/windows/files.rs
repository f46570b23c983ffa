//! Files and directories: positioned reads, locks, identity, owners, free space.
//!
//! A new file or directory inherits the access rights of its directory. The directories below
//! `%LOCALAPPDATA%` and the temporary files are closed to other users.

use super::{checked, owner, wide};
pub use crate::os::identity::{FileId, NOT_REGULAR, Stamp};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::windows::fs::{FileExt, OpenOptionsExt, symlink_file};
use std::os::windows::io::{AsHandle, AsRawHandle};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use windows_sys::Win32::Foundation::ERROR_LOCK_VIOLATION;
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_BASIC_INFO, FILE_FLAG_BACKUP_SEMANTICS,
    FILE_FLAG_OPEN_REPARSE_POINT, FileBasicInfo, GetDiskFreeSpaceExW, GetFileInformationByHandle,
    GetFileInformationByHandleEx, LOCK_FILE_FLAGS, LOCKFILE_EXCLUSIVE_LOCK,
    LOCKFILE_FAIL_IMMEDIATELY, LockFileEx, UnlockFile,
};
use windows_sys::Win32::System::IO::OVERLAPPED;

/// Fills `out` with the file's bytes from offset `at`.
///
/// Changes the file's position: code that also reads the file sequentially must seek first.
pub fn read_exact_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    let mut filled = 0;
    while filled < out.len() {
        match file.seek_read(&mut out[filled..], at + filled as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the identity of an open file or directory.
fn id(file: &File) -> io::Result<FileId> {
    let mut info = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: the handle is open, and the call fills the structure.
    checked(unsafe { GetFileInformationByHandle(file.as_raw_handle(), &mut info) })?;
    let inode = u64::from(info.nFileIndexHigh) << 32 | u64::from(info.nFileIndexLow);
    Ok(FileId { device: info.dwVolumeSerialNumber.into(), inode })
}

impl Stamp {
    /// Reads the stamp of an open file.
    pub fn of_file(file: &File) -> io::Result<Stamp> {
        let mut times = FILE_BASIC_INFO::default();
        // SAFETY: the handle is open, and the call fills the structure of the size that it is
        // passed.
        checked(unsafe {
            GetFileInformationByHandleEx(
                file.as_raw_handle(),
                FileBasicInfo,
                (&raw mut times).cast(),
                size_of_val(&times) as u32,
            )
        })?;
        let FileId { device, inode } = id(file)?;
        Ok(Stamp {
            bytes: file.metadata()?.len(),
            modified: (0, times.LastWriteTime),
            changed: (0, times.ChangeTime),
            inode,
            device,
        })
    }
}

impl FileId {
    /// Returns the identity of an open file; `None` unless it is a regular file.
    pub fn of_file(file: &File) -> io::Result<Option<FileId>> {
        // Pipes and consoles have no metadata.
        match file.metadata() {
            Ok(meta) if meta.is_file() => id(file).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the identity of the file at a path; `None` unless it is a regular file.
    pub fn of_path(path: &Path) -> io::Result<Option<FileId>> {
        // Opened only for its attributes. Directories need this flag.
        let mut options = OpenOptions::new();
        let file = options.access_mode(0).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(path)?;
        FileId::of_file(&file)
    }

    /// Returns the identity of standard input's file; `None` unless it is a regular file.
    pub fn of_stdin() -> io::Result<Option<FileId>> {
        FileId::of_file(&File::from(io::stdin().as_handle().try_clone_to_owned()?))
    }
}

/// Opens a regular file. Fails for anything else, since a device may have no end.
pub fn open_regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    if !is_device_name(path) {
        let file = options.open(path)?;
        if file.metadata().is_ok_and(|meta| meta.is_file()) {
            return Ok(file);
        }
    }
    Err(io::Error::other(NOT_REGULAR))
}

/// Opens a regular file like [`open_regular`]. Fails if the last part of the path is a symbolic
/// link.
pub fn open_no_link(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_regular(options.custom_flags(FILE_FLAG_OPEN_REPARSE_POINT), path)
}

/// Returns whether a path names a device or a pipe without an entry in the file system, such as
/// `NUL` in any directory.
pub fn is_device_name(path: &Path) -> bool {
    let is_device = |path: PathBuf| path.as_os_str().as_encoded_bytes().starts_with(br"\\.\");
    std::path::absolute(path).is_ok_and(is_device)
}

/// Locks the last possible byte of a file.
///
/// Other processes may then still read and write the content, as on Unix. A lock on the content
/// would forbid it.
fn lock_with(file: &File, flags: LOCK_FILE_FLAGS) -> io::Result<()> {
    let mut place = OVERLAPPED::default();
    place.Anonymous.Anonymous.Offset = u32::MAX - 1;
    place.Anonymous.Anonymous.OffsetHigh = i32::MAX as u32;
    // SAFETY: the handle is open for synchronous calls, which no longer use `place` after they
    // return.
    let locked = unsafe {
        LockFileEx(file.as_raw_handle(), LOCKFILE_EXCLUSIVE_LOCK | flags, 0, 1, 0, &mut place)
    };
    checked(locked)
}

/// Locks a file for this process. Waits until no other process holds the lock.
pub fn lock(file: &File) -> io::Result<()> {
    lock_with(file, 0)
}

/// Locks a file for this process, unless another process holds the lock.
pub fn try_lock(file: &File) -> Result<(), TryLockError> {
    lock_with(file, LOCKFILE_FAIL_IMMEDIATELY).map_err(|error| match error.raw_os_error() {
        Some(code) if code as u32 == ERROR_LOCK_VIOLATION => TryLockError::WouldBlock,
        _ => TryLockError::Error(error),
    })
}

/// Unlocks a file.
pub fn unlock(file: &File) -> io::Result<()> {
    // SAFETY: a plain call on an open handle.
    let unlocked = unsafe { UnlockFile(file.as_raw_handle(), u32::MAX - 1, i32::MAX as u32, 1, 0) };
    checked(unlocked)
}

/// Replaces `path` by a temporary file.
///
/// On NTFS this is atomic, even while a program has the old file open.
pub fn persist(file: NamedTempFile, path: &Path) -> io::Result<()> {
    let temporary = file.into_temp_path().keep()?;
    let renamed = std::fs::rename(&temporary, path).or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied if path.is_file() => replace_open(&temporary, path),
        _ => Err(error),
    });
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed
}

/// Replaces a file that a program has open, on file systems that cannot do it atomically.
///
/// The old file is deleted when it is closed. A crash between the steps leaves it as `*.old`.
fn replace_open(new: &Path, path: &Path) -> io::Result<()> {
    let mut old = new.to_owned();
    old.set_extension("old");
    std::fs::rename(path, &old)?;
    match std::fs::rename(new, path) {
        Ok(()) => {
            let _ = std::fs::remove_file(old);
            Ok(())
        }
        Err(error) => std::fs::rename(old, path).and(Err(error)),
    }
}

/// Creates a directory.
pub fn create_private_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir(path)
}

/// Creates a directory and its missing parents.
pub fn create_private_directories(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)
}

/// Returns whether the path is a directory of this user, not a symbolic link.
pub fn is_own_directory(path: &Path) -> io::Result<bool> {
    Ok(path.symlink_metadata()?.is_dir() && owner::is_own(path)?)
}

/// Returns whether the path is a directory of this user. Does not check its access rights.
pub fn is_private_directory(path: &Path) -> io::Result<bool> {
    is_own_directory(path)
}

/// Returns whether the path is a directory of this user. Does not check its access rights.
pub fn is_closed_directory(path: &Path) -> io::Result<bool> {
    is_own_directory(path)
}

/// Returns the path of the program's directory among the user's temporary files.
pub fn user_directory(temporary: &Path) -> PathBuf {
    temporary.join("gemma")
}

/// Returns whether this user may create files in a directory.
pub fn is_writable_directory(path: &Path) -> bool {
    tempfile::tempfile_in(path).is_ok()
}

/// Returns the free bytes on a directory's disk that this user may write.
pub fn free_bytes(directory: &Path) -> Option<u64> {
    let (directory, mut free) = (wide(directory), 0);
    let none = std::ptr::null_mut();
    // SAFETY: the path ends with a zero, and the call writes to `free` only.
    checked(unsafe { GetDiskFreeSpaceExW(directory.as_ptr(), &mut free, none, none) }).ok()?;
    Some(free)
}

/// Does nothing: the journal of NTFS already makes names durable.
pub fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Does nothing: a temporary file has the permissions of its directory.
pub fn take_permissions(_: &mut tempfile::Builder, _: &Path) {}

/// Duplicates standard output (1) or standard error (2). Returns `None` if it is closed.
pub fn writable_descriptor(number: i32) -> io::Result<Option<File>> {
    let (stdout, stderr) = (io::stdout(), io::stderr());
    let handle = match number {
        1 => stdout.as_handle(),
        2 => stderr.as_handle(),
        _ => return Err(io::Error::other("only descriptors 1 and 2 exist on Windows")),
    };
    if handle.as_raw_handle().is_null() {
        return Ok(None);
    }
    Ok(Some(File::from(handle.try_clone_to_owned()?)))
}

/// Creates a symbolic link at `path`, or a hard link if Windows forbids this user symbolic links.
pub fn make_symlink(to: impl AsRef<Path>, path: impl AsRef<Path>) -> io::Result<()> {
    // Windows follows only links with backslashes.
    let (to, path): (PathBuf, _) = (to.as_ref().components().collect(), path.as_ref());
    symlink_file(&to, path)
        .or_else(|_| std::fs::hard_link(path.parent().unwrap_or(Path::new(".")).join(to), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_identity_under_all_names() {
        let root = tempfile::tempdir().unwrap();
        let [a, b, link] = ["a", "b", "link"].map(|name| root.path().join(name));
        std::fs::write(&a, "text").unwrap();
        std::fs::write(&b, "text").unwrap();
        std::fs::hard_link(&a, &link).unwrap();
        let id = |path: &Path| FileId::of_path(path).unwrap().unwrap();
        let open = FileId::of_file(&File::open(&a).unwrap()).unwrap().unwrap();
        assert_eq!((id(&a), id(&link)), (open, id(&a)));
        assert_ne!(id(&a), id(&b));
        assert_eq!(FileId::of_path(root.path()).unwrap(), None);
        assert!(is_own_directory(root.path()).unwrap() && !is_own_directory(&a).unwrap());
        let stamp = |path: &Path| Stamp::of_file(&File::open(path).unwrap()).unwrap();
        assert!(stamp(&a) == stamp(&link) && stamp(&a) != stamp(&b));
    }

    #[test]
    fn locks_are_between_handles_and_leave_the_content_free() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("locked");
        std::fs::write(&path, "text").unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        try_lock(&first).unwrap();
        assert!(matches!(try_lock(&second), Err(TryLockError::WouldBlock)));
        assert_eq!(std::fs::read(&path).unwrap(), b"text");
        unlock(&first).unwrap();
        lock(&second).unwrap();
    }

    #[test]
    fn a_file_in_use_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let old = File::open(&path).unwrap();
        let mut new = NamedTempFile::new_in(root.path()).unwrap();
        io::Write::write_all(&mut new, b"new").unwrap();
        persist(new, &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        let mut bytes = [0; 3];
        read_exact_at(&old, &mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"old");
        drop(old);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_of_devices_are_known() {
        assert!(is_device_name(Path::new("NUL")) && !is_device_name(Path::new("nul.bin.txt.x/a")));
        assert!(!is_device_name(Path::new(r"C:\a file")));
    }
}
