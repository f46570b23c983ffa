//! Content of standard output, standard error, files and statistics. Drafting does not change the
//! text.

use crate::common::vulkan;
use crate::shell;
use gemma::vulkan::ALLOW_CPU_DRIVER;
use serde_json::Value;
use shell::{BINARY, Run, command, gemma, gemma_in, wait};
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use vulkan::device;

/// A text of 24 tokens that does not end early.
const TEXT: [&str; 8] =
    ["generate", "Hello there", "-n", "24", "--seed", "5", "--ignore-eos", "-q"];

fn text(more: &[&str]) -> Run {
    gemma(&[&TEXT, more].concat(), b"").ok()
}

#[test]
fn only_the_text_reaches_a_pipe_and_escape_codes_never_do() {
    let json = text(&["--format", "json"]).json();
    let expected = json["text"].as_str().unwrap();
    assert!(!expected.is_empty());
    let dir = tempfile::tempdir().unwrap();
    for (name, value) in [
        ("LANG", "C"),
        ("NO_COLOR", "1"),
        ("CLICOLOR_FORCE", "1"),
        ("TERM", "dumb"),
        ("GEMMA_VERBOSE", "2"),
    ] {
        let mut command = command(BINARY, dir.path());
        command.args(&TEXT[..7]).args(["--stats", "text"]).env(name, value);
        let run = wait(command, b"").ok();
        assert_eq!(run.text(), expected, "{name}");
        assert!(
            run.err.contains("bundled demo model") && run.err.contains("seed 5"),
            "{name}: {}",
            run.err
        );
        assert!(!run.err.contains('\x1b') && !run.err.contains('\r'), "{name}: {:?}", run.err);
    }
    // An explicit option overrides the environment.
    let coloured =
        gemma(&[&TEXT[..7], &["--stats", "text", "--color", "always"]].concat(), b"").ok();
    assert!(
        coloured.err.contains("\x1b[1;33mnote:\x1b[0m") && coloured.text() == expected,
        "{:?}",
        coloured.err
    );
    let mut forced = command(BINARY, dir.path());
    forced.args(["generate", "--help"]).env("CLICOLOR_FORCE", "1");
    assert!(!wait(forced, b"").ok().out.contains(&0x1b));
    let mut forced = command(BINARY, dir.path());
    forced.args(["generate", "--bogus"]).env("CLICOLOR_FORCE", "1");
    assert!(!wait(forced, b"").fails(2, &[]).err.contains('\x1b'));
}

#[test]
fn quiet_says_nothing() {
    assert_eq!(text(&[]).err, "");
}

#[test]
fn a_text_ends_with_one_line_break_unless_the_bytes_alone_are_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let run = |more: &[&str]| {
        let mut command = command(BINARY, dir.path());
        command.env_remove("GEMMA_NO_NEWLINE").args(TEXT).args(more);
        wait(command, b"").ok()
    };
    let bytes = text(&[]).out;
    assert!(!bytes.ends_with(b"\n"));
    assert_eq!(run(&["--no-newline"]).out, bytes);
    let ended = [&bytes[..], b"\n"].concat();
    assert_eq!(run(&[]).out, ended);
    assert_eq!(run(&["--no-newline", "--newline"]).out, ended, "the last of both counts");
    run(&["-o", "out.txt"]);
    assert_eq!(fs::read(dir.path().join("out.txt")).unwrap(), ended);
    // A text that ends with a line break gets no second one, and JSON has the text unchanged.
    let script = "unset GEMMA_NO_NEWLINE; $G generate -q --regex 'yes\\n' Hi";
    assert_eq!(shell::bash(dir.path(), script).ok().text(), "yes\n");
    assert_eq!(run(&["--json"]).json()["text"].as_str().unwrap().as_bytes(), bytes);
    // Two answers in one file are on separate lines.
    let script = "unset GEMMA_NO_NEWLINE; for i in 1 2; do $G generate -q --regex no Hi; done";
    assert_eq!(shell::bash(dir.path(), script).ok().text(), "no\nno\n");
}

