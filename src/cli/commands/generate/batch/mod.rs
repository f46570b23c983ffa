//! `gemma generate --batch`: answers records, one output line per record in the same order.
//!
//! The text of a record depends only on the record and the batch's seed. It does not depend on its
//! neighbours, the shard, an interruption, or the number of records in flight.

pub mod call;
pub mod held;
pub mod job;
pub mod place;
pub mod records;
pub mod reply;
pub mod resume;
pub mod texts;

use super::options::GenerateArgs;
use crate::cli::api::notes::Notes;
use crate::cli::api::served::{ServedModel, ServedOptions, Thinking};
use crate::cli::io::format::AnswerFormat;
use crate::cli::io::image_file::{self, read_image};
use crate::cli::io::prompt::{EncodedPrompt, PromptInput};
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::Ui;
use crate::cli::io::{output, prompt};
use crate::cli::options::Origin;
use crate::cli::settings::Typed;
use crate::decode::{PageDirectory, Request};
use crate::error::{Fault, Kind, fault_of};
use crate::grammar::GrammarSource;
use crate::runtime::answers::{self, AnswerRequest};
use crate::runtime::constraints::Constraints;
use crate::runtime::devices::npu;
use crate::runtime::options::AutoOr;
use crate::runtime::{Room, Session};
use crate::sampler::SamplerConfig;
use crate::util::shell::quoted;
use crate::util::units::thousands;
use anyhow::Result;
use job::{Failure, RecordJob};
use place::{RecordLines, ReplyPlace};
use records::{Records, Replies};
use std::cell::OnceCell;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// Default context of a batch in tokens. The lengths of its records are not known in advance.
const CONTEXT: usize = 4096;
/// Exit code of a strict batch with failed records.
const SOME_FAILED: u8 = 6;

pub fn run(options: &GenerateArgs, from: &Path, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    check(options, typed)?;
    let system = prompt::system(&options.chat)?;
    let source = options.grammar.source()?;
    let sequences = options.batch.parallel as usize;
    let lines = RecordLines::open(from)?;
    let (model, drafting) = (options.model.settled()?, options.draft.settled()?);
    let prompts = options.cache.settled()?;
    // Reports an output that cannot be written before the model is opened. Writes nothing before
    // the model is found.
    let place =
        ReplyPlace::of(options.output.output.as_ref(), options.batch.resume.as_ref(), from)?;
    let session = Session::open(&model, &drafting.source, ui)?;
    let session = session.seeing(&options.sight.settled(prompts.as_ref()));
    options.sight.check(&session)?;
    let (sink, done) = place.open()?;
    let constraints = Arc::new(Constraints::new(&session.tokenizer, &session.stop_ids, sequences));
    // Reports errors in the options before the first record.
    source
        .as_ref()
        .map(|source| constraints.get(source, options.sampling.ignore_eos, &|| true))
        .transpose()?;
    let (mut config, _) = options.sampling.resolve(|name| typed.source(name), &session.generation);
    // The seed is not random: processes that share a batch must agree, and so must a resumed run.
    config.seed = options.sampling.seed.unwrap_or(0);

    let context = session.context(CONTEXT, ui);
    let started = session.start(Room { context, sequences, prefixes: 0 }, &drafting, ui)?;
    let interrupt = Interrupt::watch()?;
    let (tell, told) = channel();
    let notes = Notes::new(move |note| drop(tell.send(note.to_owned())));
    let batch = Batch {
        options,
        session: &session,
        config,
        source,
        constraints,
        context,
        system,
        folder: from.parent().unwrap_or(Path::new("")),
        served: OnceCell::new(),
        device: started.target.engine().report().device,
        notes: (notes.into(), told),
        interrupt: &interrupt,
        prompts,
        ui,
    };
    let typed_in = from == Path::new("-") && std::io::stdin().is_terminal();
    if typed_in {
        ui.note("reading records from the terminal, a JSON object a line; Ctrl-D ends them");
    }
    let mut records =
        Records::new(lines, options.batch.shard, done, sequences > 1, options.batch.strict, ui)?;
    let bar = match place::count(from) {
        Some(records) => ui.bar("records", records),
        None => ui.spinner("answering records", !typed_in),
    };
    let mut replies = Replies::new(sink, bar);

    let begin = Instant::now();
    texts::run(&batch, started, &mut records, &mut replies)?;
    let Replies { sink, answered, failed, tokens, .. } = replies.end();
    let interrupted = interrupt.exit_code();
    // After an interruption, a file that appears only when it is complete does not appear.
    if interrupted.is_some() && sink.appears_whole() {
        ui.note("interrupted: the output was not written; --resume OUT keeps finished answers");
    } else {
        sink.finish()?;
    }
    let summary = Summary { answered, failed, tokens, kept: records.kept };
    if !ui.is_quiet() {
        ui.line(&summary.text(begin.elapsed().as_secs_f64()));
        if failed > 0 {
            ui.help(&failures_of(options));
        }
    }
    Ok(interrupted.unwrap_or(if options.batch.strict && failed > 0 { SOME_FAILED } else { 0 }))
}

