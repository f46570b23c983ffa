//! Counts type names that are used for more than one type. Types that are private to a file do not
//! count.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Public names used more than once. The number may only be lowered; the aim is 15.
const MOST: usize = 15;

fn rust_files(dir: &Path, list: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => rust_files(&path, list),
            false => list.extend((path.extension().is_some_and(|e| e == "rs")).then_some(path)),
        }
    }
}

/// Returns the name of the type that a line defines with a visibility (`pub`, `pub(crate)`).
fn defined(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let (kind, name) = rest.trim_start().split_once(' ')?;
    let end = name.find(|c: char| !c.is_alphanumeric()).unwrap_or(name.len());
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&kind);
    (is_type && end > 0).then_some(&name[..end])
}

#[test]
fn definitions_are_seen() {
    assert_eq!(defined("pub struct Plan<'a> {"), Some("Plan"));
    assert_eq!(defined("    pub(super) type Drafts = u8;"), Some("Drafts"));
    assert_eq!((defined("struct Plan;"), defined("pub struct $name;")), (None, None));
}

#[test]
fn one_name_stands_for_one_type() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut list = Vec::new();
    rust_files(&root.join("src"), &mut list);
    rust_files(&root.join("crates"), &mut list);
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in list {
        let file = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        // These are twins of `os/unix`. A program contains only one of them.
        if file.starts_with("crates/base/src/os/windows/") {
            continue;
        }
        for name in fs::read_to_string(&path).unwrap().lines().filter_map(defined) {
            names.entry(name.to_owned()).or_default().push(file.clone());
        }
    }
    assert!(names.len() > 200, "only {} types were found", names.len());
    names.retain(|_, files| files.len() > 1);
    for (name, files) in &names {
        println!("{name}: {}", files.join(" "));
    }
    println!("{} names stand for several types", names.len());
    assert!(names.len() <= MOST, "{} names, at most {MOST}: {names:#?}", names.len());
}
