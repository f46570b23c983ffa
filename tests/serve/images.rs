//! Images in all API forms: one answer for one image, equal to that of the command, and refusals
//! before anything is decoded.

use crate::{common, server, shell};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::sighted::{FAMILIES, picture, png, write_model};
use serde_json::{Value, json};
use server::{Reply, Server};
use shell::gemma_in;
use std::fs;
use tempfile::TempDir;

const SIZE: [usize; 2] = [60, 40];

fn setup() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        write_model(family, 100, &dir.path().join(family));
    }
    dir
}

fn serve(dir: &TempDir, model: &str) -> Server {
    Server::start_in(dir.path(), &["-m", model, "-c", "512", "--draft", "ngram"], |_| {})
}

/// Returns an image as base64.
fn data(seed: usize) -> String {
    STANDARD.encode(png(SIZE, &picture(SIZE, seed)))
}

fn url(seed: usize) -> String {
    format!("data:image/png;base64,{}", data(seed))
}

fn post(server: &Server, path: &str, body: Value) -> Reply {
    server.post(path, &body)
}

/// Adds fields by which the answer is the same in all forms.
fn ask(mut body: Value, limit: &str) -> Value {
    let more = json!({"temperature": 4, "seed": 5, "top_k": 0, "top_p": 1, "min_p": 0});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body[limit] = 24.into();
    body
}

fn chat(server: &Server, content: Value) -> Reply {
    let body = json!({"messages": [{"role": "user", "content": content}]});
    post(server, "/v1/chat/completions", ask(body, "max_tokens"))
}

fn text(reply: Reply, pointer: &str) -> String {
    let reply = reply.ok();
    let found = reply.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_else(|| panic!("no {pointer}: {reply}")).to_owned()
}

const CHAT: &str = "/choices/0/message/content";

#[test]
fn a_picture_is_the_same_in_all_forms_and_on_the_command_line() {
    let dir = setup();
    fs::write(dir.path().join("a.png"), png(SIZE, &picture(SIZE, 1))).unwrap();
    for family in FAMILIES {
        let options = ["--temp", "4", "--top-k", "0", "--top-p", "1", "--min-p", "0"];
        let words = ["generate", "-m", family, "--image", "a.png", "See: ab", "-n", "24", "-q"];
        let words = [&words[..], &options, &["--seed", "5", "--json"]].concat();
        let want = gemma_in(dir.path(), &words, b"").ok().json()["text"].clone();
        let want = want.as_str().unwrap().to_owned();
        let server = serve(&dir, family);
        let part = json!({"type": "image_url", "image_url": {"url": url(1)}});
        let content = json!([part, {"type": "text", "text": "See: ab"}]);
        assert_eq!(text(chat(&server, content), CHAT), want, "{family}: OpenAI");
        let input = json!([{"role": "user", "content": [
            {"type": "input_image", "image_url": url(1)},
            {"type": "input_text", "text": "See: ab"}]}]);
        let body = ask(json!({"input": input}), "max_output_tokens");
        let reply = post(&server, "/v1/responses", body);
        assert_eq!(text(reply, "/output/0/content/0/text"), want, "{family}: Responses");
        let source = json!({"type": "base64", "media_type": "image/png", "data": data(1)});
        let content = json!([{"type": "image", "source": source},
            {"type": "text", "text": "See: ab"}]);
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let reply = post(&server, "/v1/messages", ask(body, "max_tokens"));
        assert_eq!(text(reply, "/content/0/text"), want, "{family}: Anthropic");
        let mut options = ask(json!({}), "num_predict");
        options["repeat_penalty"] = 1.into();
        let message = json!({"role": "user", "content": "See: ab", "images": [data(1)]});
        let body = json!({"messages": [message], "options": &options, "stream": false});
        let reply = post(&server, "/api/chat", body);
        assert_eq!(text(reply, "/message/content"), want, "{family}: Ollama");
        let body = json!({"prompt": "See: ab", "images": [data(1)], "options": options,
            "stream": false});
        let reply = post(&server, "/api/generate", body);
        assert_eq!(text(reply, "/response"), want, "{family}: Ollama's other form");
        let body = json!({"images": [data(1)], "options": options, "stream": false});
        let reply = post(&server, "/api/generate", body).ok();
        assert!(reply["eval_count"].as_u64() > Some(0), "{family}: no question: {reply}");
        let chances = |seed| {
            let part = json!({"type": "image_url", "image_url": {"url": url(seed)}});
            let body = json!({"messages": [{"role": "user", "content": [part]}], "logprobs": true,
                "max_tokens": 4, "temperature": 0});
            let reply = post(&server, "/v1/chat/completions", body).ok();
            reply["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64().unwrap()
        };
        // The first image was computed once for all questions above.
        let computed = || server.metric("gemma_images_computed_total");
        assert_eq!((chances(1), computed()), (chances(1), 1.0), "{family}");
        assert_ne!(chances(1), chances(2), "{family}: another picture of one size");
        assert_eq!(computed(), 2.0, "{family}");
    }
}

/// Returns the body of a client of Anthropic's API that read an image with a tool.
fn tool_result() -> Value {
    json!({
        "model": "claude-sonnet-4-5", "max_tokens": 24, "temperature": 0,
        "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": {
            "type": "object", "properties": {"file_path": {"type": "string"}},
            "required": ["file_path"]}}],
        "tool_choice": {"type": "none"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is in a.png?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_01",
                "name": "Read", "input": {"file_path": "/tmp/a.png"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01",
                "content": [{"type": "image", "source": {"type": "base64",
                    "media_type": "image/png", "data": data(1)}}]}]},
        ],
    })
}

