//! The executor interface: memory and recorded plans.
//!
//! `cpu::CpuExecutor` and `vulkan::VulkanExecutor` implement it. `split::SplitExecutor` joins two
//! executors. `dry::Dry` only counts memory.
//!
//! The trait has no default methods, so a wrapping executor handles each method explicitly.
//! [`ExecutorExt`] adds functions built on those methods.

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
    /// Bytes of weights and KV cache that were read, without activations.
    pub bytes: u64,
    /// Multiply-adds of int8 values in linear layers.
    pub macs: u64,
}

impl KernelTime {
    /// Adds this time to the entry of its label in `times`.
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

/// Work of an accelerator next to the executor. The JSON output includes it unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AssistReport {
    /// Name, such as `host model with the kernel's Rust twin`.
    pub device: String,
    /// Whether hardware computed it, as opposed to a software model of the hardware.
    pub silicon: bool,
    /// Reason why the accelerator was disabled, if it was.
    pub given_up: Option<String>,
    pub jobs: u64,
    /// Pages sealed, pages read by jobs, and (row, page) pairs attended. A page is one of one
    /// layer, with all its heads.
    pub pages_sealed: u64,
    pub pages_read: u64,
    pub row_pages: u64,
    /// Bytes of keys and values that jobs read.
    pub bytes: u64,
    /// Jobs that were recomputed on the processor and compared.
    pub checks: u64,
}

/// A stored matrix to load.
pub struct LoadJob<'a> {
    pub label: String,
    /// Part of the model that the matrix belongs to.
    pub part: Part,
    pub matrix: StoredMatrix<'a>,
}

/// Breakdown of the time that loading stored matrices took, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loading {
    /// Opening the device.
    pub opening: f64,
    /// Allocating device memory and compiling kernels in the meantime.
    pub preparing: f64,
    /// From reading the first byte to placing the last one.
    pub moving: f64,
    /// Parts of `moving` that a reader thread spent reading, and waiting for the device to accept
    /// the bytes.
    pub reading: f64,
    pub waiting: f64,
}

/// Properties of an executor, constant for its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Most rows per pass: the prefill chunk size.
    pub max_rows: usize,
    /// Whether lists of the largest logits are faster to read than all logits.
    pub lists_best: bool,
    /// Whether only shapes count: matrices are loaded without contents and plans never run.
    pub is_dry: bool,
}

/// A device that runs plans.
pub trait Executor: Reports + Send {
    fn caps(&self) -> Caps;
    /// Returns the function from cache format to the number of contiguous channels of a key.
    ///
    /// With 1, the positions of each channel are contiguous. All parts have the same value, unless
    /// the executor spreads a model over others.
    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize;
    /// Allocates a zeroed buffer.
    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId>;
    /// Loads stored matrices in this order, repacked for the kernels.
    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>>;
    /// Overwrites part of a buffer; `offset` in bytes.
    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()>;
    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()>;
    /// Prepares a plan. `step` is its step buffer, with the layout `layout`.
    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId>;
    /// Starts a plan. `result` is a buffer and the number of its first bytes that will be read.
    ///
    /// Returns whether a device is now working in parallel with the processor. Until
    /// [`finish`](Self::finish), the caller may only call [`is_busy`](Self::is_busy).
    fn start(&mut self, plan: PlanId, result: Option<(BufferId, usize)>) -> Result<bool>;
    /// Returns whether the device still works on the started plan.
    fn is_busy(&self) -> bool;
    /// Waits for the plan that was started last and reads the first bytes of a buffer.
    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()>;
    /// Borrows the first bytes of a buffer without a copy, until the next call.
    ///
    /// Returns `None` if the host would have to copy them.
    fn lend(&self, buffer: BufferId, bytes: usize) -> Option<&[u8]>;
}

/// Convenience functions of every executor.
pub trait ExecutorExt: Executor {
    /// Loads a matrix from host memory.
    fn load_matrix(&mut self, label: &str, part: Part, matrix: &Matrix<'_>) -> Result<WeightId> {
        let job = LoadJob { label: label.to_owned(), part, matrix: StoredMatrix::of(matrix) };
        Ok(self.load(vec![job])?[0])
    }

    /// Runs a plan to its end and reads nothing.
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
    /// Bytes per second that the device reads from its memory; `None` if unmeasurable.
    fn read_bandwidth(&mut self) -> Option<f64>;
    /// Bytes per second from host memory to a device with its own memory; else `None`.
    fn upload_bandwidth(&mut self) -> Option<f64>;
    /// Turns poisoning on or off.
    ///
    /// When on, a pass with only new rows first fills all its outputs with [`poison`]. Results stay
    /// the same unless a kernel leaves elements out.
    ///
    /// [`poison`]: super::poison
    fn set_poison(&mut self, on: bool);
}

/// Bytes held by weights and by buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub weights: u64,
    pub buffers: u64,
}

/// Report of an executor, see [`Reports`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Description such as `cpu: avx512, 2 threads`.
    pub device: String,
    /// Versions of device, driver and kernels that a result can depend on.
    pub identity: String,
    pub held: Held,
    /// Allocated bytes, including unused parts of allocations.
    pub allocated: Held,
    /// Time spent in [`Executor::load_stored`]; `None` if matrices were first read into memory.
    pub loading: Option<Loading>,
    /// Work of an accelerator next to the executor, if there is one.
    pub assist: Option<AssistReport>,
    /// Times by label since [`Reports::start_profile`]; empty before it.
    pub kernels: Vec<KernelTime>,
}
