//! `gemma quantize`: a checkpoint of floats to a packed artifact.

use super::args::UiOptions;
use super::bench::report::markdown;
use super::devices::default_threads;
use super::input::read_file;
use super::model;
use super::output::print;
use super::session;
use super::signals::{Interrupt, ignore_file_size_signal};
use super::ui::{Ui, bytes, digits3, thousands};
use crate::checkpoint::Checkpoint;
use crate::error::Fault;
use crate::gemma::{Role, Special, Weights};
use crate::quant::allocate::prior;
use crate::quant::recipe::{FOR_SIZES, parse_size};
use crate::quant::{self, Calibrated, Importance, Nearest, Options, Plan, Recipe, Report, Solver, calibrate, unfinished};
use crate::tensor::{Format, Token};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Memory bandwidth that predictions of speed assume, bytes/s: a laptop's two channels of DDR5-5600 as a GPU reads them.
const BANDWIDTH: f64 = 75e9;

/// Tokens of a window of calibration text.
const WINDOW: usize = 1024;
/// Windows of the survey of sensitivities, most tokens of it, and most bytes of the copies that it carries.
const SURVEY_WINDOW: usize = 256;
const SURVEY_TOKENS: usize = 2048;
const SURVEY_BYTES: usize = 3 << 29;

#[derive(Debug, Args)]
pub struct Quantize {
    /// Model directory, GGUF file or id, with bf16, f16 or f32 weights
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Directory or GGUF file to make; it appears complete or not at all
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Which format each tensor gets: seed, int4, 9gb, 10gb, 12gb or a TOML file [default: int4]
    #[arg(long, value_name = "NAME|PATH", conflicts_with_all = ["linear", "embedding"])]
    pub recipe: Option<String>,
    /// Choose formats so that the whole directory takes at most this, e.g. 9.5GB
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["linear", "embedding"])]
    pub target_size: Option<u64>,
    /// Instead of a recipe: format of the linear layers, such as i4-g32 or i4-row+h128 [default: i4-g32]
    #[arg(long, value_name = "FORMAT", alias = "format-weights", value_parser = format)]
    pub linear: Option<Format>,
    /// Instead of a recipe: format of the embedding table and the output head [default: i8-row]
    #[arg(long, value_name = "FORMAT", alias = "format-embedding", value_parser = format)]
    pub embedding: Option<Format>,
    /// Make a directory for this program, or one file that llama.cpp reads too [default: gguf where DST ends so]
    #[arg(long, value_enum, value_name = "KIND")]
    pub format: Option<Container>,
    /// Read this text and solve each matrix for the inputs it will meet: a file, the built-in text, or none
    #[arg(long, value_name = "FILE|builtin|none", default_value = "none")]
    pub calibrate: String,
    /// Tokens of that text to use, at most; more is better and slower
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    pub calibrate_tokens: usize,
    /// Print what would be written, to the byte, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Read everything back and compare all decoders before DST appears
    #[arg(long)]
    pub verify: bool,
    /// Stay below this much memory, e.g. 4GB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub mem_limit: Option<u64>,
    /// Throw away what an unfinished run of DST left, rather than go on from there
    #[arg(long)]
    pub restart: bool,
    /// Quantise weights that are quantised already
    #[arg(long)]
    pub allow_requantize: bool,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// What is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Container {
    Artifact,
    Gguf,
}

fn format(text: &str) -> Result<Format, String> {
    text.parse().map_err(|e: anyhow::Error| e.to_string())
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|e| e.to_string())
}

