//! Saved state of a solver after a complete layer.
//!
//! With it, a resumed run does not compute the layers up to there again. The file begins with a
//! line of JSON, followed by little-endian f32 values.

use super::ConversionRun;
use super::journal::FinishedTensor;
use super::staging::{StagedFile, check_space, open_staged};
use anyhow::{Context, Result};
use gemma_base::util::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Limit for the bytes of the first line.
const LONGEST_LINE: u64 = 1 << 10;

/// The first line of the file.
#[derive(Serialize, Deserialize)]
struct StateHeader {
    layer: usize,
    /// SHA-256 of the solver's name and of the finished tensors. [`ConversionRun::basis`] returns
    /// it.
    basis: String,
    /// SHA-256 of the values.
    sha256: String,
}

impl ConversionRun<'_> {
    /// Saves the solver's state after `layer`. The last entry of `done` must be the last tensor of
    /// this layer.
    ///
    /// Does nothing if the disk has no room for the state and the rest of the result. Errors of
    /// writing are ignored, because a resumed run only takes longer without the file.
    pub(super) fn save_state(&mut self, layer: usize, done: &[FinishedTensor]) -> Result<()> {
        let basis = self.basis(done);
        let parts = self.solver.state(layer)?;
        if parts.is_empty() {
            return Ok(());
        }
        let mut hash = Sha256::new();
        parts.iter().for_each(|part| hash.update(bytemuck::cast_slice::<f32, u8>(part)));
        let header = StateHeader { layer, basis, sha256: hex(hash.finalize()) };
        let mut line = serde_json::to_vec(&header)?;
        line.push(b'\n');
        let (path, begun) = (self.staging.state(), self.staging.state().with_extension("new"));
        let written: u64 = done.iter().map(|line| line.bytes).sum();
        let state = parts.iter().map(|part| size_of_val(*part) as u64).sum::<u64>();
        let write = || {
            check_space(&begun, self.plan.total_bytes.saturating_sub(written) + state)?;
            let mut file = StagedFile::open(&begun, 0)?;
            file.write_all(&line)?;
            parts.iter().try_for_each(|part| file.write_all(bytemuck::cast_slice(part)))?;
            file.sync()?;
            fs::rename(&begun, &path).context("renaming the state")
        };
        if write().is_err() {
            let _ = fs::remove_file(&begun);
        }
        Ok(())
    }

    /// Restores the solver's state that an earlier run saved after some of the tensors `done`.
    /// Returns the number of tensors that the state includes.
    pub(super) fn restore_state(&mut self, done: &[FinishedTensor]) -> Result<usize> {
        let Some((header, values)) = read(&self.staging.state()) else { return Ok(0) };
        let entries = &self.plan.layout.entries;
        let Some(last) = entries.iter().position(|e| e.ends_layer && e.layer == header.layer)
        else {
            return Ok(0);
        };
        let is_of_this_run = done.get(..=last).is_some_and(|done| self.basis(done) == header.basis);
        if !is_of_this_run {
            return Ok(0);
        }
        self.solver.restore(header.layer, values)?;
        Ok(last + 1)
    }

    /// Returns the SHA-256 of everything that the state after the tensors `done` depends on.
    fn basis(&self, done: &[FinishedTensor]) -> String {
        let mut hash = Sha256::new_with_prefix(self.solver.name());
        for line in done {
            hash.update(&line.sha256);
            hash.update(&line.source_sha256);
        }
        hex(hash.finalize())
    }
}

/// Reads a state. Returns `None` if there is none or if it is damaged.
fn read(path: &Path) -> Option<(StateHeader, Vec<f32>)> {
    let mut file = BufReader::new(open_staged(path)?);
    let mut line = Vec::new();
    file.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).ok()?;
    let header: StateHeader = serde_json::from_slice(&line).ok()?;
    let length = file.get_ref().metadata().ok()?.len().checked_sub(line.len() as u64)?;
    let mut values = vec![0f32; length as usize / size_of::<f32>()];
    file.read_exact(bytemuck::cast_slice_mut(&mut values)).ok()?;
    let sha256 = hex(Sha256::digest(bytemuck::cast_slice::<f32, u8>(&values)));
    (sha256 == header.sha256).then_some((header, values))
}
