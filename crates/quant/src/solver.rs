//! Interface between the conversion, which reads and writes tensors, and the methods that compute
//! codes.

use super::layout::{ArtifactLayout, TensorPlan};
use anyhow::Result;
use gemma_base::tensor::encode::{CodingDevice, OnProcessor};
use gemma_base::tensor::quantize::{quantize, quantize_by};
use gemma_base::tensor::{Format, Matrix};
use gemma_base::util::threads::{self, ScopedTask};
use std::ops::Range;
use std::sync::Arc;

/// Rows of a tile of trellis codes.
pub const TILE_ROWS: usize = 16;

/// A method of quantisation. It receives one matrix after the other in the order of the forward
/// pass.
pub trait Solver {
    /// Returns the name of the method and everything that its results depend on. It appears in the
    /// report. A run resumes only a run with the same name.
    fn name(&self) -> String;

    /// Returns whether the method needs all rows of this matrix at once. Otherwise rows come in
    /// chunks of a multiple of [`TILE_ROWS`], except the last chunk, and the result must not depend
    /// on the size of chunks.
    fn wants_whole(&self, _entry: &TensorPlan) -> bool {
        false
    }

    /// Returns whether a resumed run must pass this matrix to the method if it is finished.
    fn wants_resumed(&self, entry: &TensorPlan) -> bool {
        self.wants_whole(entry)
    }

    /// Returns how many weights are encoded as trellis codes within about a second, on `threads`
    /// threads.
    fn at_once(&self, threads: usize) -> usize {
        OnProcessor.at_once(threads)
    }

    /// Returns the bytes of memory that the method needs in addition to its input matrix and its
    /// result.
    fn memory(&self, _layout: &ArtifactLayout) -> u64 {
        0
    }

    /// Quantises some rows of a matrix. `values` are f32 `[rows, cols]`, all finite.
    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>>;

    /// Receives a matrix that an earlier run has finished, instead of a call of [`Solver::matrix`].
    /// If it comes in chunks, it may be only the first rows.
    fn resumed(&mut self, _entry: &TensorPlan, _matrix: &Matrix<'_>) -> Result<()> {
        Ok(())
    }

    /// Called after the last tensor of a layer. Returns values from which [`Solver::restore`]
    /// restores the state of the solver. If it returns none, a resumed run passes all finished
    /// tensors to [`Solver::resumed`].
    fn state(&mut self, _layer: usize) -> Result<Vec<&[f32]>> {
        Ok(Vec::new())
    }

    /// Continues after a layer, from the values that [`Solver::state`] returned there.
    fn restore(&mut self, _layer: usize, _state: Vec<f32>) -> Result<()> {
        Ok(())
    }
}

/// Version of the method. It must change whenever a byte of the result changes.
const METHOD: &str = "nearest-2";

/// Rounds each row independently to the nearest codes, with the scale of least error.
#[derive(Clone, Debug)]
pub struct Nearest {
    pub threads: usize,
    /// The device that searches for trellis codes.
    pub device: Arc<dyn CodingDevice>,
}

impl Nearest {
    /// Returns a solver that runs on the CPU alone.
    pub fn new(threads: usize) -> Nearest {
        Nearest { threads, device: Arc::new(OnProcessor) }
    }
}

impl Solver for Nearest {
    fn name(&self) -> String {
        METHOD.into()
    }

    fn at_once(&self, threads: usize) -> usize {
        self.device.at_once(threads)
    }

    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>> {
        let (n, cols) = (rows.len(), entry.cols);
        if format.code.is_trellis() {
            // The encoder receives all tiles at once, because a GPU needs thousands.
            let run = || quantize_by(&*self.device, format, n, cols, values);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.max(1)).build();
            return pool.map_or_else(|_| run(), |pool| pool.install(run));
        }
        let each = n.div_ceil(self.threads.max(1)).next_multiple_of(TILE_ROWS);
        let parts: Vec<Result<Matrix<'_>>> = std::thread::scope(|scope| {
            let run = |part: &[f32]| quantize(format, part.len() / cols, cols, part);
            let spawn = |part| threads::spawn(scope, move || run(part));
            let handles: Vec<_> = values.chunks(each * cols).map(spawn).collect();
            handles.into_iter().map(ScopedTask::join).collect()
        });
        let (mut codes, mut side) = (Vec::<u8>::new(), Vec::<u8>::new());
        for part in parts {
            let part = part?;
            codes.extend_from_slice(&part.codes);
            side.extend_from_slice(&part.side);
        }
        Matrix::new(format, n, cols, codes, side)
    }
}
