//! Atomic file writes, regular files, and file names that are valid on every system.

use crate::os;
use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::{PathPersistError, TempPath};

/// Writes a file atomically. Creates its directory for this user only.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    os::files::create_private_directories(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(bytes)?;
    os::files::persist(file, path)
}

/// Atomically replaces `to` by a file or link, and makes the new name durable.
pub fn rename_durably(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to)?;
    os::files::sync_directory(parent_of(to))
}

/// Renames a file to a name that does not exist yet. If it exists, fails and keeps both files.
pub fn rename_new(from: &Path, to: &Path) -> Result<()> {
    let renamed = TempPath::try_from_path(from)?.persist_noclobber(to);
    renamed.map_err(|PathPersistError { error, path }| {
        // Dropping the path would remove the file.
        let _ = path.keep();
        error
    })
}

/// Returns the directory of a file.
pub fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns whether a path from an untrusted list, with `/` between its parts, names a file below
/// its directory on every system. Caches are copied between systems, so each system also refuses
/// names that only another one misreads.
pub fn is_portable(path: &str) -> bool {
    path.len() <= LONGEST_PATH && path.split('/').all(is_portable_name)
}

/// Most bytes of a portable path.
const LONGEST_PATH: usize = 1024;

/// Returns whether a name stays in its directory and has no special meaning on any system.
pub fn is_portable_name(name: &str) -> bool {
    let is_bad = |c: char| {
        c.is_control() || matches!(c, '/' | '\\' | ':' | '<' | '>' | '"' | '|' | '?' | '*')
    };
    // Windows drops dots and spaces at the end of a name, which turns `.. ` into `..`.
    let has_end = !name.is_empty() && !name.ends_with(['.', ' ']);
    has_end && !name.contains(is_bad) && !is_windows_device(name)
}

/// Returns whether a name is a device on Windows, in any directory and with any extension.
fn is_windows_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_ascii_uppercase();
    let number = stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT"));
    let mut number = number.unwrap_or_default().chars();
    let is_port =
        matches!(number.next(), Some('0'..='9' | '¹' | '²' | '³')) && number.next().is_none();
    is_port || ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"].contains(&&*stem)
}

/// Opens a regular file for reading. Fails for other files, see [`os::files::open_regular`].
pub fn open_regular(path: &Path) -> Result<File> {
    os::files::open_regular(File::options().read(true), path)
}

/// Reads a regular file of at most `most` bytes.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::other(format!("it is longer than {most} bytes")));
    }
    Ok(bytes)
}

/// Reads a regular file of at most `most` bytes as text.
pub fn read_regular_text(path: &Path, most: u64) -> Result<String> {
    String::from_utf8(read_regular(path, most)?).map_err(Error::other)
}

/// Age above which a temporary file belongs to a killed writer.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// Keeps the newest `most` files with names that satisfy `is_called_so`. Removes older ones and
/// abandoned temporary files; ignores files that cannot be removed.
pub fn keep_newest(directory: &Path, most: usize, is_called_so: impl Fn(&str) -> bool) {
    let old = newest_first(directory, is_called_so).into_iter().skip(most);
    old.for_each(|(_, path, _)| drop(std::fs::remove_file(path)));
}

