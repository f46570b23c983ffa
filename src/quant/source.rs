//! Tensors of the source as floats, a run of rows at a time, through `pread`: nothing of a 54 GB
//! checkpoint stays mapped.

use super::layout::Entry;
use crate::checkpoint::gguf::types;
use crate::checkpoint::{Checkpoint, Dtype, Kind, TensorView};
use crate::error::Fault;
use crate::models::Weights;
use crate::tensor::{Code, GgmlType, Matrix};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::ops::Range;

/// Weights read at once, so that the bytes they came from take little memory.
const PIECE: usize = 1 << 20;

/// Takes bytes as stored and what they mean, piece by piece.
pub type Take<'a> = &'a mut dyn FnMut(&[u8], &[f32]) -> Result<()>;

/// One tensor of the source.
pub enum Reader<'a> {
    Plain {
        checkpoint: &'a Checkpoint,
        entry: &'a Entry,
        dtype: Dtype,
    },
    /// It is stored in blocks of a GGUF type that the program has no kernels for.
    Blocks {
        checkpoint: &'a Checkpoint,
        entry: &'a Entry,
        code: Code,
        ggml: GgmlType,
    },
    /// The source is quantised already.
    Packed {
        entry: &'a Entry,
        matrix: Matrix<'a>,
    },
}

impl<'a> Reader<'a> {
    pub fn open(source: &'a Weights, entry: &'a Entry) -> Result<Self> {
        let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
        match checkpoint.lookup(&entry.name).map(|s| s.kind) {
            Some(Kind::Plain(dtype)) => Ok(Reader::Plain { checkpoint, entry, dtype }),
            Some(Kind::Blocks(code)) => {
                let ggml = code.spec().ggml.context("blocks of a file have a type there")?;
                Ok(Reader::Blocks { checkpoint, entry, code, ggml })
            }
            Some(Kind::Packed(_)) if entry.role.is_matrix() => {
                Ok(Reader::Packed { entry, matrix: source.matrix(entry.role, entry.layer)? })
            }
            Some(Kind::Packed(_)) => {
                Ok(Reader::Packed { entry, matrix: checkpoint.matrix(&entry.name)? })
            }
            None => Err(Fault::model(format!("tensor `{}` went missing", entry.name)).into()),
        }
    }

    /// Some rows as floats, all finite. `hash` is fed what the source stores of them.
    pub fn rows(&self, rows: Range<usize>, hash: &mut Sha256) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        self.pieces(rows, &mut |bytes, values| {
            hash.update(bytes);
            out.extend_from_slice(values);
            Ok(())
        })?;
        Ok(out)
    }

    /// The same piece by piece: bytes as stored (of packed weights: their values), and what they
    /// mean.
    pub fn pieces(&self, rows: Range<usize>, each: Take<'_>) -> Result<()> {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        match self {
            Reader::Plain { checkpoint, entry, dtype } => {
                let (width, end) = (dtype.bitsize() / 8, rows.end * entry.cols);
                for start in (rows.start * entry.cols..end).step_by(PIECE) {
                    let n = PIECE.min(end - start);
                    checkpoint.read(&entry.name, start * width..(start + n) * width, &mut bytes)?;
                    values.clear();
                    TensorView { dtype: *dtype, shape: &[n], data: &bytes }
                        .read_f32(0..n, &mut values)?;
                    check(entry, start, &values)?;
                    each(&bytes, &values)?;
                }
            }
            Reader::Blocks { checkpoint, entry, code, ggml } => {
                let end = rows.end * entry.cols;
                for start in (rows.start * entry.cols..end).step_by(PIECE) {
                    let n = PIECE.min(end - start);
                    checkpoint.read(
                        &entry.name,
                        ggml.bytes_of(start)..ggml.bytes_of(start + n),
                        &mut bytes,
                    )?;
                    values.resize(n, 0.0);
                    types::decode(*code, &bytes, &mut values)?;
                    check(entry, start, &values)?;
                    each(&bytes, &values)?;
                }
            }
            Reader::Packed { entry, matrix } => {
                for row in rows {
                    values.resize(entry.cols, 0.0);
                    matrix.dequantize_row(row, &mut values);
                    check(entry, row * entry.cols, &values)?;
                    each(bytemuck::cast_slice(&values), &values)?;
                }
            }
        }
        Ok(())
    }
}

/// Refuses what would poison a whole row silently; `start` is the first value's place in the
/// tensor.
fn check(entry: &Entry, start: usize, values: &[f32]) -> Result<()> {
    let Some(at) = values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    let place = match entry.role.is_matrix() {
        true => format!("row {}", (start + at) / entry.cols),
        false => format!("place {}", start + at),
    };
    Err(Fault::model(format!("tensor `{}` holds {} in {place}", entry.name, values[at]))
        .help("the source is damaged or was merged badly: fetch or make it again")
        .into())
}
