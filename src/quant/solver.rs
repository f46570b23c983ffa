//! The seam between the pipeline, which reads, writes and keeps the journal, and the methods that
//! find the codes.

use super::layout::{Entry, Layout};
use super::plan::TILE_ROWS;
use crate::tensor::encode::{OnProcessor, TileEncoder};
use crate::tensor::quantize::quantize_by;
use crate::tensor::{Format, Matrix};
use crate::util::threads::{self, Task};
use anyhow::Result;
use std::ops::Range;
use std::sync::Arc;

/// A method of quantising, asked for one matrix after the other in the order of the forward pass.
pub trait Solver {
    /// What it is called in the report, with everything else that its results depend on: runs whose
    /// solvers differ in this never continue each other.
    fn name(&self) -> String;

    /// Whether it wants all rows of this matrix at once. Otherwise they come in runs of any length,
    /// multiples of 16 but for the last, and the result must not depend on how they are cut.
    fn wants_whole(&self, _entry: &Entry) -> bool {
        false
    }

    /// Whether it wants to see this matrix again where an earlier run has finished it.
    fn wants_resumed(&self, entry: &Entry) -> bool {
        self.wants_whole(entry)
    }

    /// Bytes that it needs beyond the matrix it is given and the codes it returns.
    fn memory(&self, _layout: &Layout) -> u64 {
        0
    }

    /// Codes some rows of a matrix; `values` are `[rows, cols]`, all finite.
    fn matrix(
        &mut self,
        entry: &Entry,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>>;

    /// Shows a matrix that an earlier, interrupted run has finished, in the place where
    /// [`Solver::matrix`] would be asked for it.
    fn resumed(&mut self, _entry: &Entry, _matrix: &Matrix<'_>) -> Result<()> {
        Ok(())
    }

    /// All tensors of a layer are done.
    fn layer_done(&mut self, _layer: usize) -> Result<()> {
        Ok(())
    }
}

/// Changes with every change of the method that changes a byte.
const METHOD: &str = "nearest-2";

/// Each row by itself, to the nearest code, with the scale of least error.
#[derive(Clone, Debug)]
pub struct Nearest {
    pub threads: usize,
    /// What finds trellis codes.
    pub tiles: Arc<dyn TileEncoder>,
}

impl Nearest {
    /// On the processor alone.
    pub fn new(threads: usize) -> Nearest {
        Nearest { threads, tiles: Arc::new(OnProcessor) }
    }
}

impl Solver for Nearest {
    fn name(&self) -> String {
        METHOD.into()
    }

    fn matrix(
        &mut self,
        entry: &Entry,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>> {
        let (n, cols) = (rows.len(), entry.cols);
        let each = n.div_ceil(self.threads.max(1)).next_multiple_of(TILE_ROWS);
        let parts: Vec<Result<Matrix<'_>>> = std::thread::scope(|scope| {
            let run =
                |part: &[f32]| quantize_by(&*self.tiles, format, part.len() / cols, cols, part);
            let spawn = |part| threads::spawn(scope, move || run(part));
            let handles: Vec<_> = values.chunks(each * cols).map(spawn).collect();
            handles.into_iter().map(Task::join).collect()
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
