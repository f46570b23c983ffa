//! Requests for more than a client's share. Each is refused or limited, the server continues, and
//! other clients get the text of `gemma generate` at the same time.

use super::CHAT;
use super::server::{Server, request};
use super::shell::{gemma_in, with_model};
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The demo's turns, and a message that the template expands to 32 MB of text.
const TEMPLATE: &str = "{% if 'AMPLIFY' in messages[0].content %}\
    {% set n = namespace(a='xxxxxxxx') %}\
    {% for i in range(22) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}{% else %}\
    {{ bos_token }}{% for m in messages %}\
    <start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n\
    {% endfor %}<start_of_turn>model\n{% endif %}";

/// Address space of the server in bytes.
const SPACE: u64 = 2 << 30;
/// Limit of another client's wait, in a run with `GEMMA_SERVE_ROUNDS` on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(2);

fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": 8});
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}

/// Returns attacks: a path, a body, and whether the client waits for the answer.
fn attacks() -> Vec<(&'static str, Value, bool)> {
    let lark = |terms: usize| {
        let terms: Vec<String> = (0..terms).map(|n| format!("/.*{n}.*/")).collect();
        format!("start: A\nA: {}\n", terms.join(" & "))
    };
    let regex = |text: String| chat("Hi.", json!({"regex": text}));
    let echo = json!({"prompt": "x ".repeat(7_000_000), "n": 64, "echo": true});
    let many = json!({"prompt": vec![""; 1_000_000], "n": 64});
    let chances = json!({"n": 64, "max_tokens": 1024, "ignore_eos": true, "logprobs": true,
        "top_logprobs": 20});
    let pattern = json!({"json_schema": {"type": "string", "pattern": "a?".repeat(20_000)}});
    let numbers = json!({"tokens": vec![7; 1_000_000]});
    vec![
        (CHAT, regex("a?".repeat(60_000)), true),
        (CHAT, regex("(a|b)?".repeat(40_000)), true),
        (CHAT, chat("Hi.", pattern), true),
        (CHAT, regex("(a*)*".repeat(20_000)), true),
        (CHAT, chat("Hi.", json!({"grammar": lark(150)})), true),
        (CHAT, chat("Hi.", json!({"grammar": lark(300)})), false),
        (CHAT, chat("Hi.", json!({"grammar": "start: \"a\"{1000000000}"})), true),
        ("/v1/completions", many, true),
        ("/v1/completions", echo, true),
        (CHAT, chat("Tell me a story.", chances), false),
        (CHAT, chat("AMPLIFY", json!({})), true),
        ("/detokenize", numbers, true),
    ]
}

/// Returns requests of other clients, each with the equivalent options of `gemma generate`.
pub fn questions() -> [(Value, Vec<&'static str>); 3] {
    let object = "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"}},\
        \"required\":[\"a\"]}";
    let schema: Value = serde_json::from_str(object).unwrap();
    [
        (json!({}), vec![]),
        (json!({"json_schema": schema}), vec!["--json-schema", object]),
        (json!({"regex": "[a-z]{3}( [a-z]+){2}"}), vec!["--regex", "[a-z]{3}( [a-z]+){2}"]),
    ]
}

pub fn keyed(server: &Server, key: &str, path: &str, body: &Value) -> Vec<u8> {
    let headers = format!("X-Api-Key: {key}\r\n");
    request(&server.address, "POST", path, &headers, &body.to_string())
}

/// Runs all attacks once, or `GEMMA_SERVE_ROUNDS` times.
#[test]
fn a_client_takes_no_more_than_its_part() {
    let rounds = std::env::var("GEMMA_SERVE_ROUNDS").ok().map(|n| n.parse::<usize>().unwrap());
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[("chat_template.jinja", TEMPLATE.as_bytes())]);
    let expected = questions().map(|(_, options)| {
        let args = ["generate", "-m", "m", "-q", "--temp", "0", "-n", "20", "Say something."];
        gemma_in(dir.path(), &[&args[..], &options].concat(), b"").text().to_owned()
    });
    let options = ["-m", "m", "--api-key", "ill", "--api-key", "good", "--client-timeout", "10"];
    let server = Server::start_in(dir.path(), &options, limited);
    // Connections that send nothing, or the beginning of a large body.
    let idle: Vec<_> = (0..8)
        .map(|n| {
            let mut stream = server.connect();
            let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\
                X-Api-Key: ill\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            if n % 2 == 0 {
                let _ = stream.write_all(format!("10000\r\n{}\r\n", " ".repeat(65_536)).as_bytes());
            }
            stream
        })
        .collect();
    let over = AtomicBool::new(false);
    let slowest = std::thread::scope(|scope| {
        let others: Vec<_> = (0..questions().len())
            .map(|which| {
                let (server, expected, over) = (&server, &expected, &over);
                scope.spawn(move || ask_until(server, which, &expected[which], over))
            })
            .collect();
        // The other clients end even if an attack panics.
        let over = Over(&over);
        let mut rng = SmallRng::seed_from_u64(7);
        for _ in 0..rounds.unwrap_or(1) {
            let mut attacks = attacks();
            attacks.shuffle(&mut rng);
            let (server, attacks) = (&server, &attacks);
            std::thread::scope(|scope| {
                for lane in 0..4 {
                    scope.spawn(move || {
                        attacks
                            .iter()
                            .skip(lane)
                            .step_by(4)
                            .for_each(|attack| send(server, attack));
                    });
                }
            });
        }
        drop(over);
        others.into_iter().map(|other| other.join().unwrap()).max().unwrap()
    });
    drop(idle);
    println!("the slowest of the others' answers took {} ms", slowest.as_millis());
    if rounds.is_some() {
        assert!(slowest < PATIENCE, "another client waited {slowest:?}");
    }
    let said = server.said();
    assert!(!said.contains("panicked"), "{said}");
}

