//! `gemma chat`: a conversation at a terminal.
//!
//! Earlier messages stay in the KV cache, so only the newest message of each prompt is read.

mod answer;
mod attach;
mod command;
mod conversation;
mod options;
mod talks;
mod typing;

pub use options::ChatArgs;

use crate::cli::io::destination::Destination;
use crate::cli::io::image_file::read_image;
use crate::cli::io::prompt;
use crate::cli::io::record::{FinishReason, Usage};
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::{Ui, clean};
use crate::cli::options::Origin;
use crate::cli::settings::Typed;
use crate::decode::{PromptCache, Stats};
use crate::engine::Timeline;
use crate::error::{Fault, Kind};
use crate::models::{Message, Tokenizer};
use crate::os::terminal;
use crate::runtime::constraints::Constrained;
use crate::runtime::devices::npu;
use crate::runtime::drafting::Drafting;
use crate::runtime::{self, Started, Viewer, answers};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use crate::util::units::thousands;
use anyhow::{Context, Result};
use attach::AttachedFile;
use command::{ChatLine, HELP};
use conversation::{Conversation, ShownImage};
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use talks::Keeper;
use typing::LinePrompt;

/// Default context size of a conversation, in tokens.
const CONTEXT: usize = 8192;

/// Refuses a conversation that cannot start, before a model is loaded.
fn check(options: &ChatArgs) -> Result<()> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let fault = Fault::usage(
            "gemma chat is a conversation at a terminal, \
             and standard input or output is not a terminal",
        );
        return Err(fault
            .help(
                "gemma generate answers one prompt, and with --batch many: \
                 echo 'Hello' | gemma generate",
            )
            .into());
    }
    if options.sampling.stop.iter().any(String::is_empty) {
        return Err(Fault::usage("--stop: an empty text would end every answer at once").into());
    }
    Ok(())
}

pub fn run(options: &ChatArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    if talks::obey(&options.talks, ui)? {
        return Ok(0);
    }
    check(options)?;
    let (keeper, earlier) = Keeper::open(&options.talks)?;
    let system = prompt::system_text(options.system.as_deref(), options.system_file.as_deref())?;
    let (model, drafting) = (options.model.settled()?, options.draft.settled()?);
    let prompts = options.cache.settled()?;
    let session = runtime::Session::open(&model, &drafting.source, ui)?;
    let session = session.seeing(&options.sight.settled(prompts.as_ref()));
    let tokenizer = &*session.tokenizer;
    let thinks = options.think.settled(tokenizer)?;
    let (config, _) = options.sampling.resolve(|name| typed.source(name), &session.generation);
    let sampler = |seed: u64| -> Result<Sampler> {
        let (config, ends) = (SamplerConfig { seed, ..config.clone() }, &session.stop_ids);
        answers::sampler(
            config,
            &Constrained::default(),
            tokenizer,
            ends,
            options.sampling.ignore_eos,
        )
    };
    let context = session.context(CONTEXT, ui);
    let Started { target, drafts: drafting, costs, .. } =
        session.start(runtime::Room::of(context), &drafting, ui)?;
    let prompts = session.prompt_cache(prompts.as_ref(), &target, ui)?;
    let images = session.viewer().ok().map(|viewer| viewer.vision().image_text(tokenizer));
    let template = prompt::chat_template(&session.model, tokenizer, &options.template, ui)?;
    let template = template.thinking(thinks).showing(images.transpose()?);
    // In a chat, answers are unlimited unless --max-tokens is given.
    let max_tokens = match typed.source("max-tokens") {
        Origin::BuiltIn => usize::MAX,
        _ => options.sampling.max_tokens,
    };
    let mut chat = ChatSession {
        options,
        ui,
        talk: Conversation::new(template, tokenizer, system),
        keeper,
        files: Vec::new(),
        is_demo: session.model.place.is_none(),
        tokenizer,
        viewer: session.viewer(),
        target,
        prompts,
        drafting,
        sampler: sampler(config.seed)?,
        reseeded: &sampler,
        stop_ids: &session.stop_ids,
        threads: session.run.threads,
        max_tokens,
        interrupt: Interrupt::watch_answers()?,
        last: None,
    };
    terminal::restore_at_signals().context("watching the terminal")?;
    if chat.is_demo {
        ui.note("the demo answers each message by itself and sees no earlier ones");
    }
    if !ui.is_quiet() {
        ui.line(&format!("{}: /help lists the commands, Ctrl-D leaves", session.model.name));
    }
    // Keys typed during an answer are not echoed: they would appear in its text, and the terminal
    // would act on some of them.
    let unechoed = terminal::Unechoed::begin();
    chat.go(earlier)?;
    drop(unechoed);
    costs.keep(&chat.drafting, ui);
    npu::say(chat.target.engine(), ui);
    Ok(0)
}

