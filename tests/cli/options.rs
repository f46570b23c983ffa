//! The program in a shell: help, exit codes, sources of the prompt, and settings.

use crate::shell;
use shell::{bash, gemma, gemma_in};
use std::fs;

/// A prompt of one word with a short answer that is always the same.
const SHORT: [&str; 8] = ["generate", "Hello", "-n", "4", "--seed", "1", "--temp", "0"];

#[test]
fn help_version_man_and_completions_go_to_standard_output() {
    let version = gemma(&["--version"], b"").ok();
    assert!(
        version.text().starts_with(concat!("gemma ", env!("CARGO_PKG_VERSION"), " (")),
        "{version:?}"
    );
    let target = format!("{}-", std::env::consts::ARCH);
    assert!(version.text().contains(&target), "{version:?}");
    assert!(version.text().contains("bundled models"), "{version:?}");
    for command in commands() {
        let command = command.as_str();
        let help = gemma(&[command, "--help"], b"").ok();
        assert!(
            help.text().contains("Usage:") && help.text().contains(&format!("  gemma {command}")),
            "{help:?}"
        );
        assert!(
            !help.text().contains("Exit codes:") && help.text().contains("gemma --help"),
            "{help:?}"
        );
        assert_eq!(help.err, "");
        assert!(gemma(&["help", command], b"").ok().text().contains("Usage:"));
        let dir = tempfile::tempdir().unwrap();
        let mut narrow = shell::command(shell::BINARY, dir.path());
        narrow.args([command, "-h"]).env("COLUMNS", "100");
        let short = shell::wait(narrow, b"").ok();
        assert!(short.text().lines().count() <= 40, "gemma {command} -h:\n{}", short.text());
        assert!(short.text().lines().all(|line| line.chars().count() <= 100), "{}", short.text());
        assert!(
            short.text().ends_with(&format!("All options: gemma {command} --help\n")),
            "{}",
            short.text()
        );
    }
    assert!(gemma(&["help"], b"").ok().text().contains("Commands:"));
    exit_codes(gemma(&["--help"], b"").ok().text());
    exit_codes(gemma(&["man"], b"").ok().text());
    exit_codes(gemma(&["man", "generate"], b"").ok().text());
    gemma(&["man", "bogus"], b"").fails(2, &["bogus", "help: commands with a page are"]);
    let bash = gemma(&["completions", "bash"], b"").ok();
    assert!(bash.text().contains("complete -F") && bash.text().contains("\"auto cpu vulkan\""));
}

