//! `--cache-dir`: a run does not read again what an earlier run read, and its text stays the same.

use crate::common::{Dims, Form, TinyModel};
use crate::shell::{bash, gemma_in};
use gemma::checkpoint::Dtype;
use serde_json::Value;
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const PAGE: u64 = 256;

fn report() -> String {
    (0..60)
        .map(|i| format!("In year {i} the harvest was {} tons of wheat. ", i * 37 % 90))
        .collect()
}

/// Returns the result of a question about the report.
fn ask(dir: &Path, question: &str, more: &[&str]) -> Value {
    let prompt = report() + question;
    gemma_in(dir, &[&["generate", "--json", "-n", "8", &prompt], more].concat(), b"").ok().json()
}

fn cached(result: &Value) -> u64 {
    result["timings"]["cached_tokens"].as_u64().unwrap()
}

/// Returns the tokens in complete pages of the prompt. The newest token does not count.
fn pages(result: &Value) -> u64 {
    (result["usage"]["prompt_tokens"].as_u64().unwrap() - 1) / PAGE
}

/// Asserts that only this user can read a directory and its files.
#[cfg(unix)]
fn assert_closed(directory: &Path) {
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(directory), 0o700);
    for file in fs::read_dir(directory).unwrap() {
        assert_eq!(mode(&file.unwrap().path()), 0o600);
    }
}

#[test]
fn the_next_run_does_not_read_the_report_again() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let keep = ["--cache-dir", "cache"];
    let plain = ask(dir, "Which year was best?", &[]);
    assert!(cached(&plain) == 0 && pages(&plain) >= 2 && !dir.join("cache").exists());
    let first = ask(dir, "Which year was best?", &keep);
    let second = ask(dir, "Which year was best?", &keep);
    assert_eq!((cached(&first), cached(&second)), (0, pages(&plain) * PAGE));
    assert!([&first, &second].iter().all(|result| result["text"] == plain["text"]));
    #[cfg(unix)]
    assert_closed(&dir.join("cache"));
    let question = "And how much wheat was there in the last year of the report, in tons?";
    let (plain, other) = (ask(dir, question, &[]), ask(dir, question, &keep));
    assert!(cached(&other) + PAGE >= pages(&first) * PAGE, "{other}");
    assert_eq!(other["text"], plain["text"]);
    // Draft models read the prompt again, and a batch stores prompts too.
    let drafted = ask(dir, question, &[&keep[..], &["--draft", "off"]].concat());
    assert_eq!((cached(&drafted), &drafted["text"]), (pages(&drafted) * PAGE, &plain["text"]));
    let record = serde_json::json!({"prompt": report() + question, "max_tokens": 8}).to_string();
    let batch = ["generate", "--batch", "--cache-dir", "cache"];
    let reply = gemma_in(dir, &batch, record.as_bytes()).ok().json();
    assert_eq!(reply["text"], plain["text"]);
    // Another format of the KV cache has other pages.
    let kv = ask(dir, question, &[&keep[..], &["--kv", "q8"]].concat());
    assert_eq!(cached(&kv), 0);
}

#[test]
fn another_model_has_pages_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gemma4/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    json["added_tokens"].as_array_mut().unwrap().retain(|t| t["id"].as_u64().unwrap() < 2048);
    json["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < 2048);
    for (name, seed) in [("a", 5), ("b", 6)] {
        let dims = Dims { vocab: 2048, dim: 64, ffn_dim: 64, ..Dims::default() };
        TinyModel::new(dims, seed).write(&dir.join(name), Form::TextV4, Dtype::BF16, 1);
        fs::write(dir.join(name).join("tokenizer.json"), json.to_string()).unwrap();
    }
    let more = |model| ["--cache-dir", "cache", "--raw", "--draft", "off", "-m", model];
    let ask = |model| ask(dir, "", &more(model));
    let first = ask("a");
    assert!(pages(&first) > 0);
    assert_eq!([cached(&ask("a")), cached(&ask("b"))], [pages(&first) * PAGE, 0]);
    assert_eq!(cached(&ask("b")), pages(&first) * PAGE);
}

#[cfg(unix)]
#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let root = tempfile::tempdir().unwrap();
    let open = root.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).unwrap();
    let ask = |dir| gemma_in(root.path(), &["generate", "Hi", "--cache-dir", dir], b"");
    ask("open").fails(2, &["open", "other users", "chmod 700"]);
    fs::write(root.path().join("file"), "").unwrap();
    ask("file").fails(2, &["file"]);
    // If the disk is full, the answer is printed, with a note.
    fs::write(root.path().join("prompt"), report()).unwrap();
    let script = "ulimit -f 1; \"$G\" generate -f prompt -n 8 --cache-dir cache";
    let run = bash(root.path(), script).ok();
    assert!(run.err.contains("note: the prompt cache is not written"), "{}", run.err);
    assert_eq!(run.text().trim_end(), ask_text(root.path()));
    assert_eq!(fs::read_dir(root.path().join("cache")).unwrap().count(), 0);
}

fn ask_text(dir: &Path) -> String {
    let run = gemma_in(dir, &["generate", "-f", "prompt", "-n", "8"], b"").ok();
    run.text().trim_end().to_owned()
}
