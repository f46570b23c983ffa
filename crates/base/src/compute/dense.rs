//! A dense float network as data: registers of f32 rows and the operations on them, in order.
//!
//! Image towers are such networks. A [`DenseDevice`] runs one. The processor's implementation is
//! the reference: products follow [`crate::tensor::product`], row operations [`super::cpu::dense`].
//! A device that fuses multiply-adds and rounds divisions correctly returns the same bits. Other
//! devices differ by up to 1e-4 for values around 1.

use anyhow::Result;

/// A register: rows of one width that stay on the device between operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Register(pub usize);

/// Index of a matrix of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixNumber(pub usize);

/// Index of a vector of the network: a bias, the factors of a norm, or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorNumber(pub usize);

/// Bounds that values are clamped to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub least: f32,
    pub most: f32,
}

/// Head counts and width of an attention operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseHeads {
    pub queries: usize,
    /// Heads of keys and values; divides the number of query heads.
    pub keys: usize,
    pub dim: usize,
}

/// The shape of a matrix of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseShape {
    pub outputs: usize,
    /// Length of each dot product: the width of the other factor.
    pub terms: usize,
    /// Stored as `[terms, outputs]`, not `[outputs, terms]`.
    pub is_transposed: bool,
}

/// A product with a matrix, followed by the operations of the fields below, in their order.
#[derive(Clone, Copy, Debug)]
pub struct DenseProduct {
    pub x: Register,
    pub matrix: MatrixNumber,
    pub out: Register,
    /// Bounds of the values of `x`.
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
    /// RMSNorm of each run of `run` values. `None` as the weight means all ones.
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
    /// Rotates the two halves of each head; `half` is their length.
    ///
    /// The rows of a register form a grid. The first half is rotated by the row's column index in
    /// the grid, the second by its row index. `angles` holds sine and cosine, `[position, half / 2,
    /// 2]`.
    Rotate {
        x: Register,
        half: usize,
        columns: usize,
        angles: VectorNumber,
    },
    /// Averages squares of `side` x `side` rows; the grid has `columns` squares in a row.
    Pool {
        x: Register,
        out: Register,
        side: usize,
        columns: usize,
    },
}

/// A network together with its inputs.
#[derive(Clone, Debug, Default)]
pub struct DenseNetwork {
    /// Identifies the matrices: networks of equal identity have the same matrices in the same
    /// order.
    pub identity: [u8; 32],
    /// Rows and width of each register.
    pub registers: Vec<[usize; 2]>,
    /// Initial values of registers.
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

/// Source of the matrices of a network.
pub trait DenseWeights: Sync {
    /// Reads a matrix.
    ///
    /// # Errors
    /// An error if its file cannot be read.
    fn read(&self, matrix: MatrixNumber) -> Result<DenseValues<'_>>;
    /// Returns the number of bytes that `read` returns.
    fn bytes(&self, matrix: MatrixNumber) -> u64;
}

/// A device that computes dense networks. It keeps the matrices of the latest identity.
pub trait DenseDevice: Send + Sync + std::fmt::Debug {
    /// Uploads the matrices of a network unless they are on the device. Returns their bytes.
    ///
    /// # Errors
    /// An error if they cannot be read, or if the device has no room for them or is lost.
    fn load(&self, network: &DenseNetwork, weights: &dyn DenseWeights) -> Result<u64>;
    /// Runs the network and returns the output register. Loads the matrices if they are missing.
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

    /// Adds a register with initial values.
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

    /// Returns whether no operation after `at` reads the register's current value.
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

    /// Returns the register that an operation overwrites completely.
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
