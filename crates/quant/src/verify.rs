//! Verification of an artifact.
//!
//! It compares each tensor with the report, and its decoded values bit for bit in the packed
//! layouts of all instruction sets of this CPU.

use super::plan::REPORT_FILE as FILE;
use anyhow::{Context, Result};
use gemma_base::compute::cpu::Isa;
use gemma_base::compute::cpu::linear::PackedMatrix;
use gemma_base::error::Fault;
use gemma_base::tensor::{Matrix, StoredMatrix};
use gemma_base::util::threads::{self, ScopedTask};
use gemma_model::checkpoint::{Checkpoint, artifact};
use gemma_model::models::{Role, TensorSpec, Weights};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ops::Range;

/// Weights that a thread decodes in one chunk.
const CHUNK: usize = 1 << 20;
/// The rows of a chunk are a multiple of this, so that no tile of any layout is split.
const ALIGN: usize = 64;

/// Numbers of the checks that [`verify`] has made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    pub tensors: usize,
    /// Tensors with a SHA-256 that was compared with the report: all or none.
    pub hashed: usize,
    /// Names of the decoders that returned the same values.
    pub backends: Vec<String>,
}

/// The fields of a report that the verification reads. Other fields are ignored.
#[derive(Deserialize)]
struct ReportHashes {
    tensors: Vec<Hashed>,
}

#[derive(Deserialize)]
struct Hashed {
    name: String,
    sha256: String,
}

/// Checks every tensor, and returns an error with the name of the first wrong one. Compares bytes
/// with `quant-report.json` if there is one, checks that values are finite, and compares all
/// decoders. Calls `tell` with the number of finished tensors.
pub fn verify(
    weights: &Weights,
    threads: usize,
    tell: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Verification> {
    let checkpoint = weights.checkpoint().context("made-up weights have no files")?;
    let report: Option<ReportHashes> = match checkpoint.side_file(FILE)? {
        Some(text) => Some(
            serde_json::from_slice(&text)
                .with_context(|| damaged(&format!("{FILE} cannot be read")))?,
        ),
        None => None,
    };
    let hashes: Option<HashMap<&str, &str>> = report
        .as_ref()
        .map(|r| r.tensors.iter().map(|t| (t.name.as_str(), t.sha256.as_str())).collect());
    let isas = Isa::all_supported();
    let mut done = Verification { backends: vec!["matrix".into()], ..Verification::default() };
    done.backends.extend(isas.iter().map(|isa| format!("packed {isa}")));
    for &TensorSpec { role, layer, .. } in weights.tensors() {
        let name = weights.name(role, layer);
        if let Some(hashes) = &hashes {
            let expected = hashes
                .get(name.as_str())
                .with_context(|| damaged(&format!("{FILE} does not list `{name}`")))?;
            let found = hash(checkpoint, &name)?;
            if found != **expected {
                return Err(damaged(&format!(
                    "tensor `{name}` has the SHA-256 {found}, not {expected} as {FILE} says"
                ))
                .into());
            }
            done.hashed += 1;
        }
        let parts = stored_as(checkpoint, &name);
        values(weights, role, layer, &name, &isas, threads, &|| {
            parts.iter().for_each(|part| checkpoint.release(part))
        })?;
        done.tensors += 1;
        tell(done.tensors)?;
    }
    Ok(done)
}

fn damaged(what: &str) -> Fault {
    Fault::model(what.to_owned())
        .help("the artifact is damaged: fetch it or quantise the model again")
}

/// Returns the names under which the parts of a tensor are stored.
fn stored_as(checkpoint: &Checkpoint, name: &str) -> Vec<String> {
    match checkpoint.formats().contains_key(name) {
        true => vec![artifact::codes_name(name), artifact::scales_name(name)],
        false => vec![name.to_owned()],
    }
}

fn hash(checkpoint: &Checkpoint, name: &str) -> Result<String> {
    let (mut hash, mut bytes) = (Sha256::new(), Vec::new());
    for part in stored_as(checkpoint, name) {
        let Some(length) = checkpoint.tensor(&part).map(|t| t.data.len()) else { continue };
        for start in (0..length).step_by(CHUNK) {
            checkpoint.read(&part, start..(start + CHUNK).min(length), &mut bytes)?;
            hash.update(&bytes);
        }
    }
    Ok(gemma_base::util::hex(hash.finalize()))
}

/// Checks that all values are finite and the same in every layout. Calls `release` after each batch
/// of chunks, which unmaps the pages that were read.
fn values(
    weights: &Weights,
    role: Role,
    layer: usize,
    name: &str,
    isas: &[Isa],
    threads: usize,
    release: &dyn Fn(),
) -> Result<()> {
    if !role.is_matrix() {
        // `vector` refuses values that are not finite.
        return weights.vector(role, layer).map(|_| ());
    }
    let matrix = weights.matrix(role, layer)?;
    let step = (CHUNK / matrix.cols / ALIGN * ALIGN).max(ALIGN);
    let chunks: Vec<Range<usize>> = (0..matrix.rows)
        .step_by(step)
        .map(|start| start..(start + step).min(matrix.rows))
        .collect();
    for batch in chunks.chunks(threads.max(1)) {
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let matrix = &matrix;
            let spawn = |rows: &Range<usize>| {
                let rows = rows.clone();
                threads::spawn(scope, move || {
                    compare(&rows_of(matrix, rows.clone()), rows.start, name, isas)
                })
            };
            let handles: Vec<_> = batch.iter().map(spawn).collect();
            handles.into_iter().map(ScopedTask::join).collect()
        });
        results.into_iter().collect::<Result<()>>()?;
        release();
    }
    Ok(())
}

