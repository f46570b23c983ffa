//! Tensor types of GGUF files: their numbers and names, and conversion of their blocks to matrices
//! and back. The table of [`gemma_base::tensor::block`] defines how each type stores a block.

use crate::checkpoint::Dtype;
use anyhow::Result;
use gemma_base::tensor::block::BLOCKS;
use gemma_base::tensor::ggml::{OpenBlock, WEIGHTS};
use gemma_base::tensor::{Code, Format, GgmlType, Matrix, Values, side};
use gemma_base::util::threads;
use std::ops::Range;

/// All types of ggml. Types with their name in the table of blocks can be read.
const TYPES: [(u32, &str); 29] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// Weights that one thread decodes per task.
const RUN: usize = 1 << 20;

/// Returns the name of the type with this number, if ggml has one.
pub fn name(number: u32) -> Option<&'static str> {
    TYPES.iter().find(|row| row.0 == number).map(|row| row.1)
}

/// Returns the code of a readable type.
pub fn code(number: u32) -> Option<Code> {
    let name = name(number)?;
    BLOCKS.iter().find(|block| block.ggml.is_some_and(|t| t.name == name)).map(|block| block.code)
}

/// Returns the type number of a code.
pub fn number(code: Code) -> Option<u32> {
    let name = code.spec().ggml?.name;
    TYPES.iter().find(|row| row.1 == name).map(|row| row.0)
}

/// Lists all readable types, for messages.
pub fn readable() -> String {
    let names = TYPES.iter().filter(|row| code(row.0).is_some()).map(|row| row.1);
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the dtype of a code of plain floats.
pub fn dtype(code: Code) -> Option<Dtype> {
    match code {
        Code::F32 => Some(Dtype::F32),
        Code::F16 => Some(Dtype::F16),
        Code::Bf16 => Some(Dtype::BF16),
        _ => None,
    }
}

/// Converts the blocks of a type to integers.
#[derive(Clone, Copy)]
pub struct Opener {
    pub format: Format,
    pub ggml: GgmlType,
    open: OpenBlock,
    values: Values,
}

impl Opener {
    pub fn new(code: Code) -> Option<Opener> {
        let ggml = code.spec().ggml?;
        let (format, values) = (Format::of_file(code)?, code.spec().values);
        Some(Opener { format, ggml, open: ggml.split?.open, values })
    }

    /// Calls `each` with the stored codes and the side of every block, and the block's slice of
    /// `out`.
    fn blocks(&self, data: &[u8], out: &mut [u8], each: impl Fn(&[u8], &[u8], &mut [u8])) {
        let (mut codes, mut side) = ([0; WEIGHTS], [0; side::BYTES]);
        let codes = match self.values {
            Values::Grid(_) => &mut codes[..self.code_bytes()],
            _ => &mut codes[..self.ggml.weights],
        };
        let side = &mut side[..self.format.code.spec().side.bytes()];
        let blocks = data.len() / self.ggml.bytes;
        let outputs = out.chunks_exact_mut(out.len() / blocks.max(1));
        for (block, out) in data.chunks_exact(self.ggml.bytes).zip(outputs) {
            (self.open)(block, codes, side);
            each(codes, side, out);
        }
    }

    /// Writes the packed codes of blocks.
    pub fn codes(&self, data: &[u8], out: &mut [u8]) {
        self.blocks(data, out, |codes, _, out| match self.values {
            Values::Integer(integer) => integer.pack(codes, out),
            _ => out.copy_from_slice(codes),
        });
    }

    /// Writes the side of blocks.
    pub fn side(&self, data: &[u8], out: &mut [u8]) {
        self.blocks(data, out, |_, side, out| out.copy_from_slice(side));
    }

    /// Returns the bytes of the packed codes of a block.
    pub fn code_bytes(&self) -> usize {
        self.ggml.weights * self.format.code.bits_of_eight() / 64
    }

    /// Returns the bytes of a block's side.
    pub fn side_bytes(&self) -> usize {
        self.format.code.spec().side.bytes()
    }
}

/// Converts rows of blocks to a matrix with exactly the same values.
pub fn matrix(
    code: Code,
    rows: usize,
    cols: usize,
    data: &[u8],
    threads: usize,
) -> Result<Matrix<'static>> {
    let opener = opener(code, rows, cols, data)?;
    let blocks = rows * cols / opener.ggml.weights;
    let mut codes = vec![0; blocks * opener.code_bytes()];
    spread(&opener, data, &mut codes, threads, Opener::codes);
    let mut side = vec![0; blocks * opener.side_bytes()];
    spread(&opener, data, &mut side, threads, Opener::side);
    Matrix::new(opener.format, rows, cols, codes, side)
}

