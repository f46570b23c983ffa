//! The backward pass of a layer: gradients at its input and at the output of each matrix.

use super::{DECODE, Layer, StepOutputs};
use anyhow::{Context, Result, bail};
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::product::{View, multiply};
use gemma_base::tensor::{Matrix, math};
use gemma_model::models::{KeyNorms, LayerSpec, Role, Step};
use rayon::prelude::*;

/// Called for each matrix, with its inputs `[tokens, cols]` and the gradients at its outputs
/// `[tokens, rows]`.
pub type Found<'a> = &'a mut dyn FnMut(Role, &Matrix<'_>, &[f32], &[f32]) -> Result<()>;

impl Layer<'_> {
    /// Replaces `d`, the gradient at the residual stream after the layer, by the gradient before
    /// it. `x` is the stream before the layer. Both are `[tokens, dim]`.
    pub fn backward(&self, x: &[f32], d: &mut [f32], found: Found<'_>) -> Result<()> {
        let mut x = x.to_vec();
        let (mut values, mut inputs): (StepOutputs, Vec<StepOutputs>) = (Vec::new(), Vec::new());
        for step in &self.steps {
            // A norm reads the stream itself.
            let is_norm = matches!(step, Step::Norm(_));
            inputs.push(if is_norm { vec![x.clone()] } else { values.clone() });
            values = self.step(step, values, &mut x)?;
        }
        let mut dv = Vec::new();
        for (step, input) in self.steps.iter().zip(&inputs).rev() {
            dv = self.step_back(step, input, dv, d, found)?;
        }
        Ok(())
    }

    /// Replaces `dv`, the gradients at the outputs of a step, by those at its inputs.
    fn step_back(
        &self,
        step: &Step,
        input: &[Vec<f32>],
        dv: StepOutputs,
        d: &mut [f32],
        found: Found<'_>,
    ) -> Result<StepOutputs> {
        Ok(match step {
            Step::Norm(role) => {
                let back = self.norm_back(*role, &input[0], dv.first().context("a norm is read")?);
                d.par_iter_mut().zip(back).for_each(|(d, back)| *d += back);
                Vec::new()
            }
            Step::Linear(_, matrices) => {
                let mut sums = vec![0.0; input[0].len()];
                let roles: Vec<Role> = matrices.iter().map(|(role, _)| *role).collect();
                for (i, role) in roles.iter().enumerate().filter(|(i, r)| !roles[..*i].contains(r))
                {
                    let mut own = dv[i].clone();
                    for (other, _) in roles[i + 1..].iter().enumerate().filter(|(_, r)| *r == role)
                    {
                        let other = &dv[i + 1 + other];
                        own.par_iter_mut().zip(other).for_each(|(own, other)| *own += other);
                    }
                    self.matrix_back(*role, &input[0], &own, &mut sums, found)?;
                }
                vec![sums]
            }
            Step::Attend { keys: None, .. } => bail!("a layer without keys reads another model's"),
            Step::Attend { q_norm, keys: Some(KeyNorms { k_norm, v_norm }) } => {
                let ([q, k, v], [out]) = (input, &dv[..]) else {
                    bail!("attention needs three inputs and one gradient")
                };
                let (mut turned_q, mut turned_k) = (q.clone(), k.clone());
                self.rotate(&mut turned_q, self.spec.n_heads, *q_norm);
                self.rotate(&mut turned_k, self.spec.n_kv_heads, *k_norm);
                let normed_v = if *v_norm { &self.norm_heads(v) } else { v };
                let [mut dq, mut dk, mut dv] =
                    self.attend_back(&turned_q, &turned_k, normed_v, out);
                self.rotate_back(q, &mut dq, self.spec.n_heads, *q_norm);
                self.rotate_back(k, &mut dk, self.spec.n_kv_heads, *k_norm);
                if *v_norm {
                    dv = norm_rows_back(v, &vec![1.0; self.spec.head_dim], self.eps, &dv);
                }
                vec![dq, dk, dv]
            }
            Step::GateUp { gate, up, .. } => {
                let (g, u) = (self.linear(*gate, &input[0])?, self.linear(*up, &input[0])?);
                let (mut dg, mut du) = (dv[0].clone(), dv[0].clone());
                dg.par_iter_mut().zip(&g).zip(&u).for_each(|((d, g), u)| *d *= u * gelu_slope(*g));
                du.par_iter_mut().zip(&g).for_each(|(d, g)| *d *= math::gelu_tanh(*g));
                let mut sums = vec![0.0; input[0].len()];
                self.matrix_back(*gate, &input[0], &dg, &mut sums, found)?;
                self.matrix_back(*up, &input[0], &du, &mut sums, found)?;
                vec![sums]
            }
            Step::Mixture(_) => bail!("mixtures of experts have no backward pass"),
            Step::Add { norm, scale } => {
                let scale = scale.map_or(1.0, |role| self.vectors[&role][0]);
                d.par_iter_mut().for_each(|d| *d *= scale);
                vec![self.norm_back(*norm, &input[0], d)]
            }
        })
    }

    /// Adds the gradient at the input of a matrix to `sums`.
    fn matrix_back(
        &self,
        role: Role,
        input: &[f32],
        d: &[f32],
        sums: &mut [f32],
        found: Found<'_>,
    ) -> Result<()> {
        let matrix = &self.matrices[&role];
        found(role, matrix, input, d)?;
        linear_back(&*self.device, d, matrix, sums, &mut |_, _| ())
    }

    fn norm_back(&self, role: Role, x: &[f32], d: &[f32]) -> Vec<f32> {
        norm_rows_back(x, &self.vectors[&role], self.eps, d)
    }

    /// Replaces `d`, the gradient at rotated heads, by the gradient at the heads `x` before norm
    /// and rotation.
    fn rotate_back(&self, x: &[f32], d: &mut [f32], heads: usize, norm: Role) {
        let (dim, half) = (self.spec.head_dim, self.spec.head_dim / 2);
        let norm = &self.vectors[&norm];
        let rows = d.par_chunks_mut(heads * dim).zip(x.par_chunks(heads * dim)).enumerate();
        rows.for_each(|(token, (d, x))| {
            let (cos, sin) = self.angles[token % self.window * dim..][..dim].split_at(half);
            for (d, x) in d.chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
                for i in 0..half {
                    let (a, b) = (d[i], d[i + half]);
                    d[i] = a * cos[i] + b * sin[i];
                    d[i + half] = b * cos[i] - a * sin[i];
                }
                row_back(x, norm, self.eps, d);
            }
        });
    }

    /// Returns the gradients at queries, keys and values, from `d`, the gradient at the outputs of
    /// attention.
    fn attend_back(&self, q: &[f32], k: &[f32], v: &[f32], d: &[f32]) -> [Vec<f32>; 3] {
        let LayerSpec { n_heads, n_kv_heads, head_dim, query_scale, .. } = self.spec;
        let (q_cols, kv_cols) = (self.spec.query_width(), self.spec.kv_width());
        let len = self.window;
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        let windows = dq
            .par_chunks_mut(len * q_cols)
            .zip(dk.par_chunks_mut(len * kv_cols).zip(dv.par_chunks_mut(len * kv_cols)));
        windows.enumerate().for_each(|(window, (dq, (dk, dv)))| {
            let rows = window * len..(window + 1) * len;
            for head in 0..n_heads {
                let at = head / (n_heads / n_kv_heads) * head_dim;
                let own = head * head_dim..(head + 1) * head_dim;
                let of_head = |x| View::of(x, q_cols).part(rows.clone(), own.clone());
                let of_kv = |x| View::of(x, kv_cols).part(rows.clone(), at..at + head_dim);
                let (q, k, v, d) = (of_head(q), of_kv(k), of_kv(v), of_head(d));
                let mut weights = vec![0.0; len * len];
                multiply(&mut weights, len, 0.0, query_scale, q, k.transposed());
                self.softmax(&mut weights);
                // The gradient at the weights, which becomes the gradient at the scores.
                let mut ds = vec![0.0; len * len];
                multiply(&mut ds, len, 0.0, 1.0, d, v.transposed());
                for (ds, p) in ds.chunks_exact_mut(len).zip(weights.chunks_exact(len)) {
                    let mean: f32 = ds.iter().zip(p).map(|(d, p)| d * p).sum();
                    ds.iter_mut().zip(p).for_each(|(d, p)| *d = query_scale * p * (*d - mean));
                }
                let (p, s) = (View::of(&weights, len), View::of(&ds, len));
                multiply(&mut dq[own.start..], q_cols, 0.0, 1.0, s, k);
                multiply(&mut dk[at..], kv_cols, 1.0, 1.0, s.transposed(), q);
                multiply(&mut dv[at..], kv_cols, 1.0, 1.0, p.transposed(), d);
            }
        });
        [dq, dk, dv]
    }
}

