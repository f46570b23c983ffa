//! `/v1/responses`, as OpenAI's server has it, without stored responses.

use super::super::queue::{AnswerEnd, AnswerPiece, RequestFigures};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents, new_id};
use super::openai::tool_options;
use super::request::{ApiPrompt, ApiRequest, ServedModel, conversation};
use super::sampling::SamplingFields;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::format::AnswerFormat;
use crate::cli::io::record::FinishReason;
use crate::grammar::GrammarSource;
use crate::grammar::tools::Tool;
use crate::models::{Message, ToolCall};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

#[derive(Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(Deserialize)]
struct TextPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Deserialize)]
struct ToolItem {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    #[serde(default)]
    parameters: Value,
}

/// Whether to think. The thought is no part of the response, as with a summary that was not asked
/// for.
#[derive(Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

#[derive(Deserialize)]
struct TextOptions {
    format: Option<Value>,
}

impl Content {
    fn text(self) -> Result<String, ApiError> {
        let part = |part: TextPart| match (part.kind.as_str(), part.text) {
            ("input_text" | "output_text" | "text", Some(text)) => Ok(text),
            (kind, _) => {
                Err(ApiError::bad(format!("{kind}: only text is supported")).param("input"))
            }
        };
        match self {
            Content::Text(text) => Ok(text),
            Content::Parts(parts) => parts.into_iter().map(part).collect(),
        }
    }
}

fn messages(input: Input) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Input::Text(content) => return Ok(vec![Message::new("user", content)]),
        Input::Items(items) => items,
    };
    let wrong = |what: &str| ApiError::bad(what).param("input");
    let mut messages: Vec<Message> = Vec::with_capacity(items.len());
    let mut names = HashMap::<String, String>::new();
    for item in items {
        match item.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = item.role.ok_or_else(|| wrong("a message has no role"))?;
                let content = item.content.ok_or_else(|| wrong("a message has no content"))?;
                let role = if role == "developer" { "system".into() } else { role };
                messages.push(Message::new(role, content.text()?));
            }
            "function_call" => {
                let name = item.name.ok_or_else(|| wrong("a call has no name"))?;
                let id = item.call_id.unwrap_or_default();
                names.insert(id.clone(), name.clone());
                let arguments = item.arguments.unwrap_or_else(|| "{}".into());
                let call = ToolCall { id, name, arguments };
                match messages.last_mut().filter(|last| last.role == "assistant") {
                    Some(last) => last.calls.push(call),
                    None => messages
                        .push(Message { calls: vec![call], ..Message::new("assistant", "") }),
                }
            }
            "function_call_output" => {
                let id = item.call_id.unwrap_or_default();
                let name = names.get(&id).cloned().unwrap_or_default();
                let output = item.output.map(Content::text).transpose()?.unwrap_or_default();
                let result_of = Some((id, name));
                messages.push(Message { result_of, ..Message::new("tool", output) });
            }
            // A model does not read its earlier reasoning again.
            "reasoning" => {}
            other => return Err(wrong(&format!("items of type {other:?} are not supported"))),
        }
    }
    Ok(messages)
}

/// Returns the format of the answer. The schema stands beside its name here, not below it.
fn format(options: Option<TextOptions>) -> Result<Option<AnswerFormat>, ApiError> {
    let Some(format) = options.and_then(|options| options.format) else { return Ok(None) };
    match (format["type"].as_str(), format.get("schema")) {
        (Some("text"), _) => Ok(None),
        (Some("json_object"), _) => Ok(Some(AnswerFormat::Grammar(GrammarSource::json_object()))),
        (Some("json_schema"), Some(schema)) => {
            Ok(Some(AnswerFormat::Grammar(GrammarSource::JsonSchema(schema.clone()))))
        }
        _ => Err(ApiError::bad("'text.format' is not one that is known").param("text.format")),
    }
}

