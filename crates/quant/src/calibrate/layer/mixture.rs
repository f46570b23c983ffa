//! A mixture of experts over many tokens at once.

use super::{Layer, linear};
use anyhow::Result;
use gemma_base::compute::reference::experts::choose_row;
use gemma_base::tensor::Matrix;
use gemma_model::models::{ExpertSpec, Role};
use rayon::prelude::*;

use super::super::rows;

/// The rows that chose an expert, in ascending order, each with the weight of the expert's output.
pub type Visits = Vec<(usize, f32)>;

impl Layer<'_> {
    /// Returns the visits of each expert: which rows of the residual stream `x` `[rows, dim]` chose
    /// it.
    pub fn route(&self, spec: ExpertSpec, x: &[f32]) -> Result<Vec<Visits>> {
        let factors = &self.vectors[&Role::ExpertFactors];
        let share = (self.dim() as f32).sqrt().recip();
        let scale: Vec<f32> = self.vectors[&Role::RouterScale].iter().map(|s| s * share).collect();
        let scores = self.linear(Role::Router, &super::norm_rows(x, &scale, self.eps))?;
        let mut visits = vec![Visits::new(); spec.count];
        let (mut chosen, mut weights) = (vec![0; spec.used], vec![0.0; spec.used]);
        for (row, scores) in scores.chunks_exact(spec.count).enumerate() {
            choose_row(scores, factors, &mut chosen, &mut weights);
            chosen.iter().zip(&weights).for_each(|(i, w)| visits[*i as usize].push((row, *w)));
        }
        Ok(visits)
    }

    /// Returns the input of the experts, for the rows `x` of the residual stream.
    pub fn before_experts(&self, x: &[f32]) -> Vec<f32> {
        self.norm(Role::PreExpertNorm, x)
    }

    /// Returns the input of the last matrix of an expert, `[rows, width]`. `input` is the input of
    /// the expert.
    pub fn gated(&self, spec: ExpertSpec, expert: usize, input: &[f32]) -> Result<Vec<f32>> {
        let product = |role| linear(&*self.device, input, &self.expert(role, spec, expert));
        let (gates, ups) = match spec.fused {
            true => {
                let both = product(Role::ExpertGateUp)?;
                let half = |from: usize| -> Vec<f32> {
                    let rows = both.chunks_exact(2 * spec.width);
                    rows.flat_map(|row| &row[from..from + spec.width]).copied().collect()
                };
                (half(0), half(spec.width))
            }
            false => (product(Role::ExpertGate)?, product(Role::ExpertUp)?),
        };
        let mut out = gates;
        let pieces = out.par_chunks_mut(spec.width).zip(ups.par_chunks(spec.width));
        pieces.for_each(|(gate, up)| rows::gate(gate, up));
        Ok(out)
    }

    /// Returns the part of a matrix that belongs to an expert.
    pub fn expert(&self, role: Role, spec: ExpertSpec, expert: usize) -> Matrix<'_> {
        let matrix = &self.matrices[&role];
        let rows = matrix.rows / spec.count;
        matrix.part(expert * rows..(expert + 1) * rows)
    }

    /// Returns the output of the mixture. `shared` is the input of the step, `x` the residual
    /// stream.
    pub(super) fn mixture(&self, spec: ExpertSpec, shared: &[f32], x: &[f32]) -> Result<Vec<f32>> {
        let (dim, input) = (self.dim(), self.before_experts(x));
        let mut sum = vec![0.0; x.len()];
        for (expert, visits) in self.route(spec, x)?.into_iter().enumerate() {
            if visits.is_empty() {
                continue;
            }
            let input = picked(&input, dim, visits.iter().map(|(row, _)| *row));
            let gated = self.gated(spec, expert, &input)?;
            let out = linear(&*self.device, &gated, &self.expert(Role::ExpertDown, spec, expert))?;
            for ((row, weight), out) in visits.iter().zip(out.chunks_exact(dim)) {
                let sum = &mut sum[row * dim..][..dim];
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
            }
        }
        let mut out = self.norm(Role::PostSharedNorm, shared);
        let experts = self.norm(Role::PostExpertNorm, &sum);
        out.par_iter_mut().zip(&experts).for_each(|(out, expert)| *out += expert);
        Ok(out)
    }

    /// Channels of the residual stream.
    fn dim(&self) -> usize {
        self.vectors[&Role::PreExpertNorm].len()
    }
}

/// Returns the given rows of `x`, which has rows of `width` values.
pub fn picked(x: &[f32], width: usize, rows: impl Iterator<Item = usize>) -> Vec<f32> {
    rows.flat_map(|row| &x[row * width..][..width]).copied().collect()
}
