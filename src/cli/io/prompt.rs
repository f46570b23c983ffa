//! Prompts: from options, files and standard input to tokens.

use crate::cli::io::image_file::{self, read_image};
use crate::cli::io::input;
use crate::cli::io::pictures::picture;
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::cli::options::{ChatOptions, ImageOptions, InputOptions, SpecialPolicy, TemplateArgs};
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
    /// Functions in OpenAI's form, for templates that declare them.
    pub tools: Vec<Value>,
    pub thinks: bool,
}

impl PromptInput {
    /// Returns all images, in the order of their places in the prompt.
    pub fn all_images(&self) -> impl Iterator<Item = &MessageImage> {
        self.messages.iter().flat_map(|message| &message.images).chain(&self.images)
    }

    /// Returns the bytes of all texts.
    pub fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(Message::bytes).sum();
        let tools: usize = self.tools.iter().map(|tool| tool.to_string().len()).sum();
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        messages + tools + len(&self.system) + len(&self.text) + len(&self.prefill)
    }
}

/// Reads all inputs. Refuses a command line without a prompt.
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
            "--raw uses no chat template, so --system and --messages cannot be given",
        )
        .into());
    }
    let parts = input::parts(text, piped)?;
    let system = system(chat)?;
    let messages = chat.messages.as_deref().map(read_messages).transpose()?.unwrap_or_default();
    let prompt = input::assemble(&parts, stdin)?;
    // An empty prompt is allowed if it is given explicitly: --raw ''.
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

/// Returns the text, or the content of the file. Refuses both together.
pub fn system_text(text: Option<&str>, file: Option<&Path>) -> Result<Option<String>> {
    match (text, file) {
        (Some(_), Some(_)) => Err(Fault::usage("--system and --system-file are both given")
            .help("give one of them")
            .into()),
        (None, Some(path)) => Ok(Some(read_file(path)?)),
        (text, None) => Ok(text.map(str::to_owned)),
    }
}

/// Content of a message: a text, or a list of texts and images.
///
/// Each text of a list has lines of its own.
pub struct MessageContent(Message);