struct ChatSession<'a> {
    options: &'a ChatArgs,
    ui: &'a Ui,
    talk: Conversation<'a>,
    /// Writes the conversation to a file, if it is kept.
    keeper: Option<Keeper>,
    /// Text files for the next message.
    files: Vec<AttachedFile>,
    is_demo: bool,
    tokenizer: &'a Tokenizer,
    /// The tower that reads images, or the reason why there is none.
    viewer: Result<&'a Viewer, &'a Fault>,
    target: Timeline,
    prompts: Option<PromptCache>,
    drafting: Drafting,
    sampler: Sampler,
    /// Makes the same sampler with another seed.
    reseeded: &'a dyn Fn(u64) -> Result<Sampler>,
    stop_ids: &'a [Token],
    threads: Option<usize>,
    max_tokens: usize,
    interrupt: Interrupt,
    /// Figures of the last answer.
    last: Option<(Stats, Usage, FinishReason)>,
}

impl ChatSession<'_> {
    /// Runs the conversation, which continues from `earlier` messages.
    fn go(&mut self, earlier: Vec<Message>) -> Result<()> {
        let mut prompt = LinePrompt::new()?;
        let open = self.begin(earlier)?;
        self.outlive(Self::answer_open, open)?;
        let first = self.options.words.join(" ");
        if !first.trim().is_empty() {
            self.ui.line(&format!("> {}", clean(&first)));
            prompt.remember(&first);
            self.outlive(Self::send, &*first)?;
            self.outlive(Self::keep, ())?;
        }
        while let Some(line) = prompt.read(self.ui)? {
            match line {
                ChatLine::Quit => break,
                line => self.outlive(Self::obey, line)?,
            }
            self.outlive(Self::keep, ())?;
        }
        Ok(())
    }

    /// Runs `act`, and prints its error unless the device is lost.
    fn outlive<T>(&mut self, act: impl FnOnce(&mut Self, T) -> Result<()>, what: T) -> Result<()> {
        match act(self, what) {
            Err(e) if crate::error::fault_of(&e).is_some_and(|f| f.kind == Kind::Device) => Err(e),
            Err(e) => {
                self.ui.error(&e);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn obey(&mut self, line: ChatLine) -> Result<()> {
        match line {
            ChatLine::Nothing | ChatLine::Quit => Ok(()),
            ChatLine::Message(text) => self.send(&text),
            ChatLine::Help => self.say(HELP),
            ChatLine::Reset => self.reset(),
            ChatLine::Undo => self.undo(),
            ChatLine::Retry => self.retry(),
            ChatLine::System(None) => match self.talk.system() {
                Some(text) => self.say(&clean(text)),
                None => self.say("(there are no instructions: /system TEXT gives some)"),
            },
            ChatLine::System(Some(text)) => {
                let some = text != "-";
                self.talk.set_system(some.then_some(text));
                self.say(if some {
                    "(these instructions apply from now on)"
                } else {
                    "(no instructions from now on)"
                })
            }
            ChatLine::Save(file) => self.save(&file),
            ChatLine::Load(file) => self.load(&file),
            ChatLine::Image(file) => self.show(&file),
            ChatLine::File(file) => self.attach(&file),
            ChatLine::Stats => self.stats(),
            ChatLine::Wrong(what) => self.say(&what),
        }
    }

    fn say(&self, text: &str) -> Result<()> {
        self.ui.line(text);
        Ok(())
    }

    /// Reports where the conversation is kept, and continues the messages of the file.
    ///
    /// Returns the last message if it has no answer. An error ends the chat, so that a conversation
    /// that the chat cannot continue is not overwritten.
    fn begin(&mut self, earlier: Vec<Message>) -> Result<Option<String>> {
        let Some(keeper) = &self.keeper else { return Ok(None) };
        let (place, mut open) = (keeper.place(), None);
        if !earlier.is_empty() {
            // Instructions of the command line replace those of the file.
            let system = self.talk.system().map(str::to_owned);
            let last = earlier.iter().rfind(|message| message.role == "user");
            let last = shortened(last.map_or("", |message| &message.content));
            open = self.go_on(earlier, &format!("; the last: {last:?}"))?;
            let text = self.talk.to_json()?;
            self.keeper.iter_mut().for_each(|keeper| keeper.has(text.clone()));
            if system.is_some() {
                self.talk.set_system(system);
            }
        }
        self.say(&format!("(the conversation is kept {place})"))?;
        Ok(open)
    }

    /// Writes a kept conversation to its file, if it has changed.
    fn keep(&mut self, (): ()) -> Result<()> {
        match &mut self.keeper {
            Some(keeper) if self.talk.turns() > 0 => keeper.keep(self.talk.to_json()?),
            _ => Ok(()),
        }
    }

    /// Answers a message with its attached files.
    fn send(&mut self, text: &str) -> Result<()> {
        let before = self.talk.turns();
        self.answer(&attach::message(&self.files, text))?;
        if self.talk.turns() > before {
            self.files.clear();
        }
        Ok(())
    }

    /// From the next answer on, keeps the conversation as a new talk, or replaces the one in a
    /// `--history` file.
    fn begin_new(&mut self) -> Result<()> {
        let text = self.talk.to_json()?;
        let Some(keeper) = &mut self.keeper else { return Ok(()) };
        if let Some(file) = keeper.begin_new() {
            let file = file.display();
            self.ui.line(&format!("(the next answer replaces the conversation in {file})"));
        }
        keeper.has(text);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.talk.reset();
        self.files.clear();
        self.begin_new()?;
        self.say("(the conversation is forgotten)")
    }

    /// Removes the last file for the next message, or else the last message.
    fn undo(&mut self) -> Result<()> {
        if let Some(file) = self.files.pop() {
            return self.say(&format!("({} is removed from your next message)", file.name));
        }
        let Some(text) = self.talk.undo() else { return self.say("(there is nothing to undo)") };
        self.talk.show_none();
        if let (Some(keeper), 0) = (&mut self.keeper, self.talk.turns()) {
            keeper.forget()?;
        }
        self.say(&format!("(forgotten: {:?} and its answer)", shortened(&text)))
    }

    fn save(&self, file: &Path) -> Result<()> {
        if self.talk.turns() == 0 {
            return Err(Fault::usage("nothing was said yet").into());
        }
        let is_markdown = file.extension().is_some_and(|ending| ending == "md");
        let text = match is_markdown {
            true => talks::markdown(&self.talk.messages()),
            false => self.talk.to_json()?,
        };
        Destination::from(file).write(text.as_bytes())?;
        self.say(&format!("(saved as {})", file.display()))?;
        if self.keeper.is_none() {
            self.ui.once("how to keep", talks::how_to_keep());
        }
        Ok(())
    }

    /// Adds a text file to the next message.
    fn attach(&mut self, file: &Path) -> Result<()> {
        let context = self.context();
        let attached = AttachedFile::read(file, context.saturating_mul(self.tokenizer.longest()))?;
        self.files.push(attached);
        let tokens = self.talk.alone(&attach::message(&self.files, ""))?;
        let name = self.files.last().map_or("", |file| &file.name);
        if tokens >= context {
            let fault = attach::too_long(name, tokens, context);
            self.files.pop();
            return Err(fault.into());
        }
        let tokens = thousands(tokens as u64);
        let what = format!("({name} is added to your next message, {tokens} tokens so far)");
        if self.is_demo {
            self.ui.note(prompt::DEMO_READS_LITTLE);
        }
        self.say(&what)
    }

    /// Adds an image to the next message.
    fn show(&mut self, file: &Path) -> Result<()> {
        let shown = self.see(&read_image(file)?)?;
        let tokens = shown.image.rows();
        self.talk.show(shown);
        self.say(&format!("(the image of {tokens} tokens is added to your next message)"))
    }

    fn see(&self, file: &Arc<[u8]>) -> Result<ShownImage> {
        let viewer = self.viewer.map_err(Fault::clone)?;
        let _spinner = self.ui.spinner("looking at the image", true);
        let image = viewer.see(file)?;
        viewer.take_notes().iter().for_each(|note| self.ui.note(note));
        Ok(ShownImage { image, file: file.clone() })
    }

    /// Continues the conversation in a file. Answers its last message, if that has no answer yet.
    fn load(&mut self, file: &Path) -> Result<()> {
        let messages = prompt::read_messages(file)?;
        let open = self.go_on(messages, &format!(" from {}", file.display()))?;
        self.begin_new()?;
        self.answer_open(open)
    }

    /// Replaces the conversation by these messages. Returns the last one if it has no answer.
    fn go_on(&mut self, messages: Vec<Message>, from: &str) -> Result<Option<String>> {
        let mut talk = self.talk.clone();
        let open = talk.load(messages, &|file| self.see(file))?;
        self.talk = talk;
        self.say(&match self.talk.turns() {
            1 => format!("(1 message with its answer{from})"),
            n => format!("({n} messages with their answers{from})"),
        })?;
        Ok(open)
    }

    fn answer_open(&mut self, message: Option<String>) -> Result<()> {
        let Some(text) = message else { return Ok(()) };
        self.ui.line(&format!("> {}", clean(&text)));
        self.answer(&text)
    }

    /// Answers the last message again. If there is no new answer, the old one is kept.
    fn retry(&mut self) -> Result<()> {
        let before = self.talk.clone();
        let Some(text) = self.talk.undo() else {
            return self.say("(there is no message to answer again)");
        };
        let config = self.sampler.config();
        if config.temperature == 0.0 {
            self.say(
                "(at temperature 0 the answer stays the same; gemma chat --temp 0.7 gives others)",
            )?;
        }
        self.sampler = (self.reseeded)(config.seed.wrapping_add(1))?;
        let result = self.answer(&text);
        if self.talk.turns() < before.turns() {
            self.talk = before;
        }
        result
    }
}

/// Returns the first words of a message, for a note about it.
fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}