pub fn run(options: &Quantize, ui: &Ui) -> Result<u8> {
    let model::Source::Directory(path) = model::find(Some(&options.source))? else {
        return Err(Fault::usage("quantize needs a source directory").into());
    };
    let recipe = recipe(options)?;
    let source = Weights::open(Checkpoint::open(&path).with_context(|| format!("cannot open the model {}", path.display()))?)?;
    source.notes().iter().for_each(|note| ui.note(note));
    let how = Options {
        threads: options.threads.map_or_else(default_threads, usize::from),
        memory: options.mem_limit,
        restart: options.restart,
        requantize: options.allow_requantize,
        gguf: match options.format {
            Some(format) => format == Container::Gguf,
            None => options.destination.extension().is_some_and(|e| e == "gguf"),
        },
        verify: options.verify,
        ..Options::default()
    };
    let n_layers = source.config().n_layers;
    let prior = |role, layer| prior(role, layer, n_layers);
    let interrupt = Interrupt::watch()?;
    let mut calibrated = calibration(options, &source, how.threads, ui)?;
    let mut nearest = Nearest { threads: how.threads };
    let measured = match &calibrated {
        Some((_, run)) if recipe.target().is_some() && !options.dry_run => {
            match survey(&source, run, &interrupt, how.threads, ui) {
                Err(_) if interrupt.exit_code().is_some() => return Ok(interrupt.exit_code().unwrap_or(1)),
                found => Some(found?),
            }
        }
        _ => None,
    };
    let plan = {
        let solver: &dyn Solver = calibrated.as_ref().map_or(&nearest, |(solver, _)| solver);
        let known = |role, layer| measured.as_ref().and_then(|m| m.get(&(role, layer))).copied().unwrap_or(0.0);
        let importance = match measured {
            Some(_) => Importance::Measured(&known),
            None => Importance::Relative(&prior),
        };
        Plan::new(&source, &recipe, &how, solver, importance)?
    };
    if options.dry_run {
        print(&describe(&plan))?;
        return Ok(0);
    }
    if let Some((solver, _)) = &mut calibrated {
        solver.begin(&plan.layout)?;
    }
    let left = unfinished(&options.destination).filter(|_| !how.restart);
    let mut resumed = left.as_ref().map_or(0, |left| left.done);
    if let Some(left) = left {
        ui.note(format!(
            "going on from {}: {} of {} tensors are done",
            left.path.display(),
            left.done,
            plan.layout.entries.len()
        ));
    }
    ignore_file_size_signal();
    let start = Instant::now();
    let bar = ui.bar("quantising", plan.layout.parameters());
    let solver: &mut dyn Solver = match &mut calibrated {
        Some((solver, _)) => solver,
        None => &mut nearest,
    };
    let result = quant::run(&source, &options.destination, &plan, &how, solver, &mut |p| {
        bar.set_position(p.done);
        bar.set_message(p.tensor.to_owned());
        // What was only looked through says nothing about the time that the rest takes.
        if resumed > 0 {
            resumed -= 1;
            bar.reset_eta();
        }
        // An error makes the quantiser stop; finished tensors stay.
        anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
        Ok(())
    });
    bar.finish_and_clear();
    if let (Err(_), Some(left)) = (&result, unfinished(&options.destination)) {
        let (done, all) = (left.done, plan.layout.entries.len());
        ui.note(format!("{done} of {all} tensors are kept in {}: the same command goes on from there", left.path.display()));
    }
    if let (Err(_), Some(code)) = (&result, interrupt.exit_code()) {
        return Ok(code);
    }
    let report = result?;
    let mut measured = None;
    if let Some((solver, _)) = &mut calibrated {
        solver.notes().iter().for_each(|note| ui.note(note));
        for (role, layer, loss) in solver.losses() {
            ui.detail(1, format!("layer {layer} {role:?}: output error {}", figure(loss.sqrt())));
        }
        if !how.gguf {
            measured = Some(solver.divergence(&Weights::open(Checkpoint::open(&options.destination)?)?)?);
        }
    }
    if !ui.is_quiet() {
        ui.line(&summary(&report, &plan, options, start, measured));
    }
    Ok(0)
}

/// The solver that reads text, if one is asked for, and the text as one run of tokens.
fn calibration<'a>(
    options: &Quantize,
    source: &'a Weights,
    threads: usize,
    ui: &Ui,
) -> Result<Option<(Calibrated<'a>, Vec<Token>)>> {
    let text = match options.calibrate.as_str() {
        "none" => return Ok(None),
        "builtin" => calibrate::BUILT_IN.to_owned(),
        path => read_file(Path::new(path))?,
    };
    let checkpoint = source.checkpoint().context("made-up weights have no tokenizer")?;
    let tokenizer = session::tokenizer_of(checkpoint)?;
    tokenizer.notes().iter().for_each(|note| ui.note(note));
    let run = tokenizer.encode(&text, Special::Parse)?;
    if run.len() < 2 {
        return Err(Fault::usage("the calibration text is empty")
            .help("give some pages of what the model will be used for")
            .into());
    }
    let window = WINDOW.min(source.config().max_position);
    let text = calibrate::Text::cut(&run, source.config().bos, window, (options.calibrate_tokens / window).max(1))?;
    ui.detail(1, format!("calibrating on {} of {} tokens", thousands(text.tokens.len() as u64), thousands(run.len() as u64)));
    Ok(Some((Calibrated::new(source, text, threads)?, run)))
}