/// Returns the places where `value` violates `schema`. Supports the keywords of the result schema.
fn breaks(schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut expect = |holds: bool, what: &str| {
        if !holds {
            found.push(format!("{at}: {value} breaks {what}"));
        }
    };
    for (keyword, rule) in schema.as_object().unwrap() {
        match keyword.as_str() {
            "type" => {
                let is = |name: &Value| match name.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "null" => value.is_null(),
                    other => panic!("unknown type {other}"),
                };
                expect(rule.as_array().map_or_else(|| is(rule), |any| any.iter().any(is)), "type");
            }
            "required" if value.is_null() => {}
            "required" => {
                for key in rule.as_array().unwrap() {
                    expect(value.get(key.as_str().unwrap()).is_some(), &format!("required {key}"));
                }
            }
            "const" => expect(rule == value, "const"),
            "enum" => expect(rule.as_array().unwrap().contains(value), "enum"),
            "minimum" => {
                expect(value.as_f64().is_none_or(|v| v >= rule.as_f64().unwrap()), "minimum")
            }
            "maximum" => {
                expect(value.as_f64().is_none_or(|v| v <= rule.as_f64().unwrap()), "maximum")
            }
            "properties"
            | "additionalProperties"
            | "items"
            | "$schema"
            | "title"
            | "description" => {}
            other => panic!("this check does not know {other}"),
        }
    }
    for (key, rule) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        if let Some(inner) = value.get(key) {
            found.extend(breaks(rule, inner, &format!("{at}.{key}")));
        }
    }
    for (key, inner) in value.as_object().into_iter().flatten() {
        match schema.get("additionalProperties").filter(|_| schema["properties"][key].is_null()) {
            Some(Value::Bool(false)) => found.push(format!("{at}: {key} is no property")),
            Some(rule) => found.extend(breaks(rule, inner, &format!("{at}.{key}"))),
            None => {}
        }
    }
    if let (Some(rule), Some(list)) = (schema.get("items"), value.as_array()) {
        found.extend(list.iter().flat_map(|v| breaks(rule, v, &format!("{at}[]"))));
    }
    found
}

#[test]
fn json_follows_the_published_schema_in_all_its_forms() {
    let schema = gemma(&["schema"], b"").ok().json();
    let plain = text(&[]);
    let check = |value: &Value| {
        assert_eq!(breaks(&schema, value, "result"), [""; 0]);
        assert_eq!(value["text"], plain.text());
        assert_eq!(
            (&value["finish_reason"], &value["usage"]["completion_tokens"]),
            (&"length".into(), &24.into())
        );
        assert_eq!(value["sampling"]["seed"], 5);
    };
    let json = text(&["--format", "json"]).json();
    check(&json);
    check(&text(&["--json"]).json());
    assert_eq!(text(&["--json", "--format", "text"]).out, plain.out, "the last of both counts");
    let lines = text(&["--format", "jsonl"]);
    assert_eq!(lines.text().matches('\n').count(), 1);
    check(&lines.json());
    let stream = text(&["--format", "stream-json"]);
    let mut lines: Vec<Value> =
        stream.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    check(&lines.pop().unwrap());
    assert!(lines.iter().all(|l| l["type"] == "text"));
    assert_eq!(lines.iter().map(|l| l["text"].as_str().unwrap()).collect::<String>(), plain.text());

    // The check itself can fail.
    let mut wrong = json.clone();
    wrong["v"] = 2.into();
    wrong["draft"]["extra"] = 1.into();
    wrong["memory"].as_object_mut().unwrap().shift_remove("kv");
    wrong["text"] = 5.into();
    assert_eq!(breaks(&schema, &wrong, "result").len(), 4);
}

