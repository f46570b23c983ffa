//! `--resume`: which files are accepted, one run at a time, failures computed again; and notes
//! about records.
#![cfg(unix)]

use crate::shell;
use serde_json::{Value, json};
use shell::{BINARY, Run, bash, command, gemma_in};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

/// Returns records with short answers. The n-th asks for the n-th number.
fn records(n: usize) -> String {
    (0..n).map(|n| record(n).to_string() + "\n").collect()
}

fn record(n: usize) -> Value {
    json!({"id": format!("r{n}"), "prompt": format!("What is {n} + 1?"), "max_tokens": 3})
}

fn batch(dir: &Path, more: &[&str]) -> Run {
    gemma_in(dir, &[&["generate", "--batch", "in.jsonl"], more].concat(), b"")
}

fn read(dir: &Path, name: &str) -> String {
    fs::read_to_string(dir.join(name)).unwrap()
}

#[test]
fn a_file_of_others_keeps_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), records(2)).unwrap();
    batch(dir.path(), &["--resume", "mine", "-q"]).ok();
    let mine = fs::read(dir.path().join("mine")).unwrap();
    let with_tail = |tail: &[u8]| [&mine[..], tail].concat();
    for foreign in [
        b"my precious notes".to_vec(),
        b"my notes\n".to_vec(),
        b"\x7fELF\x02\x01\x01\0\0\0".to_vec(),
        vec![0; 100],
        br#"{"id": 1, "text": "by another tool"}"#.to_vec(),
        b"{\"id\": 1, \"text\": \"by another tool\"}\n".to_vec(),
        records(2).into_bytes(),
        with_tail(b"notes"),
        with_tail(b"notes\n"),
    ] {
        fs::write(dir.path().join("notes"), &foreign).unwrap();
        batch(dir.path(), &["--resume", "notes"]).fails(2, &["notes", "not an answer", "help: "]);
        batch(dir.path(), &["--resume", "notes", "-m", "/nonexistent"]).fails(3, &["/nonexistent"]);
        assert!(fs::read(dir.path().join("notes")).unwrap() == foreign);
    }
    // An answer that an earlier run cut off is removed only after a model is loaded.
    let torn = with_tail(&mine[..mine.len() / 3]);
    fs::write(dir.path().join("mine"), &torn).unwrap();
    batch(dir.path(), &["--resume", "mine", "-m", "/nonexistent"]).fails(3, &["/nonexistent"]);
    assert!(fs::read(dir.path().join("mine")).unwrap() == torn);
    batch(dir.path(), &["--resume", "mine", "-q"]).ok();
    assert!(fs::read(dir.path().join("mine")).unwrap() == mine);
    batch(dir.path(), &["--resume", "new", "-m", "/nonexistent"]).fails(3, &["/nonexistent"]);
    assert!(!dir.path().join("new").exists());
    batch(dir.path(), &["--resume", "no/new"]).fails(2, &["help: mkdir -p no"]);
    batch(dir.path(), &["--resume", "/dev/null"]).fails(2, &["not a regular file"]);
}

#[test]
fn a_batch_is_not_written_into_itself() {
    let dir = tempfile::tempdir().unwrap();
    let input = records(2);
    fs::write(dir.path().join("in.jsonl"), &input).unwrap();
    bash(dir.path(), "ln in.jsonl hard; ln -s in.jsonl soft").ok();
    for out in ["-o in.jsonl", "--resume in.jsonl", "-o hard", "--resume soft", ">>in.jsonl"] {
        for from in ["in.jsonl", "- <in.jsonl"] {
            let run = bash(dir.path(), &format!("\"$G\" generate --batch {from} {out}"));
            run.fails(2, &["into the batch itself", "help: "]);
            assert_eq!(read(dir.path(), "in.jsonl"), input, "{from} {out}");
        }
    }
    // A batch of lines that could be answers is refused too.
    batch(dir.path(), &["--resume", "out", "-q"]).ok();
    let answers = read(dir.path(), "out");
    let run = gemma_in(dir.path(), &["generate", "--batch", "out", "--resume", "out"], b"");
    run.fails(2, &["into the batch itself"]);
    assert_eq!(read(dir.path(), "out"), answers);
}

