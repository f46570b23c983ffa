//! `gemma chat`: a conversation at a terminal. Earlier messages stay in the cache, so that each
//! prompt reads the newest message only.

mod command;
mod conversation;
mod typing;
mod wrap;

use crate::cli::io::destination::Destination;
use crate::cli::io::image_file::read_image;
use crate::cli::io::record::{FinishReason, Record, Usage, VERSION};
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::{Ui, clean, wrapped};
use crate::cli::io::{prompt, stats};
use crate::cli::options::{
    DraftArgs, ModelArgs, Origin, PromptCacheArgs, SamplingOptions, SightArgs, ThinkOptions,
    UiOptions, finish_prompts,
};
use crate::cli::settings::Typed;
use crate::decode::{Flow, PromptCache, Request, Scheduler, Stats};
use crate::engine::{EngineExt, Timeline};
use crate::error::{Fault, Kind};
use crate::models::Tokenizer;
use crate::os::terminal;
use crate::runtime::answers::{self, AnswerEvent, AnswerRequest, Answers, Finished};
use crate::runtime::constraints::Constrained;
use crate::runtime::devices::npu;
use crate::runtime::drafting::Drafting;
use crate::runtime::{self, Started, Viewer};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use crate::util::units::thousands;
use anyhow::{Context, Result};
use clap::Args;
use command::{ChatLine, HELP};
use conversation::{Conversation, ShownImage};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use typing::LinePrompt;
use wrap::Wrap;

const EXAMPLES: &str = "\
Examples:
  gemma chat
  gemma chat -m google/gemma-3-27b-it-qat-q4_0-gguf
  gemma chat -m MODEL --system 'Answer in one sentence.' --temp 0.7";

/// A conversation at the terminal; the model remembers what was said before.
///
/// Type a message, or /help for the commands. Ctrl-C stops an answer and keeps the conversation; at
/// the prompt it drops the line. Ctrl-D or /quit leaves. There is no history file; /save keeps a
/// conversation.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ChatArgs {
    /// The first message; the conversation goes on from its answer
    #[arg(value_name = "MESSAGE")]
    pub words: Vec<String>,
    /// Instructions put before the conversation
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// The same from a file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub system_file: Option<PathBuf>,
    #[command(flatten)]
    pub think: ThinkOptions,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Default context of a conversation, in tokens.
const CONTEXT: usize = 8192;

/// An answer is begun with at least this part of the context free for it, as long as there are
/// older turns to leave out.
const ANSWER_PART: usize = 8;

pub fn run(options: &ChatArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
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
        let free = Constrained::new(None, 0, None);
        answers::sampler(config, &free, tokenizer, ends, options.sampling.ignore_eos)
    };
    let context = session.context(CONTEXT, ui);
    let Started { target, drafts: drafting, costs, .. } =
        session.start(runtime::Room::of(context), &drafting, ui)?;
    let prompts = session.prompt_cache(prompts.as_ref(), &target, ui)?;
    let images = session.viewer().ok().map(|viewer| viewer.vision().image_text(tokenizer));
    let template = prompt::chat_template(&session.model, tokenizer, ui)?;
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
    if session.model.place.is_none() {
        ui.note("the demo answers each message by itself and sees no earlier ones");
    }
    if !ui.is_quiet() {
        ui.line(&format!("{}: /help lists the commands, Ctrl-D leaves", session.model.name));
    }
    chat.go()?;
    costs.keep(&chat.drafting, ui);
    npu::say(chat.target.engine(), ui);
    Ok(0)
}

struct ChatSession<'a> {
    options: &'a ChatArgs,
    ui: &'a Ui,
    talk: Conversation<'a>,
    tokenizer: &'a Tokenizer,
    /// The tower that reads images, or why there is none.
    viewer: Result<&'a Viewer, &'a Fault>,
    target: Timeline,
    prompts: Option<PromptCache>,
    drafting: Drafting,
    sampler: Sampler,
    /// The same sampler with another seed.
    reseeded: &'a dyn Fn(u64) -> Result<Sampler>,
    stop_ids: &'a [Token],
    threads: Option<usize>,
    max_tokens: usize,
    interrupt: Interrupt,
    /// Figures of the last answer.
    last: Option<(Stats, Usage, FinishReason)>,
}

