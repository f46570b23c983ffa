//! A tower on one image as a network: the builder that towers use, and its CPU implementation.

use super::file::{Component, Dense, TowerFile};
use super::ops::{Activations, attention, clamp};
use anyhow::{Context, Result};
use gemma_base::compute::cpu::{Isa, dense};
use gemma_base::compute::dense::{
    DenseAttention, DenseHeads, DenseNetwork, DenseOp, DenseProduct, DenseShape, DenseValues,
    DenseWeights, Limits, MatrixNumber, Register, VectorNumber,
};

/// A linear layer with its bias and limits.
#[derive(Clone, Debug)]
pub struct LinearLayer {
    pub matrix: Dense,
    /// Empty, or one value per output.
    pub bias: Vec<f32>,
    /// Bounds of inputs and outputs.
    pub limits: Option<[Limits; 2]>,
}

impl LinearLayer {
    /// Finds the matrix `{name}.weight` and its bias.
    pub fn with_bias(
        file: &TowerFile,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<LinearLayer> {
        let matrix = file.matrix(Component::Tower, &format!("{name}.weight"), rows, cols)?;
        let bias = file.floats(Component::Tower, &format!("{name}.bias"), &[rows])?;
        Ok(LinearLayer { matrix, bias, limits: None })
    }
}

const UNWRITTEN: &str = "registers are written before they are read";

/// A network with matrices in a tower's file.
#[derive(Debug)]
pub struct Program<'a> {
    file: &'a TowerFile,
    matrices: Vec<&'a Dense>,
    pub network: DenseNetwork,
}