#[test]
fn two_runs_do_not_write_one_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), records(6)).unwrap();
    let whole = batch(dir.path(), &["-q"]).ok().text().to_owned();
    // The first run waits for records.
    let mut first = command(BINARY, dir.path());
    first.args(["generate", "--batch", "-", "--resume", "out", "-q"]).stdin(Stdio::piped());
    let mut first = first.spawn().unwrap();
    let mut to = first.stdin.take().unwrap();
    writeln!(to, "{}", record(0)).unwrap();
    while fs::read(dir.path().join("out")).is_ok_and(|bytes| bytes.is_empty())
        || !dir.path().join("out").exists()
    {
        assert_eq!(first.try_wait().unwrap(), None);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for more in [&["--shard", "2/2"][..], &[], &["--seed", "9"]] {
        let second = batch(dir.path(), &[&["--resume", "out", "-q"], more].concat());
        second.fails(2, &["another run is writing out", "help: "]);
    }
    drop(to);
    assert_eq!(shell::code(first.wait().unwrap()), 0);
    assert_eq!(read(dir.path(), "out").lines().count(), 1);
    // One after the other, runs can share the file.
    for shard in ["2/2", "1/2"] {
        batch(dir.path(), &["--resume", "out", "-q", "--shard", shard]).ok();
    }
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&read(dir.path(), "out")), sorted(&whole));
}

/// A failed record is computed again, and its answer replaces the failure.
#[test]
fn a_mended_record_is_answered_by_the_next_run() {
    let dir = tempfile::tempdir().unwrap();
    let good: Vec<Value> = (0..7).map(record).collect();
    let mut bad = good.clone();
    bad[2]["prompt"] = json!(7);
    bad[5]["temperature"] = json!(-1);
    let write = |records: &[Value]| {
        let lines: String = records.iter().map(|r| r.to_string() + "\n").collect();
        fs::write(dir.path().join("in.jsonl"), lines).unwrap();
    };
    write(&bad);
    let first = batch(dir.path(), &["--resume", "my out"]).ok();
    assert_eq!(first.text(), "");
    assert!(first.err.contains("7 records, 2 failed, "), "{}", first.err);
    assert!(first.err.ends_with("help: jq -c 'select(.error)' 'my out'\n"), "{}", first.err);
    let failed = read(dir.path(), "my out");

    // If nothing has changed, the same records fail and the file stays the same.
    let again = batch(dir.path(), &["--resume", "my out", "--strict"]);
    assert_eq!(again.code, 6, "{}", again.err);
    assert!(
        again.err.contains("2 records, 2 failed") && again.err.contains(", 5 kept\n"),
        "{}",
        again.err
    );
    assert_eq!(read(dir.path(), "my out"), failed);

    bad[5] = good[5].clone();
    write(&bad);
    batch(dir.path(), &["--resume", "my out", "-q"]).ok();
    write(&good);
    let mended = batch(dir.path(), &["--resume", "my out", "-q", "--parallel", "3"]).ok();
    assert_eq!(mended.err, "");
    assert_eq!(read(dir.path(), "my out"), batch(dir.path(), &["-q"]).ok().text());
    let all = batch(dir.path(), &["--resume", "my out"]).ok();
    assert!(all.err.ends_with("nothing to do: all 7 answers are kept\n"), "{}", all.err);
}

#[test]
fn a_batch_says_what_became_of_it_unless_told_not_to() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), records(2)).unwrap();
    let run = batch(dir.path(), &[]).ok();
    assert!(
        run.err.contains("2 records, 0 failed, 6 tokens in ") && !run.err.contains("help:"),
        "{}",
        run.err
    );
    assert!(!run.err.contains('\x1b'));
    assert_eq!(batch(dir.path(), &["-q"]).ok().err, "");
    fs::write(dir.path().join("in.jsonl"), "{}\n").unwrap();
    let run = batch(dir.path(), &[]).ok();
    assert!(
        run.err.contains("1 record, 1 failed")
            && run.err.contains("help: jq -c 'select(.error)' OUT\n"),
        "{}",
        run.err
    );
    assert_eq!(batch(dir.path(), &["-q"]).ok().err, "");
}

#[test]
fn misspelt_fields_and_equal_ids_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut lines: Vec<Value> = (0..4).map(record).collect();
    lines[1]["temprature"] = json!(0.5);
    lines[2]["temprature"] = json!(0.5);
    lines[2]["note_to_self"] = json!("x");
    lines[3]["id"] = json!("r0");
    let text: String = lines.iter().map(|r| r.to_string() + "\n").collect();
    fs::write(dir.path().join("in.jsonl"), text).unwrap();
    for more in [&[][..], &["--parallel", "2"]] {
        let run = batch(dir.path(), more).ok();
        let said = "line 2: the unknown field \"temprature\" is ignored; \
            did you mean \"temperature\"?";
        assert_eq!(run.err.matches(said).count(), 1, "{}", run.err);
        assert_eq!(run.err.matches("temprature").count(), 1, "{}", run.err);
        assert!(
            run.err.contains("line 3: the unknown field \"note_to_self\" is ignored\n"),
            "{}",
            run.err
        );
        assert!(run.err.contains("lines 1 and 4 have the same id, \"r0\""), "{}", run.err);
        assert_eq!(run.text().lines().count(), 4);
    }
    let strict = batch(dir.path(), &["--strict", "-q"]);
    assert_eq!(strict.code, 6, "{strict:?}");
    let replies: Vec<Value> =
        strict.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let failed: Vec<bool> = replies.iter().map(|r| !r["error"].is_null()).collect();
    assert_eq!(failed, [false, true, true, false]);
    assert_eq!(replies[1]["error"]["help"], "did you mean \"temperature\"?");
}

