//! Layout of weights in device memory.
//!
//! A row of integer codes is divided into *steps* of W columns. A step is a group, or two groups of
//! 16 columns. Without groups it has 64 columns of i2, or 32 of other codes. Steps of 128 columns
//! together, or one longer step, are a *chunk*. Lanes process the same chunk of eight rows at once,
//! so these are contiguous: `[row / 8, chunk, piece of a step, step of the chunk, row % 8]`, in
//! pieces of 16 bytes (8 if a step has no more). Rows and steps that are missing at the end of the
//! last eight rows and of the last chunk are zero.
//!
//! This applies to the codes, or to the low bits of 3, 5 and 6-bit codes. Their high bits form a
//! separate plane after the low plane, with one piece per step. Trellis codes have tiles instead of
//! steps, and rows of tiles instead of rows: eight tiles are contiguous, and interleaved in pieces.
//! Octets of a grid keep their stored layout, followed by the grid.
//!
//! The side of a matrix in groups is interleaved in the same way: `[row / 8, piece, row % 8]`. A
//! piece has the elements of a chunk, or one element of several groups. Other sides keep their
//! stored layout.

use anyhow::{Result, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::trellis::TILE;
use gemma_base::tensor::{Code, Format, Group, Source, Values};

/// Rows that are interleaved, and columns of a chunk.
const TOGETHER: usize = 8;
const CHUNK_COLS: usize = 128;

/// Returns the number of a code in `shaders/include/codes.glsl`.
pub fn code_number(code: Code) -> u32 {
    code.spec().vulkan.expect("matrices without kernels were refused")
}

/// Returns the number of a code's side in `shaders/include/side.glsl`.
pub fn side_number(code: Code) -> u32 {
    code.spec().side as u32
}

/// Returns the data after the codes: the points of a grid, or nothing.
pub fn points(code: Code) -> &'static [u8] {
    match code.spec().values {
        Values::Grid(grid) => bytemuck::cast_slice(grid.places),
        _ => &[],
    }
}

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub codes: u64,
    pub side: u64,
    /// Bytes of codes and side.
    pub bytes: u64,
}

/// Sizes of the packed layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Columns of a step, or of a tile.
    pub width: usize,
    /// Steps of a row, or tiles of a row of tiles.
    pub steps: usize,
    /// 32-bit words of a step, and of its high plane; 0 if rows keep their stored layout.
    pub step_words: usize,
    pub high_words: usize,
    /// Rows, or rows of tiles.
    pub rows: usize,
    /// Rows that are interleaved.
    pub together: usize,
    /// Bytes of a stored row (of tiles).
    pub from_bytes: usize,
}

impl Packing {
    /// Returns the layout of a matrix; `None` for float codes, which keep their stored layout.
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
            "the GPU kernels support integer codes in multiples of 16 columns, not {cols}"
        );
        if let Some(trellis) = format.code.trellis() {
            let (steps, step_words) = (cols / TILE, trellis.tile_bytes() / 4);
            let (rows, from_bytes) = (rows.div_ceil(TILE), TILE * format.row_bytes(cols));
            let (width, high_words, together) = (TILE, 0, 1);
            return Ok(Some(Packing {
                width,
                steps,
                step_words,
                high_words,
                rows,
                together,
                from_bytes,
            }));
        }
        let width = match (format.group, format.code) {
            (Group::Cols(g), _) => 32.max(g as usize),
            (Group::Row, Code::I2) => 64,
            (Group::Row, _) => 32,
        };
        let (high_bits, bits) = match format.code.bits_of_eight() / 8 {
            _ if matches!(format.code.spec().values, Values::Grid(_)) => (0, 0),
            bits @ (3 | 5) => (1, bits),
            bits @ 6 => (2, bits),
            bits => (0, bits),
        };
        Ok(Some(Packing {
            width,
            steps: cols.div_ceil(width),
            together: if bits == 0 { 1 } else { TOGETHER },
            step_words: width * (bits - high_bits) / 32,
            high_words: width * high_bits / 32,
            rows,
            from_bytes: format.row_bytes(cols),
        }))
    }

    /// Returns the steps of a chunk.
    pub fn chunk(&self) -> usize {
        (CHUNK_COLS / self.width).max(1)
    }

    /// Returns the words of `rows` rows in each plane.
    pub fn words(&self, rows: usize) -> [usize; 2] {
        let steps = match self.together {
            1 => self.steps,
            _ => self.steps.next_multiple_of(self.chunk()),
        };
        let rows = rows.next_multiple_of(self.together);
        match self.step_words {
            0 => [rows * self.from_bytes / 4, 0],
            low => [low, self.high_words].map(|words| rows * steps * words),
        }
    }

    pub fn bytes(&self) -> usize {
        4 * self.words(self.rows).iter().sum::<usize>()
    }
}

