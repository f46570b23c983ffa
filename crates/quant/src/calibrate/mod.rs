//! Quantisation that is calibrated on text.
//!
//! Two residual streams of the text run through the model layer by layer: one uses the source's
//! weights, the other the weights quantised so far. Each linear layer is then solved: its inputs
//! are those of the quantised model, and its targets are the outputs of the source.

mod experts;
mod layer;
mod rows;
mod survey;
mod text;

pub use survey::{Sensitivity, survey};
pub use text::{BUILT_IN, CalibrationText};

use super::ldlq::{Factor, Inputs, Solved, solve_matrix};
use anyhow::{Context, Result, ensure};
use experts::ExpertJob;
use gemma_base::error::Fault;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::{Format, Matrix, Token, hadamard};
use gemma_model::models::{Config, Role, Weights};
use layer::{Layer, block_end, block_start, step_of};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Tokens that run through a layer at once. It bounds the memory of the values between two steps.
pub const BATCH: usize = 2048;

/// Weight of a table's lookup errors, relative to its errors as the output head, as a share of the
/// mean second moment.
const LOOKUP: f32 = 0.3;

/// Tokens on which the finished model is compared with its source.
const MEASURED: usize = 4096;

/// Solves a model's matrices in the order of the forward pass.
pub struct Calibrator<'a> {
    source: &'a Weights,
    text: CalibrationText,
    formats: HashMap<(Role, usize), Format>,
    /// Residual streams `[tokens, dim]`: with the source's weights, and with those of the copy.
    original: Vec<f32>,
    made: Vec<f32>,
    /// Layer and step that both streams have reached. The step is the first of a block.
    at: (usize, usize),
    /// The layer that both streams have reached; `None` before its weights are needed.
    current: Option<Current<'a>>,
    /// Matrices that were solved together with another one and were not requested yet.
    waiting: HashMap<Role, Solved>,
    /// Second moments of the output head's inputs, from a first pass with the source's weights.
    head: Option<Vec<Factor>>,
    notes: Vec<String>,
    device: Arc<dyn CodingDevice>,
}

struct Current<'a> {
    original: Layer<'a>,
    made: Layer<'a>,
    done: Vec<Role>,
}

