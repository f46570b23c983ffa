//! Kernel calls of dense networks.

use crate::lower::kernels::{
    self, DenseEachPush, DenseNormPush, DenseProductPush, DenseSoftmaxPush, word,
};
use crate::lower::{Access, Call};
use gemma_base::compute::BufferId;
use gemma_base::compute::dense::{
    DenseAttention, DenseNetwork, DenseOp, DenseProduct, DenseShape, Limits, Register, VectorNumber,
};

/// Tiles of attention rows are multiples of this.
pub const TILE: usize = 128;
/// Threads of a workgroup of `dense_product`, and elements per thread along each side.
const THREADS: usize = 256;
const SIDE: usize = 8;
/// Most workgroups along x: LINE of the shaders.
const LINE: usize = 32768;
/// Runs per workgroup of `dense_norm`, and values per workgroup of `dense_each`.
const RUNS: usize = 16;
const EACH: usize = 256;
/// Operations of `dense_each`.
const ADD: u32 = 0;
const MULTIPLY: u32 = 1;
const SCALE: u32 = 2;
const STANDARDIZE: u32 = 3;
const ROTATE: u32 = 4;
const POOL: u32 = 5;

/// A matrix on the device.
#[derive(Clone, Copy, Debug)]
pub struct DenseMatrix {
    pub address: u64,
    /// Storage type of the values: B_TYPE of `dense_product`.
    pub kind: u32,
}

/// Addresses that calls need.
pub struct Places<'a> {
    pub network: &'a DenseNetwork,
    pub registers: &'a [u64],
    pub matrices: &'a [DenseMatrix],
    pub vectors: &'a [u64],
    /// f32 `[heads, rows of a tile, rows]`: attention scores.
    pub scores: u64,
    /// f32 `[heads, rows of a tile]`: factors of the tile's rows.
    pub factors: u64,
    /// Query rows that are computed together.
    pub tile: usize,
}

/// A factor of a product: its address, and the floats between rows and between heads.
#[derive(Clone, Copy)]
struct StridedFactor {
    address: u64,
    stride: usize,
    head: usize,
}

/// One product per head.
struct HeadProducts {
    /// Rows, columns, and terms per sum.
    size: [usize; 3],
    heads: usize,
    /// Number of heads of `a` that share a head of `b`.
    share: usize,
    a: StridedFactor,
    b: StridedFactor,
    c: StridedFactor,
    /// Whether `b` is stored column by column.
    along: bool,
    kind: u32,
}

impl HeadProducts {
    /// Returns kernel and arguments of a plain product.
    fn plain(&self) -> (kernels::DenseProduct, DenseProductPush) {
        let HeadProducts { size: [m, n, k], share, a, b, c, .. } = *self;
        let fours = |sizes: &[usize]| sizes.iter().all(|n| n.is_multiple_of(4));
        let kernel = kernels::DenseProduct {
            b_along: self.along,
            b_type: self.kind,
            fours_along: fours(&[k, a.stride, a.head])
                && (!self.along || fours(&[b.stride, b.head])),
            fours_across: fours(&[n, c.stride, c.head])
                && (self.along || fours(&[b.stride, b.head])),
            factors: false,
            clip_a: false,
            bias: false,
            clip_c: false,
            gelu: false,
            across: word(n.div_ceil(SIDE).clamp(8, 16)),
        };
        let push = DenseProductPush {
            a: a.address,
            b: b.address,
            c: c.address,
            side: 0,
            m: word(m),
            n: word(n),
            k: word(k),
            a_stride: word(a.stride),
            b_stride: word(b.stride),
            c_stride: word(c.stride),
            a_head: word(a.head),
            b_head: word(b.head),
            c_head: word(c.head),
            share: word(share),
            a_least: 0.0,
            a_most: 0.0,
            c_least: 0.0,
            c_most: 0.0,
            factor: 1.0,
            _gap: 0,
        };
        (kernel, push)
    }