/// `--help` is short enough to scroll once. `gemma help` and the man page have everything.
#[test]
fn the_help_of_a_command_is_short_and_the_whole_text_is_elsewhere() {
    for command in commands() {
        let dir = tempfile::tempdir().unwrap();
        let mut sized = shell::command(shell::BINARY, dir.path());
        sized.args([&command, "--help"]).env("COLUMNS", "100");
        let help = shell::wait(sized, b"").ok();
        let text = help.text();
        assert!(text.lines().count() <= 120, "gemma {command} --help:\n{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains(&format!("gemma help {command}")), "{text}");
        let (whole, man) = (gemma(&["help", &command], b"").ok(), gemma(&["man", &command], b""));
        let man = man.ok().text().replace('\\', "");
        let is_flag = |word: &&str| word.starts_with("--") && word.len() > 3;
        let all = whole.text().lines().filter(|line| line.starts_with("  "));
        let flags = all.filter_map(|line| line.split_whitespace().take(2).find(is_flag));
        // An optional value is in brackets.
        let flags: Vec<&str> =
            flags.map(|flag| flag.split(['[', '.']).next().unwrap_or(flag)).collect();
        for flag in flags {
            assert!(man.contains(flag), "gemma man {command} lacks {flag}");
        }
    }
    let [short, whole] = [&["chat", "--help"], &["help", "chat"]].map(|args| gemma(args, b"").ok());
    for text in ["--draft ", "--gpu-layers", "--cache-dir", "--temp"] {
        assert!(short.text().contains(text) && whole.text().contains(text), "{text}");
    }
    for rare in ["--draft-ahead", "--device-lock", "--check"] {
        assert!(!short.text().contains(rare) && whole.text().contains(rare), "{rare}");
    }
    let paragraph = "that has room for it in addition to the model.";
    assert!(whole.text().replace("\n          ", " ").contains(paragraph), "{whole:?}");
    assert!(!short.text().contains("in addition to the model."), "{short:?}");
    for command in ["list", "doctor"] {
        let text = gemma(&[command, "--help"], b"").ok();
        assert!(!text.text().contains("--threads"), "no model runs: {text:?}");
        assert!(gemma(&["help", command], b"").ok().text().contains("--threads"));
    }
}

/// Returns the names of the commands from the help.
fn commands() -> Vec<String> {
    let help = gemma(&["--help"], b"").ok();
    let list = help.text().split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().map(|line| line.split_whitespace().next().unwrap().to_owned());
    let names: Vec<String> = names.filter(|name| name != "help").collect();
    assert!(names.len() >= 15, "{names:?}");
    names
}

/// Checks the table of exit codes row by row.
#[track_caller]
fn exit_codes(text: &str) {
    assert!(text.contains("Exit codes:") || text.contains(".SH EXIT STATUS"), "{text}");
    // A man page has code and meaning on separate lines.
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    for row in [
        "2 wrong usage",
        "3 a model",
        "4 the device",
        "5 the model does not",
        "6 some records",
        "7 the prompt",
        "130 interrupted",
    ] {
        assert!(text.contains(row), "{row}: {text}");
    }
}

#[test]
fn wrong_usage_is_2_and_leaves_standard_output_alone() {
    gemma(&["generate", "hi", "--bogus"], b"").fails(2, &["--bogus"]);
    gemma(&["generate", "hi", "--temp", "hot"], b"").fails(2, &["--temp", "hot"]);
    gemma(&["generate", "two", "words"], b"").fails(2, &["quotes", "gemma generate 'two words'"]);
    gemma(&["generate", "-p", "two", "words"], b"").fails(2, &["twice", "-p 'two words'"]);
    gemma(&["generate", "hi", "-n", "-5"], b"").fails(2, &["'-5'", "--max-tokens", "from 0 on"]);
    gemma(&["generate", "hi", "--seed", "-1"], b"").fails(2, &["'-1'", "--seed", "random"]);
    gemma(&["generate", "-hf", "google/gemma-3-1b-it"], b"").fails(2, &["`-hf`", "gemma pull"]);
    gemma(&["generate", "-ngl", "99", "hi"], b"").fails(2, &["`-ngl`", "--gpu-layers"]);
    gemma(&["generate", "--stream", "hi"], b"").fails(2, &["`--stream`", "stream-json"]);
    gemma(&["server"], b"").fails(2, &["`server`", "gemma serve"]);
    gemma(&["download", "gemma3"], b"").fails(2, &["`download`", "gemma pull"]);
    gemma(&["What", "is", "it?"], b"").fails(2, &["gemma generate 'What is it?'"]);
    gemma(&["genrate", "hi"], b"").fails(2, &["'generate'"]);
    #[cfg(unix)]
    bash(tempfile::tempdir().unwrap().path(), r#""$G" generate $'caf\xe9'"#)
        .fails(2, &["argument 2", "not valid UTF-8"]);
    gemma(&["generate", "-", "-"], b"x").fails(2, &["once"]);
    gemma(&["generate", "hi", "--stop", ""], b"").fails(2, &["--stop"]);
    gemma(&["generate", "hi", "--raw", "--system", "x"], b"").fails(2, &["--raw"]);
    gemma(&["eval"], b"").fails(2, &["FILE", "--ids"]);
    let nothing = gemma(&[], b"");
    assert_eq!((nothing.code, nothing.text()), (2, ""), "{}", nothing.err);
    for step in ["gemma generate '", "gemma chat", "gemma doctor", "gemma plan"] {
        assert!(nothing.err.contains(step), "{}", nothing.err);
    }
}

#[test]
fn no_prompt_at_all_is_2_with_an_example() {
    for input in [&b""[..], b"\n", b"  \n\n"] {
        gemma(&["generate"], input)
            .fails(2, &["no prompt", "help: ", "gemma generate 'What is photosynthesis?'"]);
    }
    gemma(&["tokenize"], b"").fails(2, &["no prompt"]);
}

#[cfg(unix)]
#[test]
fn a_closed_standard_input_does_not_matter_to_a_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let run = bash(dir.path(), r#""$G" generate Hello -n 4 --seed 1 --temp 0 <&-"#).ok();
    assert_eq!(run.out, gemma(&SHORT, b"").ok().out);
    bash(dir.path(), r#""$G" generate <&-"#).fails(2, &["no prompt"]);
}

#[test]
fn short_answers_in_small_contexts_work() {
    for n in ["0", "1", "2", "3", "7"] {
        let json = gemma(
            &["generate", "Hi", "-n", n, "--seed", "1", "--ignore-eos", "--format", "json"],
            b"",
        )
        .ok()
        .json();
        assert_eq!(json["usage"]["completion_tokens"], n.parse::<u64>().unwrap());
    }
    let small = [
        "generate",
        "Hi",
        "-n",
        "50",
        "-c",
        "14",
        "--seed",
        "1",
        "--ignore-eos",
        "--format",
        "json",
    ];
    let json = gemma(&small, b"").ok().json();
    let count = |key: &str| json["usage"][key].as_u64().unwrap();
    assert!(
        count("completion_tokens") >= 1
            && count("prompt_tokens") + count("completion_tokens") <= 15,
        "{json}"
    );
    assert_eq!(json["finish_reason"], "length");
}

#[test]
fn missing_models_are_3_and_say_what_to_do() {
    gemma(&["generate", "hi", "-m", "/nonexistent"], b"").fails(3, &["/nonexistent", "help: "]);
    for command in [&["generate", "hi", "-m"][..], &["tokenize", "hi", "-m"], &["inspect"]] {
        gemma(&[command, &["org/absent"]].concat(), b"")
            .fails(3, &["help: ", "gemma pull org/absent"]);
    }
    let dir = tempfile::tempdir().unwrap();
    gemma_in(dir.path(), &["generate", "hi", "-m", "."], b"").fails(3, &["config.json"]);
}

#[test]
fn a_mistyped_or_foreign_name_of_a_model_is_answered_with_the_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let with = |model: &str| gemma_in(dir.path(), &["generate", "hi", "-m", model], b"");
    fs::create_dir(dir.path().join("models")).unwrap();
    fs::write(dir.path().join("models/gemma-3-1b.gguf"), "").unwrap();
    fs::write(dir.path().join("models/other.gguf"), "").unwrap();
    let typo = with("models/gemma-3-1B.gguf")
        .fails(3, &["models/gemma-3-1B.gguf", "did you mean -m models/gemma-3-1b.gguf?"]);
    assert!(!typo.err.contains("gemma pull"), "{}", typo.err);
    with("models/absent.gguf").fails(3, &["models/ holds gemma-3-1b.gguf, other.gguf"]);
    with("models/absent").fails(3, &["models/ holds gemma-3-1b.gguf, other.gguf"]);
    with("models")
        .fails(3, &["holds 2 models", "\n  models/gemma-3-1b.gguf", "\n  models/other.gguf"]);
    with("google/gemma-3-27b-it").fails(
        3,
        &["54.9 GB", "licence", "HF_TOKEN", "gemma pull google/gemma-3-27b-it-qat-q4_0-gguf"],
    );
    for name in ["27b", "gemma3:27b", "gemma-3-27b"] {
        let help = ["Gemma 3 27b is not on", "17.2 GB", "google/gemma-3-27b-it-qat-q4_0-gguf"];
        assert!(!with(name).fails(3, &help).err.contains("54.9"), "{name}");
    }
    for name in [
        "gemma-3-27b-it",
        "hf.co/google/gemma-3-27b-it",
        "https://huggingface.co/google/gemma-3-27b-it",
    ] {
        with(name).fails(
            3,
            &[&format!("there is no model at {name}"), "did you mean -m google/gemma-3-27b-it?"],
        );
    }
    with("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M").fails(
        3,
        &["gemma-3-4b-it-GGUF:Q4_K_M is not in", "gemma pull ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"],
    );
    with("~/x.gguf").fails(3, &["outside quotes", &format!("-m {}/x.gguf", dir.path().display())]);

    // A refused download leaves a snapshot without a model.
    let repo = dir.path().join(".cache/huggingface/hub/models--google--gemma-3-1b-it");
    fs::create_dir_all(repo.join("snapshots/c0ffee")).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), "c0ffee").unwrap();
    with("google/gemma-3-1b-it")
        .fails(3, &["no files of a model", "gated", "gemma pull google/gemma-3-1b-it"]);
    fs::write(repo.join("snapshots/c0ffee/gemma-3-1b-it-q4_0.gguf"), "").unwrap();
    with("gemma3:1b").fails(3, &["snapshots/c0ffee"]);
    with("hf.co/google/gemma-3-1b-it:Q4_0")
        .fails(3, &["did you mean -m google/gemma-3-1b-it:Q4_0?"]);
}

