//! Weights with a scale for each group of columns.
//!
//! A tile is cut into *spans* of at most 256 columns. A span is first opened: its codes become
//! bytes, its side becomes a line of f32 scales for each group (and one of minima), all in the L1
//! cache. The rows of activations then meet the opened span. So the kernels that multiply know
//! nothing of the many ways in which files store codes and scales, and opening is paid once for all
//! rows.
//!
//! In a tile a span is its side, two bytes of each row a line, element after element, and then the
//! *planes* of its codes. A plane holds 4, 2, 1 or all 8 bits of each code. Codes of 3, 5 and 6
//! bits have two planes, the lower bits first. Each pair of lines of a plane of b bits is a dword
//! of 32 / b columns for each row: byte j holds the columns j, j + 4, j + 8 and so on, from the
//! lowest bits up. Octets of a grid lie row after row as they are stored.

use super::panel::fetch;
use super::tile::{LINE, TILE};
use crate::tensor::grid::Grid;
use crate::tensor::{Format, SideKind, Values, side};

/// Columns of a span; the last one of a row may have fewer.
pub const SPAN: usize = 256;
/// Narrowest group.
const NARROWEST: usize = 16;

/// A span in the L1 cache.
#[repr(align(64))]
pub struct OpenSpan {
    /// A dword of four columns for each row: the integers that kernels take, plus
    /// [`Opening::offset`]. Unused where they lie in this form already.
    pub bytes: [[u32; TILE]; SPAN / 4],
    pub scales: [[f32; TILE]; SPAN / NARROWEST],
    /// Only where weights have a minimum.
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

/// The part of a format that decides how its spans are opened and multiplied.
#[derive(Clone, Copy)]
pub struct Opening {
    /// Bits of an integer; 0 for octets of a grid.
    pub bits: u32,
    /// Bits of eight columns.
    octet: usize,
    pub side: SideKind,
    /// Columns of a group.
    pub width: usize,
    unit: f32,
    map: Map,
    /// The way from octets to bytes, in place of `bits` and `map`.
    grid: Option<&'static Grid>,
    /// Difference of the bytes of a span and the integers that kernels take.
    pub offset: i32,
    /// The largest byte of a span.
    pub largest: i32,
}

/// From stored codes to bytes.
#[derive(Clone, Copy, PartialEq)]
enum Map {
    Same,
    /// Codes between whole numbers, doubled.
    Twice,
    Levels(&'static [i8; 16]),
}

impl Opening {
    /// Makes that of a format with a scale for each group.
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
            // Bytes are stored with their sign, and packed without.
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

    /// Returns whether packed codes are the bytes that kernels take.
    pub fn is_open(&self) -> bool {
        self.bits == 8
    }

    /// Bits of packed codes whose fields are the bytes that kernels take.
    pub fn plain_bits(&self) -> Option<u32> {
        (self.map == Map::Same && self.grid.is_none()).then_some(self.bits)
    }

    /// Bytes of a span of `cols` columns.
    pub fn bytes(&self, cols: usize) -> usize {
        self.side_bytes(cols) + self.row_bytes(cols) * TILE
    }

    /// Bytes of a row's codes in it.
    pub fn row_bytes(&self, cols: usize) -> usize {
        cols * self.octet / 64
    }

    /// Bytes of its side.
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

    /// Returns the integer that kernels take for a column of one row.
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

    /// Copies the element of the side that serves a group of one row to `element`.
    fn element(&self, packed: &[u8], lane: usize, group: usize, element: &mut [u8]) {
        let first = group / self.side.groups() * self.side.bytes() * TILE;
        for (i, half) in element.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            half.copy_from_slice(&packed[first + i * LINE + 2 * lane..][..2]);
        }
    }
}

/// The planes of codes of `bits` bits, the lowest first; 0 where there is no second one.
pub const fn split(bits: u32) -> (u32, u32) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        _ => (bits, 0),
    }
}

/// The same without the absent one.
pub fn planes(bits: u32) -> impl Iterator<Item = u32> {
    let (low, high) = split(bits);
    [low, high].into_iter().filter(|bits| *bits > 0)
}

/// Opens a packed span of this many columns: its side, and if asked its codes.
pub type OpenFn =
    unsafe fn(opening: &Opening, packed: &[u8], cols: usize, codes: bool, span: &mut OpenSpan);

/// Adds the products of a span with `R` rows to `acc[R][TILE]`.
pub type GroupsFn = unsafe fn(span: &OpenSpan, rows: &SpanRows, acc: *mut f32);

/// The activations that meet a span.
pub struct SpanRows {
    /// The span's bytes, a dword of four columns for each row.
    pub bytes: *const [u32; TILE],
    /// Groups of the span, and steps of four columns of each.
    pub groups: usize,
    pub steps: usize,
    /// See [`Opening`].
    pub offset: i32,
    pub has_min: bool,
    /// The first row's activations where the span starts, and bytes from row to row.
    pub x: *const i8,
    pub x_stride: usize,
    /// The first row's scale and sum of the span's first group, and values from row to row.
    pub sx: *const f32,
    pub sums: *const i32,
    pub s_stride: usize,
    /// Bytes to fetch while the span is multiplied, and lines of them for each group, in units of
    /// [`FRACTION`](super::panel::FRACTION).
    pub ahead: *const u8,
    pub ahead_rate: usize,
}

impl SpanRows {
    /// Fetches the share of a group, or with `halvings` share `n` of the shares of all groups, each
    /// halved so often. More lines at once would wait for each other, and the products for them.
    #[inline(always)]
    pub fn fetch(&self, n: usize, halvings: u32) {
        fetch(self.ahead, self.ahead_rate, n, halvings);
    }
}

/// The operations of an instruction set that opening needs beside plain Rust.
pub trait Openers {
    /// Widens the f16 of a line.
    /// # Safety
    /// The machine has the instructions.
    unsafe fn floats(line: &[u16; TILE]) -> [f32; TILE];
    /// Replaces each byte, an index, by a level plus 128.
    /// # Safety
    /// The machine has the instructions.
    unsafe fn look_up(levels: &[i8; 16], bytes: &mut [u32; TILE]);
}

/// See [`OpenFn`]. Compiled again for each instruction set.
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
    // SAFETY: the caller's promise.
    unsafe {
        // Once for each kind, so that all shifts are by constants.
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

/// The scales and minima of a span.
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
        // SAFETY: the caller's promise.
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

/// The stored codes of a span.
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

/// The octets of a span.
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
