//! Limits the draft policy to a size that can be reviewed by reading.

use std::fs;
use std::path::Path;

/// Limit of code lines. The aim is 450.
const MOST_LINES: usize = 473;
const MOST_CONSTANTS: usize = 13;
/// Limit of the doc comment, which is one page.
const MOST_DOC_LINES: usize = 60;
/// Numbers that need no name.
const PLAIN_NUMBERS: [&str; 7] = ["0", "1", "2", "0.0", "1.0", "2.0", "-1"];

/// Returns the code of each file of the policy, without tests, comments and empty lines.
fn code() -> Vec<(String, Vec<String>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/runtime/src/draft/policy");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.retain(|path| !["simulator.rs", "tests.rs"].contains(&name(path).as_str()));
    assert!(files.len() >= 5, "{files:?}");
    let lines = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let text = text.split("#[cfg(test)]").next().unwrap().to_owned();
        let lines = text.lines().map(|line| line.split("//").next().unwrap().trim().to_owned());
        lines.filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    files.iter().map(|path| (name(path), lines(path))).collect()
}

/// Returns the numbers in a line of code. Digits inside names and other numbers do not count.
fn numbers(line: &str) -> Vec<String> {
    let (mut found, mut number, mut before) = (Vec::new(), String::new(), ' ');
    for (i, c) in line.char_indices() {
        let next = line[i + c.len_utf8()..].chars().next().unwrap_or(' ');
        let inside = !number.is_empty();
        let starts = !inside && c.is_ascii_digit() && !before.is_alphanumeric() && before != '_';
        let goes_on =
            inside && (c.is_alphanumeric() || c == '_' || c == '.' && next.is_ascii_digit());
        // The index of a tuple field is not a number.
        if starts && before == '.' && !number.contains("..") && !line[..i].ends_with("..") {
            before = c;
            continue;
        }
        if starts || goes_on {
            number.push(c);
        } else if inside {
            found.push(std::mem::take(&mut number));
        }
        before = c;
    }
    found.extend(Some(number).filter(|number| !number.is_empty()));
    found
}

#[test]
fn numbers_are_found() {
    assert_eq!(numbers("let x1 = 0.5 * a.0 + 3usize - 1..=7;"), ["0.5", "3usize", "1", "7"]);
    assert_eq!(numbers("[f32; 24], 1e-6"), ["24", "1e", "6"]);
}

#[test]
fn the_policy_is_small_and_names_its_constants() {
    let files = code();
    let lines: usize = files.iter().map(|(_, lines)| lines.len()).sum();
    let is_constant = |line: &str| {
        let line = line.strip_prefix("pub ").or(line.strip_prefix("pub(super) ")).unwrap_or(line);
        line.starts_with("const ")
    };
    let all = || files.iter().flat_map(|(name, lines)| lines.iter().map(move |line| (name, line)));
    let constants: Vec<_> = all().filter(|(_, line)| is_constant(line)).collect();
    let unnamed: Vec<_> = all()
        .filter(|(_, line)| !is_constant(line))
        .filter(|(_, line)| numbers(line).iter().any(|n| !PLAIN_NUMBERS.contains(&n.as_str())))
        .collect();
    println!("{lines} lines of code, {} named constants", constants.len());
    assert!(lines <= MOST_LINES, "{lines} lines of code");
    assert!(constants.len() <= MOST_CONSTANTS, "{constants:?}");
    assert!(unnamed.is_empty(), "numbers without a name: {unnamed:?}");
}

#[test]
fn one_page_says_what_the_policy_does() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/runtime/src/draft/policy/mod.rs");
    let text = fs::read_to_string(path).unwrap();
    let page: Vec<&str> = text.lines().take_while(|line| line.starts_with("//!")).collect();
    assert!(page.len() <= MOST_DOC_LINES, "{} lines", page.len());
    for word in ["**Rule.**", "**Estimator.**", "**Back-off.**", "**Guarantee.**"] {
        assert!(page.iter().any(|line| line.contains(word)), "nothing is said of {word}");
    }
}
