//! Weight formats: which code, how many weights share a scale, and whether a Hadamard stands in front.
//!
//! | code | stored value | real value | bytes per weight |
//! |------|--------------|------------|------------------|
//! | f32, bf16 | the float | the float | 4, 2 |
//! | i8 | q in -127..=127 | q * scale | 1 |
//! | i4 | q + 8 as a nibble, q in -8..=7, even column in the low half | q * scale | 1/2 |
//! | i2 | c in 0..=3, four columns a byte, lowest first | (c - 1.5) * scale | 1/4 |
//!
//! Scales are f16, `[rows, groups]`, one per row or one per 32, 64 or 128 consecutive columns.

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
}

impl Code {
    /// Bits of one stored weight, without scales.
    pub const fn bits(self) -> usize {
        match self {
            Code::F32 => 32,
            Code::Bf16 => 16,
            Code::I8 => 8,
            Code::I4 => 4,
            Code::I2 => 2,
        }
    }

    /// True for codes whose product with int8 activations is an exact integer.
    pub const fn is_integer(self) -> bool {
        matches!(self, Code::I8 | Code::I4 | Code::I2)
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

    /// Bytes of the codes of one row.
    pub fn row_bytes(self, cols: usize) -> usize {
        cols * self.code.bits() / 8
    }

    /// Bytes of codes and scales of a whole matrix.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows * (self.row_bytes(cols) + 2 * self.groups(cols))
    }

    /// Refuses widths that the format cannot cut evenly.
    pub fn check_cols(self, cols: usize) -> Result<()> {
        let group = match self.group {
            Group::Cols(g) => g as usize,
            Group::Row => 8,
        };
        let step = match (self.code.is_integer(), self.hadamard) {
            (_, true) => group.max(crate::tensor::hadamard::WIDTH),
            (true, false) => group,
            (false, false) => 1,
        };
        ensure!(cols > 0 && cols.is_multiple_of(step), "format {self} needs a multiple of {step} columns, got {cols}");
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
            "i4-row" => (Code::I4, Group::Row),
            "i2-row" => (Code::I2, Group::Row),
            "i4-g32" => (Code::I4, Group::Cols(32)),
            "i4-g64" => (Code::I4, Group::Cols(64)),
            "i4-g128" => (Code::I4, Group::Cols(128)),
            "i2-g32" => (Code::I2, Group::Cols(32)),
            "i2-g64" => (Code::I2, Group::Cols(64)),
            "i2-g128" => (Code::I2, Group::Cols(128)),
            _ => bail!(
                "unknown weight format `{s}`; known: f32, bf16, i8-row, i8-g32|64|128, i4-row, i4-g32|64|128, i2-row, i2-g32|64|128, each optionally +h128"
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
        for s in ["f32", "bf16", "i8-row", "i8-g32", "i4-row", "i4-g32", "i4-g64+h128", "i2-g128", "i2-row+h128"] {
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
    }
}
