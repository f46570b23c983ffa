//! What a run will write and need, to the byte, from headers alone.

use super::allocate::{Candidate, KLD_PER_DISTORTION, Rate, allocate};
use super::layout::{Layout, Target};
use super::recipe::{Choice, Recipe};
use super::report::{self, Report};
use super::solver::Solver;
use super::{Options, SIDE_FILES};
use crate::checkpoint::gguf::write::Keys;
use crate::checkpoint::{Dtype, Kind, artifact, shards};
use crate::error::{Fault, Kind as FaultKind};
use crate::models::gemma3::gguf::export;
use crate::models::{Role, Weights};
use crate::tensor::Format;
use anyhow::{Context, Result};

/// Tells how much a tensor matters, by role and layer.
#[derive(Clone, Copy)]
pub enum Importance<'a> {
    /// Per weight; 1 is the average. See [`super::allocate::prior`].
    Relative(&'a dyn Fn(Role, usize) -> f64),
    /// In nats of divergence per unit of relative squared error; see [`super::calibrate::survey`].
    Measured(&'a dyn Fn(Role, usize) -> f64),
}

/// Divergence that feedback and correction leave, as a share of what the same codes cost as white
/// noise.
const SOLVED: f64 = 0.5;

/// A recipe applied to a model.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Of the recipe: name, SHA-256 of its text, the size it aims at.
    pub recipe: String,
    /// The options that ask for it, see [`Recipe::asked`].
    pub asked: String,
    pub recipe_sha256: String,
    pub target: Option<u64>,
    /// See [`Solver::name`].
    pub solver: String,
    pub layout: Layout,
    /// Mean divergence (nats) to expect by the planning rule.
    pub predicted_kld: Option<f64>,
    /// Files copied beside the weights, and their bytes.
    pub side_files: Vec<(String, u64)>,
    /// What a GGUF file says about the model.
    keys: Option<Keys>,
    /// Bytes of everything that is written.
    pub total_bytes: u64,
    /// Most weights held at once as floats, where the solver does not ask for whole matrices.
    pub chunk: usize,
    /// Most memory to expect, in bytes.
    pub memory: u64,
}

impl Plan {
    /// Resolves the recipe for `source`, whose headers alone are read. Made-up weights are planned
    /// as a checkpoint of bf16 would be, without the files beside the weights.
    pub fn new(
        source: &Weights,
        recipe: &Recipe,
        options: &Options,
        solver: &dyn Solver,
        importance: Importance<'_>,
    ) -> Result<Plan> {
        let roles = source.roles();
        let choices = recipe.resolve(&roles)?;
        let tensors: Vec<Tensor> = roles
            .iter()
            .zip(choices)
            .map(|(&(role, layer), choice)| Tensor::new(source, role, layer, choice))
            .collect::<Result<_>>()?;
        let weights = weigh(&roles, source, importance);
        let mut plan = Plan {
            recipe: recipe.name().to_owned(),
            asked: recipe.asked(),
            recipe_sha256: recipe.sha256(),
            target: None,
            solver: solver.name(),
            layout: Layout::empty(),
            predicted_kld: None,
            side_files: if options.gguf { Vec::new() } else { side_files(source)? },
            keys: options.gguf.then(|| export::keys(source)).transpose()?,
            total_bytes: 0,
            chunk: 0,
            memory: 0,
        };
        plan.target =
            recipe.target().map(|aim| aim.bytes(&roles, source.config(), &plan.side_files));
        match plan.target {
            None => plan.lay_out(source, &tensors, &weights, &mut std::iter::empty(), options)?,
            Some(size) => plan.fit(source, &tensors, &weights, size, options)?,
        }
        (plan.chunk, plan.memory) = memory(&plan.layout, solver, options)?;
        Ok(plan)
    }

    /// Finds the best formats whose whole artifact takes no more than `size` bytes.
    fn fit(
        &mut self,
        source: &Weights,
        tensors: &[Tensor],
        weights: &[f64],
        size: u64,
        options: &Options,
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
            let (asked, least) = (super::size(size), super::size(self.total_bytes));
            let what = format!(
                "{asked} cannot be reached: the smallest that this recipe makes is {least}"
            );
            let kb = self.total_bytes.div_ceil(1000);
            return Err(Fault::usage(what)
                .help(format!("give --target-size {kb}kB or more"))
                .into());
        }
        // Headers and reports grow by a few bytes with the formats' names, so the budget is
        // corrected until all fits.
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

    /// The layout with these formats for the open tensors, and what follows from it.
    fn lay_out(
        &mut self,
        source: &Weights,
        tensors: &[Tensor],
        weights: &[f64],
        chosen: &mut dyn Iterator<Item = Format>,
        options: &Options,
    ) -> Result<()> {
        let mut targets = Vec::with_capacity(tensors.len());
        let mut kld = 0.0;
        for (tensor, weight) in tensors.iter().zip(weights) {
            let target = match tensor.rates.len() {
                0 | 1 => tensor.target,
                _ => Target::Format(chosen.next().context("fewer formats than tensors")?),
            };
            if let Target::Format(format) = target {
                kld += weight * format.distortion();
            }
            targets.push(target);
        }
        self.layout = match &self.keys {
            Some(keys) => Layout::gguf(source, &targets, keys)?,
            None => Layout::new(source, &targets, options.shard_bytes)?,
        };
        self.predicted_kld = Some(report::digits(kld, 3));
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
        Ok(total + Report::file_bytes(self)? as u64)
    }

