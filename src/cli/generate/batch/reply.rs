//! The line that answers a line.
//!
//! It holds nothing that differs from run to run, such as times: the same batch gives the same bytes.

use super::job::{Failure, Kind, Line};
use crate::cli::record::{FinishReason, Usage, VERSION};
use serde::Serialize;
use serde_json::{Value, json};

/// What became of a record.
#[derive(Clone, Debug)]
pub struct Answer {
    pub text: String,
    pub finish_reason: FinishReason,
    pub usage: Usage,
    pub seed: u64,
}

#[derive(Serialize)]
struct Ours<'a> {
    v: u32,
    id: &'a Value,
    text: &'a str,
    finish_reason: FinishReason,
    usage: Usage,
    /// Null where nothing was sampled.
    seed: Option<u64>,
    error: Option<&'a Failure>,
}

/// The reply as one line with its end.
pub fn line(line: &Line, model: &str, answer: &Result<Answer, Failure>) -> String {
    let mut reply = match line.kind {
        Kind::Ours => ours(line, answer),
        Kind::OpenAiChat | Kind::OpenAiText => openai(line, model, answer).to_string(),
    };
    reply.push('\n');
    reply
}

fn ours(line: &Line, answer: &Result<Answer, Failure>) -> String {
    let reply = match answer {
        Ok(a) => Ours {
            v: VERSION,
            id: &line.id,
            text: &a.text,
            finish_reason: a.finish_reason,
            usage: a.usage.clone(),
            seed: Some(a.seed),
            error: None,
        },
        Err(failure) => Ours {
            v: VERSION,
            id: &line.id,
            text: "",
            finish_reason: FinishReason::Error,
            usage: Usage::default(),
            seed: None,
            error: Some(failure),
        },
    };
    serde_json::to_string(&reply).expect("strings and numbers")
}

fn openai(line: &Line, model: &str, answer: &Result<Answer, Failure>) -> Value {
    let id = match &line.id {
        Value::String(id) => id.clone(),
        other => other.to_string(),
    };
    match answer {
        Ok(a) => {
            let finish = match a.finish_reason {
                FinishReason::Length => "length",
                _ => "stop",
            };
            let (object, content) = match line.kind {
                Kind::OpenAiText => ("text_completion", ("text", json!(a.text))),
                _ => ("chat.completion", ("message", json!({"role": "assistant", "content": a.text}))),
            };
            let choice = json!({"index": 0, content.0: content.1, "finish_reason": finish, "logprobs": null});
            let (prompt, completion) = (a.usage.prompt_tokens, a.usage.completion_tokens);
            let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion});
            // Their `created` is a time; a batch that is run again gives the same bytes.
            let body = json!({"id": id, "object": object, "created": 0, "model": model, "choices": [choice], "usage": usage});
            let response = json!({"status_code": 200, "request_id": id, "body": body});
            json!({"id": id, "custom_id": line.id, "response": response, "error": null})
        }
        Err(failure) => {
            let status = if failure.code == 1 { 500 } else { 400 };
            let error = json!({"message": failure.message, "type": "invalid_request_error", "param": null, "code": failure.code});
            let response = json!({"status_code": status, "request_id": id, "body": {"error": error}});
            json!({"id": id, "custom_id": line.id, "response": response, "error": {"code": failure.code, "message": failure.message}})
        }
    }
}
