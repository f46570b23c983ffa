//! One layer over many windows of text at once, in f32, cut open where the input of a linear layer
//! appears.
//!
//! Weights stay as they are stored and are decoded some rows at a time, so that a layer of 27B
//! costs no memory of its own.

use super::rows;
use crate::models::{Angles, Config, Role, Weights};
use crate::quant::ldlq::linalg::{View, multiply};
use crate::tensor::Matrix;
use anyhow::Result;
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// Rows of a matrix that are decoded at once.
const DECODE: usize = 1024;
/// Values that one thread gates at once.
const ROW: usize = 4096;

/// Linear layers that share an input, in the order of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Qkv,
    O,
    GateUp,
    Down,
}

impl Stage {
    pub const ALL: [Stage; 4] = [Stage::Qkv, Stage::O, Stage::GateUp, Stage::Down];

    /// The stage whose input a matrix reads; `None` for tables.
    pub fn of(role: Role) -> Option<Stage> {
        Stage::ALL.into_iter().find(|stage| stage.roles().contains(&role))
    }

    pub fn roles(self) -> &'static [Role] {
        match self {
            Stage::Qkv => &[Role::Q, Role::K, Role::V],
            Stage::O => &[Role::O],
            Stage::GateUp => &[Role::Gate, Role::Up],
            Stage::Down => &[Role::Down],
        }
    }
}

/// What all layers of a model and all windows share.
#[derive(Clone)]
pub struct Shape {
    pub config: Config,
    /// Tokens of a window.
    pub window: usize,
    angles: Arc<[Vec<f32>; 2]>, // sliding-window layers, global ones: [window, head_dim], cosines then sines
}

impl Shape {
    pub fn new(config: &Config, window: usize) -> Shape {
        let table = |rope| {
            let (angles, mut out) = (Angles::new(rope, config.head_dim), Vec::new());
            (0..window).for_each(|position| angles.push(position, &mut out));
            out
        };
        Shape {
            config: config.clone(),
            window,
            angles: Arc::new([table(config.rope_local), table(config.rope_global)]),
        }
    }
}

/// A layer's weights: those of the source, or what they became.
pub struct Layer<'a> {
    shape: Shape,
    index: usize,
    matrices: HashMap<Role, Matrix<'a>>,
    norms: HashMap<Role, Vec<f32>>, // the stored weight plus 1
}

