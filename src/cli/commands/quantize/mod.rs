//! `gemma quantize`: converts a checkpoint of floats to packed weights.

mod progress;
mod text;

use crate::checkpoint::Checkpoint;
use crate::cli::io::output::print;
use crate::cli::io::signals::Interrupt;
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::cli::options::UiOptions;
use crate::cli::settings::Typed;
use crate::error::Fault;
use crate::models::{Role, Special, Weights};
use crate::quant::prior;
use crate::quant::recipe::{FOR_SIZES, nearest_to, parse_size};
use crate::quant::{
    self, Aim, Calibrated, Importance, Nearest, QuantPlan, QuantizeOptions, Recipe, Solver,
    calibrate, estimate, unfinished,
};
use crate::runtime::devices::backends;
use crate::runtime::devices::processor::default_threads;
use crate::runtime::model::find;
use crate::runtime::model::shapes::Shape;
use crate::runtime::model::tokenizer_of;
use crate::runtime::options::Device;
use crate::tensor::encode::{CodingDevice, OnProcessor};
use crate::tensor::{Format, Token};
use crate::util::shell::quoted;
use crate::util::units::thousands;
use crate::vision::{self, Vision};
use anyhow::{Context, Result};
use clap::Args;
use progress::{CurrentStage, Meter};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;
use text::figure;

/// Tokens of a window of calibration text.
const WINDOW: usize = 1024;
/// Limits of the survey of sensitivities: tokens of a window, tokens in all, and bytes of the
/// residual streams that are kept for the backward pass.
const SURVEY_WINDOW: usize = 256;
const SURVEY_TOKENS: usize = 2048;
const SURVEY_BYTES: usize = 3 << 29;

const EXAMPLES: &str = "\
Examples:
  gemma quantize google/gemma-3-27b-it gemma-27b-int4 --dry-run
  gemma quantize google/gemma-3-27b-it gemma-27b-int4
  gemma quantize MODEL SMALLER --target-size 9.5GB --calibrate builtin --verify
The second is made in the working directory, and run with: gemma chat -m ./gemma-27b-int4";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct QuantizeArgs {
    /// Model directory, GGUF file or id, with bf16, f16 or f32 weights
    #[arg(value_name = "SRC", required_unless_present_any = ["list", "print_config"])]
    pub source: Option<String>,
    /// Directory to create, or a file that llama.cpp reads too if it ends in .gguf; it appears
    /// complete or not at all
    #[arg(value_name = "DST", required_unless_present_any = ["list", "print_config"])]
    pub destination: Option<PathBuf>,
    /// A third argument, which is refused. llama.cpp's program takes a type here.
    #[arg(value_name = "TYPE", hide = true)]
    pub kind: Option<String>,
    /// List the built-in recipes and the formats, with their sizes, and stop
    #[arg(long, conflicts_with_all = ["source", "destination"])]
    pub list: bool,
    /// Format of each tensor: seed, int4, 9gb, 10gb, 12gb, 26b-9gb (see --list) or a TOML file
    /// [default: int4]
    #[arg(long, value_name = "NAME|PATH", conflicts_with_all = ["linear", "embedding"])]
    pub recipe: Option<String>,
    /// Choose formats so that the whole directory has at most this size: 9.5GB, or 4.5bpw for bits
    /// per weight
    #[arg(
        long, value_name = "SIZE", value_parser = aim,
        conflicts_with_all = ["linear", "embedding"]
    )]
    pub target_size: Option<Aim>,
    /// Format of the linear layers, instead of a recipe, such as i4-g32 or i4-row+h128 [default:
    /// i4-g32]
    #[arg(long, value_name = "FORMAT", value_parser = format, hide_short_help = true)]
    pub linear: Option<Format>,
    /// Format of the embedding table and output head, instead of a recipe [default: i8-g32]
    #[arg(long, value_name = "FORMAT", value_parser = format, hide_short_help = true)]
    pub embedding: Option<Format>,
    /// Calibrate: round each matrix for its inputs on a text, which is a file, the built-in text,
    /// or none
    #[arg(long, value_name = "FILE|builtin|none", default_value = "none")]
    pub calibrate: String,
    /// Limit of tokens of the calibration text; more are better and slower
    #[arg(long, value_name = "N", default_value_t = 32_768, hide_short_help = true)]
    pub calibrate_tokens: usize,
    /// Print the exact size of the result and the estimated time, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Read everything back and compare all decoders before DST appears
    #[arg(long)]
    pub verify: bool,
    /// Limit of memory, for example 4GB
    #[arg(long, value_name = "SIZE", value_parser = size, hide_short_help = true)]
    pub mem_limit: Option<u64>,
    /// Discard the files of an unfinished run of DST instead of resuming it
    #[arg(long, hide_short_help = true)]
    pub restart: bool,
    /// Allow weights that are already quantised
    #[arg(long, hide_short_help = true)]
    pub allow_requantize: bool,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Device that encodes trellis codes (t2 to t4): cpu, vulkan or vulkan:N; the result is the
    /// same
    #[arg(short, long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    #[command(flatten)]
    pub ui: UiOptions,
}

