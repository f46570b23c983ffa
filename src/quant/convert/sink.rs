//! A tensor on its way into a file of the result, in the shape that the container asks for.

use super::staging::Growing;
use crate::checkpoint::gguf::Kind;
use crate::quant::layout::Entry;
use crate::tensor::Matrix;
use anyhow::Result;
use half::f16;
use sha2::{Digest, Sha256};

/// Rows turned into blocks at once.
const ROWS: usize = 1024;

/// Hashes what it writes.
pub struct Sink<'a> {
    entry: &'a Entry,
    file: &'a mut Growing,
    hash: Sha256,
    /// They follow the codes.
    scales: Vec<f16>,
}

impl<'a> Sink<'a> {
    pub fn new(entry: &'a Entry, file: &'a mut Growing) -> Self {
        Sink { entry, file, hash: Sha256::new(), scales: Vec::new() }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes)
    }

    /// Some more rows, coded.
    pub fn matrix(&mut self, matrix: &Matrix<'_>) -> Result<()> {
        match self.entry.block {
            None => {
                self.scales.extend_from_slice(&matrix.scales);
                self.put(&matrix.codes)
            }
            Some(_) if !self.entry.role.is_matrix() => self.norm(&matrix.dequantize()),
            Some(kind @ (Kind::Q4_0 | Kind::Q8_0)) => {
                for start in (0..matrix.rows).step_by(ROWS) {
                    self.put(&kind.encode(matrix, start..(start + ROWS).min(matrix.rows)))?;
                }
                Ok(())
            }
            Some(_) => self.put(&matrix.codes),
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
        let scales = std::mem::take(&mut self.scales);
        self.put(bytemuck::cast_slice(&scales))?;
        self.put(&vec![0; self.entry.padding()])?;
        Ok(crate::util::hex(self.hash.finalize()))
    }
}
