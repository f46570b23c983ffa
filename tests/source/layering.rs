//! Compares the source tree with the map in `src/lib.rs`: floors, seams and file sizes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders and their floors. A file uses only lower floors, or its own folder. The compiler holds
/// the floors of crates; these are the floors inside them too.
const FLOORS: &[(&str, u8)] = &[
    ("tensor", 0),
    ("error", 0),
    ("os", 1),
    ("util", 2),
    ("testing", 0),
    ("sampler", 3),
    ("kv", 0),
    ("compute", 3),
    ("checkpoint", 3),
    ("models", 4),
    ("npu", 4),
    ("vulkan", 4),
    ("engine", 5),
    ("vision", 5),
    ("grammar", 5),
    ("eval", 6),
    ("quant", 6),
    ("draft", 6),
    ("decode", 7),
    ("runtime", 8),
    ("cli", 9),
    ("main", 10),
    ("lib", 10),
];

const MAX_LINES: usize = 600;
const MAX_LINES_OF_FUNCTION: usize = 80;

/// A word, and the places where it may occur.
const SEAMS: &[(&str, &[&str])] = &[
    ("ash::", &["vulkan/"]),
    ("candle_core", &["vision/"]),
    ("image::", &["vision/picture.rs"]),
    ("clap", &["cli/", "main.rs"]),
    ("indicatif", &["cli/"]),
    ("println!", &["cli/", "main.rs", "draft/policy/simulator.rs"]),
    ("eprintln!", &["cli/", "main.rs"]),
    ("eprint!", &["cli/", "main.rs"]),
    ("print!", &["cli/", "main.rs"]),
    ("self_attn", &["models/role.rs", "vision/"]),
    ("layernorm", &["models/role.rs", "vision/"]),
    ("embed_tokens", &["models/role.rs", "models/weights.rs"]),
    ("token_embd", &["models/gguf/"]),
    ("tokenizer.ggml", &["models/gguf/"]),
    ("CpuExecutor", &["compute/", "runtime/"]),
    ("llguidance", &["grammar/"]),
    ("rustyline", &["cli/commands/chat/"]),
    ("axum", &["cli/commands/serve/"]),
    ("hyper", &["cli/commands/serve/"]),
    ("tokio", &["cli/commands/serve/"]),
    ("ureq", &["cli/commands/pull/"]),
    ("libc::", &["os/", "npu/"]),
    ("rustix", &["os/"]),
    ("signal_hook", &["os/"]),
    ("windows_sys", &["os/"]),
    ("std::os", &["os/", "npu/"]),
    // Files with names from other users are opened by `open_regular` or `open_no_link`, which do
    // not wait for pipes. These places open files that the user names, and the system's own files.
    ("File::open", &["cli/io/", "cli/commands/generate/batch/place.rs", "os/", "npu/"]),
    ("File::create", &[]),
    ("fs::read(", &["vision/tests/"]),
    ("fs::read_to_string", &["npu/probe.rs", "os/"]),
    ("fs::write(", &["cli/commands/doctor/tests.rs", "npu/probe.rs", "vision/tests/"]),
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

/// Crates that are one folder each.
const ROOMS: [&str; 3] = ["npu", "quant", "vulkan"];
/// Crates of several folders.
const HOUSES: [&str; 3] = ["base", "model", "runtime"];

/// Returns the files of all crates without tests and comments. A file's path begins with its
/// folder, and paths in its code are written as those of one crate: `gemma_base::kv` becomes
/// `crate::kv`.
pub fn sources() -> Vec<(String, String)> {
    let mut list = Vec::new();
    let own = ROOMS.into_iter().chain(HOUSES).map(|name| root().join("crates").join(name));
    for dir in own.chain([root().to_owned()]) {
        let (name, dir) = (dir.file_name().unwrap().to_string_lossy(), dir.join("src"));
        let mut found = Vec::new();
        files(&dir, "rs", &mut found);
        assert!(found.len() > 5, "the walk found only {} files in {name}", found.len());
        for path in found {
            let file = path.strip_prefix(&dir).unwrap().to_string_lossy().into_owned();
            let (file, mut code) = (file, code(&path));
            let file = match ROOMS.contains(&&*name) {
                true => {
                    code = code.replace("crate::", &format!("crate::{name}::"));
                    format!("{name}/{}", file.replace("lib.rs", "mod.rs"))
                }
                false if file == "lib.rs" && HOUSES.contains(&&*name) => continue,
                false => file,
            };
            HOUSES
                .iter()
                .for_each(|name| code = code.replace(&format!("gemma_{name}::"), "crate::"));
            ROOMS.iter().for_each(|name| {
                code = code.replace(&format!("gemma_{name}::"), &format!("crate::{name}::"));
            });
            list.push((file, code));
        }
    }
    list
}

/// Returns the code of a file without its tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

pub fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

fn floor(name: &str) -> Option<u8> {
    FLOORS.iter().find(|(room, _)| *room == name).map(|(_, floor)| *floor)
}

/// Returns the folders named in `crate::folder` paths, including grouped imports.
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
    let name = |s: &String| {
        s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
    };
    rooms.iter().map(name).filter(|n| !n.is_empty()).collect()
}

