//! From options, files and standard input to the prompt's tokens.

use crate::cli::io::input;
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::cli::options::{ChatOptions, InputOptions, SpecialPolicy};
use crate::error::Fault;
use crate::models::{ChatTemplate, Config, Message, Special, Tokenizer};
use crate::runtime::load::check_prompt;
use crate::runtime::options::AutoOr;
use crate::runtime::{Listener, Model, Session};
use crate::tensor::Token;
use crate::util::json;
use crate::util::units::thousands;
use anyhow::{Context, Result, ensure};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::path::Path;

/// A prompt before it is tokenised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptInput {
    pub system: Option<String>,
    pub messages: Vec<Message>,
    /// PROMPT, files and standard input, joined.
    pub text: Option<String>,
    pub prefill: Option<String>,
    /// Functions in OpenAI's form, for a template that declares them.
    pub tools: Vec<Value>,
    pub thinks: bool,
}

impl PromptInput {
    /// Bytes of text in all.
    pub fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(Message::bytes).sum();
        let tools: usize = self.tools.iter().map(|tool| tool.to_string().len()).sum();
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        messages + tools + len(&self.system) + len(&self.text) + len(&self.prefill)
    }
}

/// Reads all inputs. No prompt at all is wrong usage.
pub fn gather(text: &InputOptions, chat: &ChatOptions) -> Result<PromptInput> {
    read(text, chat, input::stdin_is_piped(), &mut std::io::stdin().lock())
}

fn read(
    text: &InputOptions,
    chat: &ChatOptions,
    piped: bool,
    stdin: &mut dyn std::io::Read,
) -> Result<PromptInput> {
    if chat.raw && (chat.system.is_some() || chat.system_file.is_some() || chat.messages.is_some())
    {
        return Err(Fault::usage(
            "--raw uses no chat template: it takes no --system and no --messages",
        )
        .into());
    }
    let parts = input::parts(text, piped)?;
    let system = system(chat)?;
    let messages = chat.messages.as_deref().map(read_messages).transpose()?.unwrap_or_default();
    let prompt = input::assemble(&parts, stdin)?;
    // A model may begin with nothing at all, but only if someone says so: --raw ''.
    let nothing = chat.raw && text.words.len() == 1;
    if messages.is_empty() && !nothing && prompt.as_ref().is_none_or(|p| p.trim().is_empty()) {
        return Err(input::no_prompt().into());
    }
    let prefill = chat.prefill.clone();
    Ok(PromptInput { system, messages, text: prompt, prefill, ..PromptInput::default() })
}

/// Returns the text of `--system` or `--system-file`.
pub fn system(chat: &ChatOptions) -> Result<Option<String>> {
    system_text(chat.system.as_deref(), chat.system_file.as_deref())
}

/// One of the two, or none.
pub fn system_text(text: Option<&str>, file: Option<&Path>) -> Result<Option<String>> {
    match (text, file) {
        (Some(_), Some(_)) => Err(Fault::usage("--system and --system-file are both given")
            .help("give one of them")
            .into()),
        (None, Some(path)) => Ok(Some(read_file(path)?)),
        (text, None) => Ok(text.map(str::to_owned)),
    }
}

/// Content of a message: text, or parts of type `text`, a line or more each.
pub struct MessageContent(String);

impl MessageContent {
    pub fn text(self) -> String {
        self.0
    }
}

impl<'de> Deserialize<'de> for MessageContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = match Value::deserialize(deserializer)? {
            Value::String(text) => return Ok(MessageContent(text)),
            Value::Array(parts) => parts,
            _ => {
                return Err(D::Error::custom(
                    "the content of a message is neither text nor a list of parts",
                ));
            }
        };
        let mut texts = Vec::new();
        for part in &parts {
            // A part without a type is text where it has one.
            match (
                part.get("type").and_then(Value::as_str),
                part.get("text").and_then(Value::as_str),
            ) {
                (None | Some("text"), Some(part)) => texts.push(part),
                (Some("text") | None, None) => {
                    return Err(D::Error::custom("a part of a message has no text"));
                }
                (Some(other), _) => {
                    return Err(D::Error::custom(format!("{other}: only text is supported")));
                }
            }
        }
        Ok(MessageContent(texts.join("\n")))
    }
}

