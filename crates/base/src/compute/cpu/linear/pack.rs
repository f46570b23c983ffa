//! Packed weights, in the order in which the kernels read them: one sequence of 64-byte lines for
//! each tile of 32 output rows.
//!
//! A *step* has the columns in one pair of lines. Dword `i` of the first line belongs to output row
//! `i`, and of the second line to row `16 + i`:
//!
//! | code | lines per step | columns per step | bytes of a dword |
//! |------|---|---|---|
//! | i8, i8a | 2 | 4 | byte j: column j, as q + 128 (i8a: q) |
//! | i4 | 2 | 8 | byte j: column j in the low half, j + 4 in the high half, as q + 8 |
//! | i2 | 2 | 16 | byte j: columns j, j + 4, j + 8, j + 12 from the lowest bits up |
//! | t2, t2.5, t3, t4 | 2, 10, 6, 4 | 16, 64, 32, 16 | 32 bits, the first ones highest |
//! | f32 | 2 | 1 | the float |
//! | bf16 | 1 | 1 | row i in the low half, row 16 + i in the high half |
//!
//! Two lines of trellis codes have 32 bits of each row. The side comes before the steps of integer
//! codes, with one line for two bytes of each row. Integer codes with a scale for each group are
//! stored in spans, see [`super::groups`]. Rows after the last one are zero bits, except rows that
//! share a tile of trellis codes with rows of the matrix.

use super::super::isa::Isa;
use super::super::lines::Lines;
use super::groups::{self, Opening, SPAN};
use super::tile::{LINE, TILE};
use crate::tensor::trellis;
use crate::tensor::{Code, CpuLayout, Format, Group, Matrix, StoredMatrix, Values, hadamard, side};
use crate::util::threads;
use anyhow::Result;
use half::f16;
use rayon::prelude::*;
use std::ops::Range;

/// Largest number of columns for which sums of int8 products always fit in an i32.
const MAX_COLS: usize = 1 << 17;

/// A weight matrix in the layout of [`super::linear`].
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    shape: TileShape,
    lines: Lines,
}

impl PackedMatrix {
    /// Reads and repacks a matrix, tile by tile. `isa` only affects the speed.
    pub fn load(matrix: &StoredMatrix<'_>, isa: Isa) -> Result<PackedMatrix> {
        assert!(isa.is_supported());
        assert!(
            matrix.cols <= MAX_COLS || !matrix.format.code.is_integer(),
            "{} columns could overflow",
            matrix.cols
        );
        let StoredMatrix { format, rows, cols, .. } = *matrix;
        let shape = TileShape::new(format, cols);
        let mut lines = Lines::zeroed(Self::bytes_of(format, rows, cols));
        threads::prepare_common_pool();
        let tiles = lines.bytes_mut().par_chunks_exact_mut(shape.tile_bytes()).enumerate();
        tiles.try_for_each(|(tile, bytes)| -> Result<()> {
            let matrix = matrix.read(tile * TILE..rows.min(tile * TILE + TILE))?;
            match isa {
                _ if format.code.is_trellis() => pack_trellis(&matrix, shape, bytes),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the machine has the instructions, as asserted above.
                Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => unsafe {
                    pack_tile_avx2(&matrix, shape, bytes)
                },
                _ => pack_tile(&matrix, shape, bytes),
            }
            Ok(())
        })?;
        Ok(PackedMatrix { format, rows, shape, lines })
    }

    /// Returns the bytes of a packed matrix.
    pub fn bytes_of(format: Format, rows: usize, cols: usize) -> usize {
        rows.div_ceil(TILE) * TileShape::new(format, cols).tile_bytes()
    }

