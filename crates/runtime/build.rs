//! Embeds a digest of the source, which the prompt cache uses in its keys.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=SOURCE_DIGEST={:016x}", source_digest());
}

/// Returns a hash of all sources that affect results. Programs with equal hashes compute the same
/// bits, regardless of commit and version.
fn source_digest() -> u64 {
    let mut paths = vec!["../../Cargo.lock".into(), "../../shaders".into(), "..".into()];
    paths.iter().for_each(|path: &PathBuf| {
        println!("cargo::rerun-if-changed={}", path.display());
    });
    let mut files = Vec::new();
    while let Some(path) = paths.pop() {
        match std::fs::read_dir(&path) {
            Ok(entries) => paths.extend(entries.flatten().map(|entry| entry.path())),
            Err(_) => files.push((std::fs::read(&path).ok(), path)),
        }
    }
    files.sort_unstable();
    let mut hash = DefaultHasher::new();
    files.hash(&mut hash);
    std::env::var_os("TARGET").hash(&mut hash);
    let compiler = std::env::var_os("RUSTC").unwrap_or_default();
    let version = Command::new(compiler).arg("-vV").output().map(|output| output.stdout);
    version.unwrap_or_default().hash(&mut hash);
    hash.finish()
}
