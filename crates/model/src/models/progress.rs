//! Progress of loading weights. Reader threads count their bytes, and another thread shows the sum.

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

    /// Wraps a matrix so that its sources count the bytes they read.
    pub fn counted<'a>(&'a self, matrix: StoredMatrix<'a>) -> StoredMatrix<'a> {
        let counted =
            |source| -> Box<dyn Source + 'a> { Box::new(CountedSource { source, progress: self }) };
        StoredMatrix { codes: counted(matrix.codes), side: matrix.side.map(counted), ..matrix }
    }
}

impl Weights {
    /// Returns the stored bytes of matrices that were read since the weights were opened.
    pub fn bytes_read(&self) -> u64 {
        self.progress.0.load(Relaxed)
    }

    /// Returns the value of [`Weights::bytes_read`] after all matrices are loaded.
    pub fn bytes_to_read(&self) -> Result<u64> {
        let bytes = |t: &TensorSpec| Ok(stored_bytes(&self.stored(t.role, t.layer)?) as u64);
        self.matrices().map(bytes).sum()
    }
}

fn stored_bytes(matrix: &StoredMatrix<'_>) -> usize {
    matrix.code_bytes() + matrix.side_bytes()
}

struct CountedSource<'a> {
    source: Box<dyn Source + 'a>,
    progress: &'a Progress,
}

impl Source for CountedSource<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.source.read_at(at, out)?;
        self.progress.add(out.len());
        Ok(())
    }
}