/// Counts of a batch.
struct Summary {
    answered: u64,
    failed: u64,
    tokens: u64,
    kept: u64,
}

impl Summary {
    fn text(&self, seconds: f64) -> String {
        let rate = self.tokens as f64 / seconds.max(1e-9);
        let [answered, failed, tokens, kept] =
            [self.answered, self.failed, self.tokens, self.kept].map(thousands);
        let records = if self.answered == 1 { "record" } else { "records" };
        let done = format!(
            "{answered} {records}, {failed} failed, \
             {tokens} tokens in {seconds:.1} s ({rate:.1} tok/s)"
        );
        match (self.answered, self.kept) {
            (_, 0) => done,
            (0, _) => format!("nothing to do: all {kept} answers are kept"),
            _ => format!("{done}, {kept} kept"),
        }
    }
}

/// Returns a command that lists the failures of this batch.
fn failures_of(options: &GenerateArgs) -> String {
    let out = options.batch.resume.as_ref().or(options.output.output.as_ref());
    let out = out.map_or_else(|| "OUT".into(), |out| quoted(&out.path().to_string_lossy()));
    format!("jq -c 'select(.error)' {out}")
}

/// Refuses options of a single prompt, and options that exclude each other.
fn check(options: &GenerateArgs, typed: &Typed) -> Result<()> {
    let (input, chat, output) = (&options.input, &options.chat, &options.output);
    let one = !input.words.is_empty()
        || input.prompt.is_some()
        || !input.file.is_empty()
        || !options.images.image.is_empty()
        || chat.messages.is_some();
    if one {
        let fault =
            Fault::usage("--batch reads prompts from records, but another prompt was given");
        return Err(fault.help("gemma generate --batch prompts.jsonl >answers.jsonl").into());
    }
    if chat.raw && (chat.system.is_some() || chat.system_file.is_some()) {
        return Err(Fault::usage("--raw uses no chat template, so --system cannot be given").into());
    }
    if output.format != output::OutputFormat::Jsonl && typed.source("format") == Origin::Flag {
        let fault = Fault::usage("--batch answers in JSON lines, and another --format was given");
        return Err(fault.help("leave --format out; jq -r .text shows the texts").into());
    }
    if options.batch.resume.is_some() && output.output.is_some() {
        return Err(
            Fault::usage("--resume OUT already names the output: leave --output out").into()
        );
    }
    if output.stats_file.is_some() {
        return Err(Fault::usage(
            "--stats-file is for single prompts: a batch's figures are in its replies",
        )
        .into());
    }
    if options.sampling.stop.iter().any(String::is_empty) {
        return Err(Fault::usage("--stop: an empty text would end every answer at once").into());
    }
    if options.batch.parallel > 1 && options.model.run.npu.is_asked() {
        return Err(npu::for_one_text());
    }
    Ok(())
}

/// Settings that all records share.
pub struct Batch<'a> {
    options: &'a GenerateArgs,
    session: &'a Session,
    config: SamplerConfig,
    /// Grammar of records without one of their own.
    source: Option<GrammarSource>,
    constraints: Arc<Constraints>,
    context: usize,
    /// System message of records without one of their own.
    system: Option<String>,
    /// Folder that contains the images of records.
    folder: &'a Path,
    /// The model as the server's code sees it, for lines of OpenAI's form.
    served: OnceCell<Arc<ServedModel>>,
    /// The engine's report of its device.
    device: String,
    /// Notes about lines of OpenAI's form, and the receiver of those notes.
    notes: (Arc<Notes>, Receiver<String>),
    interrupt: &'a Interrupt,
    prompts: Option<PageDirectory>,
    ui: &'a Ui,
}