    /// Small files that follow from the layout: the index and `config.json`.
    pub fn made_files(&self, source: &Weights) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut out = Vec::new();
        if let Some(index) = self.layout.index() {
            out.push((shards::INDEX, super::pretty(&index)?));
        }
        if let Some(checkpoint) = source.checkpoint() {
            out.push((
                "config.json",
                super::pretty(&artifact::with_formats(
                    checkpoint.config(),
                    &self.layout.formats(),
                ))?,
            ));
        }
        Ok(out)
    }
}

/// A tensor with what its line leaves open.
struct Tensor {
    target: Target,
    /// More than one where the line leaves a choice.
    rates: Vec<Rate>,
}

impl Tensor {
    fn new(source: &Weights, role: Role, layer: usize, choice: &Choice) -> Result<Tensor> {
        let [rows, cols] = role.shape(source.config());
        let name = || source.name(role, layer);
        let formats = match choice {
            Choice::One(format) => {
                return Ok(Tensor { target: Target::Format(*format), rates: Vec::new() });
            }
            Choice::AsIs => {
                let Some(checkpoint) = source.checkpoint() else {
                    return Ok(Tensor { target: Target::AsIs(Dtype::BF16), rates: Vec::new() });
                };
                let target = match checkpoint.lookup(&name()).map(|s| s.kind) {
                    Some(Kind::Plain(dtype)) => Target::AsIs(dtype),
                    Some(Kind::Packed(format)) => Target::Format(format),
                    Some(Kind::Blocks(_)) => Target::Format(Format::BF16),
                    None => return Err(Fault::model(format!("{} went missing", name())).into()),
                };
                return Ok(Tensor { target, rates: Vec::new() });
            }
            Choice::Any(formats) => formats,
        };
        // Those that cut this width: small models are often too narrow for a Hadamard.
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
        Ok(Tensor { target: Target::Format(first.format), rates })
    }
}

/// What a distortion of 1 costs for each tensor: its share of the layers' weights times its
/// sensitivity, scaled so that equal distortions everywhere cost [`KLD_PER_DISTORTION`] times that.
/// The table comes on top: it is no layer.
fn weigh(roles: &[(Role, usize)], source: &Weights, importance: Importance<'_>) -> Vec<f64> {
    let alpha = match importance {
        Importance::Relative(alpha) => alpha,
        Importance::Measured(divergence) => {
            let cost = |&(role, layer): &(Role, usize)| {
                if role.is_matrix() { SOLVED * divergence(role, layer) } else { 0.0 }
            };
            return roles.iter().map(cost).collect();
        }
    };
    let weighed = |&(role, layer): &(Role, usize)| match role.is_matrix() {
        true => role.shape(source.config()).iter().product::<usize>() as f64 * alpha(role, layer),
        false => 0.0,
    };
    let layers: f64 = roles.iter().filter(|r| r.0.is_layer()).map(weighed).sum();
    roles.iter().map(|r| KLD_PER_DISTORTION * weighed(r) / layers.max(1.0)).collect()
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

/// Weights of a chunk where memory is no matter, and the fewest rows of one: trellis codes come in
/// tiles of 16.
const CHUNK: usize = 4 << 20;
const CHUNK_PER_THREAD: usize = 512 << 10;
pub const TILE_ROWS: usize = 16;
/// Bytes that one weight of a chunk takes: as f32, here and in the chunk read ahead, and its codes.
const PER_WEIGHT: u64 = 12;
/// The same where a matrix is held whole and nothing is read ahead.
const PER_WHOLE_WEIGHT: u64 = 8;
/// The program itself, headers and side files; and what a thread keeps.
const BASE: u64 = 128 << 20;
const PER_THREAD: u64 = 8 << 20;

/// Weights per chunk and bytes in all under the limit.
fn memory(layout: &Layout, solver: &dyn Solver, options: &Options) -> Result<(usize, u64)> {
    let scales = |e: &super::Entry| e.parts[1..].iter().map(|p| p.bytes).sum::<u64>();
    let fixed = BASE
        + PER_THREAD * options.threads as u64
        + layout.entries.iter().map(scales).max().unwrap_or(0)
        + solver.memory(layout);
    let whole = layout
        .entries
        .iter()
        .filter(|e| solver.wants_whole(e))
        .map(|e| e.rows * e.cols)
        .max()
        .unwrap_or(0);
    let widest = layout.entries.iter().map(|e| e.cols).max().unwrap_or(1);
    let peak =
        |chunk: usize| fixed + (PER_WEIGHT * chunk as u64).max(PER_WHOLE_WEIGHT * whole as u64);
    let least = TILE_ROWS * widest;
    let chunk = CHUNK.max(CHUNK_PER_THREAD * options.threads).max(least);
    let Some(limit) = options.memory else { return Ok((chunk, peak(chunk))) };
    if limit < peak(least) {
        let what = format!(
            "{} of memory are not enough: {} are needed",
            super::size(limit),
            super::size(peak(least))
        );
        let help = format!(
            "give --mem-limit {}MB or more, or fewer --threads",
            peak(least).div_ceil(1_000_000)
        );
        return Err(Fault::new(FaultKind::Memory, what).help(help).into());
    }
    let chunk = chunk.min(((limit - fixed) / PER_WEIGHT) as usize);
    Ok((chunk, peak(chunk)))
}