/// Adds `d [tokens, rows]` times `matrix [rows, cols]` to `sums [tokens, cols]`. Calls `seen` with
/// the index and the values of each row of the matrix.
pub fn linear_back(
    device: &dyn CodingDevice,
    d: &[f32],
    matrix: &Matrix<'_>,
    sums: &mut [f32],
    seen: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let mut decoded = vec![0.0; DECODE.min(rows) * cols];
    for start in (0..rows).step_by(DECODE) {
        let n = DECODE.min(rows - start);
        let decoded = &mut decoded[..n * cols];
        decoded
            .par_chunks_mut(cols)
            .enumerate()
            .for_each(|(i, row)| matrix.dequantize_row(start + i, row));
        decoded.chunks_exact(cols).enumerate().for_each(|(i, row)| seen(start + i, row));
        let whole = View::of(d, rows);
        let part = whole.part(0..whole.rows, start..start + n);
        device.multiply(sums, cols, 1.0, 1.0, part, View::of(decoded, cols))?;
    }
    Ok(())
}

/// Returns the gradient at the input rows `x` of an RMSNorm, from the gradient `d` at its output.
pub fn norm_rows_back(x: &[f32], weight: &[f32], eps: f32, d: &[f32]) -> Vec<f32> {
    let (mut out, n) = (d.to_vec(), weight.len());
    let rows = out.par_chunks_mut(n).zip(x.par_chunks(n));
    rows.for_each(|(d, x)| row_back(x, weight, eps, d));
    out
}

