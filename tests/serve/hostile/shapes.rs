//! Bodies with many items in one field. The server's processor time and memory grow in proportion
//! to the body for every field, and another client is answered at the same time.

use super::CHAT;
use super::metered::{Over, keyed, limited};
use super::server::{Server, read_reply};
use crate::gemma4;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Ratio of the items of a large body to those of a small one.
const GROWTH: usize = 8;
/// Limit of the growth of the processor time: between `GROWTH`, which linear work has, and its
/// square. Linear work that outgrows a cache has been measured to grow by 14.
const MOST_GROWTH: u32 = 22;
/// If a small body takes less processor time than this, the growth is not measured.
const LEAST_TIME: Duration = Duration::from_millis(10);
/// Limits of memory: bytes per byte of the body, and bytes per request.
const MEMORY_OF_BYTE: u64 = 300;
const MEMORY_OF_REQUEST: u64 = 64_000_000;

const ROLES: [&str; 2] = ["user", "assistant"];

const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A kind of body: name, path, items of a large body, and the body for a number of items.
type Shape = (&'static str, &'static str, usize, fn(usize) -> Value);

fn list(n: usize, item: impl Fn(usize) -> Value) -> Value {
    (0..n).map(item).collect()
}

fn map(n: usize, item: impl Fn(usize) -> (String, Value)) -> Value {
    (0..n).map(item).collect::<Map<_, _>>().into()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Returns a request for a short answer to one message, with this field.
fn with(name: &str, value: Value) -> Value {
    json!({"messages": [user("Hi.")], "max_tokens": 1, "temperature": 0, name: value})
}

fn talk(messages: Value) -> Value {
    with("messages", messages)
}

fn function(name: String) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Returns a function with these parameters.
pub fn typed(parameters: Value) -> Value {
    with(
        "tools",
        json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]),
    )
}

/// Returns a request for an answer with this schema.
pub fn formed(schema: Value) -> Value {
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    with("response_format", format)
}

fn with_input(input: Value) -> Value {
    json!({"input": input, "max_output_tokens": 1})
}

fn completed(prompt: Value) -> Value {
    json!({"prompt": prompt, "max_tokens": 1, "temperature": 0})
}

fn call(n: usize) -> Value {
    json!({"id": format!("c{n}"), "type": "function",
        "function": {"name": "f", "arguments": "{}"}})
}

pub fn short_functions(n: usize) -> Value {
    with("tools", list(n, |i| json!({"name": format!("{i}")})))
}

/// Returns results of one call.
pub fn results(n: usize) -> Value {
    let calls = json!({"role": "assistant", "content": "", "tool_calls": [call(0)]});
    let result = json!({"role": "tool", "content": "1"});
    talk([vec![user("Hi."), calls], vec![result; n]].concat().into())
}

fn result(n: usize) -> Value {
    json!({"role": "tool", "tool_call_id": format!("c{n}"), "content": "1"})
}

/// Returns references to `n` different parts of the schema.
pub fn many_references(n: usize) -> Value {
    let references = list(n, |i| json!({"$ref": format!("#/x/{i}")}));
    json!({"type": "object", "properties": {"a": {"anyOf": references}}, "x": vec![true; n]})
}

/// Returns many references to one large enumeration, each with another keyword.
pub fn one_reference(n: usize) -> Value {
    let entries = list(20 * n, |i| json!(format!("an entry of the enumeration: {i}")));
    json!({"type": "object", "$defs": {"e": {"enum": entries}}, "properties": {"a": {
        "type": "string", "anyOf": list(n, |_| json!({"$ref": "#/$defs/e"}))}}})
}

fn chain(n: usize) -> Value {
    let next = |i: usize| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", (i + 1) % n)}));
    json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": map(n, next)})
}

fn properties(n: usize) -> Value {
    let names = list(n, |i| json!(format!("p{i}")));
    let all = map(n, |i| (format!("p{i}"), json!({"type": "integer"})));
    json!({"type": "object", "properties": all, "required": names, "additionalProperties": false})
}