/// A JSON array of messages, or an object with a `messages` field; a message's content is text or
/// parts of type `text`.
pub fn read_messages(path: &Path) -> Result<Vec<Message>> {
    #[derive(Deserialize)]
    struct Item {
        role: String,
        content: MessageContent,
    }
    let what = || Fault::model(format!("{} is not a list of messages", path.display()));
    let help =
        r#"expected: [{"role": "user", "content": "Hello"}]; roles are system, user and assistant"#;
    let wrong = || what().help(help);
    let list = match json::parse(read_file(path)?.as_bytes()).with_context(wrong)? {
        Value::Object(mut object) => object.remove("messages").with_context(wrong)?,
        list => list,
    };
    let items: Vec<Item> = serde_json::from_value(list).with_context(wrong)?;
    Ok(items.into_iter().map(|i| Message::new(i.role, i.content.text())).collect())
}

/// Returns the prompt's tokens, through the chat template or behind one BOS.
pub fn encode(
    input: &PromptInput,
    chat: &ChatOptions,
    session: &Session,
    context: AutoOr,
    ui: &Ui,
) -> Result<Vec<Token>> {
    let special = match chat.special_in_prompt {
        SpecialPolicy::Text => Special::AsText,
        SpecialPolicy::Parse => Special::Parse,
    };
    let thinks = chat.think.settled(&session.tokenizer)?;
    if thinks && chat.raw {
        let fault = Fault::usage("--raw uses no chat template, which --think on needs");
        return Err(fault.help("drop one of the two").into());
    }
    let input = &PromptInput { thinks, ..input.clone() };
    let template = match chat.raw {
        true => None,
        false => Some(chat_template(&session.model, &session.tokenizer, ui)?),
    };
    let (config, tokenizer) = (session.config(), &*session.tokenizer);
    let (tokens, brought) = PromptEncoder {
        template: template.as_ref(),
        config,
        tokenizer,
        context,
        most_rendered: usize::MAX,
    }
    .tokens(input, special)?;
    if brought {
        ui.note("the prompt begins with a BOS token already: no second one is added");
    }
    ui.detail(
        1,
        format!(
            "prompt: {} tokens of {} bytes",
            thousands(tokens.len() as u64),
            thousands(input.bytes() as u64)
        ),
    );
    Ok(tokens)
}

/// The model's chat template, or Gemma's own, with a note, where the model's files have none.
pub fn chat_template(
    model: &Model,
    tokenizer: &Tokenizer,
    listener: &dyn Listener,
) -> Result<ChatTemplate> {
    let template = ChatTemplate::from_checkpoint(model.checkpoint(), tokenizer.dialect())?;
    if model.place.is_some() && template.is_built_in() {
        listener.note(&format!(
            "no chat template in {}: it is perhaps a base model, which answers no questions; \
             gemma generate --raw continues text",
            model.name
        ));
    }
    Ok(template)
}

/// An encoder of prompts.
pub struct PromptEncoder<'a> {
    /// `None` continues a text without a template.
    pub template: Option<&'a ChatTemplate>,
    pub config: &'a Config,
    pub tokenizer: &'a Tokenizer,
    /// Context size that the options give.
    pub context: AutoOr,
    /// Most bytes of the rendered template.
    pub most_rendered: usize,
}

