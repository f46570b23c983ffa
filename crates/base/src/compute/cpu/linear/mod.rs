//! Linear layers: packed weights times a few rows of prepared activations.
//!
//! Every instruction set, row count and division of the tiles computes the same bits:
//! - integer codes with one scale per row: `(sum q * x as f32 * sx) * (scale * unit)` with an exact
//!   integer sum;
//! - integer codes with a scale per group: `y = fma(sum_g as f32 * sx_g, scale_g, y)` over the
//!   groups in order, from 0;
//! - if there is a minimum: `y = fma(sum x as f32 * sx, min, y)` after that, for the row or for
//!   each group;
//! - float codes: `y = fma(w, x, y)` over the columns in order, from 0.
//!
//! A tile of 32 outputs is read in panels that fit in the L1 cache. Each panel is multiplied by all
//! rows, up to eight at a time, before the next one is read. At the same time the next panel is
//! prefetched, so that reading weights and multiplying overlap for any row count.

/// Runs the body once per number, as a constant, so that shifts are by constants.
#[cfg(target_arch = "x86_64")]
macro_rules! unrolled {
    ($i:ident in [$($n:literal)*] $body:block) => {$({ const $i: usize = $n; $body })*};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod groups;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod panel;
mod scalar;
mod tile;
mod trellis;
mod words;
#[cfg(target_arch = "aarch64")]
mod words_neon;
#[cfg(target_arch = "x86_64")]
mod words_x86;
#[cfg(target_arch = "x86_64")]
mod ymm;

pub use pack::PackedMatrix;
pub use tile::{LINE, TILE};

use super::isa::Isa;
use crate::compute::act::{ActValues, ActView};
use crate::tensor::trellis::OFFSET as TRELLIS_OFFSET;
use crate::tensor::{CpuLayout, Format, Group};
use groups::{GroupsFn, OpenFn, OpenSpan, Opening, SPAN, SpanRows};
use pack::TileShape;
use panel::{FRACTION, FinishFn, GateFn, Panel, PanelFn};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

/// Rows of activations in one kernel call.
const BLOCK: usize = 8;
/// Rows of activations with sums in memory while a tile is read.
const STRIP: usize = 128;
/// Bytes of weights that stay in the L1 cache while all rows of a strip use them.
const PANEL: usize = 16 << 10;

/// The kernels of one format on one instruction set.
struct FormatKernels {
    way: TileReading,
    gate: GateFn,
}

/// Way of reading a tile.
enum TileReading {
    /// Step by step. The raw sums of integers are sums of q + offset.
    Steps { panel: [PanelFn; BLOCK], offset: i32, finish: FinishFn },
    /// Span by span, see [`groups`].
    Spans {
        opening: Opening,
        open: OpenFn,
        multiply: [GroupsFn; BLOCK],
        /// Kernels for few rows that use packed codes, if those are faster.
        packed: [Option<GroupsFn>; BLOCK],
    },
}

/// `[f::<.., 1>, .., f::<.., 8>]`
macro_rules! by_rows {
    ($f:ident $(, $c:expr)*) => {
        [
            $f::<$($c,)* 1>, $f::<$($c,)* 2>, $f::<$($c,)* 3>, $f::<$($c,)* 4>,
            $f::<$($c,)* 5>, $f::<$($c,)* 6>, $f::<$($c,)* 7>, $f::<$($c,)* 8>,
        ]
    };
}

/// The kernels of a module. All modules use the same names.
macro_rules! kernels_of {
    ($module:ident, $format:expr, $multiply:expr) => {{
        use $module::{OFFSETS, finish, finish_with_min, floats, gate, ints, open, tiles};
        let (panel, offset): ([PanelFn; BLOCK], i32) =
            match (pack::layout_of($format.code), $format.group) {
                (CpuLayout::F32, _) => (by_rows!(floats, 32), 0),
                (CpuLayout::Bf16, _) => (by_rows!(floats, 16), 0),
                (CpuLayout::Int(_), Group::Cols(_)) | (CpuLayout::Grid, _) => {
                    let opening = Opening::of($format);
                    let (multiply, packed) = $multiply(&opening);
                    return FormatKernels {
                        way: TileReading::Spans { opening, open, multiply, packed },
                        gate,
                    };
                }
                (CpuLayout::Int(8), Group::Row) => (by_rows!(ints, 8), OFFSETS[0]),
                (CpuLayout::Int(4), Group::Row) => (by_rows!(ints, 4), OFFSETS[1]),
                (CpuLayout::Int(_), Group::Row) => (by_rows!(ints, 2), OFFSETS[2]),
                (CpuLayout::Tiles(0), _) => (by_rows!(tiles, 0), TRELLIS_OFFSET),
                (CpuLayout::Tiles(1), _) => (by_rows!(tiles, 1), TRELLIS_OFFSET),
                (CpuLayout::Tiles(2), _) => (by_rows!(tiles, 2), TRELLIS_OFFSET),
                (CpuLayout::Tiles(_), _) => (by_rows!(tiles, 3), TRELLIS_OFFSET),
            };
        let has_min = $format.code.spec().side.has_min();
        let finish = if has_min { finish_with_min } else { finish };
        let offset = offset - pack::bias_of($format.code);
        FormatKernels { way: TileReading::Steps { panel, offset, finish }, gate }
    }};
}

/// Kernels of a block for packed codes. `$by_rows` selects by the format's bits and steps.
#[cfg(target_arch = "x86_64")]
macro_rules! packed_kernels {
    ($opening:expr, $by_rows:ident) => {
        match ($opening.plain_bits(), $opening.width) {
            (Some(2), 16) => $by_rows!(2, 4),
            (Some(3), 16) => $by_rows!(3, 4),
            (Some(4), 32) => $by_rows!(4, 8),
            (Some(4), _) => $by_rows!(4, 0),
            (Some(5), 32) => $by_rows!(5, 8),
            (Some(6), 16) => $by_rows!(6, 4),
            _ => [None; BLOCK],
        }
    };
}

/// Kernels of spans in vectors of 32 bytes, by the largest byte, the steps of a group, and the bits
/// of packed codes.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels_of_bytes {
    ($multiply:ident, $packed:ident) => {
        |opening: &Opening| {
            let multiply: [GroupsFn; BLOCK] = match (opening.largest, opening.width) {
                (..=15, 16) => by_rows!($multiply, 15, 4),
                (..=15, 32) => by_rows!($multiply, 15, 8),
                (..=15, _) => by_rows!($multiply, 15, 0),
                (16..=31, 32) => by_rows!($multiply, 31, 8),
                (32..=63, 16) => by_rows!($multiply, 63, 4),
                // These support any byte.
                (_, 16) => by_rows!($multiply, 255, 4),
                (_, 32) => by_rows!($multiply, 255, 8),
                (_, _) => by_rows!($multiply, 255, 0),
            };
            // With more than two rows, wide sums use the registers that some codes need.
            macro_rules! by_few_rows {
                ($bits:literal, $steps:literal) => {{
                    let mut few: [Option<GroupsFn>; BLOCK] = [None; BLOCK];
                    few[0] = Some($packed::<$bits, $steps, 1>);
                    few[1] = Some($packed::<$bits, $steps, 2>);
                    if $bits <= 4 {
                        few[2] = Some($packed::<$bits, $steps, 3>);
                        few[3] = Some($packed::<$bits, $steps, 4>);
                    }
                    few
                }};
            }
            (multiply, packed_kernels!(opening, by_few_rows))
        }
    };
}

