//! Compares operations on the device with their definitions, for odd sizes: bit for bit if the
//! driver fuses multiply-adds. Otherwise products are compared with sums of rounded products, and
//! row operations within a tolerance.

use super::*;
use crate::device::choose::Choice;
use gemma_base::compute::cpu::{Isa, dense};
use gemma_base::compute::dense::{
    DenseAttention, DenseHeads, DenseProduct, DenseShape, Limits, Register,
};
use gemma_base::tensor::product::{SLICE, View};

struct Matrices(Vec<Vec<f32>>);

impl DenseWeights for Matrices {
    fn read(&self, matrix: MatrixNumber) -> Result<DenseValues<'_>> {
        Ok(DenseValues::F32(self.0[matrix.0].clone()))
    }

    fn bytes(&self, matrix: MatrixNumber) -> u64 {
        4 * self.0[matrix.0].len() as u64
    }
}

/// A device, and whether it fuses multiply-adds.
struct Tested {
    dense: VulkanDense,
    fuses: bool,
}

fn device() -> Option<Tested> {
    std::env::var_os("GEMMA_REQUIRE_GPU")?;
    let executor = VulkanExecutor::open_for(Choice::Index(0), false).unwrap();
    let dense = VulkanDense::new(executor).unwrap();
    // The square of 1 + 2^-12, minus its rounded value.
    let near = 1.0 + 1.0 / 4096.0;
    let (network, matrices) = product_of(vec![-1.0, near], 2, vec![near * near, near], false);
    let rest = dense.run(&network, &matrices).unwrap()[0];
    Some(Tested { dense, fuses: rest != 0.0 })
}

/// Returns a network with one product and a matrix with one output.
fn product_of(x: Vec<f32>, k: usize, w: Vec<f32>, is_transposed: bool) -> (DenseNetwork, Matrices) {
    let mut network = DenseNetwork::default();
    let outputs = w.len() / k;
    let x = network.input(x, k);
    network.output = network.register(network.rows(x), outputs);
    network.matrices.push(DenseShape { outputs, terms: k, is_transposed });
    network.ops.push(DenseOp::Product(DenseProduct {
        x,
        matrix: MatrixNumber(0),
        out: network.output,
        input: None,
        bias: None,
        output: None,
        gelu: false,
    }));
    (network, Matrices(vec![w]))
}

fn values(n: usize, step: f32) -> Vec<f32> {
    (1..=n).map(|i| (i as f32 * step).sqrt().fract() - 0.5).collect()
}

/// Computes a product by its definition, into rows `stride` apart.
fn multiply(fuses: bool, out: &mut [f32], stride: usize, a: View<'_>, b: View<'_>) {
    for i in 0..a.rows {
        for j in 0..b.cols {
            let mut whole = 0.0f32;
            for start in (0..a.cols).step_by(SLICE) {
                let term = |sum: f32, p: usize| {
                    let x = a.data[i * a.row_stride + p * a.col_stride];
                    let y = b.data[p * b.row_stride + j * b.col_stride];
                    if fuses { x.mul_add(y, sum) } else { x * y + sum }
                };
                whole += (start..a.cols.min(start + SLICE)).fold(0.0, term);
            }
            out[i * stride + j] = whole;
        }
    }
}

impl Tested {
    /// Runs a network and compares its output with `want`: bit for bit, or within `tolerance` if
    /// the driver does not fuse.
    fn check(
        &self,
        network: &DenseNetwork,
        matrices: &Matrices,
        want: &[f32],
        tolerance: f32,
        what: &str,
    ) {
        self.dense.lock().resident = None;
        let got = self.dense.run(network, matrices).unwrap();
        assert_eq!(got.len(), want.len(), "{what}");
        let tolerance = if self.fuses { 0.0 } else { tolerance };
        let agrees = |(got, want): (&f32, &f32)| {
            let most = tolerance * want.abs().max(1.0);
            got.to_bits() == want.to_bits() || (got - want).abs() <= most
        };
        if let Some(i) = got.iter().zip(want).position(|pair| !agrees(pair)) {
            panic!("{what}: value {i} is {} and not {}", got[i], want[i]);
        }
    }
}

