//! `gemma bench`: how fast, and how near to what the memory allows.

mod conditions;
pub mod loading;
pub mod measure;
pub mod page;
pub mod replay;
pub mod report;
pub mod speculation;
pub mod transcripts;

use super::destination::{Destination, Writer};
use super::options::{DraftArgs, FormatArgs, ModelArgs, UiOptions};
use super::output::print;
use super::ui::Ui;
use crate::cli::text_file::read_file;
use crate::compute::KernelTime;
use crate::draft::Mixing;
use crate::engine::{Engine, EngineExt, Scores};
use crate::error::Fault;
use crate::models::Weights;
use crate::runtime::options::AutoOr;
use crate::runtime::processor::Cpu;
use crate::runtime::shapes::Shape;
use crate::runtime::{Model, Room, Size, load, npu};
use crate::sampler::{Sampler, SamplerConfig};
use crate::util::units::{bytes, digits3};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum, ValueHint};
use measure::Figure;
use report::{Kernel, Machine, Report, Row};
use std::path::{Path, PathBuf};

/// Prefill, decode, the cost of a pass by its rows, plain against speculative text, and each
/// kernel's bandwidth.
#[derive(Debug, Args)]
pub struct Bench {
    /// Made-up weights in the shape of a Gemma 3
    #[arg(long, value_enum, value_name = "SHAPE", conflicts_with = "model")]
    pub synthetic: Option<Shape>,
    #[command(flatten)]
    pub formats: FormatArgs,
    /// What to measure, separated by commas or blanks
    #[arg(long, value_enum, value_name = "TESTS", value_delimiter = ',', num_args = 1.., default_value = "prefill,decode,verify,kernels,text")]
    pub only: Vec<Test>,
    /// Prompt tokens of the prefill test
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512)]
    pub pp: usize,
    /// Tokens of the decode test
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub tg: usize,
    /// Tokens already in the cache for decode and verify tests, separated by commas or blanks
    #[arg(long, value_name = "N", value_delimiter = ',', num_args = 1.., default_value = "0")]
    pub depth: Vec<usize>,
    /// Rows of the verify test, separated by commas or blanks
    #[arg(long, value_name = "M", value_delimiter = ',', num_args = 1.., default_value = "1,2,4,8,16,32")]
    pub rows: Vec<usize>,
    /// Rows of the passes that the kernels are timed in, separated by commas or blanks
    #[arg(long, value_name = "M", value_delimiter = ',', num_args = 1.., default_value = "1")]
    pub kernel_rows: Vec<usize>,
    /// Measurements of each test, after one that does not count
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5)]
    pub repetitions: usize,
    /// Prompts of the text test, as JSON lines (repeatable) [default: a few built in]
    ///
    /// Each line is an object with "prompt" or "turns", and with "category".
    #[arg(long, value_name = "FILE")]
    pub prompts: Vec<PathBuf>,
    /// Prompts taken from the files, evenly spread
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub prompt_count: usize,
    /// Generate at most this many tokens for each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub text_tokens: usize,
    /// Temperature of the text test
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temp: f32,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Compare with an older run's --json, in the tables and on the page of --report
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Also write the figures and plots of them to an HTML page that loads nothing
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "replay")]
    pub report: Option<Destination>,
    /// Measure nothing: show an older run's --json, as --json or --report says
    #[arg(long, value_name = "FILE", conflicts_with_all = ["replay", "model", "synthetic"])]
    pub from: Option<PathBuf>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// How the drafts' sources are mixed: for measuring what that brings
    #[arg(long, value_enum, default_value_t = HowMixed::Learned)]
    pub mixing: HowMixed,
    /// How draft candidates are ranked at a temperature above 0: for measuring what that brings
    #[arg(long, value_enum, default_value_t = Ranking::Noise)]
    pub ranking: Ranking,
    #[command(flatten)]
    pub replay: replay::ReplayOptions,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

impl Bench {
    /// Refuses numbers and tests that nothing can be measured with.
    fn check(&self) -> Result<()> {
        let rows = self.rows.iter().chain(&self.kernel_rows);
        if rows.chain([&self.repetitions, &self.pp, &self.tg]).any(|n| *n == 0) {
            let what = "--repetitions, --rows, --kernel-rows, --pp and --tg must be above 0";
            return Err(Fault::usage(what).into());
        }
        if self.synthetic.is_some() && self.only.contains(&Test::Load) {
            let what = "made-up weights are not loaded from files: --only load needs --model";
            return Err(Fault::usage(what).into());
        }
        Ok(())
    }

