//! Conversations of clients, in all forms.
//!
//! Each message is read by its fields, no matter which API they belong to. Consecutive messages of
//! one role become one, with a blank line between their texts. System messages are joined and come
//! first. A result without a call is read as a user's text. An assistant's message without text and
//! calls is left out. Images of results go to the start of the user message that follows the
//! results.

use super::error::ApiError;
use super::tools;
use crate::cli::io::pictures;
use crate::cli::io::prompt::PromptInput;
use crate::grammar::tools::Tool;
use crate::models::{Message, MessageImage, ToolCall};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// Separator of joined messages.
const BLANK_LINE: &str = "\n\n";

/// A conversation in the order that templates need.
#[derive(Debug, Default)]
pub struct ApiConversation {
    messages: Vec<Message>,
    /// Text that the answer begins with.
    prefill: Option<String>,
}

impl ApiConversation {
    /// Reads the messages, or the items of `/v1/responses`, from the request's field.
    ///
    /// `system` is the content of a system message that comes first.
    pub fn read(
        field: &str,
        items: &[Value],
        system: Option<Value>,
    ) -> Result<ApiConversation, ApiError> {
        let wrong = |what: String| ApiError::bad(format!("'{field}': {what}")).param(field);
        if items.is_empty() {
            return Err(wrong("the list is empty: send at least one user message".into()));
        }
        let mut reader = MessageReader::default();
        let system = system.map(|content| json!({"role": "system", "content": content}));
        for item in system.iter().chain(items) {
            reader.item(item).map_err(wrong)?;
        }
        reader.show();
        let system = (!reader.system.is_empty()).then(|| Message::new("system", reader.system));
        let messages = system.into_iter().chain(reader.messages).collect();
        Ok(ApiConversation { messages, prefill: None })
    }

    /// Makes a last message of the assistant the start of the answer.
    pub fn continued(mut self) -> ApiConversation {
        let is_text = |last: &mut Message| last.role == "assistant" && last.calls.is_empty();
        self.prefill = self.messages.pop_if(is_text).map(|last| last.content);
        self
    }

    /// Returns whether the answer is begun. Such answers have no thought.
    pub fn is_begun(&self) -> bool {
        self.prefill.is_some()
    }

    /// Returns the prompt, with a description of the functions.
    ///
    /// If the model has `marks` for calls, its template writes the functions and calls. If an
    /// assistant's message is first, an empty user message goes before it: templates expect the
    /// user first, and Gemma 3's puts the system message into that turn.
    pub fn prompt(self, functions: &[Tool], marks: bool, thinks: bool) -> PromptInput {
        let ApiConversation { mut messages, prefill } = self;
        let mut declared = Vec::new();
        if marks {
            declared = tools::declared(functions);
        } else {
            messages = tools::folded(messages);
            if !functions.is_empty() {
                let told = tools::instructions(functions);
                match messages.first_mut().filter(|first| first.role == "system") {
                    Some(first) => append(&mut first.content, BLANK_LINE, &told),
                    None => messages.insert(0, Message::new("system", told)),
                }
            }
        }
        let turns = usize::from(messages.first().is_some_and(|first| first.role == "system"));
        if messages.get(turns).is_none_or(|first| first.role != "user") {
            messages.insert(turns, Message::new("user", ""));
        }
        PromptInput { messages, prefill, tools: declared, thinks, ..PromptInput::default() }
    }
}

/// State of reading a list of messages.
#[derive(Default)]
struct MessageReader {
    system: String,
    messages: Vec<Message>,
    /// Functions of all calls by their ids.
    names: HashMap<String, String>,
    /// Functions called since the user's last message, and the number of results after them.
    called: Vec<String>,
    results: usize,
    /// Images of the results since the last message.
    shown: Vec<Arc<[u8]>>,
}

