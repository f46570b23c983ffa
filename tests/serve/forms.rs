//! `gemma serve`: the forms of its answers, its options, its shutdown.

use crate::{server, shell};
use serde_json::{Value, json};
use server::{Server, streamed};
use shell::{gemma, with_model};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

pub fn question() -> Value {
    json!([{"role": "user", "content": "What is the capital of France?"}])
}

pub fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns a body with a tool that servers run themselves, and this `tool_choice`.
fn search(choice: &str) -> Value {
    chat(json!({"tools": [{"type": "web_search"}], "tool_choice": choice}))
}

pub fn chat(more: Value) -> Value {
    with(json!({"messages": question(), "temperature": 0, "max_tokens": 20}), more)
}

pub const CHAT: &str = "/v1/chat/completions";

/// Returns bodies that are refused: the path, the body, the status and a part of the message.
fn refused() -> Vec<(&'static str, Value, u16, &'static str)> {
    vec![
        (CHAT, json!([]), 400, "object"),
        (CHAT, json!({}), 400, "'messages' is missing"),
        (CHAT, json!({"messages": 5}), 400, "'messages'"),
        (CHAT, json!({"messages": []}), 400, "user message"),
        (CHAT, chat(json!({"model": "x".repeat(300)})), 400, "'model'"),
        (CHAT, chat(json!({"temprature": 1})), 400, "'temprature' is not supported"),
        (CHAT, chat(json!({"frequency_penalty": 2.5})), 400, "from -2 to 2, not 2.5"),
        (CHAT, chat(json!({"repeat_last_n": -2})), 400, "-1 for the whole text"),
        (CHAT, chat(json!({"logit_bias": {"a": 1}})), 400, "'logit_bias' must be at most"),
        (CHAT, chat(json!({"logit_bias": {"9": 101}})), 400, "from -100 to 100, not 101"),
        (CHAT, chat(json!({"logit_bias": [[99999999, false]]})), 400, "token 99999999"),
        (CHAT, chat(json!({"temperature": "hot"})), 400, "'temperature'"),
        (CHAT, chat(json!({"temperature": -1})), 400, "temperature"),
        (CHAT, chat(json!({"repeat_penalty": 1e-39})), 400, "repeat penalty"),
        (CHAT, chat(json!({"seed": 0.5})), 400, "'seed'"),
        (CHAT, chat(json!({"n": 0})), 400, "'n'"),
        (CHAT, chat(json!({"stop": 5})), 400, "'stop' must be a text or a list of texts"),
        (CHAT, chat(json!({"stream_options": []})), 400, "stream_options"),
        (CHAT, chat(json!({"top_logprobs": 3})), 400, "logprobs"),
        (CHAT, chat(json!({"response_format": {"type": "xml"}})), 400, "response_format"),
        (CHAT, chat(json!({"tool_choice": "required"})), 400, "no tool is a function"),
        (CHAT, chat(json!({"tools": [{"type": "function"}]})), 400, "'tools' has no name"),
        (CHAT, search("required"), 400, "'tool_choice' requires a call"),
        (CHAT, search("web_search"), 400, "'tool_choice' names \"web_search\""),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"}), 400, "cannot fill text in"),
        (
            "/v1/completions",
            json!({"prompt": "a", "echo": true, "logprobs": 1, "stream": true}),
            400,
            "leave out 'stream'",
        ),
        ("/v1/completions", json!({"prompt": [99999999]}), 400, "tokens are numbers"),
        ("/v1/responses", json!({"input": "a", "previous_response_id": "x"}), 400, "previous"),
        ("/v1/nothing", json!({}), 404, "/v1/nothing"),
        ("/v1/embeddings", json!({"input": "a"}), 404, "embeddings"),
    ]
}

