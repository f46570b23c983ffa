//! The executor: runs plans on a Vulkan device. A plan is recorded once per bucket of rows and
//! pages. A run is one or several submissions ([`cut`]).

mod commands;
mod cut;
mod dense;
mod fill;
mod footprint;
mod matrix_probe;
mod pieces;
mod product;
mod speed;
mod staging;
mod timing;
mod upload;
mod viterbi;
mod workgroups;

use crate::device::barrier::{barrier, host_barrier};
use crate::device::choose::Choice;
use crate::device::matrix;
use crate::device::memory::{Arena, ArenaUse, Block, Place, Span};
use crate::device::pipeline::{self, Pipelines};
use crate::device::queue::Queue;
use crate::device::{DeviceInfo, Gpu};
use crate::lower::finish::Epilogues;
use crate::lower::layout::{DeviceMatrix, SideLayout};
use crate::lower::sizes::{OwnSizes, key_block};
use crate::lower::{Bucket, Call, Lowering, Own, by_shape};
use anyhow::{Context, Result, ensure};
use ash::vk;
use commands::read_back;
pub use cut::LIMIT;
use cut::{CallSize, Cut};
pub use dense::VulkanDense;
use footprint::{READBACK, RESULTS};
pub use footprint::{VulkanFootprint, blocks};
use gemma_base::compute::dry::Pieces;
use gemma_base::compute::{
    BufferId, Caps, Commit, Dispatch, Executor, Held, KvFormat, KvLayer, LoadJob, Loading, Op,
    Part, Plan, PlanId, Report, Reports, StepLayout, WeightId,
};
use gemma_base::testing;
pub use pieces::MadeUp;
use pieces::explained;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use timing::Timing;
use upload::Uploader;
pub use viterbi::VulkanCoding;
use workgroups::{Unordered, Workgroups, axis};

/// Most bytes of one `vkCmdUpdateBuffer`.
const UPDATE: usize = 65536;
/// Most rows per workgroup in attention, which reads keys once for all of them, and in layers with
/// trellis codes. A driver on the processor gains little from many rows, and needs ten seconds to a
/// minute to compile each of these kernels.
pub const BLOCK_ROWS: usize = 8;
const BLOCK_ROWS_OF_CPU: usize = 2;

struct VulkanPlan {
    dispatches: Vec<Dispatch>,
    step: BufferId,
    layout: StepLayout,
    passes: HashMap<Bucket, RecordedPass>,
}

/// The recorded commands of a plan for one bucket.
#[derive(Default)]
struct RecordedPass {
    /// One command buffer per submission, in order.
    pieces: Vec<vk::CommandBuffer>,
    /// Multiply-adds of each.
    works: Vec<f64>,
    /// End of each piece; empty if only the last piece of the pass is recorded.
    ends: Vec<Cut>,
    /// Sizes of its calls.
    sizes: Vec<CallSize>,
    /// Seconds of the pieces that are not recorded.
    spent: f64,
    /// Submission of its last piece in the last run.
    submission: u64,
    /// Seconds of the last run with a known time.
    seconds: Option<f64>,
}

/// A plan that was started and not waited for.
struct SubmittedPlan {
    plan: PlanId,
    bucket: Bucket,
    rows: usize,
    at: Instant,
    submission: u64,
    /// Buffer that the submission copies to the host, and the number of its first bytes to copy.
    result: Option<(BufferId, usize)>,
}

/// A Vulkan device as an [`Executor`].
pub struct VulkanExecutor {
    // Dropped in this order: each field before the fields that it uses.
    queue: Queue,
    pipelines: Arc<Mutex<Pipelines>>,
    timing: Option<Timing>,
    uploader: Option<Uploader>,
    readback: Block,
    /// Results of the started plan. Other reads use `readback` in the meantime.
    results: Block,
    started: Option<SubmittedPlan>,
    weights: Arena,
    buffers: Arena,
    spans: Vec<Span>,
    addresses: Vec<u64>,
    matrices: Vec<DeviceMatrix>,
    plans: Vec<VulkanPlan>,
    /// Seconds per multiply-add of the slowest pass so far.
    slowest: Option<f64>,
    made_up: Option<Arc<Mutex<MadeUp>>>,
    own: Option<Own>,
    epilogues: Epilogues,
    /// Whether elements of matrices are in the lanes that `linear_few` and `linear_many` expect.
    known_elements: bool,
    /// Most rows per block of attention, and of a layer with trellis codes.
    block_rows: usize,
    /// Whether passes are poisoned, see [`Reports::set_poison`].
    poisons: bool,
    /// Seed for the order of workgroups, for tests.
    shuffle: Option<u64>,
    /// Label of calls that run without their last workgroups, for a test.
    cut: Option<String>,
    loading: Loading,
    /// Small writes queued for the next submission.
    pending: Vec<(BufferId, usize, Vec<u8>)>,
    /// Content of each step buffer.
    steps: HashMap<BufferId, Vec<u8>>,
    gpu: Arc<Gpu>,
}

