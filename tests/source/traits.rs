//! Limits the traits between folders to a size that can be read at once, and to methods without
//! bodies. A wrapper that forgets to forward a method must not compile.

use std::fs;
use std::path::Path;

/// A trait, its file, and the limit of its methods.
const SEAMS: [(&str, &str, usize); 3] = [
    ("Engine", "crates/model/src/engine/mod.rs", 14),
    ("Executor", "crates/base/src/compute/executor.rs", 12),
    ("Reports", "crates/base/src/compute/executor.rs", 5),
];

/// Returns the methods of a trait, each from `fn` to the end of its signature or body.
fn methods(code: &str, name: &str) -> Vec<String> {
    let code: Vec<&str> = code.lines().map(|l| l.split("//").next().unwrap()).collect();
    let code = code.join("\n");
    let start = code
        .find(&format!("pub trait {name}:"))
        .or_else(|| code.find(&format!("pub trait {name} ")))
        .unwrap_or_else(|| panic!("no trait {name}"));
    let open = start + code[start..].find('{').unwrap();
    let (mut depth, mut end) = (0, open);
    for (at, c) in code[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            end = open + at;
            break;
        }
    }
    let body = &code[open + 1..end];
    let starts: Vec<usize> = body
        .match_indices("fn ")
        .filter(|(at, _)| !body[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
        .map(|(at, _)| at)
        .collect();
    let ends = starts.iter().skip(1).copied().chain([body.len()]);
    starts.iter().zip(ends).map(|(from, to)| body[*from..to].trim().to_owned()).collect()
}

#[test]
fn methods_and_bodies_are_seen() {
    let code = "/// fn no\npub trait A: B {\n fn a(&self) -> [u8; 2]; // fn not\n\
                fn b(f: &mut dyn FnMut(u8)) { f(1) }\n}\npub trait AB { fn c(); }";
    let found = methods(code, "A");
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(!found[0].contains('{') && found[1].contains('{'), "{found:?}");
    assert_eq!(methods(code, "AB"), ["fn c();"]);
}

#[test]
fn seams_are_narrow_and_hide_nothing() {
    for (name, file, most) in SEAMS {
        let code = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        let methods = methods(&code, name);
        println!("{name}: {} methods", methods.len());
        assert!((1..=most).contains(&methods.len()), "{name}: {methods:#?}");
        let bodies: Vec<&String> = methods.iter().filter(|m| m.contains('{')).collect();
        assert!(bodies.is_empty(), "{name} has bodies that hide a missing forward: {bodies:#?}");
    }
}
