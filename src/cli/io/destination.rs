//! Output files: opening and writing the files that options name.
//!
//! A regular file appears complete or not at all. Its bytes are kept in memory, written to a file
//! next to it, and renamed when they are finished. Devices and pipes are opened and written
//! directly. `-`, /dev/stdout and /dev/fd/N are descriptors that this process already has, with
//! their position. A symbolic link is followed to the file that it names.

use crate::cli::io::ui::clean;
use crate::error::Fault;
use crate::os::files::{
    FileId, is_device_name, persist, sync_directory, take_permissions, writable_descriptor,
};
use crate::os::signals;
use crate::util::files::parent_of;
use crate::util::shell::quoted;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// A place for output, as named on the command line.
///
/// Every option that names a file to write has this type, and no other option has. `settings` uses
/// the type to refuse such options in a file of the working directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination(PathBuf);

/// Limit of symbolic links that are followed. Linux has the same limit.
const MOST_LINKS: usize = 40;

/// An open output.
pub struct Writer {
    how: How,
    /// Name as given by the user.
    name: String,
    terminal: bool,
}

enum How {
    /// Written directly.
    Direct(File),
    /// Kept in memory. At the end the file at this path is replaced in one step.
    Replace(PathBuf, Vec<u8>),
}

/// The target of a path.
enum ResolvedPath {
    /// A descriptor of this process.
    Descriptor(i32),
    /// A path that does not end in a symbolic link.
    Path(PathBuf),
}

impl From<OsString> for Destination {
    fn from(name: OsString) -> Self {
        Destination(name.into())
    }
}

impl From<&Path> for Destination {
    fn from(path: &Path) -> Self {
        Destination(path.to_owned())
    }
}

impl Destination {
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Opens the output. Reports errors now, so that a run does not fail after the work.
    pub fn open(&self) -> Result<Writer> {
        if self.0 == Path::new("-") {
            return Writer::stdout();
        }
        let name = self.0.display().to_string();
        let what = || Fault::usage(format!("cannot write {name}"));
        let direct = |file: File| {
            let terminal = file.is_terminal();
            Ok(Writer { how: How::Direct(file), name: name.clone(), terminal })
        };
        if is_device_name(&self.0) {
            return direct(File::options().write(true).open(&self.0).with_context(what)?);
        }
        let path = match resolve(&self.0, &name)? {
            ResolvedPath::Descriptor(number) => {
                return descriptor(number, &name).with_context(what);
            }
            ResolvedPath::Path(path) => path,
        };
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => {
                Err(Fault::usage(format!("cannot write {name}: it is a directory")).into())
            }
            // Files of the kernel, and descriptors of other processes.
            Ok(_) if path.starts_with("/proc") => {
                direct(File::options().append(true).open(&path).with_context(what)?)
            }
            Ok(meta) if !meta.is_file() => {
                direct(File::options().write(true).open(&path).with_context(what)?)
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).with_context(what),
            found => {
                // A file without write permission is not replaced either.
                if found.is_ok()
                    && let Err(error) = File::options().write(true).open(&path)
                    && error.kind() == io::ErrorKind::PermissionDenied
                {
                    return Err(error).with_context(what);
                }
                // Checks that the directory can be written. The file has no name, so a crash leaves
                // nothing on disk.
                tempfile::tempfile_in(parent_of(&path)).map_err(plain).with_context(what)?;
                Ok(Writer { how: How::Replace(path, Vec::new()), name, terminal: false })
            }
        }
    }

    /// Opens the output, writes the bytes, and finishes.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut writer = self.open()?;
        writer.write(bytes)?;
        writer.finish()
    }
}

impl Writer {
    /// Standard output.
    pub fn stdout() -> Result<Writer> {
        descriptor(1, "standard output").context("cannot write to standard output")
    }

    /// Returns whether written bytes appear on a terminal at once.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Returns whether this is a regular file, which appears when it is complete.
    pub fn appears_whole(&self) -> bool {
        matches!(self.how, How::Replace(..))
    }

    /// Writes bytes, or keeps them if this is a regular file.
    ///
    /// A closed pipe ends the process before this returns.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.how {
            How::Direct(file) => {
                let written = signals::write(file, bytes, self.terminal);
                written.with_context(|| format!("cannot write to {}", self.name))
            }
            How::Replace(_, kept) => {
                kept.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Writes a text. On a terminal, control characters are replaced.
    pub fn write_text(&mut self, text: &str) -> Result<()> {
        match self.terminal {
            true => self.write(clean(text).as_bytes()),
            false => self.write(text.as_bytes()),
        }
    }

    /// Ends the output. A regular file appears now.
    pub fn finish(self) -> Result<()> {
        match self.how {
            How::Direct(_) => Ok(()),
            How::Replace(path, bytes) => replace(&path, |file| file.write_all(&bytes), &self.name),
        }
    }

    /// Returns the identity of the regular file that is written or replaced, if there is one.
    pub fn id(&self) -> Option<FileId> {
        match &self.how {
            How::Direct(file) => FileId::of_file(file),
            How::Replace(path, _) => FileId::of_path(path),
        }
        .ok()?
    }
}

/// Replaces the file at `path` in one step by a complete one.
///
/// `name` is its name in messages. `path` must not be a symbolic link.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
    name: &str,
) -> Result<()> {
    let what = || format!("cannot write {name}");
    let mut builder = tempfile::Builder::new();
    take_permissions(builder.prefix(".gemma-"), path);
    let mut file = builder.tempfile_in(parent_of(path)).map_err(plain).with_context(what)?;
    write(file.as_file_mut())
        .and_then(|()| file.as_file().sync_all())
        .map_err(plain)
        .with_context(what)?;
    persist(file, path)
        .and_then(|()| sync_directory(parent_of(path)))
        .map_err(plain)
        .with_context(what)
}

