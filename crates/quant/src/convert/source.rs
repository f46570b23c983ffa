//! Tensors of the source as f32, read some rows at a time.
//!
//! They are read by `pread`, so that no part of a checkpoint of 54 GB stays mapped.

use crate::layout::TensorPlan;
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Matrix;
use gemma_model::checkpoint::{Checkpoint, Dtype, TensorStorage, TensorView};
use gemma_model::models::Weights;
use sha2::{Digest, Sha256};
use std::ops::Range;

/// Weights read at once. It bounds the memory for stored bytes.
const PIECE: usize = 1 << 20;

/// Called for each piece with its stored bytes and its values.
pub type Take<'a> = &'a mut dyn FnMut(&[u8], &[f32]) -> Result<()>;

/// One tensor of the source.
pub enum SourceTensor<'a> {
    Plain {
        checkpoint: &'a Checkpoint,
        entry: &'a TensorPlan,
        dtype: Dtype,
    },
    /// A tensor that the source stores in a packed format of this program.
    Packed {
        entry: &'a TensorPlan,
        matrix: Matrix<'a>,
    },
}

impl<'a> SourceTensor<'a> {
    pub fn open(source: &'a Weights, entry: &'a TensorPlan) -> Result<Self> {
        let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
        match checkpoint.lookup(&entry.name).map(|s| s.kind) {
            Some(TensorStorage::Plain(dtype)) => {
                Ok(SourceTensor::Plain { checkpoint, entry, dtype })
            }
            Some(TensorStorage::Packed(_)) if entry.role.is_matrix() => {
                Ok(SourceTensor::Packed { entry, matrix: source.matrix(entry.role, entry.layer)? })
            }
            Some(TensorStorage::Packed(_)) => {
                Ok(SourceTensor::Packed { entry, matrix: checkpoint.matrix(&entry.name)? })
            }
            None => Err(Fault::model(format!("tensor `{}` went missing", entry.name)).into()),
        }
    }

    /// Returns some rows as f32. Refuses values that are not finite. Adds the stored bytes to
    /// `hash`.
    pub fn rows(&self, rows: Range<usize>, hash: &mut Sha256) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        self.pieces(rows, &mut |bytes, values| {
            hash.update(bytes);
            out.extend_from_slice(values);
            Ok(())
        })?;
        Ok(out)
    }

    /// Calls `each` for each piece of some rows, with its stored bytes and its values. For packed
    /// weights, the bytes are those of the decoded values.
    pub fn pieces(&self, rows: Range<usize>, each: Take<'_>) -> Result<()> {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        match self {
            SourceTensor::Plain { checkpoint, entry, dtype } => {
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
            SourceTensor::Packed { entry, matrix } => {
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

/// Refuses values that are not finite, because one of them makes a whole row useless. `start` is
/// the index of the first value in the tensor.
fn check(entry: &TensorPlan, start: usize, values: &[f32]) -> Result<()> {
    let Some(at) = values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    let place = match entry.role.is_matrix() {
        true => format!("row {}", (start + at) / entry.cols),
        false => format!("place {}", start + at),
    };
    Err(Fault::model(format!("tensor `{}` holds {} in {place}", entry.name, values[at]))
        .help("the source is damaged or was merged badly: fetch or make it again")
        .into())
}