/// Ends the other clients when it is dropped, also after a panic.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub fn limited(command: &mut std::process::Command) {
    let limit = libc::rlimit { rlim_cur: SPACE, rlim_max: SPACE };
    // SAFETY: a plain system call in the child, on a value of its own.
    unsafe {
        command.pre_exec(move || {
            libc::setrlimit(libc::RLIMIT_AS, &limit);
            Ok(())
        });
    }
}

/// Sends an attack. Its answer must not be a server error.
fn send(server: &Server, (path, body, waits): &(&str, Value, bool)) {
    let mut stream = server.connect();
    let _ = stream.write_all(&keyed(server, "ill", path, body));
    if *waits {
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        let shown: String = body.to_string().chars().take(80).collect();
        assert!(said.starts_with("HTTP/1.1 4"), "{shown}: {}", said.lines().next().unwrap_or(""));
    } else {
        std::thread::sleep(Duration::from_secs(4));
    }
}

/// Sends a question and checks the answer. Returns the time that it took.
pub fn ask(server: &Server, which: usize, expected: &str) -> Duration {
    let (more, _) = questions()[which].clone();
    let mut body = chat("Say something.", more);
    body["max_tokens"] = 20.into();
    // One of the three bodies is larger than the part that is read without a share of the memory.
    if which == 0 {
        body["metadata"] = json!({"padding": "x".repeat(80_000)});
    }
    let begun = Instant::now();
    let reply = server.send(&keyed(server, "good", CHAT, &body)).expect("an answer");
    let time = begun.elapsed();
    let reply = reply.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], expected, "{reply}");
    time
}

/// Sends the same question repeatedly. Returns the longest time of an answer.
pub fn ask_until(server: &Server, which: usize, expected: &str, over: &AtomicBool) -> Duration {
    let mut slowest = Duration::ZERO;
    while !over.load(Ordering::Relaxed) {
        slowest = slowest.max(ask(server, which, expected));
    }
    slowest
}

/// Returns values that a field may not have, and some that it may.
fn value(rng: &mut SmallRng) -> Value {
    let values = [
        Value::Null,
        json!(-1),
        json!(0),
        json!(1e-39),
        json!(1e300),
        json!(u64::MAX),
        json!(true),
        json!(""),
        json!("a?"),
        json!("\u{0}\u{9b}"),
        json!([]),
        json!([[], {}, null]),
        json!({}),
        json!({"type": "object", "properties": 5}),
        json!({"type": "function", "function": {"name": "f", "parameters": [1]}}),
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}]),
        json!({"a": {"b": [{"c": "d"}]}}),
    ];
    values.choose(rng).unwrap().clone()
}

/// Changes a value somewhere in a body.
fn mutate(body: &mut Value, rng: &mut SmallRng) {
    match body {
        Value::Object(fields) if !fields.is_empty() && rng.random_bool(0.8) => {
            let at = rng.random_range(0..fields.len());
            mutate(fields.values_mut().nth(at).unwrap(), rng);
        }
        Value::Array(items) if !items.is_empty() && rng.random_bool(0.8) => {
            let at = rng.random_range(0..items.len());
            mutate(&mut items[at], rng);
        }
        other => *other = value(rng),
    }
}

/// No mutated body causes an error of the server.
#[test]
fn mutated_bodies_are_no_fault_of_the_server() {
    let server = Server::start(&["--log", "off", "--ctx-size", "256"]);
    let messages = json!([{"role": "user", "content": "Hi."}]);
    let tool = json!({"name": "f", "description": "", "parameters": {"type": "object"}});
    let full = [
        (
            CHAT,
            json!({"messages": messages, "max_tokens": 3, "temperature": 1, "top_p": 0.9,
            "top_k": 5, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 1, "n": 2, "stop": ["x"],
            "logprobs": true, "top_logprobs": 2, "stream": false,
            "tools": [{"type": "function", "function": tool}], "tool_choice": "auto",
            "stream_options": null, "user": "u"}),
        ),
        (
            CHAT,
            json!({"messages": messages, "max_tokens": 3, "response_format":
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object",
            "properties": {"a": {"type": "string", "pattern": "a+"}}}}}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": ["a", "b"], "max_tokens": 2, "n": 1, "logprobs": 1,
            "echo": false, "regex": "a+", "suffix": ""}),
        ),
        (
            "/v1/responses",
            json!({"input": messages, "max_output_tokens": 3, "tools": [],
            "temperature": 0.5}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 3, "system": "s",
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"}}),
        ),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"content": "a", "add_special": true})),
        ("/detokenize", json!({"tokens": [1, 2, 3]})),
    ];
    let mut rng = SmallRng::seed_from_u64(11);
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    for _ in 0..500 {
        let (path, mut body) = full.choose(&mut rng).unwrap().clone();
        for _ in 0..rng.random_range(1..4) {
            mutate(&mut body, &mut rng);
        }
        let reply = server.post(path, &body);
        assert!(reply.status < 500, "{path} {body}: {reply:?}");
        *statuses.entry(reply.status).or_default() += 1;
    }
    assert!(statuses.len() > 1 && statuses[&200] > 10, "{statuses:?}");
    assert!(Path::new(&format!("/proc/{}", server.child.id())).exists());
}
