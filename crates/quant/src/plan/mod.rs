//! Plan of a conversion: its files and its memory, exact to the byte, from the headers of the
//! source.

mod allocate;
mod memory;
mod report;

pub use allocate::prior;
pub use report::{FILE as REPORT_FILE, QuantReport, TensorReport, digits};

use super::layout::{ArtifactLayout, TargetFormat};
use super::recipe::{FormatChoice, Recipe};
use super::solver::Solver;
use super::{QuantizeOptions, SIDE_FILES, pretty};
use allocate::{Candidate, Rate, allocate};
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Format;
use gemma_base::util::units;
use gemma_model::checkpoint::gguf::write::Keys;
use gemma_model::checkpoint::{Dtype, TensorStorage, artifact, shards};
use gemma_model::models::gguf::export;
use gemma_model::models::{Role, TensorSpec, Weights};

/// Sensitivity of a tensor, by role and layer.
#[derive(Clone, Copy)]
pub enum Importance<'a> {
    /// Relative sensitivity of a weight; 1 is the average. See [`prior`].
    Relative(&'a dyn Fn(Role, usize) -> f64),
    /// Nats of KL divergence per unit of relative squared error. See [`super::calibrate::survey`].
    Measured(&'a dyn Fn(Role, usize) -> f64),
}

/// KL divergence after feedback and correction, as a share of that of white noise of the same size.
const SOLVED: f64 = 0.5;

/// A recipe applied to a model.
#[derive(Clone, Debug)]
pub struct QuantPlan {
    /// Name of the recipe.
    pub recipe: String,
    /// The options that chose the recipe, see [`Recipe::spelling`].
    pub spelling: String,
    pub recipe_sha256: String,
    pub target: Option<u64>,
    /// Name of the solver, see [`Solver::name`].
    pub solver: String,
    pub layout: ArtifactLayout,
    /// Expected error of all weights, each weighted by its tensor's sensitivity. It allows
    /// comparing plans of one model. The loss of quality that it causes depends on the model.
    pub error: f64,
    /// Files that are copied from the directory of the weights, with their bytes.
    pub side_files: Vec<(String, u64)>,
    /// Metadata of a GGUF file; `None` for an artifact.
    keys: Option<Keys>,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Limit for the weights that are in memory as floats, if the solver does not need whole
    /// matrices.
    pub chunk: usize,
    /// Predicted peak memory in bytes.
    pub memory: u64,
}

impl QuantPlan {
    /// Resolves the recipe for `source`. Reads only its headers. Synthetic weights are planned like
    /// a bf16 checkpoint without side files.
    pub fn new(
        source: &Weights,
        recipe: &Recipe,
        options: &QuantizeOptions,
        solver: &dyn Solver,
        importance: Importance<'_>,
    ) -> Result<QuantPlan> {
        let specs = source.tensors();
        let choices = recipe.resolve(specs)?;
        let tensors: Vec<PlannedTensor> = specs
            .iter()
            .zip(choices)
            .map(|(spec, choice)| PlannedTensor::new(source, spec, choice))
            .collect::<Result<_>>()?;
        let weights = weigh(specs, importance);
        let mut plan = QuantPlan {
            recipe: recipe.name().to_owned(),
            spelling: recipe.spelling(),
            recipe_sha256: recipe.sha256(),
            target: None,
            solver: solver.name(),
            layout: ArtifactLayout::empty(),
            error: 0.0,
            side_files: if options.gguf { Vec::new() } else { side_files(source)? },
            keys: options.gguf.then(|| export::keys(source)).transpose()?,
            total_bytes: 0,
            chunk: 0,
            memory: 0,
        };
        plan.target = recipe.target().map(|aim| aim.bytes(specs, &plan.side_files));
        match plan.target {
            None => plan.lay_out(source, &tensors, &weights, &mut std::iter::empty(), options)?,
            Some(size) => plan.fit(source, &tensors, &weights, size, options)?,
        }
        (plan.chunk, plan.memory) = memory::bounds(&plan.layout, solver, options)?;
        Ok(plan)
    }

    /// Chooses the formats of least cost for an artifact of at most `size` bytes.
    fn fit(
        &mut self,
        source: &Weights,
        tensors: &[PlannedTensor],
        weights: &[f64],
        size: u64,
        options: &QuantizeOptions,
    ) -> Result<()> {
        let open: Vec<Candidate> = tensors
            .iter()
            .zip(weights)
            .filter(|(t, _)| t.rates.len() > 1)
            .map(|(t, weight)| Candidate { weight: *weight, options: t.rates.clone() })
            .collect();
        let smallest = |c: &Candidate| c.options.iter().min_by_key(|o| o.bytes).map(|o| o.format);
        let formats: Vec<Format> = open.iter().filter_map(smallest).collect();
        let bytes_of = |formats: &[Format]| -> u64 {
            let bytes = |(c, f): (&Candidate, &Format)| {
                c.options.iter().find(|o| o.format == *f).map_or(0, |o| o.bytes)
            };
            open.iter().zip(formats).map(bytes).sum()
        };
        self.lay_out(source, tensors, weights, &mut formats.iter().copied(), options)?;
        if self.total_bytes > size {
            let (wanted, least) = (units::bytes(size), units::bytes(self.total_bytes));
            let what = format!(
                "{wanted} cannot be reached: the smallest that this recipe makes is {least}"
            );
            let kb = self.total_bytes.div_ceil(1000);
            return Err(Fault::usage(what)
                .help(format!("give --target-size {kb}kB or more"))
                .into());
        }
        // The sizes of headers and reports depend on the names of the formats, so the budget is
        // corrected until everything fits.
        let mut budget = bytes_of(&formats) + (size - self.total_bytes);
        while let Some(found) = allocate(&open, budget) {
            self.lay_out(source, tensors, weights, &mut found.iter().copied(), options)?;
            match self.total_bytes.checked_sub(size) {
                None | Some(0) => return Ok(()),
                Some(over) => budget = budget.saturating_sub(over),
            }
        }
        Err(Fault::usage(format!("no choice of formats takes {size} bytes or less"))
            .help("give a larger --target-size")
            .into())
    }

    /// Sets the layout and the sizes that follow from it. `chosen` has the formats of the open
    /// tensors.
    fn lay_out(
        &mut self,
        source: &Weights,
        tensors: &[PlannedTensor],
        weights: &[f64],
        chosen: &mut dyn Iterator<Item = Format>,
        options: &QuantizeOptions,
    ) -> Result<()> {
        let mut targets = Vec::with_capacity(tensors.len());
        let mut error = 0.0;
        for (tensor, weight) in tensors.iter().zip(weights) {
            let target = match tensor.rates.len() {
                0 | 1 => tensor.target,
                _ => TargetFormat::Format(chosen.next().context("fewer formats than tensors")?),
            };
            if let TargetFormat::Format(format) = target {
                error += weight * format.distortion();
            }
            targets.push(target);
        }
        self.layout = match &self.keys {
            Some(keys) => ArtifactLayout::gguf(source, &targets, keys)?,
            None => ArtifactLayout::new(source, &targets, options.shard_bytes)?,
        };
        self.error = digits(error, 3);
        self.total_bytes = self.count(source)?;
        Ok(())
    }

    fn count(&self, source: &Weights) -> Result<u64> {
        let mut total: u64 = self.side_files.iter().map(|(_, bytes)| bytes).sum();
        for shard in 0..self.layout.shards {
            total += self.layout.file_bytes(shard)?;
        }
        if self.layout.is_gguf() {
            return Ok(total);
        }
        for (_, bytes) in self.made_files(source)? {
            total += bytes.len() as u64;
        }
        Ok(total + QuantReport::file_bytes(self)? as u64)
    }

    /// Returns the small files that are generated from the layout: the index and `config.json`.
    pub fn made_files(&self, source: &Weights) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut out = Vec::new();
        if let Some(index) = self.layout.index() {
            out.push((shards::INDEX, pretty(&index)?));
        }
        if let Some(checkpoint) = source.checkpoint() {
            out.push((
                "config.json",
                pretty(&artifact::with_formats(checkpoint.config(), &self.layout.formats()))?,
            ));
        }
        Ok(out)
    }
}