/// Returns some rows of a matrix. Both ends of `rows` must be multiples of [`ALIGN`] or the end of
/// the matrix.
fn rows_of<'a>(matrix: &'a Matrix<'_>, rows: Range<usize>) -> Matrix<'a> {
    let (row_bytes, row_side) =
        (matrix.format.row_bytes(matrix.cols), matrix.format.row_side(matrix.cols));
    // The last rows keep their padding to whole tiles.
    let end = if rows.end == matrix.rows { matrix.codes.len() } else { rows.end * row_bytes };
    Matrix {
        format: matrix.format,
        rows: rows.len(),
        cols: matrix.cols,
        codes: (&matrix.codes[rows.start * row_bytes..end]).into(),
        side: (&matrix.side[rows.start * row_side..rows.end * row_side]).into(),
    }
}

/// Decodes rows in every layout. `first` is the index of the first row in the tensor.
fn compare(matrix: &Matrix<'_>, first: usize, name: &str, isas: &[Isa]) -> Result<()> {
    let packed: Vec<_> = isas
        .iter()
        .map(|isa| PackedMatrix::load(&StoredMatrix::of(matrix), *isa))
        .collect::<Result<_>>()?;
    let (mut plain, mut other) = (vec![0f32; matrix.cols], vec![0f32; matrix.cols]);
    for row in 0..matrix.rows {
        matrix.dequantize_row(row, &mut plain);
        if let Some(col) = plain.iter().position(|v| !v.is_finite()) {
            let what = format!("tensor `{name}` holds {} in row {}", plain[col], first + row);
            return Err(Fault::model(what).help("fetch or make the model again").into());
        }
        for (packed, isa) in packed.iter().zip(isas) {
            packed.dequantize_row(row, &mut other);
            if let Some(col) =
                plain.iter().zip(&other).position(|(a, b)| a.to_bits() != b.to_bits())
            {
                let place = format!("tensor `{name}`, row {}, column {col}", first + row);
                let (plain, other) = (plain[col], other[col]);
                anyhow::bail!("{place}: {plain} as stored, {other} as packed for {isa}");
            }
        }
    }
    Ok(())
}
