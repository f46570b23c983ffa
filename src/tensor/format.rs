//! Weight formats: which code, how many weights share a scale, and whether a Hadamard stands in
//! front.
//!
//! | code | stored value | real value | bytes per weight |
//! |------|--------------|------------|------------------|
//! | f32, bf16 | the float | the float | 4, 2 |
//! | i8 | q in -127..=127 (-128 too in files of others) | q * scale | 1 |
//! | i4 | q + 8 as a nibble, q in -8..=7, even column in the low half | q * scale | 1/2 |
//! | i2 | c in 0..=3, four columns a byte, lowest first | (c - 1.5) * scale | 1/4 |
//! | i8a | q in 0..=255 | q * scale + min | 1 |
//! | t2, t2.5, t3, t4 | a path through a trellis, see [`super::trellis`] | a computed integer * scale | 1/4, 5/16, 3/8, 1/2 |
//!
//! Scales are f16, `[rows, groups]`, one per row or one per 32, 64 or 128 consecutive columns; i8a
//! has `[rows, 2]`, scale and min. Trellis codes come in tiles of 16 rows and 16 columns: their
//! rows are padded to a multiple of 16.

use anyhow::{Result, bail, ensure};
use std::fmt;
use std::str::FromStr;

/// How one weight is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    F32,
    Bf16,
    I8,
    I4,
    I2,
    /// int8 with a smallest value besides the scale
    I8a,
    T2,
    T25,
    T3,
    T4,
}

impl Code {
    /// Bits of two stored weights, without scales.
    pub const fn bits_of_two(self) -> usize {
        match self {
            Code::F32 => 64,
            Code::Bf16 => 32,
            Code::I8 | Code::I8a => 16,
            Code::I4 | Code::T4 => 8,
            Code::T3 => 6,
            Code::T25 => 5,
            Code::I2 | Code::T2 => 4,
        }
    }

    /// True for codes whose product with int8 activations is an exact integer.
    pub const fn is_integer(self) -> bool {
        !matches!(self, Code::F32 | Code::Bf16)
    }

    /// True for codes that are computed from a path through a trellis.
    pub const fn is_trellis(self) -> bool {
        matches!(self, Code::T2 | Code::T25 | Code::T3 | Code::T4)
    }
}

/// How many consecutive columns of a row share one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// One scale for the whole row.
    Row,
    /// One scale for this many columns: 32, 64 or 128.
    Cols(u16),
}

/// A weight format, spelled like `bf16`, `i8-row`, `i4-g32` or `i4-row+h128`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Format {
    pub code: Code,
    pub group: Group,
    /// The columns were multiplied by a 128-wide Hadamard block by block, so the input must be too.
    pub hadamard: bool,
}

impl Format {
    pub const F32: Format = Format { code: Code::F32, group: Group::Row, hadamard: false };
    pub const BF16: Format = Format { code: Code::Bf16, group: Group::Row, hadamard: false };
    pub const I8_ROW: Format = Format { code: Code::I8, group: Group::Row, hadamard: false };
    pub const I8_G32: Format = Format { code: Code::I8, group: Group::Cols(32), hadamard: false };
    pub const I4_G32: Format = Format { code: Code::I4, group: Group::Cols(32), hadamard: false };
    /// The house format: integer codes with one scale a row, behind a Hadamard.
    pub const I4_ROW_H: Format = Format { code: Code::I4, group: Group::Row, hadamard: true };

    /// Scales in one row of `cols` columns; 0 for float codes.
    pub fn groups(self, cols: usize) -> usize {
        match (self.code.is_integer(), self.group) {
            (false, _) => 0,
            (true, Group::Row) => 1,
            (true, Group::Cols(g)) => cols / g as usize,
        }
    }

    /// Columns that share a scale in a row of `cols` columns.
    pub fn group_cols(self, cols: usize) -> usize {
        match self.group {
            Group::Row => cols,
            Group::Cols(g) => g as usize,
        }
    }

    /// f16 values beside the codes of one row.
    pub fn row_scales(self, cols: usize) -> usize {
        self.groups(cols) * if self.code == Code::I8a { 2 } else { 1 }
    }

    /// Rows whose codes cannot be told apart: a tile's for trellis codes, else 1.
    pub fn block_rows(self) -> usize {
        if self.code.is_trellis() { super::trellis::TILE } else { 1 }
    }

    /// Rows that are stored for `rows` rows: whole blocks.
    pub fn stored_rows(self, rows: usize) -> usize {
        rows.next_multiple_of(self.block_rows())
    }

    /// Bytes of the codes of one row; of trellis codes, a sixteenth of its tiles.
    pub fn row_bytes(self, cols: usize) -> usize {
        cols * self.code.bits_of_two() / 16
    }

    /// Shape of the tensor of codes: blocks of rows, and their bytes.
    pub fn codes_shape(self, rows: usize, cols: usize) -> [usize; 2] {
        let n = self.block_rows();
        [rows.div_ceil(n), n * self.row_bytes(cols)]
    }

