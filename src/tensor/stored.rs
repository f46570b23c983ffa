//! A weight matrix where it is kept: bytes that several threads read piece by piece, and how the
//! weights lie in them. For executors that unpack weights themselves, so that no copy of a matrix
//! is made on the way.

use super::{Format, GgmlType, Matrix};
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
#[derive(Clone, Copy, Debug)]
pub enum Coding {
    /// As in a [`Matrix`]: codes, and the side apart from them.
    Canonical,
    /// In blocks of a GGUF type, which become the matrix's format.
    Blocks(GgmlType),
}

/// A matrix that was not read yet.
pub struct StoredMatrix<'a> {
    /// Once it is unpacked.
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub coding: Coding,
    /// Codes, or blocks: rows one after the other. Bytes behind them are not read.
    pub codes: Box<dyn Source + 'a>,
    /// The side, where it lies apart.
    pub side: Option<Box<dyn Source + 'a>>,
}

impl<'a> StoredMatrix<'a> {
    /// One that lies in memory.
    pub fn of(matrix: &'a Matrix<'_>) -> StoredMatrix<'a> {
        StoredMatrix {
            format: matrix.format,
            rows: matrix.rows,
            cols: matrix.cols,
            coding: Coding::Canonical,
            codes: Box::new(&matrix.codes[..]),
            side: Some(Box::new(&matrix.side[..])),
        }
    }

    /// Bytes of codes or blocks.
    pub fn code_bytes(&self) -> usize {
        match self.coding {
            Coding::Canonical => self.format.codes_shape(self.rows, self.cols).iter().product(),
            Coding::Blocks(ggml) => ggml.bytes_of(self.rows * self.cols),
        }
    }

    /// Bytes of the side that lies apart.
    pub fn side_bytes(&self) -> usize {
        self.side.as_ref().map_or(0, |_| self.rows * self.format.row_side(self.cols))
    }
}
