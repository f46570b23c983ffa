//! `gemma bench`: the speed of a model, and the share of the memory's speed that it reaches.

mod measure;
mod report;
mod runner;
mod text;
mod tower;

use crate::cli::help::VERSION;
use crate::cli::io::output::print;
use crate::cli::io::text_file::read_file;
use crate::cli::options::{DraftArgs, FormatArgs, ModelArgs, SightArgs, UiOptions, shape};
use crate::cli::settings::Typed;
use crate::error::Fault;
use crate::models::Weights;
use crate::runtime::devices::memory_speed::memory_speed;
use crate::runtime::devices::npu;
use crate::runtime::devices::processor::{self, default_threads};
use crate::runtime::model::assistant::assistant;
use crate::runtime::model::shapes::Shape;
use crate::runtime::model::{format_name, viewer};
use crate::runtime::options::AutoOr;
use crate::runtime::placement::measure::idle_experts;
use crate::runtime::{Model, Room, RunOptions, Size, load};
use crate::sampler::SamplerConfig;
use crate::util::shell::quoted;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use report::{BenchMachine, BenchReport, Measurement};
use runner::Runner;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  gemma bench
  gemma bench --only decode,verify --rows 1,4,8
  gemma bench -m MODEL --json >NOW.json && gemma bench -m MODEL --compare NOW.json";

/// Measure prefill, decode, the cost of a pass by its rows, text with and without drafts, and each
/// kernel's bandwidth.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct BenchArgs {
    /// Use made-up weights in the shape of a Gemma
    #[arg(long, value_parser = shape(), value_name = "SHAPE", conflicts_with = "model")]
    pub synthetic: Option<Shape>,
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Tests to run, separated by commas or blanks
    #[arg(
        long, value_enum, value_name = "TESTS", value_delimiter = ',', num_args = 1..,
        default_value = "prefill,decode,verify,kernels,text"
    )]
    pub only: Vec<Test>,
    /// Prompt tokens of the prefill test
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512)]
    pub pp: usize,
    /// Tokens of the decode test
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub tg: usize,
    /// Tokens already in the cache for decode and verify tests, separated by commas or blanks
    #[arg(
        long, value_name = "N", value_delimiter = ',', num_args = 1.., default_value = "0",
        hide_short_help = true
    )]
    pub depth: Vec<usize>,
    /// Rows of the verify test, separated by commas or blanks
    #[arg(
        long, value_name = "M", value_delimiter = ',', num_args = 1..,
        default_value = "1,2,4,8,16,32"
    )]
    pub rows: Vec<usize>,
    /// Rows of the passes in which kernels are timed, separated by commas or blanks
    #[arg(
        long, value_name = "M", value_delimiter = ',', num_args = 1.., default_value = "1",
        hide_short_help = true
    )]
    pub kernel_rows: Vec<usize>,
    /// Measurements of each test, after one that is not counted
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5)]
    pub repetitions: usize,
    /// Prompts of the text test, as JSON lines (repeatable) [default: a few built in]
    ///
    /// Each line is an object with "prompt" or "turns", and with "category".
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub prompts: Vec<PathBuf>,
    /// Prompts to take from the files, evenly spread
    #[arg(long, value_name = "N", default_value_t = 40, hide_short_help = true)]
    pub prompt_count: usize,
    /// Generate at most this many tokens for each prompt
    #[arg(long, value_name = "N", default_value_t = 128, hide_short_help = true)]
    pub text_tokens: usize,
    /// tokenizer.json for the text test, or a directory that has one [default: the model's]
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub tokenizer: Option<PathBuf>,
    /// Temperature of the text test
    #[arg(long, value_name = "T", default_value_t = 0.0, hide_short_help = true)]
    pub temp: f32,
    /// Picture of the image test [default: a made-up one of 1024 x 768]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub image: Option<PathBuf>,
    /// Check that kernels compute every element: run passes again with buffers full of NaN
    ///
    /// Each pass of the verify test, and one of the prefill test, runs normally and again after all
    /// of its results are filled with NaN. The scores must have the same bits; otherwise the exit
    /// code is 1. The figures are measured without NaN.
    #[arg(long)]
    pub poison: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Compare with an older run, from the file of its --json
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

