//! Remedies for a model that does not fit: a smaller context, a smaller file or another model.

use super::{Commands, made_name};
use crate::cli::sizes::{SizeRow, Sizes};
use crate::quant::Recipe;
use crate::quant::recipe::FOR_SIZES;
use crate::runtime::load;
use crate::runtime::model::Size;
use crate::runtime::model::shapes::{Shape, settled};
use crate::runtime::options::{AutoOr, RunOptions};
use crate::runtime::placement::Placement;
use crate::runtime::placement::host::Host;
use crate::runtime::placement::measure::Task;
use crate::util::units::{bytes, thousands};
use anyhow::Result;

/// Steps of a target size: 0.1 GB, or 1 MB for smaller models.
const STEPS: [u64; 2] = [100_000_000, 1_000_000];
/// Attempts to find a size. Each one is smaller than the last by at least a fortieth.
const ATTEMPTS: usize = 8;

/// A model that does not fit.
pub struct Misfit<'a> {
    pub task: Task<'a>,
    pub placement: &'a Placement,
    /// The published model that this is, or has the shape of.
    pub shape: Option<Shape>,
    pub commands: &'a Commands,
    /// Largest context that fits without moving layers, in positions.
    pub largest_context: Option<usize>,
}

impl Misfit<'_> {
    /// Returns the remedies and the commands to type.
    pub fn help(&self, host: &Host<'_>, run: &RunOptions, sizes: &Sizes) -> Result<String> {
        let (mut ways, mut commands) = (Vec::new(), Vec::new());
        // A smaller context is too small for a chat.
        if let Some(context) = self.largest_context.filter(|n| *n >= 1024) {
            ways.push(format!(
                "it fits with --ctx-size {context} ({} tokens)",
                thousands(context as u64)
            ));
            commands = self.commands.lines(AutoOr::N(context));
        }
        if let Some(size) = self.target_size(host, run)? {
            let page = self.shape.and_then(|shape| shape.page("bf16"));
            let source = page.or(self.commands.model.clone()).unwrap_or("SRC".to_owned());
            let made = made_name(self.shape, &size);
            let quantize = format!("gemma quantize {source} {made} --target-size {size}");
            ways.push(format!("quantise the original checkpoint: {quantize}"));
        }
        let own = Size::of(self.task.weights)?.bytes;
        let is_same = |row: &&SizeRow| Some(row.shape) == self.shape;
        let published = |row: &&SizeRow| row.shape.page(row.recipe).is_some();
        let is_smaller = |row: &&SizeRow| row.fits() && row.bytes < own;
        let rows = sizes.rows.iter().filter(is_same).filter(published).filter(is_smaller);
        let smaller = rows.max_by_key(|row| row.bytes).or(sizes.best().filter(is_smaller));
        if let (true, Some(row)) = (commands.is_empty(), smaller) {
            let page = row.shape.page(row.recipe).unwrap_or_default();
            ways.push(format!("{page} ({}) fits", bytes(row.bytes)));
            commands = vec![format!("gemma pull {}", row.shape.pulled_as(row.recipe))];
        }
        if ways.is_empty() {
            ways.push(
                "close other programs: no Gemma fits into the memory that is free".to_owned(),
            );
        }
        let commands: String = commands.iter().map(|command| format!("\n  {command}")).collect();
        Ok(ways.join("; or ") + &commands)
    }

    /// Returns the largest `--target-size` at which the model fits after quantisation; `None` if no
    /// format makes it small enough.
    fn target_size(&self, host: &Host<'_>, run: &RunOptions) -> Result<Option<String>> {
        let Some(available) = host.available else { return Ok(None) };
        let own = Size::of(self.task.weights)?.bytes;
        let layout = &self.placement.layout;
        let others = (layout.cpu.need.total() - layout.cpu.need.weights).saturating_add(layout.npu);
        let mut size = available.saturating_sub(others).min(own);
        for _ in 0..ATTEMPTS {
            let step = if size > 10 * STEPS[0] { STEPS[0] } else { STEPS[1] };
            size = size / step * step;
            if size == 0 {
                return Ok(None);
            }
            let recipe = Recipe::load(FOR_SIZES)?.with_target(size)?;
            // No plan exists below the smallest size of this shape.
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
