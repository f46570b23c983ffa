//! Replies to records.
//!
//! A reply contains nothing that differs from run to run, such as times. The same batch therefore
//! gives the same bytes.

use super::call::CallAnswer;
use super::job::Failure;
use crate::cli::api::error::ApiError;
use crate::cli::io::record::{FinishReason, Usage, VERSION};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

/// The answer to a record.
#[derive(Clone, Debug)]
pub struct RecordAnswer {
    pub text: String,
    /// Thoughts of the model; empty if there are none.
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

/// The reply to a line.
#[derive(Clone, Debug)]
pub enum Reply {
    Ours(Result<RecordAnswer, Failure>),
    OpenAi(Result<CallAnswer, ApiError>),
}

impl Reply {
    pub fn is_failure(&self) -> bool {
        matches!(self, Reply::Ours(Err(_)) | Reply::OpenAi(Err(_)))
    }

    /// Returns the number of tokens of its answers.
    pub fn tokens(&self) -> u64 {
        match self {
            Reply::Ours(Ok(answer)) => answer.usage.completion_tokens as u64,
            Reply::OpenAi(Ok(answer)) => answer.tokens,
            _ => 0,
        }
    }
}

/// Formats the reply to a record as a line with its line break.
pub fn line(id: &Value, reply: &Reply) -> String {
    match reply {
        Reply::Ours(answer) => ours(id, answer) + "\n",
        Reply::OpenAi(answer) => openai(id, answer) + "\n",
    }
}

fn ours(id: &Value, answer: &Result<RecordAnswer, Failure>) -> String {
    let reply = match answer {
        Ok(a) => Ours {
            v: VERSION,
            id,
            text: &a.text,
            reasoning: &a.reasoning,
            finish_reason: a.finish_reason,
            usage: a.usage.clone(),
            seed: Some(a.seed),
            error: None,
        },
        Err(failure) => Ours {
            v: VERSION,
            id,
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

fn openai(custom_id: &Value, answer: &Result<CallAnswer, ApiError>) -> String {
    let id = match custom_id {
        Value::String(id) => id.clone(),
        other => other.to_string(),
    };
    let refusal;
    let (status, body, error) = match answer {
        Ok(answer) => (200, &answer.body, Value::Null),
        Err(error) => {
            let object = error.openai();
            let code = error.code.map_or_else(|| object["error"]["type"].clone(), Value::from);
            refusal = object.to_string();
            (error.status, &refusal, json!({"code": code, "message": error.message}))
        }
    };
    let id = Value::from(id);
    // The body may be long, so it is inserted without parsing it again.
    format!(
        "{{\"id\":{id},\"custom_id\":{custom_id},\"response\":{{\"status_code\":{status},\
         \"request_id\":{id},\"body\":{body}}},\"error\":{error}}}"
    )
}

/// The record of a reply that was read from a file.
#[derive(Debug)]
pub struct ReadReply {
    pub id: Value,
    pub failed: bool,
}

/// First bytes of a reply in this program's form and in OpenAI's.
const HEADS: [&[u8]; 2] = [b"{\"v\":1,\"id\":", b"{\"id\":\""];

/// Returns whether a reply can begin with these bytes. Only the first field is checked.
pub fn may_begin(bytes: &[u8]) -> bool {
    HEADS.iter().any(|head| head.starts_with(bytes) || bytes.starts_with(head))
}

/// Parses a complete line; `None` if [`line`] did not write it.
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

/// Returns whether bytes without a line break can be the start of a reply.
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
        let (reasoning, finish_reason) = ("Hm.".into(), FinishReason::Length);
        let body = json!({"choices": [{"text": text}]}).to_string();
        let good = RecordAnswer { text, reasoning, finish_reason, usage, seed: 1 << 52 };
        let bad = Failure { code: 7, message: "too long".into(), help: Some("shorten it".into()) };
        let replies = [
            Reply::Ours(Ok(good)),
            Reply::Ours(Err(bad)),
            Reply::OpenAi(Ok(CallAnswer { body, tokens: 2 })),
            Reply::OpenAi(Err(ApiError::bad("\"quoted\""))),
        ];
        let ids = [json!("\u{e4}"), json!({"a": [1, null]}), json!(9)];
        for (id, reply) in ids.iter().flat_map(|id| replies.iter().map(move |reply| (id, reply))) {
            let line = line(id, reply);
            let read = read(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((&read.id, read.failed), (id, reply.is_failure()));
            for end in 0..line.len() {
                assert!(begins(&line.as_bytes()[..end]), "{}", &line[..end]);
            }
        }
    }
}
