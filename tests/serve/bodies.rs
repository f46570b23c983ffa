//! Bodies of real clients, each with the expected outcome.
//!
//! `bodies/*.jsonl` has a body on each line: {"client", "path", "body", "expect"}. `expect` is 200,
//! or {"status", "field"}. Answers are limited to a few tokens.
//!
//! By default every eighth body is compared with the answer of a batch; `GEMMA_BODIES=all` compares
//! all.

use crate::server::Server;
use crate::shell::gemma;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Limit of tokens of an answer.
const MOST: u64 = 3;
/// Number of requests at once.
const THREADS: usize = 8;

/// Words of the command line, of Rust and of grammars, which messages to clients must not contain.
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

/// Text that comes before a remedy, or before the valid values.
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

/// Limits the answer of a body, with the field of its API.
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

/// Returns what is wrong with a reply, if anything.
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
        return (!is_whole).then(|| format!("fails after its head: {}", reply.body));
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
    // The longest bodies need more positions than the demo was trained for.
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

/// Fields that differ from response to response.
const OWN: [&str; 6] = ["id", "call_id", "created", "created_at", "completed_at", "cached_tokens"];

/// Removes fields that may differ between two responses.
fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            OWN.iter().for_each(|name| drop(fields.remove(*name)));
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

#[test]
fn a_batch_answers_a_body_as_the_server_does() {
    let of_openai = |path: &str| {
        path.contains("completions") || path.trim_end_matches('/').ends_with("responses")
    };
    let mut bodies = bodies();
    bodies.retain(|record| of_openai(record["path"].as_str().unwrap()));
    if std::env::var("GEMMA_BODIES").as_deref() != Ok("all") {
        bodies = bodies.into_iter().step_by(8).collect();
    }
    let mut lines = String::new();
    for (n, record) in bodies.iter_mut().enumerate() {
        let path = record["path"].as_str().unwrap().split('?').next().unwrap().to_owned();
        let body = &mut record["body"];
        if body.is_object() {
            cut(&path, body);
            body["seed"] = json!(7);
        }
        let url = path.trim_end_matches('/');
        lines += &json!({"custom_id": n, "method": "POST", "url": url, "body": body}).to_string();
        lines += "\n";
        // A batch returns complete answers for requests that a server would stream.
        if body["stream"] == true {
            body["stream"] = false.into();
        }
    }
    let options = ["--ctx-size", "16384", "--parallel", "2"];
    let batch =
        gemma(&[&["generate", "--batch", "-"][..], &options].concat(), lines.as_bytes()).ok();
    let replies: Vec<Value> = batch.text().lines().map(read).collect();
    assert_eq!(replies.len(), bodies.len());
    let server = Server::start(&options);
    let mut wrong = Vec::new();
    for (record, reply) in bodies.iter().zip(&replies) {
        let theirs = server.post(record["path"].as_str().unwrap(), &record["body"]);
        let (mut whole, mut body) = (theirs.json(), reply["response"]["body"].clone());
        strip(&mut whole);
        strip(&mut body);
        if reply["response"]["status_code"] != theirs.status || body != whole {
            wrong.push(format!("{}\n  server: {whole}\n  batch: {reply}", record["body"]));
        }
    }
    println!("{} bodies: {} alike", bodies.len(), bodies.len() - wrong.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), bodies.len(), wrong.join("\n"));
}