    fn call(&self, kernel: &kernels::DenseProduct, push: &DenseProductPush) -> Call {
        let [m, n, k] = self.size;
        let across = kernel.across as usize;
        let (rows, cols) = (THREADS / across * SIDE, across * SIDE);
        let groups = [n.div_ceil(cols), m.div_ceil(rows), self.heads];
        let work = (groups.iter().product::<usize>() * rows * cols * k) as u64;
        Call { work, ..Call::apart(kernel, push, groups) }
    }
}

/// Returns the workgroups for `count` pieces of work.
fn lines(count: usize, each: usize) -> [usize; 3] {
    let groups = count.div_ceil(each);
    [groups.min(LINE), groups.div_ceil(LINE), 1]
}

fn id(register: Register) -> BufferId {
    BufferId(register.0 as u32)
}

impl Places<'_> {
    fn at(&self, register: Register) -> u64 {
        self.registers[register.0]
    }

    fn vector(&self, number: VectorNumber) -> u64 {
        self.vectors[number.0]
    }

    /// Returns the calls of all operations, in order.
    pub fn calls(&self) -> Vec<Call> {
        let mut calls = Vec::new();
        for op in &self.network.ops {
            match op {
                DenseOp::Product(product) => calls.push(self.product(product)),
                DenseOp::Attention(attention) => self.attention(attention, &mut calls),
                DenseOp::LayerNorm { .. } | DenseOp::RmsNorm { .. } => calls.push(self.norm(op)),
                _ => calls.push(self.each(op)),
            }
        }
        calls
    }

    fn product(&self, product: &DenseProduct) -> Call {
        let DenseProduct { x, matrix, out, input, bias, output, gelu } = *product;
        let DenseShape { outputs, terms, is_transposed } = self.network.matrices[matrix.0];
        let DenseMatrix { address, kind } = self.matrices[matrix.0];
        let stride = if is_transposed { outputs } else { terms };
        let products = HeadProducts {
            size: [self.network.rows(x), outputs, terms],
            heads: 1,
            share: 1,
            a: StridedFactor { address: self.at(x), stride: terms, head: 0 },
            b: StridedFactor { address, stride, head: 0 },
            c: StridedFactor { address: self.at(out), stride: outputs, head: 0 },
            along: !is_transposed,
            kind,
        };
        let (mut kernel, mut push) = products.plain();
        if let Some(Limits { least, most }) = input {
            (kernel.clip_a, push.a_least, push.a_most) = (true, least, most);
        }
        if let Some(Limits { least, most }) = output {
            (kernel.clip_c, push.c_least, push.c_most) = (true, least, most);
        }
        if let Some(bias) = bias {
            (kernel.bias, push.side) = (true, self.vector(bias));
        }
        kernel.gelu = gelu;
        let accesses = vec![Access::Read(id(x)), Access::Write(id(out))];
        Call { accesses, label: "tower product", ..products.call(&kernel, &push) }
    }

    /// Appends scores, softmax and weighted sums of values for each tile of rows.
    fn attention(&self, attention: &DenseAttention, calls: &mut Vec<Call>) {
        let DenseAttention { q, k, v, out, heads, scale } = *attention;
        let (rows, dim) = (self.network.rows(q), heads.dim);
        let (wide, narrow) = (heads.queries * dim, heads.keys * dim);
        let count = self.network.registers.len() as u32;
        let (scores, factors) = (BufferId(count), BufferId(count + 1));
        for first in (0..rows).step_by(self.tile) {
            let n = self.tile.min(rows - first);
            let of_queries = |register: Register| StridedFactor {
                address: self.at(register) + (4 * first * wide) as u64,
                stride: wide,
                head: dim,
            };
            let of_keys = |register: Register| StridedFactor {
                address: self.at(register),
                stride: narrow,
                head: dim,
            };
            let of_scores = StridedFactor { address: self.scores, stride: rows, head: n * rows };
            let (heads, share) = (heads.queries, heads.queries / heads.keys);
            let products = HeadProducts {
                size: [n, rows, dim],
                heads,
                share,
                a: of_queries(q),
                b: of_keys(k),
                c: of_scores,
                along: true,
                kind: 0,
            };
            let (kernel, push) = products.plain();
            let push = DenseProductPush { factor: scale, ..push };
            let accesses = vec![Access::Read(id(q)), Access::Read(id(k)), Access::Write(scores)];
            calls.push(Call { accesses, ..products.call(&kernel, &push) });
            let (x, width) = (self.scores, word(rows));
            let push = DenseSoftmaxPush { x, factors: self.factors, rows: word(n), width };
            let call = Call::apart(&kernels::DenseSoftmax {}, &push, [n, heads, 1]);
            let accesses = vec![Access::Write(scores), Access::Write(factors)];
            calls.push(Call { accesses, work: (heads * n * rows) as u64, ..call });
            let products = HeadProducts {
                size: [n, dim, rows],
                a: of_scores,
                b: of_keys(v),
                c: of_queries(out),
                along: false,
                ..products
            };
            let (kernel, push) = products.plain();
            let kernel = kernels::DenseProduct { factors: true, ..kernel };
            let push = DenseProductPush { side: self.factors, ..push };
            let (read, write) = ([id(v), scores, factors], Access::Share(id(out)));
            let accesses = read.map(Access::Read).into_iter().chain([write]).collect();
            calls.push(Call { accesses, ..products.call(&kernel, &push) });
        }
    }

    fn norm(&self, op: &DenseOp) -> Call {
        let (x, out, width, weight, bias, eps) = match *op {
            DenseOp::LayerNorm { x, out, weight, bias, eps } => {
                (x, out, self.network.width(x), Some(weight), Some(bias), eps)
            }
            DenseOp::RmsNorm { x, out, run, weight, eps } => (x, out, run, weight, None, eps),
            _ => unreachable!("norms only"),
        };
        let runs = self.network.rows(x) * self.network.width(x) / width;
        let address = |vector: Option<VectorNumber>| vector.map_or(0, |number| self.vector(number));
        let push = DenseNormPush {
            x: self.at(x),
            out: self.at(out),
            weight: address(weight),
            bias: address(bias),
            runs: word(runs),
            width: word(width),
            eps,
            _gap: 0,
        };
        let kernel = kernels::DenseNorm { centred: bias.is_some(), weighted: weight.is_some() };
        let accesses = vec![Access::Read(id(x)), Access::Write(id(out))];
        let work = (runs * width) as u64;
        Call { accesses, work, ..Call::apart(&kernel, &push, lines(runs, RUNS)) }
    }

    fn each(&self, op: &DenseOp) -> Call {
        let x = op.reads()[0].expect("every operation reads a register");
        let [rows, width] = self.network.registers[x.0];
        let mut push = DenseEachPush {
            x: self.at(x),
            y: 0,
            z: 0,
            count: word(rows * width),
            width: word(width),
            columns: 0,
            side: 0,
            factor: 0.0,
            _gap: 0,
        };
        let mut accesses = vec![Access::Write(id(op.writes()))];
        accesses
            .extend(op.reads().into_iter().flatten().map(|register| Access::Read(id(register))));
        let kind = match *op {
            DenseOp::Add { other, .. } | DenseOp::Multiply { other, .. } => {
                push.y = self.at(other);
                if matches!(op, DenseOp::Add { .. }) { ADD } else { MULTIPLY }
            }
            DenseOp::Scale { factor, .. } => {
                push.factor = factor;
                SCALE
            }
            DenseOp::Standardize { bias, scale, .. } => {
                (push.y, push.z) = (self.vector(bias), self.vector(scale));
                STANDARDIZE
            }
            DenseOp::Rotate { half, columns, angles, .. } => {
                push.count /= 2;
                (push.side, push.columns) = (word(half), word(columns));
                push.y = self.vector(angles);
                ROTATE
            }
            DenseOp::Pool { out, side, columns, .. } => {
                push.count = word(self.network.rows(out) * width);
                (push.side, push.columns) = (word(side), word(columns));
                push.z = self.at(out);
                push.factor = 1.0 / (side * side) as f32;
                POOL
            }
            _ => unreachable!("operations on values only"),
        };
        let groups = lines(push.count as usize, EACH);
        let call = Call::apart(&kernels::DenseEach { kind }, &push, groups);
        Call { accesses, work: u64::from(push.count), ..call }
    }
}
