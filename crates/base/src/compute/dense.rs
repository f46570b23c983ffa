//! A dense float network as data: registers of f32 rows and the operations on them, in order.
//!
//! Image towers are such networks. A [`DenseDevice`] computes one. The processor's way is the
//! definition: products follow [`crate::tensor::product`], row operations [`super::cpu::dense`]. A
//! device that fuses multiply-adds and rounds divisions correctly gives the same bits; others come
//! within 1e-4 of values around 1.

use anyhow::Result;

/// A register: rows of one width that stay on the device between operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Register(pub usize);

/// A matrix of a network, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixNumber(pub usize);

/// A vector of a network, by its number: a bias, factors of a norm, or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorNumber(pub usize);

/// The limits of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub least: f32,
    pub most: f32,
}

/// Heads of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseHeads {
    pub queries: usize,
    /// Heads of keys and values, which divide those of the queries.
    pub keys: usize,
    pub dim: usize,
}

/// The shape of a matrix of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseShape {
    pub outputs: usize,
    /// Terms of each output: the width of the other factor.
    pub terms: usize,
    /// Stored as `[terms, outputs]`, not `[outputs, terms]`.
    pub is_transposed: bool,
}

/// A product with a matrix, and what is done to each finished value, in the order of the fields.
#[derive(Clone, Copy, Debug)]
pub struct DenseProduct {
    pub x: Register,
    pub matrix: MatrixNumber,
    pub out: Register,
    /// Limits of the values of `x`.
    pub input: Option<Limits>,
    pub bias: Option<VectorNumber>,
    pub output: Option<Limits>,
    /// GELU in its tanh form.
    pub gelu: bool,
}

/// Attention of all rows to all rows: `softmax(scale * q k^T) v`, head by head.
#[derive(Clone, Copy, Debug)]
pub struct DenseAttention {
    pub q: Register,
    pub k: Register,
    pub v: Register,
    pub out: Register,
    pub heads: DenseHeads,
    pub scale: f32,
}

/// An operation. `out` may be `x`, except in products, attention and pools.
#[derive(Clone, Copy, Debug)]
pub enum DenseOp {
    Product(DenseProduct),
    LayerNorm {
        x: Register,
        out: Register,
        weight: VectorNumber,
        bias: VectorNumber,
        eps: f32,
    },
    /// RMSNorm of each run of `run` values. No weight is a weight of ones.
    RmsNorm {
        x: Register,
        out: Register,
        run: usize,
        weight: Option<VectorNumber>,
        eps: f32,
    },
    Attention(DenseAttention),
    /// `x += other`.
    Add {
        x: Register,
        other: Register,
    },
    /// `x *= other`.
    Multiply {
        x: Register,
        other: Register,
    },
    /// `x *= factor`.
    Scale {
        x: Register,
        factor: f32,
    },
    /// `x = (x - bias) * scale`, row by row.
    Standardize {
        x: Register,
        bias: VectorNumber,
        scale: VectorNumber,
    },
    /// Rotates the halves of each head, of `half` values. Registers hold the rows of a grid: the
    /// first half is rotated by the column of its place there, the second by the row. `angles`
    /// holds sine and cosine, `[position, half / 2, 2]`.
    Rotate {
        x: Register,
        half: usize,
        columns: usize,
        angles: VectorNumber,
    },
    /// Means of the squares of `side` rows a side, with `columns` squares in a row of the grid.
    Pool {
        x: Register,
        out: Register,
        side: usize,
        columns: usize,
    },
}

/// A network on inputs.
#[derive(Clone, Debug, Default)]
pub struct DenseNetwork {
    /// Names the matrices: networks of one identity have the same ones, numbered alike.
    pub identity: [u8; 32],
    /// Rows and width of each register.
    pub registers: Vec<[usize; 2]>,
    /// Values of registers at the start.
    pub inputs: Vec<(Register, Vec<f32>)>,
    pub matrices: Vec<DenseShape>,
    pub vectors: Vec<Vec<f32>>,
    pub ops: Vec<DenseOp>,
    pub output: Register,
}

