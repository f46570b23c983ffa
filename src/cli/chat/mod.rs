//! `gemma chat`: a conversation at a terminal. What was said stays in the cache, so an answer waits for the newest message only.

mod command;
mod conversation;
mod wrap;

use super::args::{ModelOptions, UiOptions};
use super::generate::drafting::{self, Drafting};
use super::generate::options::{DraftingOptions, SamplingOptions};
use super::generate::text::TextStream;
use super::generate::{costs_of, keep, prompt, stats};
use super::record::{FinishReason, Memory, Record, Usage, VERSION};
use super::session;
use super::settings::{Source, Typed};
use super::signals::Interrupt;
use super::ui::{Ui, clean, paragraph, thousands};
use crate::decode::{self, Event, Flow, Limits, Stats, Stop};
use crate::draft::Figures;
use crate::engine::Timeline;
use crate::error::Fault;
use crate::gemma::{ChatTemplate, Generation};
use crate::sampler::Sampler;
use crate::tensor::Token;
use anyhow::{Context, Result};
use clap::Args;
use command::{HELP, Line};
use conversation::Conversation;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use wrap::Wrap;

/// A conversation at the terminal; the model remembers what was said before.
///
/// Type a message, and /help for the commands. Ctrl-C stops an answer and keeps the conversation; at the prompt it leaves, as Ctrl-D does.
#[derive(Debug, Args)]
pub struct Chat {
    /// Instructions put before the conversation
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// The same from a file
    #[arg(long, value_name = "FILE")]
    pub system_file: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    #[command(flatten)]
    pub draft: DraftingOptions,
    #[command(flatten)]
    pub model: ModelOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Positions that a conversation gets where nobody says how many.
const CONTEXT: usize = 8192;

pub fn run(options: &Chat, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let fault = Fault::usage("gemma chat is a conversation at a terminal, and standard input or output is none");
        return Err(fault.help("gemma generate answers one prompt, and with --batch many: echo 'Hello' | gemma generate").into());
    }
    if options.sampling.stop.iter().any(String::is_empty) {
        return Err(Fault::usage("--stop: an empty text would end everything at once").into());
    }
    let system = prompt::system_text(options.system.as_deref(), options.system_file.as_deref())?;
    let _: super::placement::Device = options.model.run.device.parse()?;
    let model = session::open(options.model.model.as_deref(), ui)?;
    let tokenizer = model.tokenizer(ui)?;
    let generation = Generation::of(model.checkpoint())?;
    let (config, _) = options.sampling.resolve(typed, &generation);
    let stop_ids = generation.stop_ids(model.config());
    let mut sampler = Sampler::new(config.clone())?.usable(tokenizer.vocab());
    if options.sampling.ignore_eos {
        sampler = sampler.ban(stop_ids.iter().copied());
    }
    let context = session::context(options.model.run.ctx_size, CONTEXT, model.config(), ui);
    let pool = session::pool(&options.model.run)?;
    let mut loaded = session::load(&model.weights, &model.name, &options.model.run, context, &pool, ui)?;
    let (passes, file) = costs_of(&options.draft, &options.model.run, &model, &mut loaded, ui)?;
    let drafting = drafting::build(&options.draft, &model, &tokenizer, &options.model.run, context, &passes, &pool, true, ui)?;
    let template = ChatTemplate::from_checkpoint(model.checkpoint())?;
    // Nobody at a terminal wants an answer cut off that did not ask for it.
    let max_tokens = match typed.source("max-tokens") {
        Source::BuiltIn => usize::MAX,
        _ => options.sampling.max_tokens,
    };
    let mut chat = Session {
        options,
        ui,
        talk: Conversation::new(template, &tokenizer, system),
        stream: &|| TextStream::new(&tokenizer, &options.sampling.stop),
        target: Timeline::new(loaded.engine),
        drafting,
        sampler,
        stop_ids,
        max_tokens,
        interrupt: Interrupt::watch_answers()?,
        columns: 0,
        last: None,
    };
    if !ui.is_quiet() {
        ui.line(&format!("{}: /help lists the commands, Ctrl-D leaves", model.name));
    }
    chat.go()?;
    keep(&mut chat.drafting, passes, &file, ui);
    super::npu::say(chat.target.engine().assist().as_ref(), ui);
    Ok(0)
}

struct Session<'a> {
    options: &'a Chat,
    ui: &'a Ui,
    talk: Conversation<'a>,
    stream: &'a dyn Fn() -> TextStream<'a>,
    target: Timeline,
    drafting: Drafting,
    sampler: Sampler,
    stop_ids: Vec<Token>,
    max_tokens: usize,
    interrupt: Interrupt,
    /// Columns of the terminal; 0 where it does not say.
    columns: usize,
    /// Of the last answer.
    last: Option<(Stats, Usage, FinishReason)>,
}

