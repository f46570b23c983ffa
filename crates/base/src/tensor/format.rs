//! Weight formats: a block (see [`super::block`]), the group of columns that share an element of
//! its side, and a flag for a Hadamard transform of the input.
//!
//! The side is `[rows, elements]`, one element per row, per group of consecutive columns or per
//! super-block of groups. Trellis codes come in tiles of 16 rows and 16 columns: their rows are
//! padded to a multiple of 16.

use super::block::{BLOCKS, Code, Group};
use anyhow::{Result, bail, ensure};
use std::fmt;
use std::str::FromStr;

/// A weight format, written as `bf16`, `i8-row`, `i4-g32` or `i4-row+h128`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Format {
    pub code: Code,
    pub group: Group,
    /// Whether each block of 128 columns was multiplied by a Hadamard matrix. The input then needs
    /// the same transform.
    pub hadamard: bool,
}

impl Format {
    pub const F32: Format = Format { code: Code::F32, group: Group::Row, hadamard: false };
    pub const BF16: Format = Format { code: Code::Bf16, group: Group::Row, hadamard: false };
    pub const I8_ROW: Format = Format { code: Code::I8, group: Group::Row, hadamard: false };
    pub const I8_G32: Format = Format { code: Code::I8, group: Group::Cols(32), hadamard: false };
    pub const I4_G32: Format = Format { code: Code::I4, group: Group::Cols(32), hadamard: false };
    /// Embedding format in the recipes for a target size. The Hadamard spreads the outliers of
    /// activations, which have one scale per row.
    pub const I8_ROW_H: Format = Format { code: Code::I8, group: Group::Row, hadamard: true };
    /// Default format: integer codes with one scale per row and a Hadamard.
    pub const I4_ROW_H: Format = Format { code: Code::I4, group: Group::Row, hadamard: true };

    /// Returns every block with kernels, with each of its group sizes, without a Hadamard.
    pub fn all() -> impl Iterator<Item = Format> {
        BLOCKS.iter().filter(|block| block.cpu.is_some()).flat_map(|block| {
            block.groups.iter().map(|group| Format {
                code: block.code,
                group: *group,
                hadamard: false,
            })
        })
    }

    /// Returns the formats of [`Format::all`] that weights can be quantised to.
    pub fn written() -> impl Iterator<Item = Format> {
        Format::all().filter(|format| !format.code.spec().distortion.is_empty())
    }

    /// Returns the native format of the weights of a GGUF type; `None` if there is no such type.
    pub fn of_file(code: Code) -> Option<Format> {
        let block = code.spec();
        let group = match block.ggml?.weights {
            1 => Group::Row,
            weights => Group::Cols((weights / block.side.groups()) as u16),
        };
        Some(Format { code, group, hadamard: false })
    }

    /// Parses a format that weights can be quantised to.
    pub fn parse_written(text: &str) -> Result<Format> {
        let format: Format = text.parse()?;
        let known = Format::known();
        ensure!(
            !format.code.is_stored(),
            "no weights are rounded to {format}, a format of files; known: {known}"
        );
        Ok(format)
    }

    /// Lists all formats that weights can be quantised to, for messages.
    fn known() -> String {
        let mut words: Vec<String> = Vec::new();
        for format in Format::written() {
            match (format.group, words.last_mut()) {
                (Group::Cols(n), Some(word)) if word.contains("-g") => *word += &format!("|{n}"),
                _ => words.push(format.to_string()),
            }
        }
        words.join(", ")
    }

    /// Returns the expected squared error of Gaussian weights relative to their squares.
    ///
    /// 0 for formats that weights are never quantised to. Without a Hadamard, real weights have
    /// larger errors.
    pub fn distortion(self) -> f64 {
        let block = self.code.spec();
        let place = block.groups.iter().position(|group| *group == self.group);
        block.distortion.get(place.unwrap_or(0)).copied().unwrap_or(0.0)
    }

    /// Returns the number of scales in one row of `cols` columns; 0 for float codes.
    pub fn groups(self, cols: usize) -> usize {
        match (self.code.is_integer(), self.group) {
            (false, _) => 0,
            (true, Group::Row) => 1,
            (true, Group::Cols(g)) => cols / g as usize,
        }
    }

    /// Returns the number of columns that share a scale in a row of `cols` columns.
    pub fn group_cols(self, cols: usize) -> usize {
        match self.group {
            Group::Row => cols,
            Group::Cols(g) => g as usize,
        }
    }

    /// Returns the bytes of one row's side.
    pub fn row_side(self, cols: usize) -> usize {
        let side = self.code.spec().side;
        self.groups(cols) / side.groups() * side.bytes()
    }

    /// Returns the rows that are stored together: a tile's for trellis codes, else 1.
    pub fn block_rows(self) -> usize {
        if self.code.is_trellis() { super::trellis::TILE } else { 1 }
    }

    /// Returns `rows` rounded up to whole blocks of rows.
    pub fn stored_rows(self, rows: usize) -> usize {
        rows.next_multiple_of(self.block_rows())
    }

    /// Returns the bytes of one row's codes; for trellis codes, a sixteenth of its tiles.
    pub fn row_bytes(self, cols: usize) -> usize {
        cols * self.code.bits_of_eight() / 64
    }

    /// Returns the shape of the tensor of codes: blocks of rows, and bytes per block.
    pub fn codes_shape(self, rows: usize, cols: usize) -> [usize; 2] {
        let n = self.block_rows();
        [rows.div_ceil(n), n * self.row_bytes(cols)]
    }

    /// Returns the columns of a row, given the bytes of a block of rows ([`Format::codes_shape`]).
    pub fn cols_of(self, block_bytes: usize) -> usize {
        block_bytes / self.block_rows() * 64 / self.code.bits_of_eight()
    }

    /// Returns the bytes of codes and side of a whole matrix.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        self.stored_rows(rows) * self.row_bytes(cols) + rows * self.row_side(cols)
    }

    /// Fails for widths that the format cannot divide evenly.
    pub fn check_cols(self, cols: usize) -> Result<()> {
        let group = match self.group {
            Group::Cols(g) => g as usize * self.code.spec().side.groups(),
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
        f.write_str(self.code.spec().name)?;
        match (self.code.is_integer() && !self.code.is_stored(), self.group) {
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
        let known = Format::all().find(|format| format.to_string() == body);
        let Some(Format { code, group, .. }) = known else {
            bail!("unknown weight format `{s}`; known: {}, each optionally +h128", Format::known())
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
        for format in Format::all() {
            assert_eq!(format.to_string().parse::<Format>().unwrap(), format);
        }
        let error = "i4-g33".parse::<Format>().unwrap_err().to_string();
        let known = "f32, bf16, i8-row, i8-g32|64|128, i4-row, i4-g32|64|128, i2-row, \
                     i2-g32|64|128, i8a-row, t2-row, t2.5-row, t3-row, t4-row";
        assert!(error.contains("`i4-g33`; known: f32, bf16, i8-row, i8-g32|64|128,"), "{error}");
        assert!(error.contains(known), "{error}");
    }

    #[test]
    fn formats_of_files_are_no_targets() {
        for format in Format::all().filter(|format| format.code.is_stored()) {
            let error = Format::parse_written(&format.to_string()).unwrap_err().to_string();
            assert!(error.contains("a format of files"), "{error}");
            assert_eq!(format.distortion(), 0.0);
        }
        assert_eq!(Format::parse_written("i4-row").unwrap().to_string(), "i4-row");
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
