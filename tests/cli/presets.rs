//! Presets: sections of gemma.toml that a command line names.

use crate::shell;
use shell::{BINARY, Run, command, wait};
use std::fs;
use std::path::Path;

const FILE: &str = "\
temp = 0.9
[generate]
max-tokens = 9
[preset.commit]
max-tokens = 5
system = \"Be brief.\"
regex = \"[a-c]{3}\"
keep-talks = true
[preset.review]
greedy = true
";

fn run(dir: &Path, env: &[(&str, &str)], args: &[&str]) -> Run {
    let mut command = command(BINARY, dir);
    command.args(args).envs(env.iter().copied());
    wait(command, b"")
}

/// Makes a directory in which the user's own file has these settings.
fn with_own(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let place = match cfg!(windows) {
        true => dir.path().join("local/gemma"),
        false => dir.path().join(".config/gemma"),
    };
    fs::create_dir_all(&place).unwrap();
    fs::write(place.join("config.toml"), text).unwrap();
    dir
}

#[test]
fn a_preset_is_weaker_than_flags_and_stronger_than_all_else() {
    let dir = with_own(FILE);
    let shown = |env: &[(&str, &str)], flags: &[&str]| {
        let args = [&["generate", "--print-config"], flags].concat();
        run(dir.path(), env, &args).ok().text().to_owned()
    };
    let has = |text: &str, start: &str, end: &str| {
        assert!(text.lines().any(|l| l.starts_with(start) && l.ends_with(end)), "{start}: {text}");
    };
    let text = shown(&[], &["--preset", "commit"]);
    has(&text, "max-tokens = 5 ", "config.toml");
    has(&text, "system = \"Be brief.\"", "config.toml");
    has(&text, "temp = 0.9 ", "config.toml");
    has(&shown(&[], &[]), "max-tokens = 9 ", "config.toml");
    let env = [("GEMMA_MAX_TOKENS", "6"), ("GEMMA_JSON_SCHEMA", "{}")];
    let text = shown(&env, &["--preset", "commit"]);
    has(&text, "max-tokens = 5 ", "config.toml");
    // The preset's regular expression excludes the JSON Schema of the environment.
    has(&text, "# json-schema is not set", "");
    let text = shown(&[], &["--preset=commit", "-n", "7", "--json-schema", "{}"]);
    has(&text, "max-tokens = 7 ", "command line");
    has(&text, "# regex is not set", "");
    // An option that a preset excludes is not taken from weaker parts of the file either.
    let text = shown(&[("GEMMA_PRESET", "review")], &[]);
    has(&text, "greedy = true", "config.toml");
    assert!(!text.lines().any(|line| line.starts_with("temp = 0.9")), "{text}");
    let answer = run(dir.path(), &[], &["generate", "-q", "--preset", "commit", "Hi"]).ok();
    assert!(answer.out.len() == 3 && answer.out.iter().all(|b| b"abc".contains(b)), "{answer:?}");
    for command in ["chat", "serve"] {
        let args = [command, "--preset", "commit", "--print-config"];
        run(dir.path(), &[], &args).ok();
    }
    // A preset of the same name in the working directory takes precedence.
    fs::write(dir.path().join("gemma.toml"), "[preset.commit]\nmax-tokens = 4\n").unwrap();
    let text = shown(&[], &["--preset", "commit"]);
    has(&text, "max-tokens = 4 ", "gemma.toml");
    has(&text, "system = \"Be brief.\"", "config.toml");
}

#[test]
fn mistakes_in_presets_are_named() {
    let dir = with_own(FILE);
    let fails = |file: &str, name: &str, words: &[&str]| {
        fs::write(dir.path().join("gemma.toml"), file).unwrap();
        run(dir.path(), &[], &["generate", "Hi", "--preset", name]).fails(2, words);
    };
    fails("", "comit", &["there is no preset `comit`", "presets: commit, review"]);
    fails(
        "[preset.x]\n\nmax-tokns = 4\n",
        "x",
        &["gemma.toml, line 3", "did you mean max-tokens?"],
    );
    fails("[preset]\nx = 4\n", "x", &["gemma.toml, line 2", "a section [preset.x]"]);
    fails("[preset.x]\ntemp = \"hot\"\n", "x", &["--temp", "set in gemma.toml"]);
    fails("[preset.x]\npreset = \"y\"\n", "x", &["gemma.toml, line 2", "as a flag"]);
    // Presets in the working directory have the restrictions of their file.
    fails("[preset.x]\noutput = \"made\"\n", "x", &["gemma.toml, line 2", "would write a file"]);
    fails("[preset.x]\nkeep-talks = true\n", "x", &["gemma.toml, line 2", "are kept"]);
    let none = tempfile::tempdir().unwrap();
    run(none.path(), &[], &["generate", "Hi", "--preset", "x"])
        .fails(2, &["there is no preset `x`", "a section [preset.x] in gemma.toml"]);
}
