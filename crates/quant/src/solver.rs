//! Interface between the conversion, which reads and writes tensors, and the methods that find
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

/// A method of quantising. It gets one matrix after the other in the order of the forward pass.
pub trait Solver {
    /// Returns the name of the method with everything that its results depend on. The report shows
    /// it. A run resumes only one with the same name.
    fn name(&self) -> String;

    /// Returns whether the method needs all rows of this matrix at once. Otherwise rows come in
    /// chunks of a multiple of [`TILE_ROWS`], except the last chunk, and the result must not depend
    /// on the size of chunks.
    fn wants_whole(&self, _entry: &TensorPlan) -> bool {
        false
    }

    /// Returns whether the method needs a matrix that an earlier run has finished.
    fn wants_resumed(&self, entry: &TensorPlan) -> bool {
        self.wants_whole(entry)
    }

    /// Returns how many weights become trellis codes within about a second, on so many threads.
    fn at_once(&self, threads: usize) -> usize {
        OnProcessor.at_once(threads)
    }

    /// Returns the bytes that the method needs besides its input matrix and its result.
    fn memory(&self, _layout: &ArtifactLayout) -> u64 {
        0
    }

    /// Codes some rows of a matrix. `values` are f32 `[rows, cols]`, all finite.
    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>>;

    /// Receives a matrix that an earlier run has finished, or its first rows if it comes in chunks,
    /// instead of calls of [`Solver::matrix`].
    fn resumed(&mut self, _entry: &TensorPlan, _matrix: &Matrix<'_>) -> Result<()> {
        Ok(())
    }

    /// Is called after the last tensor of a layer. Returns values that [`Solver::restore`] takes in
    /// place of all tensors until there. Without values, an interrupted run hands over the tensors.
    fn state(&mut self, _layer: usize) -> Result<Vec<&[f32]>> {
        Ok(Vec::new())
    }

    /// Goes on behind a layer, with the values that [`Solver::state`] gave there.
    fn restore(&mut self, _layer: usize, _state: Vec<f32>) -> Result<()> {
        Ok(())
    }
}

/// Version of the method. It changes with every change that changes a byte of the result.
const METHOD: &str = "nearest-2";

/// Rounds each row by itself to the nearest codes, with the scale of least error.
#[derive(Clone, Debug)]
pub struct Nearest {
    pub threads: usize,
    /// The device that finds trellis codes.
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
            // The encoder gets all tiles at once, because a GPU needs thousands.
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