#[test]
fn a_batch_has_one_format() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), records(1)).unwrap();
    for format in ["text", "json", "stream-json"] {
        batch(dir.path(), &["--format", format]).fails(2, &["--format", "JSON lines", "help: "]);
    }
    batch(dir.path(), &["--format", "jsonl", "-q"]).ok();
    // Defaults for single prompts do not apply to batches.
    fs::write(dir.path().join("gemma.toml"), "format = \"text\"\n").unwrap();
    batch(dir.path(), &["-q"]).ok();
}

#[test]
fn sound_is_not_heard_and_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let part = json!({"type": "input_audio", "input_audio": {"data": ""}});
    let messages =
        json!([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]);
    fs::write(dir.path().join("m.json"), messages.to_string()).unwrap();
    let run = gemma_in(dir.path(), &["generate", "--messages", "m.json"], b"");
    run.fails(3, &["m.json", "input_audio: only text and images are supported"]);
    fs::write(dir.path().join("in.jsonl"), json!({"messages": messages}).to_string()).unwrap();
    let run = batch(dir.path(), &["-q"]).ok().json();
    assert!(
        run["error"]["message"].as_str().unwrap().contains("input_audio: only text and images"),
        "{run}"
    );
    for (text, says) in [
        ("{}", "not a list of messages"),
        ("7", "not a list"),
        (r#"[{"role": "user"}]"#, "content"),
    ] {
        fs::write(dir.path().join("m.json"), text).unwrap();
        gemma_in(dir.path(), &["generate", "--messages", "m.json"], b"")
            .fails(3, &["m.json", says, "help: "]);
    }
}

#[test]
fn a_model_without_a_tower_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let part = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let messages = |url| json!([{"role": "user", "content": [part(url)]}]);
    let image = messages("data:image/png;base64,aGk=");
    fs::write(dir.path().join("m.json"), image.to_string()).unwrap();
    gemma_in(dir.path(), &["generate", "--messages", "m.json"], b"")
        .fails(3, &["the bundled demo model reads no images", "help: "]);
    fs::write(dir.path().join("in.jsonl"), json!({"messages": image}).to_string()).unwrap();
    let run = batch(dir.path(), &["-q"]).ok().json();
    assert_eq!(run["error"]["message"], "the bundled demo model reads no images");
    batch(dir.path(), &["--image", "a.png"]).fails(2, &["--batch", "records"]);
    batch(dir.path(), &["--mmproj", "none.gguf"]).fails(3, &["none.gguf"]);
    let address = messages("http://localhost/a.png");
    fs::write(dir.path().join("m.json"), address.to_string()).unwrap();
    gemma_in(dir.path(), &["generate", "--messages", "m.json"], b"")
        .fails(3, &["m.json", "not fetched"]);
}

#[test]
fn a_schema_can_be_the_name_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("person.json"), r#"{"enum": ["a person"]}"#).unwrap();
    for schema in ["person.json", "@person.json", "./person.json"] {
        let run =
            gemma_in(dir.path(), &["generate", "Who?", "--json-schema", schema, "-q"], b"").ok();
        assert_eq!(run.text(), "\"a person\"");
    }
    gemma_in(dir.path(), &["generate", "Who?", "--json-schema", "nobody.json"], b"")
        .fails(2, &["--json-schema"]);
}

/// If records arrive one by one, their answers are written one by one, and a reader of the file
/// sees only complete lines.
#[test]
fn answers_are_in_the_file_when_the_next_record_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = command(BINARY, dir.path());
    run.args(["generate", "--batch", "-q", "-o", "/dev/stdout"]).stdin(Stdio::piped());
    let mut child = run.spawn().unwrap();
    let (mut to, mut from) =
        (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    for n in 0..3 {
        writeln!(to, "{}", record(n)).unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["id"], format!("r{n}"));
    }
    drop(to);
    assert_eq!(shell::code(child.wait().unwrap()), 0);
}