#[test]
fn products_have_the_bits_of_their_definition() {
    let Some(device) = device() else { return };
    for (m, n, k, is_transposed) in [
        (130, 72, 588, false),
        (3, 5, 7, false),
        (65, 300, 1152, false),
        (16, 77, 513, true),
        (16, 76, 512, true),
    ] {
        let (x, w, bias) = (values(m * k, 1.37), values(n * k, 0.71), values(n, 3.3));
        let view = View::of(&w, if is_transposed { n } else { k });
        let view = if is_transposed { view } else { view.transposed() };
        for gelu in [false, true] {
            let (mut network, matrices) = product_of(x.clone(), k, w.clone(), is_transposed);
            let limits = Limits { least: -0.4, most: 0.3 };
            let number = network.vector(&bias);
            let DenseOp::Product(product) = &mut network.ops[0] else { unreachable!() };
            match gelu {
                true => (product.input, product.output) = (Some(limits), Some(limits)),
                false => product.bias = Some(number),
            }
            product.gelu = gelu;
            let clamp = |v: f32| if gelu { v.clamp(limits.least, limits.most) } else { v };
            let x: Vec<f32> = x.iter().map(|v| clamp(*v)).collect();
            let mut want = vec![0.0; m * n];
            multiply(device.fuses, &mut want, n, View::of(&x, k), view);
            for (i, v) in want.iter_mut().enumerate() {
                *v = if gelu { clamp(*v) } else { *v + bias[i % n] };
            }
            if gelu {
                dense::gelu(Isa::detect(), &mut want);
            }
            let what = format!("{m} {n} {k} {is_transposed} {gelu}");
            device.check(&network, &matrices, &want, if gelu { 1e-6 } else { 0.0 }, &what);
        }
    }
}

#[test]
fn norms_and_operations_on_values_have_the_bits_of_their_definitions() {
    let Some(device) = device() else { return };
    for (rows, width) in [(5, 7), (33, 72), (18, 1152)] {
        let (x, y) = (values(rows * width, 1.1), values(rows * width, 0.9));
        let (weight, bias) = (values(width, 2.3), values(width, 0.7));
        let run = |op: &dyn Fn(&mut DenseNetwork, Register, Register) -> DenseOp,
                   want: &[f32],
                   tolerance: f32,
                   what: &str| {
            let mut network = DenseNetwork::default();
            let (a, b) = (network.input(x.clone(), width), network.input(y.clone(), width));
            let op = op(&mut network, a, b);
            network.output = op.writes();
            network.ops.push(op);
            let what = format!("{what} {rows} {width}");
            device.check(&network, &Matrices(Vec::new()), want, tolerance, &what);
        };
        let isa = Isa::detect();
        let mut want = x.clone();
        dense::layer_norm(isa, &mut want, &weight, &bias, 1e-6);
        let op = |network: &mut DenseNetwork, x, out| {
            let (weight, bias) = (network.vector(&weight), network.vector(&bias));
            DenseOp::LayerNorm { x, out, weight, bias, eps: 1e-6 }
        };
        run(&op, &want, 2e-6, "layer norm");
        for weight in [&weight[..], &[]] {
            let mut want = x.clone();
            dense::rms_norm(isa, &mut want, width, weight, 1e-6);
            let op = |network: &mut DenseNetwork, x, out| {
                let number = network.vector(weight);
                let weight = (!weight.is_empty()).then_some(number);
                DenseOp::RmsNorm { x, out, run: width, weight, eps: 1e-6 }
            };
            run(&op, &want, 2e-6, "RMS norm");
        }
        let both = |f: fn(f32, f32) -> f32| -> Vec<f32> {
            x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect()
        };
        run(&|_, x, other| DenseOp::Add { x, other }, &both(|x, y| x + y), 0.0, "add");
        run(&|_, x, other| DenseOp::Multiply { x, other }, &both(|x, y| x * y), 0.0, "multiply");
        run(&|_, x, _| DenseOp::Scale { x, factor: 1.7 }, &both(|x, _| x * 1.7), 0.0, "scale");
        let want: Vec<f32> =
            (0..x.len()).map(|i| (x[i] - bias[i % width]) * weight[i % width]).collect();
        let op = |network: &mut DenseNetwork, x, _| {
            let (bias, scale) = (network.vector(&bias), network.vector(&weight));
            DenseOp::Standardize { x, bias, scale }
        };
        run(&op, &want, 0.0, "standardize");
    }
}