impl<'a> Program<'a> {
    pub fn new(file: &'a TowerFile) -> Program<'a> {
        Program { file, matrices: Vec::new(), network: DenseNetwork::default() }
    }

    pub fn register(&mut self, rows: usize, width: usize) -> Register {
        self.network.register(rows, width)
    }

    pub fn input(&mut self, values: Vec<f32>, width: usize) -> Register {
        self.network.input(values, width)
    }

    pub fn push(&mut self, op: DenseOp) {
        self.network.ops.push(op);
    }

    /// Adds a vector; `None` if it is empty.
    fn optional(&mut self, values: &[f32]) -> Option<VectorNumber> {
        (!values.is_empty()).then(|| self.network.vector(values))
    }

    /// Appends a plain product.
    pub fn product(&mut self, dense: &'a Dense, is_transposed: bool, x: Register, out: Register) {
        let (input, bias, output) = (None, None, None);
        let matrix = self.matrix(dense, is_transposed);
        self.push(DenseOp::Product(DenseProduct {
            x,
            matrix,
            out,
            input,
            bias,
            output,
            gelu: false,
        }));
    }

    fn matrix(&mut self, dense: &'a Dense, is_transposed: bool) -> MatrixNumber {
        let (outputs, terms) = match is_transposed {
            true => (dense.cols, dense.rows),
            false => (dense.rows, dense.cols),
        };
        self.matrices.push(dense);
        self.network.matrices.push(DenseShape { outputs, terms, is_transposed });
        MatrixNumber(self.matrices.len() - 1)
    }

    /// Appends a linear layer, followed by GELU if `gelu` is set.
    pub fn linear(&mut self, layer: &'a LinearLayer, x: Register, out: Register, gelu: bool) {
        let matrix = self.matrix(&layer.matrix, false);
        let bias = self.optional(&layer.bias);
        let [input, output] = layer.limits.map_or([None; 2], |limits| limits.map(Some));
        self.push(DenseOp::Product(DenseProduct { x, matrix, out, input, bias, output, gelu }));
    }

    pub fn layer_norm(
        &mut self,
        [weight, bias]: &[Vec<f32>; 2],
        eps: f32,
        x: Register,
        out: Register,
    ) {
        let (weight, bias) = (self.network.vector(weight), self.network.vector(bias));
        self.push(DenseOp::LayerNorm { x, out, weight, bias, eps });
    }

    /// Appends RMSNorm of each run of `run` values. An empty `weight` means all ones.
    pub fn rms_norm(&mut self, weight: &[f32], run: usize, eps: f32, x: Register, out: Register) {
        let weight = self.optional(weight);
        self.push(DenseOp::RmsNorm { x, out, run, weight, eps });
    }

    pub fn add(&mut self, x: Register, other: Register) {
        self.push(DenseOp::Add { x, other });
    }

    /// Appends the attention of `[q, k, v]`.
    pub fn attention(
        &mut self,
        [q, k, v]: [Register; 3],
        out: Register,
        heads: DenseHeads,
        scale: f32,
    ) {
        self.push(DenseOp::Attention(DenseAttention { q, k, v, out, heads, scale }));
    }

    /// Runs the network on the threads of the current pool.
    pub fn run(mut self) -> Result<Vec<f32>> {
        let mut state: Vec<Option<Activations>> = vec![None; self.network.registers.len()];
        for (register, values) in std::mem::take(&mut self.network.inputs) {
            state[register.0] = Some(Activations::new(values, self.network.width(register)));
        }
        for at in 0..self.network.ops.len() {
            let op = self.network.ops[at];
            let result = self.compute(at, op, &mut state)?;
            state[op.writes().0] = Some(result);
        }
        Ok(state[self.network.output.0].take().context("the network has an output")?.data)
    }

    /// Computes the result of one operation. Consumes registers that are not read again.
    fn compute(
        &self,
        at: usize,
        op: DenseOp,
        state: &mut [Option<Activations>],
    ) -> Result<Activations> {
        if let DenseOp::Product(product) = op {
            let x = state[product.x.0].as_ref().context(UNWRITTEN)?;
            let out = self.multiply(product, x)?;
            if self.network.is_last_use(at, product.x) {
                state[product.x.0] = None;
            }
            return Ok(out);
        }
        let vector = |number: VectorNumber| &self.network.vectors[number.0][..];
        let mut take = |register: Register| {
            let is_last = op.writes() == register || self.network.is_last_use(at, register);
            let slot = &mut state[register.0];
            let value = if is_last { slot.take() } else { slot.clone() };
            value.context(UNWRITTEN)
        };
        Ok(match op {
            DenseOp::Product(_) => unreachable!("returned above"),
            DenseOp::LayerNorm { x, weight, bias, eps, .. } => {
                take(x)?.layer_norm(vector(weight), vector(bias), eps)
            }
            DenseOp::RmsNorm { x, run, weight, eps, .. } => {
                take(x)?.rms_norm(run, weight.map_or(&[], vector), eps)
            }
            DenseOp::Attention(DenseAttention { q, k, v, heads, scale, .. }) => {
                attention(take(q)?, take(k)?, take(v)?, heads, scale)?
            }
            DenseOp::Add { x, other } => {
                let (mut x, other) = (take(x)?, take(other)?);
                x.zip(&other, |a, b| *a += b);
                x
            }
            DenseOp::Multiply { x, other } => {
                let (mut x, other) = (take(x)?, take(other)?);
                x.zip(&other, |a, b| *a *= b);
                x
            }
            DenseOp::Scale { x, factor } => {
                let mut x = take(x)?;
                x.data.iter_mut().for_each(|v| *v *= factor);
                x
            }
            DenseOp::Standardize { x, bias, scale } => {
                let (mut x, bias, scale) = (take(x)?, vector(bias), vector(scale));
                for row in x.data.chunks_exact_mut(x.width) {
                    let pairs = row.iter_mut().zip(bias).zip(scale);
                    pairs.for_each(|((v, bias), scale)| *v = (*v - bias) * scale);
                }
                x
            }
            DenseOp::Rotate { x, half, columns, angles } => {
                let mut x = take(x)?;
                x.rotate(half, columns, vector(angles));
                x
            }
            DenseOp::Pool { x, side, columns, .. } => take(x)?.pool(side, columns),
        })
    }

    fn multiply(&self, product: DenseProduct, x: &Activations) -> Result<Activations> {
        let DenseProduct { matrix, input, bias, output, gelu, .. } = product;
        let stored = self.file.load(self.matrices[matrix.0])?;
        let is_transposed = self.network.matrices[matrix.0].is_transposed;
        let matrix = if is_transposed { stored } else { stored.t()? };
        let bias = bias.map(|number| &self.network.vectors[number.0]);
        let isa = Isa::detect();
        x.product(&matrix, input, |out| {
            if let Some(bias) = bias {
                add_bias(out, bias);
            }
            output.iter().for_each(|limits| clamp(out, *limits));
            if gelu {
                dense::gelu(isa, out);
            }
        })
    }
}

impl DenseWeights for Program<'_> {
    fn read(&self, matrix: MatrixNumber) -> Result<DenseValues<'_>> {
        self.file.values(self.matrices[matrix.0])
    }

    fn bytes(&self, matrix: MatrixNumber) -> u64 {
        self.file.value_bytes(self.matrices[matrix.0])
    }
}

/// Adds the bias to each row.
fn add_bias(x: &mut [f32], bias: &[f32]) {
    for row in x.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(v, bias)| *v += bias);
    }
}
