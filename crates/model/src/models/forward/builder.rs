//! Loads a model's tensors into an executor, and allocates the buffers of its activations.

use crate::models::{Role, TensorSpec, Weights};
use anyhow::Result;
use gemma_base::compute::{
    Act, ActFormat, BufferId, Executor, LoadJob, Op, Part, Plan, Prepare, RowSet, StepLayout,
    WeightId,
};
use gemma_base::tensor::Format;
use std::collections::HashMap;

/// Returns the name of a matrix for errors.
fn label(role: Role, layer: usize) -> String {
    format!("{role:?} {layer}")
}

/// Returns the part of the model that a tensor belongs to.
pub fn part(weights: &Weights, role: Role, layer: usize) -> Part {
    match role {
        Role::Embed if weights.has_own_head() => Part::Embedding,
        Role::Embed | Role::Head => Part::Head,
        _ => Part::Layer(layer as u16),
    }
}

/// Loads tensors into an executor and allocates buffers there.
pub struct Builder<'a> {
    pub weights: &'a Weights,
    pub exec: &'a mut dyn Executor,
    /// All matrices with their formats.
    loaded: HashMap<(Role, usize), (WeightId, Format)>,
    pub layout: StepLayout,
    /// One set of buffers per kind of linear input, shared by all dispatches in turn.
    acts: HashMap<(ActFormat, usize, usize), Act>,
}

impl<'a> Builder<'a> {
    /// Lets the executor load all matrices, each for its own part of the model, or all for `home`.
    pub fn new(
        weights: &'a Weights,
        exec: &'a mut dyn Executor,
        layout: StepLayout,
        home: Option<Part>,
    ) -> Result<Builder<'a>> {
        let (mut jobs, mut places) = (Vec::new(), Vec::new());
        for &TensorSpec { role, layer, .. } in weights.matrices() {
            let part = home.unwrap_or(part(weights, role, layer));
            let label = label(role, layer);
            let matrix = weights.stored(role, layer)?;
            places.push(((role, layer), matrix.format));
            jobs.push(LoadJob { label, part, matrix });
        }
        let ids = exec.load(jobs)?;
        let loaded = places.into_iter().zip(ids);
        let loaded = loaded.map(|((place, format), id)| (place, (id, format))).collect();
        Ok(Builder { weights, exec, loaded, layout, acts: HashMap::new() })
    }

    /// Allocates an f32 buffer of `[max_rows, cols]`.
    pub fn rows(&mut self, label: &str, cols: usize) -> Result<BufferId> {
        self.exec.alloc(label, self.layout.max_rows * cols * 4)
    }

    /// Returns a matrix and the activation format that it needs.
    pub fn matrix(&self, role: Role, layer: usize) -> (WeightId, ActFormat) {
        let (id, format) = self.loaded[&(role, layer)];
        (id, ActFormat::for_weights(format))
    }

    /// Loads a norm's weights, f32 `[cols]`.
    pub fn norm(&mut self, role: Role, layer: usize) -> Result<BufferId> {
        self.scaled(role, layer, 1.0)
    }

    /// Loads a vector multiplied by a number, f32 `[cols]`.
    pub fn scaled(&mut self, role: Role, layer: usize, factor: f32) -> Result<BufferId> {
        let id = self.exec.alloc("factors", self.weights.tensor(role, layer).cols * 4)?;
        if !self.exec.caps().is_dry {
            let mut values = self.weights.vector(role, layer)?;
            values.iter_mut().for_each(|v| *v *= factor);
            self.exec.write(id, 0, bytemuck::cast_slice(&values))?;
        }
        Ok(id)
    }

    /// Reads a tensor with one element; returns 1 in a dry run.
    pub fn number(&mut self, role: Role, layer: usize) -> Result<f32> {
        Ok(if self.exec.caps().is_dry { 1.0 } else { self.weights.vector(role, layer)?[0] })
    }

    /// Returns prepared activations of this format. If no preparation is needed, their buffer is
    /// `input` itself.
    fn act(
        &mut self,
        format: ActFormat,
        (input, cols): (BufferId, usize),
        set: RowSet,
    ) -> Result<Act> {
        if !format.int8 && !format.hadamard {
            return Ok(Act { format, cols, values: input, scales: input, sums: input });
        }
        let each = if let RowSet::Slots(n) = set { n } else { 1 };
        if let Some(act) = self.acts.get(&(format, cols, each)) {
            return Ok(*act);
        }
        let (width, groups) = (if format.int8 { 1 } else { 4 }, format.groups(cols).max(1));
        let rows = self.layout.max_rows * each;
        let act = Act {
            format,
            cols,
            values: self.exec.alloc("activations", rows * cols * width)?,
            scales: self.exec.alloc("activation scales", rows * groups * 4)?,
            sums: self.exec.alloc("activation sums", rows * groups * 4)?,
        };
        self.acts.insert((format, cols, each), act);
        Ok(act)
    }

    /// Appends the preparations that `input` needs for these formats, each once. Returns the
    /// activations in the order of the formats.
    pub fn prepare(
        &mut self,
        plan: &mut Plan,
        layer: Option<u16>,
        (input, cols): (BufferId, usize),
        formats: &[ActFormat],
        rows: RowSet,
    ) -> Result<Vec<Act>> {
        let mut acts = Vec::with_capacity(formats.len());
        for format in formats {
            let act = self.act(*format, (input, cols), rows)?;
            if act.values != input && !acts.contains(&act) {
                plan.push("quantise", layer, Op::Prepare(Prepare { input, act, rows }));
            }
            acts.push(act);
        }
        Ok(acts)
    }
}