#[test]
fn what_is_not_an_answer_is_told_in_json() {
    let server = Server::start(&["--ctx-size", "300"]);
    assert_eq!(server.get("/health").ok(), json!({"status": "ok"}));
    let models = server.get("/v1/models").ok();
    let name = models["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!((&*name, &models["data"][0]["max_model_len"]), ("gemma-demo", &json!(300)));
    for path in ["/v1/models/gemma-demo", "/v1/models/a/b", "/models/x%20y"] {
        assert_eq!(server.get(path).ok()["id"], name);
    }
    for path in ["/models", "/models/", "/v1/models/"] {
        assert_eq!(server.get(path).ok(), models);
    }
    assert_eq!(server.get("/version").ok()["version"], env!("CARGO_PKG_VERSION"));
    let page = server.get("/");
    assert!(page.status == 200 && page.body.contains("<textarea"), "{page:?}");
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));

    let text = "Grüße, <end_of_turn> 😀";
    let tokens = server.post("/tokenize", &json!({"content": text, "parse_special": false}));
    let tokens = tokens.ok();
    let back = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).ok();
    assert_eq!(back["content"], text);
    let info = server.get("/tokenizer_info").ok();
    assert_eq!((&info["bos_token"], &info["eos_token"]), (&json!("<bos>"), &json!("<eos>")));
    for adds in [false, true] {
        let body = json!({"prompt": "<bos>", "add_special_tokens": adds});
        assert_eq!(server.post("/tokenize", &body).ok()["tokens"], json!([2]));
    }
    assert_eq!(
        tokens["count"].as_u64().unwrap() as usize,
        tokens["tokens"].as_array().unwrap().len()
    );

    for (path, body, status, word) in refused() {
        let reply = server.post(path, &body);
        let error = &reply.json()["error"];
        assert_eq!(reply.status, status, "{body}: {reply:?}");
        assert!(!reply.body.contains("--"), "{reply:?}");
        assert!(error["message"].as_str().unwrap().contains(word), "{body}: {reply:?}");
        assert!(error["type"] == "invalid_request_error", "{reply:?}");
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(400)}]});
    let error = server.post(CHAT, &long).json()["error"].clone();
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("300") && message.contains("tokens"), "{message}");
    let error = server.post("/v1/messages", &json!({"messages": []})).json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("invalid_request_error"))
    );
    assert_eq!(server.request("GET", CHAT, "", "").status, 405);
    assert_eq!(server.request("HEAD", "/", "", "").status, 200);
    let options = server.request("OPTIONS", CHAT, "", "");
    assert_eq!((options.status, options.header("allow")), (204, Some("POST")));
    for model in ["other", "gemma-demo"] {
        for path in ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"] {
            assert_eq!(server.post(path, &chat(json!({"model": model}))).ok()["model"], model);
        }
    }
    let said = server.said();
    let notes: Vec<&str> =
        said.lines().filter(|line| line.starts_with("note: the model")).collect();
    assert_eq!(notes, ["note: the model \"other\" is answered by gemma-demo"], "{said}");
    assert!(said.contains("gemma-demo answers at"), "{said}");
    let refused = said.lines().filter(|line| line.contains(" refused, "));
    assert!(refused.clone().count() > 20 && refused.clone().all(|l| l.contains(" s: ")), "{said}");
}

#[test]
fn a_chat_answer_comes_whole_or_in_a_stream() {
    let server = Server::start(&[]);
    let whole = server.post(CHAT, &chat(json!({}))).ok();
    assert_eq!(whole["object"], "chat.completion");
    assert!(whole["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    let choice = &whole["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap();
    let args = ["generate", "-q", "--temp", "0", "-n", "20", "What is the capital of France?"];
    assert_eq!(text, gemma(&args, b"").ok().text());
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &whole["usage"];
    let total =
        usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], total);

    let stream = json!({"stream": true, "stream_options": {"include_usage": true}, "n": 2});
    let reply = server.post(CHAT, &chat(stream));
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.body.ends_with("data: [DONE]\n\n"), "{}", reply.body);
    let events = reply.events();
    assert_eq!(streamed(&events, 2), [text, text]);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"]["completion_tokens"],
        2 * usage["completion_tokens"].as_u64().unwrap()
    );
    // The next questions use the cache of the first one.
    let cached = last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached, usage["prompt_tokens"].as_u64().unwrap() - 1);
    assert!(others.iter().all(|event| event["usage"].is_null()), "{others:?}");
    let reasons: Vec<&Value> = others
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap())
        .map(|choice| &choice["finish_reason"])
        .filter(|reason| !reason.is_null())
        .collect();
    assert_eq!(reasons, ["stop", "stop"]);

    let cut = server.post(CHAT, &chat(json!({"max_completion_tokens": 2}))).ok();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 2);
    let seeds = json!({"temperature": 1.5, "n": 2, "seed": 5, "max_tokens": 30});
    let both = server.post(CHAT, &chat(seeds)).ok();
    let next = server.post(CHAT, &chat(json!({"temperature": 1.5, "seed": 6, "max_tokens": 30})));
    assert_eq!(next.header("x-seed"), Some("6"));
    assert_eq!(both["choices"][1]["message"], next.ok()["choices"][0]["message"]);
}

