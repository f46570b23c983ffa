//! An executor that computes nothing and counts what one would allocate, asked by the same code
//! that loads models: what is planned is what is taken.

use super::executor::Executor;
use super::plan::{BufferId, KvFormat, Part, Plan, PlanId, WeightId};
use super::step::StepLayout;
use crate::tensor::{Format, Matrix};
use anyhow::{Result, bail};

/// How a kind of executor takes memory.
pub trait Footprint: Send {
    /// Pieces that a weight matrix takes.
    fn weight(&mut self, label: &str, format: Format, rows: usize, cols: usize)
    -> Result<Vec<u64>>;
    /// What a buffer takes.
    fn buffer(&mut self, label: &str, bytes: usize) -> Result<u64>;
    /// Buffers of the executor's own that it makes when it records this plan.
    fn recorded(&mut self, _plan: &Plan, _layout: StepLayout) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }
    fn max_rows(&self) -> usize;
    fn key_block(&self, format: KvFormat) -> usize;
    fn lists_best(&self) -> bool {
        false
    }
}

/// Pieces of memory, in the order in which they are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    pub weights: Vec<u64>,
    pub buffers: Vec<u64>,
}

/// Counts for one kind of executor.
pub struct Dry<F> {
    footprint: F,
    pieces: Pieces,
    ids: [u32; 3],
}

impl<F: Footprint> Dry<F> {
    pub fn new(footprint: F) -> Dry<F> {
        Dry { footprint, pieces: Pieces::default(), ids: [0; 3] }
    }

    fn next(&mut self, kind: usize) -> u32 {
        self.ids[kind] += 1;
        self.ids[kind] - 1
    }
}

impl<F: Footprint> Executor for Dry<F> {
    fn describe(&self) -> String {
        "nothing at all".into()
    }

    fn max_rows(&self) -> usize {
        self.footprint.max_rows()
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let bytes = self.footprint.buffer(label, bytes)?;
        self.pieces.buffers.push(bytes);
        Ok(BufferId(self.next(0)))
    }

    fn load(&mut self, label: &str, _: Part, matrix: &Matrix<'_>) -> Result<WeightId> {
        let taken = self.footprint.weight(label, matrix.format, matrix.rows, matrix.cols)?;
        self.pieces.weights.extend(taken);
        Ok(WeightId(self.next(1)))
    }

    fn write(&mut self, _: BufferId, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, _: BufferId, _: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn record(&mut self, plan: Plan, _: BufferId, layout: StepLayout) -> Result<PlanId> {
        let own = self.footprint.recorded(&plan, layout)?;
        self.pieces.buffers.extend(own);
        Ok(PlanId(self.next(2)))
    }

    fn run(&mut self, _: PlanId) -> Result<()> {
        bail!("a dry executor has nothing to run")
    }

    fn key_block(&self, format: KvFormat, _: u16) -> usize {
        self.footprint.key_block(format)
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn lists_best(&self) -> bool {
        self.footprint.lists_best()
    }

    fn memory(&self) -> (u64, u64) {
        (self.pieces.weights.iter().sum(), self.pieces.buffers.iter().sum())
    }

    fn pieces(&self) -> Pieces {
        self.pieces.clone()
    }
}
