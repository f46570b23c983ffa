//! `/api/chat` and `/api/generate` of Ollama's API.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::conversation::ApiConversation;
use super::error::{ApiError, ApiFamily};
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents};
use super::functions;
use super::ids::date;
use super::log_probs::{LogProbList, LogProbs};
use super::openai::take_top_log_probs;
use super::request::{ApiPrompt, ApiRequest};
use super::served::ServedModel;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::format::AnswerFormat;
use crate::cli::io::record::FinishReason;
use crate::decode::TokenLogProbs;
use crate::grammar::GrammarSource;
use crate::util::json;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of memory for a byte of messages that the response repeats as numbers.
const COPIES: usize = 16;

/// Reads a body of `/api/chat`.
///
/// A last message of the assistant begins the answer, as with Ollama's templates.
pub fn chat(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let (request, mut form) = take(&mut fields, served)?;
    let items: Vec<Value> = fields.take("messages")?.unwrap_or_default();
    let request = ApiRequest { tool_options: functions::take(&mut fields)?, ..request };
    form.is_chat = true;
    if items.is_empty() {
        return load(fields, request, form);
    }
    let conversation = ApiConversation::read("messages", &items, None)?.continued();
    fields.finish()?;
    Ok(converse(request, form, conversation))
}

/// Reads a body of `/api/generate`.
pub fn generate(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let (mut request, mut form) = take(&mut fields, served)?;
    let mut talk = take_context(&mut fields)?;
    let has_context = !talk.is_empty();
    let prompt: String = fields.take("prompt")?.unwrap_or_default();
    let system = fields.take::<String>("system")?.filter(|text| !text.is_empty());
    let images: Value = fields.take("images")?.unwrap_or_default();
    let has_images = images.as_array().is_some_and(|images| !images.is_empty());
    let is_raw = fields.take("raw")?.unwrap_or(false);
    if let Some(system) = system {
        talk.retain(|item| item["role"] != "system");
        talk.insert(0, json!({"role": "system", "content": system}));
    }
    talk.push(json!({"role": "user", "content": prompt, "images": images}));
    let conversation = ApiConversation::read("prompt", &talk, None)?;
    if prompt.is_empty() && !has_images {
        return load(fields, request, form);
    }
    fields.finish()?;
    if is_raw && has_context {
        let what = "'context': a raw prompt has no earlier messages: leave out raw";
        return Err(ApiError::bad(what).param("context"));
    }
    if is_raw && has_images {
        let what = "'images': a raw prompt cannot contain images: leave out raw";
        return Err(ApiError::bad(what).param("images"));
    }
    if is_raw {
        request.prompts = vec![ApiPrompt::Text(prompt)];
        return Ok((request, Box::new(form)));
    }
    // Later turns do not see the images, as with Ollama's server.
    if let Some(Value::Object(item)) = talk.last_mut() {
        item.remove("images");
    }
    request.repeated += COPIES * talk.iter().map(json::held).sum::<usize>();
    form.talk = Some(talk);
    Ok(converse(request, form, conversation))
}

/// Returns the `context` of an answer: its conversation. The server stores none, so the numbers
/// are the messages as JSON, three bytes in each.
fn context(talk: Vec<Value>) -> Value {
    let text = Value::from(talk).to_string();
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
    text.as_bytes().chunks(3).map(number).collect()
}

/// Takes the `context` of an earlier answer.
fn take_context(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let numbers: Vec<u32> = fields.take("context")?.unwrap_or_default();
    if numbers.is_empty() {
        return Ok(Vec::new());
    }
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    // JSON has no zeros.
    let text: Vec<u8> = bytes.into_iter().filter(|byte| *byte != 0).collect();
    let talk = json::parse(&text).ok().and_then(|talk| serde_json::from_value(talk).ok());
    let what = "'context' is not from an answer of this server: \
        leave it out, or send the earlier messages to /api/chat";
    talk.ok_or_else(|| ApiError::bad(what).param("context"))
}

