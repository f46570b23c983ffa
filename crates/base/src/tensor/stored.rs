//! A weight matrix in its file: the bytes of a [`Matrix`], which several threads read piece by
//! piece. Executors that unpack weights themselves use it to avoid a copy of the matrix.

use super::{Format, Matrix};
use anyhow::{Context, Result};
use std::ops::Range;

/// Bytes that several threads can read at any offset at once.
pub trait Source: Sync {
    /// Fills `out` with the bytes from offset `at`.
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()>;
}

impl Source for &[u8] {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let part = at.checked_add(out.len()).and_then(|end| self.get(at..end));
        out.copy_from_slice(part.context("a part of a matrix lies outside it")?);
        Ok(())
    }
}

/// A matrix that has not been read yet.
pub struct StoredMatrix<'a> {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// Codes as in a [`Matrix`].
    pub codes: Box<dyn Source + 'a>,
    /// Side as in a [`Matrix`]; `None` for float codes.
    pub side: Option<Box<dyn Source + 'a>>,
}

impl<'a> StoredMatrix<'a> {
    /// Wraps a matrix in memory.
    pub fn of(matrix: &'a Matrix<'_>) -> StoredMatrix<'a> {
        StoredMatrix {
            format: matrix.format,
            rows: matrix.rows,
            cols: matrix.cols,
            codes: Box::new(&matrix.codes[..]),
            side: Some(Box::new(&matrix.side[..])),
        }
    }

    pub fn code_bytes(&self) -> usize {
        self.format.codes_shape(self.rows, self.cols).iter().product()
    }

    pub fn side_bytes(&self) -> usize {
        self.rows * self.format.row_side(self.cols)
    }

    /// Reads a range of rows that starts at a block of rows ([`Format::block_rows`]).
    pub fn read(&self, rows: Range<usize>) -> Result<Matrix<'static>> {
        let (width, side_width) =
            (self.format.row_bytes(self.cols), self.format.row_side(self.cols));
        let mut codes = vec![0; self.format.stored_rows(rows.len()) * width];
        self.codes.read_at(rows.start * width, &mut codes)?;
        let mut side = vec![0; rows.len() * side_width];
        if let Some(source) = &self.side {
            source.read_at(rows.start * side_width, &mut side)?;
        }
        Matrix::new(self.format, rows.len(), self.cols, codes, side)
    }
}
