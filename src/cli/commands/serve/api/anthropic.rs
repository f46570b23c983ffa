//! `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's server has them.

use super::super::queue::{AnswerEnd, AnswerPiece, RequestFigures};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents, new_id};
use super::openai::tool_options;
use super::request::{ApiPrompt, ApiRequest, ServedModel, conversation, take_stops};
use super::sampling::SamplingFields;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::record::FinishReason;
use crate::grammar::tools::Tool;
use crate::models::{Message, ToolCall};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Deserialize)]
struct Item {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text { text: String },
    ToolUse { id: String, name: String, input: Value },
    ToolResult { tool_use_id: String, content: Option<Content> },
    Thinking { thinking: String },
    RedactedThinking {},
}

#[derive(Deserialize)]
struct ToolItem {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    #[serde(default)]
    input_schema: Value,
}

#[derive(Deserialize)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

impl Content {
    /// Returns the text of content that must have only text blocks.
    fn text(&self) -> Result<String, ApiError> {
        match self {
            Content::Text(text) => Ok(text.clone()),
            Content::Blocks(blocks) => blocks
                .iter()
                .map(|block| match block {
                    Block::Text { text } => Ok(text.as_str()),
                    _ => Err(ApiError::bad("only text is supported here")),
                })
                .collect(),
        }
    }
}

/// The common part of a message and a count: the conversation and the functions.
struct MessagesBody {
    model: Option<String>,
    request: ApiRequest,
}

fn take(fields: &mut Fields, served: &ServedModel) -> Result<MessagesBody, ApiError> {
    let model: Option<String> = fields.take("model")?;
    model.iter().try_for_each(|model| served.check_name(model))?;
    let items: Vec<Item> = fields.need("messages")?;
    let system: Option<Content> = fields.take("system")?;
    let system = system.map(|system| system.text()).transpose().map_err(|e| e.param("system"))?;
    let tools: Vec<ToolItem> = fields.take("tools")?.unwrap_or_default();
    let tool = |tool: ToolItem| match tool.kind.as_deref() {
        None | Some("custom") => {
            let ToolItem { name, description, input_schema: parameters, .. } = tool;
            Ok(Tool { name, description, parameters })
        }
        Some(other) => {
            Err(ApiError::bad(format!("tools of type {other:?} are not supported")).param("tools"))
        }
    };
    let tools = tools.into_iter().map(tool).collect::<Result<Vec<_>, _>>()?;
    let choice: Option<ToolChoice> = fields.take("tool_choice")?;
    let many = !choice.as_ref().and_then(|c| c.disable_parallel_tool_use).unwrap_or(false);
    let choice = choice.map(|choice| match (choice.kind.as_str(), choice.name) {
        ("any", _) => json!("required"),
        ("tool", name) => json!({"name": name}),
        (other, _) => json!(other),
    });
    let thinking: Option<Thinking> = fields.take("thinking")?;
    let thinks = served.think(thinking.map(|thinking| thinking.kind != "disabled"), "thinking")?;
    let tool_options = tool_options(tools, choice.as_ref(), many)?;
    let (messages, prefill) = messages(items)?;
    let mut input = conversation(messages, system, tool_options.as_ref(), thinks, served);
    input.prefill = prefill;
    let request = ApiRequest {
        prompts: vec![ApiPrompt::Conversation(input)],
        n: 1,
        tool_options,
        thinks,
        ..ApiRequest::default()
    };
    Ok(MessagesBody { model, request })
}

/// Returns the conversation, and the beginning of the answer if the last message is the
/// assistant's.
fn messages(items: Vec<Item>) -> Result<(Vec<Message>, Option<String>), ApiError> {
    let mut messages: Vec<Message> = Vec::with_capacity(items.len());
    let mut names = HashMap::<String, String>::new();
    for Item { role, content } in items {
        if role != "user" && role != "assistant" {
            let what = format!("a message has the role {role:?}: roles are user and assistant");
            return Err(ApiError::bad(what).param("messages"));
        }
        let blocks = match content {
            Content::Text(text) => vec![Block::Text { text }],
            Content::Blocks(blocks) => blocks,
        };
        let (mut lines, mut calls, before) = (Vec::new(), Vec::new(), messages.len());
        let mut thought = String::new();
        for block in blocks {
            match block {
                Block::Text { text } => lines.push(text),
                Block::ToolUse { id, name, input } => {
                    names.insert(id.clone(), name.clone());
                    calls.push(ToolCall { id, name, arguments: spaced(&input) });
                }
                Block::ToolResult { tool_use_id, content } => {
                    let text = content.map(|content| content.text()).transpose()?;
                    let name = names.get(&tool_use_id).cloned().unwrap_or_default();
                    let result_of = Some((tool_use_id, name));
                    let text = text.unwrap_or_default();
                    messages.push(Message { result_of, ..Message::new("tool", text) });
                }
                Block::Thinking { thinking } => thought.push_str(&thinking),
                Block::RedactedThinking {} => {}
            }
        }
        if lines.is_empty() && calls.is_empty() && messages.len() > before {
            continue;
        }
        let text = lines.join("\n");
        // Consecutive messages of one role are joined, as on Anthropic's server.
        match messages.last_mut().filter(|last| last.role == role) {
            Some(last) => {
                last.content = format!("{}\n{text}", last.content);
                last.calls.extend(calls);
            }
            None => messages.push(Message { calls, thought, ..Message::new(role, text) }),
        }
    }
    let prefill = messages.pop_if(|last| last.role == "assistant").map(|last| last.content);
    Ok((messages, prefill))
}

