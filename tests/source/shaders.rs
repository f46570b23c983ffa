//! The committed SPIR-V belongs to the committed sources: compares both with the manifest.

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
    let includes: Vec<u8> =
        names(&room().join("include"), "glsl").iter().flat_map(|p| fs::read(p).unwrap()).collect();
    let manifest = fs::read_to_string(room().join("manifest.txt")).unwrap();
    let mut lines = manifest.lines();
    for source in names(&room(), "comp") {
        let name = source.file_stem().unwrap().to_str().unwrap();
        let text = [includes.clone(), fs::read(&source).unwrap()].concat();
        let spirv = fs::read(room().join(format!("spirv/{name}.spv"))).unwrap();
        let want = format!("{name} {} {}", sha256(&text), sha256(&spirv));
        assert_eq!(
            lines.next(),
            Some(want.as_str()),
            "{name} is stale: run scripts/build-shaders.sh"
        );
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

/// Returns the instructions of a SPIR-V module: opcode and operand words.
fn instructions(spirv: &[u8]) -> Vec<(u32, Vec<u32>)> {
    let words: Vec<u32> = spirv.as_chunks().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
    let (mut at, mut list) = (5, Vec::new());
    while at < words.len() {
        let (length, opcode) = (words[at] as usize >> 16, words[at] & 0xffff);
        list.push((opcode, words[at + 1..at + length].to_vec()));
        at += length;
    }
    list
}

/// Workgroups that count each other pass results on through memory. `barrier()` orders only shared
/// memory, so every invocation has to release its own stores just before it. No available driver
/// shows a fault if one does not.
#[test]
fn counted_workgroups_release_what_all_their_invocations_stored() {
    const CONSTANT: u32 = 43;
    const CONTROL_BARRIER: u32 = 224;
    const MEMORY_BARRIER: u32 = 225;
    const ATOMIC_ADD: u32 = 234;
    const RELEASE: u32 = 4;
    const ACQUIRE_RELEASE: u32 = 8;
    let mut counting = Vec::new();
    for path in names(&room().join("spirv"), "spv") {
        let code = instructions(&fs::read(&path).unwrap());
        let value = |id: u32| {
            code.iter()
                .find(|(op, words)| *op == CONSTANT && words[1] == id)
                .map_or(0, |(_, words)| words[2])
        };
        for (at, (_, words)) in code.iter().enumerate().filter(|(_, (op, _))| *op == ATOMIC_ADD) {
            // Operands: type, result, pointer, scope, semantics, value.
            if value(words[4]) & ACQUIRE_RELEASE == 0 {
                continue;
            }
            let barrier = code[..at].iter().rposition(|(op, _)| *op == CONTROL_BARRIER).unwrap();
            let (before, operands) = &code[barrier - 1];
            assert_eq!(
                *before,
                MEMORY_BARRIER,
                "{}: nothing releases what was stored",
                path.display()
            );
            assert_ne!(value(operands[1]) & (RELEASE | ACQUIRE_RELEASE), 0, "{}", path.display());
            counting.push(path.file_stem().unwrap().to_owned());
        }
    }
    let linear = [
        "linear",
        "linear_few",
        "linear_float",
        "linear_many",
        "linear_matrix",
        "linear_matrix_k8",
        "linear_trellis",
    ];
    assert_eq!(counting, [&["attention", "choose"][..], &linear].concat());
}