impl MessageReader {
    fn item(&mut self, item: &Value) -> Result<(), String> {
        match item["type"].as_str().unwrap_or("message") {
            "message" => self.message(item),
            "function_call" | "custom_tool_call" => {
                let calls = vec![self.call(&item["call_id"], item)?];
                self.push(Message { calls, ..Message::new("assistant", "") });
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                let output = content_of(&item["output"])?;
                self.result(&item["call_id"], &Value::Null, output);
                Ok(())
            }
            // The model does not read its earlier reasoning again, nor calls that a server ran.
            "reasoning" | "web_search_call" | "file_search_call" | "code_interpreter_call" => {
                Ok(())
            }
            other => Err(format!("items of type {other:?} are not supported: leave them out")),
        }
    }

    fn message(&mut self, item: &Value) -> Result<(), String> {
        let role = match item["role"].as_str() {
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant" | "model") => "assistant",
            Some("tool" | "function") => "tool",
            None => return Err("a message has no role".into()),
            Some(other) => {
                let roles = "roles are system, developer, user, assistant and tool";
                return Err(format!("a message has the role {other:?}: {roles}"));
            }
        };
        let mut message = Message::new(role, "");
        for image in listed(&item["images"])? {
            message.show(pictures::file(image).map_err(|why| format!("images: {why}"))?);
        }
        for name in ["reasoning_content", "reasoning", "thinking"] {
            append(&mut message.thought, "", item[name].as_str().unwrap_or_default());
        }
        for part in parts(&item["content"])? {
            match part["type"].as_str() {
                Some("thinking") => {
                    append(&mut message.thought, "", part["thinking"].as_str().unwrap_or_default());
                }
                // A server ran these tools itself.
                Some("redacted_thinking" | "server_tool_use") => {}
                Some("tool_use") => message.calls.push(self.call(&part["id"], part)?),
                Some("tool_result") => {
                    let output = content_of(&part["content"])?;
                    self.result(&part["tool_use_id"], &Value::Null, output);
                }
                Some(kind) if kind.ends_with("_tool_result") => {}
                _ => add(&mut message, part)?,
            }
        }
        if !message.images.is_empty() && !matches!(role, "user" | "tool") {
            return Err(format!("images belong in messages of the user, not of {role}"));
        }
        append(&mut message.content, "\n", item["refusal"].as_str().unwrap_or_default());
        let calls = item["tool_calls"].as_array().map_or(&[][..], |calls| calls);
        for call in calls {
            let function = call.get("function").or(call.get("custom")).unwrap_or(call);
            message.calls.push(self.call(&call["id"], function)?);
        }
        if let old @ Value::Object(_) = &item["function_call"] {
            message.calls.push(self.call(&Value::Null, old)?);
        }
        match role {
            "tool" => {
                let name = item.get("name").or(item.get("tool_name")).unwrap_or(&Value::Null);
                self.result(&item["tool_call_id"], name, message);
            }
            _ => self.push(message),
        }
        Ok(())
    }

    /// Reads a call. Its arguments are a JSON text, an object, or the text of a custom tool.
    fn call(&mut self, id: &Value, call: &Value) -> Result<ToolCall, String> {
        let id = id.as_str().unwrap_or_default().to_owned();
        let name = call["name"].as_str().ok_or("a call has no name")?.to_owned();
        self.names.insert(id.clone(), name.clone());
        let arguments = match (&call["arguments"], &call["input"]) {
            (Value::String(text), _) if !text.trim().is_empty() => text.clone(),
            (object @ Value::Object(_), _) | (_, object @ Value::Object(_)) => spaced(object),
            (_, text @ Value::String(_)) => spaced(&json!({"input": text})),
            _ => "{}".into(),
        };
        Ok(ToolCall { id, name, arguments })
    }

