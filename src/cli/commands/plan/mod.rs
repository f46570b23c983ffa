//! `gemma plan`: how much memory a model needs, where it would run and how fast, without loading
//! it.
//!
//! The code that places a model when it is loaded makes the plan too.

mod remedy;
mod text;

use crate::cli::io::output::print;
use crate::cli::io::ui::{Ui, page_columns};
use crate::cli::options::FormatArgs;
use crate::cli::options::{ModelArgs, UiOptions, memory, shape};
use crate::cli::settings::Typed;
use crate::cli::sizes::Sizes;
use crate::compute::cpu::Isa;
use crate::error::{Fault, Kind};
use crate::kv::PAGE;
use crate::models::gemma3::bundled;
use crate::models::{Config, Weights};
use crate::quant::recipe::parse_size;
use crate::runtime::devices::npu;
use crate::runtime::model::find::find;
use crate::runtime::model::shapes::{MadeUpFormats, Shape};
use crate::runtime::model::viewer;
use crate::runtime::options::AutoOr;
use crate::runtime::placement::Placement;
use crate::runtime::placement::host::Host;
use crate::runtime::placement::measure::Task;
use crate::runtime::placement::predict::{Prediction, Speeds};
use crate::runtime::placement::process::ProcessMemory;
use crate::runtime::placement::prompt::{self, Reading};
use crate::runtime::{Model, RunOptions, SightOptions, Size, load};
use crate::util::shell::quoted;
use crate::vision::Vision;
use anyhow::Result;
use clap::Args;
use remedy::Misfit;
use std::path::Path;

const EXAMPLES: &str = "\
Examples:
  gemma plan
  gemma plan 27b
  gemma plan 12b --recipe int4 --ctx-size 32768
  gemma plan google/gemma-3-27b-it --memory 32GB --bandwidth 75
  gemma plan MODEL --json | jq .fits";

/// Show whether a model fits, how fast it would be, and where its memory goes; nothing is loaded
///
/// Without MODEL, the command lists the sizes of Gemma 3 and 4 that fit here. The model need not be
/// downloaded.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct PlanArgs {
    /// Model: a size (27b, 12b, 4b, 1b, 270m, gemma4-31b, gemma4-12b), an id such as
    /// google/gemma-3-27b-it, a directory or a GGUF file; bundled is the demo
    #[arg(value_name = "MODEL")]
    pub which: Option<String>,
    /// Plan made-up weights in the shape of a Gemma, as for gemma bench
    #[arg(
        long, value_parser = shape(), value_name = "SHAPE", conflicts_with_all = ["model", "which"],
        hide_short_help = true
    )]
    pub synthetic: Option<Shape>,
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Plan for a machine with this much memory, for example 32GB; a quarter (at most 8 GB) is
    /// assumed to be in use
    #[arg(long, value_name = "SIZE", value_parser = machine_memory)]
    pub memory: Option<u64>,
    /// Memory speed in GB/s (1e9 bytes a second), instead of measuring it; with a comma, the GPU's
    /// and the processor's
    #[arg(
        long, value_name = "GB/S", value_delimiter = ',', num_args = 1, value_parser = speed,
        conflicts_with = "measure"
    )]
    pub bandwidth: Vec<f64>,
    /// Measure on the GPU the speed of its memory (with a buffer of 0.3 GB) and of reading a prompt
    #[arg(long, conflicts_with = "memory", hide_short_help = true)]
    pub measure: bool,
    /// Tokens per pass with drafts, low and high, for the predicted range of tokens a second
    ///
    /// The default was measured with the bundled drafts for Gemma 3 and trees of 15 nodes on
    /// held-out prose and code. People wrote these texts, not a Gemma.
    #[arg(
        long, value_name = "LOW,HIGH", value_delimiter = ',', num_args = 1,
        default_values_t = DRAFTED, value_parser = tokens, hide_short_help = true
    )]
    pub tokens_per_pass: Vec<f64>,
    /// Number of texts at once, as for serve or generate --batch; each needs memory for its own
    /// context
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    pub parallel: u16,
    /// Additional memory for serve's prefix cache, for example 2GB
    #[arg(
        long, value_name = "SIZE", default_value = "0", value_parser = memory,
        hide_short_help = true
    )]
    pub cache_ram: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Tokens per pass on held-out prose and on held-out code: `scripts/bench/draft.sh`, 25 texts of
/// each.
const DRAFTED: [f64; 2] = [1.8, 3.9];
/// Limit of tokens per pass: those of a tree of 15 nodes, and one more.
const MOST_TOKENS: f64 = 16.0;
/// Context size if none was given.
const CONTEXT: usize = 4096;
/// Contexts that the report shows in addition to the given one.
const CONTEXTS: [usize; 4] = [2048, 8192, 32_768, 131_072];

