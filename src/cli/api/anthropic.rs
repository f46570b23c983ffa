//! `/v1/messages` and `/v1/messages/count_tokens` of Anthropic's API.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::conversation::ApiConversation;
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents};
use super::functions;
use super::request::{ApiPrompt, ApiRequest, take_stops};
use super::sampling::SamplingFields;
use super::served::ServedModel;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::format::{AnswerFormat, response_format};
use crate::cli::io::record::FinishReason;
use serde_json::{Value, json};
use std::sync::Arc;

/// Takes the fields that a message and a count have in common: the conversation and the functions.
fn take(fields: &mut Fields, served: &ServedModel) -> Result<ApiRequest, ApiError> {
    let items: Vec<Value> = fields.need("messages")?;
    let conversation = ApiConversation::read("messages", &items, fields.take("system")?)?;
    let mut request = ApiRequest {
        n: 1,
        tool_options: functions::take(fields)?,
        thinking: served.take_thinking(fields)?,
        ..ApiRequest::default()
    };
    request.converse(conversation.continued(), served);
    Ok(request)
}

/// Takes the format of the answer: `output_format`, or `format` in `output_config`.
fn take_format(fields: &mut Fields) -> Result<Option<AnswerFormat>, ApiError> {
    let format: Option<Value> = fields.take("output_format")?;
    let config = fields.get("output_config").and_then(|config| config.get("format").cloned());
    let format = format.or(config).filter(|format| !format.is_null());
    let wrong = |error| ApiError::of(&error).param("output_format");
    format.as_ref().map(response_format).transpose().map_err(wrong)
}

/// Reads a body of `/v1/messages`.
pub fn messages_body(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let head = ResponseHead::take("msg_", &mut fields, served)?;
    if fields.get("max_tokens").is_none_or(|most| most == 0) {
        let what = "'max_tokens' is needed: send a whole number from 1";
        return Err(ApiError::bad(what).param("max_tokens"));
    }
    let request = ApiRequest {
        max_tokens: fields.take_limit("max_tokens")?,
        sampling: SamplingFields::take(&mut fields)?,
        // The seed is an extension of Anthropic's options: it makes sampled answers reproducible.
        seed: fields.take_seed()?,
        stops: take_stops(&mut fields, "stop_sequences")?,
        format: take_format(&mut fields)?,
        stream: fields.take("stream")?.unwrap_or(false),
        ..take(&mut fields, served)?
    };
    fields.finish()?;
    let reader = served.reader(request.tool_options.as_ref());
    Ok((
        request,
        Box::new(Blocks { head, reader, index: 0, open: None, called: false, delta: None }),
    ))
}

/// Reads a body of `/v1/messages/count_tokens`.
pub fn count_body(mut fields: Fields, served: &Arc<ServedModel>) -> Result<ApiPrompt, ApiError> {
    served.take_name(&mut fields)?;
    let mut request = take(&mut fields, served)?;
    fields.finish()?;
    Ok(request.prompts.remove(0))
}

/// Kind of a block of the answer.
#[derive(Clone, Copy, PartialEq)]
enum BlockKind {
    Thinking,
    Text,
    ToolUse,
}

/// Answers of `/v1/messages`.
struct Blocks {
    head: ResponseHead,
    reader: CallReader,
    /// Index of the open block, or of the next one.
    index: usize,
    open: Option<BlockKind>,
    called: bool,
    /// The event before the last one. It is sent once the figures are known.
    delta: Option<Value>,
}

impl Blocks {
    fn object(&self, content: Value, usage: Value) -> Value {
        json!({"id": self.head.id, "type": "message", "role": "assistant",
            "model": self.head.model, "content": content, "stop_reason": null,
            "stop_sequence": null, "usage": usage})
    }

