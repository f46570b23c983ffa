//! `gemma generate`: generates text from a prompt.

pub mod batch;
pub mod options;

pub use options::GenerateArgs;

use crate::cli::io::destination::{Destination, Writer};
use crate::cli::io::output;
use crate::cli::io::output::TextOutput;
use crate::cli::io::prompt::EncodedPrompt;
use crate::cli::io::record::{FinishReason, ModelRecord, Record, Usage, VERSION};
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::{COLUMNS, Ui, wrapped};
use crate::cli::io::{prompt, stats};
use crate::cli::options::{Origin, Resolved, Think, finish_prompts};
use crate::cli::settings::Typed;
use crate::decode::{Flow, PageDirectory, Request, Scheduler, Stats};
use crate::draft::DraftFigures;
use crate::engine::Engine;
use crate::error::Fault;
use crate::grammar::Grammar;
use crate::models::Generation;
use crate::runtime::answers::{self, AnswerEvent, AnswerRequest, Answers, Finished};
use crate::runtime::constraints::Constraints;
use crate::runtime::devices::npu;
use crate::runtime::{Drafting, DraftingOptions, Model, Room, Session, Size, Started};
use crate::sampler::SamplerConfig;
use crate::util::units::thousands;
use anyhow::Result;
use options::StatsFormat;

pub fn run(options: &GenerateArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    if typed.print_config {
        let model = Model::open(options.model.model.as_deref(), ui)?;
        let (_, resolved) = options
            .sampling
            .resolve(|name| typed.source(name), &Generation::of(model.checkpoint())?);
        output::print(&typed.config(&resolved))?;
        return Ok(0);
    }
    if let Some(from) = &options.batch.batch {
        return batch::run(options, from, typed);
    }
    if options.batch.parallel > 1 && typed.source("parallel") == Origin::Flag {
        return Err(Fault::usage(
            "--parallel answers several records of a batch at once, and there is no --batch",
        )
        .into());
    }
    if options.sampling.stop.iter().any(String::is_empty) {
        return Err(Fault::usage("--stop: an empty text would end every answer at once").into());
    }
    crate::cli::io::input::check_once(&options.input, typed)?;
    let input = prompt::gather(&options.input, &options.images, &options.chat)?;
    let grammar_source = options.grammar.source()?;
    let (model, drafting) = (options.model.settled()?, options.draft.settled()?);
    let prompts = options.cache.settled()?;
    let output = TextOutput::open(
        options.output.output.as_ref(),
        options.output.format(),
        options.output.newline || !options.output.no_newline,
    )?;
    let stats_file = options.output.stats_file.as_ref().map(Destination::open).transpose()?;
    let session = Session::open(&model, &drafting.source, ui)?;
    let session = match input.all_images().next() {
        Some(_) => session.seeing(&options.sight.settled(prompts.as_ref())),
        None => session,
    };
    let prompt = prompt::encode(&input, &options.chat, &session, model.run.context, ui)?;
    let (config, resolved) =
        options.sampling.resolve(|name| typed.source(name), &session.generation);
    let constraints = Constraints::new(&session.tokenizer, &session.stop_ids, 1);
    let ignore_eos = options.sampling.ignore_eos;
    let grammar =
        grammar_source.map(|source| constraints.get(&source, ignore_eos, &|| true)).transpose()?;
    GenerateRun { options, ui, session: &session, drafting, config, resolved, grammar, prompts }
        .go(prompt, output, stats_file)
}

/// A generation with all settings resolved.
struct GenerateRun<'a> {
    options: &'a GenerateArgs,
    ui: &'a Ui,
    session: &'a Session,
    drafting: DraftingOptions,
    config: SamplerConfig,
    resolved: Vec<Resolved>,
    grammar: Option<Grammar>,
    prompts: Option<PageDirectory>,
}

