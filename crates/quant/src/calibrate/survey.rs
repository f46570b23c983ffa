//! Sensitivity of a model's predictions to noise in each of its matrices.

use super::layer::{Layer, linear, linear_back, norm_rows, norm_rows_back};
use super::{CalibrationText, embed};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::product::{View, multiply};
use gemma_base::tensor::{Matrix, math};
use gemma_model::models::{Role, Weights};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of logits that are compared at once.
const LOGITS: usize = 1 << 30;

/// Effect of a matrix's noise on the model's predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sensitivity {
    pub role: Role,
    pub layer: usize,
    /// Mean KL divergence in nats per unit of relative squared error of the weights.
    pub divergence: f64,
}

/// Measures the sensitivity of each matrix by one pass forward and one backward.
///
/// To second order, noise costs half of its variance times the Fisher information of the weights
/// (Kullback-Leibler divergence has no slope at zero). The Fisher information of a window is the
/// expected square of the gradient of its tokens' log-likelihood, if the tokens are sampled from
/// the model's own predictions: tokens are then independent, with gradients of mean zero. Noise
/// has the same share of each row's mean square.
///
/// After each layer of each pass, `heard` is called with the finished share, from 0 to 1.
pub fn survey(
    weights: &Weights,
    device: &Arc<dyn CodingDevice>,
    text: &CalibrationText,
    seed: u64,
    heard: &mut dyn FnMut(f64) -> Result<()>,
) -> Result<Vec<Sensitivity>> {
    let (config, window) = (weights.config(), text.window);
    if config.experts.is_some() {
        let what = "the sensitivity of a mixture of experts is not measured";
        let help = "name a recipe that has no size, or quantise without --calibrate";
        return Err(Fault::usage(what).help(help).into());
    }
    let layers = config.layers.len();
    let table = weights.matrix(Role::Embed, 0)?;
    let mut x = embed(config, &table, &text.tokens);
    let mut before = Vec::new();
    for index in 0..layers {
        before.push(x.clone());
        Layer::open(weights, device, window, index)?.forward(&mut x)?;
        heard((index + 1) as f64 / (3 * layers) as f64)?;
    }
    let ends = Ends { weights, device: &**device, window };
    let (mut d, of_head) = ends.backward(&x, seed)?;
    let mut sums = Vec::new(); // from the last layer to the first
    for (index, x) in before.into_iter().enumerate().rev() {
        let layer = Layer::open(weights, device, window, index)?;
        let mut own = HashMap::new();
        layer.backward(&x, &mut d, &mut |role, matrix, input, d| {
            own.insert(role, information(matrix, input, d, window));
            Ok(())
        })?;
        let roles = layer.roles().into_iter().rev();
        sums.extend(roles.filter_map(|role| Some((role, index, own.remove(&role)?))));
        heard((layers + 2 * (layers - index)) as f64 / (3 * layers) as f64)?;
    }
    let mut of_lookup = 0.0;
    for (d, tokens) in d.chunks(window * config.dim).zip(text.tokens.chunks(window)) {
        let mut rows: HashMap<u32, Vec<f32>> = HashMap::new();
        for (d, token) in d.chunks_exact(config.dim).zip(tokens) {
            let row = rows.entry(*token).or_insert_with(|| vec![0.0; config.dim]);
            row.iter_mut().zip(d).for_each(|(row, d)| *row += config.embed_scale * d);
        }
        let mut tokens: Vec<u32> = rows.keys().copied().collect();
        tokens.sort_unstable();
        for token in tokens {
            let mut row = vec![0.0; config.dim];
            table.dequantize_row(token as usize, &mut row);
            of_lookup += mean_square(&row) as f64 * math::sum_squares(&rows[&token]) as f64;
        }
    }
    // A shared table has two gradients. The product of the two is neglected.
    match weights.has_own_head() {
        true => sums.insert(0, (Role::Head, 0, of_head)),
        false => of_lookup += of_head,
    }
    sums.push((Role::Embed, 0, of_lookup));
    let tokens = (text.tokens.len() - text.tokens.len() / window) as f64;
    let found = sums.into_iter().rev();
    Ok(found
        .map(|(role, layer, sum)| Sensitivity { role, layer, divergence: sum / 2.0 / tokens })
        .collect())
}