#[test]
fn files_in_the_place_of_a_model_are_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let with = |model: &str| gemma_in(dir.path(), &["generate", "hi", "-m", model], b"");
    fs::create_dir(dir.path().join("m")).unwrap();
    fs::write(dir.path().join("m/config.json"), "{}").unwrap();
    with("m/config.json").fails(3, &["one file of a model", "give its directory", ": m\n"]);
    with("m").fails(3, &["no weights", "gemma pull"]);
    fs::write(
        dir.path().join("m/model.safetensors"),
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    )
    .unwrap();
    with("m").fails(3, &["m/model.safetensors is a Git LFS pointer", "git lfs pull"]);
    fs::write(dir.path().join("page.gguf"), "\n<!DOCTYPE html>\n<html lang=en>").unwrap();
    with("page.gguf").fails(3, &["page.gguf is a web page", "/resolve/main/"]);
}

#[test]
fn an_absent_device_is_4() {
    // No machine has this many GPUs.
    gemma(&["generate", "hi", "-d", "vulkan:99"], b"").fails(4, &["Vulkan", "help: "]);
}

#[test]
fn a_prompt_longer_than_the_context_is_7_with_numbers_and_a_remedy() {
    let lines = b"y\n".repeat(25_000_000);
    let letters = vec![b'a'; 50_000_000];
    for input in [&lines[..], &letters, &lines[..1_000_000]] {
        gemma(&["generate", "-q"], input)
            .fails(7, &["tokens", "2,048", "help: shorten the prompt"]);
    }
    gemma(&["generate", "-q"], &b"word ".repeat(3000)).fails(7, &["tokens", "2,048", "help: "]);
    gemma(&["generate", "-c", "5", "a b c d e f g h"], b"").fails(7, &["holds 5", "--ctx-size"]);
    gemma(&["generate", "-q"], &vec![b'a'; 70 << 20]).fails(7, &["64 MiB", "help: "]);
}

