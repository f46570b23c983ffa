//! `gemma generate --batch`: records in, a line out for each, in their order, from one loaded model.
//!
//! Records share the target's cache: what a prompt has in common with the one before it is not read again. What a record's text is
//! depends on the record and the batch's seed alone, never on its neighbours, the shard, or an interruption.

pub mod format;
pub mod job;
pub mod place;
pub mod reply;

use super::drafting::{self, Drafting};
use super::grammar::{Constrained, Constraints};
use super::options::Generate;
use super::prompt;
use super::text::TextStream;
use crate::cli::args::AutoOr;
use crate::cli::record::{FinishReason, Usage};
use crate::cli::session::{self, Model};
use crate::cli::settings::Typed;
use crate::cli::signals::Interrupt;
use crate::cli::ui::{Ui, thousands};
use crate::decode::{self, Event, Flow, Limits, Stats, Stop};
use crate::engine::Timeline;
use crate::error::{Fault, Kind, fault_of};
use crate::gemma::{Generation, Tokenizer};
use crate::grammar::Source;
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use anyhow::Result;
use format::Format;
use job::{Failure, Job, Line};
use place::{Lines, Sink};
use reply::Answer;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Positions that a batch makes room for where nobody says how many: its records are not known yet.
const CONTEXT: usize = 4096;
/// Exit code of a strict batch with failed records.
const SOME_FAILED: u8 = 6;

pub fn run(options: &Generate, from: &Path, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    check(options)?;
    let system = prompt::system(&options.chat)?;
    let source = options.grammar.source()?;
    let mut lines = Lines::open(from)?;
    let (mut sink, mut done) = Sink::open(options.output.output.as_deref(), options.batch.resume.as_deref())?;
    let _: crate::cli::placement::Device = options.model.run.device.parse()?;
    let model = session::open(options.model.model.as_deref(), ui)?;
    let tokenizer = Arc::new(model.tokenizer(ui)?);
    let generation = Generation::of(model.checkpoint())?;
    let stop_ids = generation.stop_ids(model.config());
    let mut constraints = Constraints::new(&tokenizer, &stop_ids);
    // What is wrong with the options is said before the first record.
    source.as_ref().map(|source| constraints.get(source, options.sampling.ignore_eos)).transpose()?;
    let (mut config, _) = options.sampling.resolve(typed, &generation);
    // Processes that share a batch must agree, and so must a run and its resumption.
    config.seed = options.sampling.seed.unwrap_or(0);

    let context = session::context(options.model.run.ctx_size, CONTEXT, model.config(), ui);
    let pool = session::pool(&options.model.run)?;
    let mut loaded = session::load(&model.weights, &model.name, &options.model.run, context, &pool, ui)?;
    let (passes, file) = super::costs_of(&options.draft, &options.model.run, &model, &mut loaded, ui)?;
    let drafting = drafting::build(&options.draft, &model, &tokenizer, &options.model.run, context, &passes, &pool, true, ui)?;
    let interrupt = Interrupt::watch()?;
    let mut batch = Batch {
        options,
        model: &model,
        tokenizer: &tokenizer,
        config,
        stop_ids,
        source,
        constraints,
        context,
        system,
        target: Timeline::new(loaded.engine),
        drafting,
        interrupt: &interrupt,
        tokens: 0,
    };

    let begin = Instant::now();
    let bar = match place::count(from) {
        Some(records) => ui.bar("records", records),
        None => ui.spinner("answering records", true),
    };
    let (mut nth, mut answered, mut failed) = (0, 0u64, 0u64);
    while let Some((number, bytes)) = lines.take()? {
        bar.inc(1);
        let mine = options.batch.shard.is_none_or(|shard| shard.has(nth));
        nth += 1;
        if !mine {
            continue;
        }
        let line = Line::parse(&bytes, number);
        if let Some(left) = done.get_mut(&line.id.to_string()).filter(|n| **n > 0) {
            *left -= 1;
            continue;
        }
        let answer = match &line.job {
            Ok(job) => batch.answer(job, line.seed(batch.config.seed), ui)?,
            Err(failure) => Some(Err(failure.clone())),
        };
        // What an interruption cut short is not an answer; --resume will ask again.
        let Some(answer) = answer else { break };
        failed += answer.is_err() as u64;
        answered += 1;
        sink.write(&reply::line(&line, &model.name, &answer))?;
        if interrupt.exit_code().is_some() {
            break;
        }
    }
    bar.finish_and_clear();
    super::keep(&mut batch.drafting, passes, &file, ui);
    crate::cli::npu::say(batch.target.engine().assist().as_ref(), ui);
    let interrupted = interrupt.exit_code();
    match (&sink, interrupted) {
        // A file that was to appear whole does not appear by half.
        (Sink::Whole(..), Some(_)) => ui.note("interrupted: the output was not written; --resume OUT keeps what is done"),
        _ => sink.finish()?,
    }
    if ui.is_terminal() && !ui.is_quiet() {
        let seconds = begin.elapsed().as_secs_f64();
        let rate = batch.tokens as f64 / seconds.max(1e-9);
        let (records, tokens) = (thousands(answered), thousands(batch.tokens));
        ui.line(&format!("{records} records, {failed} failed, {tokens} tokens in {seconds:.1} s ({rate:.1} tok/s)"));
    }
    Ok(interrupted.unwrap_or(if options.batch.strict && failed > 0 { SOME_FAILED } else { 0 }))
}