#[test]
fn rows_are_rotated_and_pooled_by_their_place() {
    let Some(device) = device() else { return };
    let (columns, rows, width, half, side) = (6, 4, 24, 4, 2);
    let x = values(columns * rows * width, 1.9);
    let angles = values(6 * half, 0.3);
    let mut want = x.clone();
    for (i, row) in want.chunks_exact_mut(width).enumerate() {
        for (part, values) in row.chunks_exact_mut(half).enumerate() {
            let position = if part % 2 == 0 { i % columns } else { i / columns };
            for pair in 0..half / 2 {
                let at = position * half + 2 * pair;
                let (a, b, sin, cos) =
                    (values[pair], values[pair + half / 2], angles[at], angles[at + 1]);
                (values[pair], values[pair + half / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    let mut network = DenseNetwork::default();
    network.output = network.input(x.clone(), width);
    let angles = network.vector(&angles);
    network.ops.push(DenseOp::Rotate { x: network.output, half, columns, angles });
    device.check(&network, &Matrices(Vec::new()), &want, 0.0, "rotate");
    let tokens = columns * rows / (side * side);
    let mut pooled = vec![0.0f32; tokens * width];
    for (i, sum) in pooled.iter_mut().enumerate() {
        let (token, c) = (i / width, i % width);
        let (left, top) = (token % (columns / side) * side, token / (columns / side) * side);
        for j in 0..side * side {
            *sum += x[((top + j / side) * columns + left + j % side) * width + c];
        }
        *sum *= 1.0 / (side * side) as f32;
    }
    let mut network = DenseNetwork::default();
    let x = network.input(x, width);
    network.output = network.register(tokens, width);
    let columns = columns / side;
    network.ops.push(DenseOp::Pool { x, out: network.output, side, columns });
    device.check(&network, &Matrices(Vec::new()), &pooled, 0.0, "pool");
}

#[test]
fn attention_has_the_bits_of_its_definition_in_any_tile() {
    let Some(device) = device() else { return };
    for (rows, heads) in [
        (70, DenseHeads { queries: 4, keys: 2, dim: 18 }),
        (300, DenseHeads { queries: 2, keys: 2, dim: 72 }),
        (2100, DenseHeads { queries: 1, keys: 1, dim: 16 }),
    ] {
        let (wide, narrow) = (heads.queries * heads.dim, heads.keys * heads.dim);
        let (q, k, v) =
            (values(rows * wide, 0.3), values(rows * narrow, 0.7), values(rows * narrow, 1.1));
        let mut want = vec![0.0; rows * wide];
        for head in 0..heads.queries {
            let shared = head / (heads.queries / heads.keys) * heads.dim;
            let of = |x, width, at| View::of(x, width).part(0..rows, at..at + heads.dim);
            let mut scores = vec![0.0; rows * rows];
            let (q, k) = (of(&q, wide, head * heads.dim), of(&k, narrow, shared));
            multiply(device.fuses, &mut scores, rows, q, k.transposed());
            dense::softmax(Isa::detect(), &mut scores, rows, 2.0);
            let out = &mut want[head * heads.dim..];
            let v = of(&v, narrow, shared);
            multiply(device.fuses, out, wide, View::of(&scores, rows), v);
        }
        let mut network = DenseNetwork::default();
        let [q, k, v] = [(q, wide), (k, narrow), (v, narrow)].map(|(x, w)| network.input(x, w));
        network.output = network.register(rows, wide);
        let (out, scale) = (network.output, 2.0);
        network.ops.push(DenseOp::Attention(DenseAttention { q, k, v, out, heads, scale }));
        for most in [SCORES, 1] {
            device.dense.lock().most_scores = most;
            let what = format!("attention of {rows}, {most}");
            device.check(&network, &Matrices(Vec::new()), &want, 1e-6, &what);
        }
    }
}
