//! Quantising with text: two copies of it run through the model layer by layer, one through the source's weights and one through
//! those made so far. Each linear layer is solved for the inputs it will really meet, towards the outputs it should give.

mod layer;
mod rows;
mod survey;

pub use layer::Stage;
pub use survey::{Sensitivity, survey};

use super::solve::{Inputs, Solved, solve_matrix};
use crate::gemma::{Config, Role, Weights};
use crate::tensor::{Format, Matrix, Token, hadamard};
use anyhow::{Context, Result, ensure};
use layer::{Layer, Shape};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;

/// Tokens that run through a layer at once: bounds the memory of what lies between two stages.
const BATCH: usize = 2048;

/// Weight of a table's lookup errors beside its errors as the output head, as a share of the mean second moment.
const LOOKUP: f32 = 0.3;

/// The text, cut into windows of equal length that each begin with BOS.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    pub tokens: Vec<Token>,
    pub window: usize,
}

impl Text {
    /// Cuts a long run of tokens into `windows` pieces spread evenly over it, or as many as it gives.
    pub fn cut(run: &[Token], bos: Token, window: usize, windows: usize) -> Result<Text> {
        let body = window.saturating_sub(1).max(1);
        let pieces = run.len() / body;
        ensure!(pieces > 0, "the calibration text has {} tokens, at least {body} are needed", run.len());
        let n = windows.min(pieces);
        let start = |i: usize| i * (run.len() - body) / n.max(2).saturating_sub(1).max(1);
        let spread = (0..n).map(|i| if n == pieces { i * body } else { start(i) });
        let tokens = spread.flat_map(|at| std::iter::once(bos).chain(run[at..at + body].iter().copied()));
        Ok(Text { tokens: tokens.collect(), window: body + 1 })
    }

    /// Runs of whole windows of about [`BATCH`] tokens, as token ranges.
    fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (step, len) = ((BATCH / self.window).max(1) * self.window, self.tokens.len());
        (0..len).step_by(step).map(move |start| start..len.min(start + step))
    }
}

/// Solves a model's matrices in the order of the forward pass.
pub struct Calibrator<'a> {
    source: &'a Weights,
    text: Text,
    shape: Shape,
    formats: HashMap<(Role, usize), Format>,
    /// Residual streams `[tokens, dim]`: through the source, and through what was made of it.
    original: Vec<f32>,
    made: Vec<f32>,
    /// The layer under way.
    current: Option<Current<'a>>,
    /// Solved with the others of their stage, not yet asked for.
    waiting: HashMap<Role, Solved>,
    /// Second moments of what the head reads, from a first pass through the source.
    head: Option<Vec<super::solve::Factor>>,
    notes: Vec<String>,
}

struct Current<'a> {
    index: usize,
    original: Layer<'a>,
    made: Layer<'a>,
    done: Vec<Role>,
}

