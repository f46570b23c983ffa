//! Progress of loading weights. Threads that read count their bytes, another one shows the sum.

use super::{TensorSpec, Weights};
use anyhow::Result;
use gemma_base::tensor::{Source, StoredMatrix};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes read so far.
#[derive(Debug, Default)]
pub(super) struct Progress(AtomicU64);

impl Progress {
    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns the matrix with sources that count its bytes as they are read.
    pub fn counted<'a>(&'a self, matrix: StoredMatrix<'a>) -> StoredMatrix<'a> {
        let counted =
            |source| -> Box<dyn Source + 'a> { Box::new(Counted { source, progress: self }) };
        StoredMatrix { codes: counted(matrix.codes), side: matrix.side.map(counted), ..matrix }
    }
}

impl Weights {
    /// Returns the bytes of matrices that executors have taken since the weights were opened, as
    /// they are stored.
    pub fn bytes_read(&self) -> u64 {
        self.progress.0.load(Relaxed)
    }

    /// Returns the sum that [`Weights::bytes_read`] reaches when all matrices are loaded.
    pub fn bytes_to_read(&self) -> Result<u64> {
        let bytes = |t: &TensorSpec| Ok(stored_bytes(&self.stored(t.role, t.layer)?) as u64);
        self.matrices().map(bytes).sum()
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
