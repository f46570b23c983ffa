//! Loader of built arrays that match this program.
//!
//! `npu-kernels/manifest.txt` has the version of the interface, the tile sizes and the SHA-256 of
//! every source. `build.sh` copies it to the directory of the arrays and adds the SHA-256 of each
//! array. The loader refuses arrays with another manifest.

use super::layout::KernelShape;
use anyhow::{Context, Result, bail, ensure};
use gemma_base::util::files::{read_regular, read_regular_text};
use gemma_base::util::hex;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Manifest of the kernel sources at the time when this program was built.
pub const SOURCES: &str = include_str!("../../../npu-kernels/manifest.txt");

/// Limit for the bytes of a manifest and of an array. An array has about 1 MB.
const LARGEST: u64 = 64 << 20;

/// Returns the file name of the array for a head dimension.
pub fn file_name(shape: KernelShape) -> String {
    format!("flash_partial_{}.xclbin", shape.head_dim)
}

/// Returns the first of these directories that contains the array for `shape`.
pub fn find(directories: &[PathBuf], shape: KernelShape) -> Result<PathBuf> {
    let name = file_name(shape);
    directories.iter().find(|d| d.join(&name).is_file()).cloned().with_context(|| {
        let first = directories
            .first()
            .map_or(String::new(), |d| format!(" and copy its output to {}", d.display()));
        format!(
            "{name} is not installed: \
            build it with npu-kernels/build.sh on a machine with mlir-aie{first}"
        )
    })
}

/// Reads the array for `shape` from a directory. Refuses an array with another manifest.
pub fn load(directory: &Path, shape: KernelShape) -> Result<Vec<u8>> {
    let (name, manifest) = (file_name(shape), directory.join("manifest.txt"));
    let text = read_regular_text(&manifest, LARGEST)
        .with_context(|| format!("reading {}", manifest.display()))?;
    let Some(built) = text.strip_prefix(SOURCES) else {
        bail!(
            "{} was made from other sources: \
            build the arrays again with npu-kernels/build.sh of this version",
            manifest.display()
        )
    };
    let line = built.lines().find_map(|l| l.strip_prefix("xclbin ")?.strip_prefix(name.as_str()));
    let want = line.with_context(|| format!("{} does not name {name}", manifest.display()))?.trim();
    let path = directory.join(&name);
    let bytes =
        read_regular(&path, LARGEST).with_context(|| format!("reading {}", path.display()))?;
    let got = hex(Sha256::digest(&bytes));
    ensure!(got == want, "{} is not the file that its manifest lists", path.display());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{ABI, OBJECT};
    use std::fs;

    /// The manifest must match the sources in its directory and the sizes that the host uses.
    #[test]
    fn the_manifest_is_fresh() {
        let room = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../npu-kernels");
        let mut want = format!("abi {ABI}\nobject {OBJECT}\n");
        for shape in [128, 256].map(|d| KernelShape::new(d).unwrap()) {
            want += &format!(
                "head_dim {} rows {} keys {} result {}\n",
                shape.head_dim,
                shape.rows(),
                shape.keys(),
                shape.out_bytes()
            );
        }
        for name in ["design.py", "flash_partial.cc", "flash_partial.h"] {
            let bytes = fs::read(room.join(name)).unwrap();
            let hash = hex(Sha256::digest(&bytes));
            want += &format!("source {name} {hash}\n");
        }
        assert_eq!(
            SOURCES, want,
            "npu-kernels/manifest.txt is stale: run npu-kernels/build.sh --manifest"
        );
    }

    #[test]
    fn only_what_the_manifest_names_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let shape = KernelShape::new(128).unwrap();
        let at = |name: &str| dir.path().join(name);
        let load = || load(dir.path(), shape).map_err(|e| e.to_string());
        let list = [dir.path().to_owned()];
        assert!(find(&list, shape).unwrap_err().to_string().contains("build.sh"));
        fs::write(at("flash_partial_128.xclbin"), b"array").unwrap();
        assert_eq!(find(&list, shape).unwrap(), dir.path());
        assert!(load().unwrap_err().contains("manifest.txt"));
        let hash = hex(Sha256::digest(b"array"));
        let good = format!("{SOURCES}xclbin flash_partial_128.xclbin {hash}\n");
        fs::write(at("manifest.txt"), &good).unwrap();
        assert_eq!(load().unwrap(), b"array");
        fs::write(at("manifest.txt"), good.replace("abi 1", "abi 2")).unwrap();
        assert!(load().unwrap_err().contains("other sources"));
        fs::write(at("manifest.txt"), good.replace("128.xclbin", "256.xclbin")).unwrap();
        assert!(load().unwrap_err().contains("does not name"));
        fs::write(at("manifest.txt"), &good).unwrap();
        fs::write(at("flash_partial_128.xclbin"), b"Array").unwrap();
        assert!(load().unwrap_err().contains("is not the file"));
    }
}
