//! Builds prompts from messages with the model's own chat template.
//!
//! The template is rendered, then encoded without an automatic BOS. Control tokens of the template
//! become tokens, while control tokens spelled out in a message stay text. For this, a marker
//! character is inserted into each control token in a message before rendering. The rendered text
//! is split at the remaining control tokens. The pieces between them are encoded whole, without the
//! markers.

mod images;
mod jinja;

pub use images::{ImageText, MessageImage};

use super::dialect::Dialect;
use super::tokenizer::{Special, Tokenizer};
use crate::checkpoint::Checkpoint;
use anyhow::{Context, Result};
use gemma_base::error::{Fault, no_limits, no_process};
use gemma_base::tensor::Token;
use gemma_base::util::child::{self, Child, ChildFailure, ChildLimits};
use gemma_base::util::{hex, json as json_tree};
use jinja::LocalTime;
use minijinja::{Value, context};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`, or `tool` for the result of a call.
    pub role: String,
    pub content: String,
    /// In the order of their positions in the content.
    pub images: Vec<MessageImage>,
    /// Thought before the calls, for templates that include it.
    pub thought: String,
    /// Calls of an assistant, for templates that support calls.
    pub calls: Vec<ToolCall>,
    /// Id and function of the call that a result belongs to; empty if unknown.
    pub result_of: Option<(String, String)>,
}

/// A call of a function in a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

impl Message {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }

    /// Appends an image after the content.
    pub fn show(&mut self, file: Arc<[u8]>) {
        self.images.push(MessageImage { at: self.content.len(), file });
    }

    /// Returns the total bytes of its texts.
    pub fn bytes(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.name.len() + call.arguments.len());
        self.content.len() + self.thought.len() + calls.sum::<usize>()
    }

    /// Returns the message in the form that templates read.
    fn value(&self) -> Json {
        let content = images::content(&self.content, &self.images);
        let mut value = json!({"role": self.role, "content": content});
        let call = |ToolCall { id, name, arguments }: &ToolCall| {
            let parsed = json_tree::parse(arguments.as_bytes());
            let arguments = parsed.unwrap_or_else(|_| json!(arguments));
            json!({"id": id, "type": "function",
                "function": {"name": name, "arguments": arguments}})
        };
        if !self.calls.is_empty() {
            value["tool_calls"] = self.calls.iter().map(call).collect();
            if !self.thought.is_empty() {
                value["reasoning_content"] = json!(self.thought);
            }
        }
        if let Some((id, name)) = &self.result_of {
            let name = if name.is_empty() { "unknown" } else { name };
            (value["tool_call_id"], value["name"]) = (json!(id), json!(name));
        }
        value
    }
}

/// A chat template, its control tokens, and its inputs in addition to the messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
    /// Function declarations in OpenAI's format.
    tools: Vec<Json>,
    thinks: bool,
    #[serde(skip)]
    images: Option<ImageText>,
}

/// Largest accepted template in bytes, which also limits nesting; Gemma's has 1,500 bytes.
const LONGEST: usize = 64 << 10;
/// Largest rendered prompt in bytes, unless the caller limits it by a context. The tokenizer uses
/// about 240 times as much memory.
const LONGEST_PROMPT: usize = 4 << 20;

/// Role of a child process that renders a template.
pub const ROLE: &str = "--render-template";

/// Limits of that child, and its processor time. A step limit would not suffice, since one step may
/// sort a list or double a text.
pub const LIMITS: ChildLimits = ChildLimits { memory: 512 << 20, stack: 256 << 20 };
pub const TIME: Duration = Duration::from_secs(5);

/// SHA-256 of templates that need no limits: Gemma 3's and the bundled demo's.
const KNOWN: [&str; 2] = [
    "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
    "265def95aae410eb3dcb3de80a02489382ab43cf460b372169b49b1e5144f834",
];

impl ChatTemplate {
    /// Reads the template from `chat_template.jinja`, `chat_template.json` or
    /// `tokenizer_config.json`, in that order. Uses the dialect's own template if there is none.
    pub fn from_checkpoint(checkpoint: &Checkpoint, dialect: &Dialect) -> Result<Self> {
        let read = |name: &str| -> Result<Option<Json>> {
            let Some(bytes) = checkpoint.side_file(name)? else { return Ok(None) };
            let broken = || {
                Fault::model(format!("{name} is not valid JSON")).help("download the file again")
            };
            Ok(Some(json_tree::parse(&bytes).with_context(broken)?))
        };
        let config = read("tokenizer_config.json")?.unwrap_or(Json::Null);
        let source = match checkpoint.side_file("chat_template.jinja")? {
            Some(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            None => match read("chat_template.json")? {
                Some(file) => template_of(&file),
                None => template_of(&config),
            },
        };
        // Stored as a text, or as {"content": text, ...}.
        let token = |name: &str, default: &str| {
            let value = &config[name];
            value.as_str().or_else(|| value["content"].as_str()).unwrap_or(default).to_string()
        };
        let built_in = ChatTemplate::built_in(dialect);
        Ok(ChatTemplate {
            source: source.unwrap_or_else(|| built_in.source.clone()),
            bos: token("bos_token", "<bos>"),
            eos: token("eos_token", "<eos>"),
            ..built_in
        })
    }

    /// Returns the template of a dialect.
    pub fn built_in(dialect: &Dialect) -> Self {
        ChatTemplate::of(dialect.template.to_owned())
    }

    /// Creates a template from its source, with Gemma's control tokens.
    pub fn of(source: String) -> Self {
        let (bos, eos) = ("<bos>".into(), "<eos>".into());
        ChatTemplate { source, bos, eos, tools: Vec::new(), thinks: false, images: None }
    }

    /// Returns whether it is a template of this program.
    pub fn is_built_in(&self) -> bool {
        Dialect::is_template(&self.source)
    }

    /// Declares functions, in OpenAI's format.
    pub fn with_tools(self, tools: Vec<Json>) -> Self {
        ChatTemplate { tools, ..self }
    }

    /// Enables or disables thinking before the answer.
    pub fn thinking(self, thinks: bool) -> Self {
        ChatTemplate { thinks, ..self }
    }

    /// Sets the text that is written for each image.
    pub fn showing(self, images: Option<ImageText>) -> Self {
        ChatTemplate { images, ..self }
    }

    /// Returns the text that is written for each image.
    pub fn images(&self) -> Option<&ImageText> {
        self.images.as_ref()
    }

    /// Replaces the source, and keeps the control tokens.
    pub fn with_source(self, source: String) -> Self {
        ChatTemplate { source, ..self }
    }

    /// Returns whether it is one of Google's templates of Gemma 4 from before 2026-07-09, or one
    /// derived from them. They differ in function calls: in null arguments, in the turns after
    /// results, and in the order of text and calls.
    pub fn is_outdated(&self) -> bool {
        let has = |text| self.source.contains(text);
        has("<|turn>") && has("format_function_declaration") && !has("Canonical Chat Template")
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the prompt as text. With `answer`, it ends where the model's answer begins.
    ///
    /// A child process under limits renders templates that this program does not know.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        self.render_values(messages.iter().map(Message::value).collect(), answer)
    }

    fn render_values(&self, messages: Vec<Json>, answer: bool) -> Result<String> {
        let is_early = self.source.contains("tool_responses") && !self.source.contains("'tool'");
        let messages = if is_early { with_responses(messages) } else { messages };
        if self.source.len() > LONGEST {
            let what = format!(
                "the model's chat template has {} bytes, more than the limit of {LONGEST}",
                self.source.len()
            );
            return Err(Fault::model(what).help(jinja::NO_TEMPLATE).into());
        }
        let request = Rendering { template: self.clone(), messages, answer, now: jinja::now() };
        if self.is_known() || !child::is_required() {
            return Ok(request.render()?);
        }
        let mut child = Child::start(ROLE).with_context(no_process)?;
        child.send(&request, &[]);
        let end = match child.receive::<Result<String, Fault>>(&|| true) {
            Ok((result, _)) => return Ok(result?),
            Err(end) => end,
        };
        let why = match end {
            ChildFailure::Time => "does not end in time",
            ChildFailure::Memory => "needs too much memory, or its output nests too deeply",
            ChildFailure::Unlimited => return Err(no_limits("the model's chat template").into()),
            ChildFailure::Unwanted | ChildFailure::Failed => "cannot be rendered",
        };
        Err(Fault::model(format!("the model's chat template {why}"))
            .help(jinja::NO_TEMPLATE)
            .into())
    }

    /// Returns the prompt up to the answer, with the text of each image.
    fn expanded(&self, messages: Vec<Json>) -> Result<String> {
        let text = self.render_values(messages, true)?;
        Ok(self.images.as_ref().map(|images| images.expand(&text)).unwrap_or(text))
    }

    /// Returns whether the template is known to be harmless.
    fn is_known(&self) -> bool {
        self.is_built_in() || KNOWN.contains(&hex(Sha256::digest(&self.source).as_slice()).as_str())
    }

    /// Returns the prompt as tokens, starting with one BOS. `system` comes before the messages;
    /// `prefill` begins the answer. Fails if the rendered text exceeds [`LONGEST_PROMPT`] bytes.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        system: Option<&str>,
        special: Special,
        prefill: Option<&str>,
    ) -> Result<Vec<Token>> {
        let fits = |bytes| {
            if bytes <= LONGEST_PROMPT {
                return Ok(());
            }
            let what = format!(
                "the chat template makes {bytes} bytes of the messages, more than {LONGEST_PROMPT}"
            );
            Err(Fault::usage(what).help("shorten the messages").into())
        };
        self.encode_if(tokenizer, messages, system, special, prefill, &fits)
    }

    /// Returns the prompt as tokens if `fits` accepts the length of the rendered text in bytes.
    pub fn encode_if(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        system: Option<&str>,
        special: Special,
        prefill: Option<&str>,
        fits: &dyn Fn(usize) -> Result<()>,
    ) -> Result<Vec<Token>> {
        let mut all = Vec::with_capacity(messages.len() + 1);
        if let Some(system) = system {
            if messages.first().is_some_and(|m| m.role == "system") {
                return Err(Fault::usage("a system message is given twice")
                    .help("drop --system or the one in the messages")
                    .into());
            }
            all.push(Message::new("system", system));
        }
        all.extend_from_slice(messages);
        for message in &mut all {
            match message.role.as_str() {
                "system" | "user" | "assistant" => {}
                "tool" if message.result_of.is_some() => {}
                "model" => message.role = "assistant".into(),
                // A template may insert a role between control tokens unchanged.
                other => {
                    return Err(Fault::model(format!("a message has the role {other:?}"))
                        .help("roles are system, user and assistant")
                        .into());
                }
            }
        }
        if !all.iter().any(|m| m.role == "user") {
            return Err(Fault::usage("a conversation needs a user message")
                .help("a system message alone asks nothing")
                .into());
        }
        if prefill.is_some() && self.thinks {
            let fault =
                Fault::usage("a prefill begins the answer, and no thought can come before it");
            return Err(fault.help("drop the prefill, or turn thinking off").into());
        }
        let mut values: Vec<Json> = all.iter().map(Message::value).collect();
        let mut tokens = match special {
            Special::Parse => {
                let text = self.expanded(values)? + prefill.unwrap_or("");
                fits(text.len())?;
                tokenizer.encode(&text, Special::Parse)?
            }
            Special::AsText => {
                let mut template = self.clone();
                let mut used = HashSet::new();
                add_private(&mut used, prefill.unwrap_or(""));
                values.iter().chain(&self.tools).for_each(|value| add_private_of(&mut used, value));
                let marker = unused_character(&used).with_context(|| {
                    Fault::usage("the messages use every character for private use")
                        .help("leave out characters from U+E000 to U+10FFFD")
                })?;
                let change = |text: &mut String| *text = break_control(text, tokenizer, marker);
                values.iter_mut().chain(&mut template.tools).for_each(|v| each_text(v, &change));
                let text = template.expanded(values)?
                    + &break_control(prefill.unwrap_or(""), tokenizer, marker);
                fits(text.len())?;
                encode_between_control(&text, tokenizer, marker)?
            }
        };
        let bos = tokenizer.id(&self.bos);
        if let Some(bos) = bos.filter(|bos| tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }
}

/// Moves results into the message of their calls, where the first templates of Gemma 4 expect them.
fn with_responses(messages: Vec<Json>) -> Vec<Json> {
    let mut all: Vec<Json> = Vec::new();
    for message in messages {
        let is_result = message["role"] == "tool";
        match all.last_mut().filter(|last| is_result && last["role"] == "assistant") {
            Some(last) => {
                let response = json!({"name": message["name"], "response": message["content"]});
                match last["tool_responses"].as_array_mut() {
                    Some(responses) => responses.push(response),
                    None => last["tool_responses"] = json!([response]),
                }
            }
            None => all.push(message),
        }
    }
    all
}

/// Request to a child process that renders a template.
#[derive(Serialize, Deserialize)]
struct Rendering {
    template: ChatTemplate,
    messages: Vec<Json>,
    answer: bool,
    /// Local time of the request. The result depends only on these fields.
    now: LocalTime,
}

impl Rendering {
    fn render(&self) -> Result<String, Fault> {
        let Rendering { template, messages, answer, now } = self;
        let tools = Some(&template.tools).filter(|tools| !tools.is_empty());
        // `enable_thinking` is undefined unless it is requested, as in transformers.
        let enable_thinking = if template.thinks { Value::from(true) } else { Value::UNDEFINED };
        let variables = context! { messages, bos_token => template.bos,
        eos_token => template.eos, add_generation_prompt => answer, enable_thinking, tools,
        documents => () };
        jinja::render(&template.source, variables, *now)
    }
}

/// Serves the parent process: renders a template. Returns the exit code.
pub fn serve_parent() -> u8 {
    child::confined(LIMITS, || {
        if let Some((request, _)) = child::receive::<Rendering>() {
            child::limit_time(TIME);
            child::send(&request.render(), &[]);
        }
    })
}

/// Returns `chat_template` as a text, or the entry `default` of a list of named templates.
fn template_of(file: &Json) -> Option<String> {
    let template = &file["chat_template"];
    let named =
        || template.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    template.as_str().or_else(named).map(str::to_string)
}

/// Returns whether a character is in a private-use area.
fn is_private(c: &char) -> bool {
    matches!(*c as u32, 0xe000..=0xf8ff | 0xf0000..=0xffffd | 0x100000..=0x10fffd)
}

/// Returns a private-use character that is not in `used`.
fn unused_character(used: &HashSet<char>) -> Option<char> {
    ('\u{e000}'..='\u{10fffd}').filter(is_private).find(|c| !used.contains(c))
}

/// Adds the private-use characters of a text.
fn add_private(used: &mut HashSet<char>, text: &str) {
    used.extend(text.chars().filter(is_private));
}

/// Adds the private-use characters of all texts of a value, including keys.
fn add_private_of(used: &mut HashSet<char>, value: &Json) {
    match value {
        Json::String(text) => add_private(used, text),
        Json::Array(items) => items.iter().for_each(|item| add_private_of(used, item)),
        Json::Object(fields) => fields.iter().for_each(|(key, value)| {
            add_private(used, key);
            add_private_of(used, value);
        }),
        _ => {}
    }
}

/// Changes all texts of a value, including keys.
fn each_text(value: &mut Json, change: &dyn Fn(&mut String)) {
    match value {
        Json::String(text) => change(text),
        Json::Array(items) => items.iter_mut().for_each(|item| each_text(item, change)),
        Json::Object(fields) => {
            let changed = std::mem::take(fields).into_iter().map(|(mut key, mut value)| {
                change(&mut key);
                each_text(&mut value, change);
                (key, value)
            });
            *fields = changed.collect();
        }
        _ => {}
    }
}

/// Inserts `marker` after the first character of every control token in `text`. A prefix of a
/// control token at the end counts too, since the template may append text there.
fn break_control(text: &str, tokenizer: &Tokenizer, marker: char) -> String {
    let mut out = String::with_capacity(text.len());
    let end = text.trim_end().len();
    let longest = tokenizer.control().keys().map(String::len).max().unwrap_or(0);
    for (at, c) in text.char_indices() {
        out.push(c);
        let begun =
            |name: &String| at < end && end - at < longest && name.starts_with(&text[at..end]);
        if control_at(&text[at..], tokenizer).is_some()
            || tokenizer.begins_control(c) && tokenizer.control().keys().any(begun)
        {
            out.push(marker);
        }
    }
    out
}

/// Returns the longest control token at the start of `text`.
fn control_at<'a>(text: &str, tokenizer: &'a Tokenizer) -> Option<(&'a str, Token)> {
    // This test is fast: few characters begin a control token, but thousands of tokens share one of
    // these.
    text.chars().next().filter(|c| tokenizer.begins_control(*c))?;
    longest_prefix(tokenizer.control(), text)
}

/// Returns the longest of the names that is a prefix of `text`.
fn longest_prefix<'a>(names: &'a BTreeMap<String, Token>, text: &str) -> Option<(&'a str, Token)> {
    let mut most = text;
    loop {
        // The greatest name that is at most `most`. If it is not a prefix of `text`, every name
        // that is a prefix of `text` is a prefix of their common part.
        let before = (Bound::Unbounded, Bound::Included(most));
        let (name, id) = names.range::<str, _>(before).next_back()?;
        if text.starts_with(name.as_str()) {
            return Some((name, *id));
        }
        let shared = name.chars().zip(most.chars()).take_while(|(a, b)| a == b);
        most = &most[..shared.map(|(a, _)| a.len_utf8()).sum()];
        if most.is_empty() {
            return None;
        }
    }
}

/// Encodes control tokens as tokens, and the text between them without `marker`.
fn encode_between_control(text: &str, tokenizer: &Tokenizer, marker: char) -> Result<Vec<Token>> {
    let mut tokens = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at <= text.len() {
        let found = control_at(&text[at..], tokenizer);
        if found.is_some() || at == text.len() {
            if start < at {
                tokens.extend(
                    tokenizer.encode(&text[start..at].replace(marker, ""), Special::AsText)?,
                );
            }
            let Some((name, id)) = found else { break };
            tokens.push(id);
            at += name.len();
            start = at;
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests;
