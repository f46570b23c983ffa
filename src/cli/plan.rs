//! `gemma plan`: what a model would take and where it would run, without loading it. The same code decides when it is loaded.

mod text;

use super::args::{ModelOptions, UiOptions};
use super::bench::shapes::{Formats, Shape};
use super::devices::memory;
use super::npu;
use super::output::print;
use super::placement::measure::Task;
use super::placement::predict::{Prediction, Speeds};
use super::placement::{self, Placement};
use super::session::{self, Size};
use super::ui::Ui;
use crate::error::Fault;
use crate::kv::PAGE;
use anyhow::Result;
use clap::Args;

/// Memory by part, the split between GPU and processor, the largest context, and the speed that memory allows; nothing is loaded.
#[derive(Debug, Args)]
pub struct Plan {
    /// Made-up weights in the shape of a Gemma 3
    #[arg(long, value_enum, value_name = "SHAPE", conflicts_with = "model")]
    pub synthetic: Option<Shape>,
    #[command(flatten)]
    pub formats: Formats,
    /// Measure how fast the GPU reads its memory, in 0.3 GB of it, instead of assuming it
    #[arg(long)]
    pub measure: bool,
    /// Speed of the memory that the weights lie in, 1e9 bytes a second, instead of measuring it; with a comma the GPU's and the
    /// processor's
    #[arg(long, value_name = "GB/S", value_delimiter = ',', num_args = 1..=2, value_parser = speed, conflicts_with = "measure")]
    pub bandwidth: Vec<f64>,
    /// Tokens that a pass brings with drafts, at least and at most, for the range of tokens a second
    ///
    /// The default is what the bundled drafts for Gemma 3 brought on held-out prose and code (gemma bench --replay, trees of 15 nodes),
    /// guessing text of people, not of a Gemma.
    #[arg(long, value_name = "LOW,HIGH", value_delimiter = ',', num_args = 1..=2, default_values_t = DRAFTED, value_parser = tokens)]
    pub tokens_per_pass: Vec<f64>,
    /// Texts that generate --batch --parallel N answers at once: each takes memory for a context of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Tokens per pass on held-out prose and on held-out code: `scripts/bench-draft.sh`, 25 texts of each.
const DRAFTED: [f64; 2] = [1.8, 3.9];
/// Context where none was asked for.
const CONTEXT: usize = 4096;
/// Contexts shown beside the one that was asked for.
const CONTEXTS: [usize; 4] = [2048, 8192, 32_768, 131_072];

fn speed(text: &str) -> Result<f64, String> {
    number(text, 1e-3..1e6)
}

fn tokens(text: &str) -> Result<f64, String> {
    number(text, 1.0..1000.0)
}

fn number(text: &str, range: std::ops::Range<f64>) -> Result<f64, String> {
    let good = text.parse().ok().filter(|x| range.contains(x));
    good.ok_or_else(|| format!("expected a number from {} to {}", range.start, range.end))
}

/// Everything that is known without loading.
struct Report<'a> {
    name: String,
    task: Task<'a>,
    size: Size,
    placement: Placement,
    /// Memory of the machine that is free.
    available: Option<u64>,
    largest_context: Option<usize>,
    speeds: Speeds,
    predicted: Prediction,
    /// Tokens of a pass with drafts, low and high.
    drafted: [f64; 2],
    /// Other contexts.
    others: Vec<Other>,
    /// Why it cannot be loaded.
    misfit: Option<String>,
    /// Why an NPU that was asked for would take no part.
    no_npu: Option<String>,
}

/// The same model with another context.
struct Other {
    context: usize,
    /// Where it would run; `None` where the options leave no place.
    placement: Option<Placement>,
    fits: bool,
}

pub fn run(options: &Plan, ui: &Ui) -> Result<u8> {
    let (weights, name) = match options.synthetic {
        Some(shape) => (shape.weights(&options.formats)?, format!("synthetic {}", shape.name())),
        None => session::open(options.model.model.as_deref(), ui).map(|m| (m.weights, m.name))?,
    };
    let drafted = match options.tokens_per_pass[..] {
        [one] => [one, one],
        [low, high] if low <= high => [low, high],
        _ => return Err(Fault::usage("--tokens-per-pass takes the lower number first").into()),
    };
    let run = &options.model.run;
    if options.parallel > 1 && run.npu.is_asked() {
        return Err(npu::for_one_text());
    }
    let context = session::context(run.ctx_size, CONTEXT, weights.config(), ui);
    let sequences = options.parallel as usize;
    let kv = session::kv_format(&weights, run.kv)?;
    let task = Task { weights: &weights, context, kv, sequences, npu: run.npu.is_asked() };
    let placement = placement::candidates(&task, run, ui)?.swap_remove(0);
    let available = memory("MemAvailable");
    let fits = placement::check_memory(&placement, available);
    let device = placement.device.as_ref();
    let mut speeds = match &options.bandwidth[..] {
        [] => Speeds::new(&*session::pool(run)?, device),
        given => Speeds::given(given, device),
    };
    if let Some(device) = device.filter(|_| options.measure) {
        speeds = speeds.measured(device)?;
    }
    let mut contexts: Vec<usize> = CONTEXTS.into_iter().filter(|c| *c <= weights.config().max_position).collect();
    contexts.push(context);
    contexts.sort_unstable();
    contexts.dedup();
    let other = |context| {
        let found = placement::candidates(&Task { context, ..task }, run, ui).ok().map(|mut list| list.swap_remove(0));
        let fits = found.as_ref().is_some_and(|p| placement::check_memory(p, available).is_ok());
        Other { context, placement: found, fits }
    };
    let no_npu = match npu::dims(weights.config()).shape() {
        _ if !task.npu => None,
        Err(why) => Some(why.to_string()),
        Ok(_) => (placement.layout.npu == 0).then(|| "it works beside one device, not where layers are spread over two".into()),
    };
    let report = Report {
        name,
        size: Size::of(&weights)?,
        largest_context: largest_context(&task, &placement, available)?,
        predicted: speeds.predict(&placement),
        misfit: fits.as_ref().err().map(|e| format!("{e:#}")),
        others: contexts.into_iter().map(other).collect(),
        task,
        placement,
        available,
        speeds,
        drafted,
        no_npu,
    };
    print(&if options.json { format!("{:#}\n", report.json()) } else { report.text(run.ctx_size) })?;
    fits.map(|()| 0)
}

/// The most positions that fit with the layers where they are; `None` if not even one page does.
fn largest_context(task: &Task<'_>, placement: &Placement, available: Option<u64>) -> Result<Option<usize>> {
    let most = task.weights.config().max_position;
    let device = placement.device.as_ref();
    let fits = |context: usize| -> Result<bool> {
        let layout = Task { context, ..*task }.measure(device, placement.layout.gpu.layers)?;
        let other = Placement { layout, device: device.cloned() };
        let on_gpu = device.is_none_or(|d| other.layout.gpu.need.total() <= d.free());
        Ok(on_gpu && placement::check_memory(&other, available).is_ok())
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