    /// Columns of a row of this many bytes of codes (as in [`Format::codes_shape`]).
    pub fn cols_of(self, block_bytes: usize) -> usize {
        block_bytes / self.block_rows() * 16 / self.code.bits_of_two()
    }

    /// Bytes of codes and scales of a whole matrix.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        self.stored_rows(rows) * self.row_bytes(cols) + 2 * rows * self.row_scales(cols)
    }

    /// Refuses widths that the format cannot cut evenly.
    pub fn check_cols(self, cols: usize) -> Result<()> {
        let group = match self.group {
            Group::Cols(g) => g as usize,
            Group::Row if self.code.is_trellis() => 64,
            Group::Row => 8,
        };
        let step = match (self.code.is_integer(), self.hadamard) {
            (_, true) => group.max(crate::tensor::hadamard::WIDTH),
            (true, false) => group,
            (false, false) => 1,
        };
        ensure!(
            cols > 0 && cols.is_multiple_of(step),
            "format {self} needs a multiple of {step} columns, got {cols}"
        );
        let most = super::trellis::MAX_COLS;
        ensure!(
            !self.code.is_trellis() || cols <= most,
            "format {self} takes at most {most} columns, got {cols}"
        );
        Ok(())
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.code {
            Code::F32 => "f32",
            Code::Bf16 => "bf16",
            Code::I8 => "i8",
            Code::I4 => "i4",
            Code::I2 => "i2",
            Code::I8a => "i8a",
            Code::T2 => "t2",
            Code::T25 => "t2.5",
            Code::T3 => "t3",
            Code::T4 => "t4",
        };
        f.write_str(code)?;
        match (self.code.is_integer(), self.group) {
            (true, Group::Row) => f.write_str("-row")?,
            (true, Group::Cols(g)) => write!(f, "-g{g}")?,
            (false, _) => {}
        }
        if self.hadamard { f.write_str("+h128") } else { Ok(()) }
    }
}

impl FromStr for Format {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        let (body, hadamard) = match s.strip_suffix("+h128") {
            Some(body) => (body, true),
            None => (s, false),
        };
        let (code, group) = match body {
            "f32" => (Code::F32, Group::Row),
            "bf16" => (Code::Bf16, Group::Row),
            "i8-row" => (Code::I8, Group::Row),
            "i8-g32" => (Code::I8, Group::Cols(32)),
            "i8-g64" => (Code::I8, Group::Cols(64)),
            "i8-g128" => (Code::I8, Group::Cols(128)),
            "i8a-row" => (Code::I8a, Group::Row),
            "t2-row" => (Code::T2, Group::Row),
            "t2.5-row" => (Code::T25, Group::Row),
            "t3-row" => (Code::T3, Group::Row),
            "t4-row" => (Code::T4, Group::Row),
            "i4-row" => (Code::I4, Group::Row),
            "i2-row" => (Code::I2, Group::Row),
            "i4-g32" => (Code::I4, Group::Cols(32)),
            "i4-g64" => (Code::I4, Group::Cols(64)),
            "i4-g128" => (Code::I4, Group::Cols(128)),
            "i2-g32" => (Code::I2, Group::Cols(32)),
            "i2-g64" => (Code::I2, Group::Cols(64)),
            "i2-g128" => (Code::I2, Group::Cols(128)),
            _ => bail!(
                "unknown weight format `{s}`; known: f32, bf16, i8-row, i8-g32|64|128, i8a-row, \
                 i4-row, i4-g32|64|128, i2-row, i2-g32|64|128, t2-row, t2.5-row, t3-row, t4-row, \
                 each optionally +h128"
            ),
        };
        Ok(Format { code, group, hadamard })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_survives_its_spelling() {
        for s in [
            "f32",
            "bf16",
            "i8-row",
            "i8-g32",
            "i4-row",
            "i4-g32",
            "i4-g64+h128",
            "i2-g128",
            "i2-row+h128",
            "i8a-row",
            "t2.5-row+h128",
            "t4-row",
        ] {
            assert_eq!(s.parse::<Format>().unwrap().to_string(), s);
        }
        assert!("i4-g33".parse::<Format>().is_err());
    }

    #[test]
    fn bytes_count_codes_and_scales() {
        assert_eq!(Format::I4_G32.bytes(2, 64), 2 * (32 + 4));
        assert_eq!(Format::I4_ROW_H.bytes(3, 128), 3 * (64 + 2));
        assert!(Format::I4_G32.check_cols(48).is_err());
        assert!(Format::I4_ROW_H.check_cols(64).is_err());
        let t25: Format = "t2.5-row".parse().unwrap();
        assert_eq!(
            (t25.bytes(17, 128), t25.codes_shape(17, 128)),
            (32 * 40 + 2 * 17, [2, 16 * 40])
        );
        assert_eq!(t25.cols_of(16 * 40), 128);
        assert_eq!("i8a-row".parse::<Format>().unwrap().bytes(3, 8), 3 * (8 + 4));
    }
}