    /// Returns the number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of inputs.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        self.lines.bytes().len()
    }

    /// Returns the number of tiles. A tile has [`TILE`] outputs, except perhaps the last one.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    pub(super) fn shape(&self) -> TileShape {
        self.shape
    }

    /// Returns the bytes of some tiles.
    pub fn part(&self, tiles: Range<usize>) -> &[u8] {
        let n = self.shape.tile_bytes();
        &self.lines.bytes()[tiles.start * n..tiles.end * n]
    }

    pub(super) fn tile(&self, tile: usize) -> &[u8] {
        let n = self.shape.tile_bytes();
        &self.lines.bytes()[tile * n..][..n]
    }

    /// Writes one row as floats, with the bits of [`Matrix::dequantize_row`]. `out` must have
    /// `cols` elements.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols());
        let (shape, tile, lane) = (self.shape(), self.tile(row / TILE), row % TILE);
        // The byte offset of the row's dword in a step.
        let dword = lane * 4;
        let at = |offset: usize| <[u8; 4]>::try_from(&tile[offset..][..4]).unwrap_or_default();
        if let Some(opening) = shape.opening {
            opening.decode(tile, lane, out);
            return self.rotate_back(out);
        }
        match layout_of(self.format.code) {
            CpuLayout::F32 => {
                for (k, o) in out.iter_mut().enumerate() {
                    *o = f32::from_le_bytes(at(k * shape.step_bytes + dword));
                }
            }
            CpuLayout::Bf16 => {
                for (k, o) in out.iter_mut().enumerate() {
                    let both = u32::from_le_bytes(at(k * shape.step_bytes + lane % 16 * 4));
                    *o = f32::from_bits(if lane < 16 { both << 16 } else { both & 0xffff_0000 });
                }
            }
            CpuLayout::Tiles(_) => {
                let scale = f16::from_le_bytes([tile[2 * lane], tile[2 * lane + 1]]).to_f32();
                for (columns, step) in
                    out.chunks_mut(shape.step_cols).zip(tile[LINE..].chunks_exact(shape.step_bytes))
                {
                    for (columns, codes) in columns.chunks_mut(trellis::TILE).zip(codes_of_step(
                        self.format.code,
                        step,
                        lane,
                    )) {
                        columns.iter_mut().zip(codes).for_each(|(o, q)| *o = q as f32 * scale);
                    }
                }
            }
            CpuLayout::Int(bits) => {
                let (code, bias) = (self.format.code, bias_of(self.format.code));
                let side_of = code.spec().side;
                let mut element = [0; side::BYTES];
                let element = &mut element[..side_of.bytes()];
                for (i, half) in element.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    half.copy_from_slice(&tile[i * LINE + 2 * lane..][..2]);
                }
                let integer = |col: usize| {
                    let bytes = at(shape.head + col / shape.step_cols * shape.step_bytes + dword);
                    code_of(bits, bytes, col % shape.step_cols) + bias
                };
                side_of.factors(element, 0).decode(side_of, code.unit(), integer, out);
            }
            CpuLayout::Grid => {}
        }
        self.rotate_back(out);
    }

    /// Applies the inverse Hadamard transform if the format has one.
    fn rotate_back(&self, out: &mut [f32]) {
        if self.format.hadamard {
            hadamard::inverse(out);
        }
    }
}

/// Returns the layout of a code that has kernels. Other codes are decoded when they are loaded.
pub fn layout_of(code: Code) -> CpuLayout {
    code.spec().cpu.unwrap_or_else(|| panic!("the CPU has no kernels for {code:?}"))
}

/// Returns [`Integer::bias`](crate::tensor::integer::Integer::bias) of a code.
pub fn bias_of(code: Code) -> i32 {
    match code.spec().values {
        Values::Integer(integer) => integer.bias(),
        _ => 0,
    }
}

/// Returns the integer value (see [`Matrix::code`]) of column `k` of a step in a row's dword, minus
/// the [`bias_of`] its code. The code must have integers of 2, 4 or 8 bits and one scale per row.
#[inline(always)]
pub fn code_of(bits: u32, dword: [u8; 4], k: usize) -> i32 {
    let byte = dword[k % 4] as i32;
    match bits {
        4 => (byte >> (4 * (k / 4)) & 15) - 8,
        2 => 2 * (byte >> (2 * (k / 4)) & 3) - 3,
        _ => byte - 128,
    }
}