/// Takes the fields that both endpoints have.
///
/// The fields of `options` are read like fields of the body.
fn take(
    fields: &mut Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, OllamaAnswer), ApiError> {
    let head = ResponseHead::take("", fields, served)?;
    fields.open("options")?;
    fields.only("n", &[1.into()])?;
    let stream = fields.take("stream")?.unwrap_or(true);
    // -2 means to fill the context. An answer without a limit does the same here.
    if fields.get("num_predict") == Some(&json!(-2)) {
        fields.pass_over(&["num_predict"]);
    }
    let request = ApiRequest {
        stream,
        format: take_format(fields)?,
        top_log_probs: take_top_log_probs(fields)?,
        thinking: served.take_thinking(fields)?,
        ..ApiRequest::take(fields)?
    };
    let form = OllamaAnswer {
        head,
        begun: Instant::now(),
        is_chat: false,
        wants_log_probs: request.top_log_probs.is_some(),
        reader: served.reader(None),
        call: None,
        calls: 0,
        done: "load",
        talk: None,
        content: String::new(),
    };
    Ok((request, form))
}

/// Takes the format of the answer: `json`, or a schema.
fn take_format(fields: &mut Fields) -> Result<Option<AnswerFormat>, ApiError> {
    let source = match fields.take::<Value>("format")? {
        None => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => GrammarSource::json_object(),
        Some(schema @ Value::Object(_)) => GrammarSource::JsonSchema(schema),
        Some(other) => {
            let what = format!("'format' must be \"json\" or a JSON schema, and is {other}");
            return Err(ApiError::bad(what).param("format"));
        }
    };
    Ok(Some(AnswerFormat::Grammar(source)))
}

/// Returns whether a body has no prompt. The request then only loads or unloads its model.
pub fn asks_nothing(fields: &Fields) -> bool {
    let is_empty = |value: &Value| match value {
        Value::Array(list) => list.is_empty(),
        other => other == "",
    };
    ["prompt", "messages", "images"].iter().all(|name| fields.get(name).is_none_or(is_empty))
}

/// Returns the response to a request that unloads the model `name`.
pub fn unloaded(name: &str, fields: &Fields) -> String {
    let mut object = json!({"model": name, "created_at": date(fields.ids.time())});
    match fields.get("messages") {
        Some(_) => object["message"] = json!({"role": "assistant", "content": ""}),
        None => object["response"] = "".into(),
    }
    object["done"] = true.into();
    object["done_reason"] = "unload".into();
    object.to_string() + "\n"
}

/// Completes a request without a prompt, which only loads the model.
fn load(
    fields: Fields,
    request: ApiRequest,
    form: OllamaAnswer,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    fields.finish()?;
    Ok((ApiRequest { stream: false, format: None, tool_options: None, ..request }, Box::new(form)))
}

/// Completes a request with a conversation.
fn converse(
    mut request: ApiRequest,
    mut form: OllamaAnswer,
    conversation: ApiConversation,
) -> (ApiRequest, Box<dyn ApiForm>) {
    let served = form.head.served.clone();
    request.converse(conversation, &served);
    form.reader = served.reader(request.tool_options.as_ref());
    (request, Box::new(form))
}

/// An answer in Ollama's form.
struct OllamaAnswer {
    head: ResponseHead,
    begun: Instant,
    /// Whether the response has a `message`, rather than a `response` text.
    is_chat: bool,
    wants_log_probs: bool,
    reader: CallReader,
    /// Name and partial arguments of the current call.
    call: Option<(String, String)>,
    calls: usize,
    /// Why the answer ended.
    done: &'static str,
    /// The messages before the answer, if its last line has them as `context`.
    talk: Option<Vec<Value>>,
    /// The answer so far, for the same.
    content: String,
}

/// A line of the answer.
#[derive(Serialize)]
struct AnswerLine<'a> {
    #[serde(flatten)]
    object: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<LogProbList<'a>>,
}

impl OllamaAnswer {
    /// Parses more of the answer. Returns its text and the calls that are complete.
    fn read(&mut self, text: &str) -> (String, Vec<Value>) {
        let (mut content, mut calls) = (String::new(), Vec::new());
        if self.talk.is_some() {
            self.content += text;
        }
        for part in self.reader.push(text) {
            match part {
                AnswerPart::Text(text) => content += &text,
                AnswerPart::Call(name) => {
                    calls.extend(self.finish_call());
                    self.call = Some((name, String::new()));
                }
                AnswerPart::Arguments(text) => {
                    self.call.as_mut().expect("arguments follow their call").1 += &text;
                }
            }
        }
        (content, calls)
    }

    /// Returns the head of a call as text, if the answer was cut off within it.
    fn cut_head(&mut self) -> String {
        match self.reader.finish() {
            Some(AnswerPart::Text(text)) => text,
            _ => String::new(),
        }
    }

