//! Checks before an interrupted run resumes: compares finished tensors and rows with the journal,
//! and the source with its earlier state.

use super::ConversionRun;
use super::journal::{FinishedRows, FinishedTensor, JournalHeader, other_run};
use super::sink::WrittenRows;
use super::source::SourceTensor;
use super::staging::open_staged;
use crate::layout::{TargetFormat, TensorPlan};
use anyhow::{Context, Result};
use gemma_base::os::files::read_exact_at;
use gemma_base::tensor::{Format, Matrix};
use gemma_base::util::hex;
use gemma_model::checkpoint::Checkpoint;
use gemma_model::checkpoint::gguf::types;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::ops::AddAssign;

/// A tensor that is converted in part.
#[derive(Default)]
pub struct BegunTensor {
    pub rows: usize,
    pub written: WrittenRows,
    pub source_hash: Sha256,
    pub sums: ErrorSums,
}

/// Sums over rows of a tensor.
#[derive(Clone, Copy, Default)]
pub struct ErrorSums {
    /// Sum of squared errors.
    pub error: f64,
    /// Sum of squared weights.
    pub power: f64,
}

impl AddAssign<(f64, f64)> for ErrorSums {
    fn add_assign(&mut self, (error, power): (f64, f64)) {
        self.error += error;
        self.power += power;
    }
}

