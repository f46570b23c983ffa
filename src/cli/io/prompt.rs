//! From options, files and standard input to the prompt's tokens.

use crate::cli::io::image_file::{self, read_image};
use crate::cli::io::input;
use crate::cli::io::pictures::picture;
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::cli::options::{ChatOptions, ImageOptions, InputOptions, SpecialPolicy};
use crate::error::Fault;
use crate::models::{ChatTemplate, Config, Image, Message, MessageImage, Special, Tokenizer};
use crate::runtime::load::check_prompt;
use crate::runtime::options::AutoOr;
use crate::runtime::{Listener, Model, Session, Viewer};
use crate::tensor::Token;
use crate::util::json;
use crate::util::units::thousands;
use anyhow::{Context, Result, ensure};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// A prompt before it is tokenised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptInput {
    pub system: Option<String>,
    pub messages: Vec<Message>,
    /// PROMPT, files and standard input, joined.
    pub text: Option<String>,
    /// Images of the text, in the order of their places in it.
    pub images: Vec<MessageImage>,
    pub prefill: Option<String>,
    /// Functions in OpenAI's form, for a template that declares them.
    pub tools: Vec<Value>,
    pub thinks: bool,
}

impl PromptInput {
    /// Returns all images, in the order of their places in the prompt.
    pub fn all_images(&self) -> impl Iterator<Item = &MessageImage> {
        self.messages.iter().flat_map(|message| &message.images).chain(&self.images)
    }

    /// Bytes of text in all.
    pub fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(Message::bytes).sum();
        let tools: usize = self.tools.iter().map(|tool| tool.to_string().len()).sum();
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        messages + tools + len(&self.system) + len(&self.text) + len(&self.prefill)
    }
}

/// Reads all inputs. No prompt at all is wrong usage.
pub fn gather(
    text: &InputOptions,
    images: &ImageOptions,
    chat: &ChatOptions,
) -> Result<PromptInput> {
    let stdin = Path::new("-");
    let mut of_image = images.image.iter().filter(|path| *path == stdin);
    let is_image = of_image.next().is_some();
    let is_text = text.file.iter().any(|path| path == stdin) || text.words.iter().any(|w| w == "-");
    if of_image.next().is_some() || is_image && is_text {
        return Err(Fault::usage("`-` (standard input) can be given only once").into());
    }
    let files = images.image.iter().map(|path| read_image(path)).collect::<Result<Vec<_>>>()?;
    let is_piped = !is_image && input::stdin_is_piped();
    let input = read(text, chat, is_piped, &mut std::io::stdin().lock())?;
    if files.is_empty() {
        return Ok(input);
    }
    let (text, images) = image_file::place(&input.text.unwrap_or_default(), files)?;
    Ok(PromptInput { text: Some(text), images, ..input })
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

/// Content of a message: text, or a list of texts and images, with a line or more for each text.
pub struct MessageContent(Message);

impl MessageContent {
    /// Returns a message of this content.
    pub fn message(self, role: String) -> Message {
        Message { role, ..self.0 }
    }
}

impl<'de> Deserialize<'de> for MessageContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = match Value::deserialize(deserializer)? {
            Value::String(text) => return Ok(MessageContent(Message::new("", text))),
            Value::Array(parts) => parts,
            _ => {
                return Err(D::Error::custom(
                    "the content of a message is neither text nor a list of parts",
                ));
            }
        };
        let mut message = Message::default();
        for part in &parts {
            if let Some(file) = picture(part) {
                message.show(file.map_err(D::Error::custom)?);
                continue;
            }
            // A part without a type is text where it has one.
            match (
                part.get("type").and_then(Value::as_str),
                part.get("text").and_then(Value::as_str),
            ) {
                (None | Some("text"), Some(text)) => {
                    if !message.content.is_empty() {
                        message.content.push('\n');
                    }
                    message.content.push_str(text);
                }
                (Some("text") | None, None) => {
                    return Err(D::Error::custom("a part of a message has no text"));
                }
                (Some(other), _) => {
                    let what = format!("{other}: only text and images are supported");
                    return Err(D::Error::custom(what));
                }
            }
        }
        Ok(MessageContent(message))
    }
}

/// A JSON array of messages, or an object with a `messages` field.
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
    Ok(items.into_iter().map(|item| item.content.message(item.role)).collect())
}

/// Tokens of a prompt above which the demo's answer is of no use.
const DEMO_READS: usize = 200;

/// The note of a demo that gets a long prompt.
pub const DEMO_READS_LITTLE: &str =
    "the demo answers short questions only: it cannot summarise a text or answer from one";