#[test]
fn each_response_has_the_id_of_its_request() {
    let server = Server::start(&[]);
    let text = json!({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1});
    let forms = ["/v1/messages", "/v1/messages/count_tokens", CHAT, "/tokenize", "/v1/absent"];
    let replies = forms.map(|path| server.post(path, &text));
    for (path, reply) in forms.iter().zip(&replies) {
        let id = reply.header("x-request-id").unwrap_or_default();
        assert!(id.starts_with("req_"), "{path}: {reply:?}");
        let own = path.starts_with("/v1/messages").then_some(id);
        assert_eq!(reply.header("request-id"), own, "{path}");
    }
}

/// A conversation that returns after many others, and a prefix that other requests share.
#[test]
fn what_was_read_once_is_not_read_again() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    let start =
        |more: &[&str]| Server::start_in(dir.path(), &[&["-m", "m"], more].concat(), |_| {});
    let server = start(&["--parallel", "2", "--cache-ram", "200MB"]);
    let talk = |number: usize, more: &[Value]| {
        let system = format!("Rule {number}: be brief and kind. ").repeat(70);
        let mut messages = vec![json!({"role": "system", "content": system})];
        messages.push(question()[0].clone());
        messages.extend_from_slice(more);
        chat(json!({"messages": messages}))
    };
    let ask = |server: &Server, body: &Value| {
        let whole = server.post(CHAT, body).ok();
        let usage = &whole["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prompt = usage["prompt_tokens"].as_u64().unwrap();
        assert!(prompt > 600, "{usage}");
        (whole["choices"].clone(), prompt - cached)
    };
    let (first, read) = ask(&server, &talk(0, &[]));
    assert!(read > 600);
    for number in 1..9 {
        ask(&server, &talk(number, &[]));
    }
    let again = [first[0]["message"].clone(), json!({"role": "user", "content": "And of Spain?"})];
    let (later, read) = ask(&server, &talk(0, &again));
    assert!(read < 256 + 40, "{read} tokens were read");
    let fresh = start(&[]);
    assert_eq!(later, ask(&fresh, &talk(0, &again)).0);
    // Others, at once: two pages that they share with the first request need not be read.
    let bodies = ["And of Italy?", "And of Peru?", "And of Chad?"].map(|text| {
        talk(0, &[first[0]["message"].clone(), json!({"role": "user", "content": text})])
    });
    std::thread::scope(|scope| {
        for body in &bodies {
            let (server, fresh) = (&server, &fresh);
            scope.spawn(move || {
                let (text, read) = ask(server, body);
                assert!(read < 256 + 40, "{read} tokens were read");
                assert_eq!(text, ask(fresh, body).0);
            });
        }
    });
}

#[test]
fn chances_are_those_of_the_model() {
    let server = Server::start(&[]);
    let plain = server.post(CHAT, &chat(json!({}))).ok();
    let body = chat(json!({"logprobs": true, "top_logprobs": 3}));
    let whole = server.post(CHAT, &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"], plain["choices"][0]["message"]);
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), whole["usage"]["completion_tokens"].as_u64().unwrap() as usize);
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        // At temperature 0 each token is its own best alternative.
        assert_eq!((top.len(), &top[0]["logprob"]), (3, &token["logprob"]));
        let chances: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap().exp()).collect();
        assert!(chances.is_sorted_by(|a, b| a >= b) && chances.iter().sum::<f64>() < 1.001);
    }
    let events = server.post(CHAT, &with(body, json!({"stream": true}))).events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, tokens);
    let body = json!({"prompt": "The", "max_tokens": 4, "temperature": 0, "logprobs": 2});
    let choice = server.post("/v1/completions", &body).ok()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(choice["logprobs"]["text_offset"][0], 0);
}

fn weather() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string",
        "maxLength": 8}}, "required": ["city"], "additionalProperties": false});
    let now = json!({"type": "function", "function": {"name": "now"}});
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}, now])
}

