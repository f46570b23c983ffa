//! Ollama's API: the answers are those of `/v1/chat/completions`.

use crate::server::{Reply, Server};
use crate::shell::with_model;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn question() -> Value {
    json!([{"role": "user", "content": "What is the capital of France?"}])
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"), "{reply:?}");
    reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn joined(lines: &[Value], place: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(place)?.as_str()).collect()
}

#[test]
fn answers_are_those_of_the_other_forms() {
    let server = Server::start(&[]);
    let settings = json!({"temperature": 1.2, "seed": 7, "top_k": 30, "repeat_penalty": 1.1});
    let own = with(json!({"messages": question(), "max_tokens": 30}), settings.clone());
    let choice = server.post(CHAT, &own).ok()["choices"][0].clone();
    let text = choice["message"]["content"].as_str().unwrap();
    let options = with(settings, json!({"num_predict": 30, "num_ctx": 4096, "num_gpu": 99}));
    let body = json!({"model": "any", "messages": question(), "options": options, "tools": [],
        "keep_alive": "5m", "think": false});
    let whole = server.post("/api/chat", &with(body.clone(), json!({"stream": false}))).ok();
    assert_eq!(whole["message"], json!({"role": "assistant", "content": text}));
    assert_eq!((&whole["model"], &whole["done"]), (&json!("any"), &json!(true)));
    let reason = &choice["finish_reason"];
    assert_eq!(&whole["done_reason"], reason);
    let streamed = lines(&server.post("/api/chat", &body));
    assert_eq!(joined(&streamed, "/message/content"), text);
    let (last, others) = streamed.split_last().unwrap();
    assert!(others.iter().all(|line| line["done"] == false), "{others:?}");
    for counts in [last, &whole] {
        for key in ["total_duration", "prompt_eval_count", "eval_count", "eval_duration"] {
            assert!(counts[key].as_u64().unwrap() > 0, "{key}: {counts}");
        }
    }
    assert_eq!((&last["done_reason"], &last["eval_count"]), (reason, &whole["eval_count"]));
    let prompt = json!({"prompt": question()[0]["content"], "options": options});
    let generated = lines(&server.post("/api/generate", &prompt));
    assert_eq!(joined(&generated, "/response"), text);

    let raw = json!({"prompt": "The", "raw": true, "stream": false,
        "options": {"temperature": 0, "num_predict": 5}});
    let plain = json!({"prompt": "The", "temperature": 0, "max_tokens": 5});
    let plain = server.post("/v1/completions", &plain).ok()["choices"][0].clone();
    let raw = server.post("/api/generate", &raw).ok();
    assert_eq!((&raw["response"], &raw["done_reason"]), (&plain["text"], &json!("length")));
    let chances = json!({"messages": question(), "stream": false, "logprobs": true,
        "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 3}});
    let chances = server.post("/api/chat", &chances).ok()["logprobs"].clone();
    assert_eq!(chances.as_array().unwrap().len(), 3);
    assert_eq!(chances[0]["top_logprobs"][0]["token"], chances[0]["token"]);
}

#[test]
fn calls_and_formats_are_enforced() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "required": ["city"], "additionalProperties": false,
        "properties": {"city": {"type": "string", "maxLength": 8}}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": schema}});
    let body = json!({"messages": question(), "tools": [tool], "tool_choice": "required",
        "options": {"seed": 1, "temperature": 1, "num_predict": 100}});
    let whole = server.post("/api/chat", &with(body.clone(), json!({"stream": false}))).ok();
    let call = &whole["message"]["tool_calls"][0]["function"];
    assert_eq!((&call["name"], &whole["done_reason"]), (&json!("weather"), &json!("stop")));
    assert!(call["arguments"]["city"].is_string(), "{whole}");
    let streamed = lines(&server.post("/api/chat", &body));
    let calls: Vec<&Value> = streamed
        .iter()
        .flat_map(|line| line["message"]["tool_calls"].as_array())
        .flatten()
        .collect();
    let all = whole["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), all.len());
    for (one, other) in calls.iter().zip(all) {
        assert_eq!(one["function"], other["function"]);
    }
    let mut messages = question();
    messages.as_array_mut().unwrap().extend([
        whole["message"].clone(),
        json!({"role": "tool", "tool_name": "weather", "content": "sunny"}),
    ]);
    let after = json!({"messages": messages, "stream": false, "options": {"num_predict": 3}});
    assert!(server.post("/api/chat", &after).ok()["message"]["content"].is_string());
    for (format, is_object) in [(schema, false), (json!("json"), true), (json!(""), true)] {
        let body = json!({"prompt": "A city", "format": format, "stream": false,
            "options": {"temperature": 0, "num_predict": 60}});
        let whole = server.post("/api/generate", &body).ok();
        let text = whole["response"].as_str().unwrap();
        if format.is_object() {
            let object: Value = serde_json::from_str(text).unwrap();
            assert!(object["city"].is_string());
        }
        assert!(!is_object || format == "" || text.starts_with('{'), "{text}");
    }
}

#[test]
fn the_model_is_described_and_the_rest_is_refused() {
    let server = Server::start(&["--ctx-size", "300"]);
    let name = server.get("/v1/models").ok()["data"][0]["id"].clone();
    for path in ["/api/tags", "/api/ps"] {
        let model = server.get(path).ok()["models"][0].clone();
        assert_eq!((&model["name"], &model["model"]), (&name, &name));
        assert!(model["size"].as_u64().unwrap() > 1_000_000, "{model}");
    }
    assert!(server.get("/api/version").ok()["version"].is_string());
    let shown = server.post("/api/show", &json!({"model": "any"})).ok();
    let family = shown["details"]["family"].as_str().unwrap();
    assert_eq!(shown["model_info"][format!("{family}.context_length")], 300);
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("tools")), "{shown}");
    assert!(server.request("HEAD", "/", "", "").status == 200);
    for (path, body, reason) in [
        ("/api/generate", json!({"model": "any"}), "load"),
        ("/api/generate", json!({"model": "any", "prompt": "", "keep_alive": 0}), "unload"),
        ("/api/chat", json!({"model": "any", "messages": []}), "load"),
    ] {
        let loaded = server.post(path, &body).ok();
        assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!(reason)));
    }
    let user =
        |more: Value| json!({"messages": [with(json!({"role": "user", "content": "a"}), more)]});
    let chat = |more: Value| with(user(json!({})), more);
    for (path, body, status, word) in [
        ("/api/chat", user(json!({"images": ["iVBOR"]})), 400, "not base64"),
        ("/api/chat", user(json!({"images": "iVBOR"})), 400, "not a list"),
        ("/api/generate", json!({"images": ["aGk="]}), 400, "reads no images"),
        ("/api/chat", chat(json!({"format": "xml"})), 400, "'format'"),
        ("/api/chat", chat(json!({"options": {"temperature": "hot"}})), 400, "'temperature'"),
        ("/api/chat", chat(json!({"options": {"mirostat": 2}})), 400, "'mirostat'"),
        ("/api/generate", json!({"prompt": "a", "suffix": "b"}), 400, "'suffix'"),
        ("/api/generate", json!({"prompt": "a", "template": "{{ .Prompt }}"}), 400, "'template'"),
        ("/api/generate", json!({"prompt": "a", "context": [1]}), 400, "'context'"),
        ("/api/generate", json!({"prompt": "a ".repeat(400)}), 400, "300"),
        ("/api/embed", json!({"input": "a"}), 404, "embeddings"),
        ("/api/embeddings", json!({"prompt": "a"}), 404, "embeddings"),
        ("/api/pull", json!({"model": "a"}), 404, "/api/pull"),
        ("/api/nothing", json!({}), 404, "/api/nothing"),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, status, "{body}: {reply:?}");
        assert!(reply.json()["error"].as_str().unwrap().contains(word), "{body}: {reply:?}");
    }
    assert_eq!(server.request("DELETE", "/api/delete", "", "{}").status, 404);
}