#[test]
fn every_room_has_a_floor() {
    for (file, _) in sources() {
        assert!(
            floor(room(&file)).is_some(),
            "{file} stands on no floor: add its room to the picture first"
        );
    }
}

#[test]
fn files_use_only_lower_floors() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        let (mine, here) = (room(&file).to_string(), floor(room(&file)).unwrap());
        for used in uses(&code) {
            if used != mine && floor(&used).is_some_and(|f| f >= here) {
                wrong.push(format!("{file} uses {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "upward or sideways: {wrong:#?}");
}

/// Only the registry of backends names the folders of devices. A new device is a folder and an
/// entry there.
#[test]
fn only_the_registry_names_the_rooms_of_devices() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        let is_allowed = |used: &str| used == room(&file) || file == "runtime/devices/backends.rs";
        let named = uses(&code).into_iter().filter(|u| ["vulkan", "npu"].contains(&u.as_str()));
        wrong.extend(named.filter(|u| !is_allowed(u)).map(|u| format!("{file} uses {u}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_check_sees_an_upward_use() {
    assert_eq!(
        uses("use crate::cli::ui;\nuse crate::{kv::PAGE, decode::{a, b}, error};"),
        ["cli", "kv", "decode", "error"]
    );
}

/// Returns paths that begin with `crate::` or `super::`, with braces expanded.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = ["crate::", "super::"].iter().filter_map(|start| rest.find(start)).min() {
        let is_inside = rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        let end = if is_inside { &rest[at + 7..] } else { path(&rest[at..], &[], &mut found) };
        rest = end;
    }
    found
}

/// Reads one path, or one group of them, from the start of `code`. Returns the rest.
fn path<'a>(mut code: &'a str, before: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let mut path = before.to_vec();
    loop {
        let end = code.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(code.len());
        if end > 0 {
            path.push(code[..end].to_owned());
        }
        code = &code[end..];
        let Some(next) = code.strip_prefix("::") else {
            found.push(path);
            return code;
        };
        code = next;
        let Some(mut group) = code.strip_prefix('{') else { continue };
        loop {
            group = group.trim_start_matches([' ', '\n', ',']);
            if let Some(after) = group.strip_prefix('}') {
                return after;
            }
            let shorter = self::path(group, &path, found);
            // `as name` and `*` are not paths and are skipped.
            let end = shorter.find([',', '}', '{']).unwrap_or(shorter.len());
            group = &shorter[end..];
            if group.is_empty() {
                return group;
            }
        }
    }
}

/// Returns the module of a file: `cli/io/wrap.rs` is `cli::io::wrap`.
fn module(file: &str) -> Vec<String> {
    let mut parts: Vec<String> =
        file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    parts.pop_if(|last| last == "mod");
    parts
}

/// Resolves a path that begins with `crate` or `super` and is in module `own`.
fn absolute(own: &[String], path: Vec<String>) -> Vec<String> {
    let up = path.iter().take_while(|part| *part == "super").count();
    match up {
        0 => path[1..].to_vec(),
        _ => [&own[..own.len().saturating_sub(up)], &path[up..]].concat(),
    }
}

/// Subfolders and files of a folder from the lowest to the highest. A file uses only its own
/// subfolder and lower ones.
const FOLDERS: &[(&str, &[&str])] = &[
    ("draft", &["sources", "mix", "policy", "builder"]),
    ("vulkan", &["device", "lower", "run", "check"]),
    (
        "vision",
        &[
            "resize", "picture", "pixels", "file", "ops", "tower", "gemma4", "merged", "siglip",
            "mmproj",
        ],
    ),
    (
        "runtime",
        &[
            "listener",
            "devices",
            "options",
            "model",
            "placement",
            "load",
            "trial",
            "drafting",
            "session",
            "constraints",
            "answers",
        ],
    ),
    ("quant", &["recipe", "layout", "solver", "ldlq", "calibrate", "plan", "verify", "convert"]),
];

#[test]
fn folders_use_only_lower_folders() {
    let mut wrong = Vec::new();
    for (room, folders) in FOLDERS {
        let level = |name: &String| folders.iter().position(|folder| folder == name);
        let mut seen = BTreeSet::new();
        for (file, code) in sources() {
            let own = module(&file);
            let Some(here) = own.get(1).filter(|_| own[0] == *room).and_then(level) else {
                continue;
            };
            seen.insert(here);
            for path in paths(&code) {
                let used = absolute(&own, path);
                let is_up = used[0] == *room && used.get(1).and_then(level) > Some(here);
                wrong.extend(is_up.then(|| format!("{file} uses {}", used.join("::"))));
            }
        }
        assert_eq!(seen.len(), folders.len(), "{room} lacks a folder: {folders:?}");
    }
    assert!(wrong.is_empty(), "upward: {wrong:#?}");
}

/// Returns the modules of a folder that each of its files names.
fn imports_of(inside: &str) -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let files: Vec<(Vec<String>, String)> = sources()
        .into_iter()
        .filter(|(f, _)| room(f) == inside)
        .map(|(f, code)| (module(&f), code))
        .collect();
    let modules: BTreeSet<Vec<String>> = files.iter().map(|(module, _)| module.clone()).collect();
    let imports = |own: &Vec<String>, code: &str| {
        let named = paths(code).into_iter().map(|path| absolute(own, path));
        let module = |path: Vec<String>| {
            (1..=path.len()).rev().map(|n| path[..n].to_vec()).find(|p| modules.contains(p))
        };
        named.filter_map(module).filter(|other| other != own).collect()
    };
    files.iter().map(|(own, code)| (own.clone(), imports(own, code))).collect()
}

#[test]
fn the_check_takes_paths_apart() {
    let code = "use super::ui;\nuse crate::cli::{args::{self, Cli}, stats as s};\n\
                fn f() { crate::cli::help::text(super::super::X) }";
    let found: Vec<String> = paths(code).iter().map(|path| path.join(" ")).collect();
    let want = [
        "super ui",
        "crate cli args self",
        "crate cli args Cli",
        "crate cli stats",
        "crate cli help text",
        "super super X",
    ];
    assert_eq!(found, want);
}

#[test]
fn commands_import_no_command() {
    let is_command = |module: &[String]| module.len() > 2 && module[1] == "commands";
    let imports = imports_of("cli");
    let commands: BTreeSet<&String> =
        imports.keys().filter(|module| is_command(module)).map(|module| &module[2]).collect();
    assert!(commands.len() >= 10 && commands.contains(&"chat".to_owned()), "{commands:?}");
    let mut wrong = Vec::new();
    for (own, others) in &imports {
        // The table names all commands.
        if own[1..] == ["commands"] {
            continue;
        }
        let is_other = |other: &&Vec<String>| is_command(other) && own.get(2) != Some(&other[2]);
        wrong.extend(
            others
                .iter()
                .filter(is_other)
                .map(|other| format!("{} uses {}", own.join("::"), other.join("::"))),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Folders with files that import each other in a circle, with the reason.
const CIRCLES: &[(&str, &str)] =
    &[("models", "an architecture makes a configuration, which names its architecture")];

/// A module and its parts may use each other. No other files may import each other.
#[test]
fn rooms_have_no_import_circles() {
    let is_part = |a: &[String], b: &[String]| a.starts_with(b) || b.starts_with(a);
    let mut circles = Vec::new();
    for (inside, _) in FLOORS {
        let mut left = imports_of(inside);
        for (own, others) in &mut left {
            others.retain(|other| !is_part(own, other));
        }
        // A file that imports none of the remaining files, or is imported by none, is not in a
        // circle.
        loop {
            let named: BTreeSet<_> = left.values().flatten().cloned().collect();
            let is_done = |(own, others): &(&Vec<String>, &BTreeSet<Vec<String>>)| {
                others.is_empty() || !named.contains(*own)
            };
            let Some(done) = left.iter().find(is_done).map(|(own, _)| own.clone()) else { break };
            left.remove(&done);
            left.values_mut().for_each(|others| {
                others.remove(&done);
            });
        }
        if !left.is_empty() {
            println!("{inside}: {left:#?}");
            circles.push(*inside);
        }
    }
    assert_eq!(circles, CIRCLES.iter().map(|(room, _)| *room).collect::<Vec<_>>());
}

#[test]
fn seams_hold() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        for (word, allowed) in SEAMS {
            let found = code
                .match_indices(word)
                .any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            if found && !allowed.iter().any(|a| file.starts_with(a)) {
                wrong.push(format!("{file} says `{word}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Adding a weight format changes at most 5 files. So no existing format may be named in more,
/// except floats, which other tensors have too, and `I8`, which activations have.
#[test]
fn a_weight_format_is_spoken_of_in_few_files() {
    const MOST: usize = 5;
    let sources = sources();
    let table = &sources.iter().find(|(file, _)| file == "tensor/block.rs").unwrap().1;
    let (_, list) = table.split_once("pub enum Code {").unwrap();
    let codes: Vec<&str> = list
        .split('}')
        .next()
        .unwrap()
        .split(',')
        .map(str::trim)
        .filter(|c| !c.is_empty() && !c.starts_with("#[cfg(test)]"))
        .collect();
    assert!(codes.len() >= 17 && codes.contains(&"T25"), "{codes:?}");
    for code in codes.into_iter().filter(|code| !["F32", "F16", "Bf16", "I8"].contains(code)) {
        let names = [format!("Code::{code}"), format!("CpuLayout::{code}")];
        let is_named = |text: &str| {
            names.iter().any(|name| {
                let ends = |at: usize| {
                    !text[at + name.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
                };
                text.match_indices(name).any(|(at, _)| ends(at))
            })
        };
        let files: Vec<&String> =
            sources.iter().filter(|(_, text)| is_named(text)).map(|(file, _)| file).collect();
        assert!(!files.is_empty() && files.len() <= MOST, "{code}: {files:#?}");
    }
}

#[test]
fn no_hand_written_file_is_too_long() {
    let mut list = Vec::new();
    for (dir, ending) in [
        ("src", "rs"),
        ("crates", "rs"),
        ("tests", "rs"),
        ("benches", "rs"),
        ("shaders", "comp"),
        ("scripts", "py"),
        ("scripts", "sh"),
    ] {
        files(&root().join(dir), ending, &mut list);
    }
    let long: Vec<_> = list
        .iter()
        .filter(|p| fs::read_to_string(p).unwrap().lines().count() > MAX_LINES)
        .collect();
    assert!(long.is_empty(), "more than {MAX_LINES} lines: {long:?}");
}

/// Returns the functions of a file that have more than `most` lines, found by their indentation.
fn long_functions(text: &str, most: usize) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut long = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let words: Vec<&str> = code.split(['(', '<', ' ']).collect();
        let Some(name) = words.iter().position(|word| *word == "fn").map(|fn_at| fn_at + 1) else {
            continue;
        };
        // `fn` in a comment or a text does not begin a function.
        let leads = ["pub", "crate)", "super)", "const", "async", "unsafe", "extern", "\"C\""];
        if !words[..name - 1].iter().all(|word| leads.contains(word)) {
            continue;
        }
        let end = format!("{indent}}}");
        let length = lines[at..].iter().position(|line| *line == end).map_or(0, |n| n + 1);
        // A declaration without a body ends before any brace.
        let first_end = lines[at..at + length].iter().find(|line| line.ends_with([';', '{']));
        if length > most && first_end.is_some_and(|line| line.ends_with('{')) {
            long.push(format!("{} has {length} lines", words[name]));
        }
    }
    long
}

#[test]
fn no_function_is_too_long() {
    let body = "    x();\n".repeat(5);
    let code =
        format!("pub fn a() {{\n{body}}}\nfn b();\n    unsafe fn c(\n    ) {{\n{body}    }}\n");
    assert_eq!(long_functions(&code, 6), ["a has 7 lines", "c has 8 lines"]);
    let mut list = Vec::new();
    for dir in ["src", "crates", "tests", "benches", "examples", "fuzz"] {
        files(&root().join(dir), "rs", &mut list);
    }
    let mut long = Vec::new();
    for path in list {
        let text = fs::read_to_string(&path).unwrap();
        let found = long_functions(&text, MAX_LINES_OF_FUNCTION);
        long.extend(found.into_iter().map(|what| format!("{}: {what}", path.display())));
    }
    assert!(long.is_empty(), "more than {MAX_LINES_OF_FUNCTION} lines: {long:#?}");
}

#[test]
fn rooms_have_short_readmes() {
    for room in ["src", "crates", "draft", "shaders", "npu-kernels", "quant", "tests", "scripts"] {
        let text = fs::read_to_string(root().join(room).join("README.md"))
            .unwrap_or_else(|e| panic!("{room}/README.md: {e}"));
        let lines = text.lines().count();
        assert!((3..=40).contains(&lines), "{room}/README.md has {lines} lines");
    }
}
