//! `gemma plan`: what a model would take and where it would run, without loading it. The same code decides when it is loaded.

use super::args::{AutoOr, ModelOptions, UiOptions};
use super::bench::report::markdown;
use super::bench::shapes::{Formats, Shape};
use super::devices::memory;
use super::output::print;
use super::placement::measure::{Share, Task};
use super::placement::predict::{Prediction, Speeds};
use super::placement::{self, Placement};
use super::session::{self, Size};
use super::ui::{Ui, bytes, thousands};
use crate::compute::KvFormat;
use crate::kv::PAGE;
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

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
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Context where none was asked for.
const CONTEXT: usize = 4096;

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
    /// Why it cannot be loaded.
    misfit: Option<String>,
}

pub fn run(options: &Plan, ui: &Ui) -> Result<u8> {
    let (weights, name) = match options.synthetic {
        Some(shape) => (shape.weights(&options.formats)?, format!("synthetic {}", shape.name())),
        None => session::open(options.model.model.as_deref(), ui).map(|m| (m.weights, m.name))?,
    };
    let run = &options.model.run;
    let context = session::context(run.ctx_size, CONTEXT, weights.config(), ui);
    let task = Task { weights: &weights, context, kv: session::kv_format(&weights, run.kv)? };
    let placement = placement::candidates(&task, run, ui)?.swap_remove(0);
    let available = memory("MemAvailable");
    let fits = placement::check_memory(&placement, available);
    let mut speeds = Speeds::new(&*session::pool(run)?, placement.device.as_ref());
    if let Some(device) = placement.device.as_ref().filter(|_| options.measure) {
        speeds = speeds.measured(device)?;
    }
    let report = Report {
        name,
        size: Size::of(&weights)?,
        largest_context: largest_context(&task, &placement, available)?,
        predicted: speeds.predict(&placement),
        misfit: fits.as_ref().err().map(|e| format!("{e:#}")),
        task,
        placement,
        available,
        speeds,
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

impl Report<'_> {
    fn kv(&self) -> &'static str {
        match self.task.kv {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Q8 => "q8",
        }
    }

    fn device(&self) -> String {
        self.placement.device.as_ref().map_or("cpu".into(), |d| format!("vulkan:{}", d.index))
    }

    fn globals(&self) -> usize {
        let config = self.task.weights.config();
        (0..config.n_layers).filter(|layer| config.is_global(*layer)).count()
    }

    fn json(&self) -> Value {
        let config = self.task.weights.config();
        let side = |share: &Share, free: Option<u64>| json!({"layers": share.layers, "bytes": share.need, "total": share.need.total(), "free": free, "read_by_a_pass": share.reads});
        let (gpu, cpu) = (&self.placement.layout.gpu, &self.placement.layout.cpu);
        json!({
            "v": 1,
            "model": {
                "name": self.name, "layers": config.n_layers, "global_layers": self.globals(), "window": config.window,
                "bytes": self.size.bytes, "bits_per_weight": self.size.bits_per_weight(),
            },
            "context": self.task.context,
            "kv": self.kv(),
            "device": self.device(),
            "device_name": self.placement.device.as_ref().map(|d| &d.name),
            "gpu": self.placement.device.as_ref().map(|d| side(gpu, Some(d.free()))),
            "cpu": side(cpu, self.available),
            "fits": self.misfit.is_none(),
            "misfit": self.misfit,
            "largest_context": self.largest_context,
            "predicted": self.predicted,
            "memory_speed": self.speeds,
        })
    }

    fn text(&self, asked: AutoOr) -> String {
        let config = self.task.weights.config();
        let (all, global) = (config.n_layers, self.globals());
        let count = |n: usize| thousands(n as u64);
        let chosen = if asked == AutoOr::Auto { " (--ctx-size sets others)" } else { "" };
        let largest = self.largest_context.map_or("none".to_owned(), count);
        let mut text = format!(
            "{}: {all} layers, {} at {:.2} bits per weight\n",
            self.name,
            bytes(self.size.bytes),
            self.size.bits_per_weight()
        );
        text += &format!(
            "context    {} positions{chosen}, keys and values in {}: {global} layers keep all, {} the last {} and what a pass adds\n\n",
            count(self.task.context),
            self.kv(),
            all - global,
            count(config.window)
        );
        text += &self.table();
        text += &format!("\nplacement  {}\n", self.placement.describe());
        text += &match &self.misfit {
            None => format!("fits       yes; with the layers placed like this up to a context of {largest}\n"),
            Some(why) => format!("fits       no: {why}; largest context: {largest}\n"),
        };
        text + &format!("predicted  {}\n", self.speeds.describe(&self.predicted))
    }

    /// Bytes by part and side.
    fn table(&self) -> String {
        let (gpu, cpu) = (&self.placement.layout.gpu, &self.placement.layout.cpu);
        let free = |bytes_free: Option<u64>| bytes_free.map_or("unknown".to_owned(), bytes);
        let mut sides = Vec::new();
        if let Some(device) = &self.placement.device {
            sides.push((self.device(), gpu, Some(device.free())));
        }
        if cpu.layers > 0 {
            sides.push(("cpu".to_owned(), cpu, self.available));
        }
        let row = |name: &str, cell: &dyn Fn(&Share) -> String| -> Vec<String> {
            std::iter::once(name.to_owned()).chain(sides.iter().map(|(_, share, _)| cell(share))).collect()
        };
        let mut table = vec![std::iter::once(String::new()).chain(sides.iter().map(|s| s.0.clone())).collect()];
        table.push(row("layers", &|s| s.layers.to_string()));
        table.push(row("weights", &|s| bytes(s.need.weights)));
        table.push(row("keys and values", &|s| bytes(s.need.kv)));
        table.push(row("activations", &|s| bytes(s.need.activations)));
        table.push(row("while loading", &|s| bytes(s.need.staging)));
        table.push(row("in all", &|s| bytes(s.need.total())));
        table.push(std::iter::once("free".to_owned()).chain(sides.iter().map(|s| free(s.2))).collect());
        markdown(&table)
    }
}