fn conjunction(n: usize) -> Value {
    let part = |i: usize| json!({"properties": {format!("p{i}"): {"type": "integer"}}});
    json!({"type": "object", "allOf": list(n, part)})
}

fn choices(n: usize) -> Value {
    let one = |i: usize| json!({"type": "object", "properties": {format!("p{i}"): {"const": i}}});
    json!({"type": "object", "properties": {"a": {"oneOf": list(n, one)}}})
}

fn schemas() -> Vec<Shape> {
    vec![
        ("a function's references", CHAT, 40_000, |n| typed(many_references(n))),
        ("a function's references to one enum", CHAT, 1_000, |n| typed(one_reference(n))),
        ("a function's chain of references", CHAT, 16_000, |n| typed(chain(n))),
        ("a function's parameters", CHAT, 16_000, |n| typed(properties(n))),
        ("a function's allOf", CHAT, 16_000, |n| typed(conjunction(n))),
        ("a function's oneOf", CHAT, 16_000, |n| typed(choices(n))),
        ("a schema's references", CHAT, 40_000, |n| formed(many_references(n))),
        ("a schema's references to one enum", CHAT, 1_000, |n| formed(one_reference(n))),
        ("a schema's chain of references", CHAT, 16_000, |n| formed(chain(n))),
        ("a schema's properties", CHAT, 16_000, |n| formed(properties(n))),
        ("a schema's allOf", CHAT, 16_000, |n| formed(conjunction(n))),
        ("a schema's pattern", CHAT, 1_000_000, |n| {
            formed(json!({"type": "string", "pattern": "a".repeat(n)}))
        }),
        ("a regex", CHAT, 1_000_000, |n| with("regex", "a?".repeat(n / 2).into())),
        ("a grammar", CHAT, 40_000, |n| {
            let rules: String = (0..n).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
            with("grammar", format!("start: r0\n{rules}").into())
        }),
    ]
}

fn functions() -> Vec<Shape> {
    vec![
        ("functions", CHAT, 16_000, |n| with("tools", list(n, |i| function(format!("f{i}"))))),
        ("functions in short", MESSAGES, 60_000, short_functions),
        ("tools of the server's", CHAT, 40_000, |n| {
            with("tools", list(n, |i| json!({"type": format!("t{i}")})))
        }),
        ("allowed functions", CHAT, 20_000, |n| {
            let mut body = with("tools", list(n, |i| json!({"name": format!("f{i}")})));
            let allowed = list(n, |i| json!({"name": format!("f{}", n - i)}));
            body["tool_choice"] = json!({"type": "allowed_tools", "tools": allowed});
            body
        }),
        ("functions of a response", RESPONSES, 20_000, |n| {
            let tool = |i: usize| json!({"type": "function", "name": format!("f{i}")});
            json!({"input": "Hi.", "max_output_tokens": 1, "tools": list(n, tool)})
        }),
        ("older functions", CHAT, 40_000, |n| {
            with("functions", list(n, |i| json!({"name": format!("{i}")})))
        }),
        ("results", CHAT, 100_000, results),
        ("calls and results", CHAT, 15_000, |n| {
            let calls = json!({"role": "assistant", "content": "", "tool_calls": list(n, call)});
            talk([vec![user("Hi."), calls], (0..n).map(result).collect()].concat().into())
        }),
        ("calls and results by turns", CHAT, 10_000, |n| {
            let turn = |i: usize| {
                let calls = json!({"role": "assistant", "content": "", "tool_calls": [call(i)]});
                [calls, result(i)]
            };
            talk([vec![user("Hi.")], (0..n).flat_map(turn).collect()].concat().into())
        }),
        ("results of a response", RESPONSES, 20_000, |n| {
            let result = json!({"type": "function_call_output", "call_id": "c", "output": "1"});
            with_input(list(n, |_| result.clone()))
        }),
        ("results in one message", MESSAGES, 20_000, |n| {
            let result =
                |i| json!({"type": "tool_result", "tool_use_id": format!("{i}"), "content": "1"});
            talk(json!([{"role": "user", "content": list(n, result)}]))
        }),
    ]
}

