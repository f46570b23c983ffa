//! Loading: tensors of a model into an executor, and the buffers of its activations.

use crate::compute::{
    Act, ActFormat, BufferId, Executor, LoadJob, Op, Part, Plan, Prepare, RowSet, StepLayout,
    WeightId,
};
use crate::models::{Role, TensorSpec, Weights};
use crate::tensor::{Format, Matrix};
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::sync::mpsc::Receiver;

/// Returns the name of a matrix in errors.
fn label(role: Role, layer: usize) -> String {
    format!("{role:?} {layer}")
}

/// Returns where in the model a tensor belongs.
pub fn part(weights: &Weights, role: Role, layer: usize) -> Part {
    match role {
        Role::Embed if weights.has_own_head() => Part::Embedding,
        Role::Embed | Role::Head => Part::Head,
        _ => Part::Layer(layer as u16),
    }
}

/// Source of the matrices that the executor does not unpack itself.
pub enum Matrices<'a> {
    /// Shapes without contents, for a dry run.
    Shapes,
    /// A thread that reads ahead.
    Ahead(Receiver<(Role, usize, Result<Matrix<'a>>)>),
    /// No thread: each is read when it is asked for.
    Here,
}

/// Loads tensors into an executor, and takes its buffers.
pub struct Builder<'a> {
    pub weights: &'a Weights,
    pub exec: &'a mut dyn Executor,
    /// Matrices that the executor has, with their format.
    loaded: HashMap<(Role, usize), (WeightId, Format)>,
    matrices: Matrices<'a>,
    pub layout: StepLayout,
    /// One set of buffers per kind of linear input: dispatches use them one after the other.
    acts: HashMap<(ActFormat, usize), Act>,
}

impl<'a> Builder<'a> {
    /// Has the executor load what it unpacks itself.
    pub fn new(
        weights: &'a Weights,
        exec: &'a mut dyn Executor,
        layout: StepLayout,
        matrices: Matrices<'a>,
    ) -> Result<Builder<'a>> {
        let (loaded, acts) = (HashMap::new(), HashMap::new());
        let mut builder = Builder { weights, exec, loaded, matrices, layout, acts };
        if !matches!(builder.matrices, Matrices::Shapes) {
            builder.load_stored()?;
        }
        Ok(builder)
    }

    /// Takes an f32 buffer of `[max_rows, cols]`.
    pub fn rows(&mut self, label: &str, cols: usize) -> Result<BufferId> {
        self.exec.alloc(label, self.layout.max_rows * cols * 4)
    }

    fn load_stored(&mut self) -> Result<()> {
        let (mut jobs, mut places) = (Vec::new(), Vec::new());
        for &TensorSpec { role, layer, .. } in self.weights.matrices() {
            let part = part(self.weights, role, layer);
            if self.exec.storage(part).unpacks {
                let matrix = self.weights.stored(role, layer)?;
                places.push(((role, layer), matrix.format));
                jobs.push(LoadJob { label: label(role, layer), part, matrix });
            }
        }
        if jobs.is_empty() {
            return Ok(());
        }
        let ids = self.exec.load_stored(jobs)?;
        self.loaded = places
            .into_iter()
            .zip(ids)
            .map(|((place, format), id)| (place, (id, format)))
            .collect();
        Ok(())
    }

    /// Loads a matrix; the format decides what its input must look like.
    pub fn matrix(&mut self, role: Role, layer: usize) -> Result<(WeightId, ActFormat)> {
        if let Some((id, format)) = self.loaded.get(&(role, layer)) {
            return Ok((*id, ActFormat::for_weights(*format)));
        }
        let matrix = match &self.matrices {
            Matrices::Shapes => self.weights.shape(role, layer)?,
            Matrices::Here => self.weights.matrix(role, layer)?,
            Matrices::Ahead(ahead) => {
                let (next_role, next_layer, matrix) =
                    ahead.recv().context("all matrices were taken")?;
                assert_eq!(
                    (next_role, next_layer),
                    (role, layer),
                    "matrices are asked for in the order of Weights::tensors"
                );
                matrix?
            }
        };
        let label = label(role, layer);
        let id = self
            .exec
            .load(&label, part(self.weights, role, layer), &matrix)
            .with_context(|| format!("loading {label}"))?;
        let format = matrix.format;
        self.loaded.insert((role, layer), (id, format));
        self.weights.recycle(matrix);
        if !matches!(self.matrices, Matrices::Shapes) {
            self.weights.count(role, layer)?;
        }
        Ok((id, ActFormat::for_weights(format)))
    }

    /// Loads a norm's weights, f32 `[cols]`.
    pub fn norm(&mut self, role: Role, layer: usize) -> Result<BufferId> {
        let id = self.exec.alloc("norm", self.weights.tensor(role, layer).cols * 4)?;
        if !self.exec.caps().is_dry {
            self.exec.write(id, 0, bytemuck::cast_slice(&self.weights.vector(role, layer)?))?;
        }
        Ok(id)
    }

    /// Reads a tensor of one number; 1 in a dry run.
    pub fn number(&mut self, role: Role, layer: usize) -> Result<f32> {
        Ok(if self.exec.caps().is_dry { 1.0 } else { self.weights.vector(role, layer)?[0] })
    }

    /// Returns prepared activations of this kind; their buffers are `input` itself where nothing
    /// has to be prepared.
    fn act(&mut self, format: ActFormat, cols: usize, input: BufferId) -> Result<Act> {
        if !format.int8 && !format.hadamard {
            return Ok(Act { format, cols, values: input, scales: input, sums: input });
        }
        if let Some(act) = self.acts.get(&(format, cols)) {
            return Ok(*act);
        }
        let (width, groups) = (if format.int8 { 1 } else { 4 }, format.groups(cols).max(1));
        let rows = self.layout.max_rows;
        let act = Act {
            format,
            cols,
            values: self.exec.alloc("activations", rows * cols * width)?,
            scales: self.exec.alloc("activation scales", rows * groups * 4)?,
            sums: self.exec.alloc("activation sums", rows * groups * 4)?,
        };
        self.acts.insert((format, cols), act);
        Ok(act)
    }

    /// Appends the preparations that `input` needs for these formats, each once. Returns the
    /// activations in the formats' order.
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
            let act = self.act(*format, cols, input)?;
            if act.values != input && !acts.contains(&act) {
                plan.push("quantise", layer, Op::Prepare(Prepare { input, act, rows }));
            }
            acts.push(act);
        }
        Ok(acts)
    }
}