fn speed(text: &str) -> Result<f64, String> {
    number(text, 1e-3..1e6)
}

/// Parses the memory of a machine. Sizes such as 32 lack a unit and are refused.
fn machine_memory(text: &str) -> Result<u64, String> {
    let size = parse_size(text).map_err(|e| e.to_string())?;
    if size < 100_000_000 {
        Err("expected the memory of a machine, such as 32GB".into())
    } else {
        Ok(size)
    }
}

fn tokens(text: &str) -> Result<f64, String> {
    number(text, 1.0..MOST_TOKENS)
}

fn number(text: &str, range: std::ops::Range<f64>) -> Result<f64, String> {
    let good = text.parse().ok().filter(|x| range.contains(x));
    good.ok_or_else(|| format!("expected a number from {} to {}", range.start, range.end))
}

impl PlanArgs {
    /// Returns the least and the most tokens per pass with drafts. Checks `--bandwidth` too.
    fn drafted(&self) -> Result<[f64; 2]> {
        if self.bandwidth.len() > 2 {
            let what = "--bandwidth takes one speed, or two: the GPU's and the processor's";
            return Err(Fault::usage(what).into());
        }
        match self.tokens_per_pass[..] {
            [one] => Ok([one, one]),
            [low, high] if low <= high => Ok([low, high]),
            _ => Err(Fault::usage("--tokens-per-pass needs the lower number first").into()),
        }
    }
}

/// The model that is planned.
struct Subject {
    weights: Weights,
    tower: Option<Vision>,
    name: String,
    /// The published model that this is, or has the shape of.
    shape: Option<Shape>,
    commands: Commands,
}

/// Commands that download or make a model and start a chat with it.
#[derive(Clone, Debug, Default)]
struct Commands {
    /// Downloads or makes the model; `None` if it is there already.
    get: Option<String>,
    /// Value of `--model` for the chat; `None` for made-up weights.
    model: Option<String>,
}

impl Commands {
    /// Returns the commands for a model in other formats, made from `source`.
    fn made(shape: Option<Shape>, formats: &MadeUpFormats, source: &str) -> Commands {
        let Some(recipe) = formats.recipe.as_deref() else { return Commands::default() };
        if let Some(shape) = shape.filter(|shape| shape.page(recipe).is_some()) {
            let name = shape.pulled_as(recipe);
            return Commands { get: Some(format!("gemma pull {name}")), model: Some(name) };
        }
        let page = shape.and_then(|shape| shape.page("bf16"));
        let source = page.unwrap_or_else(|| quoted(source));
        let stem = Path::new(recipe).file_stem().unwrap_or_default().to_string_lossy();
        let made = quoted(&made_name(shape, &stem));
        let get = format!("gemma quantize {source} {made} --recipe {}", quoted(recipe));
        Commands { get: Some(get), model: Some(made) }
    }

    /// Returns the lines to type, the chat last.
    fn lines(&self, context: AutoOr) -> Vec<String> {
        let Some(model) = &self.model else { return Vec::new() };
        let model = if model == "bundled" { String::new() } else { format!(" -m {model}") };
        let context = match context {
            AutoOr::N(n) => format!(" -c {n}"),
            AutoOr::Auto => String::new(),
        };
        self.get.iter().cloned().chain([format!("gemma chat{model}{context}")]).collect()
    }
}

/// Returns the name of a directory for a model that `gemma quantize` makes.
fn made_name(shape: Option<Shape>, kind: &str) -> String {
    let model = shape.map_or("gemma".to_owned(), |shape| shape.in_ollama().replace(':', "-"));
    format!("{model}-{kind}")
}