/// Options that mean one prompt.
fn check(options: &Generate) -> Result<()> {
    let (input, chat, output) = (&options.input, &options.chat, &options.output);
    let one = !input.words.is_empty() || input.prompt.is_some() || !input.file.is_empty() || chat.messages.is_some();
    if one {
        let fault = Fault::usage("--batch takes its prompts from records, and another prompt was given");
        return Err(fault.help("gemma generate --batch prompts.jsonl >answers.jsonl").into());
    }
    if chat.raw && (chat.system.is_some() || chat.system_file.is_some()) {
        return Err(Fault::usage("--raw uses no chat template: it takes no --system").into());
    }
    if output.stats_file.is_some() {
        return Err(Fault::usage("--stats-file is for single prompts: a batch's figures are in its replies").into());
    }
    if options.sampling.stop.iter().any(String::is_empty) {
        return Err(Fault::usage("--stop: an empty text would end everything at once").into());
    }
    Ok(())
}

struct Batch<'a> {
    options: &'a Generate,
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    config: SamplerConfig,
    stop_ids: Vec<Token>,
    /// For records that do not say what their answer must follow.
    source: Option<Source>,
    constraints: Constraints,
    context: usize,
    /// For records that bring none.
    system: Option<String>,
    target: Timeline,
    drafting: Drafting,
    interrupt: &'a Interrupt,
    /// Generated so far.
    tokens: u64,
}

impl Batch<'_> {
    /// Answers one record; `None` if an interruption came first. What no other record would survive is an error.
    fn answer(&mut self, job: &Job, seed: u64, ui: &Ui) -> Result<Option<Result<Answer, Failure>>> {
        match self.generate(job, seed, ui) {
            Ok(answer) => Ok(answer.map(Ok)),
            Err(e) if fault_of(&e).is_some_and(|f| matches!(f.kind, Kind::Device | Kind::Memory)) => Err(e),
            Err(e) => Ok(Some(Err(Failure::of(&e)))),
        }
    }

    fn generate(&mut self, job: &Job, seed: u64, ui: &Ui) -> Result<Option<Answer>> {
        let options = self.options;
        let mut chat = options.chat.clone();
        chat.raw = job.raw.unwrap_or(chat.raw);
        let mut said = job.said.clone();
        if !chat.raw && said.system.is_none() && said.messages.first().is_none_or(|m| m.role != "system") {
            said.system.clone_from(&self.system);
        }
        if said.prefill.is_none() {
            said.prefill.clone_from(&chat.prefill);
        }
        let mut history = prompt::encode(&said, &chat, self.model, self.tokenizer, AutoOr::N(self.context), ui)?;
        let prompt_tokens = history.len();
        let config = job.sampling(&self.config, seed);
        let seed = config.seed;
        let ignore_eos = job.ignore_eos.unwrap_or(options.sampling.ignore_eos);
        let source = match &job.format {
            None => self.source.as_ref(),
            Some(Format::Text) => None,
            Some(Format::Grammar(source)) => Some(source),
        };
        let grammar = source.map(|source| self.constraints.get(source, ignore_eos)).transpose()?;
        let constrained = Constrained::new(grammar.as_ref(), prompt_tokens);
        let mut sampler = constrained.sampler(Sampler::new(config)?.usable(self.tokenizer.vocab()));
        if ignore_eos {
            sampler = sampler.ban(self.stop_ids.iter().copied());
        }
        let stops = if job.stop.is_empty() { &options.sampling.stop } else { &job.stop };
        let max_tokens = job.max_tokens.unwrap_or(options.sampling.max_tokens);
        let limits = Limits { max_tokens, stop_ids: &self.stop_ids, interrupt: self.interrupt.flag() };
        let mut stream = TextStream::new(self.tokenizer, stops);
        let (mut text, mut stats) = (String::new(), Stats::default());
        let on_event = &mut |event| {
            if let Event::Token(token) = event {
                text.push_str(stream.push(token));
                if stream.is_stopped() {
                    return Flow::Stop;
                }
            }
            Flow::Continue
        };
        let (target, drafter) = (&mut self.target, self.drafting.drafter.as_mut());
        let stop = decode::generate(target, drafter, &sampler, &mut history, &limits, &mut stats, on_event)?;
        text.push_str(stream.finish());
        let completion_tokens = history.len() - prompt_tokens;
        self.tokens += completion_tokens as u64;
        let finish_reason = match stop {
            _ if stream.is_stopped() => FinishReason::StopString,
            Stop::Token(_) => FinishReason::Stop,
            Stop::Length => FinishReason::Length,
            Stop::Interrupt | Stop::Receiver => return Ok(None),
        };
        constrained.check(&history, completion_tokens, stream.is_stopped())?;
        Ok(Some(Answer { text, finish_reason, usage: Usage { prompt_tokens, completion_tokens }, seed }))
    }
}