/// Returns the integers of a row in a step of trellis codes, sixteen columns at a time.
#[inline(always)]
pub fn codes_of_step(
    code: Code,
    step: &[u8],
    lane: usize,
) -> impl Iterator<Item = [i32; trellis::TILE]> {
    let trellis = code.trellis().unwrap_or_else(|| panic!("{code:?} is no trellis code"));
    let bits = trellis.row_bits() as usize;
    let segment = move |lane: usize, i: usize| -> u64 {
        let word = |n: usize| match step.get(n * 2 * LINE + lane * 4..) {
            Some(&[a, b, c, d, ..]) => u32::from_le_bytes([a, b, c, d]) as u128,
            _ => 0,
        };
        let first = i * bits / 32;
        let three = word(first) << 64 | word(first + 1) << 32 | word(first + 2);
        (three >> (96 - i * bits % 32 - bits)) as u64 & u64::MAX >> (64 - bits)
    };
    // The previous row in the row's trellis tile, which is half of the lanes.
    let before = lane / trellis::TILE * trellis::TILE + (lane + trellis::TILE - 1) % trellis::TILE;
    (0..step.len() / (2 * LINE) * 32 / bits)
        .map(move |i| trellis.decode(segment(before, i), segment(lane, i)))
}

/// Sizes inside a tile.
#[derive(Clone, Copy)]
pub struct TileShape {
    /// Columns of a row.
    pub cols: usize,
    /// Columns and bytes of a step.
    pub step_cols: usize,
    pub step_bytes: usize,
    /// Bytes before the steps: lines of the side, or 0 for floats.
    pub head: usize,
    /// Set for integers with a scale for each group, which are stored in spans instead of steps.
    pub opening: Option<Opening>,
}

impl TileShape {
    pub fn new(format: Format, cols: usize) -> TileShape {
        let layout = layout_of(format.code);
        let (step_cols, step_bytes) = match layout {
            CpuLayout::F32 => (1, 2 * LINE),
            CpuLayout::Bf16 => (1, LINE),
            CpuLayout::Int(bits) => (32 / bits as usize, 2 * LINE),
            // Grids are only stored in spans.
            CpuLayout::Grid => (SPAN, 0),
            CpuLayout::Tiles(0) => (16, 2 * LINE),
            CpuLayout::Tiles(1) => (64, 10 * LINE),
            CpuLayout::Tiles(2) => (32, 6 * LINE),
            CpuLayout::Tiles(_) => (16, 4 * LINE),
        };
        let grouped = format.code.is_integer() && format.group != Group::Row;
        TileShape {
            cols,
            step_cols,
            step_bytes,
            head: format.code.spec().side.bytes() / 2 * LINE,
            opening: grouped.then(|| Opening::of(format)),
        }
    }

    /// Returns the steps of a row. Only for i2 with an odd multiple of 8 columns is the last one
    /// half empty.
    pub fn steps(self) -> usize {
        self.cols.div_ceil(self.step_cols)
    }

    pub fn tile_bytes(self) -> usize {
        match self.opening {
            Some(opening) => opening.bytes(self.cols),
            None => self.head + self.steps() * self.step_bytes,
        }
    }
}

/// [`pack_tile`], compiled for wider vectors.
///
/// # Safety
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn pack_tile_avx2(matrix: &Matrix<'_>, shape: TileShape, out: &mut [u8]) {
    pack_tile(matrix, shape, out);
}