impl<'a> Calibrator<'a> {
    /// `formats` says what each matrix becomes; matrices that keep floats may be left out.
    pub fn new(source: &'a Weights, text: Text, formats: HashMap<(Role, usize), Format>) -> Result<Calibrator<'a>> {
        let shape = Shape::new(source.config(), text.window);
        let original = embed(source.config(), &source.matrix(Role::Embed, 0)?, &text.tokens);
        Ok(Calibrator {
            source,
            text,
            shape,
            formats,
            original,
            made: Vec::new(),
            current: None,
            waiting: HashMap::new(),
            head: None,
            notes: Vec::new(),
        })
    }

    /// Lines for the log, taken.
    pub fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Codes rows of a table that serves as the output head, `values` being `[rows, dim]` as the source has them.
    pub fn table_rows(&mut self, role: Role, format: Format, mut values: Vec<f32>) -> Result<Solved> {
        let dim = self.shape.config.dim;
        if self.head.is_none() {
            let hidden = survey::final_hidden(self.source, &self.shape, &self.text, self.original.clone())?;
            let mut inputs = Inputs::new(dim, false);
            inputs.add(None, &hidden, self.text.window);
            let lookups = role == Role::Embed;
            if lookups {
                inputs.add_floor(LOOKUP);
            }
            let (factors, note) = inputs.factor(format.hadamard);
            self.notes.extend(note.map(|n| format!("output head: {n}")));
            self.head = Some(factors);
        }
        if format.hadamard {
            values.par_chunks_mut(dim).for_each(hadamard::transform);
        }
        solve_matrix(format, values.len() / dim, dim, values, self.head.as_deref().unwrap_or_default())
    }

    /// Codes one of a layer's matrices. Asked in the order of the forward pass, each answer handed back to [`Self::done`].
    pub fn matrix(&mut self, role: Role, index: usize) -> Result<Solved> {
        if !self.waiting.contains_key(&role) {
            let stage = Stage::of(role).context("tables are coded by rows")?;
            self.solve_stage(stage, index)?;
        }
        self.waiting.remove(&role).with_context(|| format!("{role:?} of layer {index} has no integer format"))
    }

    /// What a matrix became, by this run or an earlier one; floats as they are, too.
    pub fn done(&mut self, role: Role, index: usize, matrix: Matrix<'static>) -> Result<()> {
        let Some(stage) = Stage::of(role) else {
            if role == Role::Embed {
                self.made = embed(&self.shape.config, &matrix, &self.text.tokens);
                self.head = None;
            }
            return Ok(());
        };
        let (text, dim) = (self.text.clone(), self.shape.config.dim);
        let current = self.at(index)?;
        current.made.replace(role, matrix);
        current.done.push(role);
        let ends_block = matches!(stage, Stage::O | Stage::Down);
        if !ends_block {
            return Ok(());
        }
        let Some(Current { original, made, .. }) = &self.current else { return Ok(()) };
        for batch in text.batches() {
            let part = batch.start * dim..batch.end * dim;
            for (layer, x) in [(original, &mut self.original), (made, &mut self.made)] {
                let x = &mut x[part.clone()];
                layer.add(stage, &layer.input(stage, x), x);
            }
        }
        if stage == Stage::Down {
            self.current = None;
        }
        Ok(())
    }

    /// Mean KL divergence of the made model's next tokens from the source's, over the calibration text, in nats.
    pub fn divergence(&self, made_head: &Matrix<'_>, made_norm: &[f32]) -> Result<f64> {
        survey::divergence(self.source, &self.text, &self.original, &self.made, made_head, made_norm)
    }

    fn at(&mut self, index: usize) -> Result<&mut Current<'a>> {
        if self.current.is_none() {
            ensure!(self.made.len() == self.original.len(), "the embedding table comes first");
            let open = || Layer::open(self.source, &self.shape, index);
            self.current = Some(Current { index, original: open()?, made: open()?, done: Vec::new() });
        }
        let current = self.current.as_mut().context("just made")?;
        ensure!(current.index == index, "layer {index} asked for while layer {} is under way", current.index);
        Ok(current)
    }

    /// All matrices of a stage that are not done yet.
    fn solve_stage(&mut self, stage: Stage, index: usize) -> Result<()> {
        self.at(index)?;
        let Some(Current { original, made, done, .. }) = &self.current else { unreachable!("made above") };
        let dim = self.shape.config.dim;
        let jobs: Vec<(Role, Format)> = stage
            .roles()
            .iter()
            .filter(|role| !done.contains(role))
            .filter_map(|role| Some((*role, *self.formats.get(&(*role, index))?)))
            .filter(|(_, format)| format.code.is_integer())
            .collect();
        let Some(&(first, _)) = jobs.first() else { return Ok(()) };
        let cols = original.matrix(first).cols;
        let mut inputs = Inputs::new(cols, true);
        for batch in self.text.batches() {
            let part = batch.start * dim..batch.end * dim;
            let source = original.input(stage, &self.original[part.clone()]);
            inputs.add(Some(&source), &made.input(stage, &self.made[part]), self.text.window);
        }
        let mut inputs = Some(inputs);
        for transformed in [false, true] {
            let here: Vec<_> = jobs.iter().filter(|(_, format)| format.hadamard == transformed).collect();
            let others_follow = !transformed && jobs.iter().any(|(_, format)| format.hadamard);
            let taken = if here.is_empty() {
                None
            } else if others_follow {
                inputs.clone()
            } else {
                inputs.take()
            };
            let Some(taken) = taken else { continue };
            let (factors, note) = taken.factor(transformed);
            self.notes.extend(note.map(|n| format!("layer {index}, input of {stage:?}: {n}")));
            for (role, format) in here {
                let matrix = original.matrix(*role);
                let mut w = matrix.dequantize();
                if transformed {
                    w.par_chunks_mut(cols).for_each(hadamard::transform);
                }
                self.waiting.insert(*role, solve_matrix(*format, matrix.rows, cols, w, &factors)?);
            }
        }
        Ok(())
    }
}

/// Residual stream at the bottom: `[tokens, dim]`.
fn embed(config: &Config, table: &Matrix<'_>, tokens: &[Token]) -> Vec<f32> {
    let mut x = vec![0.0; tokens.len() * config.dim];
    x.par_chunks_mut(config.dim).zip(tokens).for_each(|(row, token)| {
        table.dequantize_row(*token as usize, row);
        row.iter_mut().for_each(|v| *v *= config.embed_scale);
    });
    x
}