impl BenchArgs {
    /// Refuses numbers and tests that cannot be measured.
    fn check(&self) -> Result<()> {
        let rows = self.rows.iter().chain(&self.kernel_rows);
        if rows.chain([&self.repetitions, &self.pp, &self.tg]).any(|n| *n == 0) {
            let what = "--repetitions, --rows, --kernel-rows, --pp and --tg must be above 0";
            return Err(Fault::usage(what).into());
        }
        if self.synthetic.is_some() && self.only.contains(&Test::Load) {
            let what = "--only load needs --model, because made-up weights have no files";
            return Err(Fault::usage(what).into());
        }
        Ok(())
    }

    /// Returns the context size in positions: the given one, or as many as the tests need.
    fn context(&self, wanted: AutoOr) -> Result<usize> {
        let deepest = self.depth.iter().max().copied().unwrap_or(0);
        let most_rows = self.rows.iter().chain(&self.kernel_rows).max().copied().unwrap_or(1);
        let rounds = runner::ROUND_POSITIONS * (self.repetitions + 3) + runner::CHAIN;
        let needed = self.pp.max(deepest + self.tg.max(most_rows).max(rounds) + 1);
        match wanted {
            AutoOr::N(n) if n < needed => {
                Err(Fault::usage(format!("these tests need --ctx-size {needed}")).into())
            }
            AutoOr::N(n) => Ok(n),
            AutoOr::Auto => Ok(needed),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Test {
    /// Prompt tokens per second
    Prefill,
    /// Generated tokens per second, one by one
    Decode,
    /// Time of a pass over several rows
    Verify,
    /// Time of a draft step of an assistant, and of a round with it
    Drafts,
    /// Time and bandwidth of each kernel while decoding
    Kernels,
    /// Text of real prompts, with and without drafts (needs a tokenizer)
    Text,
    /// Times of an image: decoding its pixels, and the tower
    Image,
    /// Time of loading a model, compared with reading its files and sending it to the device
    Load,
}

/// Runs the tests that the options name, and prints the figures.
pub fn run(options: &BenchArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let old = options.compare.as_deref().map(read_report).transpose()?;
    options.check()?;
    let model_options = options.model.settled()?;
    let (run, wants_drafts) = (&model_options.run, options.only.contains(&Test::Drafts));
    let (model, made_up, name);
    match options.synthetic {
        Some(shape) => {
            model = None;
            let formats = options.formats.settled();
            let assistant = wants_drafts.then(|| shape.assistant(&formats)).transpose()?;
            made_up = Some(shape.weights(&formats)?.assisted_by(assistant.flatten()));
            name = format!("synthetic {}", shape.name());
        }
        None => {
            let mut opened = Model::open(model_options.model.as_deref(), ui)?;
            if wants_drafts {
                let source = options.draft.settled()?.source;
                let found = assistant(&opened, &source, ui)?;
                opened.weights = opened.weights.assisted_by(found);
            }
            name = opened.name.clone();
            model = Some(opened);
            made_up = None;
        }
    }
    let weights =
        model.as_ref().map(|m| &m.weights).or(made_up.as_ref()).context("there is no model")?;
    let load = crate::os::machine::load_average();
    let cores = default_threads();
    let context = options.context(run.context)?;
    let pool = load::pool(run)?;
    let mut loaded = load::load(weights, &name, run, Room::of(context), &pool, ui)?;
    let engine = loaded.engine.as_mut();
    let (memory, device) = (engine.report().memory, engine.report().device);
    // The processor's speed is remembered. A device's speed is measured now.
    let speed = loaded.device.as_ref().and_then(|_| engine.device()?.read_bandwidth());
    let mut report = BenchReport {
        v: 1,
        version: VERSION.to_owned(),
        date: httpdate::fmt_http_date(std::time::SystemTime::now()),
        command: command_line(),
        machine: BenchMachine {
            threads: run.threads.unwrap_or(cores),
            device,
            read_gb_per_s: speed.map_or_else(|| memory_speed(&pool).gb_per_s, |bytes| bytes / 1e9),
            cpu: processor::name(),
        },
        model: report::BenchModel {
            name,
            formats: formats(weights)?,
            weights: memory.weights,
            read: memory.weights - idle_experts(weights, 0..weights.config().layers.len()),
            kv: memory.kv,
            activations: memory.activations,
            context: Some(context),
            load_s: loaded.seconds,
        },
        ..BenchReport::default()
    };
    if options.only.contains(&Test::Load) {
        report.results.push(runner::load_row(weights, engine, loaded.seconds)?);
    }
    Runner::new(engine, options, ui)?.measure_all(&mut report)?;
    npu::say(loaded.engine.as_ref(), ui);
    drop(loaded);
    if options.only.contains(&Test::Image) {
        report.results.extend(images(options, model.as_ref(), weights.config().dim, run)?);
    }
    if let Some(model) = model.filter(|_| options.only.contains(&Test::Text)) {
        report.text = Some(text::measure(model, run, options, ui)?);
    }
    report.doubts = report.find_doubts(load, cores);
    print(&match options.json {
        true => format!("{}\n", serde_json::to_string_pretty(&report)?),
        false => report.markdown(old.as_ref()),
    })?;
    Ok(0)
}

/// Measures the tower that the options name. Made-up weights of `dim` channels get a made-up tower.
fn images(
    options: &BenchArgs,
    model: Option<&Model>,
    dim: usize,
    run: &RunOptions,
) -> Result<Vec<Measurement>> {
    let sight = options.sight.settled(None);
    // The files of a made-up tower are kept in a directory until they are read.
    let directory = tempfile::tempdir().context("making a directory for a tower")?;
    let vision = match (options.synthetic, &sight.mmproj) {
        (Some(_), None) => tower::made_up(dim, directory.path())?,
        _ => viewer::tower(model, &sight)?,
    };
    tower::measure(&vision, options.image.as_deref(), sight.tokens, run, options.repetitions)
}

/// Returns the command line, quoted for a shell.
fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| quoted(&arg.to_string_lossy()));
    std::iter::once("gemma".to_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

/// Returns Gemma's own sampling defaults.
fn sampling() -> SamplerConfig {
    SamplerConfig { temperature: 1.0, top_k: 64, top_p: 0.95, seed: 1, ..SamplerConfig::default() }
}

fn read_report(path: &Path) -> Result<BenchReport> {
    let text = read_file(path)?;
    serde_json::from_str(&text).with_context(|| {
        Fault::model(format!("{} is not a result of gemma bench --json", path.display()))
    })
}

/// Names the formats of the first layer's matrices, as `gemma inspect` does.
fn formats(weights: &Weights) -> Result<String> {
    let mut found: Vec<(String, u64)> = Vec::new();
    for tensor in weights.matrices().filter(|tensor| tensor.layer == 0) {
        let matrix = weights.shape(tensor.role, tensor.layer)?;
        let name = format_name(weights, tensor.role, tensor.layer)?;
        let bytes = matrix.format.bytes(matrix.rows, matrix.cols) as u64;
        match found.iter_mut().find(|(n, _)| *n == name) {
            Some((_, sum)) => *sum += bytes,
            None => found.push((name, bytes)),
        }
    }
    let names: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
    Ok(format!(
        "{}, {:.2} bits per weight",
        names.join(" and "),
        Size::of(weights)?.bits_per_weight()
    ))
}