#[test]
fn calls_fit_their_schema_and_stream_in_parts() {
    let server = Server::start(&[]);
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (choice, seed) in [(json!("required"), 1), (named, 2)] {
        let more = json!({"tools": weather(), "tool_choice": choice, "seed": seed,
            "temperature": 1, "max_tokens": 200, "parallel_tool_calls": false});
        let whole = server.post(CHAT, &chat(more.clone())).ok()["choices"][0].clone();
        assert_eq!(whole["finish_reason"], "tool_calls", "{whole}");
        let calls = whole["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &whole["message"]["content"]), (1, &Value::Null));
        let function = &calls[0]["function"];
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        match function["name"].as_str().unwrap() {
            "weather" => assert!(arguments["city"].as_str().unwrap().chars().count() <= 8),
            other => assert_eq!((other, arguments), ("now", json!({}))),
        }
        let events = server.post(CHAT, &chat(with(more, json!({"stream": true})))).events();
        let parts = events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"].get(0));
        let (mut name, mut text) = (String::new(), String::new());
        for part in parts {
            assert_eq!(part["index"], 0);
            name += part["function"]["name"].as_str().unwrap_or_default();
            text += part["function"]["arguments"].as_str().unwrap_or_default();
        }
        assert_eq!(
            (name.as_str(), text.as_str()),
            (function["name"].as_str().unwrap(), function["arguments"].as_str().unwrap())
        );
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
        let messages = json!([question()[0], whole["message"],
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}]);
        let after = chat(json!({"messages": messages, "tools": weather(), "tool_choice": "none"}));
        let after = server.post(CHAT, &after).ok();
        assert!(after["choices"][0]["message"]["tool_calls"].is_null());
    }
}

/// OpenAI's older form has one call, with the name and arguments in one object.
#[test]
fn older_clients_get_an_older_call() {
    let server = Server::start(&[]);
    let functions = json!([weather()[0]["function"]]);
    let more = json!({"functions": functions, "function_call": {"name": "weather"},
        "max_tokens": 200});
    let choice = server.post(CHAT, &chat(more.clone())).ok()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "function_call", "{choice}");
    let call = &choice["message"]["function_call"];
    assert_eq!(call["name"], "weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["city"].is_string(), "{call}");
    let events = server.post(CHAT, &chat(with(more, json!({"stream": true})))).events();
    let parts = events.iter().map(|event| &event["choices"][0]["delta"]["function_call"]);
    let text: String = parts.filter_map(|part| part["arguments"].as_str()).collect();
    assert_eq!(text, call["arguments"].as_str().unwrap());
    let result = json!({"role": "function", "name": "weather", "content": "sunny"});
    let history = json!([question()[0], choice["message"], result]);
    server.post(CHAT, &chat(json!({"messages": history, "functions": functions}))).ok();
}