impl MessageContent {
    /// Makes a message with this content.
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
            // A part without a type is a text if it has a field `text`.
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

/// Reads messages from a JSON array, or from the field `messages` of an object.
pub fn read_messages(path: &Path) -> Result<Vec<Message>> {
    #[derive(Deserialize)]
    struct FileMessage {
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
    let items: Vec<FileMessage> = serde_json::from_value(list).with_context(wrong)?;
    Ok(items.into_iter().map(|item| item.content.message(item.role)).collect())
}

/// Prompt length in tokens above which the demo's answers are useless.
const DEMO_READS: usize = 200;

/// Note for a long prompt to the demo.
pub const DEMO_READS_LITTLE: &str =
    "the demo answers short questions only: it cannot summarise a text or answer from one";

/// Returns the prompt's tokens, made by the chat template or from a raw text after one BOS.
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
        let fault = Fault::usage("--think on needs the chat template, and --raw uses none");
        return Err(fault.help("drop one of the two").into());
    }
    if chat.template.chat_template.is_some() && chat.raw {
        let fault = Fault::usage("--chat-template and --raw are both given, and --raw uses none");
        return Err(fault.help("drop one of the two").into());
    }
    let input = &PromptInput { thinks, ..input.clone() };
    let template = match chat.raw {
        true => None,
        false => Some(chat_template(&session.model, &session.tokenizer, &chat.template, ui)?),
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
        ui.note("the prompt already begins with a BOS token, so none is added");
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

/// Returns the chat template that is chosen, by default the model's own.
///
/// If the model's files have none, prints a note and returns Gemma's own. Prints a note too if
/// theirs is an old one of Google's.
pub fn chat_template(
    model: &Model,
    tokenizer: &Tokenizer,
    choice: &TemplateArgs,
    listener: &dyn Listener,
) -> Result<ChatTemplate> {
    let template = ChatTemplate::from_checkpoint(model.checkpoint(), tokenizer.dialect())?;
    match choice.chat_template.as_deref() {
        Some(name) if name == "google" => {
            return Ok(template.with_source(tokenizer.dialect().template.to_owned()));
        }
        Some(file) => return Ok(template.with_source(read_file(file)?)),
        None => {}
    }
    if template.is_outdated() {
        listener.note(&format!(
            "the chat template of {} is older than Google's of 2026-07-09, \
             which mends calls of functions; --chat-template google renders as the newer one does",
            model.name
        ));
    }
    if model.place.is_some() && template.is_built_in() {
        listener.note(&format!(
            "no chat template in {}: it is perhaps a base model, which answers no questions; \
             gemma generate --raw continues text",
            model.name
        ));
    }
    Ok(template)
}

/// A prompt encoded for the model.
#[derive(Clone, Debug, Default)]
pub struct EncodedPrompt {
    pub tokens: Vec<Token>,
    /// The images that the tokens refer to.
    pub images: Vec<Arc<Image>>,
    /// Whether a raw text already began with a BOS.
    pub has_own_bos: bool,
}

/// A prompt with images that are measured but not decoded.
#[derive(Clone, Debug, Default)]
pub struct UnseenPrompt {
    /// Tokens without the places of images.
    pub tokens: Vec<Token>,
    /// Files of the images, in order.
    pub files: Vec<Arc<[u8]>>,
    has_own_bos: bool,
}

impl UnseenPrompt {
    /// Returns the prompt with its decoded images, given in the order of the files.
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
    /// The chat template; `None` to continue a raw text.
    pub template: Option<&'a ChatTemplate>,
    pub config: &'a Config,
    pub tokenizer: &'a Tokenizer,
    /// The tower that reads images, or the reason why there is none.
    pub viewer: Result<&'a Viewer, &'a Fault>,
    /// Context size from the options.
    pub context: AutoOr,
    /// Limit of a rendered prompt in bytes.
    pub most_rendered: usize,
}

impl PromptEncoder<'_> {
    /// Returns the encoded prompt.
    ///
    /// Images go through the tower, unless their soft tokens are cached. Refuses a prompt that
    /// leaves no room for an answer.
    pub fn encode(&self, input: &PromptInput, special: Special) -> Result<EncodedPrompt> {
        let unseen = self.tokenise(input, special)?;
        let images = unseen.files.iter().map(|file| self.viewer()?.see(file));
        let images = images.collect::<Result<_>>()?;
        unseen.seen(self.viewer, self.tokenizer, images)
    }

    /// Returns the prompt as tokens.
    ///
    /// Reads only the headers of image files. Refuses a prompt that leaves no room for an answer.
    pub fn tokenise(&self, input: &PromptInput, special: Special) -> Result<UnseenPrompt> {
        let (tokens, has_own_bos) = self.checked(input, special)?;
        let files: Vec<_> = input.all_images().map(|image| image.file.clone()).collect();
        if !files.is_empty() {
            // Refuses a prompt with a wrong number of image marks before an image is decoded.
            let text = self.viewer()?.vision().image_text(self.tokenizer)?;
            text.place(&tokens, &vec![0..0; files.len()])?;
        }
        Ok(UnseenPrompt { tokens, files, has_own_bos })
    }

    /// Counts a prompt's tokens, including those of its images.
    ///
    /// Reads only the headers of image files. Refuses a prompt that leaves no room for an answer.
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

    /// Returns the tokens without places of images, and whether a raw text already began with a
    /// BOS. The length check counts the places.
    fn checked(&self, input: &PromptInput, special: Special) -> Result<(Vec<Token>, bool)> {
        let PromptEncoder { config, tokenizer, context, most_rendered, .. } = *self;
        let limit = match context {
            AutoOr::N(n) => n,
            AutoOr::Auto => config.max_position,
        };
        let places = self.image_tokens(input)?;
        // Tokenising costs time and memory, so a text that cannot fit is refused first.
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
                let what = "images need the chat template, and --raw uses none";
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
            template: TemplateArgs::default(),
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