/// Like [`keep_newest`], with a limit of `most` bytes in total.
pub fn keep_newest_bytes(directory: &Path, most: u64, is_called_so: impl Fn(&str) -> bool) {
    let mut sum = 0u64;
    for (_, path, bytes) in newest_first(directory, is_called_so) {
        sum = sum.saturating_add(bytes);
        if sum > most {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Lists the files with names that satisfy `is_called_so`, with their times and bytes. Removes
/// abandoned temporary files.
fn newest_first(
    directory: &Path,
    is_called_so: impl Fn(&str) -> bool,
) -> Vec<(SystemTime, PathBuf, u64)> {
    let (mut ours, now) = (Vec::new(), SystemTime::now());
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let (name, meta) = (entry.file_name(), entry.metadata());
        let (Some(name), Ok(meta)) = (name.to_str(), meta) else { continue };
        let Some(changed) = meta.modified().ok().filter(|_| meta.is_file()) else { continue };
        if is_called_so(name) {
            ours.push((changed, entry.path(), meta.len()));
        } else if is_temporary(name) && now.duration_since(changed).is_ok_and(|d| d > ABANDONED) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    ours.sort_unstable_by(|a, b| b.cmp(a));
    ours
}

/// Sets a file's time to now. Returns `false` if there is no such writable file.
pub fn touch(path: &Path) -> bool {
    let file = os::files::open_regular(File::options().write(true), path);
    file.and_then(|file| file.set_modified(SystemTime::now())).is_ok()
}

/// Returns whether a name is that of a temporary file of [`write_whole`].
fn is_temporary(name: &str) -> bool {
    name.strip_prefix(".tmp").is_some_and(|rest| {
        rest.len() == 6 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b.json");
        for bytes in [&b"first"[..], b"2"] {
            write_whole(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(is_temporary(
            tempfile::NamedTempFile::new().unwrap().path().file_name().unwrap().to_str().unwrap()
        ));
        // Nothing is left either if the directory cannot be created.
        assert!(write_whole(&path.join("c"), b"below a file").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"2");
    }

    #[test]
    fn a_new_name_never_replaces_a_file() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let read = |name: &str| std::fs::read_to_string(at(name)).ok();
        std::fs::write(at("made"), "made").unwrap();
        std::fs::write(at("old"), "old").unwrap();
        let refused = rename_new(&at("made"), &at("old")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!((read("made"), read("old")), (Some("made".into()), Some("old".into())));
        rename_new(&at("made"), &at("new")).unwrap();
        assert_eq!((read("made"), read("new")), (None, Some("made".into())));
        rename_durably(&at("new"), &at("old")).unwrap();
        assert_eq!((read("new"), read("old")), (None, Some("made".into())));
    }

    #[test]
    fn portable_paths_stay_below_their_directory_on_every_system() {
        let long = "a/".repeat(600) + "a";
        for bad in [
            "",
            "..",
            ".",
            "../x",
            "/x",
            "a//b",
            "a/./b",
            "a/..",
            "a/",
            "a\\b",
            "..\\x",
            "C:x",
            "C:/x",
            "x:stream",
            "a/b:c",
            "a.",
            "a ",
            "a/.. /b",
            "a/... /b",
            "a./b",
            "nul",
            "NUL.gguf",
            "a/Con.txt",
            "aux .json",
            "COM1",
            "lpt9.tar.gz",
            "com¹",
            "conin$",
            "a\0b",
            "a\nb",
            "\u{7f}",
            "a?",
            "a*",
            "<a",
            "a>b",
            "a|b",
            "a\"b",
            &long,
        ] {
            assert!(!is_portable(bad), "{bad:?}");
        }
        for good in [
            "config.json",
            "q/x.gguf",
            ".gitattributes",
            "a b/ü-1.gguf",
            "..a",
            "nulls",
            "COM",
            "COM10",
            "lpt",
            "auxiliary.py",
            "model-00001-of-00002.safetensors",
        ] {
            assert!(is_portable(good), "{good:?}");
        }
    }

    #[test]
    fn the_newest_files_are_kept_and_what_killed_writers_left_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - 2 * ABANDONED;
        let make = |name: &str, age: u32| {
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            file.set_modified(old - age * Duration::from_secs(1)).unwrap();
        };
        (0..5).for_each(|age| make(&format!("a{age}"), age));
        [".tmpAbc123", ".tmpnotes.txt", "other"].iter().for_each(|name| make(name, 9));
        std::fs::write(dir.path().join(".tmpXyz789"), "of a writer at work").unwrap();
        keep_newest(dir.path(), 2, |name| name.starts_with('a'));
        let left = std::fs::read_dir(&dir).unwrap();
        let mut left: Vec<_> =
            left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, [".tmpXyz789", ".tmpnotes.txt", "a0", "a1", "other"]);
        std::fs::write(dir.path().join("a1"), "bytes").unwrap();
        assert!(touch(&dir.path().join("a0")) && !touch(&dir.path().join("a2")));
        keep_newest_bytes(dir.path(), 5, |name| name.starts_with('a'));
        assert!(dir.path().join("a0").exists() && dir.path().join("a1").exists());
        keep_newest_bytes(dir.path(), 4, |name| name.starts_with('a'));
        assert!(dir.path().join("a0").exists() && !dir.path().join("a1").exists());
    }
}