impl QuantizeArgs {
    fn how(&self) -> QuantizeOptions {
        QuantizeOptions {
            threads: self.threads.map_or_else(default_threads, usize::from),
            memory: self.mem_limit,
            restart: self.restart,
            requantize: self.allow_requantize,
            gguf: self.destination().extension().is_some_and(|e| e == "gguf"),
            verify: self.verify,
            ..QuantizeOptions::default()
        }
    }

    /// Returns DST. clap has checked that it is given.
    fn destination(&self) -> &Path {
        self.destination.as_deref().unwrap_or(Path::new(""))
    }
}

fn format(text: &str) -> Result<Format, String> {
    Format::parse_written(text).map_err(|e| e.to_string())
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|e| e.to_string())
}

fn aim(text: &str) -> Result<Aim, String> {
    text.parse().map_err(|e: anyhow::Error| e.to_string())
}

pub fn run(options: &QuantizeArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    if options.list {
        print(&text::list()?)?;
        return Ok(0);
    }
    if let Some(kind) = &options.kind {
        return Err(third_argument(kind).into());
    }
    let recipe = recipe(options)?;
    let source = open_source(options, ui)?;
    let how = options.how();
    let n_layers = source.config().layers.len();
    let prior = |role, layer| prior(role, layer, n_layers);
    let stage = CurrentStage::default();
    let (interrupt, announced) = stage.watch(&options.ui, options.calibrate != "none")?;
    let device = coding_device(&options.device, ui)?;
    let mut calibrated = calibration(options, &source, how.threads, device.clone(), ui)?;
    let mut nearest = Nearest { threads: how.threads, device: device.clone() };
    let measured = match &calibrated {
        Some((_, run)) if recipe.target().is_some() && !options.dry_run => {
            match survey(&source, &device, run, &interrupt, &stage, how.threads, ui) {
                Err(_) if interrupt.exit_code().is_some() => {
                    let what = "while sensitivities were measured: nothing is written yet";
                    return Ok(stopped(announced, &interrupt, what, ui));
                }
                found => Some(found?),
            }
        }
        _ => None,
    };
    let plan = {
        let solver: &dyn Solver = calibrated.as_ref().map_or(&nearest, |(solver, _)| solver);
        let known = |role, layer| {
            measured.as_ref().and_then(|m| m.get(&(role, layer))).copied().unwrap_or(0.0)
        };
        let importance = match measured {
            Some(_) => Importance::Measured(&known),
            None => Importance::Relative(&prior),
        };
        QuantPlan::new(&source, &recipe, &how, solver, importance)?
    };
    if let Some(checkpoint) = source.checkpoint() {
        quant::check_source(checkpoint, &plan, &how)?;
    }
    let job = ConversionJob { options, source: &source, plan: &plan, how: &how, ui };
    if options.dry_run {
        let importance = Importance::Relative(&prior);
        return job.print_plan(&mut nearest, calibrated.is_some(), importance);
    }
    if let Some((solver, _)) = &mut calibrated {
        solver.begin(&plan.layout)?;
    }
    let start = Instant::now();
    let solver: &mut dyn Solver =
        calibrated.as_mut().map_or(&mut nearest, |(solver, _)| solver as _);
    let result = job.convert(solver, &stage, &interrupt);
    if let (Err(_), Some(code)) = (&result, interrupt.exit_code()) {
        // Waits for the message about the signal, so that it comes before other messages.
        let _ = announced.join();
        job.note_unfinished(true, true);
        return Ok(code);
    }
    job.note_unfinished(result.is_err(), false);
    let report = result?;
    let solver = calibrated.as_mut().map(|(solver, _)| solver);
    stage.begin("");
    let measured = match solver.map(|solver| job.judge(solver, &interrupt)).transpose() {
        Err(_) if interrupt.exit_code().is_some() => {
            let path = options.destination().display();
            let what = format!("before the divergence of {path} was measured; the file is whole");
            return Ok(stopped(announced, &interrupt, &what, ui));
        }
        measured => measured?.flatten(),
    };
    if !ui.is_quiet() {
        ui.line(&text::summary(&report, &plan, options, start, measured));
    }
    Ok(0)
}

