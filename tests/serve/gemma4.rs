//! Thoughts and calls in Gemma 4's form. The model is a small one of Gemma 3's shape with random
//! weights and a tokenizer of Gemma 4's form. Its text is noise; only the form matters.

use crate::common::{Dims, Form, TinyModel, write_gemma4_pair_of};
use crate::server::Server;
use crate::shell::{Run, gemma_in};
use gemma::checkpoint::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const CHAT: &str = "/v1/chat/completions";
const VOCAB: u64 = 2048;

/// Writes the model. Pieces beyond its table of embeddings are left out.
pub fn model(dir: &Path) -> PathBuf {
    let dims = Dims { vocab: VOCAB as usize, dim: 64, ffn_dim: 64, ..Dims::default() };
    let path = dir.join("model");
    TinyModel::new(dims, 5).write(&path, Form::TextV4, Dtype::BF16, 1);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gemma4/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    json["added_tokens"].as_array_mut().unwrap().retain(|t| t["id"].as_u64().unwrap() < VOCAB);
    json["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < VOCAB);
    fs::write(path.join("tokenizer.json"), json.to_string()).unwrap();
    path
}

fn start(dir: &Path, more: &[&str]) -> Server {
    let path = model(dir);
    let options = ["-m", path.to_str().unwrap(), "--draft", "off", "--ctx-size", "2048"];
    Server::start_in(dir, &[&options[..], more].concat(), |_| {})
}

fn weather() -> Value {
    json!({"name": "weather", "description": "Weather of a city.", "parameters": {
        "type": "object", "required": ["city", "days"], "properties": {
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "city": {"type": "string", "enum": ["Rome", "Bern \"old\""]},
            "sure": {"type": "boolean"}}}})
}

fn question() -> Value {
    json!([{"role": "user", "content": "How is the weather?"}])
}

/// Asserts that a call fits the schema.
fn check_call(name: &Value, arguments: &Value) {
    assert_eq!(name, "weather");
    let city = arguments["city"].as_str().unwrap();
    assert!(["Rome", "Bern \"old\""].contains(&city), "{arguments}");
    assert!((1..10).contains(&arguments["days"].as_u64().unwrap()), "{arguments}");
    assert!(arguments.as_object().unwrap().len() < 4);
}

#[test]
fn calls_fit_their_schema_in_all_forms() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), &[]);
    let tools = json!([{"type": "function", "function": weather()}]);
    for seed in 0..4 {
        let body = json!({"messages": question(), "tools": tools, "tool_choice": "required",
            "parallel_tool_calls": false, "seed": seed, "max_tokens": 200});
        let reply = server.post(CHAT, &body).ok();
        let message = &reply["choices"][0]["message"];
        assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls", "{reply}");
        assert!(
            message["content"].is_null() && message["tool_calls"].as_array().unwrap().len() == 1
        );
        let call = &message["tool_calls"][0];
        let arguments = call["function"]["arguments"].as_str().unwrap();
        check_call(&call["function"]["name"], &serde_json::from_str(arguments).unwrap());
        // The same call in a stream, and again after its result.
        let mut streaming = body.clone();
        streaming["stream"] = true.into();
        let events = server.post(CHAT, &streaming).events();
        let part = |event: &Value| {
            event.pointer("/choices/0/delta/tool_calls/0/function/arguments").cloned()
        };
        let parts = events.iter().filter_map(part);
        let all: String = parts.map(|part| part.as_str().unwrap().to_owned()).collect();
        assert_eq!(all, arguments);
        let mut history = question();
        history.as_array_mut().unwrap().extend([
            message.clone(),
            json!({"role": "tool", "tool_call_id": call["id"], "content": "It is <|turn> warm."}),
        ]);
        let again = json!({"messages": history, "tools": tools, "tool_choice": "none",
            "max_tokens": 5});
        let read = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(read(&server.post(CHAT, &again).ok()) > 20);

        let mut tool = weather();
        tool["input_schema"] = tool["parameters"].take();
        let body = json!({"messages": question(), "tools": [tool], "seed": seed,
            "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200});
        let reply = server.post("/v1/messages", &body).ok();
        assert_eq!(reply["stop_reason"], "tool_use", "{reply}");
        check_call(&reply["content"][0]["name"], &reply["content"][0]["input"]);
        let mut tool = weather();
        tool["type"] = "function".into();
        let body = json!({"input": "Weather?", "tools": [tool], "tool_choice": "required",
            "parallel_tool_calls": false, "seed": seed, "max_output_tokens": 200});
        let reply = server.post("/v1/responses", &body).ok();
        let call = &reply["output"][0];
        let arguments = call["arguments"].as_str().unwrap();
        check_call(&call["name"], &serde_json::from_str(arguments).unwrap());
    }
}

#[test]
fn thoughts_are_no_part_of_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), &[]);
    // A schema applies after the thought, which it forces. Here the thought is cut off.
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x",
        "schema": {"type": "boolean"}}});
    let body = |more: Value| {
        let mut body = json!({"messages": question(), "response_format": schema,
            "max_tokens": 400, "seed": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let off = server.post(CHAT, &body(json!({}))).ok();
    let message = &off["choices"][0]["message"];
    assert!(message["content"] == "true" || message["content"] == "false", "{off}");
    assert!(message.get("reasoning_content").is_none());
    let same = server.post(CHAT, &body(json!({"reasoning_effort": "none"}))).ok();
    assert_eq!(same["choices"], off["choices"]);
    let on = json!({"chat_template_kwargs": {"enable_thinking": true}});
    let on = server.post(CHAT, &body(on)).ok();
    let message = &on["choices"][0]["message"];
    let thought = message["reasoning_content"].as_str().unwrap();
    assert!(thought.len() > 100 && on["choices"][0]["finish_reason"] == "length", "{on}");
    assert_eq!(message["content"], "");
    assert_ne!(on["usage"]["prompt_tokens"], off["usage"]["prompt_tokens"]);
    let stream = body(json!({"reasoning_effort": "low", "stream": true}));
    let events = server.post(CHAT, &stream).events();
    let delta = |event: &Value| event.pointer("/choices/0/delta/reasoning_content").cloned();
    let all = events.iter().filter_map(delta).map(|part| part.as_str().unwrap().to_owned());
    assert_eq!(all.collect::<String>(), thought);

    let body = json!({"messages": question(), "max_tokens": 400, "seed": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let kinds = |reply: &Value| {
        let blocks = reply["content"].as_array().unwrap().iter();
        blocks.map(|block| block["type"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let plain = json!({"messages": question(), "max_tokens": 4, "thinking": {"type": "disabled"}});
    assert!(!kinds(&server.post("/v1/messages", &plain).ok()).contains(&"thinking".into()));
    // The seed decides whether this noise has a thought. If it has one, its form is checked.
    let reply = server.post("/v1/messages", &body).ok();
    assert!(kinds(&reply).iter().all(|kind| kind == "thinking" || kind == "text"));
}

#[test]
fn a_model_without_thoughts_says_so_once() {
    let dir = tempfile::tempdir().unwrap();
    gemma_in(dir.path(), &["generate", "--think", "on", "Hi"], b"").fails(2, &["Gemma 4"]);
    let server = Server::start(&["--ctx-size", "300"]);
    let off = json!({"reasoning_effort": "none"});
    for (path, more) in [
        (CHAT, off),
        (CHAT, json!({"reasoning_effort": "high"})),
        (CHAT, json!({"chat_template_kwargs": {"enable_thinking": true}})),
        ("/v1/messages", json!({"thinking": {"type": "enabled"}})),
        ("/v1/messages", json!({"thinking": {"type": "adaptive"}})),
    ] {
        let mut body = json!({"messages": question(), "max_tokens": 3});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(path, &body).ok();
    }
    let said = server.said();
    assert_eq!(said.matches("the model has no thoughts").count(), 3, "{said}");
}

#[test]
fn generate_keeps_thoughts_off_standard_output() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let path = path.to_str().unwrap();
    let run = |more: &[&str]| {
        let options = ["generate", "-m", path, "--draft", "off", "--think", "on", "Hi"];
        let limits = ["--seed", "1", "-n", "400", "--json-schema", r#"{"type": "boolean"}"#];
        gemma_in(dir.path(), &[&options[..], &limits, more].concat(), b"")
    };
    // If the thought is cut off before the answer begins, the run prints the thought and an error.
    let Run { out, err, .. } = run(&[]);
    assert!(out.is_empty() && err.len() > 200 && !err.contains('\u{1b}'), "{err}");
    let Run { out, err, .. } = run(&["-q"]);
    assert!(out.is_empty() && err.len() < 200, "{err}");
    let record = run(&["--json"]).json();
    assert!(record["text"] == "" && record["reasoning"].as_str().unwrap().len() > 100, "{record}");
    let raw = ["generate", "--raw", "--think", "on", "Hi", "-m", path];
    gemma_in(dir.path(), &raw, b"").fails(2, &["--raw"]);
}

/// A thought ends at its budget in all forms, and on the command line.
#[test]
fn thoughts_end_at_their_budget_in_all_forms() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), &["--think-budget", "300"]);
    // With a schema, an answer begins with a thought, even one of random weights.
    let schema = json!({"type": "boolean"});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let chat = |more: Value| {
        let mut body = json!({"messages": question(), "response_format": format, "seed": 1,
            "max_tokens": 400, "temperature": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = server.post(CHAT, &body).ok();
        let answer = &reply["choices"][0];
        // The answer is complete, so the thought was ended.
        assert_eq!(answer["finish_reason"], "stop", "{reply}");
        let message = &answer["message"];
        assert!(message["content"] == "true" || message["content"] == "false", "{reply}");
        let thought = message["reasoning_content"].as_str().unwrap_or_default().to_owned();
        (thought, reply["usage"]["completion_tokens"].as_u64().unwrap())
    };
    // 300 tokens of the thought, its two marks, and the answer.
    let (longer, tokens) = chat(json!({"reasoning_effort": "high"}));
    assert!(longer.len() > 50 && (302 + 1..=302 + 6).contains(&tokens), "{tokens}: {longer}");
    // After a result the template begins the thought, so that its first mark and its name are not
    // generated.
    let call = json!({"id": "a", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    let mut messages = question().as_array().unwrap().clone();
    messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
    messages.push(json!({"role": "tool", "tool_call_id": "a", "content": "21 degrees"}));
    let (begun, tokens) = chat(json!({"reasoning_effort": "high", "messages": messages}));
    assert!(begun.len() > 50 && (280..=300).contains(&tokens), "{tokens}: {begun}");
    // The last character of a thought may be cut.
    let begins = |short: &str| {
        let whole = short.trim_end_matches('\u{fffd}');
        longer.starts_with(whole.get(..whole.len().saturating_sub(1)).unwrap_or_default())
    };
    let (shorter, tokens) = chat(json!({"think": true, "thinking_budget": 20}));
    assert!(begins(&shorter) && (22 + 1..=22 + 6).contains(&tokens), "{tokens}: {shorter}");
    let (none, tokens) = chat(json!({"think": true, "thinking_budget": 0}));
    assert!(none.is_empty() && (3..=8).contains(&tokens), "{none} {tokens}");
    let (minimal, tokens) = chat(json!({"reasoning_effort": "minimal"}));
    assert!(begins(&minimal) && (130 + 1..=130 + 6).contains(&tokens), "{tokens}: {minimal}");
    let wrong = json!({"messages": question(), "thinking": {"type": "enabled",
        "budget_tokens": "many"}, "max_tokens": 4});
    assert_eq!(server.post("/v1/messages", &wrong).status, 400);
    // Anthropic's form, and Ollama's.
    let body = json!({"messages": question(), "max_tokens": 400, "seed": 1, "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 300},
        "output_format": {"type": "json_schema", "schema": schema}});
    let reply = server.post("/v1/messages", &body).ok();
    assert_eq!(reply["content"][0]["thinking"], *longer, "{reply}");
    let body = json!({"messages": question(), "think": true, "format": schema, "stream": false,
        "options": {"seed": 1, "temperature": 1, "num_predict": 400}});
    assert_eq!(server.post("/api/chat", &body).ok()["message"]["thinking"], *longer);
    drop(server);
    let path = dir.path().join("model");
    let options = ["generate", "-m", path.to_str().unwrap(), "--think", "on", "--seed", "1"];
    let limits = ["-n", "400", "--temp", "1", "--json-schema", r#"{"type": "boolean"}"#, "--json"];
    for draft in ["off", "ngram"] {
        let more = ["--think-budget", "300", "--draft", draft, "How is the weather?"];
        let record = gemma_in(dir.path(), &[&options[..], &limits, &more].concat(), b"").json();
        assert_eq!(record["reasoning"], *longer);
    }
}

/// Several texts at once, with the assistant next to the model and without.
#[test]
fn replies_are_the_same_with_the_assistant() {
    for model in ["gemma4-unified", "gemma4-mixture"] {
        replies_are_the_same_as_alone(model);
    }
}

fn replies_are_the_same_as_alone(model: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = write_gemma4_pair_of(dir.path(), model);
    let replies = |draft: &str| {
        let options = ["-m", path.to_str().unwrap(), "--draft", draft, "--ctx-size", "400"];
        let more = ["--parallel", "3"];
        let server = Server::start_in(dir.path(), &[&options[..], &more].concat(), |_| {});
        let ask = |seed: usize| {
            let body = json!({"prompt": format!("Tell me {seed} things."), "seed": seed,
                "temperature": (seed % 2) as f64, "max_tokens": 30});
            server.post("/v1/completions", &body).ok()["choices"][0]["text"].clone()
        };
        std::thread::scope(|scope| {
            let ask = &ask;
            let asked: Vec<_> = (0..6).map(|seed| scope.spawn(move || ask(seed))).collect();
            asked.into_iter().map(|one| one.join().unwrap()).collect::<Vec<Value>>()
        })
    };
    let plain = replies("off");
    assert!(plain.iter().all(|text| text.as_str().unwrap().len() > 5), "{plain:?}");
    assert_eq!(replies("auto"), plain);
    // The command line with one text.
    let alone =
        ["generate", "--raw", "-m", path.to_str().unwrap(), "--draft", "off", "--seed", "0"];
    let more = ["--temp", "0", "-n", "30", "--ctx-size", "400", "--json", "Tell me 0 things."];
    let alone = gemma_in(dir.path(), &[&alone[..], &more].concat(), b"");
    assert_eq!(alone.json()["text"], plain[0]);
}