    fn stop_reason(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Length => "max_tokens",
            FinishReason::StopString => "stop_sequence",
            _ if self.called => "tool_use",
            _ => "end_turn",
        }
    }

    fn open(&mut self, kind: BlockKind, block: Value, out: &mut SseEvents) {
        self.shut(out);
        self.open = Some(kind);
        out.named(&json!({"type": "content_block_start", "index": self.index,
            "content_block": block}));
    }

    fn shut(&mut self, out: &mut SseEvents) {
        if self.open.take().is_some() {
            out.named(&json!({"type": "content_block_stop", "index": self.index}));
            self.index += 1;
        }
    }

    /// Sends parts of the answer.
    fn parts(&mut self, parts: impl IntoIterator<Item = AnswerPart>, out: &mut SseEvents) {
        for part in parts {
            let delta = match part {
                AnswerPart::Text(text) => {
                    if self.open != Some(BlockKind::Text) {
                        self.open(BlockKind::Text, json!({"type": "text", "text": ""}), out);
                    }
                    json!({"type": "text_delta", "text": text})
                }
                AnswerPart::Call(name) => {
                    self.called = true;
                    let id = self.head.ids.make("toolu_");
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(BlockKind::ToolUse, block, out);
                    continue;
                }
                AnswerPart::Arguments(text) => {
                    json!({"type": "input_json_delta", "partial_json": text})
                }
            };
            out.named(&json!({"type": "content_block_delta", "index": self.index,
                "delta": delta}));
        }
    }
}

/// Returns Anthropic's token counts: input tokens do not include cached ones.
fn usage(figures: &RequestFigures) -> Value {
    let RequestFigures { prompt_tokens, cached_tokens, completion_tokens, .. } = figures;
    json!({"input_tokens": prompt_tokens - cached_tokens, "output_tokens": completion_tokens,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_tokens})
}

impl ApiForm for Blocks {
    fn whole(
        &mut self,
        answers: &[CollectedAnswer],
        figures: &RequestFigures,
        choice: usize,
    ) -> String {
        let answer = &answers[choice];
        let mut content: Vec<Value> = Vec::new();
        if !answer.thought.is_empty() {
            content.push(json!({"type": "thinking", "thinking": answer.thought, "signature": ""}));
        }
        let mut arguments = Vec::<String>::new();
        for part in self.reader.push(&answer.text).into_iter().chain(self.reader.finish()) {
            match part {
                AnswerPart::Text(text) => content.push(json!({"type": "text", "text": text})),
                AnswerPart::Call(name) => {
                    self.called = true;
                    arguments.push(String::new());
                    content.push(json!({"type": "tool_use", "id": self.head.ids.make("toolu_"),
                        "name": name}));
                }
                AnswerPart::Arguments(text) => {
                    arguments.last_mut().expect("arguments follow their call").push_str(&text);
                }
            }
        }
        let calls = content.iter_mut().filter(|block| block["type"] == "tool_use");
        for (block, arguments) in calls.zip(arguments) {
            // Arguments that a limit cut off are not valid JSON.
            block["input"] = serde_json::from_str(&arguments).unwrap_or_else(|_| json!({}));
        }
        let mut object = self.object(content.into(), usage(figures));
        object["stop_reason"] = self.stop_reason(answer.reason).into();
        object["stop_sequence"] = answer.stop_string.clone().into();
        object.to_string()
    }

    /// Cached tokens are known only at the end. The last event reports them separately.
    fn begin(&mut self, prompt_tokens: u64, out: &mut SseEvents) {
        let usage = usage(&RequestFigures { prompt_tokens, ..RequestFigures::default() });
        out.named(&json!({"type": "message_start", "message": self.object(json!([]), usage)}));
    }

    fn piece(&mut self, _: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        if !piece.thought.is_empty() {
            if self.open != Some(BlockKind::Thinking) {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(BlockKind::Thinking, block, out);
            }
            let delta = json!({"type": "thinking_delta", "thinking": piece.thought});
            out.named(&json!({"type": "content_block_delta", "index": self.index,
                "delta": delta}));
        }
        let parts = self.reader.push(&piece.text);
        self.parts(parts, out);
    }

    fn end(&mut self, _: usize, reason: FinishReason, end: &AnswerEnd, out: &mut SseEvents) {
        let rest = self.reader.finish();
        self.parts(rest, out);
        self.shut(out);
        let delta = json!({"stop_reason": self.stop_reason(reason),
            "stop_sequence": end.stop_string});
        self.delta = Some(delta);
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        let delta = self.delta.take();
        out.named(&json!({"type": "message_delta", "delta": delta, "usage": usage(figures)}));
        out.named(&json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut SseEvents) {
        out.named(&error.anthropic());
    }
}
