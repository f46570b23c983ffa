//! Conversion of one tensor: reads rows of the source, writes codes and scales.

use super::journal::FinishedRows;
use super::resume::{BegunTensor, packed_hash};
use super::sink::{TensorWriter, WrittenRows};
use super::source::SourceTensor;
use super::staging::StagedFile;
use super::{ConversionRun, SAVE_EVERY};
use crate::layout::{TargetFormat, TensorPlan};
use crate::plan::digits;
use crate::solver::TILE_ROWS;
use anyhow::Result;
use gemma_base::tensor::quantize::quantize as nearest;
use gemma_base::tensor::{Format, Matrix};
use gemma_base::util::hex;
use gemma_base::util::threads::{self, ScopedTask};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::time::Instant;

impl ConversionRun<'_> {
    /// Writes one tensor, or its missing rows, to its file. Returns the SHA-256 of the written
    /// bytes, the SHA-256 of the source's bytes, and the relative error.
    pub(super) fn tensor(
        &mut self,
        entry: &TensorPlan,
        file: &mut StagedFile,
        begun: BegunTensor,
    ) -> Result<(String, String, f64)> {
        let reader = SourceTensor::open(self.source, entry)?;
        match (entry.target, &reader) {
            (TargetFormat::AsIs(_), _) => self.copy(entry, &reader, file),
            (TargetFormat::Format(format), SourceTensor::Packed { matrix, .. })
                if matrix.format == format =>
            {
                self.repeat(entry, matrix, file)
            }
            (TargetFormat::Format(format), _) => self.convert(entry, format, &reader, file, begun),
        }
    }

    /// Copies the bytes of a plain tensor from the source.
    fn copy(
        &mut self,
        entry: &TensorPlan,
        reader: &SourceTensor<'_>,
        file: &mut StagedFile,
    ) -> Result<(String, String, f64)> {
        let mut sink = TensorWriter::new(entry, file, WrittenRows::default());
        let mut source_hash = Sha256::new();
        reader.pieces(0..entry.rows, &mut |bytes, values| {
            source_hash.update(bytes);
            sink.plain(bytes, values)?;
            self.advance(entry, values.len())
        })?;
        Ok((sink.finish()?, hex(source_hash.finalize()), 0.0))
    }

    /// Returns the most tiles of rows in a chunk.
    fn most_tiles(&self, entry: &TensorPlan) -> usize {
        (self.plan.chunk / entry.cols / TILE_ROWS).max(1)
    }

    /// Copies the codes and scales of a packed tensor from the source.
    fn repeat(
        &mut self,
        entry: &TensorPlan,
        matrix: &Matrix<'_>,
        file: &mut StagedFile,
    ) -> Result<(String, String, f64)> {
        let mut sink = TensorWriter::new(entry, file, WrittenRows::default());
        sink.matrix(matrix)?;
        Ok((sink.finish()?, hex(packed_hash(matrix).finalize()), 0.0))
    }

    /// Writes the codes of each chunk, then all scales. The next chunk is read while one is
    /// converted. An error returned by `tell` stops the conversion between two chunks, but not
    /// after the last one. Finished rows are recorded in the journal at that point and every
    /// [`SAVE_EVERY`].
    fn convert(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        reader: &SourceTensor<'_>,
        file: &mut StagedFile,
        begun: BegunTensor,
    ) -> Result<(String, String, f64)> {
        let BegunTensor { rows: first, written, mut source_hash, mut sums } = begun;
        let mut sink = TensorWriter::new(entry, file, written);
        self.weights += (first * entry.cols) as u64;
        let vector = !entry.role.is_matrix();
        let step = match self.solver.wants_whole(entry) {
            true => entry.rows,
            // A killed run loses one chunk, so a chunk must take only about a second.
            false if format.code.is_trellis() => {
                let weights = self.solver.at_once(self.options.threads);
                let tiles = weights / entry.cols / TILE_ROWS;
                TILE_ROWS * tiles.clamp(1, self.most_tiles(entry))
            }
            false => TILE_ROWS * self.most_tiles(entry),
        };
        let chunk = |start: usize| start..(start + step).min(entry.rows);
        let mut values = reader.rows(chunk(first), &mut source_hash)?;
        for start in (first..entry.rows).step_by(step) {
            let (rows, next) = (chunk(start), chunk(start + step));
            let hash_of_rows = source_hash.clone();
            let (matrix, ahead) = std::thread::scope(|scope| {
                let source_hash = &mut source_hash;
                let ahead = (!next.is_empty())
                    .then(|| threads::spawn(scope, move || reader.rows(next, source_hash)));
                let matrix = match vector {
                    true => nearest(format, rows.len(), entry.cols, &values),
                    false => self.solver.matrix(entry, format, rows.clone(), &values),
                };
                (matrix, ahead.map(ScopedTask::join))
            });
            let matrix = matrix?;
            // Errors are added row by row, so the sum does not depend on the number of threads.
            let squares = errors(&matrix, &values, self.options.threads);
            squares.into_iter().for_each(|of_row| sums += of_row);
            sink.matrix(&matrix)?;
            if rows.end < entry.rows {
                let told = self.advance(entry, values.len());
                if told.is_err() || self.saved.elapsed() >= SAVE_EVERY {
                    let sha256 = sink.save(&self.staging.side())?;
                    let [bytes, side] = sink.sizes();
                    self.journal.push(&FinishedRows {
                        tensor: entry.name.clone(),
                        rows: rows.end,
                        bytes,
                        side,
                        sha256,
                        source_sha256: hex(hash_of_rows.finalize()),
                        sums: [sums.error, sums.power].map(f64::to_bits),
                    })?;
                    self.journal.sync()?;
                    self.saved = Instant::now();
                }
                told?;
            }
            values = ahead.transpose()?.unwrap_or_default();
        }
        let relative = match sums.power > 0.0 {
            true => digits(f64::sqrt(sums.error / sums.power), 6),
            false => 0.0,
        };
        Ok((sink.finish()?, hex(source_hash.finalize()), relative))
    }
}

/// Returns the squared error and the sum of squares of each row.
pub(super) fn errors(matrix: &Matrix<'_>, values: &[f32], threads: usize) -> Vec<(f64, f64)> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let errors_of = |rows: Range<usize>| -> Vec<(f64, f64)> {
        let mut decoded = vec![0f32; cols];
        let square = |v: f64| v * v;
        rows.map(|row| {
            let source = &values[row * cols..][..cols];
            matrix.dequantize_row(row, &mut decoded);
            let error = source.iter().zip(&decoded).map(|(s, d)| square((s - d) as f64)).sum();
            (error, source.iter().map(|s| square(*s as f64)).sum())
        })
        .collect()
    };
    let each = rows.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let errors_of = &errors_of;
        let spawn =
            |start| threads::spawn(scope, move || errors_of(start..(start + each).min(rows)));
        let handles: Vec<_> = (0..rows).step_by(each).map(spawn).collect();
        handles.into_iter().flat_map(ScopedTask::join).collect()
    })
}
