//! Weights with a scale for each group of columns.
//!
//! A tile is cut into *spans* of at most 256 columns. A span is first opened: its codes become
//! bytes, and its side becomes a line of f32 scales for each group (and one of minima), all in the
//! L1 cache. Then the opened span is multiplied by the rows of activations. The multiplying kernels
//! therefore do not depend on how files store codes and scales, and a span is opened once for all
//! rows.
//!
//! In a tile, a span first has its side, with one line for two bytes of each row, element after
//! element. Then it has the *planes* of its codes. A plane has 4, 2, 1 or all 8 bits of each code.
//! Codes of 3, 5 and 6 bits have two planes, the lower bits first. Each pair of lines of a plane of
//! b bits is a dword of 32 / b columns for each row: byte j has the columns j, j + 4, j + 8 and so
//! on, from the lowest bits up. Octets of a grid are stored row after row, as in the file.

use super::panel::fetch;
use super::tile::{LINE, TILE};
use crate::tensor::grid::Grid;
use crate::tensor::{Format, SideKind, Values, side};

/// Columns of a span. The last span of a row may have fewer.
pub const SPAN: usize = 256;
/// Columns of the narrowest group.
const NARROWEST: usize = 16;

/// An opened span, which is in the L1 cache.
#[repr(align(64))]
pub struct OpenSpan {
    /// Dwords of four columns for each row: the integers of the weights plus [`Opening::offset`].
    /// Unused if the packed codes have this form already.
    pub bytes: [[u32; TILE]; SPAN / 4],
    pub scales: [[f32; TILE]; SPAN / NARROWEST],
    /// Minima, if the format has them.
    pub mins: [[f32; TILE]; SPAN / NARROWEST],
}

impl OpenSpan {
    pub fn new() -> OpenSpan {
        OpenSpan {
            bytes: [[0; TILE]; SPAN / 4],
            scales: [[0.0; TILE]; SPAN / NARROWEST],
            mins: [[0.0; TILE]; SPAN / NARROWEST],
        }
    }
}

/// The properties of a format that determine how its spans are opened and multiplied.
#[derive(Clone, Copy)]
pub struct Opening {
    /// Bits of a code; 0 for octets of a grid.
    pub bits: u32,
    /// Bits of eight columns.
    octet: usize,
    pub side: SideKind,
    /// Columns of a group.
    pub width: usize,
    unit: f32,
    map: Map,
    /// The grid of octets, instead of `bits` and `map`.
    grid: Option<&'static Grid>,
    /// Difference between the bytes of a span and the integers of the weights.
    pub offset: i32,
    /// The largest byte of a span.
    pub largest: i32,
}

/// Conversion of stored codes to bytes.
#[derive(Clone, Copy, PartialEq)]
enum Map {
    Same,
    /// Codes lie between whole numbers and are doubled.
    Twice,
    Levels(&'static [i8; 16]),
}

impl Opening {
    /// Returns the opening of a format with a scale for each group.
    pub fn of(format: Format) -> Opening {
        let block = format.code.spec();
        let opening = Opening {
            bits: 0,
            octet: format.code.bits_of_eight(),
            side: block.side,
            width: format.group_cols(0),
            unit: format.code.unit(),
            map: Map::Same,
            grid: None,
            offset: 128,
            largest: 255,
        };
        let integer = match block.values {
            Values::Integer(integer) => integer,
            Values::Grid(grid) => return Opening { grid: Some(grid), ..opening },
            _ => panic!("{format} has no groups of integers"),
        };
        let (map, offset) = match (integer.levels, integer.shift != 0.0) {
            (Some(levels), _) => (Map::Levels(levels), 128),
            (None, true) => (Map::Twice, (2.0 * integer.shift) as i32),
            // Bytes are stored with a sign, but packed without it.
            (None, false) if integer.bits == 8 => (Map::Same, 128),
            (None, false) => (Map::Same, integer.zero),
        };
        let largest = match map {
            Map::Same => (1 << integer.bits) - 1,
            Map::Twice => 2 * ((1 << integer.bits) - 1),
            Map::Levels(_) => 255,
        };
        Opening { bits: integer.bits, map, offset, largest, ..opening }
    }

    /// Returns whether packed codes need no opening.
    pub fn is_open(&self) -> bool {
        self.bits == 8
    }

    /// Returns the bits of packed codes, if kernels can extract the bytes from them without a
    /// table.
    #[cfg(target_arch = "x86_64")]
    pub fn plain_bits(&self) -> Option<u32> {
        (self.map == Map::Same && self.grid.is_none()).then_some(self.bits)
    }

    /// Returns the bytes of a span of `cols` columns.
    pub fn bytes(&self, cols: usize) -> usize {
        self.side_bytes(cols) + self.row_bytes(cols) * TILE
    }

