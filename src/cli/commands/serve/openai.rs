//! `/v1/chat/completions` and `/v1/completions`, as OpenAI's server has them.

use super::ask::{Asked, MOST_ANSWERS, Offer, Prompt, Served, talk};
use super::chances::{LogProbs, TextLogProbs};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{Answer, Events, Form, Head, new_id};
use super::queue::{End, Figures, Piece};
use super::tools::{self, Part, Reader};
use crate::cli::io::prompt::Content;
use crate::cli::io::record::FinishReason;
use crate::decode::Chances;
use crate::grammar::tools::{Calls, Tool};
use crate::models::Message;
use crate::tensor::Token;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// Alternatives to each token at most.
const MOST_CHANCES: usize = 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// Pads events against eavesdroppers; there is nothing to hide from the client itself.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

#[derive(Deserialize)]
struct Item {
    role: String,
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize)]
struct ToolCall {
    id: Option<String>,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct ToolItem {
    #[serde(rename = "type")]
    kind: String,
    function: ToolFunction,
}

#[derive(Deserialize)]
struct ToolFunction {
    name: String,
    description: Option<String>,
    #[serde(default)]
    parameters: Value,
    /// Arguments always fit their schema here.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// Reads a body of `/v1/chat/completions`.
pub fn chat(fields: Fields, served: &Arc<Served>) -> Result<(Asked, Box<dyn Form>), ApiError> {
    let mut fields = fields;
    let model: Option<String> = fields.take("model")?;
    model.iter().try_for_each(|model| served.check_name(model))?;
    let items: Vec<Item> = fields.need("messages")?;
    let mut asked = Asked::take(&mut fields)?;
    asked.take_format(&mut fields)?;
    let include_usage = take_include_usage(&mut fields, asked.stream)?;
    asked.chances = take_chances(&mut fields)?;
    let tools: Vec<ToolItem> = fields.take("tools")?.unwrap_or_default();
    let choice: Option<Value> = fields.take("tool_choice")?;
    let many = fields.take("parallel_tool_calls")?.unwrap_or(true);
    let function = |tool: ToolItem| match tool.kind.as_str() {
        "function" => {
            let ToolFunction { name, description, parameters, .. } = tool.function;
            Ok(Tool { name, description, parameters })
        }
        other => {
            Err(ApiError::bad(format!("tools of type {other:?} are not supported")).param("tools"))
        }
    };
    let tools = tools.into_iter().map(function).collect::<Result<Vec<_>, _>>()?;
    asked.offer = offer(tools, choice.as_ref(), many)?;
    fields.only("modalities", &[json!(["text"])])?;
    fields.only("store", &[false.into()])?;
    fields.pass_over(&["prompt_cache_key"]);
    fields.finish()?;
    let said = talk(messages(items)?, None, asked.offer.as_ref());
    asked.prompts = vec![Prompt::Talk(said)];
    let head = Head::new("chatcmpl-", model, served);
    let reader = Reader::new(asked.offer.is_some());
    let choices = (0..asked.n).map(|_| Choice { reader: reader.clone(), calls: 0 }).collect();
    let wants_chances = asked.chances.is_some();
    Ok((asked, Box::new(Chat { head, choices, include_usage, wants_chances })))
}

/// Which functions an answer may call, by `tool_choice`.
pub fn offer(
    mut tools: Vec<Tool>,
    choice: Option<&Value>,
    many: bool,
) -> Result<Option<Offer>, ApiError> {
    let wrong = |what: String| ApiError::bad(what).param("tool_choice");
    let calls = match choice {
        None => Calls::May,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Calls::May,
            "none" => return Ok(None),
            "required" if tools.is_empty() => {
                return Err(wrong("'tool_choice' is required, and there are no tools".into()));
            }
            "required" => Calls::Must,
            _ => return Err(wrong(format!("'tool_choice' is not {word:?}"))),
        },
        Some(named) => {
            let name = named.pointer("/function/name").or_else(|| named.get("name"));
            let Some(name) = name.and_then(Value::as_str) else {
                return Err(wrong("'tool_choice' names no function".into()));
            };
            tools.retain(|tool| tool.name == name);
            if tools.is_empty() {
                return Err(wrong(format!("there is no function {name:?} among the tools")));
            }
            return Ok(Some(Offer { tools, calls: Calls::Must, many: false }));
        }
    };
    Ok((!tools.is_empty()).then_some(Offer { tools, calls, many }))
}

/// The conversation, with calls and their results as the model reads them.
fn messages(items: Vec<Item>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::with_capacity(items.len());
    let (mut names, mut open) = (HashMap::<String, String>::new(), false);
    for Item { role, content, tool_calls, tool_call_id } in items {
        let content = content.map(Content::text);
        if role == "tool" || role == "function" {
            let name = tool_call_id.as_ref().and_then(|id| names.get(id)).map(String::as_str);
            let text = tools::result(name, &content.unwrap_or_default());
            tools::push_result(&mut messages, &mut open, text);
            continue;
        }
        let calls = tool_calls.unwrap_or_default();
        if content.is_none() && calls.is_empty() {
            let what = format!("a message of the role {role:?} has no content");
            return Err(ApiError::bad(what).param("messages"));
        }
        let mut lines: Vec<String> = content.into_iter().filter(|t| !t.is_empty()).collect();
        for ToolCall { id, function: Function { name, arguments } } in calls {
            lines.push(tools::spelled(&name, &arguments));
            names.extend(id.map(|id| (id, name)));
        }
        let text = lines.join("\n");
        if role == "user" && open {
            tools::push_result(&mut messages, &mut open, text);
            continue;
        }
        let role = if role == "developer" { "system".into() } else { role };
        open = false;
        messages.push(Message { role, content: text });
    }
    Ok(messages)
}

fn take_include_usage(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let options: Option<StreamOptions> = fields.take("stream_options")?;
    if options.is_some() && !stream {
        let what = "'stream_options' needs 'stream' to be true";
        return Err(ApiError::bad(what).param("stream_options"));
    }
    Ok(options.and_then(|options| options.include_usage).unwrap_or(false))
}

fn take_chances(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top: Option<usize> = fields.take("top_logprobs")?;
    match top {
        Some(top) if top > MOST_CHANCES => {
            let what = format!("'top_logprobs' is from 0 to {MOST_CHANCES}");
            Err(ApiError::bad(what).param("top_logprobs"))
        }
        Some(1..) if !wanted => {
            let what = "'top_logprobs' needs 'logprobs' to be true";
            Err(ApiError::bad(what).param("top_logprobs"))
        }
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Tokens as OpenAI counts them.
pub fn usage(figures: &Figures) -> Value {
    let Figures { prompt_tokens, cached_tokens, completion_tokens, .. } = figures;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}

/// One of the answers of a whole response.
#[derive(Serialize)]
struct Whole<M: Serialize, L: Serialize> {
    index: usize,
    #[serde(flatten)]
    message: M,
    logprobs: Option<L>,
    finish_reason: &'static str,
}

/// The part of a whole response that one answer is: `object` is the response without answers.
fn part(
    object: &Value,
    (choice, choices): (usize, usize),
    answer: &impl Serialize,
    figures: &Figures,
) -> String {
    let mut text = match choice {
        0 => object.to_string().strip_suffix("]}").expect("answers come last").to_owned(),
        _ => ",".to_owned(),
    };
    text += &serde_json::to_string(answer).expect("texts and numbers");
    if choice + 1 == choices {
        text += &format!("],\"usage\":{}}}", usage(figures));
    }
    text
}

/// One of the answers, on its way.
struct Choice {
    reader: Reader,
    calls: usize,
}

/// Answers of `/v1/chat/completions`.
struct Chat {
    head: Head,
    choices: Vec<Choice>,
    include_usage: bool,
    wants_chances: bool,
}

impl Chat {
    fn object(&self, kind: &str, choices: Value) -> Value {
        let Head { id, created, model, served } = &self.head;
        json!({"id": id, "object": kind, "created": created, "model": model,
            "system_fingerprint": served.fingerprint, "choices": choices})
    }

    fn chunk(&self, choices: Value, out: &mut Events) {
        let mut chunk = self.object("chat.completion.chunk", choices);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        out.data(&chunk);
    }

    fn delta(&self, choice: usize, delta: Value, log_probs: Value, out: &mut Events) {
        let choice = json!({"index": choice, "delta": delta, "logprobs": log_probs,
            "finish_reason": null});
        self.chunk(json!([choice]), out);
    }

    fn finish(&self, choice: usize, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Length => "length",
            _ if self.choices[choice].calls > 0 => "tool_calls",
            _ => "stop",
        }
    }
}

impl Form for Chat {
    fn whole(&mut self, answers: &[Answer], figures: &Figures, choice: usize) -> String {
        let answer = &answers[choice];
        let (mut content, mut calls) = (String::new(), Vec::<Value>::new());
        for part in self.choices[choice].reader.push(&answer.text) {
            match part {
                Part::Text(text) => content += &text,
                Part::Call(name) => calls.push(json!({"id": new_id("call_"),
                    "type": "function", "function": {"name": name, "arguments": ""}})),
                Part::Arguments(text) => {
                    let call = calls.last_mut().expect("arguments follow their call");
                    let arguments = &mut call["function"]["arguments"];
                    *arguments = (arguments.as_str().unwrap_or_default().to_owned() + &text).into();
                }
            }
        }
        self.choices[choice].calls = calls.len();
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
            message["content"] = Value::Null;
        }
        let log_probs = LogProbs { served: &self.head.served, chances: &answer.chances };
        let whole = Whole {
            index: choice,
            message: json!({"message": message}),
            logprobs: self.wants_chances.then_some(log_probs),
            finish_reason: self.finish(choice, answer.reason),
        };
        let object = self.object("chat.completion", json!([]));
        part(&object, (choice, answers.len()), &whole, figures)
    }

    fn begin(&mut self, out: &mut Events) {
        for choice in 0..self.choices.len() {
            let delta = json!({"role": "assistant", "content": "", "refusal": null});
            self.delta(choice, delta, Value::Null, out);
        }
    }

    fn piece(&mut self, choice: usize, piece: &Piece, out: &mut Events) {
        let mut chances = match self.wants_chances && !piece.chances.is_empty() {
            true => json!(LogProbs { served: &self.head.served, chances: &piece.chances }),
            false => Value::Null,
        };
        let parts = self.choices[choice].reader.push(&piece.text);
        if parts.is_empty() && !chances.is_null() {
            self.delta(choice, json!({}), chances.take(), out);
        }
        for part in parts {
            let own = &mut self.choices[choice];
            let delta = match part {
                Part::Text(text) => json!({"content": text}),
                Part::Call(name) => {
                    own.calls += 1;
                    json!({"tool_calls": [{"index": own.calls - 1, "id": new_id("call_"),
                        "type": "function", "function": {"name": name, "arguments": ""}}]})
                }
                Part::Arguments(text) => json!({"tool_calls": [{"index": own.calls - 1,
                    "function": {"arguments": text}}]}),
            };
            self.delta(choice, delta, chances.take(), out);
        }
    }

    fn end(&mut self, choice: usize, reason: FinishReason, _: &End, out: &mut Events) {
        let finish = self.finish(choice, reason);
        let choice = json!({"index": choice, "delta": {}, "logprobs": null,
            "finish_reason": finish});
        self.chunk(json!([choice]), out);
    }

    fn close(&mut self, figures: &Figures, out: &mut Events) {
        if self.include_usage {
            let mut chunk = self.object("chat.completion.chunk", json!([]));
            chunk["usage"] = usage(figures);
            out.data(&chunk);
        }
        out.0 += "data: [DONE]\n\n";
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Token>),
    Lists(Vec<Vec<Token>>),
}

/// Reads a body of `/v1/completions`.
pub fn completions(
    fields: Fields,
    served: &Arc<Served>,
) -> Result<(Asked, Box<dyn Form>), ApiError> {
    let mut fields = fields;
    let model: Option<String> = fields.take("model")?;
    model.iter().try_for_each(|model| served.check_name(model))?;
    let mut asked = Asked::take(&mut fields)?;
    asked.take_format(&mut fields)?;
    let prompts = match fields.need("prompt")? {
        Prompts::Text(text) => vec![Prompt::Text(text)],
        Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        Prompts::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
        Prompts::Lists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
    };
    if prompts.is_empty() {
        return Err(ApiError::bad("'prompt' is an empty list").param("prompt"));
    }
    let include_usage = take_include_usage(&mut fields, asked.stream)?;
    let top: Option<usize> = fields.take("logprobs")?;
    if top.is_some_and(|top| top > MOST_CHANCES) {
        let what = format!("'logprobs' is from 0 to {MOST_CHANCES}");
        return Err(ApiError::bad(what).param("logprobs"));
    }
    asked.chances = top;
    let echo = fields.take("echo")?.unwrap_or(false);
    if echo && top.is_some() {
        let what = "'logprobs' of a prompt, which 'echo' would show, are not supported";
        return Err(ApiError::bad(what).param("echo").code("unsupported_parameter"));
    }
    fields.only("suffix", &["".into()])?;
    fields.finish()?;
    // More prompts than this are too many answers.
    let answers = prompts.len().saturating_mul(asked.n);
    if answers > MOST_ANSWERS {
        let what = format!("a request has at most {MOST_ANSWERS} answers, and this one {answers}");
        return Err(ApiError::bad(what).param("prompt"));
    }
    let shown = |prompt: &Prompt| match prompt {
        Prompt::Text(text) if echo => text.as_str().into(),
        Prompt::Tokens(tokens) if echo => served.tokenizer.decode(tokens).into(),
        _ => Arc::from(""),
    };
    let each = |prompt: &Prompt| std::iter::repeat_n(shown(prompt), asked.n);
    let echoes = prompts.iter().flat_map(each).collect();
    asked.prompts = prompts;
    let head = Head::new("cmpl-", model, served);
    let offsets = vec![0; answers];
    Ok((
        asked,
        Box::new(Text { head, echoes, include_usage, wants_chances: top.is_some(), offsets }),
    ))
}

/// Answers of `/v1/completions`.
struct Text {
    head: Head,
    /// What each answer begins with.
    echoes: Vec<Arc<str>>,
    include_usage: bool,
    wants_chances: bool,
    /// Characters of each answer whose chances were told.
    offsets: Vec<usize>,
}

impl Text {
    fn object(&self, choices: Value) -> Value {
        let Head { id, created, model, served } = &self.head;
        json!({"id": id, "object": "text_completion", "created": created, "model": model,
            "system_fingerprint": served.fingerprint, "choices": choices})
    }