fn opener(code: Code, rows: usize, cols: usize, data: &[u8]) -> Result<Opener> {
    let opener = Opener::new(code).filter(|opener| {
        cols.is_multiple_of(opener.ggml.weights) && data.len() == opener.ggml.bytes_of(rows * cols)
    });
    opener
        .ok_or_else(|| anyhow::anyhow!("{code:?} [{rows}, {cols}] is not of {} bytes", data.len()))
}

/// Splits input and output at the same blocks and processes the pieces in parallel.
fn spread(
    opener: &Opener,
    data: &[u8],
    out: &mut [u8],
    threads: usize,
    work: impl Fn(&Opener, &[u8], &mut [u8]) + Sync,
) {
    let blocks = data.len() / opener.ggml.bytes;
    let width = out.len() / blocks.max(1);
    let each = blocks.div_ceil(threads.max(1)).max(RUN / 32);
    std::thread::scope(|scope| {
        for (data, out) in data.chunks(each * opener.ggml.bytes).zip(out.chunks_mut(each * width)) {
            let work = &work;
            threads::spawn(scope, move || work(opener, data, out));
        }
    });
}

/// Converts rows of a matrix to blocks of its GGUF type. If a group is wider than a block, its
/// scale is repeated. `None` if this type is never written.
pub fn encode(matrix: &Matrix<'_>, rows: Range<usize>) -> Option<Vec<u8>> {
    let Opener { ggml, values: Values::Integer(integer), .. } = Opener::new(matrix.format.code)?
    else {
        return None;
    };
    let close = ggml.split?.close?;
    let mut out = vec![0; rows.len() * ggml.bytes_of(matrix.cols)];
    let (group, bytes) =
        (matrix.format.group_cols(matrix.cols), matrix.format.code.spec().side.bytes());
    let mut codes = vec![0; ggml.weights];
    for (row, out) in rows.zip(out.chunks_exact_mut(ggml.bytes_of(matrix.cols))) {
        let (packed, side) = (matrix.row(row), matrix.row_side(row));
        for (i, block) in out.chunks_exact_mut(ggml.bytes).enumerate() {
            let first = i * ggml.weights;
            let integers = (first..).map(|col| integer.at(packed, col) + integer.zero);
            codes.iter_mut().zip(integers).for_each(|(code, q)| *code = q as u8);
            close(&codes, &side[first / group * bytes..][..bytes], block);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_the_table_has_a_number() {
        for block in BLOCKS.iter().filter(|block| block.ggml.is_some()) {
            assert_eq!(code(number(block.code).unwrap()), Some(block.code), "{}", block.name);
        }
        assert_eq!((name(19), code(19), name(4)), (Some("IQ1_S"), None, None));
    }

    /// A native matrix is at most as large as its blocks. Types that are written also convert back.
    #[test]
    fn blocks_go_there_and_back() {
        for block in BLOCKS.iter() {
            let Some(Opener { ggml, .. }) = Opener::new(block.code) else { continue };
            // More blocks than one thread's task.
            let (rows, cols) = (1100, 512);
            let n = rows * ggml.bytes_of(cols);
            // The mask keeps f16 exponents from being all ones.
            let data: Vec<u8> = (0..n).map(|i| (i * 37 + i / 251 * 11) as u8 & 0xbb).collect();
            let native = matrix(block.code, rows, cols, &data, 2).unwrap();
            let side = block.side.bytes() * rows * cols / ggml.weights;
            assert_eq!(native.bytes(), rows * cols * block.bits_of_eight / 64 + side);
            assert!(native.bytes() <= data.len(), "{}", block.name);
            if let Some(written) = encode(&native, 0..rows) {
                assert_eq!(written, data, "{}", block.name);
            }
        }
    }
}
