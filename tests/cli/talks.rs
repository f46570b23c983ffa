//! Talks: conversations that a chat keeps, and text files that are part of messages.

use crate::shell;
use crate::terminals::Terminal;
use serde_json::{Value, json};
use shell::{Run, gemma_in};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Starts a chat with these options and waits for its first prompt.
fn chat(dir: &Path, more: &[&str]) -> Terminal {
    let args = ["chat", "-n", "8", "--seed", "2", "--ignore-eos"];
    let mut chat = Terminal::open(&[&args[..], more].concat(), &[], dir);
    chat.until("Ctrl-D leaves");
    chat
}

fn leave(mut chat: Terminal) -> String {
    chat.keys("/quit\r");
    let (code, text) = chat.end();
    assert_eq!(code, Some(0), "{text}");
    text
}

fn talks(dir: &Path, args: &[&str]) -> Run {
    gemma_in(dir, &[&["chat"], args].concat(), b"")
}

fn listed(dir: &Path) -> Vec<Value> {
    talks(dir, &["--list", "--json"]).ok().json()["talks"].as_array().unwrap().clone()
}

fn read(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn nothing_is_kept_unless_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut one = chat(dir.path(), &[]);
    one.prompt();
    one.ask("What is a hash map?\r");
    let said = one.ask("/save talk.json\r");
    assert!(said.contains("saved as talk.json") && said.contains("keep-talks = true"), "{said}");
    assert!(!one.ask("/save talk.md\r").contains("keep-talks"), "it is said once");
    leave(one);
    assert!(!dir.path().join(".local").exists());
    let markdown = fs::read_to_string(dir.path().join("talk.md")).unwrap();
    assert!(
        markdown.starts_with("## User\n\nWhat is a hash map?\n\n## Assistant\n\n"),
        "{markdown}"
    );
    talks(dir.path(), &["--continue"]).fails(2, &["a conversation at a terminal"]);
    talks(dir.path(), &["-c"]).fails(2, &["size of the context", "gemma chat --continue"]);
    let (code, text) = Terminal::open(&["chat", "--continue"], &[], dir.path()).end();
    assert!(code == Some(2) && text.contains("there is no talk"), "{text}");
    assert!(text.contains("keep-talks = true"), "{text}");
    let none = talks(dir.path(), &["--list"]).ok();
    assert!(none.text().is_empty() && none.err.contains("--keep-talks"), "{none:?}");
    // A file in the working directory cannot turn this on; the user's own file can.
    fs::write(dir.path().join("gemma.toml"), "[chat]\nkeep-talks = true\n").unwrap();
    talks(dir.path(), &["--list"]).fails(2, &["gemma.toml, line 2", "conversations are kept"]);
    fs::create_dir_all(dir.path().join(".config/gemma")).unwrap();
    fs::rename(dir.path().join("gemma.toml"), dir.path().join(".config/gemma/config.toml"))
        .unwrap();
    let mut kept = chat(dir.path(), &[]);
    assert!(kept.prompt().contains("(the conversation is kept as a talk)"));
    kept.ask("Hi\r");
    leave(kept);
    assert_eq!(listed(dir.path()).len(), 1);
}

#[test]
fn a_talk_goes_on_in_the_next_chat() {
    let dir = tempfile::tempdir().unwrap();
    let mut one = chat(dir.path(), &["--keep-talks", "-s", "Be brief."]);
    one.prompt();
    one.ask("What is a hash map?\r");
    // Starts the second talk of one chat.
    one.ask("/reset\r");
    one.ask("Why is the sky blue?\r");
    leave(one);
    let list = listed(dir.path());
    let firsts: Vec<_> = list.iter().map(|talk| talk["first"].as_str().unwrap()).collect();
    assert_eq!(firsts, ["Why is the sky blue?", "What is a hash map?"], "the last comes first");
    let id = |n: usize| list[n]["id"].as_str().unwrap();
    let file = |n: usize| Path::new(list[n]["file"].as_str().unwrap());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(file(0)), mode(file(0).parent().unwrap())), (0o600, 0o700));

    let mut two = chat(dir.path(), &["--continue", "And why red?"]);
    let text = two.prompt();
    assert!(text.contains("(1 message with its answer; the last: "), "{text}");
    assert!(text.contains(&format!("(the conversation is kept as talk {})", id(0))), "{text}");
    leave(two);
    let first = format!("--continue={}", id(1));
    let mut three = chat(dir.path(), &[&first]);
    three.prompt();
    three.ask("And a hash?\r");
    three.ask("/undo\r");
    leave(three);
    let contents =
        |n: usize| read(file(n)).iter().map(|m| m["content"].clone()).collect::<Vec<_>>();
    let sky = contents(0);
    assert_eq!(
        (&sky[0], &sky[1], &sky[3]),
        (&"Be brief.".into(), &"Why is the sky blue?".into(), &"And why red?".into())
    );
    assert_eq!((contents(1).len(), sky.len()), (3, 5), "what was undone is not in the file");

    // The talk that changed last is now the first one.
    let text = talks(dir.path(), &["--list"]).ok();
    let lines: Vec<_> = text.text().lines().collect();
    assert!(
        lines[0].starts_with(id(1)) && lines[0].ends_with("1  What is a hash map?"),
        "{lines:?}"
    );
    assert!(
        lines[1].starts_with(id(0)) && lines[1].ends_with("2  Why is the sky blue?"),
        "{lines:?}"
    );
    let export = talks(dir.path(), &["--export", id(0)]).ok();
    assert!(export.text().starts_with("## System\n\nBe brief.\n\n## User\n\nWhy is"), "{export:?}");
    assert_eq!(
        talks(dir.path(), &["--export", id(0), "--json"]).ok().out,
        fs::read(file(0)).unwrap()
    );
    talks(dir.path(), &["--delete", "nonsense"])
        .fails(2, &["there is no talk \"nonsense\"", "--list"]);
    talks(dir.path(), &["--delete", ""]).fails(2, &["needs the id"]);
    talks(dir.path(), &["--json"]).fails(2, &["--list or --export"]);
    talks(dir.path(), &["--delete", id(0)]).ok();
    assert_eq!(listed(dir.path()).len(), 1);
    // A talk is deleted when all its messages are undone.
    let mut four = chat(dir.path(), &["--continue"]);
    four.prompt();
    assert!(four.ask("/undo\r").contains("forgotten"));
    leave(four);
    assert_eq!(listed(dir.path()).len(), 0);
}

