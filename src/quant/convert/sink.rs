//! Writer of one tensor, in the layout of the artifact or of a GGUF file.

use super::staging::StagedFile;
use crate::checkpoint::gguf::types;
use crate::quant::layout::TensorPlan;
use crate::tensor::Matrix;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Rows converted to GGUF blocks at once.
const ROWS: usize = 1024;

/// Writes one tensor to its file and hashes the bytes.
pub struct TensorWriter<'a> {
    entry: &'a TensorPlan,
    file: &'a mut StagedFile,
    hash: Sha256,
    /// The side, which is written after the codes.
    side: Vec<u8>,
}

impl<'a> TensorWriter<'a> {
    pub fn new(entry: &'a TensorPlan, file: &'a mut StagedFile) -> Self {
        TensorWriter { entry, file, hash: Sha256::new(), side: Vec::new() }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes)
    }

    /// Writes more coded rows.
    pub fn matrix(&mut self, matrix: &Matrix<'_>) -> Result<()> {
        match self.entry.block {
            None => {
                self.side.extend_from_slice(&matrix.side);
                self.put(&matrix.codes)
            }
            Some(_) if !self.entry.role.is_matrix() => self.norm(&matrix.dequantize()),
            Some(_) if !matrix.format.code.is_integer() => self.put(&matrix.codes),
            Some(_) => {
                for start in (0..matrix.rows).step_by(ROWS) {
                    let rows = start..(start + ROWS).min(matrix.rows);
                    self.put(&types::encode(matrix, rows).context("no such blocks are written")?)?;
                }
                Ok(())
            }
        }
    }

    /// Writes more plain weights: their bytes in the source, or their values.
    pub fn plain(&mut self, bytes: &[u8], values: &[f32]) -> Result<()> {
        match self.entry.block {
            Some(_) if !self.entry.role.is_matrix() => self.norm(values),
            _ => self.put(bytes),
        }
    }

    fn norm(&mut self, values: &[f32]) -> Result<()> {
        let plus_one: Vec<f32> = values.iter().map(|v| v + 1.0).collect();
        self.put(bytemuck::cast_slice(&plus_one))
    }

    /// Writes scales and padding. Returns the SHA-256 of all bytes, in hexadecimal.
    pub fn finish(mut self) -> Result<String> {
        let side = std::mem::take(&mut self.side);
        self.put(&side)?;
        self.put(&vec![0; self.entry.padding()])?;
        Ok(crate::util::hex(self.hash.finalize()))
    }
}
