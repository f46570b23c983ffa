//! Quantises the matrices of experts, each for the tokens that are routed to it.

use super::layer::{Layer, picked};
use super::{CalibrationText, Inputs, Solved, solve_matrix};
use anyhow::Result;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::{Format, Matrix, hadamard};
use gemma_model::models::{ExpertSpec, Role};
use rayon::prelude::*;

/// Weight of the mean of all experts' inputs, in tokens. It keeps an expert that is chosen by few
/// tokens from being fitted to only those.
const PRIOR: f32 = 256.0;

/// A layer of the source and of the quantised copy, each with the residual streams before its
/// mixture of experts.
pub struct ExpertJob<'a> {
    pub original: (&'a Layer<'a>, &'a [f32]),
    pub made: (&'a Layer<'a>, &'a [f32]),
    pub text: &'a CalibrationText,
    pub spec: ExpertSpec,
    pub device: &'a dyn CodingDevice,
}

impl ExpertJob<'_> {
    /// Quantises the matrix `role` of all experts. Returns it with notes for the log.
    pub fn solve(&self, role: Role, format: Format) -> Result<(Solved, Vec<String>)> {
        let (matrix, count) = (self.original.0.matrix(role), self.spec.count);
        let (rows, cols) = (matrix.rows / count, matrix.cols);
        let visits = self.visits()?;
        let mut all = Inputs::new(cols, true);
        let mut seen = 0;
        match role {
            // The input of this matrix is different for each expert. The other matrices share one
            // input.
            Role::ExpertDown => {
                for (expert, visits) in visits.iter().enumerate() {
                    seen += visits.len();
                    self.add(role, expert, visits, &mut all)?;
                }
            }
            _ => {
                for batch in self.text.batches() {
                    let tokens = batch.filter(|t| t % self.text.window != 0);
                    let tokens: Vec<usize> = tokens.collect();
                    seen += tokens.len();
                    self.add(role, 0, &tokens, &mut all)?;
                }
            }
        }
        let (mut parts, mut losses, mut notes) = (Vec::new(), 0.0, Vec::new());
        for (expert, visits) in visits.iter().enumerate() {
            let mut inputs = all.share(PRIOR / seen.max(1) as f32);
            self.add(role, expert, visits, &mut inputs)?;
            let (factors, note) = inputs.factor(self.device, format.hadamard)?;
            notes.extend(note.map(|note| format!("expert {expert}: {note}")));
            let mut w = self.original.0.expert(role, self.spec, expert).dequantize();
            if format.hadamard {
                w.par_chunks_mut(cols).for_each(hadamard::transform);
            }
            let solved = solve_matrix(self.device, format, rows, cols, w, &factors, true)?;
            losses += solved.loss;
            parts.push(solved.matrix);
        }
        let codes = parts.iter().flat_map(|part| part.codes.iter()).copied().collect::<Vec<u8>>();
        let side = parts.iter().flat_map(|part| part.side.iter()).copied().collect::<Vec<u8>>();
        let matrix = Matrix::new(format, count * rows, cols, codes, side)?;
        let rare = visits.iter().filter(|visits| (visits.len() as f32) < PRIOR).count();
        if rare > 0 {
            notes.push(format!(
                "{rare} of {count} experts were chosen by fewer than {PRIOR} tokens: \
                inputs of the others count more than theirs"
            ));
        }
        Ok((Solved { matrix, loss: losses / count as f64 }, notes))
    }

    /// Returns the tokens that choose each expert in the copy, without the first token of each
    /// window.
    fn visits(&self) -> Result<Vec<Vec<usize>>> {
        let (layer, x) = self.made;
        let dim = x.len() / self.text.tokens.len();
        let mut all: Vec<Vec<usize>> = vec![Vec::new(); self.spec.count];
        for batch in self.text.batches() {
            let found = layer.route(self.spec, &x[batch.start * dim..batch.end * dim])?;
            for (all, visits) in all.iter_mut().zip(found) {
                let tokens = visits.iter().map(|(row, _)| batch.start + row);
                all.extend(tokens.filter(|t| t % self.text.window != 0));
            }
        }
        Ok(all)
    }

    /// Adds the inputs of a matrix of an expert at `tokens` to `inputs`.
    fn add(&self, role: Role, expert: usize, tokens: &[usize], inputs: &mut Inputs) -> Result<()> {
        let of = |(layer, x): (&Layer<'_>, &[f32])| -> Result<Vec<f32>> {
            let dim = x.len() / self.text.tokens.len();
            let read = layer.before_experts(&picked(x, dim, tokens.iter().copied()));
            match role {
                Role::ExpertDown => layer.gated(self.spec, expert, &read),
                _ => Ok(read),
            }
        };
        inputs.add_all(self.device, Some(&of(self.original)?), &of(self.made)?)
    }
}
