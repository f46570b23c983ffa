//! Memory of a conversion, and the size of chunks that fits a limit.

use crate::QuantizeOptions;
use crate::layout::{ArtifactLayout, TensorPlan};
use crate::solver::{Solver, TILE_ROWS};
use anyhow::Result;
use gemma_base::error::{Fault, Kind};
use gemma_base::util::units;

/// Weights of a chunk without a limit of memory.
const CHUNK: usize = 4 << 20;
const CHUNK_PER_THREAD: usize = 512 << 10;
/// Bytes per weight of a chunk: as f32, as f32 of the chunk that is read ahead, after the
/// transform, as a target, decoded, and as codes.
const PER_WEIGHT: u64 = 24;
/// Bytes per weight if the matrix is in memory as a whole and nothing is read ahead.
const PER_WHOLE_WEIGHT: u64 = 8;
/// Bytes of the program, of headers and of side files, then of each thread.
const BASE: u64 = 128 << 20;
const PER_THREAD: u64 = 8 << 20;

/// Returns the weights of a chunk and the peak memory in bytes, at most the limit.
pub fn bounds(
    layout: &ArtifactLayout,
    solver: &dyn Solver,
    options: &QuantizeOptions,
) -> Result<(usize, u64)> {
    let scales = |e: &TensorPlan| e.parts[1..].iter().map(|p| p.bytes).sum::<u64>();
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
    let chunk = chunk.max(solver.at_once(options.threads));
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