fn kernels(isa: Isa, format: Format) -> FormatKernels {
    assert!(isa.is_supported(), "this machine has no {isa}");
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => {
            use avx512::{multiply, multiply_packed};
            kernels_of!(avx512, format, |opening: &Opening| {
                macro_rules! by_all_rows {
                    ($bits:literal, $steps:literal) => {{
                        let all: [GroupsFn; BLOCK] = by_rows!(multiply_packed, $bits, $steps);
                        all.map(Some)
                    }};
                }
                (by_rows!(multiply), packed_kernels!(opening, by_all_rows))
            })
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            use avx2::pairs::{self, multiply, multiply_packed};
            kernels_of!(pairs, format, kernels_of_bytes!(multiply, multiply_packed))
        }
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => {
            use avx2::vnni::{self, multiply, multiply_packed};
            kernels_of!(vnni, format, kernels_of_bytes!(multiply, multiply_packed))
        }
        #[cfg(target_arch = "aarch64")]
        Isa::NeonI8mm => {
            use neon::two_rows::{self, multiply};
            kernels_of!(two_rows, format, |opening: &Opening| match opening.largest {
                ..128 => (by_rows!(multiply, 7), [None; BLOCK]),
                _ => (by_rows!(multiply, 8), [None; BLOCK]),
            })
        }
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => {
            use neon::one_row::{self, multiply};
            kernels_of!(one_row, format, |opening: &Opening| match opening.largest {
                ..128 => (by_rows!(multiply, 7), [None; BLOCK]),
                _ => (by_rows!(multiply, 8), [None; BLOCK]),
            })
        }
        _ => {
            use scalar::multiply;
            kernels_of!(scalar, format, |_| (by_rows!(multiply), [None; BLOCK]))
        }
    }
}

