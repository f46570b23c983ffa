//! A restarted server reads only prompts that no earlier server has read.

use crate::server::Server;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn start(dir: &Path, more: &[&str]) -> Server {
    Server::start_in(dir, &[&["--ctx-size", "2048", "--parallel", "2"], more].concat(), |_| {})
}

/// Returns the answer, and the number of tokens of the prompt that were read.
fn ask(server: &Server, question: &str) -> (String, u64) {
    let rules: String = (0..60).map(|i| format!("Rule {i}: say what is known. ")).collect();
    let messages = json!([{"role": "user", "content": rules + question}]);
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 8});
    let reply: Value = server.post("/v1/chat/completions", &body).ok();
    let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
    (reply["choices"][0]["message"]["content"].to_string(), cached.as_u64().unwrap())
}

#[cfg(unix)]
#[test]
fn a_server_that_starts_again_keeps_its_prompts() {
    let root = tempfile::tempdir().unwrap();
    let (first, second) = ("What is the capital of France?", "Why is the sky blue?");
    let plain = start(root.path(), &[]);
    let want = [first, second].map(|question| ask(&plain, question).0);
    drop(plain);
    let kept = ["--cache-dir", "cache"];
    let server = start(root.path(), &kept);
    assert_eq!(ask(&server, first), (want[0].clone(), 0));
    // The server writes the rest of the prompts before it ends.
    server.signal(libc::SIGTERM);
    let (code, said) = server.wait();
    assert_eq!(code, 143, "{said}");
    assert!(fs::read_dir(root.path().join("cache")).unwrap().count() > 2);

    let server = start(root.path(), &kept);
    for (question, want) in [second, first].iter().zip([&want[1], &want[0]]) {
        let (text, cached) = ask(&server, question);
        assert!(&text == want && cached >= 256, "{text}, {cached}");
    }
    // Several texts at once, before any prompt is on disk.
    fs::remove_dir_all(root.path().join("cache")).unwrap();
    let server = start(root.path(), &kept);
    let server = &server;
    std::thread::scope(|scope| {
        let ask = |question: &'static str| scope.spawn(move || self::ask(server, question).0);
        let all = [first, second, first].map(ask);
        let texts = all.map(|one| one.join().unwrap());
        assert_eq!(texts, [0, 1, 0].map(|i: usize| want[i].clone()));
    });
}
