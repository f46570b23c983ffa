//! The executor seam: memory, recorded plans, and nothing else. `cpu::CpuExecutor` and
//! `vulkan::VulkanExecutor` implement it, `split::SplitExecutor` joins two of them, `dry::Dry` only
//! counts.
//!
//! No method has a body here: an executor around another one forwards each of them or says what it
//! does not do. [`ExecutorExt`] has the
//! functions that follow from the methods.

use super::cache::KvFormat;
use super::operand::{BufferId, WeightId};
use super::plan::{Part, Plan, PlanId};
use super::step::StepLayout;
use crate::tensor::{Matrix, StoredMatrix};
use anyhow::Result;
use serde::Serialize;

/// Time spent in the kernels of one label since the last reset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelTime {
    pub label: &'static str,
    pub calls: u64,
    pub seconds: f64,
    /// Weight and cache bytes read, activations not counted.
    pub bytes: u64,
    /// Multiply-adds of int8 values in linear layers.
    pub macs: u64,
}

impl KernelTime {
    /// Adds this to what `times` has of its label.
    pub fn add_to(self, times: &mut Vec<KernelTime>) {
        match times.iter_mut().find(|t| t.label == self.label) {
            Some(sum) => {
                sum.calls += self.calls;
                sum.seconds += self.seconds;
                sum.bytes += self.bytes;
                sum.macs += self.macs;
            }
            None => times.push(self),
        }
    }
}

/// Work of an accelerator beside the executor. The JSON result shows it as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AssistReport {
    /// Which, such as `host model with the kernel's Rust twin`.
    pub device: String,
    /// Whether a device computed it, not a model of one.
    pub silicon: bool,
    /// Why it was given up, where it was.
    pub given_up: Option<String>,
    pub jobs: u64,
    /// Pages sealed, pages that jobs read, and (row, page) pairs attended; each page of one layer
    /// and all its heads.
    pub pages_sealed: u64,
    pub pages_read: u64,
    pub row_pages: u64,
    /// Bytes of keys and values that jobs read.
    pub bytes: u64,
    /// Jobs computed again on the processor and compared.
    pub checks: u64,
}

/// A matrix to be loaded from where it is stored.
pub struct LoadJob<'a> {
    pub label: String,
    /// Where in the model it belongs.
    pub part: Part,
    pub matrix: StoredMatrix<'a>,
}

/// Where the time of loading stored matrices went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loading {
    /// Opening the device.
    pub opening: f64,
    /// Taking memory of the device and compiling kernels meanwhile.
    pub preparing: f64,
    /// From the first byte read to the last one in its place, those included.
    pub moving: f64,
    /// Seconds of it that a reading thread read, and waited for the device to take the bytes.
    pub reading: f64,
    pub waiting: f64,
}

/// Properties of an executor, constant for its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Most rows that one pass should carry: the prefill chunk.
    pub max_rows: usize,
    /// Lists of the largest logits are worth asking for, instead of the logits.
    pub lists_best: bool,
    /// Only shapes count: matrices come without their contents, and plans never run.
    pub is_dry: bool,
}

/// A device that runs plans.
pub trait Executor: Reports + Send {
    fn caps(&self) -> Caps;
    /// Channels of a key that lie together in a cache of a format: 1 keeps each channel's positions
    /// side by side. The same for all parts, unless the executor spreads a model over others.
    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize;
    /// A zeroed buffer.
    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId>;
    /// Loads matrices from where they are stored, in this order, repacked as the kernels like it.
    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>>;
    /// Overwrites part of a buffer; `offset` in bytes.
    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()>;
    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()>;
    /// Prepares a plan whose step buffer is `step`, laid out by `layout`.
    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId>;
    /// Starts a plan of which the first bytes of a buffer are wanted: how many, if any. Returns
    /// whether a device works at it now, beside the processor. Before [`finish`](Self::finish)
    /// nothing but [`is_busy`](Self::is_busy) may be asked.
    fn start(&mut self, plan: PlanId, result: Option<(BufferId, usize)>) -> Result<bool>;
    /// Whether a device that was left at work still is.
    fn is_busy(&self) -> bool;
    /// Waits for the plan that was started last and reads the beginning of a buffer.
    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()>;
    /// The first bytes of a buffer where they lie, until something else is asked of the executor;
    /// `None` where the host would have to copy them.
    fn lend(&self, buffer: BufferId, bytes: usize) -> Option<&[u8]>;
}

/// Functions of every executor.
pub trait ExecutorExt: Executor {
    /// Loads a matrix that lies in memory.
    fn load_matrix(&mut self, label: &str, part: Part, matrix: &Matrix<'_>) -> Result<WeightId> {
        let job = LoadJob { label: label.to_owned(), part, matrix: StoredMatrix::of(matrix) };
        Ok(self.load(vec![job])?[0])
    }

    /// Runs a plan of which nothing is wanted at once.
    fn run(&mut self, plan: PlanId) -> Result<()> {
        self.start(plan, None)?;
        self.finish(None)
    }
}

impl<E: Executor + ?Sized> ExecutorExt for E {}

/// Reports of an executor about itself and its work. No pass depends on them.
pub trait Reports {
    fn report(&self) -> Report;
    /// Starts (or restarts) timing the kernels.
    fn start_profile(&mut self);
    /// Bytes a second that the device reads from its memory; `None` where that cannot be measured.
    fn read_bandwidth(&mut self) -> Option<f64>;
    /// Bytes a second from the host's memory to a device that has its own; `None` elsewhere.
    fn upload_bandwidth(&mut self) -> Option<f64>;
    /// From now on, or no longer, fills everything that a pass computes with [`poison`] before a
    /// pass whose rows are all new. Results stay the same unless a kernel leaves elements out.
    ///
    /// [`poison`]: super::poison
    fn set_poison(&mut self, on: bool);
}

/// Bytes of weights and of buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub weights: u64,
    pub buffers: u64,
}

/// See [`Reports`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Such as `cpu: avx512, 2 threads`.
    pub device: String,
    /// Device, driver and kernels, as far as a result can depend on them.
    pub identity: String,
    pub held: Held,
    /// The same with what was allocated for them and is not used.
    pub allocated: Held,
    /// Where the time of [`Executor::load_stored`] went; `None` where matrices were read first.
    pub loading: Option<Loading>,
    /// Work of an accelerator beside it, where there is one.
    pub assist: Option<AssistReport>,
    /// By label, since [`Reports::start_profile`]; empty before.
    pub kernels: Vec<KernelTime>,
}
