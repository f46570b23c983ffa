//! `gemma generate --batch`: one line of output per record, the same under all circumstances.

use crate::shell;
use serde_json::{Value, json};
use shell::{BINARY, Run, command, gemma_in, wait};
use std::fs;
use std::path::Path;
use std::time::Duration;

const RECORDS: usize = 500;

/// Returns whether the n-th record cannot be answered.
fn is_bad(n: usize) -> bool {
    matches!(n % 20, 3 | 5 | 7 | 9 | 11 | 16..)
}

/// Returns records of every kind: good ones, OpenAI's, invalid JSON, wrong types, too long, empty.
fn records() -> String {
    let questions = ["Why is the sky blue?", "Name three colours.", "What is 2 + 2?"];
    let record = |n: usize| {
        let question = format!("{} ({n})", questions[n % 3]);
        match n % 20 {
            3 => "{\"id\": 1, \"prompt\": ".to_owned(),
            5 => json!({"id": n, "prompt": ["no", "text"]}).to_string(),
            7 => json!({"id": n, "prompt": "long ".repeat(3000)}).to_string(),
            9 => json!({"id": n, "prompt": "  "}).to_string(),
            11 => json!({"id": n, "prompt": "hi", "temperature": -1}).to_string(),
            13 => json!({"custom_id": format!("c{n}"), "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": question}], "max_tokens": 3}})
            .to_string(),
            15 => json!({"prompt": question, "max_tokens": 2, "temperature": 0}).to_string(),
            16.. => json!({"id": n, "messages": {"role": "user"}}).to_string(),
            _ => json!({"id": format!("r{n}"), "prompt": question, "max_tokens": 3}).to_string(),
        }
    };
    (0..RECORDS).map(|n| record(n) + "\n").collect()
}

fn batch(dir: &Path, more: &[&str], input: &str) -> Run {
    gemma_in(dir, &[&["generate", "--batch", "-q", "--seed", "3"], more].concat(), input.as_bytes())
}