impl VulkanExecutor {
    /// Opens a device, or shares it with another executor of this process.
    pub fn open(choice: Choice) -> Result<VulkanExecutor> {
        VulkanExecutor::open_for(choice, true)
    }

    /// Like [`open`](Self::open). Without `matrices`, the driver is not queried for its matrix
    /// instructions. Results have the same bits.
    pub fn open_for(choice: Choice, matrices: bool) -> Result<VulkanExecutor> {
        let start = Instant::now();
        let (gpu, pipelines) = pipeline::open(choice, matrices)?;
        let mut queue = Queue::new(&gpu)?;
        let results = Block::new(&gpu, "results of a pass", RESULTS, Place::Readback)?;
        let known_elements = gpu.matrices == Some(matrix::SHAPE)
            && gpu.info.subgroup == 32
            && testing::fault(testing::GENERAL_KERNELS).is_none()
            && matrix_probe::are_as_expected(
                &mut queue,
                &mut pipeline::lock(&pipelines),
                &results,
            )?;
        Ok(VulkanExecutor {
            known_elements,
            queue,
            pipelines,
            timing: None,
            uploader: None,
            readback: Block::new(&gpu, "results", READBACK, Place::Readback)?,
            results,
            started: None,
            weights: Arena::new(&gpu, ArenaUse::Weights),
            buffers: Arena::new(&gpu, ArenaUse::Buffers),
            spans: Vec::new(),
            addresses: Vec::new(),
            matrices: Vec::new(),
            plans: Vec::new(),
            slowest: None,
            made_up: None,
            own: None,
            epilogues: Epilogues::default(),
            block_rows: if gpu.info.is_cpu { BLOCK_ROWS_OF_CPU } else { BLOCK_ROWS },
            poisons: false,
            shuffle: testing::fault(testing::SHUFFLE)
                .and_then(|seed| seed.parse().ok())
                .filter(|_| gpu.info.divides_calls),
            cut: testing::fault(testing::CUT_WORK),
            loading: Loading { opening: start.elapsed().as_secs_f64(), ..Loading::default() },
            pending: Vec::new(),
            steps: HashMap::new(),
            gpu,
        })
    }

    /// Returns the address of a buffer on the device.
    pub(crate) fn address(&self, id: BufferId) -> u64 {
        self.addresses[id.0 as usize]
    }

    fn block(&self, span: &Span) -> &Block {
        match span.arena {
            ArenaUse::Weights => &self.weights.blocks[span.block],
            ArenaUse::Buffers => &self.buffers.blocks[span.block],
        }
    }

    /// Uses blocks of rows as large as on a GPU, even on the processor. For tests of the kernels.
    pub fn with_large_blocks(self) -> Self {
        VulkanExecutor { block_rows: BLOCK_ROWS, ..self }
    }

    /// Plans memory for the pieces that a dry run counted, so that no byte is wasted.
    pub fn expect(&mut self, pieces: &Pieces) {
        self.weights.expect(&pieces.weights);
        self.buffers.expect(&pieces.buffers);
    }

    /// Returns the executor's own buffers. Reallocates them if they are too small for the plan.
    fn own(&mut self, plan: &Plan, layout: StepLayout) -> Result<Own> {
        let old = self.own.map(|own| own.sizes);
        let sizes = OwnSizes::of(plan, layout, |w| self.matrices[w.0 as usize].rows)
            .and(old.unwrap_or_default());
        if let Some(own) = self.own.filter(|own| own.sizes == sizes) {
            return Ok(own);
        }
        let own = Own::of(sizes, |(label, bytes)| self.alloc(label, bytes))?;
        self.epilogues = Epilogues::default();
        self.own = Some(own);
        // Commits of earlier plans must read their layers from the new buffer.
        let earlier: Vec<Vec<KvLayer>> =
            self.plans.iter().flat_map(|recorded| committed(&recorded.dispatches)).collect();
        earlier.iter().try_for_each(|layers| self.write_layers(layers, own))?;
        Ok(own)
    }

