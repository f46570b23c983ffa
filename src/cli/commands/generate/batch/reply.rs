//! The line that answers a line.
//!
//! It holds nothing that differs from run to run, such as times: the same batch gives the same
//! bytes.

use super::job::{Failure, Kind, Line};
use crate::cli::io::record::{FinishReason, Usage, VERSION};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
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
                _ => (
                    "chat.completion",
                    ("message", json!({"role": "assistant", "content": a.text})),
                ),
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
            let response =
                json!({"status_code": status, "request_id": id, "body": {"error": error}});
            json!({"id": id, "custom_id": line.id, "response": response, "error": {"code": failure.code, "message": failure.message}})
        }
    }
}

/// What a line that [`line`] wrote says of its record.
#[derive(Debug)]
pub struct Read {
    pub id: Value,
    pub failed: bool,
}

/// [`Ours`] as it is read back.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OursBack {
    v: u32,
    id: Value,
    #[serde(rename = "text")]
    _text: String,
    #[serde(rename = "finish_reason")]
    _finish_reason: String,
    #[serde(rename = "usage")]
    _usage: UsageBack,
    #[serde(rename = "seed")]
    _seed: Option<u64>,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UsageBack {
    #[serde(rename = "prompt_tokens")]
    _prompt_tokens: u64,
    #[serde(rename = "completion_tokens")]
    _completion_tokens: u64,
}

/// A line in the form of OpenAI's answers, as it is read back.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenAiBack {
    id: String,
    custom_id: Value,
    response: ResponseBack,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponseBack {
    #[serde(rename = "status_code")]
    _status_code: u16,
    request_id: String,
    #[serde(rename = "body")]
    _body: IgnoredAny,
}

/// How lines begin: ours, and those in OpenAI's form.
const HEADS: [&[u8]; 2] = [b"{\"v\":1,\"id\":", b"{\"id\":\""];

/// Whether a line of answers can begin with these bytes, as far as its first field tells.
pub fn may_begin(bytes: &[u8]) -> bool {
    HEADS.iter().any(|head| head.starts_with(bytes) || bytes.starts_with(head))
}

/// Reads a whole line; `None` if [`line`] did not write it.
pub fn read(line: &[u8]) -> Option<Read> {
    if !may_begin(line) {
        return None;
    }
    if let Ok(OursBack { v: VERSION, id, error, .. }) = serde_json::from_slice(line) {
        return Some(Read { id, failed: error.is_some() });
    }
    let OpenAiBack { id, custom_id, response, error } = serde_json::from_slice(line).ok()?;
    (id == response.request_id).then_some(Read { id: custom_id, failed: error.is_some() })
}

/// Whether bytes without an end of line can be the beginning of a line that [`line`] wrote.
pub fn begins(bytes: &[u8]) -> bool {
    fn holds<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> bool {
        serde_json::from_slice::<T>(bytes).map_or_else(|error| error.is_eof(), |_| true)
    }
    may_begin(bytes) && (holds::<OursBack>(bytes) || holds::<OpenAiBack>(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_so_is_every_beginning_of_it() {
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2 };
        let text = "\u{e4}\u{1f600} \"quoted\"\\\n\u{1}".to_owned();
        let good = Ok(Answer { text, finish_reason: FinishReason::Length, usage, seed: 1 << 52 });
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
            let record = Line::parse(record.as_bytes(), 9);
            let line = line(&record, "m", answer);
            let read = read(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((&read.id, read.failed), (&record.id, answer.is_err()));
            for end in 0..line.len() {
                assert!(begins(&line.as_bytes()[..end]), "{}", &line[..end]);
            }
        }
    }
}
