//! Holds the source tree to the picture in `src/lib.rs`: floors, seams and file sizes.

use std::fs;
use std::path::{Path, PathBuf};

/// Room in `src/` and its floor. A file uses only lower floors, or its own room.
const FLOORS: &[(&str, u8)] = &[
    ("tensor", 0),
    ("error", 0),
    ("util", 0),
    ("sampler", 1),
    ("kv", 0),
    ("compute", 1),
    ("checkpoint", 1),
    ("gemma", 2),
    ("npu", 2),
    ("vulkan", 2),
    ("engine", 3),
    ("grammar", 3),
    ("eval", 4),
    ("quant", 4),
    ("draft", 4),
    ("decode", 5),
    ("runtime", 5),
    ("cli", 6),
    ("main", 7),
    ("lib", 7),
];

const MAX_LINES: usize = 600;

/// A word, and the places where it may stand.
const SEAMS: &[(&str, &[&str])] = &[
    ("ash::", &["vulkan/"]),
    ("candle_core", &["engine/reference.rs", "checkpoint/", "quant/calibrate.rs"]),
    ("clap", &["cli/", "main.rs"]),
    ("indicatif", &["cli/"]),
    ("println!", &["cli/", "main.rs"]),
    ("eprintln!", &["cli/", "main.rs"]),
    ("eprint!", &["cli/", "main.rs"]),
    ("print!", &["cli/", "main.rs"]),
    ("self_attn", &["gemma/weights.rs"]),
    ("layernorm", &["gemma/weights.rs"]),
    ("embed_tokens", &["gemma/weights.rs"]),
    ("token_embd", &["gemma/gguf/"]),
    ("tokenizer.ggml", &["gemma/gguf/"]),
    ("CpuExecutor", &["compute/", "runtime/"]),
    ("llguidance", &["grammar/"]),
    ("rustyline", &["cli/chat/"]),
];

fn files(dir: &Path, ending: &str, out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, ending, out);
        } else if path.extension().is_some_and(|e| e == ending) {
            out.push(path);
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files of `src/` by their path below it, tests and comments cut away.
fn sources() -> Vec<(String, String)> {
    let mut list = Vec::new();
    files(&root().join("src"), "rs", &mut list);
    assert!(list.len() > 20, "the walk found only {} files", list.len());
    let code = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests").next().unwrap().to_string();
        text.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
    };
    list.iter().map(|p| (p.strip_prefix(root().join("src")).unwrap().to_string_lossy().into_owned(), code(p))).collect()
}

fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

fn floor(name: &str) -> Option<u8> {
    FLOORS.iter().find(|(room, _)| *room == name).map(|(_, floor)| *floor)
}

/// Rooms named in `crate::room` paths, grouped imports included.
fn uses(code: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut word = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => rooms.push(std::mem::take(&mut word)),
                    _ if depth == 0 => word.push(c),
                    _ => {}
                }
            }
            rooms.push(word);
        } else {
            rooms.push(rest.to_string());
        }
    }
    let name = |s: &String| s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    rooms.iter().map(name).filter(|n| !n.is_empty()).collect()
}

#[test]
fn every_room_has_a_floor() {
    for (file, _) in sources() {
        assert!(floor(room(&file)).is_some(), "src/{file} stands on no floor: add its room to the picture first");
    }
}

#[test]
fn files_use_only_lower_floors() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        let (mine, here) = (room(&file).to_string(), floor(room(&file)).unwrap());
        for used in uses(&code) {
            if used != mine && floor(&used).is_some_and(|f| f >= here) {
                wrong.push(format!("src/{file} uses {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "upward or sideways: {wrong:#?}");
}

#[test]
fn the_check_sees_an_upward_use() {
    assert_eq!(uses("use crate::cli::ui;\nuse crate::{kv::PAGE, decode::{a, b}, error};"), ["cli", "kv", "decode", "error"]);
}

#[test]
fn seams_hold() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        for (word, allowed) in SEAMS {
            let found = code.match_indices(word).any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            if found && !allowed.iter().any(|a| file.starts_with(a)) {
                wrong.push(format!("src/{file} says `{word}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_hand_written_file_is_too_long() {
    let mut list = Vec::new();
    for (dir, ending) in
        [("src", "rs"), ("tests", "rs"), ("benches", "rs"), ("shaders", "comp"), ("scripts", "py"), ("scripts", "sh")]
    {
        files(&root().join(dir), ending, &mut list);
    }
    let long: Vec<_> = list.iter().filter(|p| fs::read_to_string(p).unwrap().lines().count() > MAX_LINES).collect();
    assert!(long.is_empty(), "more than {MAX_LINES} lines: {long:?}");
}

#[test]
fn rooms_have_short_readmes() {
    for room in ["src", "draft", "shaders", "npu-kernels", "quant", "tests", "scripts"] {
        let text = fs::read_to_string(root().join(room).join("README.md")).unwrap_or_else(|e| panic!("{room}/README.md: {e}"));
        let lines = text.lines().count();
        assert!((3..=40).contains(&lines), "{room}/README.md has {lines} lines");
    }
}