impl Session<'_> {
    fn go(&mut self) -> Result<()> {
        let config = Config::builder().auto_add_history(true).build();
        let mut editor: Editor<(), MemHistory> =
            Editor::with_history(config, MemHistory::new()).context("preparing the terminal")?;
        loop {
            self.columns = editor.dimensions().map_or(0, |(columns, _)| columns.into());
            let mut line = String::new();
            let mut prompt = "> ";
            loop {
                match editor.readline(prompt) {
                    Ok(part) => line.push_str(&part),
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
                    // A window that changes its size.
                    Err(ReadlineError::Signal(_)) => continue,
                    Err(e) => return Err(e).context("reading from the terminal"),
                }
                match line.strip_suffix('\\') {
                    Some(begun) => line = format!("{begun}\n"),
                    None => break,
                }
                prompt = ". ";
            }
            let said = match Line::parse(&line) {
                Line::Nothing => Ok(()),
                Line::Message(text) => self.answer(&text),
                Line::Help => self.say(HELP),
                Line::Reset => {
                    self.talk.reset();
                    self.say("forgotten")
                }
                Line::Save(file) => self.save(&file),
                Line::Stats => self.stats(),
                Line::Quit => return Ok(()),
                Line::Wrong(what) => self.say(&what),
            };
            match said {
                Ok(()) => {}
                // The conversation outlives whatever one message met with, but a device that is gone.
                Err(e) if crate::error::fault_of(&e).is_some_and(|f| f.kind == crate::error::Kind::Device) => return Err(e),
                Err(e) => self.ui.error(&e),
            }
        }
    }

    fn say(&self, text: &str) -> Result<()> {
        self.ui.line(text);
        Ok(())
    }

    fn save(&self, file: &std::path::Path) -> Result<()> {
        super::output::replace(file, self.talk.to_json()?.as_bytes())?;
        self.say(&format!("saved as {}", file.display()))
    }

    /// Streams an answer. What Ctrl-C leaves of it is kept.
    fn answer(&mut self, text: &str) -> Result<()> {
        let mut history = self.talk.ask(text)?;
        let (prompt, context) = (history.len(), self.target.engine().context());
        if prompt >= context {
            let (have, most) = (thousands(prompt as u64), thousands(context as u64));
            let fault =
                Fault::new(crate::error::Kind::Context, format!("the conversation would have {have} tokens, the context {most}"));
            return Err(fault.help("/reset begins a new one; --ctx-size makes room for longer ones").into());
        }
        self.interrupt.reset();
        let limits = Limits { max_tokens: self.max_tokens, stop_ids: &self.stop_ids, interrupt: self.interrupt.flag() };
        let mut wrap = Wrap::new(self.columns);
        let (mut stream, mut answer, mut stats) = ((self.stream)(), String::new(), Stats::default());
        let bar = self.ui.bar("reading", prompt as u64);
        let mut failure = None;
        let (target, drafter) = (&mut self.target, self.drafting.drafter.as_mut());
        let stop = decode::generate(target, drafter, &self.sampler, &mut history, &limits, &mut stats, &mut |event| {
            match event {
                Event::Prefill(done, _) => bar.set_position(done as u64),
                Event::Token(token) => {
                    bar.finish_and_clear();
                    let piece = stream.push(token);
                    answer.push_str(piece);
                    match show(&mut wrap, piece) {
                        Ok(()) if stream.is_stopped() => return Flow::Stop,
                        Ok(()) => {}
                        Err(e) => {
                            failure = Some(e);
                            return Flow::Stop;
                        }
                    }
                }
            }
            Flow::Continue
        });
        bar.finish_and_clear();
        let rest = stream.finish();
        answer.push_str(rest);
        let shown = show(&mut wrap, rest).and_then(|()| show(&mut wrap, "\n"));
        if let Some(e) = failure.or(shown.err()) {
            return Err(e).context("cannot write to the terminal");
        }
        let finish = match stop? {
            _ if stream.is_stopped() => FinishReason::StopString,
            Stop::Token(_) => FinishReason::Stop,
            Stop::Length => FinishReason::Length,
            Stop::Interrupt | Stop::Receiver => FinishReason::Interrupted,
        };
        match finish {
            FinishReason::Length if history.len() >= context => {
                self.ui.line("(the context is full: /reset begins a new conversation)")
            }
            FinishReason::Length => self.ui.line("(cut off by --max-tokens)"),
            FinishReason::Interrupted => self.ui.line("(stopped)"),
            _ => {}
        }
        let usage = Usage { prompt_tokens: prompt, completion_tokens: history.len() - prompt };
        // A prompt that was not even read leaves nothing to go on with.
        if usage.completion_tokens > 0 {
            self.talk.answered(text, &answer, history);
        }
        self.last = Some((stats, usage, finish));
        Ok(())
    }

    /// The last answer's figures.
    fn stats(&self) -> Result<()> {
        let Some((stats, usage, finish_reason)) = &self.last else { return self.say("no answer yet") };
        let mut figures = Figures::default();
        self.drafting.drafter.figures(&mut figures);
        let engine = self.target.engine();
        let memory = engine.memory();
        let disabled = self.drafting.disabled.clone().or_else(|| self.drafting.drafter.note());
        let record = Record {
            v: VERSION,
            finish_reason: *finish_reason,
            usage: usage.clone(),
            timings: stats::timings(stats, 0.0),
            draft: stats::draft(stats, &figures, self.talk.position(), disabled),
            sampling: stats::sampling(self.sampler.config(), self.max_tokens),
            memory: Memory { weights: memory.weights, kv: memory.kv, activations: memory.activations },
            device: engine.describe(),
            ..Record::default()
        };
        let (tokens, context) = (thousands(self.talk.position() as u64), thousands(engine.context() as u64));
        self.ui.line(&format!("conversation {tokens} of {context} tokens; {} of the last prompt's read anew", stats.prefilled));
        let line = stats::line(&record, stats, self.options.model.run.threads)?;
        self.ui.line(paragraph("", 0, &line).trim_end());
        Ok(())
    }
}

/// Text on its way to the terminal, which must obey nothing in it.
fn show(wrap: &mut Wrap, piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(wrap.push(&clean(piece)).as_bytes()).and_then(|()| out.flush())
}