impl Batch<'_> {
    /// Returns the model as a server with these options would have it.
    fn served(&self) -> Result<&Arc<ServedModel>> {
        if let Some(served) = self.served.get() {
            return Ok(served);
        }
        let options = ServedOptions {
            context: self.context,
            created: 0,
            sampling: self.config.clone(),
            constraints: self.constraints.clone(),
            max_tokens: AutoOr::N(self.options.sampling.max_tokens),
            thinking: Thinking {
                is_on: self.options.chat.think.settled(&self.session.tokenizer)?,
                budget: self.options.chat.think.think_budget,
            },
            template: self.options.chat.template.clone(),
        };
        let served = ServedModel::new(self.session, &self.device, options, self.ui)?;
        Ok(self.served.get_or_init(|| served.into()))
    }

    /// Adds options that the input does not set itself.
    fn complete(&self, input: &mut PromptInput) {
        if input.system.is_none() && input.messages.first().is_none_or(|m| m.role != "system") {
            input.system.clone_from(&self.system);
        }
        if input.prefill.is_none() {
            input.prefill.clone_from(&self.options.chat.prefill);
        }
    }

    /// Prepares the answer to a record. `data` gets the seed of its text.
    fn prepare<D>(
        &self,
        job: &RecordJob,
        seed: u64,
        data: impl FnOnce(u64) -> D,
    ) -> Result<AnswerRequest<D>> {
        let options = self.options;
        let mut chat = options.chat.clone();
        chat.raw = job.raw.unwrap_or(chat.raw);
        let mut input = job.input.clone();
        if let (Some(text), false) = (&input.text, job.files.is_empty()) {
            let files = job.files.iter().map(|file| read_image(&self.folder.join(file)));
            let (text, images) = image_file::place(text, files.collect::<Result<_>>()?)?;
            (input.text, input.images) = (Some(text), images);
        }
        match chat.raw {
            false => self.complete(&mut input),
            true if input.prefill.is_none() => input.prefill.clone_from(&chat.prefill),
            true => {}
        }
        let EncodedPrompt { tokens: history, images, .. } =
            prompt::encode(&input, &chat, self.session, AutoOr::N(self.context), self.ui)?;
        let config = job.sampling(&self.config, seed);
        let data = data(config.seed);
        let ignore_eos = job.ignore_eos.unwrap_or(options.sampling.ignore_eos);
        let source = match &job.format {
            None => self.source.as_ref(),
            Some(AnswerFormat::Text) => None,
            Some(AnswerFormat::Grammar(source)) => Some(source),
        };
        let grammar =
            source.map(|source| self.constraints.get(source, ignore_eos, &|| true)).transpose()?;
        let (tokenizer, ends) = (&self.session.tokenizer, &self.session.stop_ids);
        let constrained = chat.think.constrained(grammar.as_ref(), &history, tokenizer);
        let sampler = answers::sampler(config, &constrained, tokenizer, ends, ignore_eos)?;
        let stops =
            if job.stop.is_empty() { options.sampling.stop.clone() } else { job.stop.clone() };
        let max_tokens = job.max_tokens.unwrap_or(options.sampling.max_tokens);
        let text = Request { images, ..Request::new(history, sampler, max_tokens) };
        Ok(AnswerRequest { text, constrained, stops, shows_calls: false, data })
    }
}

/// Returns whether an error ends the batch, rather than one record: a lost device, or too little
/// memory.
fn ends_batch(error: &anyhow::Error) -> bool {
    fault_of(error).is_some_and(|fault| matches!(fault.kind, Kind::Device | Kind::Memory))
}

/// Converts an error to the record's answer. Returns errors that end the batch.
fn failure(error: anyhow::Error) -> Result<Failure> {
    if ends_batch(&error) { Err(error) } else { Ok(Failure::of(&error)) }
}