fn lines(run: &Run) -> Vec<Value> {
    run.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn every_record_has_its_line_whatever_is_wrong_with_others() {
    let dir = tempfile::tempdir().unwrap();
    let input = records();
    let all = batch(dir.path(), &[], &input).ok();
    assert_eq!(all.err, "");
    let replies = lines(&all);
    assert_eq!(replies.len(), RECORDS);
    for (n, reply) in replies.iter().enumerate() {
        let id = reply.get("custom_id").unwrap_or(&reply["id"]);
        match n % 20 {
            // A record without an id has the number of its line as its id.
            3 | 15 => assert_eq!(id, n + 1),
            5 | 7 | 9 | 11 | 16.. => assert_eq!(id, n),
            13 => assert_eq!(id, &format!("c{n}")),
            _ => assert_eq!(id, &format!("r{n}")),
        }
        assert_eq!(!reply["error"].is_null(), is_bad(n), "record {n}: {reply}");
        if n % 20 == 13 {
            let body = &reply["response"]["body"];
            assert_eq!(
                (&reply["response"]["status_code"], &body["object"]),
                (&json!(200), &json!("chat.completion"))
            );
            assert!(body["choices"][0]["message"]["content"].as_str().unwrap().len() > 1);
        } else if is_bad(n) {
            let code = if n % 20 == 7 {
                7
            } else if n % 20 == 11 {
                2
            } else {
                3
            };
            assert_eq!(
                (&reply["error"]["code"], &reply["finish_reason"]),
                (&json!(code), &json!("error")),
                "{reply}"
            );
        } else {
            assert!(!reply["text"].as_str().unwrap().is_empty(), "{reply}");
        }
    }
    // `--strict` changes the exit code only. Drafts and threads change nothing.
    let strict = batch(dir.path(), &["--strict", "--draft", "off", "-t", "1"], &input);
    assert_eq!((strict.code, strict.text() == all.text()), (6, true));

    // Answers in parallel equal those of one record at a time.
    for more in [&["--parallel", "8"][..], &["--parallel", "3", "--draft", "off", "--strict"]] {
        let several = batch(dir.path(), more, &input);
        assert_eq!(
            (several.code, several.err.as_str()),
            (if more.len() > 2 { 6 } else { 0 }, ""),
            "{more:?}"
        );
        assert!(several.out == all.out, "{more:?}");
    }

    // Three processes with a shard each give the answers of one process.
    let shards =
        ["1/3", "2/3", "3/3"].map(|shard| batch(dir.path(), &["--shard", shard], &input).ok());
    let shards = shards.each_ref().map(|run| run.text().lines().collect::<Vec<_>>());
    let together: Vec<&str> = (0..RECORDS).map(|n| shards[n % 3][n / 3]).collect();
    assert_eq!(together, all.text().lines().collect::<Vec<_>>());
}

/// The run is killed several times and resumed. The file ends up the same.
#[test]
fn a_batch_that_is_killed_and_resumed_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let input = records();
    let all = batch(dir.path(), &[], &input).ok();
    fs::write(dir.path().join("in.jsonl"), &input).unwrap();
    let out = dir.path().join("out.jsonl");
    let mut kills = 0;
    loop {
        let mut command = command(BINARY, dir.path());
        command.args(["generate", "--batch", "in.jsonl", "--resume", "out.jsonl", "-q"]);
        command.args(["--seed", "3", "--parallel", if kills % 2 == 0 { "4" } else { "1" }]);
        let before = fs::metadata(&out).map_or(0, |m| m.len());
        let mut child = command.spawn().unwrap();
        // Waits for some more replies, then cuts the last one in the middle.
        let enough = before + all.out.len() as u64 / 4;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if fs::metadata(&out).is_ok_and(|m| m.len() > enough) {
                child.kill().unwrap();
                kills += 1;
                break child.wait().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if shell::code(status) == 0 {
            break;
        }
    }
    assert!(kills > 1, "{kills} kills");
    assert!(fs::read(&out).unwrap() == all.out);
    // A further run has nothing left to do.
    batch_file(dir.path(), "in.jsonl", "out.jsonl").ok();
    assert!(fs::read(&out).unwrap() == all.out);
}

fn batch_file(dir: &Path, from: &str, out: &str) -> Run {
    gemma_in(dir, &["generate", "--batch", from, "--resume", out, "-q", "--seed", "3"], b"")
}

#[test]
fn a_record_says_what_it_says_alone() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = "Tell me about rivers.";
    let alone =
        gemma_in(dir.path(), &["generate", prompt, "-n", "20", "--seed", "8", "-q"], b"").ok();
    let record = json!({"id": 1, "prompt": prompt, "max_tokens": 20, "seed": 8}).to_string();
    let other = json!({"id": 2, "prompt": "Tell me about stones.", "max_tokens": 30}).to_string();
    let replies =
        lines(&batch(dir.path(), &[], &format!("{other}\n\n{record}\n{other}\n{record}")).ok());
    assert_eq!(replies.len(), 4);
    assert_eq!(replies[1]["text"], alone.text());
    assert_eq!(replies[1]["text"], replies[3]["text"]);
    assert_eq!(replies[0]["text"], replies[2]["text"]);
}

/// Texts of all lengths run in parallel, each with its own settings.
#[test]
fn texts_that_share_passes_are_those_alone() {
    let dir = tempfile::tempdir().unwrap();
    let settings = [
        json!({"temperature": 0}),
        json!({"temperature": 1, "top_k": 0, "top_p": 1.0}),
        json!({"temperature": 0.8, "top_k": 20, "stop": [" the", "."]}),
        json!({"temperature": 1, "repeat_penalty": 1.3, "repeat_last_n": 9, "seed": 5,
            "presence_penalty": 0.7, "frequency_penalty": 0.2, "logit_bias": {"236": -100}}),
        json!({"temperature": 0, "ignore_eos": true, "system": "Answer in one sentence."}),
        json!({"temperature": 1, "min_p": 0.1, "raw": true}),
        // Grammars that force many tokens, and grammars that force few.
        json!({"temperature": 1, "json_schema": {"type": "object",
            "properties": {"colour_of_the_thing": {"enum": ["red", "blue"]},
            "known": {"type": "boolean"}}, "required": ["colour_of_the_thing", "known"],
            "additionalProperties": false}}),
        json!({"temperature": 1, "regex": "[a-z ]{1,12}"}),
        json!({"temperature": 0, "regex": "[a-z]{1000}"}),
    ];
    let subjects = [
        "rivers",
        "stones",
        "the sea",
        "a very long list of things that people keep in their kitchens",
    ];
    let record = |n: usize| {
        let mut record = settings[n % 9].clone();
        record["id"] = n.into();
        record["prompt"] =
            format!("Tell me about {}.{}", subjects[n % 4], " And then?".repeat(n % 5 * 8)).into();
        record["max_tokens"] = if n % 9 < 6 { 1 + n * 7 % 19 } else { 40 }.into();
        record.to_string() + "\n"
    };
    let input: String = (0..18).map(record).collect();
    let alone = batch(dir.path(), &["--draft", "off", "-t", "1"], &input).ok();
    // One answer is cut off before its grammar is complete.
    for (n, reply) in lines(&alone).iter().enumerate() {
        assert_eq!(
            reply["error"]["code"],
            if n % 9 == 8 { json!(8) } else { Value::Null },
            "{reply}"
        );
    }
    for more in [
        &["--parallel", "8"][..],
        &["--parallel", "3", "--draft-tree", "4"],
        &["--parallel", "12", "--draft", "off"],
    ] {
        assert_eq!(batch(dir.path(), more, &input).ok().text(), alone.text(), "{more:?}");
    }
}

