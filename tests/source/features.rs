//! CPU features are detected before code that is compiled for them runs.

use crate::layering::{room, sources};
use std::collections::BTreeSet;

/// Returns the quoted, comma-separated names after each `before`, with the folder of their file.
fn names(before: &str) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (file, code) in sources() {
        for after in code.split(before).skip(1) {
            let list = after.split('"').next().unwrap();
            found.extend(list.split(',').map(|name| (room(&file).to_owned(), name.to_owned())));
        }
    }
    found
}

#[test]
fn each_room_detects_every_feature_that_it_enables() {
    let enabled = names("target_feature(enable = \"");
    let mut detected = names("is_x86_feature_detected!(\"");
    detected.append(&mut names("is_aarch64_feature_detected!(\""));
    assert!(enabled.len() > 10, "only {} features were found", enabled.len());
    let missing: Vec<_> = enabled.difference(&detected).collect();
    assert!(missing.is_empty(), "enabled and never detected: {missing:?}");
}
