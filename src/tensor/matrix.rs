//! A weight matrix in its stored form: codes row by row, then scales. The one layout that files, twins and packers agree on.

use super::{Code, Format, hadamard};
use anyhow::{Result, ensure};
use half::{bf16, f16};
use std::borrow::Cow;

/// Row-major weights of a linear layer (`rows` outputs, `cols` inputs) or an embedding table (`rows` tokens).
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// `[rows, row_bytes]`, little-endian; see [`Format`].
    pub codes: Cow<'a, [u8]>,
    /// `[rows, groups]`; empty for float codes.
    pub scales: Cow<'a, [f16]>,
}

impl<'a> Matrix<'a> {
    /// Checks that the parts have the sizes that the format and shape ask for.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        scales: impl Into<Cow<'a, [f16]>>,
    ) -> Result<Self> {
        let (codes, scales) = (codes.into(), scales.into());
        format.check_cols(cols)?;
        let want = rows.checked_mul(format.row_bytes(cols));
        ensure!(want == Some(codes.len()), "{format} [{rows}, {cols}] needs {want:?} bytes of codes, got {}", codes.len());
        let want = rows * format.groups(cols);
        ensure!(scales.len() == want, "{format} [{rows}, {cols}] needs {want} scales, got {}", scales.len());
        Ok(Self { format, rows, cols, codes, scales })
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        self.codes.len() + 2 * self.scales.len()
    }

    /// The codes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let n = self.format.row_bytes(self.cols);
        &self.codes[row * n..][..n]
    }

    /// The scales of one row.
    pub fn row_scales(&self, row: usize) -> &[f16] {
        let n = self.format.groups(self.cols);
        &self.scales[row * n..][..n]
    }

    /// Twice the integer value of one weight for i2 (an odd number), the integer value itself for i8 and i4.
    #[inline(always)]
    pub fn code(&self, row: usize, col: usize) -> i32 {
        let codes = self.row(row);
        match self.format.code {
            Code::I8 => codes[col] as i8 as i32,
            Code::I4 => (codes[col / 2] >> (4 * (col % 2)) & 15) as i32 - 8,
            Code::I2 => 2 * (codes[col / 4] >> (2 * (col % 4)) & 3) as i32 - 3,
            Code::F32 | Code::Bf16 => unreachable!("float codes have no integer value"),
        }
    }

    /// What a scale is multiplied by before it meets [`Matrix::code`]: 1/2 for i2, whose codes are doubled, else 1.
    pub fn code_unit(&self) -> f32 {
        if self.format.code == Code::I2 { 0.5 } else { 1.0 }
    }

    /// One row as floats in the domain the codes live in (before the inverse Hadamard). `out.len() == cols`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        match self.format.code {
            Code::F32 => {
                for (o, b) in out.iter_mut().zip(self.row(row).as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Code::Bf16 => {
                for (o, b) in out.iter_mut().zip(self.row(row).as_chunks::<2>().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Code::I8 | Code::I4 | Code::I2 => {
                let (group, unit) = (self.format.group_cols(self.cols), self.code_unit());
                let scales = self.row_scales(row);
                for (col, o) in out.iter_mut().enumerate() {
                    *o = self.code(row, col) as f32 * (scales[col / group].to_f32() * unit);
                }
            }
        }
    }

    /// One row as the floats the model means (after the inverse Hadamard, where there is one).
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.decode_row(row, out);
        if self.format.hadamard {
            hadamard::transform(out);
        }
    }

    /// The whole matrix as f32, `[rows, cols]`.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, chunk) in out.chunks_exact_mut(self.cols).enumerate() {
            self.dequantize_row(row, chunk);
        }
        out
    }

    /// The same matrix owning its bytes.
    pub fn into_owned(self) -> Matrix<'static> {
        Matrix {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            codes: Cow::Owned(self.codes.into_owned()),
            scales: Cow::Owned(self.scales.into_owned()),
        }
    }
}