/// Place of products: row r of the activations times weight row n is stored at `first[r * stride +
/// n - tile * TILE]`.
#[derive(Clone, Copy)]
pub struct OutputPlace {
    pub first: *mut f32,
    pub stride: usize,
    /// The tile of weights for which the first columns are.
    pub tile: usize,
}

impl OutputPlace {
    /// Returns the place for all outputs, row by row.
    pub fn of(first: *mut f32, stride: usize) -> OutputPlace {
        OutputPlace { first, stride, tile: 0 }
    }
}

/// Writes the products of all rows of `act` with all weight rows of the tiles.
///
/// # Safety
/// `out` has `rows * stride` floats that can be written (the last row may end after its last
/// output), and no other thread accesses the columns of these tiles during the call.
pub unsafe fn linear(
    isa: Isa,
    weights: &PackedMatrix,
    act: &ActView<'_>,
    tiles: Range<usize>,
    out: OutputPlace,
) {
    let kernels = kernels(isa, weights.format());
    check(weights, act, &tiles);
    check_output(weights, &tiles, out);
    let mut sums = Sums::new();
    for tile in tiles.clone() {
        let next = weights.tile(if tile + 1 < tiles.end { tile + 1 } else { tile });
        for first in (0..act.rows).step_by(STRIP) {
            let rows = first..act.rows.min(first + STRIP);
            let sums = sums.multiply(&kernels, weights, act, tile, rows, next.as_ptr());
            // SAFETY: the caller upholds the contract.
            unsafe { store(sums, weights, tile, first, out) };
        }
    }
}

/// Tiles of a gate that are read in sequence before those of the up matrix. The prefetchers of a
/// processor follow a sequence, and lose time at each change between the matrices.
const RUN: usize = 8;

/// Computes `gelu_tanh(gate * x) * (up * x)`, for `tiles` of `gate` and the tiles of `up` that are
/// `up_from` tiles later. Both matrices must have the same number of rows.
///
/// # Safety
/// As for [`linear`].
#[allow(clippy::too_many_arguments)]
pub unsafe fn gate_up(
    isa: Isa,
    gate: &PackedMatrix,
    act_gate: &ActView<'_>,
    up: &PackedMatrix,
    act_up: &ActView<'_>,
    tiles: Range<usize>,
    up_from: usize,
    out: OutputPlace,
) {
    let (gate_kernels, up_kernels) = (kernels(isa, gate.format()), kernels(isa, up.format()));
    check(gate, act_gate, &tiles);
    check(up, act_up, &(tiles.start + up_from..tiles.end + up_from));
    check_output(gate, &tiles, out);
    assert!(gate.rows() == up.rows() && act_gate.rows == act_up.rows);
    let mut sums = Sums::new();
    let strips = || (0..act_up.rows).step_by(STRIP);
    let rows = |first: usize| first..act_up.rows.min(first + STRIP);
    for start in tiles.clone().step_by(RUN) {
        let end = tiles.end.min(start + RUN);
        let first_up = up.tile(start + up_from).as_ptr();
        for tile in start..end {
            let next = if tile + 1 < end { gate.tile(tile + 1).as_ptr() } else { first_up };
            for first in strips() {
                let gates = sums.multiply(&gate_kernels, gate, act_gate, tile, rows(first), next);
                // SAFETY: the caller upholds the contract.
                unsafe { store(gates, gate, tile, first, out) };
            }
        }
        for tile in start..end {
            let next = match tile + 1 {
                tile if tile < end => up.tile(tile + up_from),
                tile => gate.tile(if tile < tiles.end { tile } else { start }),
            };
            for first in strips() {
                let (tile_up, next) = (tile + up_from, next.as_ptr());
                let ups = sums.multiply(&up_kernels, up, act_up, tile_up, rows(first), next);
                // SAFETY: the caller upholds the contract, and the gates were stored above.
                unsafe { gate_stored(gate_kernels.gate, ups, gate, tile, first, out) };
            }
        }
    }
}

