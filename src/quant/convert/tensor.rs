//! One tensor: rows of the source in, codes and scales out.

use super::Run;
use super::sink::Sink;
use super::source::Reader;
use super::staging::Growing;
use crate::quant::layout::{Entry, Target};
use crate::quant::plan::digits;
use crate::quant::solver::TILE_ROWS;
use crate::tensor::quantize::quantize as nearest;
use crate::tensor::{Format, Matrix};
use crate::util::hex;
use crate::util::threads::{self, Task};
use anyhow::Result;
use half::f16;
use sha2::{Digest, Sha256};
use std::ops::Range;

impl Run<'_> {
    /// One tensor to the end of its file: SHA-256 of what was written and of its source, and the
    /// relative error.
    pub(super) fn tensor(
        &mut self,
        entry: &Entry,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let reader = Reader::open(self.source, entry)?;
        match (entry.target, &reader) {
            (Target::AsIs(_), _) => self.copy(entry, &reader, file),
            (Target::Format(format), Reader::Packed { matrix, .. }) if matrix.format == format => {
                self.repeat(entry, matrix, file)
            }
            (Target::Format(format), _) => self.convert(entry, format, &reader, file),
        }
    }

    /// Bytes as the source has them.
    fn copy(
        &mut self,
        entry: &Entry,
        reader: &Reader<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let (mut sink, mut source_hash) = (Sink::new(entry, file), Sha256::new());
        reader.pieces(0..entry.rows, &mut |bytes, values| {
            source_hash.update(bytes);
            sink.plain(bytes, values)?;
            self.advance(entry, values.len())
        })?;
        Ok((sink.finish()?, hex(source_hash.finalize()), 0.0))
    }

    /// Tiles of rows that a chunk may have.
    fn most_tiles(&self, entry: &Entry) -> usize {
        (self.plan.chunk / entry.cols / TILE_ROWS).max(1)
    }

    /// Codes and scales as the source has them.
    fn repeat(
        &mut self,
        entry: &Entry,
        matrix: &Matrix<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let mut sink = Sink::new(entry, file);
        sink.matrix(matrix)?;
        Ok((sink.finish()?, hex(packed_hash(matrix).finalize()), 0.0))
    }

    /// Codes as they come, then the scales. While a chunk is converted, the next one is read. An
    /// error from `tell` ends it between two chunks; what is done with the last one is worth
    /// finishing.
    fn convert(
        &mut self,
        entry: &Entry,
        format: Format,
        reader: &Reader<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let (mut sink, mut source_hash) = (Sink::new(entry, file), Sha256::new());
        let (mut error, mut power) = (0.0, 0.0);
        let vector = !entry.role.is_matrix();
        let step = match self.solver.wants_whole(entry) {
            true => entry.rows,
            // Trellis codes take so long that a chunk is no more than a tile's rows for each
            // thread.
            false if format.code.is_trellis() => {
                TILE_ROWS * self.options.threads.clamp(1, self.most_tiles(entry))
            }
            false => TILE_ROWS * self.most_tiles(entry),
        };
        let chunk = |start: usize| start..(start + step).min(entry.rows);
        let mut values = reader.rows(chunk(0), &mut source_hash)?;
        for start in (0..entry.rows).step_by(step) {
            let (rows, next) = (chunk(start), chunk(start + step));
            let (matrix, ahead) = std::thread::scope(|scope| {
                let source_hash = &mut source_hash;
                let ahead = (!next.is_empty())
                    .then(|| threads::spawn(scope, move || reader.rows(next, source_hash)));
                let matrix = match vector {
                    true => nearest(format, rows.len(), entry.cols, &values),
                    false => self.solver.matrix(entry, format, rows.clone(), &values),
                };
                (matrix, ahead.map(Task::join))
            });
            let matrix = matrix?;
            // Row by row: the sum must not depend on the number of threads.
            for (e, p) in errors(&matrix, &values, self.options.threads) {
                error += e;
                power += p;
            }
            sink.matrix(&matrix)?;
            if start + step < entry.rows {
                self.advance(entry, values.len())?;
            }
            values = ahead.transpose()?.unwrap_or_default();
        }
        let relative = if power > 0.0 { digits(f64::sqrt(error / power), 6) } else { 0.0 };
        Ok((sink.finish()?, hex(source_hash.finalize()), relative))
    }
}

/// Hashes the codes and scales of a matrix that is packed in the source.
pub(super) fn packed_hash(matrix: &Matrix<'_>) -> Sha256 {
    let hash = Sha256::new_with_prefix(&matrix.codes);
    hash.chain_update(bytemuck::cast_slice::<f16, u8>(&matrix.scales))
}

/// For each row its squared error and the squares that it came from.
pub(super) fn errors(matrix: &Matrix<'_>, values: &[f32], threads: usize) -> Vec<(f64, f64)> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let of = |rows: Range<usize>| -> Vec<(f64, f64)> {
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
        let of = &of;
        let spawn = |start| threads::spawn(scope, move || of(start..(start + each).min(rows)));
        let handles: Vec<_> = (0..rows).step_by(each).map(spawn).collect();
        handles.into_iter().flat_map(Task::join).collect()
    })
}