/// Packs the rows of one tile.
#[inline(always)]
fn pack_tile(matrix: &Matrix<'_>, shape: TileShape, out: &mut [u8]) {
    for lane in 0..matrix.rows {
        let codes = matrix.row(lane);
        if let Some(opening) = shape.opening {
            pack_spans(matrix, &opening, lane, out);
            continue;
        }
        match layout_of(matrix.format.code) {
            CpuLayout::F32 => {
                for (step, code) in
                    out.chunks_exact_mut(shape.step_bytes).zip(codes.as_chunks::<4>().0)
                {
                    step[lane * 4..][..4].copy_from_slice(code);
                }
            }
            CpuLayout::Bf16 => {
                let place = lane % 16 * 4 + lane / 16 * 2;
                for (step, code) in
                    out.chunks_exact_mut(shape.step_bytes).zip(codes.as_chunks::<2>().0)
                {
                    step[place..][..2].copy_from_slice(code);
                }
            }
            CpuLayout::Int(bits) => {
                let side = matrix.row_side(lane).as_chunks::<2>().0;
                for (line, half) in out.chunks_exact_mut(LINE).zip(side) {
                    line[lane * 2..][..2].copy_from_slice(half);
                }
                // Bytes without a bias have a sign.
                let flip = if bias_of(matrix.format.code) == 0 { 0x8080_8080 } else { 0 };
                let steps = &mut out[shape.head..];
                match bits {
                    8 => pack_dwords(codes, steps, lane, |q| q ^ flip),
                    4 => pack_dwords(codes, steps, lane, interleave_i4),
                    _ => pack_dwords(codes, steps, lane, transpose_i2),
                }
            }
            CpuLayout::Grid | CpuLayout::Tiles(_) => {}
        }
    }
}

/// Distributes the rows of one or two rows of trellis tiles over a tile.
fn pack_trellis(matrix: &Matrix<'_>, shape: TileShape, out: &mut [u8]) {
    for lane in 0..matrix.rows {
        out[2 * lane..][..2].copy_from_slice(matrix.row_side(lane));
    }
    let steps = &mut out[LINE..];
    for (half, first) in (0..matrix.rows).step_by(trellis::TILE).enumerate() {
        // One version per code, so that all shifts are by constants.
        macro_rules! by_code {
            ($($code:ident)*) => {
                match matrix.format.code {
                    $(Code::$code => {
                        pack_trellis_half(matrix, Code::$code, shape, first, half, steps)
                    })*
                    code => panic!("{code:?} is no trellis code"),
                }
            };
        }
        by_code!(T2 T25 T3 T4);
    }
}

/// Packs the sixteen rows from `first` on, which become half of all lines.
#[inline(always)]
fn pack_trellis_half(
    matrix: &Matrix<'_>,
    code: Code,
    shape: TileShape,
    first: usize,
    half: usize,
    steps: &mut [u8],
) {
    let Some(trellis) = code.trellis() else { return };
    let (bits, parts) = (trellis.row_bits(), shape.step_cols / trellis::TILE);
    for (i, step) in steps.chunks_exact_mut(shape.step_bytes).enumerate() {
        for at in 0..trellis::TILE {
            let place = half * LINE + at * 4;
            // Bits that do not fill a dword yet, the last one lowest.
            let (mut left, mut n, mut dword) = (0u64, 0, 0);
            let mut push = |value: u64, bits: u32| {
                (left, n) = (left << bits | value, n + bits);
                if n >= 32 {
                    n -= 32;
                    step[dword * 2 * LINE + place..][..4]
                        .copy_from_slice(&((left >> n) as u32).to_le_bytes());
                    dword += 1;
                }
            };
            for part in 0..parts {
                let row = trellis.row(matrix.tile(first, i * parts + part).0, at);
                if bits > 32 {
                    push(row >> 32, bits - 32);
                }
                push(row & u32::MAX as u64, 32);
            }
        }
    }
}