#[test]
fn input_that_is_not_text_is_3_with_the_reason() {
    gemma(&["generate"], b"ab\xffcd").fails(3, &["standard input", "0xff", "offset 2", "iconv"]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bad.txt"), b"\xe4b").unwrap();
    gemma_in(dir.path(), &["generate", "-f", "bad.txt"], b"")
        .fails(3, &["bad.txt", "0xe4", "offset 0"]);
    gemma_in(dir.path(), &["generate", "-f", "absent.txt"], b"")
        .fails(3, &["absent.txt", "help: check the path"]);
    gemma_in(dir.path(), &["generate", "-f", "."], b"").fails(3, &[". is a directory", "help: "]);
    gemma(&["generate"], b"\x7fELF\x02\x01\x01\0\0\xff")
        .fails(3, &["standard input", "binary file", "help: give text"]);
    gemma_in(dir.path(), &["generate", "--messages", "bad.txt"], b"").fails(3, &["bad.txt"]);
}

/// Returns the text that these arguments and this input make, read from its tokens.
fn joined(args: &[&str], input: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a"), "one\n").unwrap();
    fs::write(dir.path().join("b"), "two\r\n").unwrap();
    let run = gemma_in(dir.path(), &[&["tokenize", "--json"], args].concat(), input).ok();
    run.json()["pieces"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p.as_str().unwrap())
        .collect::<String>()
        .replace('\u{2581}', " ")
}

#[test]
fn files_standard_input_and_prompt_are_joined_by_blank_lines() {
    assert_eq!(joined(&["-f", "a", "-f", "b"], b""), "one\n\ntwo");
    assert_eq!(joined(&["-f", "b", "-f", "a", "three"], b"in\n"), "two\n\none\n\nin\n\nthree");
    assert_eq!(joined(&["-f", "a", "-f", "-", "-f", "b"], b"in\n"), "one\n\nin\n\ntwo");
    assert_eq!(joined(&["before", "-", "after"], b"in"), "before\n\nin\n\nafter");
    assert_eq!(joined(&["-", "after"], b"in"), "in\n\nafter");
    assert_eq!(joined(&["-p", "option"], b"in"), "in\n\noption");
    assert_eq!(joined(&["-"], b"  spaces stay "), "  spaces stay ");
}

#[test]
fn a_bad_gemma_toml_is_2_and_names_the_place() {
    let dir = tempfile::tempdir().unwrap();
    for (text, words) in [
        ("temp = \"x\"", &["gemma.toml", "--temp"][..]),
        ("\ntemp = ", &["gemma.toml", "line 2"]),
        ("tmp = 1", &["gemma.toml", "`tmp`", "help: "]),
        ("output = \"x\"", &["gemma.toml", "`output`"]),
        ("[foo]\nx = 1", &["gemma.toml", "[foo]"]),
        ("temp = [1, 2]", &["gemma.toml", "temp"]),
    ] {
        fs::write(dir.path().join("gemma.toml"), text).unwrap();
        gemma_in(dir.path(), &SHORT[..6], b"").fails(2, words);
    }
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_ends_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        r#""$G" generate --ignore-eos -q -n 2000 Hello | head -c 10; echo " ${PIPESTATUS[0]}""#;
    let run = bash(dir.path(), script).ok();
    assert!(run.text().ends_with(" 141\n"), "{run:?}");
    assert_eq!(run.err, "");
}

/// No gain is reported if nothing was drafted.
#[test]
fn drafts_that_are_off_made_nothing_faster() {
    let run = ["generate", "--raw", "The", "-n", "40", "--draft", "off"];
    let said = gemma(&[&run[..], &["--stats", "text"]].concat(), b"").ok().err;
    assert!(said.contains(" tok/s") && !said.contains("by drafts"), "{said}");
    let json = gemma(&[&run[..], &["--json"]].concat(), b"").ok().json();
    assert!(json["draft"]["plain_tps"].is_null(), "{json}");
}