/// Returns the prompt's tokens, through the chat template or behind one BOS.
pub fn encode(
    input: &PromptInput,
    chat: &ChatOptions,
    session: &Session,
    context: AutoOr,
    ui: &Ui,
) -> Result<EncodedPrompt> {
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
    let prompt = PromptEncoder {
        template: template.as_ref(),
        config,
        tokenizer,
        viewer: session.viewer(),
        context,
        most_rendered: usize::MAX,
    }
    .encode(input, special)?;
    if let Ok(viewer) = session.viewer() {
        viewer.take_notes().iter().for_each(|note| ui.note(note));
    }
    if session.model.place.is_none() && prompt.tokens.len() > DEMO_READS {
        ui.note(DEMO_READS_LITTLE);
    }
    if prompt.has_own_bos {
        ui.note("the prompt begins with a BOS token already: no second one is added");
    }
    ui.detail(
        1,
        format!(
            "prompt: {} tokens of {} bytes",
            thousands(prompt.tokens.len() as u64),
            thousands(input.bytes() as u64)
        ),
    );
    Ok(prompt)
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

/// A prompt as a model reads it.
#[derive(Clone, Debug, Default)]
pub struct EncodedPrompt {
    pub tokens: Vec<Token>,
    /// The images that the tokens name.
    pub images: Vec<Arc<Image>>,
    /// Whether a text without a template has its own BOS.
    pub has_own_bos: bool,
}

/// A prompt whose images are measured, and not decoded yet.
#[derive(Clone, Debug, Default)]
pub struct UnseenPrompt {
    /// Without the places of images.
    pub tokens: Vec<Token>,
    /// Files of the images, in the order of their places.
    pub files: Vec<Arc<[u8]>>,
    has_own_bos: bool,
}

impl UnseenPrompt {
    /// Returns the prompt with its images, which are in the order of the files.
    pub fn seen(
        self,
        viewer: Result<&Viewer, &Fault>,
        tokenizer: &Tokenizer,
        images: Vec<Arc<Image>>,
    ) -> Result<EncodedPrompt> {
        let UnseenPrompt { mut tokens, has_own_bos, .. } = self;
        if !images.is_empty() {
            let viewer = viewer.map_err(Fault::clone)?;
            let places: Vec<_> = images.iter().map(|image| image.places()).collect();
            tokens = viewer.vision().image_text(tokenizer)?.place(&tokens, &places)?;
        }
        Ok(EncodedPrompt { tokens, images, has_own_bos })
    }
}

/// An encoder of prompts.
pub struct PromptEncoder<'a> {
    /// `None` continues a text without a template.
    pub template: Option<&'a ChatTemplate>,
    pub config: &'a Config,
    pub tokenizer: &'a Tokenizer,
    /// Reads images, or is the reason why none are read.
    pub viewer: Result<&'a Viewer, &'a Fault>,
    /// Context size that the options give.
    pub context: AutoOr,
    /// Most bytes of the rendered template.
    pub most_rendered: usize,
}

impl PromptEncoder<'_> {
    /// Returns the prompt with its images, whose soft tokens are computed unless they are kept. A
    /// prompt that leaves no room for an answer is an error.
    pub fn encode(&self, input: &PromptInput, special: Special) -> Result<EncodedPrompt> {
        let unseen = self.tokenise(input, special)?;
        let images = unseen.files.iter().map(|file| self.viewer()?.see(file));
        let images = images.collect::<Result<_>>()?;
        unseen.seen(self.viewer, self.tokenizer, images)
    }

    /// Returns the prompt as tokens. Reads no more than the headers of pictures. A prompt that
    /// leaves no room for an answer is an error.
    pub fn tokenise(&self, input: &PromptInput, special: Special) -> Result<UnseenPrompt> {
        let (tokens, has_own_bos) = self.checked(input, special)?;
        let files: Vec<_> = input.all_images().map(|image| image.file.clone()).collect();
        if !files.is_empty() {
            // A prompt that shows another number of images is an error before one is decoded.
            let text = self.viewer()?.vision().image_text(self.tokenizer)?;
            text.place(&tokens, &vec![0..0; files.len()])?;
        }
        Ok(UnseenPrompt { tokens, files, has_own_bos })
    }

    /// Returns the number of a prompt's tokens, those of its images included. Reads no more than
    /// the headers of pictures. A prompt that leaves no room for an answer is an error.
    pub fn count(&self, input: &PromptInput, special: Special) -> Result<usize> {
        let (tokens, _) = self.checked(input, special)?;
        Ok(tokens.len() + self.image_tokens(input)?)
    }

    fn viewer(&self) -> Result<&Viewer> {
        self.viewer.map_err(|why| why.clone().into())
    }

    fn image_tokens(&self, input: &PromptInput) -> Result<usize> {
        let mut images = input.all_images().peekable();
        if images.peek().is_none() {
            return Ok(0);
        }
        let viewer = self.viewer()?;
        images.map(|image| Ok(viewer.measure(&image.file)?.tokens())).sum()
    }

    /// Returns the tokens without places of images, and whether a text without a template has its
    /// own BOS. The places are counted.
    fn checked(&self, input: &PromptInput, special: Special) -> Result<(Vec<Token>, bool)> {
        let PromptEncoder { config, tokenizer, context, most_rendered, .. } = *self;
        let limit = match context {
            AutoOr::N(n) => n,
            AutoOr::Auto => config.max_position,
        };
        let places = self.image_tokens(input)?;
        // Tokenising takes time and memory; a text that cannot fit is refused before.
        let fits = |bytes: usize| {
            let tokens = bytes / tokenizer.longest() + places;
            if tokens > limit { check_prompt(tokens, true, context, config) } else { Ok(()) }
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
        let (tokens, brought) = match self.template {
            Some(template) => {
                let text = match places {
                    0 => None,
                    _ => Some(self.viewer()?.vision().image_text(tokenizer)?),
                };
                let template = template.clone().showing(text);
                (templated(input, special, template, tokenizer, &fits_rendered)?, false)
            }
            None if places > 0 => {
                let what = "--raw uses no chat template, which says where images stand";
                return Err(Fault::usage(what).help("drop --raw or the images").into());
            }
            None => raw(input, special, config, tokenizer)?,
        };
        check_prompt(tokens.len() + places, false, context, config)?;
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
    template: ChatTemplate,
    tokenizer: &Tokenizer,
    fits: &dyn Fn(usize) -> Result<()>,
) -> Result<Vec<Token>> {
    let mut messages = input.messages.clone();
    if let Some(text) = &input.text {
        let images = input.images.clone();
        messages.push(Message { images, ..Message::new("user", text) });
    }
    let (system, prefill) = (input.system.as_deref(), input.prefill.as_deref());
    let template = template.thinking(input.thinks).with_tools(input.tools.clone());
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
            think: ThinkOptions { think: Think::Off, think_budget: None },
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