/// Prints the thought of an answer on standard error, before the text.
struct ShownThought<'a> {
    /// `None` prints nothing.
    ui: Option<&'a Ui>,
    /// Whether the last printed piece belongs to a thought.
    is_open: bool,
}

impl<'a> ShownThought<'a> {
    /// Prints thoughts if the model `thinks` and the output is not JSON, which contains them.
    fn new(ui: &'a Ui, thinks: bool, output: &TextOutput) -> ShownThought<'a> {
        let ui = Some(ui).filter(|ui| thinks && output.is_text() && !ui.is_quiet());
        ShownThought { ui, is_open: false }
    }

    /// Prints a piece of the answer.
    fn write(&mut self, event: AnswerEvent<'_>, output: &mut TextOutput) -> Result<()> {
        match event {
            AnswerEvent::Read(_) => Ok(()),
            AnswerEvent::Text(text) => {
                if !text.is_empty() {
                    self.close();
                }
                output.text(text)
            }
            AnswerEvent::Thought(text) => {
                self.is_open |= !text.is_empty();
                self.ui.iter().for_each(|ui| ui.thought(text));
                output.thought(text)
            }
        }
    }

    /// Ends the line of a thought.
    fn close(&mut self) {
        if std::mem::take(&mut self.is_open) {
            self.ui.iter().for_each(|ui| ui.thought("\n"));
        }
    }
}

impl GenerateRun<'_> {
    fn go(
        &self,
        EncodedPrompt { tokens: history, images, .. }: EncodedPrompt,
        mut output: TextOutput,
        stats_file: Option<Writer>,
    ) -> Result<u8> {
        let (options, session, ui) = (self.options, self.session, self.ui);
        self.say_options();
        let needed = history.len().saturating_add(options.sampling.max_tokens).saturating_add(1);
        let context = session.context(needed, ui);
        let started = session.start(Room::of(context), &self.drafting, ui)?;
        let Started { mut target, load_seconds, drafts: mut drafting, costs, .. } = started;
        let (think, grammar) = (&options.chat.think, self.grammar.as_ref());
        let constrained = think.constrained(grammar, &history, &session.tokenizer);
        let sampler = answers::sampler(
            self.config.clone(),
            &constrained,
            &session.tokenizer,
            &session.stop_ids,
            options.sampling.ignore_eos,
        )?;

        let mut prompts = session.prompt_cache(self.prompts.as_ref(), &target, ui)?;
        let interrupt = Interrupt::watch()?;
        let bar = ui.bar("reading", history.len() as u64);
        let mut failure = None;
        let Drafting { drafter, policy, .. } = &mut drafting;
        let stop_ids = &session.stop_ids;
        let scheduler =
            Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, interrupt.flag())
                .with_prompt_cache(prompts.as_mut());
        let request = AnswerRequest {
            text: Request { images, ..Request::new(history, sampler, options.sampling.max_tokens) },
            constrained,
            stops: options.sampling.stop.clone(),
            shows_calls: false,
            data: (),
        };
        let mut shown = ShownThought::new(ui, think.think == Think::On, &output);
        let finished =
            Answers::new(scheduler, &session.tokenizer).complete(request, &mut |(), event| {
                if let AnswerEvent::Read(done) = event {
                    bar.set_position(done as u64);
                    return Flow::Continue;
                }
                bar.finish_and_clear();
                failure = shown.write(event, &mut output).err();
                if failure.is_some() { Flow::Stop } else { Flow::Continue }
            });
        bar.finish_and_clear();
        shown.close();
        if let Some(error) = failure {
            return Err(error);
        }
        output.text(&finished.rest)?;