fn mean_square(row: &[f32]) -> f32 {
    math::sum_squares(row) / row.len() as f32
}

/// Returns the squared gradients of a matrix times the mean square of its rows, summed over all
/// windows. The gradient of a window is the sum over its tokens of `d x^T`, so that its square is a
/// sum over pairs of tokens of `(d . d') (x . x')`.
fn information(matrix: &Matrix<'_>, x: &[f32], d: &[f32], window: usize) -> f64 {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let mut scales = vec![0f32; rows];
    scales.par_iter_mut().enumerate().for_each_init(
        || vec![0.0; cols],
        |values, (row, scale)| {
            matrix.dequantize_row(row, values);
            *scale = mean_square(values).sqrt();
        },
    );
    let mut sum = 0.0;
    for (x, d) in x.chunks(window * cols).zip(d.chunks(window * rows)) {
        let mut d = d.to_vec();
        d.par_chunks_mut(rows).for_each(|d| d.iter_mut().zip(&scales).for_each(|(d, s)| *d *= s));
        let pairs = |values: &[f32], width: usize| {
            let view = View::of(values, width);
            let mut out = vec![0.0; view.rows * view.rows];
            multiply(&mut out, view.rows, 0.0, 1.0, view, view.transposed());
            out
        };
        let products = pairs(x, cols).into_iter().zip(pairs(&d, rows));
        sum += products.map(|(x, d)| x as f64 * d as f64).sum::<f64>();
    }
    sum.max(0.0)
}

/// Returns the input of the head: `x` through all layers and the last norm.
pub fn final_hidden(
    weights: &Weights,
    device: &Arc<dyn CodingDevice>,
    text: &CalibrationText,
    mut x: Vec<f32>,
) -> Result<Vec<f32>> {
    let dim = weights.config().dim;
    for index in 0..weights.config().layers.len() {
        let layer = Layer::open(weights, device, text.window, index)?;
        for batch in text.batches() {
            layer.forward(&mut x[batch.start * dim..batch.end * dim])?;
        }
    }
    Ok(norm_rows(&x, &weights.vector(Role::FinalNorm, 0)?, weights.config().eps))
}

/// Replaces the logits of a row by the gradient of the log-likelihood of a sampled token. `drawn`,
/// from 0 to 1, selects the token. `cap` is the limit of the logits.
fn likelihood_back(row: &mut [f32], cap: Option<f32>, drawn: f64) {
    soft_cap(row, cap);
    let whole = math::log_sum_exp(row);
    let slope = |logit: f32| cap.map_or(1.0, |cap| 1.0 - (logit / cap) * (logit / cap));
    let (mut left, mut chosen, mut own_slope) = (drawn, row.len() - 1, 1.0);
    for (token, logit) in row.iter_mut().enumerate() {
        let chance = (*logit as f64 - whole).exp();
        if left >= 0.0 && left < chance {
            chosen = token;
        }
        left -= chance;
        let slope = slope(*logit);
        if token == chosen {
            own_slope = slope;
        }
        *logit = -chance as f32 * slope;
    }
    row[chosen] += own_slope;
}

fn soft_cap(row: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        row.iter_mut().for_each(|logit| *logit = math::soft_cap(*logit, cap));
    }
}

/// The end of a model: the last norm and the head.
pub struct Ends<'a> {
    pub weights: &'a Weights,
    pub device: &'a dyn CodingDevice,
    pub window: usize,
}

