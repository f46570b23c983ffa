//! The executor seam: memory, recorded plans, and nothing else. `cpu::CpuExecutor` and
//! `vulkan::VulkanExecutor` implement it, `split::SplitExecutor` joins two of them, `dry::Dry` only
//! counts.

use super::dry::Pieces;
use super::plan::{BufferId, KvFormat, Part, Plan, PlanId, WeightId};
use super::step::StepLayout;
use crate::tensor::{Matrix, StoredMatrix};
use anyhow::{Result, bail};
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

/// What an accelerator beside the executor has done; the JSON result shows it as it is.
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
    /// What of it a reading thread read, and waited for the device to take what was read.
    pub reading: f64,
    pub waiting: f64,
}

/// A device that runs plans.
pub trait Executor: Send {
    /// Such as `cpu: avx512-vnni, 2 threads`.
    fn describe(&self) -> String;
    /// Most rows that one pass should carry: the prefill chunk.
    fn max_rows(&self) -> usize;
    /// A zeroed buffer.
    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId>;
    /// Loads a weight matrix, repacked as the kernels like it. `part` is where in the model it
    /// belongs, for executors that spread one.
    fn load(&mut self, label: &str, part: Part, matrix: &Matrix<'_>) -> Result<WeightId>;
    /// Whether the device unpacks stored matrices of this part itself: then
    /// [`load_stored`](Self::load_stored) takes them.
    fn unpacks(&self, _part: Part) -> bool {
        false
    }
    /// Loads matrices straight from where they are stored, in this order.
    fn load_stored(&mut self, _jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        bail!("this executor takes matrices that were read")
    }
    /// Where the time of [`load_stored`](Self::load_stored) went; `None` where it was not called.
    fn loading(&self) -> Option<Loading> {
        None
    }
    /// Overwrites part of a buffer; `offset` in bytes.
    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()>;
    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()>;
    /// Prepares a plan whose step buffer is `step`, laid out by `layout`.
    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId>;
    fn run(&mut self, plan: PlanId) -> Result<()>;
    /// Whether the device works beside the processor: then [`start`](Self::start) returns at once.
    fn runs_beside(&self) -> bool {
        false
    }
    /// Starts a plan of which the first bytes of a buffer are wanted: how many, if any. Until
    /// [`finish`](Self::finish) takes them nothing but [`write`](Self::write) may be called, for
    /// the plan after; the one that runs does not see it.
    fn start(&mut self, plan: PlanId, _result: Option<(BufferId, usize)>) -> Result<()> {
        self.run(plan)
    }
    /// Waits for the plan that was started last and reads the beginning of a buffer.
    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        result.map_or(Ok(()), |(buffer, bytes)| self.read(buffer, 0, bytes))
    }
    /// The first bytes of a buffer where they lie, until something else is asked of the executor;
    /// `None` where the host would have to copy them.
    fn lend(&self, _buffer: BufferId, _bytes: usize) -> Option<&[u8]> {
        None
    }
    /// Whether the plan that was started last still runs.
    fn is_busy(&self) -> bool {
        false
    }
    /// Channels of a key of this layer that lie together in the cache: 1 keeps each channel's
    /// positions side by side.
    fn key_block(&self, _format: KvFormat, _layer: u16) -> usize {
        1
    }
    /// Whether only shapes count: then matrices come without their contents, and plans never run.
    fn is_dry(&self) -> bool {
        false
    }
    /// Whether lists of the largest logits are worth asking for, instead of the logits.
    fn lists_best(&self) -> bool {
        false
    }
    /// Bytes a second that the device reads from its memory; `None` where that cannot be measured.
    fn read_bandwidth(&mut self) -> Option<f64> {
        None
    }
    /// Bytes a second from the host's memory to a device that has its own; `None` elsewhere.
    fn upload_bandwidth(&mut self) -> Option<f64> {
        None
    }
    /// Bytes of weights and of buffers.
    fn memory(&self) -> (u64, u64);
    /// The same with what was allocated for them and is not used.
    fn allocated(&self) -> (u64, u64) {
        self.memory()
    }
    /// What an accelerator has done beside it, where there is one.
    fn assist(&self) -> Option<AssistReport> {
        None
    }
    /// What a dry executor counted, piece by piece.
    fn pieces(&self) -> Pieces {
        Pieces::default()
    }
    /// Starts (or restarts) timing each kernel label; `profile` returns what was gathered.
    fn start_profile(&mut self) {}
    fn profile(&self) -> Vec<KernelTime> {
        Vec::new()
    }
}