/// Stored values of a matrix, row-major, little-endian.
#[derive(Debug)]
pub enum DenseValues<'a> {
    F32(Vec<f32>),
    F16(&'a [u8]),
    Bf16(&'a [u8]),
}

/// Where the matrices of a network are.
pub trait DenseWeights: Sync {
    /// Reads a matrix.
    ///
    /// # Errors
    /// An error if its file cannot be read.
    fn read(&self, matrix: MatrixNumber) -> Result<DenseValues<'_>>;
    /// Returns the bytes of what `read` returns.
    fn bytes(&self, matrix: MatrixNumber) -> u64;
}

/// A device that computes dense networks. It keeps the matrices of the last identity.
pub trait DenseDevice: Send + Sync + std::fmt::Debug {
    /// Puts the matrices of a network on the device, unless they are there. Returns their bytes.
    ///
    /// # Errors
    /// An error if they cannot be read, or if the device has no room for them or is lost.
    fn load(&self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<u64>;
    /// Computes the values of the output register. Loads the matrices if they are missing.
    ///
    /// # Errors
    /// As for `load`.
    fn run(&self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<Vec<f32>>;
}

impl DenseNetwork {
    pub fn register(&mut self, rows: usize, width: usize) -> Register {
        self.registers.push([rows, width]);
        Register(self.registers.len() - 1)
    }

    /// Returns a register that holds values at the start.
    pub fn input(&mut self, values: Vec<f32>, width: usize) -> Register {
        debug_assert!(width > 0 && values.len().is_multiple_of(width));
        let register = self.register(values.len() / width, width);
        self.inputs.push((register, values));
        register
    }

    pub fn vector(&mut self, values: &[f32]) -> VectorNumber {
        self.vectors.push(values.to_vec());
        VectorNumber(self.vectors.len() - 1)
    }

    pub fn width(&self, register: Register) -> usize {
        self.registers[register.0][1]
    }

    pub fn rows(&self, register: Register) -> usize {
        self.registers[register.0][0]
    }

    /// Returns whether nothing reads what a register holds after operation `at`.
    pub fn is_last_use(&self, at: usize, register: Register) -> bool {
        for op in &self.ops[at + 1..] {
            if op.reads().contains(&Some(register)) {
                return false;
            }
            if op.writes() == register {
                return true;
            }
        }
        self.output != register
    }
}

impl DenseOp {
    /// Returns the registers that an operation reads.
    pub fn reads(&self) -> [Option<Register>; 3] {
        match *self {
            DenseOp::Product(DenseProduct { x, .. })
            | DenseOp::LayerNorm { x, .. }
            | DenseOp::RmsNorm { x, .. }
            | DenseOp::Scale { x, .. }
            | DenseOp::Standardize { x, .. }
            | DenseOp::Rotate { x, .. }
            | DenseOp::Pool { x, .. } => [Some(x), None, None],
            DenseOp::Add { x, other } | DenseOp::Multiply { x, other } => {
                [Some(x), Some(other), None]
            }
            DenseOp::Attention(DenseAttention { q, k, v, .. }) => [Some(q), Some(k), Some(v)],
        }
    }

    /// Returns the register that an operation writes, whole.
    pub fn writes(&self) -> Register {
        match *self {
            DenseOp::Product(DenseProduct { out, .. })
            | DenseOp::LayerNorm { out, .. }
            | DenseOp::RmsNorm { out, .. }
            | DenseOp::Pool { out, .. }
            | DenseOp::Attention(DenseAttention { out, .. }) => out,
            DenseOp::Add { x, .. }
            | DenseOp::Multiply { x, .. }
            | DenseOp::Scale { x, .. }
            | DenseOp::Standardize { x, .. }
            | DenseOp::Rotate { x, .. } => x,
        }
    }
}