impl Subject {
    /// Returns the model that the options name, if they name one.
    fn of(options: &PlanArgs, ui: &Ui) -> Result<Option<Subject>> {
        let formats = &options.formats.settled();
        if let Some(shape) = options.synthetic {
            let (weights, name) = (shape.weights(formats)?, format!("synthetic {}", shape.name()));
            let commands = Commands::default();
            return Ok(Some(Subject { weights, tower: None, name, shape: Some(shape), commands }));
        }
        let named = options.which.as_deref().or(options.model.model.as_deref());
        // These options concern one model; like generate and serve, they default to the demo.
        let is_about_one = options.measure || options.parallel > 1 || options.cache_ram > 0;
        let demo = (is_about_one && !formats.is_asked()).then_some("bundled");
        let Some(name) = named.or(demo) else { return Ok(None) };
        // A model in a file takes precedence over a known size.
        let known = Shape::named(name).filter(|_| find(Some(name)).is_err());
        if let Some((shape, published)) = known {
            let as_published = MadeUpFormats::of_recipe(published);
            let commands = match formats.is_asked() {
                true => Commands::made(Some(shape), formats, name),
                false => Commands {
                    get: Some(format!("gemma pull {}", quoted(name))),
                    model: Some(quoted(name)),
                },
            };
            let formats = if formats.is_asked() { formats } else { &as_published };
            let name = format!("{}{}", shape.title(), described(formats));
            return Ok(Some(Subject {
                weights: shape.weights(formats)?,
                tower: None,
                name,
                shape: Some(shape),
                commands,
            }));
        }
        let asked = name;
        let (weights, tower, name) = match name {
            "bundled" => {
                (Weights::open(bundled::target()?)?, None, "bundled demo model".to_owned())
            }
            _ => {
                let model = Model::open(Some(name), ui)?;
                let tower = viewer::tower(Some(&model), &SightOptions::default()).ok();
                (model.weights, tower, model.name)
            }
        };
        let config = weights.config();
        let same = |shape: &Shape| {
            let published = Config::from_json(&shape.config());
            published.is_ok_and(|p| {
                let size = |c: &Config| (c.architecture.gguf(), c.dim, c.layers.len(), c.ffn_dim);
                size(&p) == size(config)
            })
        };
        let shape = Shape::ALL.into_iter().find(same);
        match formats.is_asked() {
            true => {
                let name = format!("{name}{}", described(formats));
                let commands = Commands::made(shape, formats, asked);
                let weights = formats.weights(config.clone())?;
                Ok(Some(Subject { weights, tower, name, shape, commands }))
            }
            false => {
                let commands = Commands { get: None, model: Some(quoted(asked)) };
                Ok(Some(Subject { weights, tower, name, shape, commands }))
            }
        }
    }
}

/// Describes the formats that a model would have.
fn described(formats: &MadeUpFormats) -> String {
    match formats.recipe.as_deref() {
        Some("bf16") => " in bf16, as Google publishes it".into(),
        Some("q4_0") => " as Google's 4-bit file (q4_0)".into(),
        Some(recipe) => format!(" as gemma quantize --recipe {recipe} makes it"),
        None => " in the formats given".into(),
    }
}

/// The plan of one model.
struct PlanReport<'a> {
    name: String,
    /// The tower that reads images.
    tower: Option<Vision>,
    task: Task<'a>,
    size: Size,
    placement: Placement,
    process_memory: ProcessMemory,
    /// Free memory of this machine, in bytes.
    available: Option<u64>,
    /// Total memory in bytes, if the plan is for another machine.
    elsewhere: Option<u64>,
    largest_context: Option<usize>,
    speeds: Speeds,
    predicted: Prediction,
    /// Instruction set of the processor's kernels.
    isa: Isa,
    /// Speed of reading a document; `None` if it would have to be timed on a GPU.
    reading: Option<Reading>,
    /// Tokens per pass with drafts, low and high.
    drafted: [f64; 2],
    /// Whether `drafted` is known for this model.
    has_drafts: bool,
    /// Other contexts.
    others: Vec<Other>,
    /// Reason why the model cannot be loaded.
    misfit: Option<String>,
    /// Reason why the requested NPU would not be used.
    no_npu: Option<String>,
    /// Commands to type next.
    commands: Vec<String>,
}

/// The same model with another context.
struct Other {
    context: usize,
    /// Where the model would run; `None` if the options leave no place.
    placement: Option<Placement>,
    fits: bool,
}