    /// Writes the addresses of the caches that commits write.
    fn write_layers(&mut self, layers: &[KvLayer], own: Own) -> Result<()> {
        let mut bytes = Vec::new();
        for kv in by_shape(layers).concat() {
            for id in [kv.k, kv.v, kv.scratch_k, kv.scratch_v] {
                bytes.extend(self.addresses[id.0 as usize].to_le_bytes());
            }
            bytes.extend((kv.pages.count as u32).to_le_bytes());
            bytes.extend((kv.all_pages as u32).to_le_bytes());
            bytes.extend((kv.table as u32).to_le_bytes());
            bytes.extend([0; 4]);
        }
        self.write(own.layers, 0, &bytes)
    }

    /// Returns the kernel of each call, compiling missing ones.
    fn kernels(&self, calls: &[Call]) -> Result<(vk::PipelineLayout, Vec<vk::Pipeline>)> {
        let mut made = pipeline::lock(&self.pipelines);
        let divisible = self.shuffle.is_some();
        let get = if divisible { Pipelines::get_divisible } else { Pipelines::get };
        made.prepare(calls.iter().map(|call| (call.shader, &call.constants)), divisible)?;
        let kernels = calls
            .iter()
            .map(|call| get(&mut made, call.shader, &call.constants))
            .collect::<Result<_>>()?;
        made.save();
        Ok((made.layout, kernels))
    }

    /// Returns the calls of a recorded plan.
    pub(crate) fn calls_of(&mut self, plan: PlanId, bucket: Bucket) -> Result<Vec<Call>> {
        let mut calls = self.uncut_calls(plan, bucket)?;
        for call in calls.iter_mut().filter(|call| self.cut.as_deref() == Some(call.label)) {
            call.groups[axis(call.groups)] -= 1;
        }
        calls.retain(|call| !call.groups.contains(&0));
        Ok(calls)
    }

    fn uncut_calls(&mut self, plan: PlanId, bucket: Bucket) -> Result<Vec<Call>> {
        let mut calls = self.calls(plan, bucket, true)?;
        let own = self.own.expect("made when the first plan was recorded");
        let Some(new) = self.epilogues.place(
            &mut calls,
            own.sizes.epilogues,
            self.addresses[own.epilogues.0 as usize],
        ) else {
            return self.calls(plan, bucket, false);
        };
        new.iter().try_for_each(|(at, bytes)| self.write(own.epilogues, *at, bytes))?;
        Ok(calls)
    }

    fn calls(&self, plan: PlanId, bucket: Bucket, finish: bool) -> Result<Vec<Call>> {
        let recorded = &self.plans[plan.0 as usize];
        let lowering = Lowering {
            info: &self.gpu.info,
            matrix_shape: self.gpu.matrices,
            known_elements: self.known_elements,
            addresses: &self.addresses,
            matrices: &self.matrices,
            step: recorded.step,
            max_rows: recorded.layout.max_rows,
            finish,
            block_rows: self.block_rows,
            own: self.own.expect("made when the first plan was recorded"),
        };
        lowering.calls(&recorded.dispatches, bucket)
    }

    /// Runs calls one after the other, outside of a plan.
    pub(crate) fn run_calls(&mut self, calls: &[Call]) -> Result<()> {
        let (layout, pipelines) = self.kernels(calls)?;
        let shuffle = self.shuffle;
        self.stage(None)?;
        let done = self.queue.once(|device, commands| {
            for (call, pipeline) in calls.iter().zip(&pipelines) {
                barrier(device, commands);
                let mut parts = Unordered::new(shuffle);
                parts.add(*pipeline, call, Workgroups::all(call));
                parts.record(device, commands, layout);
            }
            barrier(device, commands);
        })?;
        self.queue.wait(done)
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.gpu.info
    }

    /// Returns the codes and the side of a matrix in device memory. For tests.
    pub fn weight_bytes(&mut self, id: WeightId) -> Result<[Vec<u8>; 2]> {
        let m = self.matrices[id.0 as usize];
        let side = SideLayout::of(m.format, m.rows, m.cols)?.bytes();
        let mut parts = [(m.codes, vec![0; m.bytes as usize - side]), (m.side, vec![0; side])];
        for (address, bytes) in &mut parts {
            let holds = |b: &&Block| (b.address..b.address + b.size).contains(address);
            let block = self.weights.blocks.iter().find(holds).context("no such matrix")?;
            let (from, start) = (block.buffer, *address - block.address);
            for (i, part) in bytes.chunks_mut(READBACK as usize).enumerate() {
                read_back(
                    &mut self.queue,
                    from,
                    start + i as u64 * READBACK,
                    &self.readback,
                    part,
                )?;
            }
        }
        Ok(parts.map(|(_, bytes)| bytes))
    }

