//! Bodies that real clients send, each with the outcome that is expected of it.
//!
//! `bodies/*.jsonl` has a body on each line: {"client", "path", "body", "expect"}. `expect` is 200,
//! or {"status", "field"}. Answers are cut to a few tokens.

use crate::server::Server;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most tokens of an answer.
const MOST: u64 = 3;
/// Requests at once.
const THREADS: usize = 8;

/// Words of the command line, of Rust and of grammars, which no client may see.
const INTERNAL: [&str; 12] = [
    "--",
    "usize",
    "u32",
    "u64",
    "f32",
    "Option<",
    "untagged",
    "struct ",
    "%json",
    "Lark",
    "call_0",
    "arguments_0",
];

/// Words before a remedy, or before the values that are right.
const REMEDY: [&str; 4] = [": ", " (", " must be ", " is from "];

fn bodies() -> Vec<Value> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/bodies");
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let texts = files.iter().map(|file| fs::read_to_string(file).unwrap());
    texts.flat_map(|text| text.lines().map(read).collect::<Vec<Value>>()).collect()
}

fn read(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// Cuts the answer that a body asks for, by the name that its API has for the limit.
fn cut(path: &str, body: &mut Value) {
    let path = path.split('?').next().unwrap();
    let place = match path.trim_end_matches('/').rsplit('/').next().unwrap() {
        "responses" => "/max_output_tokens",
        "chat" | "generate" => "/options/num_predict",
        "completions" if body.get("max_completion_tokens").is_some() => "/max_completion_tokens",
        "completions" | "messages" => "/max_tokens",
        _ => return,
    };
    let old = body.pointer(place).and_then(Value::as_u64).unwrap_or(MOST);
    let new = json!(old.min(MOST));
    if let Some(place) = place.strip_prefix("/options/") {
        if body["options"].is_null() {
            body["options"] = json!({});
        }
        body["options"][place] = new;
    } else {
        body[&place[1..]] = new;
    }
}

/// Returns what is wrong with a reply.
fn fault(server: &Server, record: &Value) -> Option<String> {
    let path = record["path"].as_str().unwrap();
    let mut body = record["body"].clone();
    let expected = record["expect"].as_u64().or(record["expect"]["status"].as_u64()).unwrap();
    if expected == 200 && body.is_object() {
        cut(path, &mut body);
    }
    let reply = server.post(path, &body);
    if u64::from(reply.status) != expected {
        return Some(format!("{} and not {expected}: {}", reply.status, reply.body));
    }
    if expected == 200 {
        let is_whole = !reply.body.contains("\"error\":{") && !reply.body.contains("event: error");
        return (!is_whole).then(|| format!("fails behind its head: {}", reply.body));
    }
    let error = reply.json()["error"].clone();
    let message = error["message"].as_str().or(error.as_str()).unwrap_or_default();
    let field = record["expect"]["field"].as_str().unwrap();
    let spelled = |text: &str| text.replace(['-', ' '], "_");
    let has_field = spelled(message).contains(&spelled(field)) || error["param"] == field;
    let has_remedy = REMEDY.iter().any(|words| message.contains(words));
    let internal = INTERNAL.iter().find(|word| message.contains(*word));
    match internal {
        Some(word) => Some(format!("has {word:?}: {message}")),
        None if !has_field => Some(format!("does not name {field}: {message}")),
        None if !has_remedy => Some(format!("no remedy: {message}")),
        None => None,
    }
}

#[test]
fn what_real_clients_send_is_answered_or_refused_as_expected() {
    let bodies = bodies();
    // The longest of them need more positions than the demo was trained for.
    let server = Server::start(&["--ctx-size", "16384"]);
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(record) = bodies.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Some(fault) = fault(&server, record) {
                        let (client, path) = (&record["client"], &record["path"]);
                        let text = format!("{client} {path}: {fault}\n  {}", record["body"]);
                        faults.lock().unwrap().push(text);
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    let (wrong, all) = (faults.len(), bodies.len());
    let clients: BTreeSet<_> = bodies.iter().map(|b| b["client"].as_str().unwrap()).collect();
    println!("{all} bodies of {} clients: {} as expected", clients.len(), all - wrong);
    assert!(faults.is_empty(), "{wrong} of {all}:\n{}", faults.join("\n"));
    // The log has the reason of each refusal, and each note once.
    let said = server.said();
    let refused = said.lines().filter(|line| line.contains(" refused, "));
    assert!(refused.clone().count() > 20, "{said}");
    assert!(refused.clone().all(|line| line.contains(" s: ")), "{said}");
    let notes: Vec<&str> = said.lines().filter(|line| line.starts_with("note: ")).collect();
    let different: BTreeSet<&&str> = notes.iter().collect();
    assert!(notes.len() > 5 && different.len() == notes.len(), "{notes:?}");
}
