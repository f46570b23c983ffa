//! Bodies of HTTP requests, and records of a batch.

use super::made_up::{Cursor, edited, raw_or};
use super::texts::TOKENIZER;
use gemma::cli::commands::generate::batch::job::RecordLine;
use gemma::cli::commands::serve::testing::RequestBodies;
use gemma::models::Config;
use gemma::util::child;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// Fields of all forms.
const FIELDS: &str = r#"
    model messages role content type text image_url input_text name description parameters
    input_schema strict tools tool_choice function arguments tool_calls tool_call_id tool_use
    tool_result tool_use_id call_id function_call function_call_output input output instructions
    system prompt suffix raw images format options num_predict num_ctx think thinking stream
    stream_options include_usage stop stop_sequences n best_of echo seed temperature top_p top_k
    min_p repeat_penalty repetition_penalty repeat_last_n presence_penalty frequency_penalty
    logit_bias logprobs top_logprobs max_tokens max_completion_tokens max_output_tokens
    response_format json_schema json_object schema grammar guided_regex guided_json
    structured_outputs regex ignore_eos continue_final_message add_generation_prompt
    chat_template_kwargs enable_thinking reasoning_effort reasoning_content keep_alive tokens
    add_special add_special_tokens id custom_id method url body prefill greedy user metadata"#;

/// Reads bodies like the server, which starts a child process for each grammar.
static SERVED: LazyLock<RequestBodies> = LazyLock::new(|| {
    child::require();
    let config = include_str!("../../draft/demo-target/config.json");
    let mut config: Value = serde_json::from_str(config).expect("it is JSON");
    config["vocab_size"] = TOKENIZER.vocab().into();
    let config = Config::from_json(&config).expect("it is good");
    RequestBodies::new(config, TOKENIZER.clone())
});

/// A valid body of each form, in the order of [`RequestBodies::read`].
static BODIES: LazyLock<[Value; RequestBodies::FORMS as usize]> = LazyLock::new(|| {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"]});
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    let chat = json!({
        "model": "fuzzed",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function",
                    "function": {"name": "f", "arguments": "{\"a\": 1}"}},
            ]},
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ],
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "stream": true, "stream_options": {"include_usage": true}, "stop": ["x", "yy"], "n": 2,
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "logit_bias": {"42": -100},
        "logprobs": true, "top_logprobs": 2, "seed": 1, "max_tokens": 3,
        "response_format": {"type": "text"},
    });
    let completions = json!({
        "prompt": ["Hi", "<bos>Hi"], "max_tokens": 3, "logprobs": 1, "echo": true, "suffix": null,
        "n": 1, "best_of": 1, "stop": "x", "grammar": "start: \"x\"", "seed": 1,
    });
    let responses = json!({
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ],
        "instructions": "s", "max_output_tokens": 9, "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        "tools": [{"type": "function", "name": "f", "parameters": schema}],
    });
    let messages = json!({
        "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "7"},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"], "thinking": {"type": "disabled"},
    });
    let ollama = json!({
        "model": "m",
        "messages": [
            {"role": "user", "content": "Hi", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "f", "arguments": {"a": 1}}},
            ]},
            {"role": "tool", "content": "7", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": function}], "format": schema,
        "options": {"num_predict": 3, "temperature": 0.5, "seed": 1, "stop": ["x"], "top_k": 4},
        "stream": false, "think": false, "keep_alive": "5m",
    });
    let generate = json!({
        "model": "m", "prompt": "Hi", "system": "s", "raw": false, "format": "json",
        "options": {"num_predict": 3, "repeat_penalty": 1.1}, "stream": true, "context": [],
    });
    let tokenize = json!({"content": "a <bos> b", "add_special": true, "model": "m",
        "add_special_tokens": true});
    let detokenize = json!({"tokens": [2, 9, 300, 4_294_967_295_u32], "model": "m"});
    let llama = json!({"prompt": ["a", 5], "n_predict": 3, "top_k": 4, "json_schema": schema,
        "stream": true, "cache_prompt": true, "stop": ["x"], "seed": 1, "n_probs": 2});
    [
        chat,
        completions,
        responses,
        messages.clone(),
        ollama,
        generate,
        messages,
        tokenize,
        detokenize,
        llama,
    ]
});

/// Reads a body. The first byte selects its form.
pub fn server(data: &[u8]) {
    if let Some((form, body)) = data.split_first() {
        SERVED.read(*form, body);
    }
}

/// Reads an edited body of each form.
pub fn bodies(data: &[u8]) {
    let mut cursor = Cursor::new(data);
    let form = cursor.byte() % RequestBodies::FORMS;
    let body = edited(&mut cursor, &BODIES[usize::from(form)], FIELDS);
    SERVED.read(form, &body);
}

/// Reads a line of a batch.
pub fn batch(data: &[u8]) {
    static LINES: LazyLock<[Value; 2]> = LazyLock::new(|| {
        let ours = json!({
            "id": 7, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_tokens": 4, "stop": ["x"], "seed": 1, "temperature": 0.5, "greedy": false,
            "logit_bias": {"42": -1}, "json_schema": {"type": "object"},
        });
        let mut body = BODIES[0].clone();
        body.as_object_mut().expect("it is one").retain(|name, _| !name.starts_with("stream"));
        let openai = json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": body});
        [ours, openai]
    });
    let bytes = raw_or(data, |cursor| {
        let base = &LINES[cursor.index(LINES.len())];
        edited(cursor, base, FIELDS)
    });
    let _ = RecordLine::parse(&bytes, 1).0.seed(7);
}