#[test]
fn a_history_file_goes_on_and_is_never_overwritten_with_what_it_did_not_have() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my talk.json");
    let args = ["--history", "my talk.json"];
    let mut one = chat(dir.path(), &args);
    assert!(one.prompt().contains("(the conversation is kept in my talk.json)"));
    one.ask("What is a hash map?\r");
    leave(one);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut two = chat(dir.path(), &args);
    assert!(two.prompt().contains("(1 message with its answer; the last: "));
    two.ask("Why?\r");
    assert_eq!(read(&path).len(), 4);
    // Another conversation is not written to the file before it gets a new answer.
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let other = json!([message("user", "Hello"), message("assistant", "Hi")]);
    fs::write(dir.path().join("other.json"), other.to_string()).unwrap();
    assert!(two.ask("/load other.json\r").contains("the next answer replaces the conversation in"));
    assert_eq!(read(&path).len(), 4);
    two.ask("Why?\r");
    assert_eq!(read(&path)[0]["content"], "Hello");
    fs::write(&path, "[]\n").unwrap();
    let said = two.ask("Really?\r");
    assert!(said.contains("was changed by another program"), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "[]\n");
    leave(two);
    assert!(!dir.path().join(".local").exists());
    for (text, words) in [
        ("{\"messages\": []}", "is not a list of messages"),
        ("\u{0}", "my talk.json"),
        ("[{\"role\": \"assistant\", \"content\": \"Hi\"}]", "where a user's is expected"),
    ] {
        fs::write(&path, text).unwrap();
        let (code, said) = Terminal::open(&[&["chat"], &args[..]].concat(), &[], dir.path()).end();
        assert!(code == Some(3) && said.contains(words), "{code:?}: {said}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn a_text_file_goes_with_the_next_message() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("my notes (1).txt"), "Tea at five.\n").unwrap();
    fs::write(dir.path().join("binary"), b"\x7fELF\0\0\xff").unwrap();
    fs::write(dir.path().join("long.txt"), "word ".repeat(4000)).unwrap();
    fs::write(dir.path().join("huge.txt"), "word ".repeat(1 << 20)).unwrap();
    let mut one = chat(dir.path(), &[]);
    one.prompt();
    assert!(one.ask("/file binary\r").contains("is a binary file, not text"));
    assert!(one.ask("/file absent.txt\r").contains("cannot read absent.txt"));
    assert!(one.ask("/file long.txt\r").contains("with long.txt the message has"));
    assert!(one.ask("/file huge.txt\r").contains("more than the context holds"));
    // Tab completes the name.
    let said = one.ask("/file my\t\r");
    assert!(said.contains("(my notes (1).txt is added to your next message, "), "{said}");
    assert!(said.contains("cannot summarise"), "the demo says so: {said}");
    assert!(one.ask("/undo\r").contains("is removed from your next message"));
    one.ask("/file 'my notes (1).txt'\r");
    one.ask("When is tea?\r");
    one.ask("And now?\r");
    one.ask("/save talk.json\r");
    leave(one);
    let talk = read(&dir.path().join("talk.json"));
    let want = "my notes (1).txt:\n```\nTea at five.\n```\n\nWhen is tea?";
    assert_eq!((&talk[0]["content"], &talk[2]["content"]), (&want.into(), &"And now?".into()));
}