#[test]
fn anthropics_form_says_the_same() {
    let server = Server::start(&[]);
    let body = json!({"messages": question(), "temperature": 0, "max_tokens": 20});
    let text = server.post(CHAT, &body).ok()["choices"][0]["message"]["content"].clone();
    let whole = server.post("/v1/messages", &body).ok();
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("end_turn")));
    let usage = &whole["usage"];
    let counted = server.post("/v1/messages/count_tokens", &json!({"messages": question()})).ok();
    let read = ["input_tokens", "cache_read_input_tokens"].map(|k| usage[k].as_u64().unwrap());
    assert_eq!(counted["input_tokens"], read[0] + read[1]);

    let reply = server.post("/v1/messages", &with(body.clone(), json!({"stream": true})));
    let events = reply.events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    let begun = &events[0]["message"]["usage"];
    assert_eq!(begun["input_tokens"], counted["input_tokens"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let streamed: String =
        events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, text.as_str().unwrap());
    for line in reply.body.split("\n\n").filter(|part| !part.is_empty()) {
        assert!(line.starts_with("event: "), "{line}");
    }
    let stop = server.post("/v1/messages", &with(body.clone(), json!({"stop_sequences": [" is"]})));
    let stop = stop.ok();
    assert_eq!(
        (&stop["stop_reason"], &stop["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" is"))
    );

    let schema = weather()[0]["function"]["parameters"].clone();
    let search = json!({"type": "web_search_20250305", "name": "web_search"});
    let tools = json!([{"name": "weather", "input_schema": schema}, search]);
    let call = json!({"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 200});
    let call = with(body, call);
    let whole = server.post("/v1/messages", &call).ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    let input = whole["content"][0]["input"].clone();
    assert!(input["city"].is_string(), "{whole}");
    let events = server.post("/v1/messages", &with(call, json!({"stream": true}))).events();
    let json: String =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), input);
}

#[test]
fn responses_say_the_same() {
    let server = Server::start(&[]);
    let text = server.post(CHAT, &chat(json!({}))).ok()["choices"][0]["message"]["content"].clone();
    let body = json!({"input": "What is the capital of France?", "temperature": 0,
        "max_output_tokens": 20});
    let whole = server.post("/v1/responses", &body).ok();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(whole["output"][0]["content"][0]["text"], text);
    let events =
        server.post("/v1/responses", &with(body.clone(), json!({"stream": true}))).events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    let streamed: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(streamed, text.as_str().unwrap());
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"][0]["content"], whole["output"][0]["content"]);
    let call = json!({"tools": [{"type": "function", "name": "now"}], "tool_choice": "required",
        "max_output_tokens": 100, "parallel_tool_calls": false});
    let item = server.post("/v1/responses", &with(body.clone(), call)).ok()["output"][0].clone();
    assert_eq!((&item["type"], &item["arguments"]), (&json!("function_call"), &json!("{}")));
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
        "required": ["a"], "additionalProperties": false});
    let format =
        json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}});
    let shaped = server.post("/v1/responses", &with(body, format)).ok();
    let shaped: Value =
        serde_json::from_str(shaped["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(shaped["a"].is_boolean());
}

/// Starts a long request without reading from it.
fn endless(server: &Server) -> std::net::TcpStream {
    let body = chat(json!({"max_tokens": 19000, "ignore_eos": true, "stream": true})).to_string();
    let mut stream = server.connect();
    stream.write_all(&server::request(&server.address, "POST", CHAT, "", &body)).unwrap();
    stream
}

#[cfg(unix)]
#[test]
fn who_goes_away_is_cancelled_and_who_waits_is_next() {
    let slow = ["--ctx-size", "20000", "--draft=off"];
    let options = [&["--parallel", "1", "--max-queue", "1"][..], &slow].concat();
    let server = Server::start(&options);
    let mut first = endless(&server);
    first.read_exact(&mut [0; 20]).unwrap();
    server.wait_for("gemma_running_texts", 1.0);
    let second = endless(&server);
    server.wait_for("gemma_queue_length", 1.0);
    let refused = server.post(CHAT, &chat(json!({})));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    drop(second);
    drop(first);
    server.wait_for("gemma_running_texts", 0.0);
    server.post(CHAT, &chat(json!({}))).ok();
    server.signal(libc::SIGTERM);
    let (code, said) = server.wait();
    assert_eq!(code, 143);
    assert_eq!(said.matches("cancelled").count(), 2, "{said}");
    assert!(!said.contains("France"), "texts are not logged: {said}");
}

/// A client with all contexts gives one to another client, and its text continues later with the
/// same bytes. Neither client has the whole queue.
#[test]
fn a_client_leaves_room_for_others() {
    let keys = ["--api-key", "a", "--api-key", "b"];
    let options = ["--parallel", "2", "--max-queue", "4", "--log", "json", "--draft=off"];
    let server = Server::start(&[&keys[..], &options].concat());
    let sent = |key: &str, body: &Value| {
        let headers = format!("X-Api-Key: {key}\r\n");
        server.request("POST", CHAT, &headers, &body.to_string())
    };
    let long = |seed: u64| {
        let prompt = json!([{"role": "user", "content": "Tell me a long story."}]);
        json!({"messages": prompt, "seed": seed, "max_tokens": 700, "ignore_eos": true})
    };
    let text = |reply: server::Reply| reply.ok()["choices"][0]["message"]["content"].clone();
    let alone: Vec<Value> = (0..2).map(|seed| text(sent("a", &long(seed)))).collect();
    let metric = |name: &str| {
        let page = server.request("GET", "/metrics", "X-Api-Key: b\r\n", "").body;
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap().parse::<f64>().unwrap()
    };
    let wait_for = |name: &str, value: f64| {
        while metric(name) < value {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    std::thread::scope(|scope| {
        let texts: Vec<_> =
            (0..2).map(|seed| scope.spawn(move || text(sent("a", &long(seed))))).collect();
        wait_for("gemma_running_texts", 2.0);
        // Two more wait, which is this client's half of the queue.
        let waiting: Vec<_> = (0..2).map(|_| scope.spawn(|| sent("a", &chat(json!({}))))).collect();
        wait_for("gemma_queue_length", 2.0);
        let refused = sent("a", &chat(json!({})));
        assert_eq!(refused.status, 429, "{refused:?}");
        let other = sent("b", &chat(json!({}))).ok();
        assert!(texts.iter().all(|text| !text.is_finished()), "{other}");
        assert_eq!(metric("gemma_pauses_total"), 1.0);
        for (text, alone) in texts.into_iter().zip(&alone) {
            assert_eq!(text.join().unwrap(), *alone);
        }
        waiting.into_iter().for_each(|reply| drop(reply.join().unwrap().ok()));
    });
    let said = server.said();
    let reason = "\"reason\":\"2 texts are waiting, 2 of them from this client: try again later\"";
    assert!(said.contains(reason), "{said}");
}

#[cfg(unix)]
#[test]
fn running_answers_end_or_are_cut_at_the_grace_time() {
    let stream_of = |grace| {
        let slow = ["--ctx-size", "20000", "--draft=off"];
        let options = [&["--grace", grace, "--log", "json"][..], &slow].concat();
        let server = Server::start(&options);
        let mut streams: Vec<_> = (0..6).map(|_| endless(&server)).collect();
        server.wait_for("gemma_running_texts", 4.0);
        let begun = Instant::now();
        server.signal(libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(200));
        let late = std::net::TcpStream::connect(&server.address);
        assert!(late.is_err(), "nobody is let in any more");
        let texts: Vec<String> = streams
            .iter_mut()
            .map(|stream| server::read_reply(stream).map_or_else(String::new, |r| r.body))
            .collect();
        let (code, said) = server.wait();
        assert_eq!(code, 143);
        let lines: Vec<Value> =
            said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        assert!(lines.iter().filter(|l| l["path"] == CHAT).count() == 6, "{said}");
        (texts, begun.elapsed())
    };
    let (cut, time) = stream_of("1");
    assert!(time < Duration::from_secs(30), "{time:?}");
    assert!(cut.iter().all(|text| text.contains("shutting_down")), "{cut:?}");
    let server = Server::start(&[]);
    let body = chat(json!({"max_tokens": 200, "ignore_eos": true, "stream": true})).to_string();
    let mut stream = server.connect();
    stream.write_all(&server::request(&server.address, "POST", CHAT, "", &body)).unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    server.signal(libc::SIGTERM);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]") && rest.contains("\"length\""), "{rest}");
    assert_eq!(server.wait().0, 143);
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_at_once_and_a_killed_server_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let start = || Server::start_in(dir.path(), &["--grace", "600"], |_| {});
    let server = start();
    let mut stream = endless(&server);
    stream.read_exact(&mut [0; 20]).unwrap();
    server.signal(libc::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    server.signal(libc::SIGINT);
    assert_eq!(server.wait().0, 130);
    let server = start();
    let answer = server.post(CHAT, &chat(json!({}))).ok()["choices"].clone();
    let mut stream = endless(&server);
    stream.read_exact(&mut [0; 20]).unwrap();
    server.signal(libc::SIGKILL);
    assert_eq!(server.wait().0, 137);
    let server = start();
    assert_eq!(server.post(CHAT, &chat(json!({}))).ok()["choices"], answer);
}

#[test]
fn wrong_use_is_refused_before_anything_is_loaded() {
    gemma(&["serve", "--host", "0.0.0.0"], b"").fails(2, &["without a key", "--api-key-file"]);
    gemma(&["serve", "--api-key", "a b"], b"").fails(2, &["ASCII"]);
    gemma(&["serve", "--api-key-file", if cfg!(windows) { "NUL" } else { "/dev/null" }], b"")
        .fails(2, &["help: "]);
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    gemma(&["serve", "--port", port], b"").fails(1, &["cannot listen", "--port 0"]);
}