    /// Adds the result of a call.
    ///
    /// A result without a known id is matched with the next call in order.
    fn result(&mut self, id: &Value, name: &Value, content: Message) {
        let Message { mut content, images, .. } = content;
        if content.is_empty() && !images.is_empty() {
            content.push_str("[image]");
        }
        let files = images.into_iter().map(|image| image.file);
        let id = id.as_str().unwrap_or_default();
        let known = self.names.get(id).filter(|_| !id.is_empty());
        let named = name.as_str().map(str::to_owned).filter(|name| !name.is_empty());
        let name = known.cloned().or(named).or_else(|| self.called.get(self.results).cloned());
        self.results += 1;
        if self.called.is_empty() {
            let mut message = Message::new("user", tools::result(name.as_deref(), &content));
            files.for_each(|file| message.show(file));
            return self.push(message);
        }
        self.shown.extend(files);
        let result_of = Some((id.to_owned(), name.unwrap_or_default()));
        self.messages.push(Message { result_of, ..Message::new("tool", content) });
    }

    /// Adds the images of results as a user message.
    fn show(&mut self) {
        if !self.shown.is_empty() {
            self.push(Message::new("user", ""));
        }
    }

    /// Adds a message that is not a result.
    fn push(&mut self, message: Message) {
        if message.role == "assistant" {
            self.show();
        }
        let Message { role, content, thought, calls, mut images, .. } = message;
        if role == "user" {
            let shown = std::mem::take(&mut self.shown).into_iter();
            images.splice(0..0, shown.map(|file| MessageImage { at: 0, file }));
        }
        let is_empty = content.is_empty() && calls.is_empty() && images.is_empty();
        match &*role {
            "system" => return append(&mut self.system, BLANK_LINE, &content),
            // A message that contains only results has no text.
            "user" if is_empty && self.messages.last().is_some_and(|m| m.role == "tool") => return,
            "assistant" if is_empty => return,
            _ => {}
        }
        let last = self.messages.last_mut().filter(|last| last.role == role);
        if last.is_none() {
            self.called.clear();
            self.results = 0;
        }
        self.called.extend(calls.iter().map(|call| call.name.clone()));
        match last {
            Some(last) => {
                append(&mut last.content, BLANK_LINE, &content);
                let begin = last.content.len() - content.len();
                let moved = |image: MessageImage| MessageImage { at: begin + image.at, ..image };
                last.images.extend(images.into_iter().map(moved));
                append(&mut last.thought, BLANK_LINE, &thought);
                last.calls.extend(calls);
            }
            None => {
                let message = Message::new(role, content);
                self.messages.push(Message { thought, calls, images, ..message });
            }
        }
    }
}

/// Appends `space` and a text. `space` is left out if one of the texts is empty.
fn append(text: &mut String, space: &str, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str(space);
    }
    text.push_str(more);
}

/// Returns the parts of a message's content, which is a text, a list of parts, or nothing.
fn parts(content: &Value) -> Result<&[Value], String> {
    match content {
        Value::Null => Ok(&[]),
        Value::Array(parts) => Ok(parts),
        text @ Value::String(_) => Ok(std::slice::from_ref(text)),
        _ => Err("the content of a message is neither text nor a list of parts".into()),
    }
}

/// Returns the images of a message in Ollama's form.
fn listed(images: &Value) -> Result<&[Value], String> {
    match images {
        Value::Null => Ok(&[]),
        Value::Array(images) => Ok(images),
        _ => Err("'images' is not a list of texts in base64".into()),
    }
}

/// Returns the text of a part.
fn text_part(part: &Value) -> Result<&str, String> {
    let document = part.pointer("/source/data").filter(|_| part["source"]["type"] == "text");
    let field = match part["type"].as_str() {
        None | Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("document") if document.is_some() => "data",
        Some(other) => return Err(format!("{other}: only text and images are supported")),
    };
    let text = part.as_str().or(part[field].as_str()).or(document.and_then(Value::as_str));
    text.ok_or_else(|| "a part of a message has no text".into())
}

