//! A weight matrix where it is kept: the bytes of a [`Matrix`], which several threads read piece by
//! piece. For executors that unpack weights themselves, so that no copy of a matrix is made on the
//! way.

use super::{Format, Matrix};
use anyhow::{Context, Result};
use std::ops::Range;

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

/// A matrix that was not read yet.
pub struct StoredMatrix<'a> {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// As in a [`Matrix`], and so the side.
    pub codes: Box<dyn Source + 'a>,
    /// `None` for float codes.
    pub side: Option<Box<dyn Source + 'a>>,
}

impl<'a> StoredMatrix<'a> {
    /// One that lies in memory.
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

    /// Reads some rows, of which the first begins a block of rows ([`Format::block_rows`]).
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