/// How much each matrix matters, measured on a little of the text.
fn survey(
    source: &Weights,
    run: &[Token],
    interrupt: &Interrupt,
    threads: usize,
    ui: &Ui,
) -> Result<HashMap<(Role, usize), f64>> {
    let config = source.config();
    let copies = source.roles().iter().filter(|r| r.0.is_matrix()).count() + 1;
    let tokens = (SURVEY_BYTES / (4 * config.dim * copies)).clamp(SURVEY_WINDOW, SURVEY_TOKENS);
    let text = calibrate::Text::cut(run, config.bos, SURVEY_WINDOW, tokens / SURVEY_WINDOW)?;
    let bar = ui.bar("measuring sensitivities", 1000);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let heard = |share: f64| {
        bar.set_position((1000.0 * share) as u64);
        anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
        Ok(())
    };
    let found = pool.install(|| calibrate::survey(source, &text, 1, &mut { heard }))?;
    bar.finish_and_clear();
    for s in &found {
        ui.detail(2, format!("layer {} {:?}: {} nats per unit of relative error", s.layer, s.role, figure(s.divergence)));
    }
    Ok(found.into_iter().map(|s| ((s.role, s.layer), s.divergence)).collect())
}

fn recipe(options: &Quantize) -> Result<Recipe> {
    if options.linear.is_some() || options.embedding.is_some() {
        let (linear, embedding) = (options.linear.unwrap_or(Format::I4_G32), options.embedding.unwrap_or(Format::I8_ROW));
        return Ok(Recipe::inline(linear, embedding));
    }
    let name = options.recipe.as_deref().unwrap_or(if options.target_size.is_some() { FOR_SIZES } else { "int4" });
    match options.target_size {
        Some(size) => Recipe::load(name)?.with_target(size),
        None => Recipe::load(name),
    }
}

fn summary(report: &Report, plan: &Plan, options: &Quantize, start: Instant, measured: Option<f64>) -> String {
    let kld = report.predicted_kld.map_or(String::new(), |kld| format!(", predicted KLD {}", figure(kld)));
    let kld = kld + &measured.map_or(String::new(), |m| format!(", measured {} on the calibration text", figure(m)));
    format!(
        "{} parameters at {:.2} bits: {} in {}, {:.1} minutes{kld}",
        thousands(report.parameters),
        report.bits_per_weight,
        bytes(plan.total_bytes),
        options.destination.display(),
        start.elapsed().as_secs_f64() / 60.0
    )
}

/// Three digits however small.
fn figure(x: f64) -> String {
    if x >= 0.01 || x == 0.0 { format!("{x:.3}") } else { format!("{x:.2e}") }
}

/// Bytes by class of tensor, and what the artifact needs and promises.
fn describe(plan: &Plan) -> String {
    let row = |cells: [String; 6]| cells.to_vec();
    let mut table = vec![row(["tensors", "format", "count", "codes", "scales", "bytes"].map(str::to_owned))];
    let (mut codes, mut scales) = (0, 0);
    for class in plan.layout.classes() {
        let name = class.role.map_or("Norms".to_owned(), |r| format!("{r:?}"));
        let cells = [class.codes, class.scales, class.codes + class.scales].map(thousands);
        let [c, s, sum] = cells;
        table.push(row([name, class.target.to_string(), class.tensors.to_string(), c, s, sum]));
        (codes, scales) = (codes + class.codes, scales + class.scales);
    }
    let count = plan.layout.entries.len().to_string();
    let bits = format!("{:.3} bits", 8.0 * plan.layout.bytes() as f64 / plan.layout.parameters() as f64);
    table.push(row(["all".to_owned(), bits, count, thousands(codes), thousands(scales), thousands(codes + scales)]));
    let mut out = markdown(&table) + "\n";
    let mut line = |label: &str, value: String| out += &format!("{label:<14}{value}\n");
    let aim = plan.target.map_or(String::new(), |target| format!(", for at most {} bytes", thousands(target)));
    line("recipe", plan.recipe.clone() + &aim);
    line("codes", format!("{:.2} GB; with scales {:.2} GB", codes as f64 / 1e9, (codes + scales) as f64 / 1e9));
    line(
        "directory",
        format!("{} bytes ({}), headers and side files included", thousands(plan.total_bytes), bytes(plan.total_bytes)),
    );
    line("disk", format!("{} while it is made", bytes(plan.total_bytes)));
    line("memory", bytes(plan.memory));
    if let Some(kld) = plan.predicted_kld {
        line("predicted KLD", format!("{}, by the planning rule 6.5 x distortion", figure(kld)));
    }
    line("speed", format!("{} passes/s at 75 GB/s", digits3(BANDWIDTH / plan.pass_bytes() as f64)));
    out
}
