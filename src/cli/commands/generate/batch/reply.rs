//! Replies to records.
//!
//! A reply holds nothing that differs from run to run, such as times: the same batch gives the same
//! bytes.

use super::job::{Failure, RecordKind, RecordLine};
use crate::cli::io::record::{FinishReason, Usage, VERSION};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

/// The answer to a record.
#[derive(Clone, Debug)]
pub struct RecordAnswer {
    pub text: String,
    /// Thoughts of the model; empty without any.
    pub reasoning: String,
    pub finish_reason: FinishReason,
    pub usage: Usage,
    pub seed: u64,
}

#[derive(Serialize)]
struct Ours<'a> {
    v: u32,
    id: &'a Value,
    text: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning: &'a str,
    finish_reason: FinishReason,
    usage: Usage,
    /// Null for a failure.
    seed: Option<u64>,
    error: Option<&'a Failure>,
}

/// Returns the reply as one line with its line break.
pub fn line(line: &RecordLine, model: &str, answer: &Result<RecordAnswer, Failure>) -> String {
    let mut reply = match line.kind {
        RecordKind::Ours => ours(line, answer),
        RecordKind::OpenAiChat | RecordKind::OpenAiText => openai(line, model, answer).to_string(),
    };
    reply.push('\n');
    reply
}

fn ours(line: &RecordLine, answer: &Result<RecordAnswer, Failure>) -> String {
    let reply = match answer {
        Ok(a) => Ours {
            v: VERSION,
            id: &line.id,
            text: &a.text,
            reasoning: &a.reasoning,
            finish_reason: a.finish_reason,
            usage: a.usage.clone(),
            seed: Some(a.seed),
            error: None,
        },
        Err(failure) => Ours {
            v: VERSION,
            id: &line.id,
            text: "",
            reasoning: "",
            finish_reason: FinishReason::Error,
            usage: Usage::default(),
            seed: None,
            error: Some(failure),
        },
    };
    serde_json::to_string(&reply).expect("strings and numbers")
}

fn openai(line: &RecordLine, model: &str, answer: &Result<RecordAnswer, Failure>) -> Value {
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
            let mut message = json!({"role": "assistant", "content": a.text});
            if !a.reasoning.is_empty() {
                message["reasoning_content"] = json!(a.reasoning);
            }
            let (object, content) = match line.kind {
                RecordKind::OpenAiText => ("text_completion", ("text", json!(a.text))),
                _ => ("chat.completion", ("message", message)),
            };
            let choice = json!({
                "index": 0, content.0: content.1, "finish_reason": finish, "logprobs": null,
            });
            let (prompt, completion) = (a.usage.prompt_tokens, a.usage.completion_tokens);
            let usage = json!({
                "prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion,
            });
            // Their `created` is a time; a batch that is run again gives the same bytes.
            let body = json!({
                "id": id, "object": object, "created": 0, "model": model, "choices": [choice],
                "usage": usage,
            });
            let response = json!({"status_code": 200, "request_id": id, "body": body});
            json!({"id": id, "custom_id": line.id, "response": response, "error": null})
        }
        Err(failure) => {
            let status = if failure.code == 1 { 500 } else { 400 };
            let error = json!({
                "message": failure.message, "type": "invalid_request_error", "param": null,
                "code": failure.code,
            });
            let response =
                json!({"status_code": status, "request_id": id, "body": {"error": error}});
            json!({
                "id": id, "custom_id": line.id, "response": response,
                "error": {"code": failure.code, "message": failure.message},
            })
        }
    }
}

/// The record of a reply that is read back.
#[derive(Debug)]
pub struct ReadReply {
    pub id: Value,
    pub failed: bool,
}

/// First bytes of a reply: our form, and OpenAI's.
const HEADS: [&[u8]; 2] = [b"{\"v\":1,\"id\":", b"{\"id\":\""];

/// Returns whether a reply can begin with these bytes, as far as its first field tells.
pub fn may_begin(bytes: &[u8]) -> bool {
    HEADS.iter().any(|head| head.starts_with(bytes) || bytes.starts_with(head))
}

/// Reads a whole line, or returns `None` if [`line`] did not write it.
pub fn read(line: &[u8]) -> Option<ReadReply> {
    let reply: Map<String, Value> =
        may_begin(line).then(|| serde_json::from_slice(line).ok()).flatten()?;
    let failed = !reply.get("error")?.is_null();
    let is_ours = reply.contains_key("text");
    match reply.get("custom_id").filter(|_| reply.contains_key("response")) {
        Some(id) if !is_ours => Some(ReadReply { id: id.clone(), failed }),
        None if is_ours => Some(ReadReply { id: reply.get("id")?.clone(), failed }),
        _ => None,
    }
}

/// Returns whether bytes without a line break can be the beginning of a reply.
pub fn begins(bytes: &[u8]) -> bool {
    let is_cut = || serde_json::from_slice::<IgnoredAny>(bytes).is_err_and(|e| e.is_eof());
    may_begin(bytes) && (read(bytes).is_some() || is_cut())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_so_is_every_beginning_of_it() {
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2 };
        let text = "\u{e4}\u{1f600} \"quoted\"\\\n\u{1}".to_owned();
        let good = Ok(RecordAnswer {
            text,
            reasoning: "Hm.".into(),
            finish_reason: FinishReason::Length,
            usage,
            seed: 1 << 52,
        });
        let bad =
            Err(Failure { code: 7, message: "too long".into(), help: Some("shorten it".into()) });
        let records = [
            r#"{"id": "\u00e4", "prompt": "a"}"#,
            r#"{"id": {"a": [1, null]}, "prompt": "a"}"#,
            r#"{"prompt": "a"}"#,
            r#"{"custom_id": "c1", "body": {"prompt": "a"}}"#,
            r#"{"custom_id": 5, "url": "/v1/completions", "body": {"prompt": "a"}}"#,
        ];
        for (record, answer) in records.iter().flat_map(|record| [(record, &good), (record, &bad)])
        {
            let record = RecordLine::parse(record.as_bytes(), 9);
            let line = line(&record, "m", answer);
            let read = read(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((&read.id, read.failed), (&record.id, answer.is_err()));
            for end in 0..line.len() {
                assert!(begins(&line.as_bytes()[..end]), "{}", &line[..end]);
            }
        }
    }
}
