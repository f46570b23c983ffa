//! Checks before an interrupted run resumes: compares finished tensors with the journal, and the
//! source with its earlier state.

use super::Run;
use super::journal::{FinishedTensor, JournalHeader};
use super::source::SourceTensor;
use super::tensor::packed_hash;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::types;
use crate::os::files::read_exact_at;
use crate::quant::layout::{TargetFormat, TensorPlan};
use crate::tensor::Matrix;
use crate::util::hex;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;

impl Run<'_> {
    /// Returns whether the source is the same as when `header` was made. A new stamp alone is no
    /// change, because a link or other permissions cause one.
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

    /// Returns the SHA-256 of a tensor as the source stores it, see
    /// [`FinishedTensor::source_sha256`].
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

    /// Returns whether a finished tensor is in its place, byte for byte.
    pub(super) fn resume(
        &mut self,
        line: &FinishedTensor,
        entry: &TensorPlan,
        offset: u64,
    ) -> Result<bool> {
        let layout = &self.plan.layout;
        let header = layout.header(entry.shard)?;
        let path = self.staging.files().join(layout.file(entry.shard));
        let Ok(mut file) = File::open(&path) else { return Ok(false) };
        let mut start = vec![0; header.len()];
        if file.read_exact(&mut start).is_err() || start != header {
            return Ok(false);
        }
        let whole = self.solver.wants_resumed(entry) && entry.role.is_matrix();
        let mut bytes =
            vec![
                0;
                if whole { entry.bytes() as usize } else { (entry.bytes() as usize).min(1 << 20) }
            ];
        let (mut hash, mut at) = (Sha256::new(), 0);
        while at < entry.bytes() {
            let n = bytes.len().min((entry.bytes() - at) as usize);
            let place = header.len() as u64 + offset + at;
            if read_exact_at(&file, &mut bytes[..n], place).is_err() {
                return Ok(false);
            }
            hash.update(&bytes[..n]);
            at += n as u64;
        }
        if hex(hash.finalize()) != line.sha256 {
            return Ok(false);
        }
        if let (true, TargetFormat::Format(format)) = (whole, entry.target) {
            let matrix = match entry.block {
                Some(code) => {
                    let (rows, cols) = (entry.rows, entry.cols);
                    let ggml = code.spec().ggml.context("blocks of a file have a type there")?;
                    let bytes = &bytes[..ggml.bytes_of(rows * cols)];
                    types::matrix(code, rows, cols, bytes, self.options.threads)?
                }
                None => {
                    let (codes, side) = bytes.split_at(entry.parts[0].bytes as usize);
                    Matrix::new(format, entry.rows, entry.cols, codes, side)?
                }
            };
            self.solver.resumed(entry, &matrix)?;
        }
        self.layer_done(entry)?;
        self.weights += (entry.rows * entry.cols) as u64;
        self.say(entry, Some(line.relative_error))?;
        Ok(true)
    }
}