#[test]
fn a_tool_may_bring_a_picture() {
    let dir = setup();
    for family in FAMILIES {
        let server = serve(&dir, family);
        let tokens = |body: &Value| {
            let reply = post(&server, "/v1/messages", body.clone()).ok();
            let usage = |name: &str| reply["usage"][name].as_u64().unwrap_or(0);
            usage("input_tokens") + usage("cache_read_input_tokens")
        };
        let (body, mut without) = (tool_result(), tool_result());
        without["messages"][2]["content"][0]["content"] = json!("[image]");
        let more = tokens(&body) - tokens(&without);
        assert!(more > 16, "{family}: {more} tokens of a picture");
        let mut count = body.clone();
        for field in ["max_tokens", "temperature"] {
            count.as_object_mut().unwrap().remove(field);
        }
        let counted = post(&server, "/v1/messages/count_tokens", count).ok();
        assert_eq!(counted["input_tokens"], tokens(&body), "{family}");
    }
}

#[test]
fn refusals_come_before_the_work() {
    let dir = setup();
    let server = serve(&dir, "gemma3");
    let show = |url: &str| json!([{"type": "image_url", "image_url": {"url": url}}, "a"]);
    // A header that claims 100,000 x 100,000 pixels.
    let huge = format!("data:;base64,{}", STANDARD.encode(png([100_000, 100_000], &[])));
    let cut = format!("data:;base64,{}", STANDARD.encode(&png(SIZE, &picture(SIZE, 1))[..400]));
    for (url, said) in [
        ("http://127.0.0.1/a.png", "not fetched"),
        ("/etc/passwd", "not fetched"),
        ("data:image/png;base64,####", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "unknown format"),
        (&huge, "pixels"),
        (&cut, "damaged"),
    ] {
        let reply = chat(&server, show(url));
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.body.contains(said), "{said}: {reply:?}");
    }
    let many: Vec<Value> =
        (0..17).map(|_| json!({"type": "image_url", "image_url": {"url": url(1)}})).collect();
    assert_eq!(chat(&server, many.into()).status, 400);
    // The server continues, and a text model names the file that it lacks.
    text(chat(&server, show(&url(1))), CHAT);
    drop(server);
    let demo = Server::start(&[]);
    let reply = chat(&demo, show(&url(1)));
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(reply.body.contains("reads no images"), "{reply:?}");
}

/// Lines of a batch give the server's answers.
#[test]
fn a_batch_reads_pictures_beside_it() {
    let dir = setup();
    fs::create_dir(dir.path().join("in")).unwrap();
    fs::write(dir.path().join("in/a.png"), png(SIZE, &picture(SIZE, 1))).unwrap();
    let part = json!({"type": "image_url", "image_url": {"url": url(1)}});
    let lines = [
        json!({"id": 1, "prompt": "See: ab", "image": "a.png", "seed": 5}),
        json!({"id": 2, "prompt": "<image>See: ab", "images": ["a.png"], "seed": 5}),
        json!({"id": 3, "seed": 5, "messages": [{"role": "user",
            "content": [part, {"type": "text", "text": "See: ab"}]}]}),
        json!({"id": 4, "prompt": "See: ab", "seed": 5}),
        json!({"id": 5, "prompt": "See: ab", "image": "none.png"}),
    ];
    let lines = lines.map(|line| line.to_string()).join("\n");
    fs::write(dir.path().join("in/batch.jsonl"), lines).unwrap();
    let words = ["generate", "-m", "gemma4", "--batch", "in/batch.jsonl", "--temp", "4", "-q"];
    let run = gemma_in(dir.path(), &[&words[..], &["-n", "24"]].concat(), b"").ok();
    let replies: Vec<Value> =
        run.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Texts in parallel give the same bytes.
    let at_once = [&words[..], &["-n", "24", "--parallel", "4"]].concat();
    assert_eq!(gemma_in(dir.path(), &at_once, b"").ok().text(), run.text());
    let text = |i: usize| replies[i]["text"].as_str().unwrap();
    assert!(!text(0).is_empty() && text(0) == text(1) && text(0) == text(2), "{replies:?}");
    assert_ne!(text(0), text(3));
    assert!(replies[4]["error"].to_string().contains("none.png"), "{replies:?}");
}
