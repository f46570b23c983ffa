//! Remedy for a model that does not fit: the largest one that does.

use crate::cli::sizes::Sizes;
use crate::quant::Recipe;
use crate::quant::recipe::FOR_SIZES;
use crate::runtime::load;
use crate::runtime::model::Size;
use crate::runtime::model::shapes::{Shape, settled};
use crate::runtime::options::RunOptions;
use crate::runtime::placement::Placement;
use crate::runtime::placement::host::Host;
use crate::runtime::placement::measure::Task;
use crate::util::units::{bytes, thousands};
use anyhow::Result;

/// Steps of a target size: a tenth of a GB, or of a smaller model's a MB.
const STEPS: [u64; 2] = [100_000_000, 1_000_000];
/// Attempts to find a size; each is smaller by what was too much.
const ATTEMPTS: usize = 8;

/// A model that does not fit.
pub struct Misfit<'a> {
    pub task: Task<'a>,
    pub placement: &'a Placement,
    /// The published model that it is, or has the shape of.
    pub shape: Option<Shape>,
    /// Positions that would fit with the layers where they are.
    pub largest_context: Option<usize>,
}

impl Misfit<'_> {
    /// Returns the remedy with the commands to type.
    pub fn help(&self, host: &Host<'_>, run: &RunOptions, sizes: &Sizes) -> Result<String> {
        let mut ways = Vec::new();
        // Fewer positions than a chat takes are no way out.
        if let Some(context) = self.largest_context.filter(|n| *n >= 1024) {
            ways.push(format!(
                "it fits with --ctx-size {context} ({} tokens)",
                thousands(context as u64)
            ));
        }
        let own = Size::of(self.task.weights)?.bytes;
        let smaller = |page: &str, bytes_of: u64| {
            format!("{page} ({}) fits: gemma pull {page}", bytes(bytes_of))
        };
        if let Some(shape) = self.shape {
            let rows =
                sizes.rows.iter().filter(|row| row.shape == shape && row.fits() && row.bytes < own);
            let of_google = rows.filter_map(|row| Some((row.bytes, shape.page(row.recipe)?))).max();
            ways.extend(of_google.map(|(bytes, page)| smaller(&page, bytes)));
        }
        if let Some(size) = self.target_size(host, run)? {
            ways.push(format!(
                "quantise the original checkpoint: gemma quantize SRC DST --target-size {size}"
            ));
        }
        if ways.is_empty()
            && let Some((row, page)) = sizes.best()
        {
            ways.push(format!(
                "no recipe makes this model small enough; {}",
                smaller(&page, row.bytes)
            ));
        }
        if ways.is_empty() {
            ways.push(
                "close other programs: no Gemma fits into the memory that is free".to_owned(),
            );
        }
        Ok(ways.join("; or "))
    }

    /// The largest size, as `--target-size` takes it, to which the model can be quantised so that
    /// it fits; `None` where no format makes it small enough.
    fn target_size(&self, host: &Host<'_>, run: &RunOptions) -> Result<Option<String>> {
        let Some(available) = host.available else { return Ok(None) };
        let own = Size::of(self.task.weights)?.bytes;
        let layout = &self.placement.layout;
        let beside = (layout.cpu.need.total() - layout.cpu.need.weights).saturating_add(layout.npu);
        let mut size = available.saturating_sub(beside).min(own);
        for _ in 0..ATTEMPTS {
            let step = if size > 10 * STEPS[0] { STEPS[0] } else { STEPS[1] };
            size = size / step * step;
            if size == 0 {
                return Ok(None);
            }
            let recipe = Recipe::load(FOR_SIZES)?.with_target(size)?;
            // Below the smallest size of this shape there is no plan.
            let Ok(weights) = settled(self.task.weights.config().clone(), &recipe) else {
                return Ok(None);
            };
            let kv = load::kv_format(&weights, run.kv)?;
            if host.fitting(&Task { weights: &weights, kv, ..self.task }).is_some() {
                let text = if step == STEPS[0] {
                    format!("{:.1}GB", size as f64 / 1e9)
                } else {
                    format!("{}MB", size / step)
                };
                return Ok(Some(text));
            }
            size -= (size / 40).max(step);
        }
        Ok(None)
    }
}