impl ConversionRun<'_> {
    /// Returns whether the source is the same as when `header` was written. A different stamp alone
    /// is not a change, because a new link or new permissions also change it.
    pub(super) fn is_source_unchanged(
        &self,
        checkpoint: &Checkpoint,
        header: &JournalHeader,
        done: &[FinishedTensor],
    ) -> Result<bool> {
        let now = JournalHeader::new(checkpoint, self.plan, self.options)?;
        if now.has_stamps_of(header) || !now.continues(header) {
            return Ok(now.continues(header));
        }
        for (entry, line) in self.plan.layout.entries.iter().zip(done) {
            if self.source_hash(entry)? != line.source_sha256 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the SHA-256 of a tensor of the source, see [`FinishedTensor::source_sha256`].
    pub(super) fn source_hash(&self, entry: &TensorPlan) -> Result<String> {
        let reader = SourceTensor::open(self.source, entry)?;
        let hash = match (entry.target, &reader) {
            (TargetFormat::Format(format), SourceTensor::Packed { matrix, .. })
                if matrix.format == format =>
            {
                packed_hash(matrix)
            }
            _ => {
                let mut hash = Sha256::new();
                reader.pieces(0..entry.rows, &mut |bytes, _| {
                    hash.update(bytes);
                    Ok(())
                })?;
                hash
            }
        };
        Ok(hex(hash.finalize()))
    }

    /// Returns whether the bytes of a finished tensor are in its file at `offset`.
    pub(super) fn is_written(
        &self,
        line: &FinishedTensor,
        entry: &TensorPlan,
        offset: u64,
    ) -> Result<bool> {
        let found = self.written(entry, offset, entry.bytes(), false)?;
        Ok(found.is_some_and(|(hash, _)| hex(hash.finalize()) == line.sha256))
    }

    /// Adds a finished tensor to the progress. Passes it to the solver unless `seen` says that the
    /// restored state includes it.
    pub(super) fn resume(
        &mut self,
        line: &FinishedTensor,
        entry: &TensorPlan,
        offset: u64,
        seen: bool,
    ) -> Result<()> {
        let wanted = !seen && self.solver.wants_resumed(entry) && entry.role.is_matrix();
        if let (true, TargetFormat::Format(format)) = (wanted, entry.target) {
            let (_, bytes) = self
                .written(entry, offset, entry.bytes(), true)?
                .with_context(|| format!("{} went missing", entry.name))?;
            let (codes, side) = bytes.split_at(entry.parts[0].bytes as usize);
            let matrix = self.packed(entry, format, entry.rows, codes, side)?;
            self.solver.resumed(entry, &matrix)?;
        }
        self.weights += (entry.rows * entry.cols) as u64;
        self.say(entry, Some(line.relative_error))
    }

    /// Returns a tensor that is finished in part. Returns `None` if the bytes of its finished rows
    /// are not in the file.
    pub(super) fn resume_rows(
        &mut self,
        line: &FinishedRows,
        entry: &TensorPlan,
        offset: u64,
    ) -> Result<Option<BegunTensor>> {
        let TargetFormat::Format(format) = entry.target else { return Ok(None) };
        let whole = self.solver.wants_resumed(entry) && entry.role.is_matrix();
        let Some((hash, codes)) = self.written(entry, offset, line.bytes, whole)? else {
            return Ok(None);
        };
        let mut side = Vec::new();
        if let Some(file) = open_staged(&self.staging.side()) {
            let read = file.take(line.side).read_to_end(&mut side);
            read.with_context(|| format!("reading {}", self.staging.side().display()))?;
        }
        if hex(hash.clone().chain_update(&side).finalize()) != line.sha256 {
            return Ok(None);
        }
        let mut source_hash = Sha256::new();
        SourceTensor::open(self.source, entry)?.pieces(0..line.rows, &mut |bytes, _| {
            source_hash.update(bytes);
            Ok(())
        })?;
        if hex(source_hash.clone().finalize()) != line.source_sha256 {
            let begun = format!("before tensor `{}` changed in the source", entry.name);
            return Err(other_run(&self.staging.journal(), &begun).into());
        }
        if whole {
            let matrix = self.packed(entry, format, line.rows, &codes, &side)?;
            self.solver.resumed(entry, &matrix)?;
        }
        let [error, power] = line.sums.map(f64::from_bits);
        let (rows, bytes, side_saved) = (line.rows, line.bytes, side.len() as u64);
        let written = WrittenRows { hash, bytes, side, side_saved };
        Ok(Some(BegunTensor { rows, written, source_hash, sums: ErrorSums { error, power } }))
    }

    /// Hashes the first bytes of a tensor in its file. Returns them too if `whole` is set. Returns
    /// `None` if the file is shorter.
    fn written(
        &self,
        entry: &TensorPlan,
        offset: u64,
        length: u64,
        whole: bool,
    ) -> Result<Option<(Sha256, Vec<u8>)>> {
        let layout = &self.plan.layout;
        let header = layout.header(entry.shard)?;
        let path = self.staging.files().join(layout.file(entry.shard));
        let Some(mut file) = open_staged(&path) else { return Ok(None) };
        let mut start = vec![0; header.len()];
        if file.read_exact(&mut start).is_err() || start != header {
            return Ok(None);
        }
        if length > entry.bytes() {
            return Ok(None);
        }
        let mut bytes = vec![0; if whole { length } else { length.min(1 << 20) } as usize];
        let (mut hash, mut at) = (Sha256::new(), 0);
        while at < length {
            let n = bytes.len().min((length - at) as usize);
            let place = header.len() as u64 + offset + at;
            if read_exact_at(&file, &mut bytes[..n], place).is_err() {
                return Ok(None);
            }
            hash.update(&bytes[..n]);
            at += n as u64;
        }
        Ok(Some((hash, bytes)))
    }

    /// Returns the first rows of a packed matrix. `bytes` are their bytes in the file.
    fn packed<'b>(
        &self,
        entry: &TensorPlan,
        format: Format,
        rows: usize,
        codes: &'b [u8],
        side: &'b [u8],
    ) -> Result<Matrix<'b>> {
        let Some(code) = entry.block else {
            return Matrix::new(format, rows, entry.cols, codes, side);
        };
        let ggml = code.spec().ggml.context("blocks of a file have a type there")?;
        let bytes = &codes[..ggml.bytes_of(rows * entry.cols)];
        types::matrix(code, rows, entry.cols, bytes, self.options.threads)
    }
}

/// Hashes the codes and scales of a packed matrix.
pub(super) fn packed_hash(matrix: &Matrix<'_>) -> Sha256 {
    let hash = Sha256::new_with_prefix(&matrix.codes);
    hash.chain_update(&matrix.side)
}