    /// Returns the bytes requested from the device, in arenas and otherwise: now, and at the peak.
    pub fn requested(&self) -> (u64, u64) {
        self.gpu.requested.bytes()
    }
}

/// Returns the layers of each commit of a plan.
fn committed(dispatches: &[Dispatch]) -> impl Iterator<Item = Vec<KvLayer>> {
    dispatches.iter().filter_map(|dispatch| match &dispatch.op {
        Op::Commit(Commit { layers }) => Some(layers.clone()),
        _ => None,
    })
}

impl Executor for VulkanExecutor {
    fn caps(&self) -> Caps {
        Caps { max_rows: self.gpu.info.max_rows(), lists_best: true, is_dry: false }
    }

    fn key_block(&self, _: Part) -> fn(KvFormat) -> usize {
        key_block
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let span = self.buffers.alloc(label, bytes as u64)?;
        self.clear(span)?;
        self.spans.push(span);
        self.addresses.push(span.address);
        Ok(BufferId(self.spans.len() as u32 - 1))
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        let uploader = self.uploader.get_or_insert_with(|| Uploader::new(&self.gpu));
        let loaded = uploader.load(
            jobs,
            &mut self.weights,
            &mut self.queue,
            &self.pipelines,
            &mut self.loading,
        );
        if loaded.is_err() {
            // Running submissions may read staging memory. Staged commands are not submitted first,
            // because the device may be lost.
            let _ = self.queue.wait(self.queue.upcoming() - 1);
            self.uploader = None;
        }
        let loaded = loaded?;
        let first = self.matrices.len();
        self.matrices.extend(loaded);
        Ok((first..self.matrices.len()).map(|i| WeightId(i as u32)).collect())
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        let span = self.spans[buffer.0 as usize];
        ensure!(
            (offset + bytes.len()) as u64 <= span.bytes,
            "write of {} bytes at {offset} leaves the buffer",
            bytes.len()
        );
        ensure!(
            offset.is_multiple_of(4) && bytes.len().is_multiple_of(4),
            "writes must have whole words"
        );
        if let Some(step) = self.steps.get_mut(&buffer) {
            step[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        self.pending.push((buffer, offset, bytes.to_vec()));
        if self.pending.iter().map(|p| p.2.len()).sum::<usize>() > 4 << 20 {
            self.stage(None)?;
            self.queue.flush()?;
        }
        Ok(())
    }

    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let span = self.spans[buffer.0 as usize];
        ensure!(
            (offset + bytes.len()) as u64 <= span.bytes,
            "read of {} bytes at {offset} leaves the buffer",
            bytes.len()
        );
        self.stage(None)?;
        let from = self.block(&span).buffer;
        for (i, part) in bytes.chunks_mut(READBACK as usize).enumerate() {
            let start = span.offset + (offset as u64) + i as u64 * READBACK;
            read_back(&mut self.queue, from, start, &self.readback, part)?;
        }
        Ok(())
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        let own = self.own(&plan, layout)?;
        let layers: Vec<Vec<KvLayer>> = committed(&plan.dispatches).collect();
        layers.iter().try_for_each(|layers| self.write_layers(layers, own))?;
        self.steps.entry(step).or_insert_with(|| vec![0; layout.words() * 4]);
        if let Some(uploader) = self.uploader.take() {
            let start = Instant::now();
            self.queue.wait_all()?;
            drop(uploader);
            self.loading.moving += start.elapsed().as_secs_f64();
        }
        self.plans.push(VulkanPlan {
            dispatches: plan.dispatches,
            step,
            layout,
            passes: HashMap::new(),
        });
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    fn start(&mut self, plan: PlanId, result: Option<(BufferId, usize)>) -> Result<bool> {
        let recorded = &self.plans[plan.0 as usize];
        let words: &[u32] = bytemuck::cast_slice(&self.steps[&recorded.step]);
        let step = recorded.layout.view(words);
        let (live, bucket) = (step.rows - step.first, Bucket::of_step(&step));
        if self.poisons && step.first == 0 && live > 0 {
            self.poison_pass(plan)?;
        }
        if self.timing.is_some() {
            self.queue.wait_all()?;
        }
        self.prepare(plan, bucket, live)?;
        self.timing.iter().for_each(Timing::reset);
        self.started = None;
        let at = Instant::now();
        let pass = &self.plans[plan.0 as usize].passes[&bucket];
        let (pieces, works) = (pass.pieces.clone(), pass.works.clone());
        self.stage(Some(pieces[0]))?;
        for (commands, before) in pieces[1..].iter().zip(&works) {
            self.submit(*before).map_err(|e| explained(e, live))?;
            self.queue.append(*commands);
        }
        let pass = self.plans[plan.0 as usize].passes.get_mut(&bucket).expect("prepared above");
        pass.submission = self.queue.upcoming();
        let last = works[works.len() - 1];
        if live == 0 {
            // A commit has no results to wait for, so it becomes part of the next submission.
            self.put_off(last);
            return Ok(false);
        }
        let result = result.filter(|(_, bytes)| *bytes as u64 <= RESULTS);
        if let Some((buffer, bytes)) = result {
            let span = self.spans[buffer.0 as usize];
            ensure!(bytes as u64 <= span.bytes, "a result of {bytes} bytes leaves the buffer");
            let (from, to) = (self.block(&span).buffer, self.results.buffer);
            let copy =
                vk::BufferCopy { src_offset: span.offset, dst_offset: 0, size: bytes as u64 };
            // SAFETY: both ranges were checked, and an earlier reader of the results has waited for
            // them.
            let copied = |device: &ash::Device, commands| unsafe {
                device.cmd_copy_buffer(commands, from, to, &[copy]);
                host_barrier(device, commands);
            };
            self.queue.stage(copied, None)?;
        }
        let submission = self.submit(last).map_err(|e| explained(e, live))?;
        self.started = Some(SubmittedPlan { plan, bucket, rows: live, at, submission, result });
        Ok(true)
    }

    /// Waits for the started plan. Does not wait for a commit that is part of the next submission.
    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        let Some(started) = self.started.take() else {
            return result.map_or(Ok(()), |(buffer, bytes)| self.read(buffer, 0, bytes));
        };
        // If the device is done before the wait, the time is only an upper bound.
        let waits = !self.queue.is_done(started.submission);
        self.queue.wait(started.submission).map_err(|e| explained(e, started.rows))?;
        let clock = started.at.elapsed().as_secs_f64();
        let pass = &self.plans[started.plan.0 as usize].passes[&started.bucket];
        let seconds = self.seconds(pass, clock);
        if waits || pass.seconds.is_none_or(|known| seconds < known) {
            let work: f64 = pass.sizes.iter().map(|s| s.work as f64).sum();
            self.slowest = Some(self.slowest.unwrap_or(0.0).max(seconds / work.max(1.0)));
            let pass = self.plans[started.plan.0 as usize]
                .passes
                .get_mut(&started.bucket)
                .expect("it was started");
            (pass.seconds, pass.spent) = (Some(seconds), 0.0);
        }
        if self.timing.is_some() {
            let calls = self.calls_of(started.plan, started.bucket)?;
            self.timing.iter_mut().try_for_each(|t| t.gather(&calls))?;
        }
        match result {
            None => Ok(()),
            Some((buffer, bytes))
                if started.result.is_some_and(|(id, n)| id == buffer && bytes.len() <= n) =>
            {
                // SAFETY: the wait above ended the copy, which is part of the submission.
                bytes.copy_from_slice(unsafe { self.results.bytes(0, bytes.len()) });
                Ok(())
            }
            Some((buffer, bytes)) => self.read(buffer, 0, bytes),
        }
    }

    fn is_busy(&self) -> bool {
        self.started.as_ref().is_some_and(|started| !self.queue.is_done(started.submission))
    }

    /// Lends nothing, because results are copied to host memory.
    fn lend(&self, _: BufferId, _: usize) -> Option<&[u8]> {
        None
    }
}

impl Reports for VulkanExecutor {
    fn report(&self) -> Report {
        let (weights, buffers) = (&self.weights, &self.buffers);
        Report {
            device: format!("vulkan: {} ({})", self.gpu.info.name, self.gpu.info.driver),
            identity: format!("vulkan: {}, {:?}", self.gpu.info.identity, self.gpu.matrices),
            held: Held { weights: weights.total(), buffers: buffers.total() },
            allocated: Held { weights: weights.allocated(), buffers: buffers.allocated() },
            loading: Some(self.loading),
            assist: None,
            kernels: self.timing.as_ref().map_or_else(Vec::new, |t| t.times.clone()),
        }
    }

    fn start_profile(&mut self) {
        // Commands are recorded again, with timestamps.
        if self.queue.wait_all().is_ok() {
            for commands in self
                .plans
                .iter_mut()
                .flat_map(|p| p.passes.drain())
                .flat_map(|(_, pass)| pass.pieces)
            {
                self.queue.free(commands);
            }
            self.timing = Timing::new(&self.gpu).ok();
        }
    }

    fn set_poison(&mut self, on: bool) {
        self.poisons = on;
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.measure_reads()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.measure_uploads()
    }
}
