//! Files that appear whole or not at all.

use std::io::{Result, Write};
use std::path::Path;

/// Writes a file, whole or not at all; its directory is made.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
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
            write_whole(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        // Where the directory cannot be made, nothing is left either.
        assert!(write_whole(&path.join("c"), b"below a file").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"2");
    }
}