fn others() -> Vec<Shape> {
    vec![
        ("messages", CHAT, 30_000, |n| {
            talk(list(n, |i| json!({"role": ROLES[i % 2], "content": "a"})))
        }),
        ("messages of one role", CHAT, 30_000, |n| talk(list(n, |_| user("a")))),
        ("system messages", CHAT, 30_000, |n| {
            talk(list(n, |_| json!({"role": "system", "content": "a"})))
        }),
        ("parts of a message", CHAT, 30_000, |n| {
            let parts = list(n, |_| json!({"type": "text", "text": "a"}));
            talk(json!([{"role": "user", "content": parts}]))
        }),
        ("a long message", CHAT, 200_000, |n| talk(json!([user(&"a b".repeat(n / 3))]))),
        ("a long word", CHAT, 200_000, |n| talk(json!([user(&"a".repeat(n))]))),
        ("stops", CHAT, 100_000, |n| with("stop", list(n, |i| json!(format!("{i}"))))),
        ("biases", CHAT, 60_000, |n| with("logit_bias", map(n, |i| (format!("{i}"), json!(1))))),
        ("unknown fields", CHAT, 60_000, |n| {
            let Value::Object(mut body) = with("n", 1.into()) else { unreachable!() };
            body.extend((0..n).map(|i| (format!("x{i}"), Value::Null)));
            body.into()
        }),
        ("metadata", CHAT, 60_000, |n| with("metadata", map(n, |i| (format!("{i}"), json!(1))))),
        ("messages of Anthropic's form", MESSAGES, 30_000, |n| talk(list(n, |_| user("a")))),
        (
            "messages to count",
            "/v1/messages/count_tokens",
            30_000,
            |n| json!({"messages": list(n, |_| user("a"))}),
        ),
        ("parts of the system's message", MESSAGES, 30_000, |n| {
            with("system", list(n, |_| json!({"type": "text", "text": "a"})))
        }),
        ("items", RESPONSES, 30_000, |n| with_input(list(n, |_| user("a")))),
        ("prompts", COMPLETIONS, 200_000, |n| completed(list(n, |_| json!("")))),
        ("prompts of tokens", COMPLETIONS, 100_000, |n| completed(list(n, |_| json!([7])))),
        ("tokens of a prompt", COMPLETIONS, 400_000, |n| completed(list(n, |_| json!(7)))),
        ("a long prompt", COMPLETIONS, 200_000, |n| completed("a b".repeat(n / 3).into())),
        (
            "messages of Ollama's form",
            "/api/chat",
            30_000,
            |n| json!({"messages": list(n, |_| user("a")), "options": {"num_predict": 1}}),
        ),
        ("functions of Ollama's form", "/api/chat", 16_000, |n| {
            let tools = list(n, |i| function(format!("f{i}")));
            json!({"messages": [user("a")], "options": {"num_predict": 1}, "tools": tools})
        }),
        (
            "a prompt of Ollama's form",
            "/api/generate",
            200_000,
            |n| json!({"prompt": "a b".repeat(n / 3), "options": {"num_predict": 1}}),
        ),
        (
            "a context of Ollama's form",
            "/api/generate",
            400_000,
            |n| json!({"prompt": "a", "context": list(n, |_| json!(7))}),
        ),
        ("a text", "/tokenize", 500_000, |n| json!({"content": "a b".repeat(n / 3)})),
        ("tokens", "/detokenize", 250_000, |n| json!({"tokens": list(n, |_| json!(7))})),
        (
            "inputs to embed",
            "/v1/embeddings",
            200_000,
            |n| json!({"input": list(n, |_| json!("a"))}),
        ),
    ]
}