/// Follows symbolic links at the end of a path.
///
/// Returns a descriptor of this process, or a path that does not end in a link.
fn resolve(path: &Path, name: &str) -> Result<ResolvedPath> {
    let what = || Fault::usage(format!("cannot write {name}"));
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        // On systems without /proc these are devices.
        match path.to_str() {
            Some("/dev/stdout") => return Ok(ResolvedPath::Descriptor(1)),
            Some("/dev/stderr") => return Ok(ResolvedPath::Descriptor(2)),
            _ => {}
        }
        let Some(last) = path.file_name() else {
            return Ok(ResolvedPath::Path(path.canonicalize().with_context(what)?));
        };
        let directory = match parent_of(&path).canonicalize() {
            Ok(directory) => directory,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let missing = parent_of(&path).display().to_string();
                let fault =
                    Fault::usage(format!("cannot write {name}: there is no directory {missing}"));
                return Err(fault.help(format!("mkdir -p {}", quoted(&missing))).into());
            }
            Err(error) => return Err(error).with_context(what),
        };
        if let Some(number) = last.to_str().and_then(|n| n.parse().ok())
            && is_of_descriptors(&directory)
        {
            return Ok(ResolvedPath::Descriptor(number));
        }
        let full = directory.join(last);
        match std::fs::symlink_metadata(&full) {
            // Links in /proc are not file names.
            Ok(meta) if meta.is_symlink() && !directory.starts_with("/proc") => {
                path = directory.join(std::fs::read_link(&full).with_context(what)?);
            }
            Err(_) if ends_in_separator(&path) => {
                return Err(
                    Fault::usage(format!("cannot write {name}: it names a directory")).into()
                );
            }
            _ => return Ok(ResolvedPath::Path(full)),
        }
    }
    Err(Fault::usage(format!("cannot write {name}: its symbolic links lead in a circle")).into())
}

/// Returns whether a path can only name a directory.
fn ends_in_separator(path: &Path) -> bool {
    path.to_string_lossy().ends_with(std::path::is_separator)
}

/// Returns whether a directory lists this process's descriptors, as /dev/fd does.
fn is_of_descriptors(directory: &Path) -> bool {
    directory == Path::new("/dev/fd")
        || ["/dev/fd", "/proc/self/fd", "/proc/thread-self/fd"]
            .iter()
            .any(|name| Path::new(name).canonicalize().is_ok_and(|own| own == directory))
}

/// Duplicates a descriptor of this process.
///
/// The duplicate is the same open file, with its position and append mode.
fn descriptor(number: i32, name: &str) -> Result<Writer> {
    let file = writable_descriptor(number)?.context("it is closed, or open for reading only")?;
    let terminal = number == 1 && file.is_terminal();
    Ok(Writer { how: How::Direct(file), name: name.to_owned(), terminal })
}

/// Removes the name of a temporary file from an error, since users do not know it.
fn plain(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(_) => error,
        None => error.kind().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use crate::os::files::symlink;
    use std::fs;

    fn write(path: &Path, text: &str) -> Result<()> {
        Destination::from(path).write(text.as_bytes())
    }

    #[cfg(windows)]
    #[test]
    fn devices_are_written_as_they_come() {
        write(Path::new("NUL"), "x").unwrap();
        assert!(!Destination::from(Path::new("nul")).open().unwrap().appears_whole());
        let missing = write(&Path::new("no dir").join("x"), "x").unwrap_err();
        let fault = crate::error::fault_of(&missing).unwrap();
        assert_eq!(fault.help.as_deref().unwrap(), "mkdir -p 'no dir'");
        let error = Destination::from(Path::new(r".")).open().err().unwrap();
        assert_eq!(crate::error::fault_of(&error).unwrap().kind.exit_code(), 2, "{error:#}");
    }

    #[test]
    fn a_file_appears_only_when_finished() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        write(&path, "old").unwrap();
        let mut writer = Destination::from(&*path).open().unwrap();
        writer.write(b"new").unwrap();
        assert!(writer.appears_whole() && fs::read(&path).unwrap() == b"old");
        drop(writer);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }

    /// Most users of Windows may not create symbolic links.
    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        symlink("sub/file", at("link"));
        symlink("link", at("chain"));
        // The target of the link does not exist yet.
        write(&at("chain"), "one").unwrap();
        write(&at("link"), "two").unwrap();
        assert_eq!(fs::read(at("sub/file")).unwrap(), b"two");
        assert!(at("chain").is_symlink() && at("link").is_symlink());
        symlink("circle", at("circle"));
        assert!(write(&at("circle"), "x").unwrap_err().to_string().contains("circle"));
        symlink("/dev/null", at("null"));
        write(&at("null"), "x").unwrap();
        assert!(at("null").is_symlink());
    }

    /// `/` and descriptors exist on Unix only.
    #[cfg(unix)]
    #[test]
    fn what_cannot_be_written_is_said_when_it_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let missing = write(&dir.path().join("no dir/x"), "x").unwrap_err();
        let fault = crate::error::fault_of(&missing).unwrap();
        assert!(fault.help.as_deref().unwrap().starts_with("mkdir -p '/"), "{fault:?}");
        for path in [dir.path(), Path::new("/"), &dir.path().join("new/"), Path::new("/dev/fd/99")]
        {
            let error = Destination::from(path).open().err().expect("nothing can be written there");
            assert_eq!(crate::error::fault_of(&error).unwrap().kind.exit_code(), 2, "{error:#}");
        }
    }
}
