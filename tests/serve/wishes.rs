//! Fields that change no text, and messages in any order.

use crate::forms::{CHAT, chat, question, with};
use crate::server::Server;
use crate::shell::with_model;
use serde_json::{Value, json};

/// The answer is the same with fields that change no text.
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
    let note = "note: 'store' is passed over: it changes no text\n";
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