/// Reads a body of `/v1/responses`.
pub fn body(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let model: Option<String> = fields.take("model")?;
    model.iter().try_for_each(|model| served.check_name(model))?;
    let messages = messages(fields.need("input")?)?;
    let system = fields.take("instructions")?;
    let tools: Vec<ToolItem> = fields.take("tools")?.unwrap_or_default();
    let shown_tools = tools.iter().map(shown).collect();
    let tool = |tool: ToolItem| match (tool.kind.as_str(), tool.name) {
        ("function", Some(name)) => {
            Ok(Tool { name, description: tool.description, parameters: tool.parameters })
        }
        (kind, _) => {
            Err(ApiError::bad(format!("tools of type {kind:?} are not supported")).param("tools"))
        }
    };
    let tools = tools.into_iter().map(tool).collect::<Result<Vec<_>, _>>()?;
    let choice: Option<Value> = fields.take("tool_choice")?;
    let many = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let tool_options = tool_options(tools, choice.as_ref(), many)?;
    let reasoning: Option<Reasoning> = fields.take("reasoning")?;
    let effort = reasoning.and_then(|reasoning| reasoning.effort);
    let thinks = served.think(effort.map(|effort| effort != "none"), "reasoning")?;
    let reader = served.reader(tool_options.as_ref());
    let input = conversation(messages, system, tool_options.as_ref(), thinks, served);
    let prompts = vec![ApiPrompt::Conversation(input)];
    let request = ApiRequest {
        prompts,
        n: 1,
        sampling: SamplingFields::take(&mut fields)?,
        seed: fields.take_limit("seed")?,
        max_tokens: fields.take_limit("max_output_tokens")?,
        format: format(fields.take("text")?)?,
        tool_options,
        thinks,
        stream: fields.take("stream")?.unwrap_or(false),
        ..ApiRequest::default()
    };
    // Responses are not stored, so a client has to send earlier answers along.
    fields.only("previous_response_id", &[])?;
    fields.only("background", &[false.into()])?;
    fields.only("truncation", &["disabled".into()])?;
    fields.only("include", &[json!([]), json!(["reasoning.encrypted_content"])])?;
    fields.pass_over(&["store", "user", "metadata", "service_tier", "safety_identifier"]);
    fields.pass_over(&["prompt_cache_key", "stream_options"]);
    fields.finish()?;
    let head = ResponseHead::new("resp_", model, served);
    let shown = Shown {
        tools: shown_tools,
        choice: choice.unwrap_or("auto".into()),
        many,
        max_tokens: request.max_tokens,
    };
    let form = Items { head, reader, shown, sequence: 0, items: Vec::new(), is_open: false };
    Ok((request, Box::new(Responses { form, reason: None })))
}

fn shown(tool: &ToolItem) -> Value {
    json!({"type": "function", "name": tool.name, "description": tool.description,
        "parameters": tool.parameters, "strict": true})
}

/// Fields of the request that the response repeats.
struct Shown {
    tools: Value,
    choice: Value,
    many: bool,
    max_tokens: Option<usize>,
}

/// Items of an answer so far.
struct Items {
    head: ResponseHead,
    reader: CallReader,
    shown: Shown,
    /// Number of the next event.
    sequence: u64,
    items: Vec<Value>,
    /// The last item is not complete.
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
        let Shown { tools, choice, many, max_tokens } = &self.shown;
        json!({"id": id, "object": "response", "created_at": created, "model": model,
            "status": status, "output": self.items, "error": null, "incomplete_details": null,
            "instructions": null, "metadata": {}, "parallel_tool_calls": many,
            "tool_choice": choice, "tools": tools, "temperature": null, "top_p": null,
            "max_output_tokens": max_tokens, "usage": null})
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
            let part = json!({"type": "output_text", "text": "", "annotations": []});
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
                    let part = json!({"type": "output_text", "text": "", "annotations": [],
                        "logprobs": []});
                    self.open(
                        json!({"type": "message", "id": new_id("msg_"),
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
            AnswerPart::Call(name) => self.open(
                json!({"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"),
                    "status": "in_progress", "name": name, "arguments": ""}),
                out,
            ),
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
            "input_tokens_details": {"cached_tokens": cached_tokens},
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
        for part in self.form.reader.push(&answer.text) {
            self.form.part(part, &mut unsent);
        }
        self.form.shut(status(answer.reason), &mut unsent);
        self.form.finished(answer.reason, figures).to_string()
    }

    fn begin(&mut self, out: &mut SseEvents) {
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
