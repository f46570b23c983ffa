//! The promise of the server: each answer is byte for byte that of `gemma generate`, whatever other
//! requests run and whichever clients disconnect.
//!
//! GEMMA_SERVE_REQUESTS is the number of different requests, 200 for a full run. The default is 24,
//! and 3 on Vulkan, because a driver may compute on the processor.

use crate::{common, server, shell};
use common::{Dims, Form, TinyModel};
use gemma::checkpoint::Dtype;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use server::{Server, request, streamed};
use shell::{BINARY, command, wait};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// Size of a run.
struct Extent {
    /// Number of different requests
    requests: usize,
    /// Numbers of requests at once, run one after the other
    at_once: &'static [usize],
    /// Sentences of a long system message, which fills some pages of the cache, and of a long
    /// prompt
    long: usize,
}

impl Extent {
    /// Returns a full run of the given default number of requests.
    fn whole(requests: usize) -> Extent {
        let given = std::env::var("GEMMA_SERVE_REQUESTS").ok();
        let given = given.map(|n| n.parse().expect("GEMMA_SERVE_REQUESTS is a number"));
        Extent { requests: given.unwrap_or(requests), at_once: &[1, 8, 32], long: 60 }
    }
}

/// A question in the form of a client's request, and as options of `gemma generate`.
struct Case {
    path: &'static str,
    body: Value,
    arguments: Vec<String>,
    messages: Option<Value>,
}

const QUESTIONS: [&str; 6] = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three colours.",
    "Who are you?",
    "Count from one to ten.",
    "What is photosynthesis?",
];

/// Returns a common prefix of the messages of many clients.
fn system(number: usize, sentences: usize) -> String {
    (0..sentences).map(|i| format!("Rule {i} of {number}: say what is known. ")).collect()
}

/// Returns requests with mixed options. They are the same in each run.
fn cases(extent: &Extent) -> Vec<Case> {
    let mut rng = SmallRng::seed_from_u64(7);
    (0..extent.requests).map(|number| case(&mut rng, number, extent.long)).collect()
}

