//! Fields that change no text, and messages in any order.

use crate::forms::{CHAT, chat, question, with};
use crate::server::Server;
use crate::shell::with_model;
use serde_json::{Value, json};

/// The answer does not depend on fields that change no text.
#[test]
fn wishes_without_effect_and_all_orders_of_messages_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    let server = Server::start_in(dir.path(), &["-m", "m"], |_| {});
    let text =
        |body: &Value| server.post(CHAT, body).ok()["choices"][0]["message"]["content"].clone();
    let plain = text(&chat(json!({})));
    let wishes = json!({"reasoning_effort": "high", "thinking": {"type": "adaptive"},
        "verbosity": "low", "store": true, "cache_prompt": true, "id_slot": -1, "seed": -1,
        "top_k": -1, "max_tokens": 20.0, "typical_p": 1.0, "stop": "", "unknown": null,
        "stream_options": {"include_usage": true}, "tools": [{"type": "web_search"}]});
    assert_eq!(text(&chat(wishes)), plain);
    let said = server.said();
    let note = "note: 'store' is ignored: it changes no text\n";
    assert!(said.contains(note) && said.contains("tools of type \"web_search\""), "{said}");

    let user = |text: &str| json!({"role": "user", "content": text});
    let model = |text: &str| json!({"role": "assistant", "content": text});
    let system = |text: &str| json!({"role": "system", "content": text});
    let ask = |messages: Value| text(&chat(json!({"messages": messages})));
    let joined = ask(json!([system("Be kind.\n\nBe brief."), user("Hello.\n\nWho are you?")]));
    let apart = [system("Be kind."), user("Hello."), system("Be brief."), user("Who are you?")];
    assert_eq!(ask(json!(apart)), joined);
    let first = ask(json!([model("Welcome."), user("Who are you?")]));
    assert_eq!(ask(json!([user(""), model("Welcome."), user("Who are you?")])), first);
    ask(json!([system("Tell a joke.")]));

    let begun = json!({"messages": [question()[0], model("The capital")], "max_tokens": 5});
    let apart = chat(with(begun.clone(), json!({"continue_final_message": false})));
    let whole = text(&chat(with(
        begun.clone(),
        json!({"continue_final_message": true,
        "add_generation_prompt": false}),
    )));
    let anthropic = with(json!({"temperature": 0}), begun);
    let anthropic = server.post("/v1/messages", &anthropic).ok()["content"][0]["text"].clone();
    assert_eq!(whole, anthropic);
    assert_ne!(text(&apart), whole);
}

/// Options with a special meaning at the edge of their range, in the forms of several servers.
#[test]
fn edges_of_options_mean_what_their_servers_say() {
    let server = Server::start(&[]);
    let text = |reply: &Value| reply["choices"][0]["message"].clone();
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let ask = |more: Value| {
        let plain = json!({"messages": messages, "max_tokens": 24, "seed": 5, "temperature": 2});
        server.post(CHAT, &with(plain, more))
    };
    // Both spellings turn top-k off, and the model's own top-k would change this answer.
    let [none, off] = [-1, 0].map(|k| text(&ask(json!({"top_k": k, "top_p": 1})).ok()));
    assert_eq!(none, off);
    assert_ne!(none, text(&ask(json!({"top_k": 1})).ok()));
    let negative = json!({"seed": -7});
    let reply = ask(negative.clone());
    assert_eq!(reply.header("x-seed"), Some(&*(-7_i64 as u64).to_string()));
    assert_eq!(text(&reply.ok()), text(&ask(negative).ok()));

    let count = |prompt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "n": 2});
        let usage = server.post("/v1/completions", &body).ok()["usage"]["prompt_tokens"].clone();
        usage.as_u64().unwrap()
    };
    let each = ["The sky is", "One two three four"].map(|prompt| count(json!(prompt)));
    assert_eq!(count(json!(["The sky is", "One two three four"])), each[0] + each[1]);

    let refused = |reply: crate::server::Reply, status: u16, word: &str| {
        assert!(reply.status == status && reply.body.contains(word), "{reply:?}");
    };
    refused(ask(json!({"continue_final_message": true})), 400, "assistant");
    let image = json!({"prompt": "a", "raw": true, "images": ["aGk="]});
    refused(server.post("/api/generate", &image), 400, "images");
    let zipped = "Content-Encoding: gzip\r\n";
    refused(server.request("POST", CHAT, zipped, "x"), 415, "compressed");

    let body = json!({"messages": messages, "max_tokens": 1});
    let reply = server.post("/v1/messages", &body);
    assert!(reply.header("request-id").is_some_and(|id| id.starts_with("req_")), "{reply:?}");

    let tokens = |body: Value| server.post("/tokenize", &body).ok()["tokens"].clone();
    let plain = tokens(json!({"content": "Hi", "with_pieces": true}));
    assert_eq!(plain[0]["piece"], "Hi");
    let bos = json!({"content": "Hi", "add_special": true});
    assert_eq!(tokens(bos), json!([2, plain[0]["id"]]));
    assert_eq!(tokens(json!({"content": "<bos>"})), json!([2]));
    let spelled = tokens(json!({"content": "<bos>", "parse_special": false}));
    assert!(spelled.as_array().unwrap().len() > 1, "{spelled}");
}
