//! The committed SPIR-V is that of the committed sources: held to the manifest, no compiler needed.

use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

fn room() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders")
}

fn names(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut list: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    list.retain(|p| p.extension().is_some_and(|e| e == ending));
    list.sort();
    assert!(!list.is_empty(), "no *.{ending} in {}", dir.display());
    list
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn spirv_belongs_to_its_source() {
    let includes: Vec<u8> = names(&room().join("include"), "glsl").iter().flat_map(|p| fs::read(p).unwrap()).collect();
    let manifest = fs::read_to_string(room().join("manifest.txt")).unwrap();
    let mut lines = manifest.lines();
    for source in names(&room(), "comp") {
        let name = source.file_stem().unwrap().to_str().unwrap();
        let text = [includes.clone(), fs::read(&source).unwrap()].concat();
        let spirv = fs::read(room().join(format!("spirv/{name}.spv"))).unwrap();
        let want = format!("{name} {} {}", sha256(&text), sha256(&spirv));
        assert_eq!(lines.next(), Some(want.as_str()), "{name} is stale: run scripts/build-shaders.sh");
        assert_eq!(spirv[..4], 0x0723_0203u32.to_le_bytes(), "{name}.spv is no SPIR-V");
    }
    assert_eq!(lines.next(), None, "the manifest names a shader that is not there");
    assert_eq!(names(&room().join("spirv"), "spv").len(), names(&room(), "comp").len());
}

#[test]
fn shaders_stay_readable() {
    for source in names(&room(), "comp") {
        let lines = fs::read_to_string(&source).unwrap().lines().count();
        assert!(lines <= 300, "{} has {lines} lines", source.display());
    }
}
