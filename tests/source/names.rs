//! Searches for type names that are used for more than one type, private types included.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn rust_files(dir: &Path, list: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => rust_files(&path, list),
            false => list.extend((path.extension().is_some_and(|e| e == "rs")).then_some(path)),
        }
    }
}

/// Returns the rest of a line after a visibility (`pub`, `pub(crate)`), if it has one.
fn without_visibility(line: &str) -> &str {
    let Some(rest) = line.trim_start().strip_prefix("pub") else { return line.trim_start() };
    match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')').map_or("", |(_, rest)| rest).trim_start(),
        None => rest.trim_start(),
    }
}

/// Returns the keyword and the name of the type that a line defines.
fn defined(line: &str) -> Option<(&str, &str)> {
    let (kind, name) = without_visibility(line).split_once(' ')?;
    let end = name.find(|c: char| !c.is_alphanumeric()).unwrap_or(name.len());
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&kind);
    (is_type && end > 0).then_some((kind, &name[..end]))
}

/// Whether a line begins an `impl` or a trait. Their `type` lines are associated types.
fn begins_members(line: &str) -> bool {
    let line = without_visibility(line);
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    ["impl ", "impl<", "trait "].iter().any(|start| line.starts_with(start))
}

/// Whether a line continues the item above it or is a comment or an attribute.
fn is_inside_item(line: &str) -> bool {
    let line = line.trim_start();
    line.is_empty() || ["{", "}", ")", "where", "//", "#"].iter().any(|s| line.starts_with(s))
}

/// Returns the names of the types that a formatted file defines, except associated types and types
/// of test modules.
fn types(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    // Indentation of the items that enclose a line, and whether each begins members.
    let mut items: Vec<(usize, bool)> = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let opens = |next: &&str| next.starts_with("mod ") && next.ends_with('{');
        if line == "#[cfg(test)]" && lines.peek().is_some_and(opens) {
            lines.by_ref().find(|line| *line == "}");
        }
        if is_inside_item(line) {
            continue;
        }
        let indentation = line.len() - line.trim_start().len();
        items.truncate(items.partition_point(|(outer, _)| *outer < indentation));
        let is_member = items.last().is_some_and(|(_, begins_members)| *begins_members);
        items.push((indentation, begins_members(line)));
        names.extend(defined(line).filter(|(kind, _)| !is_member || *kind != "type"));
    }
    names.into_iter().map(|(_, name)| name).collect()
}

#[test]
fn definitions_are_seen() {
    assert_eq!(defined("pub struct Plan<'a> {"), Some(("struct", "Plan")));
    assert_eq!(defined("    pub(super) type Drafts = u8;"), Some(("type", "Drafts")));
    assert_eq!(defined("struct Plan;"), Some(("struct", "Plan")));
    assert_eq!(defined("    enum Kind {"), Some(("enum", "Kind")));
    assert_eq!((defined("pub struct $name;"), defined("published enum Kind {")), (None, None));

    let text = "\
trait Draws {
    type Pairs: Copy;
}

/// struct Comment;
unsafe impl<T> Draws for Grid<T>
where
    T: Copy,
{
    // An associated type.
    type Pairs = u8;

    fn draw() {
        type Row = [u8; 4];
        struct Line(Row);
    }

    type Sums = u8;
}

type Sums = u8;

#[cfg(test)]
mod tests {
    struct Toy;
}

mod seam {
    pub type Push = u8;
}

#[cfg(test)]
mod more_tests;
union Word {
";
    assert_eq!(types(text), ["Draws", "Row", "Line", "Sums", "Push", "Word"]);
}

#[test]
fn one_name_stands_for_one_type() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut list = Vec::new();
    rust_files(&root.join("src"), &mut list);
    rust_files(&root.join("crates"), &mut list);
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in list {
        let path = path.strip_prefix(root).unwrap();
        let is_of_tests = path.iter().any(|part| part == "tests" || part == "tests.rs");
        // These are twins of `os/unix`. A program contains only one of them.
        if is_of_tests || path.starts_with("crates/base/src/os/windows") {
            continue;
        }
        for name in types(&fs::read_to_string(root.join(path)).unwrap()) {
            let file = path.to_string_lossy().into_owned();
            names.entry(name.to_owned()).or_default().push(file);
        }
    }
    assert!(names.len() > 1000, "only {} types were found", names.len());
    names.retain(|_, files| files.len() > 1);
    assert!(names.is_empty(), "these names stand for several types: {names:#?}");
}
