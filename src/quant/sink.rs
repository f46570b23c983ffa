//! A tensor on its way into a file of the result, in the shape that the container asks for.

use super::gguf;
use super::layout::Entry;
use super::staging::Growing;
use crate::checkpoint::gguf::types;
use crate::tensor::Matrix;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Rows turned into blocks at once.
const ROWS: usize = 1024;

/// Hashes what it writes.
pub struct Sink<'a> {
    entry: &'a Entry,
    file: &'a mut Growing,
    hash: Sha256,
    /// It follows the codes.
    side: Vec<u8>,
}

impl<'a> Sink<'a> {
    pub fn new(entry: &'a Entry, file: &'a mut Growing) -> Self {
        Sink { entry, file, hash: Sha256::new(), side: Vec::new() }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes)
    }

    /// Some more rows, coded.
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

    /// Some more plain weights: their bytes in the source, and what they mean.
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

    /// The rest of it; SHA-256 of all, in hexadecimal.
    pub fn finish(mut self) -> Result<String> {
        let side = std::mem::take(&mut self.side);
        self.put(&side)?;
        let e = self.entry;
        if let Some(code) = e.block {
            self.put(&vec![0; gguf::padding(e.role, e.layer, code, e.rows, e.cols)])?;
        }
        Ok(crate::util::hex(self.hash.finalize()))
    }
}
