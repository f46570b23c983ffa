//! How much the end of the model minds noise in each of its matrices: one pass through the source that carries, beside the text
//! itself, a copy of it for every matrix that was disturbed on the way.

use super::layer::{Layer, Shape, linear, norm_rows};
use super::{Text, embed};
use crate::gemma::{Role, Weights};
use crate::tensor::{Format, Matrix, math};
use anyhow::Result;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

/// Noise of a disturbed matrix, as a share of its rows' root mean square.
const NOISE: f32 = 0.14;
/// Hidden states whose logits are compared at once.
const ROWS: usize = 64;

/// What a matrix's noise does to the model's predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sensitivity {
    pub role: Role,
    pub layer: usize,
    /// Mean KL divergence in nats per unit of relative squared error of the weights.
    pub divergence: f64,
}

/// Disturbs each matrix in turn. `heard` is told the share done after each layer.
pub fn survey(weights: &Weights, text: &Text, seed: u64, heard: &mut dyn FnMut(f64) -> Result<()>) -> Result<Vec<Sensitivity>> {
    let config = weights.config();
    let shape = Shape::new(config, text.window);
    let table = weights.matrix(Role::Embed, 0)?;
    let mut base = embed(config, &table, &text.tokens);
    let noisy = disturbed(&table, seed);
    let mut probes = vec![(Role::Embed, 0, embed(config, &noisy, &text.tokens))];
    for index in 0..config.n_layers {
        let layer = Layer::open(weights, &shape, index)?;
        for (_, _, x) in &mut probes {
            layer.forward(x);
        }
        for role in Role::MATRICES.into_iter().filter(|role| Role::LAYER.contains(role)) {
            let mut noisy = Layer::open(weights, &shape, index)?;
            noisy.replace(role, disturbed(noisy.matrix(role), seed ^ (index as u64) << 8 ^ (role as u64) << 32));
            let mut x = base.clone();
            noisy.forward(&mut x);
            probes.push((role, index, x));
        }
        layer.forward(&mut base);
        heard((index + 1) as f64 / config.n_layers as f64)?;
    }
    let head_role = if weights.has_own_head() { Role::Head } else { Role::Embed };
    let head = weights.matrix(head_role, 0)?;
    let norm = final_norm(weights)?;
    let unit = (NOISE as f64).powi(2);
    let mut out = Vec::new();
    for (role, layer, x) in &probes {
        let own = *role == head_role;
        let divergence = divergence(weights, text, &base, x, if own { &noisy } else { &head }, &norm)?;
        out.push(Sensitivity { role: *role, layer: *layer, divergence: divergence / unit });
    }
    if head_role == Role::Head {
        let divergence = divergence(weights, text, &base, &base, &disturbed(&head, !seed), &norm)?;
        out.push(Sensitivity { role: Role::Head, layer: 0, divergence: divergence / unit });
    }
    Ok(out)
}

/// The matrix with white noise added to it.
fn disturbed(matrix: &Matrix<'_>, seed: u64) -> Matrix<'static> {
    let cols = matrix.cols;
    let mut values = vec![0f32; matrix.rows * cols];
    values.par_chunks_mut(cols).enumerate().for_each(|(row, values)| {
        matrix.dequantize_row(row, values);
        let mean_square = math::sum_squares(values) / cols as f32;
        // Uniform noise of the same variance as Gaussian noise: sums over many columns cannot tell them apart.
        let limit = NOISE * (3.0 * mean_square).sqrt();
        let mut random = SmallRng::seed_from_u64(seed ^ (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        values.iter_mut().for_each(|v| *v += limit * (2.0 * random.random::<f32>() - 1.0));
    });
    let codes: Vec<u8> = bytemuck::cast_slice(&values).to_vec();
    Matrix { format: Format::F32, rows: matrix.rows, cols, codes: codes.into(), scales: Vec::new().into() }
}

/// One added.
fn final_norm(weights: &Weights) -> Result<Vec<f32>> {
    Ok(weights.vector(Role::FinalNorm, 0)?.iter().map(|w| 1.0 + w).collect())
}

/// What the head reads: `x` through all layers and the last norm.
pub fn final_hidden(weights: &Weights, shape: &Shape, text: &Text, mut x: Vec<f32>) -> Result<Vec<f32>> {
    let dim = weights.config().dim;
    for index in 0..weights.config().n_layers {
        let layer = Layer::open(weights, shape, index)?;
        text.batches().for_each(|batch| layer.forward(&mut x[batch.start * dim..batch.end * dim]));
    }
    Ok(norm_rows(&x, &final_norm(weights)?, weights.config().eps))
}

/// Mean KL divergence, in nats, of predictions from `x` (through another head and norm) from those that the source makes
/// from `base`; both are residual streams behind the last layer, `[tokens, dim]`.
pub fn divergence(weights: &Weights, text: &Text, base: &[f32], x: &[f32], head: &Matrix<'_>, norm: &[f32]) -> Result<f64> {
    let config = weights.config();
    let source_head = weights.matrix(if weights.has_own_head() { Role::Head } else { Role::Embed }, 0)?;
    let (source_norm, rows) = (final_norm(weights)?, ROWS * config.dim);
    let (mut sum, mut count) = (0.0, 0usize);
    for (at, (base, x)) in base.chunks(rows).zip(x.chunks(rows)).enumerate() {
        let want = linear(&norm_rows(base, &source_norm, config.eps), &source_head);
        let got = linear(&norm_rows(x, norm, config.eps), head);
        // What follows BOS alone is no text.
        let counts = |row: usize| !(at * ROWS + row).is_multiple_of(text.window);
        let pairs = want.par_chunks(config.vocab).zip(got.par_chunks(config.vocab)).enumerate();
        let each: Vec<f64> = pairs.filter(|(row, _)| counts(*row)).map(|(_, (p, q))| math::kl_divergence(p, q)).collect();
        sum += each.iter().sum::<f64>();
        count += each.len();
    }
    Ok(sum / count.max(1) as f64)
}