fn case(rng: &mut SmallRng, number: usize, long: usize) -> Case {
    let question = QUESTIONS[rng.random_range(0..QUESTIONS.len())];
    let mut case = match 5 - number % 6 {
        0 => Case {
            path: "/v1/completions",
            body: json!({"prompt": question}),
            arguments: vec!["--raw".into(), question.into()],
            messages: None,
        },
        kind => {
            let mut messages = vec![json!({"role": "user", "content": question})];
            if kind == 2 {
                messages.insert(0, json!({"role": "system", "content": "Be brief."}));
            }
            if kind > 3 {
                let system = system(number / 6 % 2, long);
                messages.insert(0, json!({"role": "system", "content": system}));
            }
            if kind == 3 || kind == 5 {
                messages.push(json!({"role": "assistant", "content": "I do not know."}));
                messages.push(json!({"role": "user", "content": format!("Again: {question}")}));
            }
            Case {
                path: "/v1/chat/completions",
                body: json!({"messages": messages}),
                arguments: Vec::new(),
                messages: Some(messages.into()),
            }
        }
    };
    case.set("seed", "seed", rng.random_range(0..1000).into());
    case.set("max_tokens", "max-tokens", rng.random_range(1..60).into());
    match rng.random_range(0..5) {
        0 => case.set("temperature", "temp", 0.into()),
        1 => case.set("temperature", "temp", json!(0.75)),
        2 => case.set("temperature", "temp", json!(1.5)),
        _ => {}
    }
    for (share, field, option, value) in [
        (4, "top_k", "top-k", json!(5)),
        (4, "top_p", "top-p", json!(0.5)),
        (5, "min_p", "min-p", json!(0.125)),
        (4, "repeat_penalty", "repeat-penalty", json!(1.25)),
        (3, "repeat_last_n", "repeat-last-n", json!(20)),
        (4, "presence_penalty", "presence-penalty", json!(1.5)),
        (4, "frequency_penalty", "frequency-penalty", json!(-0.25)),
        (4, "stop", "stop", json!("the")),
    ] {
        if rng.random_range(0..share) == 0 {
            case.set(field, option, value);
        }
    }
    if rng.random_range(0..3) == 0 {
        case.arguments.extend(["--logit-bias=300=4.5".into(), "--logit-bias=301=-100".into()]);
        case.body["logit_bias"] = json!({"300": 4.5, "301": -100});
    }
    match rng.random_range(0..6) {
        0 => case.set("regex", "regex", "[A-Z][a-z]+( [a-z]+){2,5}[.]".into()),
        1 => {
            let schema = json!({"type": "object", "properties": {"city": {"type": "string",
                "maxLength": 12}, "sure": {"type": "boolean"}}, "required": ["city", "sure"],
                "additionalProperties": false});
            case.arguments.push(format!("--json-schema={schema}"));
            case.body["response_format"] = json!({"type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema}});
        }
        _ => {}
    }
    case.body["stream"] = rng.random_bool(0.5).into();
    case
}

impl Case {
    fn set(&mut self, field: &str, option: &str, value: Value) {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        self.arguments.push(format!("--{option}={text}"));
        self.body[field] = value;
    }

    /// Returns the answer of `gemma generate` with these options.
    fn expected(&self, options: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let mut generate = command(BINARY, dir.path());
        on(&mut generate);
        generate.args(["generate", "-q", "--draft=off"]).args(options).args(&self.arguments);
        if let Some(messages) = &self.messages {
            let file = dir.path().join("messages.json");
            std::fs::write(&file, messages.to_string()).unwrap();
            generate.arg("--messages").arg(file);
        }
        let run = wait(generate, b"");
        // Exit code 8 means that the limit came before the end of a grammar. Only the text matters
        // here.
        assert!([0, 8].contains(&run.code), "{run:?}");
        run.text().to_owned()
    }

    fn ask(&self, server: &Server) -> String {
        let reply = server.post(self.path, &self.body);
        assert_eq!(reply.status, 200, "{}: {reply:?}", self.body);
        if self.body["stream"] == true {
            return streamed(&reply.events(), 1).remove(0);
        }
        let choice = &reply.json()["choices"][0];
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
        text.unwrap_or_else(|| panic!("{reply:?}")).to_owned()
    }

    /// Sends the request and disconnects after a while.
    fn ask_and_leave(&self, server: &Server, after: Duration) {
        let body = self.body.to_string();
        let mut stream = server.connect();
        stream.write_all(&request(&server.address, "POST", self.path, "", &body)).unwrap();
        stream.set_read_timeout(Some(after)).unwrap();
        let _ = stream.read(&mut [0; 64]);
    }
}

fn is_gpu_required() -> bool {
    std::env::var_os("GEMMA_REQUIRE_GPU").is_some_and(|value| value == "1")
}

/// Allows Vulkan's driver on the processor if tests of the GPU are requested.
pub fn on(command: &mut std::process::Command) {
    if is_gpu_required() {
        command.env("GEMMA_VULKAN_CPU", "1");
    }
}

/// Sends all requests in random order, `at_once` at a time, together with a long prompt and clients
/// that disconnect.
fn ask_all(
    server: &Server,
    cases: &[Case],
    expected: &[String],
    (at_once, long): (usize, usize),
    seed: u64,
) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order.shuffle(&mut rng);
    // For every five requests, one more client disconnects before its answer is complete.
    let leave: Vec<(usize, u64)> = (0..cases.len().div_ceil(5))
        .map(|_| (rng.random_range(0..cases.len()), rng.random_range(1..60)))
        .collect();
    let (todo, leave) = (Mutex::new(order), Mutex::new(leave));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let long = "All work and no play makes a dull day. ".repeat(long);
            let messages = json!([{"role": "user", "content": long}]);
            let body = json!({"messages": messages, "max_tokens": 3});
            assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
        });
        scope.spawn(|| {
            while let Some((which, after)) = leave.lock().unwrap().pop() {
                cases[which].ask_and_leave(server, Duration::from_millis(after));
            }
        });
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let Some(which) = todo.lock().unwrap().pop() else { break };
                    let text = cases[which].ask(server);
                    assert_eq!(text, expected[which], "{}", cases[which].body);
                }
            });
        }
    });
}

fn check(options: &[&str], extent: &Extent) {
    let cases = cases(extent);
    let expected: Vec<String> = cases.iter().map(|case| case.expected(options)).collect();
    let distinct: std::collections::BTreeSet<&String> = expected.iter().collect();
    assert!(distinct.len() * 2 > cases.len(), "the answers hardly differ: {distinct:?}");
    // The second server finds the prompts that the first one stored on disk.
    let kept = tempfile::tempdir().unwrap();
    let kept = format!("--cache-dir={}", kept.path().join("prompts").display());
    for (drafts, cache) in [("--draft=auto", "--cache-ram=0"), ("--draft=off", "--cache-ram=50MB")]
    {
        let dir = tempfile::tempdir().unwrap();
        let own = ["--parallel", "8", "--log", "off", drafts, cache, &kept];
        let options = [&own[..], options].concat();
        let server = Server::start_in(dir.path(), &options, on);
        for (round, at_once) in extent.at_once.iter().enumerate() {
            ask_all(&server, &cases, &expected, (*at_once, extent.long), round as u64);
        }
        server.wait_for("gemma_running_texts", 0.0);
        server.wait_for("gemma_queue_length", 0.0);
        // Most of the common prefix was not read again.
        let [read, cached] = ["gemma_prompt_tokens_total", "gemma_cached_prompt_tokens_total"]
            .map(|name| server.metric(name));
        let share = if extent.at_once.len() > 1 { read / 3.0 } else { 0.0 };
        assert!(cached > share, "{cached} of {read} tokens were cached");
    }
}

