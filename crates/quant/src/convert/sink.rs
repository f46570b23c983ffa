//! Writer of one tensor, in the layout of an artifact or of a GGUF file.

use super::staging::StagedFile;
use crate::layout::TensorPlan;
use anyhow::{Context, Result};
use gemma_base::tensor::{Code, Matrix};
use gemma_model::checkpoint::gguf::types;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Rows converted to GGUF blocks at once.
const ROWS: usize = 1024;

/// The rows of a tensor that are written already.
#[derive(Default)]
pub struct WrittenRows {
    /// Hash of the bytes in the file.
    pub hash: Sha256,
    pub bytes: u64,
    /// The scales, which are written after the codes.
    pub side: Vec<u8>,
    /// Number of bytes of the scales that are saved in the staging directory.
    pub side_saved: u64,
}

/// Writes one tensor to its file and hashes the bytes.
pub struct TensorWriter<'a> {
    entry: &'a TensorPlan,
    file: &'a mut StagedFile,
    written: WrittenRows,
}

impl<'a> TensorWriter<'a> {
    /// Returns a writer that continues after the rows `written`.
    pub fn new(entry: &'a TensorPlan, file: &'a mut StagedFile, written: WrittenRows) -> Self {
        TensorWriter { entry, file, written }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.written.hash.update(bytes);
        self.written.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Writes more coded rows.
    pub fn matrix(&mut self, matrix: &Matrix<'_>) -> Result<()> {
        match self.entry.block {
            None => {
                self.written.side.extend_from_slice(&matrix.side);
                self.put(&matrix.codes)
            }
            Some(Code::F32) => self.floats(&matrix.dequantize()),
            Some(_) if !matrix.format.code.is_integer() => self.put(&matrix.codes),
            Some(_) => {
                for start in (0..matrix.rows).step_by(ROWS) {
                    let rows = start..(start + ROWS).min(matrix.rows);
                    self.put(
                        &types::encode(matrix, rows)
                            .context("no encoder for this type of block")?,
                    )?;
                }
                Ok(())
            }
        }
    }

    /// Writes more plain weights: their bytes in the source, or their values.
    pub fn plain(&mut self, bytes: &[u8], values: &[f32]) -> Result<()> {
        match self.entry.block {
            Some(Code::F32) => self.floats(values),
            _ => self.put(bytes),
        }
    }

    fn floats(&mut self, values: &[f32]) -> Result<()> {
        let values: Vec<f32> = values.iter().map(|v| v + self.entry.base).collect();
        self.put(bytemuck::cast_slice(&values))
    }

    /// Syncs the written rows to disk, and their scales to a separate file. Returns the SHA-256 of
    /// both.
    pub fn save(&mut self, side: &Path) -> Result<String> {
        self.file.sync()?;
        let WrittenRows { hash, side: scales, side_saved, .. } = &mut self.written;
        let mut file = StagedFile::open(side, *side_saved)?;
        file.write_all(&scales[*side_saved as usize..])?;
        file.sync()?;
        *side_saved = scales.len() as u64;
        Ok(gemma_base::util::hex(hash.clone().chain_update(scales).finalize()))
    }

    /// Returns the bytes written so far, and the bytes of the scales.
    pub fn sizes(&self) -> [u64; 2] {
        [self.written.bytes, self.written.side.len() as u64]
    }

    /// Writes scales and padding. Returns the SHA-256 of all bytes, in hexadecimal.
    pub fn finish(mut self) -> Result<String> {
        let side = std::mem::take(&mut self.written.side);
        self.put(&side)?;
        self.put(&vec![0; self.entry.padding()])?;
        Ok(gemma_base::util::hex(self.written.hash.finalize()))
    }
}