#[test]
fn statistics_are_the_result_without_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let run = gemma_in(
        dir.path(),
        &[&TEXT[..], &["--stats", "json", "--stats-file", "s.json"]].concat(),
        b"",
    )
    .ok();
    let file: Value =
        serde_json::from_slice(&fs::read(dir.path().join("s.json")).unwrap()).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&run.err).unwrap(), file);
    assert!(file.get("text").is_none());
    let draft = &file["draft"];
    let sum = |key: &str| {
        draft["sources"].as_array().unwrap().iter().map(|s| s[key].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(
        (sum("drafted"), sum("accepted")),
        (draft["drafted"].as_u64().unwrap(), draft["accepted"].as_u64().unwrap())
    );
}

#[test]
fn a_seed_decides_the_text_whatever_drafts_and_threads() {
    let mut texts = Vec::new();
    for temp in ["0", "2"] {
        let run = |more: &[&str]| text(&[&["--temp", temp], more].concat()).out;
        let expected = run(&["--draft", "off"]);
        for draft in ["off", "ngram", "bundled", "auto"] {
            for tree in ["chain", "4"] {
                for threads in ["1", "2"] {
                    let how = ["--draft", draft, "--draft-tree", tree, "-t", threads];
                    assert_eq!(run(&how), expected, "--temp {temp} {how:?}");
                }
            }
        }
        texts.push(expected);
    }
    assert_ne!(texts[0], texts[1], "temperature does something");
}

/// Writes the bundled draft model as a user's own: a directory with a tokenizer.
fn own_draft(dir: &Path) {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft");
    fs::create_dir(dir).unwrap();
    for (from, name) in [
        ("demo-draft", "config.json"),
        ("demo-draft", "model.safetensors"),
        ("demo-target", "tokenizer.json"),
    ] {
        fs::copy(bundled.join(from).join(name), dir.join(name)).unwrap();
    }
}

#[test]
fn a_draft_model_of_the_users_own_changes_no_text() {
    let dir = tempfile::tempdir().unwrap();
    own_draft(&dir.path().join("own"));
    let run = |more: &[&str]| gemma_in(dir.path(), &[&TEXT, more].concat(), b"");
    let expected = run(&["--draft", "off"]).ok().out;
    let drafted =
        run(&["--draft", "own", "--draft-tree", "6", "--stats", "json", "--stats-file", "s.json"])
            .ok();
    assert_eq!(drafted.out, expected);
    let stats: Value =
        serde_json::from_slice(&fs::read(dir.path().join("s.json")).unwrap()).unwrap();
    let draft = &stats["draft"];
    assert!(
        draft["accepted"].as_u64().unwrap() > 0 && draft["plain_tps"].as_f64().unwrap() > 0.0,
        "{draft}"
    );
    assert_eq!(
        (&draft["hidden_s"], &draft["ahead"]),
        (&0.0.into(), &0.into()),
        "nothing runs at the same time as a target on the processor"
    );
    assert_eq!(draft["costs"].as_array().unwrap().len(), 6);
    // The measured times of passes were stored. A damaged file is not an error.
    let caches = dir.path().join(".cache/gemma");
    let kept = || {
        fs::read_dir(&caches)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.extension().is_some_and(|e| e == "json"))
    };
    fs::write(kept().unwrap(), "{").unwrap();
    assert_eq!(run(&["--draft", "own"]).ok().out, expected);
    assert!(fs::read_to_string(kept().unwrap()).unwrap().contains("\"v\":1"));

    // A draft with another tokenizer is refused, with the reason. Unknown devices are refused too.
    let file = dir.path().join("own/tokenizer.json");
    let tokens = fs::read_to_string(&file).unwrap();
    run(&["--draft", "own", "--draft-device", "gpu"])
        .fails(2, &["--draft-device", "unknown device"]);
    fs::write(&file, tokens.replacen("\"<end_of_turn>\"", "\"<end_of_trun>\"", 2)).unwrap();
    run(&["--draft", "own"])
        .fails(3, &["cannot draft for", "tokenizer", "same tokens as the target"]);
    // A draft without a tokenizer uses the target's.
    fs::remove_file(&file).unwrap();
    assert_eq!(run(&["--draft", "own"]).ok().out, expected);
}

/// On a GPU the draft model runs while the target does, on the processor or on the GPU itself.
#[test]
fn drafting_ahead_changes_no_text() {
    if device().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |more: &[&str]| {
        let mut command = command(BINARY, dir.path());
        command.args(TEXT).args(["-d", "vulkan"]).args(more).env(ALLOW_CPU_DRIVER, "1");
        wait(command, b"").ok()
    };
    let expected = run(&["--draft", "off"]).out;
    for (place, ahead) in [("cpu", "on"), ("cpu", "off"), ("vulkan", "on")] {
        let how = [
            "--draft-device",
            place,
            "--draft-ahead",
            ahead,
            "--draft-tree",
            "5",
            "--stats-file",
            "s.json",
        ];
        assert_eq!(run(&how).out, expected, "{how:?}");
        let stats: Value =
            serde_json::from_slice(&fs::read(dir.path().join("s.json")).unwrap()).unwrap();
        let number = |key: &str| stats["draft"][key].as_f64().unwrap();
        assert_eq!(
            (number("ahead") > 0.0, number("hidden_s") > 0.0),
            (ahead == "on", ahead == "on"),
            "{how:?}, {stats}"
        );
        assert!(number("ahead_hits") <= number("ahead") && number("exposed_s") > 0.0);
    }
}

#[test]
fn a_file_is_replaced_by_success_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.txt");
    fs::write(&file, "old").unwrap();
    #[cfg(unix)]
    fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    gemma_in(dir.path(), &["generate", "-q", "-o", "out.txt"], &b"word ".repeat(3000))
        .fails(7, &["2,048"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    let run = gemma_in(dir.path(), &[&TEXT[..], &["-o", "out.txt"]].concat(), b"").ok();
    assert_eq!(run.text(), "");
    assert_eq!(fs::read(&file).unwrap(), text(&[]).out);
    #[cfg(unix)]
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    let left = fs::read_dir(dir.path())
        .unwrap()
        .filter(|e| !e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
    assert_eq!(left.count(), 1, "nothing else is left");
}

#[test]
fn a_place_that_cannot_be_written_is_refused_before_anything_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for place in ["absent/out.txt", "file/out.txt", "."] {
        let run =
            gemma_in(dir.path(), &["generate", "hi", "-o", place], b"").fails(2, &["cannot write"]);
        assert!(!run.err.contains("demo model"), "{}", run.err);
    }
}
