//! llama-server's own endpoints, as llama.vim and SillyTavern use them.

use crate::server::Server;
use crate::shell::gemma_in;
use serde_json::json;
use std::fs;

const CHAT: &str = "/v1/chat/completions";

#[test]
fn llama_servers_form_continues_what_its_template_makes() {
    let server = Server::start(&["--ctx-size", "300"]);
    let messages = json!([{"role": "user", "content": "Who are you?"}]);
    let rendered = server.post("/apply-template", &json!({"messages": messages})).ok();
    let prompt = rendered["prompt"].as_str().unwrap();
    assert!(prompt.contains("Who are you?") && prompt.starts_with('<'), "{prompt:?}");
    let props = server.get("/props").ok();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 300);
    let bos = props["bos_token"].as_str().unwrap();
    assert!(!prompt.starts_with(bos) && props["chat_template"].as_str().unwrap().contains("role"));
    // The command line prints the same.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("talk.json"), messages.to_string()).unwrap();
    let shown = |more: &[&str]| {
        let args = [&["tokenize", "--rendered"], more].concat();
        gemma_in(dir.path(), &args, b"").ok().text().to_owned()
    };
    assert_eq!(shown(&["--messages", "talk.json"]), format!("{bos}{prompt}"));
    assert_eq!(shown(&["--template", "Who are you?"]), format!("{bos}{prompt}"));
    gemma_in(dir.path(), &["tokenize", "--rendered"], b"").fails(2, &["no prompt"]);
    // The rendered prompt is continued by the text of the chat, token for token.
    let chat = json!({"messages": messages, "temperature": 0, "max_tokens": 12});
    let chat = server.post(CHAT, &chat).ok();
    let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 12});
    let whole = server.post("/completion", &body).ok();
    assert_eq!(whole["content"], chat["choices"][0]["message"]["content"]);
    assert_eq!(whole["tokens_evaluated"], chat["usage"]["prompt_tokens"]);
    let limited = chat["choices"][0]["finish_reason"] == "length";
    let kind = if limited { "limit" } else { "eos" };
    assert_eq!((&whole["stop"], &whole["stop_type"]), (&json!(true), &json!(kind)));
    // The same as a stream, from the text and from its tokens.
    let tokens = server.post("/tokenize", &json!({"content": prompt, "add_special": true})).ok();
    for given in [json!(prompt), tokens["tokens"].clone()] {
        let body = json!({"prompt": given, "temperature": 0, "n_predict": 12, "stream": true,
            "cache_prompt": true, "samplers": ["top_k", "top_p", "min_p", "temperature"]});
        let events = server.post("/completion", &body).events();
        let text: String = events.iter().map(|e| e["content"].as_str().unwrap()).collect();
        assert_eq!(whole["content"], text);
        let stops: Vec<bool> = events.iter().map(|e| e["stop"].as_bool().unwrap()).collect();
        assert!(stops.last() == Some(&true) && stops.iter().filter(|stop| **stop).count() == 1);
    }
    for (path, body, status, word) in [
        ("/completion", json!({"prompt": "a", "grammar": "root ::= \"a\""}), 400, "GBNF"),
        ("/completion", json!({"prompt": "a", "n_probs": 3}), 400, "n_probs"),
        ("/completion", json!({"prompt": {"a": 1}}), 400, "'prompt'"),
        ("/completion", json!({"prompt": [-1]}), 400, "'prompt'"),
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"}), 501, "filling text in"),
        ("/apply-template", json!({}), 400, "'messages'"),
    ] {
        let reply = server.post(path, &body);
        assert!(reply.status == status && reply.body.contains(word), "{body}: {reply:?}");
    }
}

/// A list of samplers turns off those that it lacks, as llama.vim's requests have it.
#[test]
fn samplers_that_a_list_lacks_are_off() {
    let server = Server::start(&["--ctx-size", "300"]);
    let ask = |more: serde_json::Value| {
        let mut body = json!({"prompt": "Once upon a time", "n_predict": 12, "seed": 3,
            "temperature": 1.5, "min_p": 0.02, "repeat_penalty": 1.3, "top_k": 9});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/completion", &body)
    };
    let text = |more| ask(more).ok()["content"].as_str().unwrap().to_owned();
    let plain = text(json!({}));
    let filtered = text(json!({"repeat_penalty": 1, "top_k": 0, "top_p": 1}));
    assert_ne!(plain, filtered);
    for list in
        [json!(["min_p", "temperature"]), json!("mt"), json!(["dry", "min_p", "temperature"])]
    {
        assert_eq!(text(json!({"samplers": list})), filtered, "{list}");
    }
    for list in [json!("edskypmxt"), json!(["penalties", "top_k", "top_p", "min_p", "temperature"])]
    {
        assert_eq!(text(json!({"samplers": list})), plain, "{list}");
    }
    let bare = json!({"repeat_penalty": 1, "top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1});
    assert_eq!(text(json!({"samplers": []})), text(bare));
    for list in [json!(["min_p", "top_k"]), json!(["infill"]), json!([1]), json!(7), json!("q")] {
        let reply = ask(json!({"samplers": list}));
        assert!(reply.status == 400 && reply.body.contains("'samplers' lists"), "{reply:?}");
    }
    // One value under the several names that SillyTavern sends.
    let names = json!({"repeat_penalty": null, "rep_pen": 1.3, "rep_pen_range": 4, "seed": null,
        "sampler_seed": 3});
    assert_eq!(text(names), text(json!({"repeat_last_n": 4})));
    for (path, reply) in [
        ("/slots", server.get("/slots")),
        ("/slots/0", server.post("/slots/0?action=erase", &json!({}))),
    ] {
        assert!(
            reply.status == 501 && reply.body.contains("leave out the slot"),
            "{path}: {reply:?}"
        );
    }
}