/// Layout of the side of a matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideLayout {
    rows: usize,
    /// Rows that are interleaved.
    together: usize,
    /// Bytes of a row as stored.
    row_bytes: usize,
    /// Bytes of a row in one piece, and pieces of a row. The last one may be incomplete as stored.
    piece: usize,
    pieces: usize,
}

impl SideLayout {
    pub fn of(format: Format, rows: usize, cols: usize) -> Result<SideLayout> {
        let (row_bytes, kind) = (format.row_side(cols), format.code.spec().side);
        let (together, piece) = match (format.group, Packing::of(format, rows, cols)?) {
            (Group::Row, _) | (_, None) => (1, row_bytes.max(1)),
            (_, Some(codes)) if kind.groups() == 1 => (TOGETHER, codes.chunk() * kind.bytes()),
            _ => (TOGETHER, kind.bytes()),
        };
        Ok(SideLayout { rows, together, row_bytes, piece, pieces: row_bytes.div_ceil(piece) })
    }

    pub fn bytes(&self) -> usize {
        self.rows.next_multiple_of(self.together) * self.pieces * self.piece
    }
}

/// The side of a stored matrix in the layout of device memory.
pub struct DeviceSide<'a> {
    pub layout: SideLayout,
    pub stored: Box<dyn Source + 'a>,
}

impl Source for DeviceSide<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let SideLayout { rows, together, row_bytes, piece, pieces } = self.layout;
        if together == 1 {
            return self.stored.read_at(at, out);
        }
        // All rows that are interleaved with those of the range.
        let block = together * pieces * piece;
        let (first, last) = (at / block, (at + out.len()).div_ceil(block));
        let first_row = first * together;
        let mut stored = vec![0; ((last * together).min(rows) - first_row) * row_bytes];
        self.stored.read_at(first_row * row_bytes, &mut stored)?;
        let mut packed = vec![0; (last - first) * block];
        let blocks = packed.chunks_exact_mut(block);
        for (to, rows) in blocks.zip(stored.chunks(together * row_bytes)) {
            for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
                for (i, bytes) in bytes.chunks(piece).enumerate() {
                    to[(i * together + row) * piece..][..bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        out.copy_from_slice(&packed[at - first * block..][..out.len()]);
        Ok(())
    }
}

/// Returns the bytes of codes and of the side in device memory.
pub fn sizes(format: Format, rows: usize, cols: usize) -> Result<[u64; 2]> {
    let side = SideLayout::of(format, rows, cols)?;
    let codes = match Packing::of(format, rows, cols)? {
        Some(packing) => packing.bytes(),
        None => format.stored_rows(rows) * format.row_bytes(cols),
    };
    let codes = codes + points(format.code).len();
    // Loads of whole steps may exceed the last row, and no buffer may be empty.
    Ok([codes as u64 + 64, side.bytes() as u64 + 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_of_an_interleaved_side_has_the_bytes_of_its_rows() {
        // Eleven rows of five steps, so the last eight rows and the last chunk are incomplete, and
        // elements of several groups.
        for (format, rows, cols) in [(Format::I4_G32, 11, 160), ("q4_k".parse().unwrap(), 9, 768)] {
            let layout = SideLayout::of(format, rows, cols).unwrap();
            let stored: Vec<u8> = (0..rows * layout.row_bytes).map(|i| (i % 251) as u8).collect();
            let side = DeviceSide { layout, stored: Box::new(&stored[..]) };
            let want: Vec<u8> = (0..layout.bytes())
                .map(|at| {
                    let (piece, byte) = (at / layout.piece, at % layout.piece);
                    let row = piece / 8 / layout.pieces * 8 + piece % 8;
                    let byte = piece / 8 % layout.pieces * layout.piece + byte;
                    let is_stored = row < rows && byte < layout.row_bytes;
                    if is_stored { stored[row * layout.row_bytes + byte] } else { 0 }
                })
                .collect();
            for (from, to) in [(0, want.len()), (3, 40), (70, 71), (65, want.len() - 5)] {
                let mut got = vec![1; to - from];
                side.read_at(from, &mut got).unwrap();
                assert!(got == want[from..to], "{format}, {from} to {to}");
            }
        }
    }
}