/// Refuses activations that do not fit the weights. Everything that the kernels read is inside the
/// checked lengths.
fn check(weights: &PackedMatrix, act: &ActView<'_>, tiles: &Range<usize>) {
    let format = weights.format();
    let values = match (act.values, format.code.is_integer()) {
        (ActValues::I8(values), true) => values.len(),
        (ActValues::F32(values), false) => values.len(),
        _ => panic!("{format} weights met activations of the wrong kind"),
    };
    let groups = act.rows * format.groups(weights.cols());
    assert!(
        act.cols == weights.cols() && values >= act.rows * act.cols,
        "activations of {} columns",
        act.cols
    );
    assert!(
        act.scales.len() >= groups && act.sums.len() >= groups,
        "activations lack scales or sums"
    );
    assert!(tiles.end <= weights.tiles(), "tiles outside the weights");
}

/// Refuses a row of outputs that is too short for the tiles.
fn check_output(weights: &PackedMatrix, tiles: &Range<usize>, out: OutputPlace) {
    let end = weights.rows().min(tiles.end * TILE);
    assert!(out.tile <= tiles.start && end <= out.tile * TILE + out.stride, "a row is too short");
}

/// Copies the products of a tile to the output.
///
/// # Safety
/// As for [`linear`].
unsafe fn store(
    sums: &[[f32; TILE]],
    weights: &PackedMatrix,
    tile: usize,
    first: usize,
    out: OutputPlace,
) {
    let n = TILE.min(weights.rows() - tile * TILE);
    for (row, sums) in sums.iter().enumerate() {
        // SAFETY: inside the caller's `rows * stride` floats, as checked by `check_output`.
        unsafe {
            let place = out.first.add((first + row) * out.stride + (tile - out.tile) * TILE);
            // A copy of constant length compiles to a few stores instead of a call.
            match n {
                TILE => place.copy_from_nonoverlapping(sums.as_ptr(), TILE),
                n => place.copy_from_nonoverlapping(sums.as_ptr(), n),
            }
        }
    }
}

/// Replaces the stored products of a tile of gates by the gated products.
///
/// # Safety
/// As for [`linear`]; the tile's products are at their places, and the machine has the instructions
/// of `gated`.
unsafe fn gate_stored(
    gated: GateFn,
    ups: &[[f32; TILE]],
    gate: &PackedMatrix,
    tile: usize,
    first: usize,
    out: OutputPlace,
) {
    let n = TILE.min(gate.rows() - tile * TILE);
    for (row, ups) in ups.iter().enumerate() {
        let mut gates = [0.0; TILE];
        // SAFETY: inside the caller's `rows * stride` floats, as checked by `check_output`.
        unsafe {
            let place = out.first.add((first + row) * out.stride + (tile - out.tile) * TILE);
            gates.as_mut_ptr().copy_from_nonoverlapping(place, n);
            gated(slice::from_mut(&mut gates), slice::from_ref(ups));
            place.copy_from_nonoverlapping(gates.as_ptr(), n);
        }
    }
}

/// Memory for the sums of a strip of rows with one tile, and for an opened span. Only the sums of
/// rows in use are ever written.
struct Sums([MaybeUninit<[f32; TILE]>; STRIP], Option<OpenSpan>);