#[test]
fn wrong_use_is_said_before_anything_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |more: &[&str], words: &[&str]| {
        gemma_in(dir.path(), &[&["generate"], more].concat(), b"").fails(2, words);
    };
    fails(&["--resume", "x"], &["--batch"]);
    fails(&["--shard", "1/2"], &["--batch"]);
    fails(&["--batch", "-", "--shard", "3/2"], &["i/n"]);
    fails(&["--parallel", "2"], &["--batch"]);
    fails(&["--batch", "-", "--parallel", "0"], &["--parallel"]);
    fails(&["--batch", "-", "--parallel", "2", "--npu", "model"], &["--npu"]);
    let large = ["generate", "--batch", "-", "--parallel", "64", "--ctx-size", "100000000"];
    gemma_in(dir.path(), &large, b"").fails(5, &["lower --parallel", "64 contexts"]);
    fails(&["--batch", "-", "-f", "x"], &["another prompt"]);
    fails(&["--batch", "-", "--raw", "--system", "Be brief."], &["--system cannot be given"]);
    gemma_in(dir.path(), &["generate", "--batch", "-", "--system-file", "absent.txt"], b"")
        .fails(3, &["absent.txt"]);
    fails(&["--batch", "-", "--resume", "a", "-o", "b"], &["leave --output out"]);
    fs::write(dir.path().join("notes.txt"), "mine\n").unwrap();
    fails(&["--batch", "-", "--resume", "notes.txt"], &["line 1", "not an answer"]);
    gemma_in(dir.path(), &["generate", "--batch", "absent.jsonl"], b"").fails(3, &["absent.jsonl"]);
}

/// A batch from a pipe is answered record by record, not only at its end.
#[test]
fn answers_come_as_records_do() {
    ["1", "4"].iter().for_each(|n| answers_come(n));
}

fn answers_come(parallel: &str) {
    use std::io::{BufRead, BufReader, Write};
    let dir = tempfile::tempdir().unwrap();
    let mut command = command(BINARY, dir.path());
    command
        .args(["generate", "--batch", "-q", "--parallel", parallel])
        .stdin(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap());
    for n in 0..3 {
        writeln!(to, "{}", json!({"id": n, "prompt": "Hi", "max_tokens": 3})).unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["id"], n);
    }
    drop(to);
    assert_eq!(shell::code(child.wait().unwrap()), 0);
}

/// After an interruption, `--resume` files have complete lines only, and an `-o` file does not
/// appear.
#[cfg(unix)]
#[test]
fn an_interruption_cuts_between_lines() {
    ["1", "4"].iter().for_each(|n| interruption_cuts(n));
}

#[cfg(unix)]
fn interruption_cuts(parallel: &str) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), records()).unwrap();
    let mut command = command(BINARY, dir.path());
    command.args([
        "generate",
        "--batch",
        "in.jsonl",
        "--resume",
        "out.jsonl",
        "-q",
        "--parallel",
        parallel,
    ]);
    let mut child = command.spawn().unwrap();
    while fs::metadata(dir.path().join("out.jsonl")).map_or(0, |m| m.len()) < 500 {
        assert_eq!(child.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(shell::code(child.wait().unwrap()), 130);
    let text = fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
    assert!(text.ends_with('\n') && text.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()));
    let mut whole = shell::command(BINARY, dir.path());
    whole.args(["generate", "--batch", "-", "-o", "whole.jsonl", "-q", "--parallel", parallel]);
    wait(whole, b"{\"prompt\": \"Hi\", \"max_tokens\": 3}\n").ok();
    assert_eq!(fs::read_to_string(dir.path().join("whole.jsonl")).unwrap().lines().count(), 1);
}
