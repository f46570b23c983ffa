//! Floor 0: the directory of what is only kept to save time. Every file of it may be deleted.

use std::io::{Result, Write};
use std::path::{Path, PathBuf};

/// `$XDG_CACHE_HOME/gemma`, or `~/.cache/gemma`; `None` without a home.
pub fn directory() -> Option<PathBuf> {
    let home = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = home("XDG_CACHE_HOME").or_else(|| home("HOME").map(|h| h.join(".cache")));
    base.map(|b| b.join("gemma"))
}

/// Writes a file, whole or not at all; its directory is made.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b.json");
        for bytes in [&b"first"[..], b"2"] {
            write(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        // Where the directory cannot be made, nothing is left either.
        assert!(write(&path.join("c"), b"below a file").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"2");
    }
}