    /// Returns the current call; `None` if it was cut off.
    fn finish_call(&mut self) -> Option<Value> {
        let (name, arguments) = self.call.take()?;
        let arguments: Value = serde_json::from_str(&arguments).ok()?;
        let index = self.calls;
        self.calls += 1;
        Some(json!({"id": self.head.ids.make("call_"),
            "function": {"index": index, "name": name, "arguments": arguments}}))
    }

    fn object(&self, content: String, thought: &str, calls: Vec<Value>) -> Value {
        let mut object =
            json!({"model": self.head.model, "created_at": date(self.head.ids.time())});
        let message = if self.is_chat {
            object["message"] = json!({"role": "assistant", "content": content});
            &mut object["message"]
        } else {
            object["response"] = content.into();
            &mut object
        };
        if !thought.is_empty() {
            message["thinking"] = thought.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        object["done"] = false.into();
        object
    }

    /// Adds the fields of the last line: the reason of the end, counts, times in nanoseconds, and
    /// the conversation.
    fn complete(&mut self, object: &mut Value, figures: &RequestFigures) {
        let last = json!({
            "done": true,
            "done_reason": self.done,
            "total_duration": self.begun.elapsed().as_nanos() as u64,
            "load_duration": 0,
            "prompt_eval_count": figures.prompt_tokens,
            "prompt_eval_duration": figures.first_token.unwrap_or_default().as_nanos() as u64,
            "eval_count": figures.completion_tokens,
            "eval_duration": figures.decode_time.as_nanos() as u64,
        });
        for (key, value) in last.as_object().into_iter().flatten() {
            object[key] = value.clone();
        }
        if let Some(mut talk) = self.talk.take() {
            talk.push(json!({"role": "assistant", "content": self.content}));
            object["context"] = context(talk);
        }
    }

    fn line(&self, object: Value, log_probs: &[TokenLogProbs]) -> String {
        let list = LogProbs { served: &self.head.served, log_probs };
        let is_listed = self.wants_log_probs && !log_probs.is_empty();
        let logprobs = is_listed.then_some(LogProbList(&list));
        serde_json::to_string(&AnswerLine { object, logprobs }).expect("texts and numbers") + "\n"
    }
}

fn done(reason: FinishReason) -> &'static str {
    if reason == FinishReason::Length { "length" } else { "stop" }
}

impl ApiForm for OllamaAnswer {
    fn whole(&mut self, answers: &[CollectedAnswer], figures: &RequestFigures, _: usize) -> String {
        let Some(answer) = answers.first() else {
            let mut object = self.object(String::new(), "", Vec::new());
            object["done"] = true.into();
            object["done_reason"] = self.done.into();
            return self.line(object, &[]);
        };
        let (mut content, mut calls) = self.read(&answer.text);
        content += &self.cut_head();
        calls.extend(self.finish_call());
        self.done = done(answer.reason);
        let mut object = self.object(content, &answer.thought, calls);
        self.complete(&mut object, figures);
        self.line(object, &answer.log_probs)
    }

    fn begin(&mut self, _: u64, _: &mut SseEvents) {}

    fn piece(&mut self, _: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        let (content, calls) = self.read(&piece.text);
        let mut log_probs = &piece.log_probs[..];
        if !piece.thought.is_empty() || !content.is_empty() || !log_probs.is_empty() {
            let object = self.object(content, &piece.thought, Vec::new());
            out.0 += &self.line(object, std::mem::take(&mut log_probs));
        }
        if !calls.is_empty() {
            out.0 += &self.line(self.object(String::new(), "", calls), &[]);
        }
    }

    fn end(&mut self, _: usize, reason: FinishReason, _: &AnswerEnd, out: &mut SseEvents) {
        self.done = done(reason);
        let head = self.cut_head();
        if !head.is_empty() {
            out.0 += &self.line(self.object(head, "", Vec::new()), &[]);
        }
        if let Some(call) = self.finish_call() {
            out.0 += &self.line(self.object(String::new(), "", vec![call]), &[]);
        }
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        let mut object = self.object(String::new(), "", Vec::new());
        self.complete(&mut object, figures);
        out.0 += &self.line(object, &[]);
    }

    fn fail(&mut self, error: &ApiError, out: &mut SseEvents) {
        out.0 += &format!("{}\n", error.json(ApiFamily::Ollama));
    }
}
