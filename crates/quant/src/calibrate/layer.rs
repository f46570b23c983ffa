//! One layer over many windows of text at once. Its steps run in f32, and any range of them can be
//! run.
//!
//! Weights stay in their stored format and are decoded some rows at a time. A layer of 27B
//! therefore needs no second copy in f32.

mod backward;
mod mixture;

pub use backward::{linear_back, norm_rows_back};
pub use mixture::picked;

use super::rows;
use anyhow::{Context, Result, bail};
use gemma_base::tensor::Matrix;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::product::{View, multiply};
use gemma_model::models::{Angles, KeyNorms, LayerSpec, Role, Step, TensorSpec, Weights};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Rows of a matrix that are decoded at once.
const DECODE: usize = 4096;
/// Values to which one thread applies the gate at once.
const ROW: usize = 4096;

/// Outputs of one step, which are the inputs of the next: f32 `[tokens, width]` each.
type StepOutputs = Vec<Vec<f32>>;

/// Returns the step of a layer that reads a matrix.
pub fn step_of(steps: &[Step], role: Role) -> Result<usize> {
    let reads = |step: &Step| match step {
        Step::Mixture(_) => role.is_of_experts() || role == Role::Router,
        _ => step.matrices().iter().any(|(r, _)| *r == role),
    };
    steps.iter().position(reads).context("tables are coded by rows")
}

/// Returns the first step of the block that contains `step`. A block ends with a step that adds to
/// the residual stream.
pub fn block_start(steps: &[Step], step: usize) -> usize {
    let ends = |step: &Step| matches!(step, Step::Add { .. });
    steps[..step].iter().rposition(ends).map_or(0, |end| end + 1)
}

/// Returns the index after the last step of the block that begins at `start`.
pub fn block_end(steps: &[Step], start: usize) -> usize {
    let ends = |step: &Step| matches!(step, Step::Add { .. });
    steps[start..].iter().position(ends).map_or(steps.len(), |end| start + end + 1)
}

/// A layer with the weights of the source or of the quantised copy.
pub struct Layer<'a> {
    pub steps: Vec<Step>,
    device: Arc<dyn CodingDevice>,
    spec: LayerSpec,
    eps: f32,
    /// Tokens of a window.
    window: usize,
    /// Cosines then sines of each position of a window, `[window, head_dim]`.
    angles: Vec<f32>,
    matrices: HashMap<Role, Matrix<'a>>,
    /// Weights of norms as stored, and single numbers.
    vectors: HashMap<Role, Vec<f32>>,
}