    /// Returns the bytes of a row's codes in a span.
    pub fn row_bytes(&self, cols: usize) -> usize {
        cols * self.octet / 64
    }

    /// Returns the bytes of a span's side.
    pub fn side_bytes(&self, cols: usize) -> usize {
        cols / self.width / self.side.groups() * self.side.bytes() * TILE
    }

    /// Decodes one row of a tile.
    pub fn decode(&self, tile: &[u8], lane: usize, out: &mut [f32]) {
        let mut element = [0; side::BYTES];
        let element = &mut element[..self.side.bytes()];
        for (out, packed) in out.chunks_mut(SPAN).zip(tile.chunks(self.bytes(SPAN))) {
            let cols = out.len();
            for (group, out) in out.chunks_exact_mut(self.width).enumerate() {
                self.element(packed, lane, group, element);
                let integer = |col| self.integer(packed, cols, lane, group * self.width + col);
                let factors = self.side.factors(element, group % self.side.groups());
                factors.decode(self.side, self.unit, integer, out);
            }
        }
    }

    /// Returns the integer of a weight, for a column of one row.
    fn integer(&self, packed: &[u8], cols: usize, lane: usize, col: usize) -> i32 {
        let mut at = self.side_bytes(cols);
        if let Some(grid) = self.grid {
            let row_bytes = self.row_bytes(cols);
            return grid.at(&packed[at + lane * row_bytes..][..row_bytes], col);
        }
        let (mut stored, mut shift) = (0, 0);
        for bits in planes(self.bits) {
            let per_step = 32 / bits as usize;
            let byte = packed[at + col / per_step * 2 * LINE + lane * 4 + col % 4];
            let part = byte as u32 >> (col % per_step / 4 * bits as usize) & ((1 << bits) - 1);
            stored |= part << shift;
            shift += bits;
            at += cols * bits as usize * TILE / 8;
        }
        match self.map {
            Map::Same => stored as i32 - self.offset,
            Map::Twice => 2 * stored as i32 - self.offset,
            Map::Levels(levels) => levels[stored as usize] as i32,
        }
    }

    /// Copies the element of the side for a group of one row to `element`.
    fn element(&self, packed: &[u8], lane: usize, group: usize, element: &mut [u8]) {
        let first = group / self.side.groups() * self.side.bytes() * TILE;
        for (i, half) in element.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            half.copy_from_slice(&packed[first + i * LINE + 2 * lane..][..2]);
        }
    }
}

/// Returns the bits of the planes of codes, the lowest first; 0 for no second plane.
pub const fn split(bits: u32) -> (u32, u32) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        _ => (bits, 0),
    }
}

/// Returns the bits of the planes that exist.
pub fn planes(bits: u32) -> impl Iterator<Item = u32> {
    let (low, high) = split(bits);
    [low, high].into_iter().filter(|bits| *bits > 0)
}

/// Opens a packed span of this many columns: its side, and its codes if `codes` is set.
pub type OpenFn =
    unsafe fn(opening: &Opening, packed: &[u8], cols: usize, codes: bool, span: &mut OpenSpan);

/// Adds the products of a span with `R` rows to `acc[R][TILE]`.
pub type GroupsFn = unsafe fn(span: &OpenSpan, rows: &SpanRows, acc: *mut f32);

/// The activations by which a span is multiplied.
pub struct SpanRows {
    /// The span's bytes: dwords of four columns for each row.
    pub bytes: *const [u32; TILE],
    /// Groups of the span, and steps of four columns in each group.
    pub groups: usize,
    pub steps: usize,
    /// See [`Opening`].
    pub offset: i32,
    pub has_min: bool,
    /// The first row's activations at the start of the span, and bytes between rows.
    pub x: *const i8,
    pub x_stride: usize,
    /// The first row's scale and sum for the span's first group, and values between rows.
    pub sx: *const f32,
    pub sums: *const i32,
    pub s_stride: usize,
    /// Bytes to prefetch while the span is multiplied, and lines of them per group in units of
    /// [`FRACTION`](super::panel::FRACTION).
    pub ahead: *const u8,
    pub ahead_rate: usize,
}

impl SpanRows {
    /// Prefetches the share of a group. With `halvings`, it is share `n` of all shares, each halved
    /// that many times. More lines at once would delay each other and the products.
    #[inline(always)]
    pub fn fetch(&self, n: usize, halvings: u32) {
        fetch(self.ahead, self.ahead_rate, n, halvings);
    }
}

/// Operations of an instruction set that opening needs in addition to plain Rust.
pub trait Openers {
    /// Converts the f16 values of a line to f32.
    /// # Safety
    /// The machine has the instructions.
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE];
    /// Replaces each byte, which is an index, by a level plus 128.
    /// # Safety
    /// The machine has the instructions.
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]);
}