/// Prints what a signal interrupted, after the message about the signal. Returns the exit code.
fn stopped(announced: JoinHandle<()>, interrupt: &Interrupt, what: &str, ui: &Ui) -> u8 {
    let _ = announced.join();
    ui.note(format!("interrupted {what}"));
    interrupt.exit_code().unwrap_or(1)
}

fn open_source(options: &QuantizeArgs, ui: &Ui) -> Result<Weights> {
    let source = options.source.as_deref();
    // A size names Google's 4-bit file, which is quantised already.
    let sized = source.filter(|name| !Path::new(name).exists()).and_then(Shape::sized);
    let page = sized.and_then(|shape| shape.page("bf16"));
    let find::ModelSource::Directory(path) = find::find(page.as_deref().or(source))? else {
        return Err(Fault::usage("gemma quantize needs a source model").into());
    };
    let checkpoint = Checkpoint::open(&path)
        .with_context(|| format!("cannot open the model {}", path.display()))?;
    let source = Weights::open(checkpoint)?;
    source.notes().iter().for_each(|note| ui.note(note));
    let tower = vision::beside(&path).ok().flatten().unwrap_or(path);
    if Vision::open(&tower).is_ok() {
        ui.note(format!(
            "the result reads text only: for images, add --mmproj {}",
            quoted(&tower.display().to_string())
        ));
    }
    Ok(source)
}

/// Explains a third argument: llama.cpp's program takes a type there.
fn third_argument(kind: &str) -> Fault {
    let help = match nearest_to(kind) {
        Some(nearest) => {
            format!("{kind} is llama.cpp's name; the nearest here is {nearest}")
        }
        None => format!("a recipe is an option: --recipe {kind} (gemma quantize --list)"),
    };
    Fault::usage(format!("gemma quantize takes SRC and DST, and {kind} is one too many")).help(help)
}

/// A planned conversion.
struct ConversionJob<'a> {
    options: &'a QuantizeArgs,
    source: &'a Weights,
    plan: &'a QuantPlan,
    how: &'a QuantizeOptions,
    ui: &'a Ui,
}

impl ConversionJob<'_> {
    /// Prints the plan, with the error that recipe int4 would have for comparison.
    fn print_plan(
        &self,
        nearest: &mut Nearest,
        is_calibrated: bool,
        importance: Importance<'_>,
    ) -> Result<u8> {
        let how = QuantizeOptions { memory: None, ..*self.how };
        let int4 = Recipe::load("int4")?;
        let int4 = QuantPlan::new(self.source, &int4, &how, nearest, importance);
        let int4 = int4.ok().map(|plan| plan.error);
        let seconds = estimate::seconds(self.plan, nearest)?;
        print(&text::describe(self.plan, seconds, how.threads, is_calibrated, int4))?;
        Ok(0)
    }

    /// Writes DST. Continues where an earlier run stopped. An interruption is returned as an error.
    fn convert(
        &self,
        solver: &mut dyn Solver,
        stage: &CurrentStage,
        interrupt: &Interrupt,
    ) -> Result<quant::QuantReport> {
        let (plan, destination) = (self.plan, self.options.destination());
        let left = unfinished(destination).filter(|_| !self.how.restart);
        if let Some(left) = &left {
            let (path, all) = (left.path.display(), plan.layout.entries.len());
            self.ui.note(format!("continuing {path}: {} of {all} tensors are done", left.done));
        }
        let resumed = left.map_or(0, |left| left.done);
        let n_layers = self.source.config().layers.len();
        let mut meter = Meter::new(self.ui, stage, n_layers, plan.layout.parameters(), resumed);
        let result = quant::run(self.source, destination, plan, self.how, solver, &mut |p| {
            meter.hear(&p);
            // An error stops the quantiser and keeps finished tensors.
            anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
            Ok(())
        });
        meter.finish();
        result
    }

    /// Prints what is left of a conversion that failed or was interrupted.
    fn note_unfinished(&self, has_failed: bool, is_interrupted: bool) {
        match unfinished(self.options.destination()) {
            Some(left) if has_failed => {
                let (all, path) = (self.plan.layout.entries.len(), left.path.display());
                self.ui.note(format!(
                    "{} of {all} tensors and the rows done since are kept in {path}: \
                     the same command continues from there",
                    left.done
                ));
            }
            None if has_failed && is_interrupted => {
                self.ui.note("interrupted before the first rows were done: no work is kept");
            }
            _ => {}
        }
    }

    /// Reports the solver's output errors, and measures the divergence of an artifact.
    fn judge(&self, solver: &mut Calibrated<'_>, interrupt: &Interrupt) -> Result<Option<f64>> {
        solver.notes().iter().for_each(|note| self.ui.note(note));
        for (role, layer, loss) in solver.losses() {
            let (name, error) = (role.short_name(*layer), figure(loss.sqrt()));
            self.ui.detail(1, format!("{name}: output error {error}"));
        }
        if self.how.gguf {
            return Ok(None);
        }
        let made = Weights::open(Checkpoint::open(self.options.destination())?)?;
        let heard = || {
            anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
            Ok(())
        };
        Ok(Some(solver.divergence(&made, &mut { heard })?))
    }
}