impl Sums {
    fn new() -> Sums {
        Sums([const { MaybeUninit::uninit() }; STRIP], None)
    }

    /// Returns the products of `rows` with one tile. `next` has the bytes that are read after it.
    fn multiply(
        &mut self,
        kernels: &FormatKernels,
        weights: &PackedMatrix,
        act: &ActView<'_>,
        tile: usize,
        rows: Range<usize>,
        next: *const u8,
    ) -> &mut [[f32; TILE]] {
        let (shape, bytes, n) = (weights.shape(), weights.tile(tile), rows.len());
        let acc = self.0.as_mut_ptr().cast::<[f32; TILE]>();
        self.0[..n].iter_mut().for_each(|sums| _ = sums.write([0.0; TILE]));
        match &kernels.way {
            TileReading::Spans { opening, open, multiply, packed: few } => {
                let few = few.get(n - 1).copied().flatten().map(|few| [few; BLOCK]);
                let span = self.1.get_or_insert_with(OpenSpan::new);
                for (i, packed) in bytes.chunks(opening.bytes(SPAN)).enumerate() {
                    let cols = i * SPAN..shape.cols.min((i + 1) * SPAN);
                    let end = packed.as_ptr_range().end;
                    let last = end == bytes.as_ptr_range().end;
                    // SAFETY: the kernel's instructions exist.
                    unsafe { open(opening, packed, cols.len(), few.is_none(), span) };
                    let ahead = (if last { next } else { end }, packed.len());
                    // SAFETY: `acc` has a row for each of `rows`.
                    unsafe {
                        let bytes = match opening.is_open() || few.is_some() {
                            true => packed[opening.side_bytes(cols.len())..].as_ptr().cast(),
                            false => span.bytes.as_ptr(),
                        };
                        let opened = (&*span, bytes);
                        let kernels = few.as_ref().unwrap_or(multiply);
                        multiply_span(kernels, opening, opened, act, cols, &rows, ahead, acc)
                    };
                }
            }
            TileReading::Steps { panel: kernel, offset, finish } => {
                // Only whole steps, because the kernels read all activations of a step.
                let steps = shape.cols / shape.step_cols;
                let per_panel = PANEL / shape.step_bytes;
                for step in (0..steps).step_by(per_panel) {
                    let count = per_panel.min(steps - step);
                    let start = shape.head + step * shape.step_bytes;
                    let end = start + count * shape.step_bytes;
                    let panel = PanelSpan { start, end, steps: count, col: step * shape.step_cols };
                    panel.run(kernel, bytes, act, &rows, next, acc);
                }
                if let ActValues::I8(values) = act.values {
                    if steps < shape.steps() {
                        half_step(kernel, shape, bytes, values, &rows, acc);
                    }
                    let (sx, sums) = (&act.scales[rows.clone()], &act.sums[rows]);
                    let unit = weights.format().code.unit();
                    // SAFETY: `bytes` starts with a line of scales; the kernel's instructions
                    // exist; `acc` has n rows.
                    unsafe { finish(bytes.as_ptr(), unit, *offset, sx, sums, acc.cast()) };
                }
            }
        }
        // SAFETY: the first n rows were written above.
        unsafe { std::slice::from_raw_parts_mut(acc, n) }
    }
}