impl<'a> Layer<'a> {
    /// Opens a layer of the source, for windows of `window` tokens.
    pub fn open(
        weights: &'a Weights,
        device: &Arc<dyn CodingDevice>,
        window: usize,
        index: usize,
    ) -> Result<Layer<'a>> {
        let config = weights.config();
        let mut layer = Layer {
            steps: config.steps(index),
            device: device.clone(),
            spec: config.layers[index],
            eps: config.eps,
            window,
            angles: angles(&config.layers[index], window),
            matrices: HashMap::new(),
            vectors: HashMap::new(),
        };
        let is_own = |t: &&TensorSpec| t.role.is_layer() && t.layer == index;
        for role in weights.tensors().iter().filter(is_own).map(|t| t.role) {
            if role.is_matrix() {
                layer.matrices.insert(role, weights.matrix(role, index)?);
            } else {
                layer.vectors.insert(role, weights.vector(role, index)?);
            }
        }
        Ok(layer)
    }

    pub fn replace(&mut self, role: Role, matrix: Matrix<'a>) {
        self.matrices.insert(role, matrix);
    }

    pub fn matrix(&self, role: Role) -> &Matrix<'a> {
        &self.matrices[&role]
    }

    /// Returns the matrices of the layer in the order of its steps.
    pub fn roles(&self) -> Vec<Role> {
        self.steps.iter().flat_map(Step::matrices).map(|(role, _)| role).collect()
    }

    /// Returns the input of a step, from the residual stream `x` `[tokens, dim]` before its block.
    pub fn input(&self, step: usize, x: &mut [f32]) -> Result<Vec<f32>> {
        let mut values = self.run(block_start(&self.steps, step)..step, x)?;
        values.pop().context("no step before a linear layer has an output")
    }

    /// Runs some steps of the layer on the residual stream `x` `[tokens, dim]`. The first of them
    /// must read only the stream. Returns the outputs of the last one.
    pub fn run(&self, steps: Range<usize>, x: &mut [f32]) -> Result<StepOutputs> {
        let mut values = Vec::new();
        for step in &self.steps[steps] {
            values = self.step(step, values, x)?;
        }
        Ok(values)
    }

    /// Runs the residual stream through the whole layer.
    pub fn forward(&self, x: &mut [f32]) -> Result<()> {
        self.run(0..self.steps.len(), x).map(|_| ())
    }

    fn step(&self, step: &Step, mut input: StepOutputs, x: &mut [f32]) -> Result<StepOutputs> {
        Ok(match step {
            Step::Norm(role) => vec![self.norm(*role, x)],
            Step::Linear(_, matrices) => matrices
                .iter()
                .map(|(role, _)| self.linear(*role, &input[0]))
                .collect::<Result<_>>()?,
            Step::Attend { keys: None, .. } => bail!("a layer without keys reads another model's"),
            Step::Attend { q_norm, keys: Some(KeyNorms { k_norm, v_norm }) } => {
                let Ok([mut q, mut k, mut v]) = <[Vec<f32>; 3]>::try_from(input) else {
                    bail!("attention needs three inputs")
                };
                self.rotate(&mut q, self.spec.n_heads, *q_norm);
                self.rotate(&mut k, self.spec.n_kv_heads, *k_norm);
                if *v_norm {
                    v = self.norm_heads(&v);
                }
                vec![self.attend(&q, &k, &v)]
            }
            Step::GateUp { gate, up, .. } => {
                let mut out = self.linear(*gate, &input[0])?;
                let up = self.linear(*up, &input[0])?;
                let pieces = out.par_chunks_mut(ROW).zip(up.par_chunks(ROW));
                pieces.for_each(|(gate, up)| rows::gate(gate, up));
                vec![out]
            }
            Step::Mixture(spec) => vec![self.mixture(*spec, &input[0], x)?],
            Step::Add { norm, scale } => {
                let block = self.norm(*norm, &input.remove(0));
                let scale = scale.map_or(1.0, |role| self.vectors[&role][0]);
                x.par_iter_mut().zip(&block).for_each(|(x, b)| *x = (*x + b) * scale);
                Vec::new()
            }
        })
    }

    fn norm(&self, role: Role, x: &[f32]) -> Vec<f32> {
        norm_rows(x, &self.vectors[&role], self.eps)
    }

    /// RMSNorm of each head without weights.
    fn norm_heads(&self, x: &[f32]) -> Vec<f32> {
        norm_rows(x, &vec![1.0; self.spec.head_dim], self.eps)
    }

    fn linear(&self, role: Role, x: &[f32]) -> Result<Vec<f32>> {
        linear(&*self.device, x, &self.matrices[&role])
    }

    /// Causal attention inside each window. Returns `[tokens, n_heads * head_dim]`.
    fn attend(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let LayerSpec { n_heads, n_kv_heads, head_dim, query_scale, .. } = self.spec;
        let (q_cols, kv_cols) = (self.spec.query_width(), self.spec.kv_width());
        let len = self.window;
        let mut out = vec![0.0; q.len()];
        out.par_chunks_mut(len * q_cols).enumerate().for_each(|(window, out)| {
            let rows = window * len..(window + 1) * len;
            let (q, k, v) = (View::of(q, q_cols), View::of(k, kv_cols), View::of(v, kv_cols));
            for head in 0..n_heads {
                let kv_head = head / (n_heads / n_kv_heads);
                let (cols, kv) = (head * head_dim, kv_head * head_dim..(kv_head + 1) * head_dim);
                let q = q.part(rows.clone(), cols..cols + head_dim);
                let mut scores = vec![0.0; len * len];
                let keys = k.part(rows.clone(), kv.clone()).transposed();
                multiply(&mut scores, len, 0.0, query_scale, q, keys);
                self.softmax(&mut scores);
                let values = v.part(rows.clone(), kv);
                multiply(&mut out[cols..], q_cols, 0.0, 1.0, View::of(&scores, len), values);
            }
        });
        out
    }

    /// Replaces the scores of each row by softmax weights of the positions that it sees, and by 0
    /// elsewhere.
    fn softmax(&self, scores: &mut [f32]) {
        for (row, scores) in scores.chunks_exact_mut(self.window).enumerate() {
            let first = self.spec.window.map_or(0, |window| (row + 1).saturating_sub(window));
            rows::softmax(&mut scores[first..=row]);
            scores[..first].fill(0.0);
            scores[row + 1..].fill(0.0);
        }
    }

    /// Applies the norm and the rotary embedding to each head.
    fn rotate(&self, x: &mut [f32], heads: usize, norm: Role) {
        let (dim, half) = (self.spec.head_dim, self.spec.head_dim / 2);
        let norm = &self.vectors[&norm];
        x.par_chunks_mut(heads * dim).enumerate().for_each(|(token, row)| {
            let (cos, sin) = self.angles[token % self.window * dim..][..dim].split_at(half);
            for head in row.chunks_exact_mut(dim) {
                rows::norm(head, norm, self.eps);
                for i in 0..half {
                    let (a, b) = (head[i], head[i + half]);
                    head[i] = a * cos[i] - b * sin[i];
                    head[i + half] = b * cos[i] + a * sin[i];
                }
            }
        });
    }
}

/// Returns the cosines and sines of each position of a window.
fn angles(spec: &LayerSpec, window: usize) -> Vec<f32> {
    let (angles, mut out) = (Angles::new(spec.rope, spec.head_dim), Vec::new());
    angles.fill(&(0..window as u32).collect::<Vec<_>>(), &mut out);
    out
}

/// RMSNorm of each row.
pub fn norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = x.to_vec();
    out.par_chunks_mut(weight.len()).for_each(|row| rows::norm(row, weight, eps));
    out
}

/// `x [tokens, cols]` times the transpose of `matrix [rows, cols]`.
pub fn linear(device: &dyn CodingDevice, x: &[f32], matrix: &Matrix<'_>) -> Result<Vec<f32>> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let mut out = vec![0.0; x.len() / cols * rows];
    let mut decoded = vec![0.0; DECODE.min(rows) * cols];
    for start in (0..rows).step_by(DECODE) {
        let n = DECODE.min(rows - start);
        let decoded = &mut decoded[..n * cols];
        decoded
            .par_chunks_mut(cols)
            .enumerate()
            .for_each(|(i, row)| matrix.dequantize_row(start + i, row));
        let weights = View::of(decoded, cols).transposed();
        device.multiply(&mut out[start..], rows, 0.0, 1.0, View::of(x, cols), weights)?;
    }
    Ok(out)
}
