//! Estimate of the time of a conversion, from a small sample of each format.

use super::tensor::errors;
use crate::layout::{TargetFormat, TensorPlan};
use crate::plan::QuantPlan;
use crate::solver::{Nearest, Solver, TILE_ROWS};
use anyhow::Result;
use gemma_base::tensor::Format;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use sha2::{Digest, Sha256};
use std::time::Instant;

/// Weights of a sample for each thread.
const SAMPLE: usize = 256 << 10;

/// Returns the estimated seconds of a conversion that rounds to nearest. Codes, decodes and hashes
/// a sample of each format. Does not include reading and writing files, nor calibration.
pub fn seconds(plan: &QuantPlan, nearest: &mut Nearest) -> Result<f64> {
    let mut formats: Vec<(Format, Vec<&TensorPlan>)> = Vec::new();
    for entry in plan.layout.entries.iter().filter(|e| e.role.is_matrix()) {
        let TargetFormat::Format(format) = entry.target else { continue };
        match formats.iter_mut().find(|(known, _)| *known == format) {
            Some((_, entries)) => entries.push(entry),
            None => formats.push((format, vec![entry])),
        }
    }
    let mut seconds = 0.0;
    for (format, entries) in formats {
        let Some(narrowest) = entries.iter().min_by_key(|e| e.cols) else { continue };
        let weights: usize = entries.iter().map(|e| e.rows * e.cols).sum();
        seconds += weights as f64 * seconds_per_weight(format, narrowest, nearest)?;
    }
    Ok(seconds)
}

fn seconds_per_weight(format: Format, entry: &TensorPlan, nearest: &mut Nearest) -> Result<f64> {
    let threads = nearest.threads;
    let tiles = (SAMPLE / entry.cols / TILE_ROWS).max(1);
    let rows = (TILE_ROWS * tiles * threads).min(entry.rows);
    // Random weights are sufficient, because the time does not depend on their values.
    let mut random = SmallRng::seed_from_u64(1);
    let values: Vec<f32> = (0..rows * entry.cols).map(|_| random.random_range(-1.0..1.0)).collect();
    let start = Instant::now();
    let matrix = nearest.matrix(entry, format, 0..rows, &values)?;
    errors(&matrix, &values, threads);
    Sha256::digest(&matrix.codes);
    Ok(start.elapsed().as_secs_f64() / values.len() as f64)
}