fn row_back(x: &[f32], weight: &[f32], eps: f32, d: &mut [f32]) {
    let scale = math::inv_rms(x, eps);
    d.iter_mut().zip(weight).for_each(|(d, w)| *d *= w);
    let along: f32 = d.iter().zip(x).map(|(d, x)| d * x).sum();
    let share = along * scale * scale / x.len() as f32;
    d.iter_mut().zip(x).for_each(|(d, x)| *d = scale * (*d - share * x));
}

/// Derivative of [`math::gelu_tanh`].
fn gelu_slope(x: f32) -> f32 {
    let share = 1.0 / (1.0 + math::exp(-2.0 * 0.797_884_6 * (0.044_715 * x * x).mul_add(x, x)));
    let slope = 2.0 * 0.797_884_6 * (3.0 * 0.044_715 * x).mul_add(x, 1.0);
    share + x * share * (1.0 - share) * slope
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_base::tensor::Format;
    use gemma_base::tensor::encode::OnProcessor;
    use gemma_model::models::{Config, Weights};
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn slopes_are_those_of_the_functions() {
        let h = 1e-2f64;
        for i in -40..40 {
            let x = i as f64 / 8.0;
            let at = |x: f64| math::gelu_tanh(x as f32) as f64;
            let want = (at(x + h) - at(x - h)) / (2.0 * h);
            assert!((gelu_slope(x as f32) as f64 - want).abs() < 2e-3, "gelu at {x}");
        }
        let (x, weight, d) =
            ([0.5f32, -1.0, 2.0, 0.25], [1.0f32, 0.5, 2.0, 1.5], [1.0f32, -2.0, 0.5, 3.0]);
        let value = |x: &[f32]| -> f64 {
            let mut y = x.to_vec();
            super::super::rows::norm(&mut y, &weight, 1e-6);
            y.iter().zip(&d).map(|(y, d)| (y * d) as f64).sum()
        };
        let got = norm_rows_back(&x, &weight, 1e-6, &d);
        for i in 0..4 {
            let moved = |by: f32| {
                let mut x = x;
                x[i] += by;
                value(&x)
            };
            let want = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            assert!(
                (got[i] as f64 - want).abs() < 2e-2 * want.abs().max(0.5),
                "{i}: {} {want}",
                got[i]
            );
        }
    }

    /// Global layers use normed keys as values, and each layer scales the stream by a factor.
    #[test]
    fn a_whole_layer_goes_back_as_it_goes_forward() {
        let config = json!({"model_type": "gemma4_text", "vocab_size": 32, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
            "num_global_key_value_heads": 1, "attention_k_eq_v": true, "sliding_window": 3});
        let config = Config::from_json(&config).unwrap();
        let weights = Weights::synthetic(config, |_| Format::F32, 3);
        let device: Arc<dyn CodingDevice> = Arc::new(OnProcessor);
        for index in 0..2 {
            let layer = Layer::open(&weights, &device, 5, index).unwrap();
            let numbers =
                |seed: f32| -> Vec<f32> { (0..5 * 32).map(|i| (i as f32 * seed).sin()).collect() };
            let (x, d) = (numbers(0.7), numbers(1.3));
            let value = |x: &[f32]| -> f64 {
                let mut y = x.to_vec();
                layer.forward(&mut y).unwrap();
                y.iter().zip(&d).map(|(y, d)| (y * d) as f64).sum()
            };
            let mut got = d.clone();
            layer.backward(&x, &mut got, &mut |_, _, _, _| Ok(())).unwrap();
            for i in (0..x.len()).step_by(7) {
                let moved = |by: f32| {
                    let mut x = x.clone();
                    x[i] += by;
                    value(&x)
                };
                let want = (moved(1e-2) - moved(-1e-2)) / 2e-2;
                let error = (got[i] as f64 - want).abs();
                assert!(error < 2e-2 * want.abs().max(0.5), "{index}, {i}: {} {want}", got[i]);
            }
        }
    }
}
