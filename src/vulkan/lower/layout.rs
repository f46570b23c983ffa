//! Layout of weights in device memory.
//!
//! A row of integer codes is cut into *steps* of W columns, which a lane takes at a time. A step is
//! a group; without groups it has 64 columns of i2, or 32 of other codes. Eight lanes share a row.
//! Their eight steps lie together, in pieces of 16 bytes (8 if a step has no more): first a piece
//! of each lane, then the next pieces, so that neighbouring lanes load neighbouring bytes. Trellis
//! codes have tiles in place of steps and rows of tiles in place of rows. Scales are `[rows,
//! groups]`.

use crate::error::Fault;
use crate::tensor::trellis::TILE;
use crate::tensor::{Code, Format, Group};
use anyhow::{Result, ensure};

/// Returns the number of a code in `shaders/include/codes.glsl`.
pub fn code_number(code: Code) -> u32 {
    code.spec().vulkan.expect("matrices without kernels were refused")
}

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub codes: u64,
    pub scales: u64,
    /// Bytes of codes and scales.
    pub bytes: u64,
}

/// Sizes of the packed layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Columns of a step; of a tile.
    pub width: usize,
    /// Steps of a row; tiles of a row of tiles.
    pub steps: usize,
    /// 32-bit words of a step.
    pub step_words: usize,
    /// Rows, or rows of tiles.
    pub rows: usize,
    /// Bytes of a canonical row (of tiles).
    pub from_bytes: usize,
}

impl Packing {
    /// Returns the layout of a matrix; `None` for float codes, which keep theirs.
    pub fn of(format: Format, rows: usize, cols: usize) -> Result<Option<Packing>> {
        if format.code.spec().vulkan.is_none() {
            let fault = Fault::model(format!("the GPU has no kernels for weights in {format}"));
            return Err(fault.help("use --device cpu, or a model in another format").into());
        }
        if !format.code.is_integer() {
            return Ok(None);
        }
        ensure!(
            cols.is_multiple_of(16),
            "the GPU kernels take integer codes in multiples of 16 columns, not {cols}"
        );
        if let Some(trellis) = format.code.trellis() {
            let (steps, step_words) = (cols / TILE, trellis.tile_bytes() / 4);
            let (rows, from_bytes) = (rows.div_ceil(TILE), TILE * format.row_bytes(cols));
            return Ok(Some(Packing { width: TILE, steps, step_words, rows, from_bytes }));
        }
        let width = match (format.group, format.code) {
            (Group::Cols(g), _) => g as usize,
            (Group::Row, Code::I2) => 64,
            (Group::Row, _) => 32,
        };
        let step_words = width * format.code.bits_of_two() / 64;
        Ok(Some(Packing {
            width,
            steps: cols.div_ceil(width),
            step_words,
            rows,
            from_bytes: format.row_bytes(cols),
        }))
    }

    pub fn row_words(&self) -> usize {
        self.steps * self.step_words
    }

    pub fn bytes(&self) -> usize {
        4 * self.rows * self.row_words()
    }
}

/// Returns the bytes of codes and of scales in device memory.
pub fn sizes(format: Format, rows: usize, cols: usize) -> Result<[u64; 2]> {
    let codes = match Packing::of(format, rows, cols)? {
        Some(packing) => packing.bytes(),
        None => format.stored_rows(rows) * format.row_bytes(cols),
    };
    // Loads of whole steps may reach past the last row, and no buffer may be empty.
    Ok([codes as u64 + 64, (rows * format.row_side(cols)) as u64 + 4])
}