/// A tensor with the formats that its recipe line allows.
struct PlannedTensor {
    target: TargetFormat,
    /// Its possible formats; more than one if the line of the recipe allows a choice.
    rates: Vec<Rate>,
}

impl PlannedTensor {
    fn new(source: &Weights, spec: &TensorSpec, choice: &FormatChoice) -> Result<PlannedTensor> {
        let TensorSpec { role, layer, rows, cols, .. } = *spec;
        let name = || source.name(role, layer);
        let formats = match choice {
            FormatChoice::One(format) => {
                return Ok(PlannedTensor {
                    target: TargetFormat::Format(*format),
                    rates: Vec::new(),
                });
            }
            FormatChoice::AsIs => {
                let Some(checkpoint) = source.checkpoint() else {
                    return Ok(PlannedTensor {
                        target: TargetFormat::AsIs(Dtype::BF16),
                        rates: Vec::new(),
                    });
                };
                let target = match checkpoint.lookup(&name()).map(|s| s.kind) {
                    Some(TensorStorage::Plain(dtype)) => TargetFormat::AsIs(dtype),
                    Some(TensorStorage::Packed(format)) => TargetFormat::Format(format),
                    None => return Err(Fault::model(format!("{} went missing", name())).into()),
                };
                return Ok(PlannedTensor { target, rates: Vec::new() });
            }
            FormatChoice::Any(formats) => formats,
        };
        // Formats with groups that divide this width. Small models are often too narrow for a
        // Hadamard transform.
        let fits = formats.iter().filter(|f| f.check_cols(cols).is_ok());
        let rates: Vec<_> = fits
            .map(|&format| Rate {
                format,
                bytes: format.bytes(rows, cols) as u64,
                distortion: format.distortion(),
            })
            .collect();
        let Some(first) = rates.first() else {
            let what = format!(
                "{} has {cols} columns, which no format of its line can divide into groups",
                name()
            );
            return Err(Fault::model(what).help("use a recipe without +h128, such as int4").into());
        };
        Ok(PlannedTensor { target: TargetFormat::Format(first.format), rates })
    }
}