/// Writes a random model with the tokens of the bundled one. It is so small that a driver on the
/// processor completes a pass at once. Returns its path.
pub fn tiny(dir: &Path) -> String {
    let dims = Dims { vocab: 16384, window: 300, ..Dims::default() };
    TinyModel::new(dims, 1).write(dir, Form::TextV4, Dtype::BF16, 1);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target").join(file);
        std::fs::copy(bundled, dir.join(file)).unwrap();
    }
    dir.to_str().unwrap().to_owned()
}

#[test]
fn every_answer_is_that_of_generate_whatever_the_load() {
    check(&["--device", "cpu"], &Extent::whole(24));
}

/// Returns whether there is a Vulkan device. Prints a message if not.
pub fn has_vulkan() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let mut devices = command(BINARY, dir.path());
    on(&mut devices);
    devices.args(["devices", "--json"]);
    let devices = wait(devices, b"").json();
    let counts = |device: &Value| is_gpu_required() || device["kind"] != "driver on the processor";
    let found = devices["vulkan"].as_array().is_some_and(|list| list.iter().any(counts));
    if !found {
        assert!(!is_gpu_required(), "there is no Vulkan device");
        eprintln!("SKIPPED, no GPU with a Vulkan driver");
    }
    found
}

#[test]
fn every_answer_is_that_of_generate_on_vulkan_too() {
    if has_vulkan() {
        let dir = tempfile::tempdir().unwrap();
        let options = ["--device", "vulkan", "-m", &tiny(dir.path())];
        let extent = match std::env::var_os("GEMMA_SERVE_REQUESTS") {
            Some(_) => Extent::whole(24),
            None => Extent { requests: 3, at_once: &[8], long: 26 },
        };
        check(&options, &extent);
    }
}

/// A device that is lost during eight streams is opened again, and all continue with the right
/// text. The third loss within a minute ends the server.
#[test]
fn texts_outlive_the_device() {
    if !has_vulkan() {
        return;
    }
    let model = tempfile::tempdir().unwrap();
    let model = tiny(&model.path().join("tiny"));
    let ask = |server: &Server, seed: u64, tokens: usize| {
        let messages = json!([{"role": "user", "content": QUESTIONS[seed as usize % 6]}]);
        let body = json!({"messages": messages, "seed": seed, "max_tokens": tokens,
            "ignore_eos": true, "stream": true, "temperature": 1.5});
        server.post("/v1/chat/completions", &body)
    };
    let answers = |lose: &str, tokens: usize| {
        let dir = tempfile::tempdir().unwrap();
        let options = ["--device", "vulkan", "--parallel", "8", "--draft=off", "-m", &model];
        let server = Server::start_in(dir.path(), &options, |command| {
            on(command);
            command.env(gemma::testing::FAIL, lose);
        });
        let mut replies: Vec<(u64, String)> = std::thread::scope(|scope| {
            let start = |seed| {
                let server = &server;
                scope.spawn(move || (seed, ask(server, seed, tokens).body))
            };
            let asked: Vec<_> = (0..8).map(start).collect();
            asked.into_iter().map(|reply| reply.join().unwrap()).collect()
        });
        replies.sort();
        (server, replies)
    };
    let texts = |replies: &[(u64, String)]| -> Vec<String> {
        let events = |body: &String| {
            let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
            let data = data.filter(|data| *data != "[DONE]");
            data.map(|data| serde_json::from_str(data).unwrap()).collect::<Vec<Value>>()
        };
        replies.iter().map(|(_, body)| streamed(&events(body), 1).remove(0)).collect()
    };
    let whole = {
        let (server, whole) = answers("submit@1000000", 16);
        assert_eq!(server.metric("gemma_device_losses_total"), 0.0);
        texts(&whole)
    };
    // The number of submissions for loading and for prompts depends on the device. One of these
    // losses happens while all eight texts are growing.
    let mut growing = false;
    for (after, losses) in [
        ("submit@13", 1),
        ("submit@19", 1),
        ("submit@15,11", 2),
        ("submit@25", 1),
        ("submit@31", 1),
    ] {
        let (server, replies) = answers(after, 16);
        let said = server.said();
        assert_eq!(texts(&replies), whole, "{after}: {said}");
        if server.metric("gemma_device_losses_total") > 0.0 {
            assert_eq!(server.metric("gemma_device_losses_total"), f64::from(losses), "{said}");
        }
        growing |= said.contains("lost in a pass over 8 tokens");
        if growing && losses == 2 {
            break;
        }
    }
    assert!(growing, "no loss met eight growing texts");
    let (server, replies) = answers("submit@13,9*", 100);
    assert!(replies.iter().any(|(_, body)| body.contains("lost")), "{replies:?}");
    let (code, said) = server.wait();
    assert_eq!(code, 4, "{said}");
}