impl<'a> Layer<'a> {
    /// All of a layer as the source has it.
    pub fn open(weights: &'a Weights, shape: &Shape, index: usize) -> Result<Layer<'a>> {
        let mut layer =
            Layer { shape: shape.clone(), index, matrices: HashMap::new(), norms: HashMap::new() };
        for role in Role::LAYER {
            if role.is_matrix() {
                layer.matrices.insert(role, weights.matrix(role, index)?);
            } else {
                let norm = weights.vector(role, index)?.iter().map(|w| 1.0 + w).collect();
                layer.norms.insert(role, norm);
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

    /// Input of a stage, from the residual stream `x` `[tokens, dim]`: before the layer for the
    /// first two stages, between attention and feed-forward for the others.
    pub fn input(&self, stage: Stage, x: &[f32]) -> Vec<f32> {
        match stage {
            Stage::Qkv => self.norm(Role::InputNorm, x),
            Stage::O => self.attended(&self.norm(Role::InputNorm, x)),
            Stage::GateUp => self.norm(Role::PreFfnNorm, x),
            Stage::Down => {
                let input = self.norm(Role::PreFfnNorm, x);
                let (mut gate, up) =
                    (self.linear(Role::Gate, &input), self.linear(Role::Up, &input));
                gate.par_chunks_mut(ROW)
                    .zip(up.par_chunks(ROW))
                    .for_each(|(gate, up)| rows::gate(gate, up));
                gate
            }
        }
    }

    /// Adds a block's output to the residual stream: attention's from the input of `O`, the
    /// feed-forward's from that of `Down`.
    pub fn add(&self, stage: Stage, input: &[f32], x: &mut [f32]) {
        let (role, norm) = match stage {
            Stage::Qkv | Stage::O => (Role::O, Role::PostAttnNorm),
            Stage::GateUp | Stage::Down => (Role::Down, Role::PostFfnNorm),
        };
        let block = self.norm(norm, &self.linear(role, input));
        x.par_iter_mut().zip(&block).for_each(|(x, b)| *x += b);
    }

    /// Runs the residual stream through the whole layer.
    pub fn forward(&self, x: &mut [f32]) {
        self.add(Stage::O, &self.input(Stage::O, x), x);
        self.add(Stage::Down, &self.input(Stage::Down, x), x);
    }

    fn norm(&self, role: Role, x: &[f32]) -> Vec<f32> {
        norm_rows(x, &self.norms[&role], self.shape.config.eps)
    }

    fn linear(&self, role: Role, x: &[f32]) -> Vec<f32> {
        linear(x, &self.matrices[&role])
    }

    /// `[tokens, dim]` -> what the heads gather, `[tokens, n_heads * head_dim]`; each window by
    /// itself.
    fn attended(&self, normed: &[f32]) -> Vec<f32> {
        let Config { n_heads, n_kv_heads, head_dim, .. } = self.shape.config;
        let (mut q, mut k) = (self.linear(Role::Q, normed), self.linear(Role::K, normed));
        let v = self.linear(Role::V, normed);
        self.rotate(&mut q, n_heads, Role::QNorm);
        self.rotate(&mut k, n_kv_heads, Role::KNorm);
        let (q_cols, kv_cols) = (n_heads * head_dim, n_kv_heads * head_dim);
        let len = self.shape.window;
        let mut out = vec![0.0; q.len()];
        out.par_chunks_mut(len * q_cols).enumerate().for_each(|(window, out)| {
            let rows = window * len..(window + 1) * len;
            let (q, k, v) = (View::of(&q, q_cols), View::of(&k, kv_cols), View::of(&v, kv_cols));
            for head in 0..n_heads {
                let kv_head = head / (n_heads / n_kv_heads);
                let (cols, kv) = (head * head_dim, kv_head * head_dim..(kv_head + 1) * head_dim);
                let q = q.part(rows.clone(), cols..cols + head_dim);
                let mut scores = vec![0.0; len * len];
                let scale = self.shape.config.query_scale;
                multiply(
                    &mut scores,
                    len,
                    0.0,
                    scale,
                    q,
                    k.part(rows.clone(), kv.clone()).transposed(),
                );
                self.softmax(&mut scores);
                multiply(
                    &mut out[cols..],
                    q_cols,
                    0.0,
                    1.0,
                    View::of(&scores, len),
                    v.part(rows.clone(), kv),
                );
            }
        });
        out
    }

    /// Weights of the positions that each row sees; 0 for the others.
    fn softmax(&self, scores: &mut [f32]) {
        let len = self.shape.window;
        let config = &self.shape.config;
        for (row, scores) in scores.chunks_exact_mut(len).enumerate() {
            let first = if config.is_global(self.index) {
                0
            } else {
                (row + 1).saturating_sub(config.window)
            };
            rows::softmax(&mut scores[first..=row]);
            scores[..first].fill(0.0);
            scores[row + 1..].fill(0.0);
        }
    }

    /// Norms each head and turns it by its position.
    fn rotate(&self, x: &mut [f32], heads: usize, norm: Role) {
        let (config, norm) = (&self.shape.config, &self.norms[&norm]);
        let (dim, half) = (config.head_dim, config.head_dim / 2);
        let angles = &self.shape.angles[config.is_global(self.index) as usize];
        x.par_chunks_mut(heads * dim).enumerate().for_each(|(token, row)| {
            let (cos, sin) = angles[token % self.shape.window * dim..][..dim].split_at(half);
            for head in row.chunks_exact_mut(dim) {
                rows::norm(head, norm, config.eps);
                for i in 0..half {
                    let (a, b) = (head[i], head[i + half]);
                    head[i] = a * cos[i] - b * sin[i];
                    head[i + half] = b * cos[i] + a * sin[i];
                }
            }
        });
    }
}

/// RMSNorm of each row; `weight` is the stored weight plus 1.
pub fn norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = x.to_vec();
    out.par_chunks_mut(weight.len()).for_each(|row| rows::norm(row, weight, eps));
    out
}

/// `x [tokens, cols]` times the transpose of `matrix [rows, cols]`.
pub fn linear(x: &[f32], matrix: &Matrix<'_>) -> Vec<f32> {
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
        multiply(
            &mut out[start..],
            rows,
            0.0,
            1.0,
            View::of(x, cols),
            View::of(decoded, cols).transposed(),
        );
    }
    out
}