impl PromptEncoder<'_> {
    /// Returns the tokens, and whether a text without a template has its own BOS. A prompt that
    /// leaves no room for an answer is an error.
    pub fn tokens(&self, input: &PromptInput, special: Special) -> Result<(Vec<Token>, bool)> {
        let PromptEncoder { template, config, tokenizer, context, most_rendered } = *self;
        let limit = match context {
            AutoOr::N(n) => n,
            AutoOr::Auto => config.max_position,
        };
        // Tokenising takes time and memory; a text that cannot fit is refused before.
        let fits = |bytes: usize| match bytes / tokenizer.longest() > limit {
            true => check_prompt(bytes / tokenizer.longest(), true, context, config),
            false => Ok(()),
        };
        fits(input.bytes())?;
        let fits_rendered = |bytes: usize| {
            ensure!(
                bytes <= most_rendered,
                Fault::model(format!(
                    "the model's chat template makes {bytes} bytes of {}",
                    input.bytes()
                ))
            );
            fits(bytes)
        };
        let (tokens, brought) = match template {
            Some(template) => {
                (templated(input, special, template, tokenizer, &fits_rendered)?, false)
            }
            None => raw(input, special, config, tokenizer)?,
        };
        check_prompt(tokens.len(), false, context, config)?;
        Ok((tokens, brought))
    }
}

fn raw(
    input: &PromptInput,
    special: Special,
    config: &Config,
    tokenizer: &Tokenizer,
) -> Result<(Vec<Token>, bool)> {
    let text =
        [input.text.as_deref(), input.prefill.as_deref()].into_iter().flatten().collect::<String>();
    tokenizer.encode_behind_bos(&text, special, config.bos)
}

fn templated(
    input: &PromptInput,
    special: Special,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    fits: &dyn Fn(usize) -> Result<()>,
) -> Result<Vec<Token>> {
    let mut messages = input.messages.clone();
    if let Some(text) = &input.text {
        messages.push(Message::new("user", text));
    }
    let (system, prefill) = (input.system.as_deref(), input.prefill.as_deref());
    let template = template.clone().thinking(input.thinks).with_tools(input.tools.clone());
    template.encode_if(tokenizer, &messages, system, special, prefill, fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::options::{Think, ThinkOptions};

    fn chat(raw: bool) -> ChatOptions {
        let special_in_prompt = SpecialPolicy::Text;
        ChatOptions {
            system: None,
            system_file: None,
            messages: None,
            raw,
            prefill: None,
            special_in_prompt,
            think: ThinkOptions { think: Think::Off },
        }
    }

    fn words(words: &[&str]) -> InputOptions {
        InputOptions {
            words: words.iter().map(|w| w.to_string()).collect(),
            prompt: None,
            file: Vec::new(),
        }
    }

    #[test]
    fn a_prompt_is_required_and_blank_is_none() {
        let gathered =
            |text: &[&str], raw, stdin: &[u8]| read(&words(text), &chat(raw), true, &mut &*stdin);
        assert_eq!(gathered(&["a"], false, b"b").unwrap().text.unwrap(), "b\n\na");
        for (text, raw, stdin) in
            [(&[][..], false, &b""[..]), (&[], true, b""), (&["  "], false, b"\n\n")]
        {
            let error = gathered(text, raw, stdin).unwrap_err();
            assert_eq!(crate::error::fault_of(&error).unwrap().kind.exit_code(), 2, "{text:?}");
        }
        assert_eq!(gathered(&[""], true, b"").unwrap().text, None);
    }

    #[test]
    fn messages_come_in_three_forms() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.json");
        let hi = [Message::new("user", "hi")];
        for json in [
            r#"[{"role": "user", "content": "hi"}]"#,
            r#"{"messages": [{"role": "user", "content": "hi"}]}"#,
            r#"[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]"#,
        ] {
            std::fs::write(&file, json).unwrap();
            assert_eq!(read_messages(&file).unwrap(), hi);
        }
        std::fs::write(&file, "{}").unwrap();
        assert_eq!(
            crate::error::fault_of(&read_messages(&file).unwrap_err()).unwrap().kind.exit_code(),
            3
        );
    }
}