    /// Returns the positions of the context: as many as asked for, else as the tests need.
    fn context(&self, asked: AutoOr) -> Result<usize> {
        let deepest = self.depth.iter().max().copied().unwrap_or(0);
        let most_rows = self.rows.iter().chain(&self.kernel_rows).max().copied().unwrap_or(1);
        let needed = self.pp.max(deepest + self.tg.max(most_rows) + 1);
        match asked {
            AutoOr::N(n) if n < needed => {
                Err(Fault::usage(format!("these tests need --ctx-size {needed}")).into())
            }
            AutoOr::N(n) => Ok(n),
            AutoOr::Auto => Ok(needed),
        }
    }

    fn mixing(&self) -> Mixing {
        let (prior, rate) = match self.mixing {
            HowMixed::Learned => (true, crate::draft::mix::RATE),
            HowMixed::Taught => (true, 0.0),
            HowMixed::Fixed => (false, 0.0),
        };
        Mixing { prior, rate, noise: self.ranking == Ranking::Noise }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HowMixed {
    /// By weights that go on learning
    Learned,
    /// By the weights it begins with
    Taught,
    /// By one set of weights for all places
    Fixed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Ranking {
    /// With the noise that the target adds
    Noise,
    /// By probability alone
    Greedy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Test {
    /// Prompt tokens per second
    Prefill,
    /// Generated tokens per second, one by one
    Decode,
    /// Time of a pass over several rows
    Verify,
    /// Time and bandwidth of each kernel while decoding
    Kernels,
    /// Real prompts, plain and with drafts (needs a tokenizer)
    Text,
    /// Time of loading a model, against reading its files and sending it to the device
    Load,
}

pub fn run(options: &Bench, ui: &Ui) -> Result<u8> {
    let page = options.report.as_ref().map(Destination::open).transpose()?;
    if !options.replay.replay.is_empty() {
        let report = replay::run(options, ui)?;
        print(&match options.json {
            true => format!("{}\n", serde_json::to_string_pretty(&report)?),
            false => report.markdown(),
        })?;
        return Ok(0);
    }
    let old = options.compare.as_deref().map(read_report).transpose()?;
    if let Some(file) = &options.from {
        return show(&read_report(file)?, old.as_ref(), options, page);
    }
    options.check()?;
    let asked = options.model.settled()?;
    let model = match options.synthetic {
        Some(_) => None,
        None => Some(Model::open(asked.model.as_deref(), ui)?),
    };
    let made_up =
        options.synthetic.map(|shape| shape.weights(&options.formats.settled())).transpose()?;
    let weights =
        model.as_ref().map(|m| &m.weights).or(made_up.as_ref()).expect("one of both is there");
    let name = options
        .synthetic
        .map(|s| format!("synthetic {}", s.name()))
        .unwrap_or_else(|| model.as_ref().expect("no shape").name.clone());

    let load = conditions::load_average();
    let cpu = Cpu::probe()?;
    let cores = cpu.threads;
    let context = options.context(asked.run.context)?;
    let pool = load::pool(&asked.run)?;
    let mut loaded = load::load(weights, &name, &asked.run, Room::of(context), &pool, ui)?;
    let engine = loaded.engine.as_mut();
    let memory = engine.report().memory;
    let threads = asked.run.threads.unwrap_or(cpu.threads);
    let device_speed = engine.device().and_then(|e| e.read_bandwidth());
    let mut report = Report {
        v: 1,
        version: conditions::version(),
        date: httpdate::fmt_http_date(std::time::SystemTime::now()),
        command: conditions::command_line(),
        machine: Machine::new(cpu, engine.report().device, threads, device_speed),
        model: report::Model {
            name,
            formats: formats(weights)?,
            weights: memory.weights,
            kv: memory.kv,
            activations: memory.activations,
            context: Some(context),
            load_s: loaded.seconds,
        },
        ..Report::default()
    };
    if options.only.contains(&Test::Load) {
        report.results.push(loading::row(weights, engine, loaded.seconds)?);
    }
    let mut bench = Runner {
        engine,
        options,
        ui,
        scores: Scores::default(),
        sampler: Sampler::new(sampling())?,
    };
    bench.all(&mut report)?;
    npu::say(loaded.engine.as_ref(), ui);
    drop(loaded);
    if let Some(model) = model.filter(|_| options.only.contains(&Test::Text)) {
        let (rows, text) = speculation::run(model, &asked.run, options, ui)?;
        rows.iter().for_each(|row| ui.detail(1, format!("{}: {}", row.name, row.note)));
        report.results.extend(rows);
        report.text = Some(text);
    }
    report.doubts = conditions::doubts(&report, load, cores);
    show(&report, old.as_ref(), options, page)
}

/// Prints a run's figures, and draws them where that was asked for.
fn show(
    report: &Report,
    old: Option<&Report>,
    options: &Bench,
    page: Option<Writer>,
) -> Result<u8> {
    print(&match options.json {
        true => format!("{}\n", serde_json::to_string_pretty(report)?),
        false => report.markdown(old),
    })?;
    if let Some(mut file) = page {
        file.write(page::page(report, old)?.as_bytes())?;
        file.finish()?;
    }
    Ok(0)
}

/// Gemma's own defaults: what people run.
fn sampling() -> SamplerConfig {
    SamplerConfig { temperature: 1.0, top_k: 64, top_p: 0.95, seed: 1, ..SamplerConfig::default() }
}

fn read_report(path: &Path) -> Result<Report> {
    let text = read_file(path)?;
    serde_json::from_str(&text).with_context(|| {
        Fault::model(format!("{} is not a result of gemma bench --json", path.display()))
    })
}

/// The formats that occur, the largest share first.
fn formats(weights: &Weights) -> Result<String> {
    let mut found: Vec<(String, u64)> = Vec::new();
    for (role, layer) in
        weights.roles().into_iter().filter(|(role, layer)| role.is_matrix() && *layer == 0)
    {
        let matrix = weights.shape(role, layer)?;
        let (name, bytes) =
            (matrix.format.to_string(), matrix.format.bytes(matrix.rows, matrix.cols) as u64);
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

/// Measures on one engine.
struct Runner<'a> {
    engine: &'a mut dyn Engine,
    options: &'a Bench,
    ui: &'a Ui,
    scores: Scores,
    sampler: Sampler,
}

impl Runner<'_> {
    fn all(&mut self, report: &mut Report) -> Result<()> {
        let wants = |test: Test| self.options.only.contains(&test);
        let (prefill, decode, verify, kernels) =
            (wants(Test::Prefill), wants(Test::Decode), wants(Test::Verify), wants(Test::Kernels));
        if prefill {
            report.results.push(self.prefill()?);
        }
        for depth in &self.options.depth {
            if decode {
                let row = self.decode(*depth, &report.machine, report.model.weights)?;
                report.results.push(row);
            }
            if verify {
                let rows = self.verify(*depth)?;
                report.results.extend(rows);
            }
        }
        if kernels {
            for rows in &self.options.kernel_rows {
                let kernels = self.kernels(*rows)?;
                report.kernels.extend(kernels);
            }
        }
        Ok(())
    }

    /// Repeats a timing, the first one for warmth alone.
    fn repeat(
        &mut self,
        label: &str,
        mut once: impl FnMut(&mut Self) -> Result<f64>,
    ) -> Result<Figure> {
        let bar = self.ui.bar(label, self.options.repetitions as u64 + 1);
        let mut runs = Vec::new();
        for run in 0..=self.options.repetitions {
            let seconds = once(self)?;
            if run > 0 {
                runs.push(seconds);
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(Figure::of(runs))
    }

    /// A cache of `depth` tokens.
    fn fill(&mut self, depth: usize) -> Result<()> {
        if self.engine.truncate(0, depth).is_err() || self.engine.position(0) != depth {
            self.engine.truncate(0, 0)?;
            let tokens = measure::tokens(self.engine.info().vocab, depth);
            measure::prefill(self.engine, &tokens, &mut self.scores)?;
        }
        Ok(())
    }

    fn prefill(&mut self) -> Result<Row> {
        let n = self.options.pp;
        let tokens = measure::tokens(self.engine.info().vocab, n);
        let seconds = self.repeat(&format!("pp{n}"), |b| {
            b.engine.truncate(0, 0)?;
            measure::prefill(b.engine, &tokens, &mut b.scores)
        })?;
        Ok(Row {
            name: format!("pp{n}"),
            unit: "tok/s".into(),
            figure: seconds.map(|s| n as f64 / s),
            ..Row::default()
        })
    }

    fn decode(&mut self, depth: usize, machine: &Machine, weights: u64) -> Result<Row> {
        let n = self.options.tg;
        let seconds = self.repeat(&format!("tg{n}"), |b| {
            b.fill(depth)?;
            measure::decode(b.engine, &b.sampler, n, &mut b.scores)
        })?;
        let gb_per_s = weights as f64 * n as f64 / seconds.median / 1e9;
        let share = 100.0 * gb_per_s / machine.read_gb_per_s;
        // Weights that the processor's cache holds are read faster than memory gives them.
        let note = match share > 105.0 {
            true => format!("{} GB/s, from the cache", digits3(gb_per_s)),
            false => format!("{} GB/s, {share:.0} % of memory", digits3(gb_per_s)),
        };
        let figure = seconds.map(|s| n as f64 / s);
        Ok(Row {
            name: format!("tg{n}{}", at(depth)),
            unit: "tok/s".into(),
            figure,
            note,
            pass: None,
        })
    }

    /// All sizes in turn in each repetition, so that a drift of the machine meets them alike.
    fn verify(&mut self, depth: usize) -> Result<Vec<Row>> {
        self.fill(depth)?;
        let sizes: Vec<usize> = self
            .options
            .rows
            .iter()
            .copied()
            .filter(|m| *m <= self.engine.info().max_rows)
            .collect();
        // A pass of a new size may go out in pieces, and be recorded when it is made again: neither
        // is counted.
        for rows in &sizes {
            measure::verify(self.engine, &self.sampler, *rows, &mut self.scores)?;
        }
        let mut runs = vec![Vec::new(); sizes.len()];
        self.repeat("verify", |b| {
            for (runs, rows) in runs.iter_mut().zip(&sizes) {
                runs.push(measure::verify(b.engine, &b.sampler, *rows, &mut b.scores)?);
            }
            Ok(0.0)
        })?;
        let figures: Vec<Figure> = runs.into_iter().map(|r| Figure::of(r[1..].to_vec())).collect();
        let one = sizes.iter().position(|m| *m == 1).map(|i| figures[i].median);
        let row = |(rows, figure): (&usize, Figure)| Row {
            name: format!("verify {}{}", report::of_rows(*rows), at(depth)),
            unit: "ms".into(),
            note: one
                .map_or(String::new(), |one| format!("c({rows}) = {:.2}", figure.median / one)),
            figure: figure.map(|s| s * 1e3),
            pass: Some(report::PassSize { rows: *rows, depth }),
        };
        Ok(sizes.iter().zip(figures).map(row).collect())
    }

    /// As many passes as the decode test has tokens, each over so many rows.
    fn kernels(&mut self, rows: usize) -> Result<Vec<Kernel>> {
        let most = self.engine.info().max_rows;
        if rows > most {
            return Err(Fault::usage(format!(
                "--kernel-rows {rows}: a pass has at most {most} rows here"
            ))
            .into());
        }
        let passes = self.options.tg;
        self.fill(self.options.depth[0])?;
        self.engine.device().into_iter().for_each(|e| e.start_profile());
        if rows == 1 {
            measure::decode(self.engine, &self.sampler, passes, &mut self.scores)?;
        } else {
            for _ in 0..passes {
                measure::verify(self.engine, &self.sampler, rows, &mut self.scores)?;
            }
        }
        let kernel = |k: KernelTime| {
            let KernelTime { label, calls, seconds, bytes, macs } = k;
            Kernel { label: label.into(), rows, passes, calls, seconds, bytes, macs }
        };
        let times = self.engine.report().executor.map_or_else(Vec::new, |e| e.kernels);
        let mut kernels: Vec<Kernel> = times.into_iter().map(kernel).collect();
        kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let read = kernels.iter().map(|k| k.bytes).sum();
        self.ui.detail(
            1,
            format!("{} read in {passes} passes over {}", bytes(read), report::of_rows(rows)),
        );
        Ok(kernels)
    }
}

fn at(depth: usize) -> String {
    if depth == 0 { String::new() } else { format!(" @ d{depth}") }
}