/// Spells JSON as the grammar of calls does, so that a call in the history has its original text.
fn spaced(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(spaced).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| {
                format!("{}: {}", Value::from(key.as_str()), spaced(value))
            };
            let fields: Vec<String> = fields.iter().map(field).collect();
            format!("{{{}}}", fields.join(", "))
        }
        plain => plain.to_string(),
    }
}

/// Reads a body of `/v1/messages`.
pub fn messages_body(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let MessagesBody { model, request } = take(&mut fields, served)?;
    let request = ApiRequest {
        max_tokens: Some(fields.need("max_tokens")?),
        sampling: SamplingFields::take(&mut fields)?,
        // The seed is an extension of Anthropic's options: it makes sampled answers reproducible.
        seed: fields.take_limit("seed")?,
        stops: take_stops(&mut fields, "stop_sequences")?,
        stream: fields.take("stream")?.unwrap_or(false),
        ..request
    };
    fields.pass_over(&["metadata", "service_tier"]);
    fields.finish()?;
    let head = ResponseHead::new("msg_", model, served);
    let reader = served.reader(request.tool_options.as_ref());
    Ok((
        request,
        Box::new(Blocks { head, reader, index: 0, open: None, called: false, delta: None }),
    ))
}

/// Reads a body of `/v1/messages/count_tokens`.
pub fn count_body(mut fields: Fields, served: &Arc<ServedModel>) -> Result<ApiPrompt, ApiError> {
    let MessagesBody { mut request, .. } = take(&mut fields, served)?;
    fields.finish()?;
    Ok(request.prompts.remove(0))
}

/// Kind of a block of the answer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
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
    open: Option<Kind>,
    called: bool,
    /// The last event but one. It waits for the figures.
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

    fn open(&mut self, kind: Kind, block: Value, out: &mut SseEvents) {
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
        for part in self.reader.push(&answer.text) {
            match part {
                AnswerPart::Text(text) => content.push(json!({"type": "text", "text": text})),
                AnswerPart::Call(name) => {
                    self.called = true;
                    arguments.push(String::new());
                    content.push(json!({"type": "tool_use", "id": new_id("toolu_"),
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

    fn begin(&mut self, out: &mut SseEvents) {
        let usage = usage(&RequestFigures::default());
        out.named(&json!({"type": "message_start", "message": self.object(json!([]), usage)}));
    }

    fn piece(&mut self, _: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        if !piece.thought.is_empty() {
            if self.open != Some(Kind::Thinking) {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(Kind::Thinking, block, out);
            }
            let delta = json!({"type": "thinking_delta", "thinking": piece.thought});
            out.named(&json!({"type": "content_block_delta", "index": self.index,
                "delta": delta}));
        }
        for part in self.reader.push(&piece.text) {
            let delta = match part {
                AnswerPart::Text(text) => {
                    if self.open != Some(Kind::Text) {
                        self.open(Kind::Text, json!({"type": "text", "text": ""}), out);
                    }
                    json!({"type": "text_delta", "text": text})
                }
                AnswerPart::Call(name) => {
                    self.called = true;
                    let block = json!({"type": "tool_use", "id": new_id("toolu_"), "name": name,
                        "input": {}});
                    self.open(Kind::ToolUse, block, out);
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

    fn end(&mut self, _: usize, reason: FinishReason, end: &AnswerEnd, out: &mut SseEvents) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_back_as_they_were_spelled() {
        let value = json!({"a": [1, {"b": "x\"y"}], "c": null});
        assert_eq!(spaced(&value), r#"{"a": [1, {"b": "x\"y"}], "c": null}"#);
        assert_eq!(spaced(&json!({})), "{}");
    }

    #[test]
    fn messages_of_one_role_are_one_and_the_last_may_begin_the_answer() {
        let items: Vec<Item> = serde_json::from_value(json!([
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
            {"role": "assistant", "content": "So"},
        ]))
        .unwrap();
        let (messages, prefill) = messages(items).unwrap();
        let messages = super::super::tools::folded(messages);
        let contents: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
        let call = r#"{"name": "f", "arguments": {"x": 1}}"#;
        assert_eq!(contents, ["a\nb", call, "Result of f: 2"]);
        assert_eq!(prefill.as_deref(), Some("So"));
    }
}
