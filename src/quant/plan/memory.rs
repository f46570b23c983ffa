//! Memory of a conversion, and the chunks that fit a limit.

use crate::error::{Fault, Kind};
use crate::quant::Options;
use crate::quant::layout::{Entry, Layout};
use crate::quant::solver::{Solver, TILE_ROWS};
use crate::util::units;
use anyhow::Result;

/// Weights of a chunk where memory is no matter, and the fewest rows of one: trellis codes come in
/// tiles of 16.
const CHUNK: usize = 4 << 20;
const CHUNK_PER_THREAD: usize = 512 << 10;
/// Bytes that one weight of a chunk takes: as f32, here and in the chunk read ahead, and its codes.
const PER_WEIGHT: u64 = 12;
/// The same where a matrix is held whole and nothing is read ahead.
const PER_WHOLE_WEIGHT: u64 = 8;
/// The program itself, headers and side files; and what a thread keeps.
const BASE: u64 = 128 << 20;
const PER_THREAD: u64 = 8 << 20;

/// Weights per chunk and bytes in all under the limit.
pub fn bounds(layout: &Layout, solver: &dyn Solver, options: &Options) -> Result<(usize, u64)> {
    let scales = |e: &Entry| e.parts[1..].iter().map(|p| p.bytes).sum::<u64>();
    let fixed = BASE
        + PER_THREAD * options.threads as u64
        + layout.entries.iter().map(scales).max().unwrap_or(0)
        + solver.memory(layout);
    let whole = layout
        .entries
        .iter()
        .filter(|e| solver.wants_whole(e))
        .map(|e| e.rows * e.cols)
        .max()
        .unwrap_or(0);
    let widest = layout.entries.iter().map(|e| e.cols).max().unwrap_or(1);
    let peak =
        |chunk: usize| fixed + (PER_WEIGHT * chunk as u64).max(PER_WHOLE_WEIGHT * whole as u64);
    let least = TILE_ROWS * widest;
    let chunk = CHUNK.max(CHUNK_PER_THREAD * options.threads).max(least);
    let Some(limit) = options.memory else { return Ok((chunk, peak(chunk))) };
    if limit < peak(least) {
        let what = format!(
            "{} of memory are not enough: {} are needed",
            units::bytes(limit),
            units::bytes(peak(least))
        );
        let help = format!(
            "give --mem-limit {}MB or more, or fewer --threads",
            peak(least).div_ceil(1_000_000)
        );
        return Err(Fault::new(Kind::Memory, what).help(help).into());
    }
    let chunk = chunk.min(((limit - fixed) / PER_WEIGHT) as usize);
    Ok((chunk, peak(chunk)))
}