pub fn run(options: &PlanArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let drafted = options.drafted()?;
    let run = &options.model.run.settled()?;
    if options.parallel > 1 && run.npu.is_asked() {
        return Err(npu::for_one_text());
    }
    let host = match options.memory {
        None => Host::here(run),
        Some(memory) => Host::other(run, memory)?,
    };
    let Some(subject) = Subject::of(options, ui)? else {
        return survey(options, run, &host);
    };
    let Subject { weights, tower, name, shape, commands } = subject;
    let context = load::context(run.context, CONTEXT, weights.config(), ui);
    let sequences = options.parallel as usize;
    let kv = load::kv_format(&weights, run.kv)?;
    let (prefixes, npu) = (options.cache_ram, run.npu.is_asked());
    let task = Task { weights: &weights, context, kv, sequences, prefixes, npu };
    let placement = host.place(&task, ui)?;
    let available = host.available;
    let misfit = host.check(&placement).err().map(|e| format!("{e:#}"));
    let device = placement.device.as_ref();
    let mut speeds = memory_speeds(options, run)?.beside(device);
    if let Some(device) = device.filter(|_| options.measure) {
        speeds = speeds.measured(device, ui)?;
    }
    let reading = match misfit {
        None => prompt::reading(
            &task,
            &placement,
            &load::pool(run)?,
            run.isa,
            options.measure.then_some(ui as _),
        )?,
        Some(_) => None,
    };
    let contexts = contexts(context, weights.config().max_position);
    let other = |context| {
        let found = host.place(&Task { context, ..task }, ui).ok();
        let fits = found.as_ref().is_some_and(|p| host.check(p).is_ok());
        Other { context, placement: found, fits }
    };
    let predicted = speeds.predict(&placement);
    let pass = (predicted.ms_per_pass / 1e3) as f32;
    let report = PlanReport {
        name,
        tower,
        process_memory: ProcessMemory::of(&task, pass)?,
        size: Size::of(&weights)?,
        largest_context: largest_context(&task, &placement, &host)?,
        predicted,
        isa: run.isa.unwrap_or_else(Isa::detect),
        misfit,
        others: contexts.into_iter().map(other).collect(),
        no_npu: npu_refusal(&task, &placement),
        task,
        placement,
        available,
        elsewhere: host.elsewhere,
        speeds,
        reading,
        has_drafts: options.tokens_per_pass != DRAFTED
            || weights.config().architecture.gguf() != "gemma4",
        drafted,
        commands: commands.lines(run.context),
    };
    print(&if options.json {
        format!("{:#}\n", report.json())
    } else {
        report.text(options, page_columns())
    })?;
    let Some(what) = report.misfit else { return Ok(0) };
    let PlanReport { ref placement, largest_context, .. } = report;
    let sizes = Sizes::of(&host, run, speeds)?;
    let misfit = Misfit { task, placement, shape, commands: &commands, largest_context };
    let help = misfit.help(&host, run, &sizes)?;
    Err(Fault::new(Kind::Memory, what).help(help).into())
}

/// Returns the reason why the requested NPU is not used.
fn npu_refusal(task: &Task<'_>, placement: &Placement) -> Option<String> {
    let spread = "it works with one device, and here layers are spread over two";
    let is_spread = placement.layout.npu == 0;
    let why = npu::refusal(task.weights.config()).or_else(|| is_spread.then(|| spread.into()));
    why.filter(|_| task.npu)
}

/// Returns the contexts of the report: `context`, and the usual ones up to `most`.
fn contexts(context: usize, most: usize) -> Vec<usize> {
    let mut contexts: Vec<usize> = CONTEXTS.into_iter().filter(|c| *c <= most).collect();
    contexts.push(context);
    contexts.sort_unstable();
    contexts.dedup();
    contexts
}

/// Prints the sizes that fit, for a command line without a model.
fn survey(options: &PlanArgs, run: &RunOptions, host: &Host<'_>) -> Result<u8> {
    if options.formats.settled().is_asked() {
        let fault = Fault::usage("formats need a model, and none is named");
        return Err(fault.help("name one: gemma plan 27b, or gemma plan -m MODEL").into());
    }
    let sizes = Sizes::of(host, run, memory_speeds(options, run)?)?;
    print(&match options.json {
        true => {
            let mut json = sizes.json();
            json["v"] = 1.into();
            format!("{json:#}\n")
        }
        false => sizes.text(page_columns()),
    })?;
    Ok(0)
}

/// Returns the speeds of the memories: given, assumed for another machine, or measured.
fn memory_speeds(options: &PlanArgs, run: &RunOptions) -> Result<Speeds> {
    Ok(match (&options.bandwidth[..], options.memory) {
        ([], None) => Speeds::new(&*load::pool(run)?, None),
        ([], Some(_)) => Speeds::elsewhere(),
        (given, _) => Speeds::given(given),
    })
}

/// Returns the largest context that fits without moving layers; `None` if not even one page fits.
fn largest_context(
    task: &Task<'_>,
    placement: &Placement,
    host: &Host<'_>,
) -> Result<Option<usize>> {
    let most = task.weights.config().max_position;
    let device = placement.device.as_ref();
    let fits = |context: usize| -> Result<bool> {
        let layout = Task { context, ..*task }.measure(device, placement.layout.gpu.layers)?;
        let other = Placement { layout, device: device.cloned() };
        let on_gpu = device.is_none_or(|d| other.layout.gpu.need.total() <= d.free());
        Ok(on_gpu && host.check(&other).is_ok())
    };
    let (mut low, mut high) = (0, most.div_ceil(PAGE));
    while low < high {
        let middle = (low + high).div_ceil(2);
        match fits((middle * PAGE).min(most))? {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    Ok((low > 0).then_some((low * PAGE).min(most)))
}