/// Returns the processor time of the server so far.
fn processor_time(server: &Server) -> Duration {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: plain system calls on values of this function.
    unsafe {
        assert_eq!(libc::clock_getcpuclockid(server.child.id() as i32, &mut clock), 0);
        assert_eq!(libc::clock_gettime(clock, &mut time), 0);
    }
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Sends a body. Returns the processor time, and the increase of the peak memory.
fn cost(server: &Server, name: &str, path: &str, body: &Value) -> (Duration, u64) {
    let bytes = keyed(server, "ill", path, body);
    fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").unwrap();
    let (memory, time) = (server.memory(), processor_time(server));
    let mut stream = server.connect();
    stream.write_all(&bytes).unwrap_or_else(|why| panic!("{name}: {why}: {}", server.said()));
    let reply = read_reply(&mut stream);
    let reply = reply.unwrap_or_else(|| panic!("{name}: no answer: {}", server.said()));
    assert!(reply.status < 500, "{name}: {reply:?}");
    (processor_time(server) - time, server.peak_memory().saturating_sub(memory))
}

/// Returns what is wrong with the cost of a shape, if anything. Other tests use the processor too,
/// so a growth counts only if it is measured three times.
fn fault(server: &Server, (name, path, items, body): &Shape) -> Option<String> {
    let (small, large) = (body(items / GROWTH), body(*items));
    let length = large.to_string().len() as u64;
    let mut grown = String::new();
    for _ in 0..3 {
        let (before, _) = cost(server, name, path, &small);
        let (time, memory) = cost(server, name, path, &large);
        println!("{name}: {length} bytes: {before:?}, {time:?}, {} MB", memory / 1_000_000);
        if memory > MEMORY_OF_REQUEST + MEMORY_OF_BYTE * length {
            return Some(format!("{name}: {length} bytes took {memory} bytes of memory"));
        }
        if time <= MOST_GROWTH * before.max(LEAST_TIME) {
            return None;
        }
        grown = format!("{name}: {GROWTH} times the items took {time:?} and not {before:?}");
    }
    Some(grown)
}

/// Sends all shapes to a server while another client sends requests.
fn try_shapes(server: &Server, shapes: &[Shape]) {
    let good = || {
        let reply = server.send(&keyed(server, "good", CHAT, &super::hello()));
        reply.expect("an answer").ok()["choices"].clone()
    };
    let (before, over, answers) = (good(), AtomicBool::new(false), AtomicUsize::new(0));
    let faults: Vec<String> = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(good(), before);
                answers.fetch_add(1, Ordering::Relaxed);
                // The other client adds little to the processor time.
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        let over = Over(&over);
        let faults = shapes.iter().filter_map(|shape| fault(server, shape)).collect();
        drop(over);
        other.join().unwrap();
        faults
    });
    assert!(faults.is_empty(), "{faults:#?}");
    assert!(answers.into_inner() > 0);
    let said = server.said();
    assert!(!said.contains("panicked"), "{said}");
}

const KEYS: [&str; 4] = ["--api-key", "ill", "--api-key", "good"];

#[test]
fn work_grows_with_the_body_whatever_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["--ctx-size", "512", "--log", "off"];
    let server = Server::start_in(dir.path(), &[&KEYS[..], &options].concat(), limited);
    try_shapes(&server, &[schemas(), functions(), others()].concat());
}

/// Gemma 4's calls have other grammars.
#[test]
fn work_grows_with_the_functions_of_gemma_4() {
    let dir = tempfile::tempdir().unwrap();
    let path = gemma4::model(dir.path());
    let options = ["-m", path.to_str().unwrap(), "--draft", "off", "--ctx-size", "512"];
    let options = [&KEYS[..], &options, &["--log", "off"]].concat();
    let server = Server::start_in(dir.path(), &options, limited);
    let schemas = schemas().into_iter().filter(|(name, ..)| name.starts_with("a function's"));
    try_shapes(&server, &schemas.chain(functions()).collect::<Vec<_>>());
}
