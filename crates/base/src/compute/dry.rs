//! An executor that computes nothing and counts the memory that a real one would allocate.
//!
//! The code that loads models drives it, so the plan and the real allocation agree.

use super::cache::KvFormat;
use super::executor::{Caps, Executor, Held, LoadJob, Report, Reports};
use super::operand::{BufferId, WeightId};
use super::plan::{Part, Plan, PlanId};
use super::step::StepLayout;
use crate::tensor::Format;
use anyhow::{Result, bail};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory use of one kind of executor.
pub trait Footprint: Send {
    /// Returns the sizes of the allocations for a weight matrix.
    fn weight(&mut self, label: &str, format: Format, rows: usize, cols: usize)
    -> Result<Vec<u64>>;
    /// Returns the allocated bytes of a buffer.
    fn buffer(&mut self, label: &str, bytes: usize) -> Result<u64>;
    /// Returns the sizes of the executor's own buffers for this plan.
    fn recorded(&mut self, plan: &Plan, layout: StepLayout) -> Result<Vec<u64>>;
    fn max_rows(&self) -> usize;
    /// Returns the bytes used in addition to weights and buffers, mostly while weights are loaded.
    fn staging(&self) -> u64;
    fn key_block(&self) -> fn(KvFormat) -> usize;
    fn lists_best(&self) -> bool;
}

/// Sizes of allocations, in the order in which they are made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    pub weights: Vec<u64>,
    pub buffers: Vec<u64>,
}

/// Running count of a dry executor, shared with the code that wrapped it in another executor.
#[derive(Clone, Debug, Default)]
pub struct Counted(Arc<Mutex<Pieces>>);

impl Counted {
    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pieces(&self) -> Pieces {
        self.lock().clone()
    }

    pub fn held(&self) -> Held {
        let pieces = self.lock();
        Held { weights: pieces.weights.iter().sum(), buffers: pieces.buffers.iter().sum() }
    }
}

/// Executor that counts allocations for one kind of executor.
pub struct Dry {
    footprint: Box<dyn Footprint>,
    counted: Counted,
    ids: [u32; 3],
}

impl Dry {
    pub fn new(footprint: Box<dyn Footprint>) -> Dry {
        Dry { footprint, counted: Counted::default(), ids: [0; 3] }
    }

    pub fn counted(&self) -> Counted {
        self.counted.clone()
    }

    fn next(&mut self, kind: usize) -> u32 {
        self.ids[kind] += 1;
        self.ids[kind] - 1
    }
}

impl Executor for Dry {
    fn caps(&self) -> Caps {
        let (max_rows, lists_best) = (self.footprint.max_rows(), self.footprint.lists_best());
        Caps { max_rows, lists_best, is_dry: true }
    }

    fn key_block(&self, _: Part) -> fn(KvFormat) -> usize {
        self.footprint.key_block()
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let bytes = self.footprint.buffer(label, bytes)?;
        self.counted.lock().buffers.push(bytes);
        Ok(BufferId(self.next(0)))
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        let mut ids = Vec::with_capacity(jobs.len());
        for LoadJob { label, matrix: m, .. } in jobs {
            let taken = self.footprint.weight(&label, m.format, m.rows, m.cols)?;
            self.counted.lock().weights.extend(taken);
            ids.push(WeightId(self.next(1)));
        }
        Ok(ids)
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
        self.counted.lock().buffers.extend(own);
        Ok(PlanId(self.next(2)))
    }

    fn start(&mut self, _: PlanId, _: Option<(BufferId, usize)>) -> Result<bool> {
        bail!("a dry executor has nothing to run")
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn finish(&mut self, _: Option<(BufferId, &mut [u8])>) -> Result<()> {
        bail!("a dry executor has nothing to run")
    }

    fn lend(&self, _: BufferId, _: usize) -> Option<&[u8]> {
        None
    }
}

/// Reports only memory; nothing is timed.
impl Reports for Dry {
    fn report(&self) -> Report {
        let held = self.counted.held();
        Report { device: "nothing at all".into(), held, allocated: held, ..Report::default() }
    }

    fn start_profile(&mut self) {}

    fn read_bandwidth(&mut self) -> Option<f64> {
        None
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        None
    }

    fn set_poison(&mut self, _: bool) {}
}