/// The `context` of an answer goes on with its conversation, as `/api/chat` does.
#[test]
fn a_context_has_the_earlier_messages() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    let server = Server::start_in(dir.path(), &["-m", "m", "--ctx-size", "400"], |_| {});
    let options = json!({"temperature": 0, "num_predict": 8});
    let generate = |more: Value| {
        let body = json!({"model": "any", "system": "Be brief.", "options": options,
            "stream": false});
        server.post("/api/generate", &with(body, more))
    };
    let chat = |messages: Value| {
        let body = json!({"messages": messages, "options": options, "stream": false});
        server.post("/api/chat", &body).ok()["message"]["content"].clone()
    };
    let first = generate(json!({"prompt": "Name a \"colour\"."})).ok();
    let mut talk = json!([{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a \"colour\"."}]);
    assert_eq!(first["response"], chat(talk.clone()));
    assert!(first["context"].as_array().unwrap().iter().all(Value::is_u64), "{first}");
    // A stream has it in its last line. The system message comes along, unless there is another.
    let asked =
        |more| generate(with(json!({"prompt": "And \u{e4}?", "context": first["context"]}), more));
    let second = asked(json!({"system": ""})).ok();
    let streamed = lines(&asked(json!({"stream": true})));
    assert_eq!(streamed.last().unwrap()["context"], second["context"]);
    assert!(streamed[..streamed.len() - 1].iter().all(|line| line["context"].is_null()));
    let list = talk.as_array_mut().unwrap();
    list.push(json!({"role": "assistant", "content": first["response"]}));
    list.push(json!({"role": "user", "content": "And \u{e4}?"}));
    assert_eq!(second["response"], chat(talk.clone()));
    assert_eq!(second["response"], joined(&streamed, "/response"));
    talk[0]["content"] = "Be loud.".into();
    let other = asked(json!({"system": "Be loud."})).ok();
    assert_eq!(other["response"], chat(talk));
    for foreign in [json!([1, 2, 3]), json!([105, 2364, 107]), json!([4294967295u32])] {
        let reply = generate(json!({"prompt": "Hi", "context": foreign}));
        assert!(
            reply.status == 400 && reply.body.contains("'context' is not from an answer"),
            "{reply:?}"
        );
    }
    let raw = generate(json!({"prompt": "Hi", "raw": true, "system": ""})).ok();
    assert!(raw["context"].is_null(), "{raw}");
}