impl Ends<'_> {
    /// Samples the next token of each position, from the residual streams `x` after the last layer.
    /// Returns the gradient of their log-likelihood at `x`, and the squared gradients of the head
    /// times the mean square of its rows. The first position of each window is skipped.
    fn backward(&self, x: &[f32], seed: u64) -> Result<(Vec<f32>, f64)> {
        let config = self.weights.config();
        let (head, norm) = (self.head()?, self.weights.vector(Role::FinalNorm, 0)?);
        let hidden = norm_rows(x, &norm, config.eps);
        let mut random = SmallRng::seed_from_u64(seed);
        let (mut d_hidden, mut information) = (vec![0.0; x.len()], 0.0);
        let rows = self.rows_at_once();
        for start in (0..x.len() / config.dim).step_by(rows) {
            let part = start * config.dim..x.len().min((start + rows) * config.dim);
            let hidden = &hidden[part.clone()];
            let mut d = linear(self.device, hidden, &head)?;
            let drawn: Vec<f64> = d.chunks(config.vocab).map(|_| random.random()).collect();
            d.par_chunks_mut(config.vocab).zip(drawn).enumerate().for_each(|(row, (d, drawn))| {
                match self.counts(start + row) {
                    true => likelihood_back(d, config.logit_cap, drawn),
                    false => d.fill(0.0),
                }
            });
            let mut squares = vec![0f32; config.vocab]; // mean square of each row of the head
            let mut seen = |row: usize, values: &[f32]| squares[row] = mean_square(values);
            linear_back(self.device, &d, &head, &mut d_hidden[part], &mut seen)?;
            let of_rows = d.par_chunks(config.vocab).zip(hidden.par_chunks(config.dim));
            let each: Vec<f64> = of_rows
                .map(|(d, hidden)| {
                    let of_head: f32 = d.iter().zip(&squares).map(|(d, s)| d * d * s).sum();
                    of_head as f64 * math::sum_squares(hidden) as f64
                })
                .collect();
            information += each.iter().sum::<f64>();
        }
        Ok((norm_rows_back(x, &norm, config.eps, &d_hidden), information))
    }

    fn head(&self) -> Result<Matrix<'_>> {
        let own = self.weights.has_own_head();
        self.weights.matrix(if own { Role::Head } else { Role::Embed }, 0)
    }

    /// Returns the number of rows processed at once. Two sets of their logits are in memory.
    fn rows_at_once(&self) -> usize {
        (LOGITS / 8 / self.weights.config().vocab).next_power_of_two().clamp(16, 1024)
    }

    /// Returns whether a row is measured. The first row of a window predicts from BOS alone and is
    /// not.
    fn counts(&self, row: usize) -> bool {
        !row.is_multiple_of(self.window)
    }

    /// Returns the mean KL divergence of the copy's predictions from the source's, in nats.
    ///
    /// `base` and `made` are the residual streams of the source and of the copy after the last
    /// layer, `[tokens, dim]`. `own` is the copy's head. An error returned by `heard` ends the
    /// computation.
    pub fn divergence(
        &self,
        base: &[f32],
        made: &[f32],
        own: &Matrix<'_>,
        heard: &mut dyn FnMut() -> Result<()>,
    ) -> Result<f64> {
        let config = self.weights.config();
        let head = self.head()?;
        let norm = self.weights.vector(Role::FinalNorm, 0)?;
        let logits = |x: &[f32], head: &Matrix<'_>| {
            let mut out = linear(self.device, &norm_rows(x, &norm, config.eps), head)?;
            out.par_chunks_mut(config.vocab).for_each(|row| soft_cap(row, config.logit_cap));
            Ok::<_, anyhow::Error>(out)
        };
        let rows = self.rows_at_once();
        let (mut sum, mut count) = (0.0, 0);
        for start in (0..base.len() / config.dim).step_by(rows) {
            heard()?;
            let part = start * config.dim..base.len().min((start + rows) * config.dim);
            let want = logits(&base[part.clone()], &head)?;
            heard()?;
            let got = logits(&made[part], own)?;
            let pairs = want.par_chunks(config.vocab).zip(got.par_chunks(config.vocab));
            let each: Vec<f64> = pairs
                .enumerate()
                .filter(|(row, _)| self.counts(start + row))
                .map(|(_, (p, q))| math::kl_divergence(p, q))
                .collect();
            sum += each.iter().sum::<f64>();
            count += each.len();
        }
        Ok(sum / count.max(1) as f64)
    }
}