/// Adds the products of an opened span with all rows. `cols` are the span's columns. `ahead` has
/// the bytes that are read next, and how many of them are prefetched during the call.
///
/// # Safety
/// The span has its bytes; `acc` has a row for each of `rows`.
#[allow(clippy::too_many_arguments)]
unsafe fn multiply_span(
    kernels: &[GroupsFn; BLOCK],
    opening: &Opening,
    (span, bytes): (&OpenSpan, *const [u32; TILE]),
    act: &ActView<'_>,
    cols: Range<usize>,
    rows: &Range<usize>,
    ahead: (*const u8, usize),
    acc: *mut [f32; TILE],
) {
    let ActValues::I8(values) = act.values else { return };
    let (groups, s_stride) = (cols.len() / opening.width, act.cols / opening.width);
    let (n_blocks, lines) = (rows.len().div_ceil(BLOCK), ahead.1 / LINE);
    let rate = lines * FRACTION / (n_blocks * groups);
    for block in 0..n_blocks {
        // Blocks have nearly equal size: 9 rows become 4 and 5 instead of 8 and 1.
        let (from, to) = (rows.len() * block / n_blocks, rows.len() * (block + 1) / n_blocks);
        let row = rows.start + from;
        let first = row * s_stride + cols.start / opening.width;
        let job = SpanRows {
            bytes,
            groups,
            steps: opening.width / 4,
            offset: opening.offset,
            has_min: opening.side.has_min(),
            x: values.as_ptr().wrapping_add(row * act.cols + cols.start),
            x_stride: act.cols,
            sx: act.scales.as_ptr().wrapping_add(first),
            sums: act.sums.as_ptr().wrapping_add(first),
            s_stride,
            ahead: ahead.0.wrapping_add(lines * block / n_blocks * LINE),
            ahead_rate: rate,
        };
        // SAFETY: `check` saw that activations, scales and sums cover these rows; the caller's
        // promise; the kernel's instructions exist.
        unsafe { kernels[to - from - 1](span, &job, acc.add(from).cast()) };
    }
}

/// A part of a tile: its bytes, and its place among the columns.
struct PanelSpan {
    start: usize,
    end: usize,
    steps: usize,
    col: usize,
}

impl PanelSpan {
    /// Adds the panel's products with all rows, block by block. Prefetches the next panel during
    /// the call.
    fn run(
        self,
        kernels: &[PanelFn; BLOCK],
        tile: &[u8],
        act: &ActView<'_>,
        rows: &Range<usize>,
        next: *const u8,
        acc: *mut [f32; TILE],
    ) {
        let data = tile[self.start..self.end].as_ptr();
        let ahead = if self.end < tile.len() { tile[self.end..].as_ptr() } else { next };
        let (x, size) = match act.values {
            ActValues::I8(values) => (values.as_ptr().cast::<u8>(), 1),
            ActValues::F32(values) => (values.as_ptr().cast::<u8>(), 4),
        };
        let n_blocks = rows.len().div_ceil(BLOCK);
        let ahead_shift = n_blocks.ilog2();
        for block in 0..n_blocks {
            // Blocks have nearly equal size: 9 rows become 4 and 5 instead of 8 and 1.
            let (from, to) = (rows.len() * block / n_blocks, rows.len() * (block + 1) / n_blocks);
            let row = rows.start + from;
            let share = ((self.end - self.start) * block) >> ahead_shift;
            let panel = Panel {
                data,
                steps: self.steps,
                x: x.wrapping_add((row * act.cols + self.col) * size),
                x_stride: act.cols * size,
                ahead: ahead.wrapping_add(share),
                ahead_shift,
            };
            // SAFETY: `check` saw that the activations cover these rows; `data` covers the panel's
            // steps; `acc` has a row for each of `rows`; the kernel's instructions exist.
            unsafe { kernels[to - from - 1](&panel, acc.add(from).cast()) };
        }
    }
}

/// Computes the last step of an i2 row of 16 n + 8 columns. The kernel reads 16 activations, but
/// the row has only 8 there.
fn half_step(
    kernels: &[PanelFn; BLOCK],
    shape: TileShape,
    tile: &[u8],
    values: &[i8],
    rows: &Range<usize>,
    acc: *mut [f32; TILE],
) {
    let cols = shape.cols;
    let data = tile[tile.len() - shape.step_bytes..].as_ptr();
    for row in rows.clone() {
        let mut x = [0i8; 16];
        x[..cols % 16].copy_from_slice(&values[row * cols..][cols - cols % 16..cols]);
        let panel = Panel {
            data,
            steps: 1,
            x: x.as_ptr().cast(),
            x_stride: 0,
            ahead: data,
            ahead_shift: 0,
        };
        // SAFETY: one step of weights, 16 activations, one row of `acc`.
        unsafe { kernels[0](&panel, acc.add(row - rows.start).cast()) };
    }
}