/// Returns the cost per unit of distortion of each tensor: its share of the layers' weights times
/// its sensitivity. If all layers have the same distortion, the cost of the layers is this
/// distortion. The embedding table is not a layer, and its cost is added to that.
fn weigh(tensors: &[TensorSpec], importance: Importance<'_>) -> Vec<f64> {
    let alpha = match importance {
        Importance::Relative(alpha) => alpha,
        Importance::Measured(divergence) => {
            let cost = |t: &TensorSpec| {
                if t.is_matrix() { SOLVED * divergence(t.role, t.layer) } else { 0.0 }
            };
            return tensors.iter().map(cost).collect();
        }
    };
    let weighed = |t: &TensorSpec| match t.is_matrix() {
        true => t.size() as f64 * alpha(t.role, t.layer),
        false => 0.0,
    };
    let layers: f64 = tensors.iter().filter(|t| t.role.is_layer()).map(weighed).sum();
    tensors.iter().map(|t| weighed(t) / layers.max(1.0)).collect()
}

fn side_files(source: &Weights) -> Result<Vec<(String, u64)>> {
    let Some(checkpoint) = source.checkpoint() else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for name in SIDE_FILES {
        if let Some(bytes) = checkpoint.side_file(name)? {
            out.push((name.to_string(), bytes.len() as u64));
        }
    }
    Ok(out)
}
