//! A weight matrix in its stored form: codes row by row, then the side. Files, twins and packers
//! all use this layout.

use super::side::Factors;
use super::trellis;
use super::{Code, Format, SideKind, Values, hadamard};
use anyhow::{Result, ensure};
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// Row-major weights of a linear layer (`rows` outputs, `cols` inputs) or an embedding table
/// (`rows` tokens).
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// `[blocks of rows, bytes]`, little-endian; see [`Format::codes_shape`].
    pub codes: Cow<'a, [u8]>,
    /// Elements of [`SideKind`], row by row, little-endian; empty for float codes.
    pub side: Cow<'a, [u8]>,
}

impl<'a> Matrix<'a> {
    /// Checks that the parts have the sizes that the format and shape require.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        side: impl Into<Cow<'a, [u8]>>,
    ) -> Result<Self> {
        let (codes, side) = (codes.into(), side.into());
        format.check_cols(cols)?;
        let [blocks, bytes] = format.codes_shape(rows, cols);
        let want = blocks.checked_mul(bytes);
        ensure!(
            want == Some(codes.len()),
            "{format} [{rows}, {cols}] needs {want:?} bytes of codes, got {}",
            codes.len()
        );
        let want = rows * format.row_side(cols);
        ensure!(
            side.len() == want,
            "{format} [{rows}, {cols}] needs {want} bytes of scales, got {}",
            side.len()
        );
        Ok(Self { format, rows, cols, codes, side })
    }

    /// Returns the bytes of codes and side.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.side.len()
    }

    /// Returns a range of rows as a matrix. `rows` starts at a multiple of [`Format::block_rows`].
    pub fn part(&self, rows: Range<usize>) -> Matrix<'_> {
        let (format, cols) = (self.format, self.cols);
        let (width, side_width) = (format.row_bytes(cols), format.row_side(cols));
        let codes = &self.codes[rows.start * width..][..format.stored_rows(rows.len()) * width];
        let side = &self.side[rows.start * side_width..][..rows.len() * side_width];
        let (codes, side) = (Cow::Borrowed(codes), Cow::Borrowed(side));
        Matrix { format, rows: rows.len(), cols, codes, side }
    }

    /// Returns the codes of one row. Not for trellis codes, since their rows share tiles.
    pub fn row(&self, row: usize) -> &[u8] {
        debug_assert!(!self.format.code.is_trellis());
        let n = self.format.row_bytes(self.cols);
        &self.codes[row * n..][..n]
    }

    /// Returns the side of one row.
    pub fn row_side(&self, row: usize) -> &[u8] {
        let n = self.format.row_side(self.cols);
        &self.side[row * n..][..n]
    }

    /// Returns the scale and minimum of one group of a row.
    pub fn factors(&self, row: usize, group: usize) -> Factors {
        let side = self.format.code.spec().side;
        let (element, group) = (group / side.groups(), group % side.groups());
        side.factors(&self.row_side(row)[element * side.bytes()..][..side.bytes()], group)
    }

    /// Returns the tile of trellis codes that holds a row, and the row's index in it.
    pub fn tile(&self, row: usize, tile_col: usize) -> (&[u8], usize) {
        let tile_bytes = trellis::TILE * self.format.row_bytes(trellis::TILE);
        let at = row / trellis::TILE * (self.cols / trellis::TILE) + tile_col;
        (&self.codes[at * tile_bytes..][..tile_bytes], row % trellis::TILE)
    }

    /// Writes all integer values of a row; see [`Matrix::code`]. `out.len() == cols`.
    pub fn row_codes(&self, row: usize, out: &mut [i32]) {
        assert_eq!(out.len(), self.cols);
        match self.format.code.trellis() {
            Some(trellis) => {
                for (tile_col, out) in
                    out.as_chunks_mut::<{ trellis::TILE }>().0.iter_mut().enumerate()
                {
                    let (tile, at) = self.tile(row, tile_col);
                    *out = trellis.decode_row(tile, at);
                }
            }
            None => out.iter_mut().enumerate().for_each(|(col, q)| *q = self.code(row, col)),
        }
    }

    /// Returns the integer value of one weight; for i2 twice the value (an odd number).
    #[inline(always)]
    pub fn code(&self, row: usize, col: usize) -> i32 {
        match self.format.code.spec().values {
            Values::Trellis { trellis, .. } => {
                let (tile, at) = self.tile(row, col / trellis::TILE);
                trellis.decode_row(tile, at)[col % trellis::TILE]
            }
            Values::Integer(integer) => integer.at(self.row(row), col),
            Values::Grid(grid) => grid.at(self.row(row), col),
            Values::Float => panic!("{} has no integer value", self.format),
        }
    }

    /// Returns the factor between the stored scale and the scale of [`Matrix::code`]: 1/2 for i2,
    /// since its codes are doubled, else 1.
    pub fn code_unit(&self) -> f32 {
        self.format.code.unit()
    }

    /// Decodes one row before the inverse Hadamard transform. `out.len() == cols`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        match self.format.code.spec().values {
            Values::Float => {
                let width = self.format.code.bits_of_eight() / 64;
                let codes = self.row(row).chunks_exact(width);
                match self.format.code {
                    Code::F32 => copy(codes, out, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                    Code::F16 => copy(codes, out, |b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
                    _ => copy(codes, out, |b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
                }
            }
            Values::Trellis { .. } => {
                let mut codes = vec![0; self.cols];
                self.row_codes(row, &mut codes);
                self.factors(row, 0).decode(SideKind::Scale, 1.0, |col| codes[col], out);
            }
            Values::Integer(integer) => self.decode_groups(row, out, |c, col| integer.at(c, col)),
            Values::Grid(grid) => self.decode_groups(row, out, |c, col| grid.at(c, col)),
        }
    }

    /// Decodes one row with `at`, which returns the integer of a column from a row of codes.
    #[inline(always)]
    fn decode_groups(&self, row: usize, out: &mut [f32], at: impl Fn(&[u8], usize) -> i32) {
        let (codes, side) = (self.row(row), self.format.code.spec().side);
        let group = self.format.group_cols(self.cols);
        for (g, out) in out.chunks_mut(group).enumerate() {
            let integers = |col| at(codes, g * group + col);
            self.factors(row, g).decode(side, self.code_unit(), integers, out);
        }
    }

    /// Decodes one row to the model's weights (after the inverse Hadamard transform, if there is
    /// one).
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.decode_row(row, out);
        if self.format.hadamard {
            hadamard::inverse(out);
        }
    }

    /// Decodes the whole matrix to f32, `[rows, cols]`.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, chunk) in out.chunks_exact_mut(self.cols).enumerate() {
            self.dequantize_row(row, chunk);
        }
        out
    }

    /// Copies borrowed bytes, so that the matrix owns them.
    pub fn into_owned(self) -> Matrix<'static> {
        Matrix {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            codes: Cow::Owned(self.codes.into_owned()),
            side: Cow::Owned(self.side.into_owned()),
        }
    }
}

fn copy<'a>(codes: impl Iterator<Item = &'a [u8]>, out: &mut [f32], value: impl Fn(&[u8]) -> f32) {
    out.iter_mut().zip(codes).for_each(|(o, code)| *o = value(code));
}
