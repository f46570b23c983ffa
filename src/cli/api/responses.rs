//! `/v1/responses` of OpenAI's API, without stored responses.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::conversation::ApiConversation;
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents};
use super::functions;
use super::request::{ApiRequest, take_stops};
use super::sampling::SamplingFields;
use super::served::ServedModel;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::format::{AnswerFormat, response_format};
use crate::cli::io::record::FinishReason;
use crate::util::json;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields of a request that its response repeats unchanged.
const REPEATED: [&str; 8] =
    ["instructions", "metadata", "reasoning", "temperature", "text", "top_p", "truncation", "user"];

/// Copies of those fields that exist at the same time: the request's, the response's, and its text.
const COPIES: usize = 3;

/// Takes the format of the answer, which is in the field `text`.
fn take_format(fields: &mut Fields) -> Result<Option<AnswerFormat>, ApiError> {
    let options: Value = fields.take("text")?.unwrap_or_default();
    let format = options.get("format").filter(|format| !format.is_null());
    let wrong = |error| ApiError::of(&error).param("text.format");
    format.map(response_format).transpose().map_err(wrong)
}

/// Reads a body of `/v1/responses`.
pub fn body(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let head = ResponseHead::take("resp_", &mut fields, served)?;
    let items = match fields.need("input")? {
        Value::Array(items) => items,
        text => vec![json!({"role": "user", "content": text})],
    };
    let given = |name: &&str| Some(((*name).to_owned(), fields.get(name)?.clone()));
    let repeated: Map<String, Value> = REPEATED.iter().filter_map(given).collect();
    let conversation = ApiConversation::read("input", &items, fields.take("instructions")?)?;
    functions::check(&fields)?;
    let [tools, choice] = ["tools", "tool_choice"].map(|name| fields.get(name).cloned());
    let tool_options = functions::take(&mut fields)?;
    let shown = Shown {
        tools: tools.unwrap_or_else(|| json!([])),
        choice: choice.unwrap_or_else(|| "auto".into()),
        many: tool_options.as_ref().is_none_or(|options| options.many),
        max_tokens: fields.take_limit("max_output_tokens")?,
        repeated: repeated.into(),
    };
    let mut request = ApiRequest {
        n: 1,
        sampling: SamplingFields::take(&mut fields)?,
        seed: fields.take_seed()?,
        stops: take_stops(&mut fields, "stop")?,
        max_tokens: shown.max_tokens,
        format: take_format(&mut fields)?,
        tool_options,
        thinking: served.take_thinking(&mut fields)?,
        stream: fields.take("stream")?.unwrap_or(false),
        repeated: COPIES
            * [&shown.tools, &shown.choice, &shown.repeated].map(json::held).iter().sum::<usize>(),
        ..ApiRequest::default()
    };
    fields.finish()?;
    request.converse(conversation, served);
    let reader = served.reader(request.tool_options.as_ref());
    let form = Items { head, reader, shown, sequence: 0, items: Vec::new(), is_open: false };
    Ok((request, Box::new(Responses { form, reason: None })))
}

/// Fields of the request that the response repeats.
struct Shown {
    tools: Value,
    choice: Value,
    many: bool,
    max_tokens: Option<usize>,
    /// Fields that are repeated unchanged.
    repeated: Value,
}

/// Items of an answer so far.
struct Items {
    head: ResponseHead,
    reader: CallReader,
    shown: Shown,
    /// Number of the next event.
    sequence: u64,
    items: Vec<Value>,
    /// Whether the last item is still incomplete.
    is_open: bool,
}

/// Answers of `/v1/responses`.
struct Responses {
    form: Items,
    reason: Option<FinishReason>,
}

impl Items {
    fn object(&self, status: &str) -> Value {
        let ResponseHead { id, created, model, .. } = &self.head;
        let Shown { tools, choice, many, max_tokens, repeated } = &self.shown;
        let mut object = json!({"id": id, "object": "response", "created_at": created,
            "model": model, "status": status, "output": self.items, "error": null,
            "incomplete_details": null,
            "instructions": null, "metadata": {}, "parallel_tool_calls": many,
            "tool_choice": choice, "tools": tools, "temperature": null, "top_p": null,
            "max_output_tokens": max_tokens, "usage": null});
        for (name, value) in repeated.as_object().into_iter().flatten() {
            object[name] = value.clone();
        }
        object
    }

    fn send(&mut self, mut event: Value, out: &mut SseEvents) {
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.named(&event);
    }

    /// Returns the last item's number, its id, and whether it is a message.
    fn last(&self) -> (usize, Value, bool) {
        let last = self.items.last().expect("an item is open");
        (self.items.len() - 1, last["id"].clone(), last["type"] == "message")
    }