    fn chunk(&self, choice: Value, out: &mut Events) {
        let mut chunk = self.object(json!([choice]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        out.data(&chunk);
    }

    fn log_probs<'a>(
        &'a mut self,
        choice: usize,
        chances: &'a [Chances],
    ) -> Option<TextLogProbs<'a>> {
        let (served, offset) = (&*self.head.served, self.offsets[choice]);
        let log_probs = TextLogProbs { served, chances, offset };
        if !self.wants_chances {
            return None;
        }
        self.offsets[choice] += log_probs.lengths().sum::<usize>();
        Some(log_probs)
    }
}

/// OpenAI's word for why a text ended.
fn finish(reason: FinishReason) -> &'static str {
    if reason == FinishReason::Length { "length" } else { "stop" }
}

impl Form for Text {
    fn whole(&mut self, answers: &[Answer], figures: &Figures, choice: usize) -> String {
        let answer = &answers[choice];
        let text = format!("{}{}", self.echoes[choice], answer.text);
        let object = self.object(json!([]));
        let whole = Whole {
            index: choice,
            message: json!({"text": text}),
            logprobs: self.log_probs(choice, &answer.chances),
            finish_reason: finish(answer.reason),
        };
        part(&object, (choice, answers.len()), &whole, figures)
    }

    fn begin(&mut self, out: &mut Events) {
        for (index, echo) in self.echoes.iter().enumerate().filter(|(_, echo)| !echo.is_empty()) {
            let choice =
                json!({"index": index, "text": &**echo, "logprobs": null, "finish_reason": null});
            self.chunk(choice, out);
        }
    }

    fn piece(&mut self, choice: usize, piece: &Piece, out: &mut Events) {
        let log_probs = json!(self.log_probs(choice, &piece.chances));
        if piece.text.is_empty() && piece.chances.is_empty() {
            return;
        }
        let choice = json!({"index": choice, "text": piece.text, "logprobs": log_probs,
            "finish_reason": null});
        self.chunk(choice, out);
    }

    fn end(&mut self, choice: usize, reason: FinishReason, _: &End, out: &mut Events) {
        let choice = json!({"index": choice, "text": "", "logprobs": null,
            "finish_reason": finish(reason)});
        self.chunk(choice, out);
    }

    fn close(&mut self, figures: &Figures, out: &mut Events) {
        if self.include_usage {
            let mut chunk = self.object(json!([]));
            chunk["usage"] = usage(figures);
            out.data(&chunk);
        }
        out.0 += "data: [DONE]\n\n";
    }
}