/// Returns the calibration solver and the text's tokens, if calibration is requested.
fn calibration<'a>(
    options: &QuantizeArgs,
    source: &'a Weights,
    threads: usize,
    device: Arc<dyn CodingDevice>,
    ui: &Ui,
) -> Result<Option<(Calibrated<'a>, Vec<Token>)>> {
    let text = match options.calibrate.as_str() {
        "none" => return Ok(None),
        "builtin" => calibrate::BUILT_IN.to_owned(),
        path => read_file(Path::new(path))?,
    };
    let checkpoint = source.checkpoint().context("made-up weights have no tokenizer")?;
    let tokenizer = tokenizer_of(checkpoint)?;
    tokenizer.notes().iter().for_each(|note| ui.detail(1, note));
    let run = tokenizer.encode(&text, Special::Parse)?;
    if run.len() < 2 {
        return Err(Fault::usage("the calibration text is empty")
            .help("give some pages of what the model will be used for")
            .into());
    }
    let window = WINDOW.min(source.config().max_position);
    let text = calibrate::CalibrationText::cut(
        &run,
        source.config().bos,
        window,
        (options.calibrate_tokens / window).max(1),
    )?;
    ui.detail(
        1,
        format!(
            "calibrating on {} of {} tokens",
            thousands(text.tokens.len() as u64),
            thousands(run.len() as u64)
        ),
    );
    Ok(Some((Calibrated::new(source, text, threads, device)?, run)))
}

/// Measures the sensitivity of each matrix on a part of the text.
fn survey(
    source: &Weights,
    device: &Arc<dyn CodingDevice>,
    run: &[Token],
    interrupt: &Interrupt,
    stage: &CurrentStage,
    threads: usize,
    ui: &Ui,
) -> Result<HashMap<(Role, usize), f64>> {
    let config = source.config();
    let tokens = (SURVEY_BYTES / (4 * config.dim * config.layers.len().max(1)))
        .clamp(SURVEY_WINDOW, SURVEY_TOKENS);
    let text =
        calibrate::CalibrationText::cut(run, config.bos, SURVEY_WINDOW, tokens / SURVEY_WINDOW)?;
    let bar = ui.bar("measuring sensitivities", 1000);
    stage.show(&bar);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let heard = |share: f64| {
        bar.set_position((1000.0 * share) as u64);
        anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
        Ok(())
    };
    let found = pool.install(|| calibrate::survey(source, device, &text, 1, &mut { heard }))?;
    bar.finish_and_clear();
    for s in &found {
        ui.detail(
            2,
            format!(
                "{}: {} nats per unit of relative error",
                s.role.short_name(s.layer),
                figure(s.divergence)
            ),
        );
    }
    Ok(found.into_iter().map(|s| ((s.role, s.layer), s.divergence)).collect())
}

/// Opens the named device, which computes trellis codes and large products.
fn coding_device(device: &str, ui: &Ui) -> Result<Arc<dyn CodingDevice>> {
    match device.parse::<Device>()? {
        Device::Cpu => Ok(Arc::new(OnProcessor)),
        Device::Vulkan(choice) => backends::coding_device(choice, ui),
        Device::Auto => Err(Fault::usage("gemma quantize needs a device by name, not auto")
            .help("one of cpu, vulkan, vulkan:0, vulkan:1, ...")
            .into()),
    }
}

fn recipe(options: &QuantizeArgs) -> Result<Recipe> {
    if options.linear.is_some() || options.embedding.is_some() {
        let (linear, embedding) =
            (options.linear.unwrap_or(Format::I4_G32), options.embedding.unwrap_or(Format::I8_G32));
        return Ok(Recipe::inline(linear, embedding));
    }
    let name = options.recipe.as_deref().unwrap_or(if options.target_size.is_some() {
        FOR_SIZES
    } else {
        "int4"
    });
    match options.target_size {
        Some(size) => Recipe::load(name)?.with_target(size),
        None => Recipe::load(name),
    }
}