/// Distributes one row of integer codes with a scale for each group over the spans of a tile.
#[inline(always)]
fn pack_spans(matrix: &Matrix<'_>, opening: &Opening, lane: usize, out: &mut [u8]) {
    let row_bytes = opening.row_bytes(SPAN);
    let spans = matrix.row(lane).chunks(row_bytes).zip(out.chunks_mut(opening.bytes(SPAN)));
    let mut side = matrix.row_side(lane);
    for (codes, out) in spans {
        let (head, steps) = out.split_at_mut(opening.side_bytes(codes.len() * SPAN / row_bytes));
        let (own, rest) = side.split_at(head.len() / TILE);
        side = rest;
        for (line, half) in head.chunks_exact_mut(LINE).zip(own.as_chunks::<2>().0) {
            line[lane * 2..][..2].copy_from_slice(half);
        }
        match opening.bits {
            0 => steps[lane * codes.len()..][..codes.len()].copy_from_slice(codes),
            8 => pack_dwords(codes, steps, lane, |q| q ^ 0x8080_8080),
            4 => pack_dwords(codes, steps, lane, interleave_i4),
            2 => pack_dwords(codes, steps, lane, transpose_i2),
            3 => pack_planes::<3>(codes, steps, lane),
            5 => pack_planes::<5>(codes, steps, lane),
            _ => pack_planes::<6>(codes, steps, lane),
        }
    }
}

/// Distributes codes over steps, one dword at a time.
#[inline(always)]
fn pack_dwords(codes: &[u8], steps: &mut [u8], lane: usize, reorder: impl Fn(u32) -> u32) {
    let mut steps = steps.chunks_exact_mut(2 * LINE).map(|step| &mut step[lane * 4..][..4]);
    let (dwords, rest) = codes.as_chunks::<4>();
    for (dword, step) in dwords.iter().zip(&mut steps) {
        step.copy_from_slice(&reorder(u32::from_le_bytes(*dword)).to_le_bytes());
    }
    if let (Some(step), false) = (steps.next(), rest.is_empty()) {
        let mut dword = [0; 4];
        dword[..rest.len()].copy_from_slice(rest);
        step.copy_from_slice(&reorder(u32::from_le_bytes(dword)).to_le_bytes());
    }
}

/// Distributes codes with two planes over their lines, 32 codes at a time.
#[inline(always)]
fn pack_planes<const BITS: usize>(codes: &[u8], steps: &mut [u8], lane: usize) {
    let (low_bits, high_bits) = groups::split(BITS as u32);
    let cols = codes.len() * 8 / BITS;
    let (lows, highs) = steps.split_at_mut(cols * low_bits as usize * TILE / 8);
    for (i, packed) in codes.chunks_exact(4 * BITS).enumerate() {
        let mut bytes = [0; 33];
        bytes[..4 * BITS].copy_from_slice(packed);
        let stored: [u32; 32] = std::array::from_fn(|col| {
            let (first, part) = (col * BITS / 8, col * BITS % 8);
            u16::from_le_bytes([bytes[first], bytes[first + 1]]) as u32 >> part
        });
        for (plane, bits, shift) in [(&mut *lows, low_bits, 0), (&mut *highs, high_bits, low_bits)]
        {
            let (mask, per_dword) = ((1 << bits) - 1, 32 / bits as usize);
            for (d, columns) in stored.chunks_exact(per_dword).enumerate() {
                let place = |(col, code): (usize, &u32)| {
                    (code >> shift & mask) << (col % 4 * 8 + col / 4 * bits as usize)
                };
                let dword: u32 = columns.iter().enumerate().map(place).sum();
                plane[(i * bits as usize + d) * 2 * LINE + lane * 4..][..4]
                    .copy_from_slice(&dword.to_le_bytes());
            }
        }
    }
}

/// Rearranges nibbles 0..8 to bytes with nibble j in the low half and nibble j + 4 in the high
/// half.
#[inline(always)]
fn interleave_i4(q: u32) -> u32 {
    let spread = |x: u32| {
        let x = (x | x << 8) & 0x00ff_00ff;
        (x | x << 4) & 0x0f0f_0f0f
    };
    spread(q & 0xffff) | spread(q >> 16) << 4
}

/// Transposes the 4 x 4 matrix of two-bit codes: field p of byte b moves to field b of byte p.
#[inline(always)]
fn transpose_i2(q: u32) -> u32 {
    let t = (q ^ q >> 6) & 0x00cc_00cc;
    let q = q ^ t ^ t << 6;
    let t = (q ^ q >> 12) & 0x0000_f0f0;
    q ^ t ^ t << 12
}
