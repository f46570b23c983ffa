//! A weight matrix where it is kept: bytes that several threads read piece by piece, and how the
//! weights lie in them. For executors that unpack weights themselves, so that no copy of a matrix
//! is made on the way.

use super::{Format, Matrix};
use anyhow::{Context, Result};

/// Bytes that can be read from any place, by several threads at once.
pub trait Source: Sync {
    /// Fills `out` with the bytes from `at` on.
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()>;
}

impl Source for &[u8] {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let part = at.checked_add(out.len()).and_then(|end| self.get(at..end));
        out.copy_from_slice(part.context("a part of a matrix lies outside it")?);
        Ok(())
    }
}

/// How weights lie in their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coding {
    /// As in a [`Matrix`]: codes, and scales apart from them.
    Canonical,
    /// In blocks of ggml, known by the type's number there; what they hold becomes the matrix's
    /// format to the bit, or bf16 or f32.
    Blocks { number: u32, weights: usize, bytes: usize },
}

/// A matrix that was not read yet.
pub struct StoredMatrix<'a> {
    /// Once it is unpacked.
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub coding: Coding,
    /// Codes, or blocks: rows one after the other. What lies behind them is not read.
    pub codes: Box<dyn Source + 'a>,
    /// f16 `[rows, groups]`, where they lie apart.
    pub scales: Option<Box<dyn Source + 'a>>,
}

impl<'a> StoredMatrix<'a> {
    /// One that lies in memory.
    pub fn of(matrix: &'a Matrix<'_>) -> StoredMatrix<'a> {
        let scales: &[u8] = bytemuck::cast_slice(&matrix.scales);
        StoredMatrix {
            format: matrix.format,
            rows: matrix.rows,
            cols: matrix.cols,
            coding: Coding::Canonical,
            codes: Box::new(&matrix.codes[..]),
            scales: Some(Box::new(scales)),
        }
    }

    /// Bytes of codes or blocks.
    pub fn code_bytes(&self) -> usize {
        match self.coding {
            Coding::Canonical => self.format.codes_shape(self.rows, self.cols).iter().product(),
            Coding::Blocks { weights, bytes, .. } => self.rows * self.cols / weights * bytes,
        }
    }

    /// Bytes of the scales that lie apart.
    pub fn scale_bytes(&self) -> usize {
        self.scales.as_ref().map_or(0, |_| 2 * self.rows * self.format.row_scales(self.cols))
    }
}