        let (record, stats, failed) = self.record(
            finished,
            &output,
            &costs.keep(&drafting, ui),
            &drafting,
            load_seconds,
            target.engine(),
        )?;
        npu::say(target.engine(), ui);
        // A failure leaves a file unchanged. Printed text cannot be taken back.
        if failed.is_none() || !output.appears_whole() {
            output.finish(&record)?;
        }
        finish_prompts(&mut prompts, &mut target, interrupt.flag(), ui);
        drop(target);
        if let Some(error) = failed {
            return Err(error);
        }
        if record.finish_reason == FinishReason::Length {
            self.note_cut_off(&record, context);
        }
        self.report(&record, &stats, stats_file)?;
        Ok(interrupt.exit_code().unwrap_or(0))
    }

    /// Prints the options and their sources for `-vv`.
    fn say_options(&self) {
        for (name, value, source) in &self.resolved {
            self.ui.detail(2, format!("{name} = {value}  # {source}"));
        }
    }

    /// Prints on a terminal why the answer ends before its end.
    fn note_cut_off(&self, record: &Record, context: usize) {
        if !self.ui.is_terminal() || self.ui.is_quiet() {
            return;
        }
        let is_full = record.usage.completion_tokens < self.options.sampling.max_tokens;
        self.ui.line(&match is_full {
            true => {
                format!("(cut off: the context of {} tokens is full)", thousands(context as u64))
            }
            false => "(cut off by --max-tokens)".to_owned(),
        });
    }

    /// Makes the result of a finished answer. The last value is the error that the run ends with.
    fn record(
        &self,
        finished: Finished<()>,
        output: &TextOutput,
        figures: &DraftFigures,
        drafting: &Drafting,
        load_seconds: f64,
        engine: &dyn Engine,
    ) -> Result<(Record, Stats, Option<anyhow::Error>)> {
        let completion_tokens = finished.completion_tokens();
        let (finish_reason, cut, error) = match &finished.reason {
            Ok(FinishReason::Interrupted) => (FinishReason::Interrupted, None, None),
            Ok(reason) => (*reason, finished.check().err(), None),
            Err(error) => (FinishReason::Error, None, Some(format!("{error:#}"))),
        };
        let Finished { history, prompt_tokens, reason, stats, .. } = finished;
        let model = &self.session.model;
        let report = engine.report();
        let record = Record {
            v: VERSION,
            text: output.so_far().to_owned(),
            reasoning: output.thoughts(),
            finish_reason,
            usage: Usage { prompt_tokens, completion_tokens },
            timings: stats::timings(&stats, load_seconds),
            images: self.session.viewer().ok().and_then(|v| stats::images(v.figures())),
            draft: stats::draft(&stats, figures, history.len(), drafting.disabled()),
            sampling: stats::sampling(&self.config, self.options.sampling.max_tokens),
            memory: stats::memory(&report),
            device: report.device,
            npu: npu::report(engine),
            model: ModelRecord {
                name: model.name.clone(),
                sha256: None,
                bits_per_weight: Some(Size::of(&model.weights)?.bits_per_weight()),
            },
            error: error.or(cut.as_ref().map(|cut| cut.to_string())),
            ..Record::default()
        };
        Ok((record, stats, reason.err().or(cut.map(Into::into))))
    }

    fn report(&self, record: &Record, stats: &Stats, stats_file: Option<Writer>) -> Result<()> {
        let output = &self.options.output;
        if let Some(mut file) = stats_file {
            file.write(format!("{}\n", stats::json(record)?).as_bytes())?;
            file.finish()?;
        }
        match output.stats {
            StatsFormat::Off => {}
            StatsFormat::Auto if !self.ui.is_terminal() || self.ui.is_quiet() => {}
            how @ (StatsFormat::Auto | StatsFormat::Text) => {
                self.ui.line(&stats::brief(record));
                if how == StatsFormat::Text || self.ui.is_verbose() {
                    self.ui.line(&wrapped(
                        &stats::line(record, stats, self.session.run.threads)?,
                        COLUMNS,
                    ));
                    let more = stats::draft_line(&record.draft, record.timings.decode_tps);
                    more.iter().for_each(|line| self.ui.line(&wrapped(line, COLUMNS)));
                }
            }
            StatsFormat::Json => self.ui.json(&stats::json(record)?),
        }
        Ok(())
    }
}