impl ChatSession<'_> {
    fn go(&mut self) -> Result<()> {
        let mut prompt = LinePrompt::new()?;
        let first = self.options.words.join(" ");
        if !first.trim().is_empty() {
            self.ui.line(&format!("> {}", clean(&first)));
            prompt.remember(&first);
            self.outlive(Self::answer, &first)?;
        }
        while let Some(line) = prompt.read(self.ui)? {
            match line {
                ChatLine::Quit => break,
                line => self.outlive(Self::obey, line)?,
            }
        }
        Ok(())
    }

    /// Prints an error of one message and goes on, unless the device is lost.
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
            ChatLine::Message(text) => self.answer(&text),
            ChatLine::Help => self.say(HELP),
            ChatLine::Reset => {
                self.talk.reset();
                self.say("(the conversation is forgotten)")
            }
            ChatLine::Undo => match self.talk.undo() {
                Some(text) => {
                    self.talk.show_none();
                    self.say(&format!("(forgotten: {:?} and its answer)", shortened(&text)))
                }
                None => self.say("(there is nothing to undo)"),
            },
            ChatLine::Retry => self.retry(),
            ChatLine::System(None) => match self.talk.system() {
                Some(text) => self.say(&clean(text)),
                None => self.say("(there are no instructions: /system TEXT gives some)"),
            },
            ChatLine::System(Some(text)) => {
                let some = text != "-";
                self.talk.set_system(some.then_some(text));
                self.say(if some {
                    "(these instructions hold from here on)"
                } else {
                    "(no instructions from here on)"
                })
            }
            ChatLine::Save(file) => self.save(&file),
            ChatLine::Load(file) => self.load(&file),
            ChatLine::Image(file) => self.show(&file),
            ChatLine::Stats => self.stats(),
            ChatLine::Wrong(what) => self.say(&what),
        }
    }

    fn say(&self, text: &str) -> Result<()> {
        self.ui.line(text);
        Ok(())
    }

    fn save(&self, file: &Path) -> Result<()> {
        Destination::from(file).write(self.talk.to_json()?.as_bytes())?;
        self.say(&format!("(saved as {})", file.display()))
    }

    /// Shows the model a picture with the next message.
    fn show(&mut self, file: &Path) -> Result<()> {
        let shown = self.see(&read_image(file)?)?;
        let tokens = shown.image.rows();
        self.talk.show(shown);
        self.say(&format!("(the image of {tokens} tokens goes with your next message)"))
    }

    fn see(&self, file: &Arc<[u8]>) -> Result<ShownImage> {
        let viewer = self.viewer.map_err(Fault::clone)?;
        let _spinner = self.ui.spinner("looking at the image", true);
        let image = viewer.see(file)?;
        viewer.take_notes().iter().for_each(|note| self.ui.note(note));
        Ok(ShownImage { image, file: file.clone() })
    }

    /// Goes on with the conversation in a file, and answers its last message where that has no
    /// answer yet.
    fn load(&mut self, file: &Path) -> Result<()> {
        let messages = prompt::read_messages(file)?;
        let mut talk = self.talk.clone();
        let open = talk.load(messages, &|file| self.see(file))?;
        self.talk = talk;
        let what = match self.talk.turns() {
            1 => "1 message with its answer".to_owned(),
            n => format!("{n} messages with their answers"),
        };
        self.say(&format!("({what} from {})", file.display()))?;
        match open {
            Some(text) => {
                self.ui.line(&format!("> {}", clean(&text)));
                self.answer(&text)
            }
            None => Ok(()),
        }
    }

    /// Answers the last message again. The old answer is kept where nothing comes of the new one.
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

    fn answer<T: AsRef<str> + ?Sized>(&mut self, text: &T) -> Result<()> {
        let history = self.room_for(text.as_ref())?;
        // Echoed keys would appear in the middle of the answer.
        let _unechoed = terminal::Unechoed::begin();
        self.stream_answer(text.as_ref(), history)
    }

    /// The prompt, with older turns left out where it would leave the answer no room.
    fn room_for(&mut self, text: &str) -> Result<Vec<Token>> {
        let context = self.target.engine().context(0);
        let most = context - context / ANSWER_PART;
        let mut history = self.talk.ask(text)?;
        let (before, mut left_out) = (self.talk.clone(), 0);
        if history.len() > most {
            // Half of what the message leaves free, so that not every one from here on has all of
            // its prompt read anew.
            let alone = self.talk.alone(text)?;
            let enough = alone + most.saturating_sub(alone) / 2;
            while history.len() > enough && self.talk.leave_out_oldest() {
                left_out += 1;
                history = self.talk.ask(text)?;
            }
        }
        if history.len() >= context {
            self.talk = before;
            let (have, most) = (thousands(history.len() as u64), thousands(context as u64));
            let fault = Fault::new(
                Kind::Context,
                format!("the message takes {have} tokens, and the context holds {most}"),
            );
            return Err(fault
                .help("say it in less, or begin gemma chat with a larger --ctx-size")
                .into());
        }
        let what = match left_out {
            0 => return Ok(history),
            1 => "message and its answer".to_owned(),
            n => format!("{n} messages and their answers"),
        };
        self.ui.line(&format!(
            "(the context of {} tokens is full: the model no longer sees the oldest {what}; \
             /save writes them all)",
            thousands(context as u64)
        ));
        Ok(history)
    }

    /// Streams an answer. After Ctrl-C the part so far is kept.
    fn stream_answer(&mut self, text: &str, history: Vec<Token>) -> Result<()> {
        let context = self.target.engine().context(0);
        self.interrupt.reset();
        let mut screen = Screen { ui: self.ui, wrap: Wrap::new(columns()), in_thought: false };
        let mut answer = String::new();
        let bar = self.ui.bar("reading", history.len() as u64);
        let mut failure = None;
        let Drafting { drafter, policy, .. } = &mut self.drafting;
        let flag = self.interrupt.flag();
        let scheduler =
            Scheduler::new(&mut self.target, drafter.as_mut(), policy, self.stop_ids, flag)
                .with_prompt_cache(self.prompts.as_mut());
        let constrained = self.options.think.constrained(None, history.len(), self.tokenizer);
        let sampler = constrained.sampler(self.sampler.clone());
        let request = AnswerRequest {
            text: Request {
                images: self.talk.images(),
                ..Request::new(history, sampler, self.max_tokens)
            },
            constrained,
            stops: self.options.sampling.stop.clone(),
            shows_calls: false,
            data: (),
        };
        let finished =
            Answers::new(scheduler, self.tokenizer).complete(request, &mut |(), event| {
                let (piece, is_thought) = match event {
                    AnswerEvent::Read(done) => {
                        bar.set_position(done as u64);
                        return Flow::Continue;
                    }
                    AnswerEvent::Text(piece) => (piece, false),
                    AnswerEvent::Thought(piece) => (piece, true),
                };
                bar.finish_and_clear();
                if !is_thought {
                    answer.push_str(piece);
                }
                failure = screen.show(piece, is_thought).err();
                if failure.is_some() { Flow::Stop } else { Flow::Continue }
            });
        bar.finish_and_clear();
        answer.push_str(&finished.rest);
        let shown = screen.show(&format!("{}\n", finished.rest), false);
        if let Some(e) = failure.or(shown.err()) {
            return Err(e).context("cannot write to the terminal");
        }
        finish_prompts(&mut self.prompts, &mut self.target, flag, self.ui);
        let completion_tokens = finished.completion_tokens();
        let Finished { history, prompt_tokens, reason, stats, .. } = finished;
        let finish = reason?;
        match finish {
            FinishReason::Length if history.len() >= context => self.ui.line(
                "(the context is full; the next message has the oldest ones left out, \
                    /reset forgets all)",
            ),
            FinishReason::Length => self.ui.line("(cut off by --max-tokens)"),
            FinishReason::Interrupted => self.ui.line("(stopped)"),
            _ => {}
        }
        let usage = Usage { prompt_tokens, completion_tokens };
        // A prompt that was not even read leaves nothing to go on with.
        if usage.completion_tokens > 0 {
            self.talk.answered(text, &answer, history);
        }
        self.last = Some((stats, usage, finish));
        Ok(())
    }

    /// The last answer's figures.
    fn stats(&self) -> Result<()> {
        let Some((stats, usage, finish_reason)) = &self.last else {
            return self.say("(there is no answer yet)");
        };
        let figures = self.drafting.figures();
        let engine = self.target.engine();
        let report = engine.report();
        let disabled = self.drafting.disabled();
        let record = Record {
            v: VERSION,
            finish_reason: *finish_reason,
            usage: usage.clone(),
            timings: stats::timings(stats, 0.0),
            draft: stats::draft(stats, &figures, self.talk.position(), disabled),
            sampling: stats::sampling(self.sampler.config(), self.max_tokens),
            memory: stats::memory(&report),
            device: report.device,
            ..Record::default()
        };
        let (tokens, context) =
            (thousands(self.talk.position() as u64), thousands(engine.context(0) as u64));
        let line = stats::line(&record, stats, self.threads)?;
        let columns = columns();
        self.ui.line(&wrapped(
            &format!(
                "conversation: {tokens} of {context} tokens; \
                 {} tokens of the last prompt were read",
                stats.prefilled
            ),
            columns,
        ));
        self.ui.line(&wrapped(&line, columns));
        Ok(())
    }
}

/// Returns the beginning of a message, for a note about it.
fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// Returns the columns of the window at this moment; 0 where the terminal does not say.
fn columns() -> usize {
    terminal_size::terminal_size_of(std::io::stdout()).map_or(0, |(width, _)| width.0.into())
}

/// An answer on its way to the terminal, which must obey nothing in it. Thoughts are dimmed.
struct Screen<'a> {
    ui: &'a Ui,
    wrap: Wrap,
    in_thought: bool,
}

impl Screen<'_> {
    fn show(&mut self, piece: &str, is_thought: bool) -> std::io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.wrap.resize(columns());
        let mut text = String::new();
        if self.in_thought && !is_thought {
            text = self.ui.dimmed_output(self.wrap.push("\n"));
        }
        self.in_thought = is_thought;
        let piece = self.wrap.push(&clean(piece));
        text += &if is_thought { self.ui.dimmed_output(piece) } else { piece };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    }
}