/// Implements [`OpenFn`]. It is compiled for each instruction set.
///
/// # Safety
/// The machine has the instructions of `O`.
#[inline(always)]
pub unsafe fn open<O: Openers>(
    opening: &Opening,
    packed: &[u8],
    cols: usize,
    wants_codes: bool,
    span: &mut OpenSpan,
) {
    let (side, codes) = packed.split_at(opening.side_bytes(cols));
    // SAFETY: the caller upholds the contract.
    unsafe {
        // One function per kind, so that all shifts are by constants.
        macro_rules! by_kind {
            ($($kind:ident)*) => {
                match opening.side {
                    $(SideKind::$kind => open_side::<O>(SideKind::$kind, opening, side, span),)*
                    SideKind::None => {}
                }
            };
        }
        by_kind!(
            Scale ScaleMin SixBitMin FourBitMin EightBit SixBit SixBitSplit FourBit FourBitWide
        );
        if !wants_codes {
            return;
        }
        match opening.bits {
            2 => open_codes::<2>(codes, cols, span),
            3 => open_codes::<3>(codes, cols, span),
            4 => open_codes::<4>(codes, cols, span),
            5 => open_codes::<5>(codes, cols, span),
            6 => open_codes::<6>(codes, cols, span),
            _ => {}
        }
        let bytes = &mut span.bytes[..cols / 4];
        if let Some(grid) = opening.grid {
            open_octets(grid, codes, bytes);
        }
        match opening.map {
            Map::Same => {}
            Map::Twice => bytes.iter_mut().flatten().for_each(|dword| *dword <<= 1),
            Map::Levels(levels) => bytes.iter_mut().for_each(|line| O::look_up(levels, line)),
        }
    }
}

/// Opens the scales and minima of a span.
///
/// # Safety
/// The machine has the instructions of `O`.
#[inline(always)]
unsafe fn open_side<O: Openers>(
    kind: SideKind,
    opening: &Opening,
    side: &[u8],
    span: &mut OpenSpan,
) {
    let lines: &[[u16; TILE]] = bytemuck::cast_slice(side);
    let outputs = span.scales.chunks_mut(kind.groups()).zip(span.mins.chunks_mut(kind.groups()));
    for (lines, (scales, mins)) in lines.chunks_exact(kind.bytes() / 2).zip(outputs) {
        // SAFETY: the caller upholds the contract.
        let floats = |line| unsafe { O::floats(line) };
        let d = floats(&lines[0]).map(|d| d * opening.unit);
        let dmin = if kind.has_min() { floats(&lines[1]) } else { [0.0; TILE] };
        for (group, (scales, mins)) in scales.iter_mut().zip(mins).enumerate() {
            for lane in 0..TILE {
                let byte = |at: usize| (lines[at / 2][lane] >> (8 * (at % 2))) as u8;
                let [scale, min] = kind.integers(group, byte);
                scales[lane] = d[lane] * scale as f32;
                if kind.has_min() {
                    mins[lane] = dmin[lane] * min as f32;
                }
            }
        }
    }
}

/// Opens the stored codes of a span.
#[inline(always)]
fn open_codes<const BITS: u32>(codes: &[u8], cols: usize, span: &mut OpenSpan) {
    let (low_bits, high_bits) = const { split(BITS) };
    let codes: &[[u32; TILE]] = bytemuck::cast_slice(codes);
    let (lows, highs) = codes.split_at(cols * low_bits as usize / 32);
    let mask = |bits: u32| u32::from_ne_bytes([((1u32 << bits) - 1) as u8; 4]);
    for (i, columns) in span.bytes[..cols / 4].chunks_exact_mut(8).enumerate() {
        let (low, high) = (&lows[i * low_bits as usize..], &highs[i * high_bits as usize..]);
        for (k, out) in columns.iter_mut().enumerate() {
            let part = |plane: &[[u32; TILE]], bits: u32, lane: usize| {
                let k = k as u32 * bits;
                plane[k as usize / 8][lane] >> (k % 8) & mask(bits)
            };
            for (lane, out) in out.iter_mut().enumerate() {
                *out = part(low, low_bits, lane);
                if high_bits > 0 {
                    *out |= part(high, high_bits, lane) << low_bits;
                }
            }
        }
    }
}

/// Opens the octets of a span.
#[inline(always)]
fn open_octets(grid: &Grid, codes: &[u8], bytes: &mut [[u32; TILE]]) {
    let row_bytes = codes.len() / TILE;
    for (octet, lines) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        for (lane, row) in codes.chunks_exact(row_bytes).enumerate() {
            let dwords = grid.open(grid.octet(row, octet));
            lines.iter_mut().zip(dwords).for_each(|(line, four)| line[lane] = four ^ 0x8080_8080);
        }
    }
}