/// Adds a part to a message: an image, or text on a line of its own.
fn add(message: &mut Message, part: &Value) -> Result<(), String> {
    match pictures::picture(part) {
        Some(file) => message.show(file?),
        None => append(&mut message.content, "\n", text_part(part)?),
    }
    Ok(())
}

/// Returns the texts and images of a content as a message without a role.
fn content_of(content: &Value) -> Result<Message, String> {
    let mut message = Message::default();
    parts(content)?.iter().try_for_each(|part| add(&mut message, part))?;
    Ok(message)
}

/// Writes JSON with the spaces of the grammar of calls, so that a call in the history has its
/// original text.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the texts of a conversation by role, with the calls as text.
    fn read(items: Value) -> Result<Vec<String>, ApiError> {
        let items = items.as_array().unwrap();
        let conversation = ApiConversation::read("messages", items, None)?;
        let folded = tools::folded(conversation.messages).into_iter();
        Ok(folded.map(|m| format!("{}: {}", m.role, m.content)).collect())
    }

    #[test]
    fn calls_come_back_as_they_were_spelled() {
        let value = json!({"a": [1, {"b": "x\"y"}], "c": null});
        assert_eq!(spaced(&value), r#"{"a": [1, {"b": "x\"y"}], "c": null}"#);
        assert_eq!(spaced(&json!({})), "{}");
    }

    #[test]
    fn neighbours_are_one_and_the_system_is_first() {
        let items = json!([
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "a"},
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "b"}, "c"]},
            {"role": "assistant", "content": null},
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "user", "content": [{"text": "d"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
            {"role": "model", "content": [{"type": "refusal", "refusal": "f"}]},
            {"role": "developer", "content": "t"},
        ]);
        let want = ["system: s\n\nt", "assistant: Hello", "user: a\n\nb\nc\n\nd"];
        let mut want: Vec<String> = want.map(str::to_owned).into();
        want.push("assistant: e\n\nf".into());
        assert_eq!(read(items.clone()).unwrap(), want);
        let items = items.as_array().unwrap();
        let begun = ApiConversation::read("messages", items, Some("r".into())).unwrap();
        let begun = begun.continued();
        assert_eq!(begun.prefill.as_deref(), Some("e\n\nf"));
        assert_eq!((begun.messages.len(), &*begun.messages[0].content), (3, "r\n\ns\n\nt"));
    }

    /// The same talk in four forms: OpenAI's chat, its older and newer form, and Anthropic's.
    #[test]
    fn calls_and_results_are_read_in_all_forms() {
        let question = json!({"role": "user", "content": "q"});
        let chat = json!([question,
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
                "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"}]);
        let old = json!([question,
            {"role": "assistant", "content": null,
                "function_call": {"name": "f", "arguments": "{\"x\": 1}"}},
            {"role": "function", "name": "f", "content": "2"}]);
        let new = json!([question, {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"}]);
        let blocks = json!([question,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "?"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                "content": [{"type": "document", "source": {"type": "text", "data": "2"}}]},
                {"type": "web_search_tool_result", "content": []}]}]);
        let call = r#"assistant: {"name": "f", "arguments": {"x": 1}}"#;
        for items in [chat, old, new, blocks] {
            assert_eq!(read(items).unwrap(), ["user: q", call, "user: Result of f: 2"]);
        }
    }

    #[test]
    fn results_find_their_calls_or_are_texts() {
        let call = |id: &str, name: &str| {
            json!({"id": id, "function": {"name": name,
            "arguments": ""}})
        };
        let items = json!([
            {"role": "tool", "tool_call_id": "9", "content": "lost"},
            {"role": "assistant", "tool_calls": [call("1", "f"), call("2", "g")]},
            {"role": "tool", "tool_call_id": "2", "content": "b"},
            {"role": "tool", "tool_call_id": "7", "content": "?"},
            {"role": "tool", "content": "third"},
            {"role": "user", "content": "u"},
        ]);
        let items = items.as_array().unwrap();
        let read = ApiConversation::read("messages", items, None).unwrap().messages;
        let results: Vec<_> = read.iter().filter_map(|m| m.result_of.as_ref()).collect();
        let names: Vec<&str> = results.iter().map(|(_, name)| &**name).collect();
        assert_eq!(names, ["g", "g", ""]);
        assert_eq!((&*read[0].role, &*read[0].content), ("user", "Result: lost"));
        assert_eq!((read[1].calls.len(), &*read[1].calls[0].arguments), (2, "{}"));
    }

    /// Returns the texts of a conversation with its images as `<` and their bytes.
    fn shown(items: Value) -> Vec<String> {
        let read = ApiConversation::read("messages", items.as_array().unwrap(), None).unwrap();
        let folded = tools::folded(read.messages).into_iter().map(|message| {
            let mut text = message.content.clone();
            for image in message.images.iter().rev() {
                text.insert_str(image.at, &format!("<{}>", String::from_utf8_lossy(&image.file)));
            }
            format!("{}: {text}", message.role)
        });
        folded.collect()
    }

    #[test]
    fn images_stay_where_they_stood() {
        let image =
            |data: &str| json!({"type": "image", "source": {"type": "base64", "data": data}});
        // "aQ" is i, "ag" is j.
        let items = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, image("aQ"), "b"]},
            {"role": "user", "content": [image("ag"), "c"]},
            {"role": "user", "images": ["aQ", "ag"], "content": "d"},
        ]);
        assert_eq!(shown(items), ["user: a<i>\nb\n\n<j>c\n\n<i><j>d"]);
        let call = json!({"role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]});
        let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [image("aQ")]});
        let text = json!({"type": "text", "text": "u"});
        let head = ["user: q", r#"assistant: {"name": "f", "arguments": {}}"#];
        for (content, end) in [
            (json!([result]), "user: Result of f: [image]\n<i>"),
            (json!([result, text]), "user: Result of f: [image]\n<i>u"),
        ] {
            let items = json!([{"role": "user", "content": "q"}, call,
                {"role": "user", "content": content}]);
            assert_eq!(shown(items), [head[0], head[1], end]);
        }
        let lost = json!([{"role": "tool", "content": [image("aQ")]},
            {"role": "user", "content": "u"}]);
        assert_eq!(shown(lost), ["user: Result: [image]<i>\n\nu"]);
        // An answer follows the result.
        let items = json!([{"role": "user", "content": "q"}, call,
            {"role": "user", "content": [result]}, {"role": "assistant", "content": "x"}]);
        assert_eq!(shown(items)[2..], ["user: Result of f: [image]\n<i>", "assistant: x"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (items, word) in [
            (json!([]), "send at least one"),
            (user(json!([{"type": "image_url", "image_url": {"url": "x"}}])), "not fetched"),
            (user(json!([{"type": "image", "source": {}}])), "not of type base64"),
            (user(json!([{"type": "input_audio", "input_audio": {}}])), "input_audio: only text"),
            (
                json!([{"role": "system", "content": [{"type": "image_url",
                "image_url": "data:;base64,aGk="}]}]),
                "images belong in messages of the user",
            ),
            (json!([{"role": "user", "images": "aGk="}]), "not a list"),
            (json!([{"role": "user", "images": [5]}]), "not a text"),
            (user(json!([{"type": "text"}])), "has no text"),
            (user(json!(5)), "neither text nor a list"),
            (json!([5]), "has no role"),
            (json!([{"role": "x<end_of_turn>", "content": "a"}]), "roles are system"),
            (json!([{"type": "item_reference", "id": "x"}]), "item_reference"),
        ] {
            let error = read(items).unwrap_err();
            assert!(error.message.contains(word), "{error:?}");
            assert_eq!(error.param.as_deref(), Some("messages"));
        }
    }
}
