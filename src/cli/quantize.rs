//! `gemma quantize`: a checkpoint of floats to a packed artifact.

use super::args::UiOptions;
use super::bench::report::markdown;
use super::devices::default_threads;
use super::model;
use super::output::print;
use super::signals::{Interrupt, ignore_file_size_signal};
use super::ui::{Ui, bytes, digits3, thousands};
use crate::checkpoint::Checkpoint;
use crate::error::Fault;
use crate::gemma::Weights;
use crate::quant::allocate::prior;
use crate::quant::recipe::{FOR_SIZES, parse_size};
use crate::quant::{self, Nearest, Options, Plan, Recipe, Report, unfinished};
use crate::tensor::Format;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Instant;

/// Memory bandwidth that predictions of speed assume, bytes/s: a laptop's two channels of DDR5-5600 as a GPU reads them.
const BANDWIDTH: f64 = 75e9;

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
    let mut solver = Nearest { threads: how.threads };
    let plan = Plan::new(&source, &recipe, &how, &solver, &|role, layer| prior(role, layer, n_layers))?;
    if options.dry_run {
        print(&describe(&plan))?;
        return Ok(0);
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
    let interrupt = Interrupt::watch()?;
    let result = quant::run(&source, &options.destination, &plan, &how, &mut solver, &mut |p| {
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
    if !ui.is_quiet() {
        ui.line(&summary(&report, &plan, options, start));
    }
    Ok(0)
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

fn summary(report: &Report, plan: &Plan, options: &Quantize, start: Instant) -> String {
    let kld = report.predicted_kld.map_or(String::new(), |kld| format!(", predicted KLD {}", figure(kld)));
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
