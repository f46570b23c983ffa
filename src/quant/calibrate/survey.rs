//! How much the end of the model minds noise in each of its matrices: one pass through the source
//! that carries, beside the text itself, a copy of it for every matrix that was disturbed on the
//! way.

use super::layer::{Layer, linear, norm_rows, plus_one};
use super::{BATCH, CalibrationText, embed};
use crate::models::{Role, Weights};
use crate::tensor::encode::CodingDevice;
use crate::tensor::{Format, Matrix, math};
use anyhow::Result;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use std::sync::Arc;

/// Noise of a disturbed matrix, as a share of its rows' root mean square.
const NOISE: f32 = 0.14;
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

/// Disturbs each matrix in turn. `heard` is told the share done after each layer.
pub fn survey(
    weights: &Weights,
    device: &Arc<dyn CodingDevice>,
    text: &CalibrationText,
    seed: u64,
    heard: &mut dyn FnMut(f64) -> Result<()>,
) -> Result<Vec<Sensitivity>> {
    let config = weights.config();
    let table = weights.matrix(Role::Embed, 0)?;
    let base = embed(config, &table, &text.tokens);
    let size = base.len();
    let noisy = disturbed(&table, seed);
    // The text itself first, then its copies.
    let mut streams = base;
    streams.extend(embed(config, &noisy, &text.tokens));
    let mut probes = vec![(Role::Embed, 0)];
    for index in 0..config.layers.len() {
        let layer = Layer::open(weights, device, text.window, index)?;
        let roles = layer.roles();
        let mut new = Vec::with_capacity(roles.len() * size);
        for role in &roles {
            let mut noisy = Layer::open(weights, device, text.window, index)?;
            noisy.replace(
                *role,
                disturbed(noisy.matrix(*role), seed ^ (index as u64) << 8 ^ (*role as u64) << 32),
            );
            let mut x = streams[..size].to_vec();
            noisy.forward(&mut x)?;
            new.extend(x);
            probes.push((*role, index));
        }
        let tokens = streams.len() / config.dim;
        let step = (BATCH / text.window).max(1) * text.window;
        for start in (0..tokens).step_by(step) {
            let end = tokens.min(start + step);
            layer.forward(&mut streams[start * config.dim..end * config.dim])?;
        }
        streams.extend(new);
        heard((index + 1) as f64 / config.layers.len() as f64)?;
    }
    let own_head = weights.has_own_head();
    let noisy_head =
        if own_head { disturbed(&weights.matrix(Role::Head, 0)?, !seed) } else { noisy };
    let (base, copies) = streams.split_at(size);
    let mut ends: Vec<(&[f32], Option<&Matrix<'_>>)> =
        copies.chunks_exact(size).map(|x| (x, None)).collect();
    match own_head {
        true => {
            ends.push((base, Some(&noisy_head)));
            probes.push((Role::Head, 0));
        }
        // One table, both where tokens enter and where they leave.
        false => ends[0].1 = Some(&noisy_head),
    }
    let divergences =
        Ends { weights, device: &**device, window: text.window }.divergences(base, &ends)?;
    let unit = (NOISE as f64).powi(2);
    let found = probes.into_iter().zip(divergences);
    Ok(found.map(|((role, layer), d)| Sensitivity { role, layer, divergence: d / unit }).collect())
}

/// The matrix with white noise added to it.
fn disturbed(matrix: &Matrix<'_>, seed: u64) -> Matrix<'static> {
    let cols = matrix.cols;
    let mut values = vec![0f32; matrix.rows * cols];
    values.par_chunks_mut(cols).enumerate().for_each(|(row, values)| {
        matrix.dequantize_row(row, values);
        let mean_square = math::sum_squares(values) / cols as f32;
        // Uniform noise of the same variance as Gaussian noise: sums over many columns cannot tell
        // them apart.
        let limit = NOISE * (3.0 * mean_square).sqrt();
        let mut random =
            SmallRng::seed_from_u64(seed ^ (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        values.iter_mut().for_each(|v| *v += limit * (2.0 * random.random::<f32>() - 1.0));
    });
    let codes: Vec<u8> = bytemuck::cast_slice(&values).to_vec();
    Matrix {
        format: Format::F32,
        rows: matrix.rows,
        cols,
        codes: codes.into(),
        side: Vec::new().into(),
    }
}

/// A norm's stored weight plus 1.
fn final_norm(weights: &Weights) -> Result<Vec<f32>> {
    Ok(plus_one(&weights.vector(Role::FinalNorm, 0)?))
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
    Ok(norm_rows(&x, &final_norm(weights)?, weights.config().eps))
}

/// Where a model ends: the last norm and the head.
pub struct Ends<'a> {
    pub weights: &'a Weights,
    pub device: &'a dyn CodingDevice,
    pub window: usize,
}

impl Ends<'_> {
    /// Mean KL divergence, in nats, of predictions from each of `streams` (through another head,
    /// where one is given) from those that the source makes from `base`; all are residual streams
    /// behind the last layer, `[tokens, dim]`.
    pub fn divergences(
        &self,
        base: &[f32],
        streams: &[(&[f32], Option<&Matrix<'_>>)],
    ) -> Result<Vec<f64>> {
        let config = self.weights.config();
        let head = self
            .weights
            .matrix(if self.weights.has_own_head() { Role::Head } else { Role::Embed }, 0)?;
        let norm = final_norm(self.weights)?;
        let logits = |x: &[f32], head: &Matrix<'_>| {
            linear(self.device, &norm_rows(x, &norm, config.eps), head)
        };
        // Two sets of logits, within the bytes.
        let rows = (LOGITS / 8 / config.vocab).next_power_of_two().clamp(16, 1024);
        let mut sums = vec![0.0; streams.len()];
        let mut count = 0;
        for start in (0..base.len() / config.dim).step_by(rows) {
            let part = start * config.dim..base.len().min((start + rows) * config.dim);
            let want = logits(&base[part.clone()], &head)?;
            // A prediction from BOS alone has no text to go by.
            let counts = |row: usize| !(start + row).is_multiple_of(self.window);
            count += (0..part.len() / config.dim).filter(|row| counts(*row)).count();
            for (sum, (x, own)) in sums.iter_mut().zip(streams) {
                let got = logits(&x[part.clone()], own.unwrap_or(&head))?;
                let pairs =
                    want.par_chunks(config.vocab).zip(got.par_chunks(config.vocab)).enumerate();
                let each: Vec<f64> = pairs
                    .filter(|(row, _)| counts(*row))
                    .map(|(_, (p, q))| math::kl_divergence(p, q))
                    .collect();
                *sum += each.iter().sum::<f64>();
            }
        }
        Ok(sums.into_iter().map(|sum| sum / count.max(1) as f64).collect())
    }
}