impl<'a> Calibrator<'a> {
    /// Returns a calibrator of `source` on `text`.
    ///
    /// `formats` has the format of each matrix, except for matrices that stay floats. `device`
    /// computes the products and searches for codes.
    pub fn new(
        source: &'a Weights,
        text: CalibrationText,
        formats: HashMap<(Role, usize), Format>,
        device: Arc<dyn CodingDevice>,
    ) -> Result<Calibrator<'a>> {
        if source.config().backbone.is_some() {
            let what = "an assistant reads the cache of another model, which calibration lacks";
            return Err(Fault::usage(what).help("quantise it without --calibrate").into());
        }
        let original = embed(source.config(), &source.matrix(Role::Embed, 0)?, &text.tokens);
        let made = original.clone();
        Ok(Calibrator {
            source,
            text,
            formats,
            original,
            made,
            at: (0, 0),
            current: None,
            waiting: HashMap::new(),
            head: None,
            notes: Vec::new(),
            device,
        })
    }

    /// Returns the notes for the log, and clears them.
    pub fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Quantises rows of a table that is used as the output head. `values` are the source's rows,
    /// `[rows, dim]`.
    pub fn table_rows(
        &mut self,
        role: Role,
        format: Format,
        mut values: Vec<f32>,
    ) -> Result<Solved> {
        let dim = self.source.config().dim;
        if self.head.is_none() {
            let table = self.source.matrix(Role::Embed, 0)?;
            let x = embed(self.source.config(), &table, &self.text.tokens);
            let hidden = survey::final_hidden(self.source, &self.device, &self.text, x)?;
            let mut inputs = Inputs::new(dim, false);
            inputs.add(&*self.device, None, &hidden, self.text.window)?;
            if role == Role::Embed {
                inputs.add_floor(LOOKUP);
            }
            let (factors, note) = inputs.factor(&*self.device, format.hadamard)?;
            self.notes.extend(note.map(|n| format!("output head: {n}")));
            self.head = Some(factors);
        }
        if format.hadamard {
            values.par_chunks_mut(dim).for_each(hadamard::transform);
        }
        solve_matrix(
            &*self.device,
            format,
            values.len() / dim,
            dim,
            values,
            self.head.as_deref().unwrap_or_default(),
            false,
        )
    }

    /// Receives quantised rows of the embedding table. The embeddings of the text's tokens among
    /// them become the start of the copy's residual stream.
    pub fn table_done(&mut self, rows: Range<usize>, matrix: &Matrix<'_>) {
        let (config, dim) = (self.source.config(), self.source.config().dim);
        self.made.par_chunks_mut(dim).zip(&self.text.tokens).for_each(|(x, token)| {
            if rows.contains(&(*token as usize)) {
                matrix.dequantize_row(*token as usize - rows.start, x);
                x.iter_mut().for_each(|v| *v *= config.embed_scale);
            }
        });
        if rows.end == config.vocab {
            self.head = None;
        }
    }

    /// Quantises one matrix of a layer. Calls must follow the order of the forward pass, and each
    /// result must be passed to [`Self::done`] before the next call.
    pub fn matrix(&mut self, role: Role, layer: usize) -> Result<Solved> {
        if !self.waiting.contains_key(&role) {
            self.solve_with_siblings(role, layer)?;
        }
        self.waiting
            .remove(&role)
            .with_context(|| format!("no format is known for {}", role.short_name(layer)))
    }

    /// Replaces a matrix of the copy by its quantised form, from this run or an earlier one.
    pub fn done(&mut self, role: Role, layer: usize, matrix: Matrix<'static>) -> Result<()> {
        let (_, current) = self.reach(layer, role)?;
        current.made.replace(role, matrix);
        current.done.push(role);
        Ok(())
    }

    /// Returns the residual streams of the source and of the copy after a finished layer.
    pub fn streams(&mut self, layer: usize) -> Result<[&[f32]; 2]> {
        self.run_to((layer + 1, 0))?;
        Ok([&self.original, &self.made])
    }

    /// Continues after `layer`. `streams` has the source's residual stream after it, then the
    /// copy's.
    pub fn go_on(&mut self, layer: usize, mut streams: Vec<f32>) -> Result<()> {
        let made = streams.split_off(streams.len() / 2);
        ensure!(made.len() == self.made.len(), "the saved streams have the length of another text");
        (self.original, self.made) = (streams, made);
        (self.at, self.current) = ((layer + 1, 0), None);
        Ok(())
    }

    /// Returns the mean KL divergence of the written model's next tokens from the source's, in
    /// nats.
    ///
    /// It is measured on a part of the calibration text. `made` is the whole written model. An
    /// error returned by `heard` ends the measurement.
    pub fn divergence(
        &mut self,
        made: &Weights,
        heard: &mut dyn FnMut() -> Result<()>,
    ) -> Result<f64> {
        self.run_to((self.source.config().layers.len(), 0))?;
        // Windows are picked from all over the text, because its kinds of text may be in separate
        // parts.
        let size = self.text.window * self.source.config().dim;
        let step = (self.text.tokens.len() / MEASURED).max(1);
        let pick = |x: &[f32]| -> Vec<f32> {
            x.chunks_exact(size).step_by(step).flatten().copied().collect()
        };
        let (original, made_of_it) = (pick(&self.original), pick(&self.made));
        let head = made.matrix(if made.has_own_head() { Role::Head } else { Role::Embed }, 0)?;
        let ends =
            survey::Ends { weights: self.source, device: &*self.device, window: self.text.window };
        ends.divergence(&original, &made_of_it, &head, heard)
    }

    /// Runs both streams to the start of the block that reads the matrix `role`. Returns the step
    /// that reads it, and the current layer.
    fn reach(&mut self, layer: usize, role: Role) -> Result<(usize, &mut Current<'a>)> {
        let steps = self.source.config().steps(layer);
        let step = step_of(&steps, role)?;
        let to = (layer, block_start(&steps, step));
        ensure!(self.at <= to, "{} comes after {:?}", role.short_name(layer), self.at);
        self.run_to(to)?;
        Ok((step, self.current()?))
    }

    fn current(&mut self) -> Result<&mut Current<'a>> {
        if self.current.is_none() {
            let open = || Layer::open(self.source, &self.device, self.text.window, self.at.0);
            self.current = Some(Current { original: open()?, made: open()?, done: Vec::new() });
        }
        self.current.as_mut().context("just made")
    }

    /// Runs both streams through blocks until they reach the layer and step `to`.
    fn run_to(&mut self, to: (usize, usize)) -> Result<()> {
        while self.at < to {
            self.current()?;
            let Some(current) = &self.current else { break };
            let (layer, start) = self.at;
            let end = block_end(&current.original.steps, start);
            let dim = self.source.config().dim;
            for batch in self.text.batches() {
                let part = batch.start * dim..batch.end * dim;
                current.original.run(start..end, &mut self.original[part.clone()])?;
                current.made.run(start..end, &mut self.made[part])?;
            }
            self.at = (layer, end);
            if end == current.original.steps.len() {
                (self.at, self.current) = ((layer + 1, 0), None);
            }
        }
        Ok(())
    }

    /// Solves all matrices that read the same input as `role`, except those that are done.
    fn solve_with_siblings(&mut self, role: Role, layer: usize) -> Result<()> {
        let (step, _) = self.reach(layer, role)?;
        let Some(Current { original, made, done }) = &self.current else { return Ok(()) };
        if let (Some(spec), true) = (self.source.config().experts, role.is_of_experts()) {
            let Some(format) = self.formats.get(&(role, layer)) else { return Ok(()) };
            let job = ExpertJob {
                original: (original, &self.original),
                made: (made, &self.made),
                text: &self.text,
                spec,
                device: &*self.device,
            };
            let (solved, notes) = job.solve(role, *format)?;
            let name = role.short_name(layer);
            self.notes.extend(notes.into_iter().map(|note| format!("{name}: {note}")));
            self.waiting.insert(role, solved);
            return Ok(());
        }
        let dim = self.source.config().dim;
        let format = |role: Role| Some((role, *self.formats.get(&(role, layer))?));
        let same_input = original.steps[step].matrices().into_iter().map(|(role, _)| role);
        let open = same_input.filter(|role| !done.contains(role)).filter_map(format);
        let jobs: Vec<(Role, Format)> = open.filter(|(_, f)| f.code.is_integer()).collect();
        let Some(&(first, _)) = jobs.first() else { return Ok(()) };
        let cols = original.matrix(first).cols;
        let mut inputs = Inputs::new(cols, true);
        for batch in self.text.batches() {
            let part = batch.start * dim..batch.end * dim;
            let source = original.input(step, &mut self.original[part.clone()])?;
            let input = made.input(step, &mut self.made[part])?;
            inputs.add(&*self.device, Some(&source), &input, self.text.window)?;
        }
        let mut inputs = Some(inputs);
        for transformed in [false, true] {
            let here: Vec<_> =
                jobs.iter().filter(|(_, format)| format.hadamard == transformed).collect();
            let others_follow = !transformed && jobs.iter().any(|(_, format)| format.hadamard);
            let taken = match (here.is_empty(), others_follow) {
                (true, _) => None,
                (false, true) => inputs.clone(),
                (false, false) => inputs.take(),
            };
            let Some(taken) = taken else { continue };
            let (factors, note) = taken.factor(&*self.device, transformed)?;
            self.notes.extend(note.map(|n| format!("input of {}: {n}", first.short_name(layer))));
            // All matrices are solved at the same time, because a GPU is used better with more
            // rows.
            let solved: Result<Vec<(Role, Solved)>> = here
                .into_par_iter()
                .map(|(role, format)| {
                    let matrix = original.matrix(*role);
                    let mut w = matrix.dequantize();
                    if transformed {
                        w.par_chunks_mut(cols).for_each(hadamard::transform);
                    }
                    let device = &*self.device;
                    let solved =
                        solve_matrix(device, *format, matrix.rows, cols, w, &factors, true)?;
                    Ok((*role, solved))
                })
                .collect();
            self.waiting.extend(solved?);
        }
        Ok(())
    }
}

/// Returns the embeddings of `tokens`, which are the first residual stream: `[tokens, dim]`.
fn embed(config: &Config, table: &Matrix<'_>, tokens: &[Token]) -> Vec<f32> {
    let mut x = vec![0.0; tokens.len() * config.dim];
    x.par_chunks_mut(config.dim).zip(tokens).for_each(|(row, token)| {
        table.dequantize_row(*token as usize, row);
        row.iter_mut().for_each(|v| *v *= config.embed_scale);
    });
    x
}
