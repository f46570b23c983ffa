//! How far the loading of weights has come, for whoever shows it: threads that read add up, another
//! one looks.

use super::{Role, Weights};
use crate::tensor::{Source, StoredMatrix};
use anyhow::Result;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes read so far.
#[derive(Debug, Default)]
pub(super) struct Progress(AtomicU64);

impl Progress {
    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Relaxed);
    }

    /// The same matrix, whose bytes count as they are read.
    pub fn counted<'a>(&'a self, matrix: StoredMatrix<'a>) -> StoredMatrix<'a> {
        let counted =
            |source| -> Box<dyn Source + 'a> { Box::new(Counted { source, progress: self }) };
        StoredMatrix { codes: counted(matrix.codes), side: matrix.side.map(counted), ..matrix }
    }
}

impl Weights {
    /// Bytes of matrices that executors have been given since the weights were opened, as they are
    /// stored.
    pub fn bytes_read(&self) -> u64 {
        self.progress.0.load(Relaxed)
    }

    /// What [`Weights::bytes_read`] grows by when all matrices are loaded.
    pub fn bytes_to_read(&self) -> Result<u64> {
        let matrices = self.roles().into_iter().filter(|(role, _)| role.is_matrix());
        matrices.map(|(role, layer)| Ok(stored_bytes(&self.stored(role, layer)?) as u64)).sum()
    }

    /// Counts a matrix that was read as a whole.
    pub(super) fn count(&self, role: Role, layer: usize) -> Result<()> {
        self.progress.add(stored_bytes(&self.stored(role, layer)?));
        Ok(())
    }
}

fn stored_bytes(matrix: &StoredMatrix<'_>) -> usize {
    matrix.code_bytes() + matrix.side_bytes()
}

struct Counted<'a> {
    source: Box<dyn Source + 'a>,
    progress: &'a Progress,
}

impl Source for Counted<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.source.read_at(at, out)?;
        self.progress.add(out.len());
        Ok(())
    }
}