    fn open(&mut self, item: Value, out: &mut SseEvents) {
        self.shut("completed", out);
        let mut begun = item.clone();
        begun["content"].take();
        if item["type"] == "message" {
            begun["content"] = json!([]);
        } else if let Some(fields) = begun.as_object_mut() {
            fields.remove("content");
        }
        self.items.push(item);
        self.is_open = true;
        let (index, id, is_message) = self.last();
        self.send(
            json!({"type": "response.output_item.added", "output_index": index,
            "item": begun}),
            out,
        );
        if is_message {
            let part = json!({"type": "output_text", "text": "", "annotations": [],
                "logprobs": []});
            self.send(
                json!({"type": "response.content_part.added", "item_id": id,
                "output_index": index, "content_index": 0, "part": part}),
                out,
            );
        }
    }

    fn shut(&mut self, status: &str, out: &mut SseEvents) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let (index, id, is_message) = self.last();
        self.items[index]["status"] = status.into();
        let item = self.items[index].clone();
        if is_message {
            let part = item["content"][0].clone();
            self.send(
                json!({"type": "response.output_text.done", "item_id": id,
                "output_index": index, "content_index": 0, "text": part["text"],
                "logprobs": []}),
                out,
            );
            self.send(
                json!({"type": "response.content_part.done", "item_id": id,
                "output_index": index, "content_index": 0, "part": part}),
                out,
            );
        } else {
            self.send(
                json!({"type": "response.function_call_arguments.done", "item_id": id,
                "output_index": index, "name": item["name"], "arguments": item["arguments"]}),
                out,
            );
        }
        self.send(
            json!({"type": "response.output_item.done", "output_index": index,
            "item": item}),
            out,
        );
    }

    fn part(&mut self, part: AnswerPart, out: &mut SseEvents) {
        let append = |value: &mut Value, text: &str| {
            *value = (value.as_str().unwrap_or_default().to_owned() + text).into();
        };
        match part {
            AnswerPart::Text(text) => {
                if !self.is_open || !self.last().2 {
                    let id = self.head.ids.make("msg_");
                    let part = json!({"type": "output_text", "text": "", "annotations": [],
                        "logprobs": []});
                    self.open(
                        json!({"type": "message", "id": id,
                        "status": "in_progress", "role": "assistant", "content": [part]}),
                        out,
                    );
                }
                let (index, id, _) = self.last();
                append(&mut self.items[index]["content"][0]["text"], &text);
                self.send(
                    json!({"type": "response.output_text.delta", "item_id": id,
                    "output_index": index, "content_index": 0, "delta": text,
                    "logprobs": []}),
                    out,
                );
            }
            AnswerPart::Call(name) => {
                let [id, call] = ["fc_", "call_"].map(|prefix| self.head.ids.make(prefix));
                let item = json!({"type": "function_call", "id": id, "call_id": call,
                    "status": "in_progress", "name": name, "arguments": ""});
                self.open(item, out);
            }
            AnswerPart::Arguments(text) => {
                let (index, id, _) = self.last();
                append(&mut self.items[index]["arguments"], &text);
                self.send(
                    json!({"type": "response.function_call_arguments.delta",
                    "item_id": id, "output_index": index, "delta": text}),
                    out,
                );
            }
        }
    }

    /// Returns the whole response.
    fn finished(&self, reason: FinishReason, figures: &RequestFigures) -> Value {
        let is_whole = reason != FinishReason::Length;
        let mut object = self.object(if is_whole { "completed" } else { "incomplete" });
        if !is_whole {
            object["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let RequestFigures { prompt_tokens, cached_tokens, completion_tokens, .. } = figures;
        object["usage"] = json!({
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + completion_tokens,
        });
        object
    }
}

impl ApiForm for Responses {
    fn whole(
        &mut self,
        answers: &[CollectedAnswer],
        figures: &RequestFigures,
        choice: usize,
    ) -> String {
        let (answer, mut unsent) = (&answers[choice], SseEvents::default());
        let reader = &mut self.form.reader;
        let parts = reader.push(&answer.text).into_iter().chain(reader.finish());
        for part in parts.collect::<Vec<_>>() {
            self.form.part(part, &mut unsent);
        }
        self.form.shut(status(answer.reason), &mut unsent);
        self.form.finished(answer.reason, figures).to_string()
    }

    fn begin(&mut self, _: u64, out: &mut SseEvents) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.form.object("in_progress");
            self.form.send(json!({"type": kind, "response": response}), out);
        }
    }

    fn piece(&mut self, _: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        for part in self.form.reader.push(&piece.text) {
            self.form.part(part, out);
        }
    }

    fn end(&mut self, _: usize, reason: FinishReason, _: &AnswerEnd, out: &mut SseEvents) {
        if let Some(part) = self.form.reader.finish() {
            self.form.part(part, out);
        }
        self.form.shut(status(reason), out);
        self.reason = Some(reason);
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        let reason = self.reason.unwrap_or(FinishReason::Stop);
        let response = self.form.finished(reason, figures);
        let kind = format!("response.{}", response["status"].as_str().unwrap_or_default());
        self.form.send(json!({"type": kind, "response": response}), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut SseEvents) {
        let mut response = self.form.object("failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        self.form.send(json!({"type": "response.failed", "response": response}), out);
    }
}

fn status(reason: FinishReason) -> &'static str {
    if reason == FinishReason::Length { "incomplete" } else { "completed" }
}
