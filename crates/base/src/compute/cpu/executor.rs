//! Executor for plans on the CPU. All workers process the dispatch list together, with a barrier
//! only before a dispatch that needs rows of other workers.

use super::attention::{self, AttentionInput, MAX_SLOTS, Work};
use super::bandwidth::{probe_bytes, read_bandwidth};
use super::experts::{ExpertCall, distinct};
use super::idle::Idle;
use super::isa::Isa;
use super::linear::{self, OutputPlace, PackedMatrix};
use super::pool::{Pool, Worker};
use super::rows;
use crate::compute::act::Act;
use crate::compute::cache::KvFormat;
use crate::compute::executor::{Caps, Executor, Held, KernelTime, LoadJob, Report, Reports};
use crate::compute::memory::Buffers;
use crate::compute::op::{
    Commit, Embed, Experts, GateUp, Linear, LinearJob, Norm, Op, Prepare, Rope,
};
use crate::compute::operand::{BufferId, RowSet, WeightId};
use crate::compute::plan::{Dispatch, Part, Plan, PlanId};
use crate::compute::poison;
use crate::compute::reference;
use crate::compute::step::{StepLayout, StepView};
use crate::tensor::{Group, Matrix, is_place};
use crate::testing;
use anyhow::{Context, Result, bail};
use half::f16;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Rows of one prefill pass. Weights are read rarely, and the activations still fit in the cache.
pub const MAX_ROWS: usize = 128;

/// Options for running on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    pub threads: usize,
    /// Instruction set; `None` for the best one of the processor.
    pub isa: Option<Isa>,
    /// Runs the scalar reference after each dispatch, and returns an error at the first difference.
    pub check: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { threads: 1, isa: None, check: false }
    }
}

struct RecordedPlan {
    dispatches: Vec<Dispatch>,
    step: BufferId,
    layout: StepLayout,
}

/// The CPU as an [`Executor`].
pub struct CpuExecutor {
    isa: Isa,
    pool: Arc<Pool>,
    buffers: Buffers,
    packed: Vec<PackedMatrix>,
    /// Weights for the reference, which are only kept with `check`.
    canonical: Option<Vec<Matrix<'static>>>,
    plans: Vec<RecordedPlan>,
    work: Vec<Mutex<Work>>,
    spare: Vec<Mutex<Vec<f32>>>,
    profile: Option<Mutex<Vec<KernelTime>>>,
    /// Whether passes are poisoned, see [`Reports::set_poison`].
    poisons: bool,
    /// Label of the dispatches that a test omits in part.
    cut: Option<String>,
}

impl CpuExecutor {
    /// Creates an executor with its own threads.
    pub fn new(options: CpuOptions) -> Result<Self> {
        Ok(Self::on(Arc::new(Pool::new(options.threads.max(1))?), options))
    }

    /// Creates an executor on a pool that other executors also use, one at a time. A target and its
    /// drafter then never compete for cores. `options.threads` must be the threads of the pool.
    pub fn on(pool: Arc<Pool>, options: CpuOptions) -> Self {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        // All kernels depend on this check.
        assert!(isa.is_supported(), "this machine has no {isa}");
        CpuExecutor {
            isa,
            work: (0..pool.threads()).map(|_| Mutex::default()).collect(),
            spare: (0..pool.threads()).map(|_| Mutex::default()).collect(),
            pool,
            buffers: Buffers::default(),
            packed: Vec::new(),
            canonical: options.check.then(Vec::new),
            plans: Vec::new(),
            profile: None,
            poisons: false,
            cut: testing::fault(testing::CUT_WORK),
        }
    }

    /// Returns the bytes of weights and cache that a dispatch reads.
    fn bytes_read(&self, op: &Op, step: &StepView<'_>) -> u64 {
        let weight = |id: &WeightId| self.packed[id.0 as usize].bytes();
        let bytes: usize = match op {
            Op::Linear(linear) => linear.jobs.iter().map(|j| weight(&j.weight)).sum(),
            Op::GateUp(GateUp { gate, up, .. }) => weight(gate) + weight(up),
            Op::Experts(op) => {
                let all = weight(&op.first()) + op.second().map_or(0, |(up, _)| weight(&up));
                distinct(&self.buffers, op, step) * all / op.experts
            }
            Op::Attention(op) => {
                bases(step).map(|b| (b - op.first(b).min(b)) * op.kv.bytes_per_position()).sum()
            }
            _ => 0,
        };
        bytes as u64
    }

    /// Returns the multiply-adds of int8 values in a linear layer.
    fn macs(&self, op: &Op, step: &StepView<'_>) -> u64 {
        let macs = |weight: &WeightId, act: &Act, rows: RowSet| {
            let matrix = &self.packed[weight.0 as usize];
            if act.format.int8 { step.live(rows).len() * matrix.rows() * matrix.cols() } else { 0 }
        };
        let sum: usize = match op {
            Op::Linear(Linear { jobs, rows }) => {
                jobs.iter().map(|j| macs(&j.weight, &j.act, *rows)).sum()
            }
            Op::GateUp(GateUp { act_gate, gate, act_up, up, .. }) => {
                macs(gate, act_gate, RowSet::All) + macs(up, act_up, RowSet::All)
            }
            Op::Experts(op) => {
                let slots = RowSet::Slots(op.used);
                let up = op.second().map_or(0, |(up, act)| macs(&up, act, slots));
                (macs(&op.first(), &op.act, slots) + up) / op.experts
            }
            _ => 0,
        };
        sum as u64
    }

    /// Runs this worker's share of one dispatch.
    fn execute(&self, op: &Op, layout: StepLayout, step: &StepView<'_>, worker: &Worker) {
        let share = |n: usize| worker.share(n);
        let my_rows = |set: RowSet| {
            let live = step.live(set);
            let part = share(live.len());
            live.start + part.start..live.start + part.end
        };
        match op {
            Op::Embed(Embed { table, scale, out }) => {
                let table = &self.packed[table.0 as usize];
                for r in my_rows(RowSet::All).filter(|r| !is_place(step.tokens[*r])) {
                    // SAFETY: each row belongs to one worker.
                    let out: &mut [f32] =
                        unsafe { self.buffers.slice_mut(*out, r * table.cols(), table.cols()) };
                    table.dequantize_row(step.tokens[r] as usize, out);
                    out.iter_mut().for_each(|v| *v *= scale);
                }
            }
            Op::Concat(op) => {
                my_rows(RowSet::All).for_each(|r| reference::concat(&self.buffers, op, step, r))
            }
            Op::Norm(op) => my_rows(op.rows).for_each(|r| self.norm(op, step, r)),
            Op::Prepare(op) => self.prepare(op, step, worker),
            Op::Rope(op) => {
                let mut spare = self.spare[worker.index].lock().unwrap_or_else(|e| e.into_inner());
                for r in step.live(RowSet::All) {
                    rows::rope(
                        self.isa,
                        &self.buffers,
                        op,
                        layout.max_rows,
                        r,
                        share(op.kv.n_kv_heads),
                        &mut spare,
                    );
                }
            }
            Op::Linear(Linear { jobs, rows }) => {
                let live = step.live(*rows);
                for job in jobs.iter().filter(|_| !live.is_empty()) {
                    let tiles = share(self.packed[job.weight.0 as usize].tiles());
                    self.linear(job, live.clone(), tiles);
                }
            }
            Op::GateUp(op) => {
                let tiles = share(self.packed[op.gate.0 as usize].tiles());
                self.gate_up(op, step.live(RowSet::All), tiles);
            }
            Op::Choose(op) => {
                my_rows(RowSet::All).for_each(|r| reference::experts::choose(&self.buffers, op, r));
            }
            Op::Experts(op) => self.experts(op, step, worker),
            Op::Combine(op) => {
                my_rows(RowSet::All).for_each(|r| rows::combine(self.isa, &self.buffers, op, r));
            }
            Op::Attention(op) => {
                let max_rows = layout.max_rows;
                let call = AttentionInput { buffers: &self.buffers, op, max_rows, step };
                let mut work = self.work[worker.index].lock().unwrap_or_else(|e| e.into_inner());
                for (kv_head, slots) in attention_tasks(op.kv.n_kv_heads, call.slots(), worker) {
                    attention::attend(self.isa, &call, kv_head, slots, &mut work);
                }
            }
            Op::Cap(op) => {
                for r in step.live(RowSet::Selected) {
                    rows::cap(self.isa, &self.buffers, op, r, share(op.vocab));
                }
            }
            Op::Best(op) if worker.index == 0 => reference::best(&self.buffers, step, op),
            Op::Best(_) => {}
            Op::Commit(Commit { layers }) => {
                for kv in &layers[share(layers.len())] {
                    reference::commit(&self.buffers, kv, layout.max_rows, step);
                }
            }
        }
    }

    /// Prepares whole rows, or a part of each row.
    fn prepare(&self, op: &Prepare, step: &StepView<'_>, worker: &Worker) {
        let Prepare { input, act, rows } = op;
        let mut spare = self.spare[worker.index].lock().unwrap_or_else(|e| e.into_inner());
        let (live, groups) = (step.live(*rows), act.format.groups(act.cols));
        let (rows, groups) = match is_cut(op, step, worker.count) {
            true => (live, worker.share(groups)),
            false => {
                let part = worker.share(live.len());
                (live.start + part.start..live.start + part.end, 0..groups)
            }
        };
        for row in rows {
            let groups = groups.clone();
            rows::prepare(self.isa, &self.buffers, *input, act, row, groups, &mut spare);
        }
    }

    /// Computes some tiles of a product with the `live` rows.
    fn linear(&self, job: &LinearJob, live: Range<usize>, tiles: Range<usize>) {
        let matrix = &self.packed[job.weight.0 as usize];
        // SAFETY: activations were written before the last barrier; tiles are disjoint columns of
        // the output.
        unsafe {
            let act = reference::act_view(&self.buffers, &job.act, live.clone());
            let (start, len) = (live.start * matrix.rows(), live.len() * matrix.rows());
            let out = OutputPlace::of(self.buffers.part(job.out, start, len), matrix.rows());
            linear::linear(self.isa, matrix, &act, tiles, out);
        }
    }

    /// Computes some tiles of a gated product with the `live` rows.
    fn gate_up(&self, op: &GateUp, live: Range<usize>, tiles: Range<usize>) {
        let (gate, up) = (&self.packed[op.gate.0 as usize], &self.packed[op.up.0 as usize]);
        let cols = gate.rows();
        // SAFETY: as in `linear`.
        unsafe {
            let act_gate = reference::act_view(&self.buffers, &op.act_gate, live.clone());
            let act_up = reference::act_view(&self.buffers, &op.act_up, live.clone());
            let out = self.buffers.part(op.out, live.start * cols, live.len() * cols);
            let out = OutputPlace::of(out, cols);
            linear::gate_up(self.isa, gate, &act_gate, up, &act_up, tiles, 0, out);
        }
    }

    /// Computes a share of the products with chosen experts.
    fn experts(&self, op: &Experts, step: &StepView<'_>, worker: &Worker) {
        let matrix = |id: WeightId| &self.packed[id.0 as usize];
        let (first, second) = (matrix(op.first()), op.second().map(|(up, _)| matrix(up)));
        let mut spare = self.spare[worker.index].lock().unwrap_or_else(|e| e.into_inner());
        let (isa, buffers) = (self.isa, &self.buffers);
        ExpertCall { isa, buffers, op, first, second }.run(step, worker, &mut spare);
    }

    /// Returns the weights that a worker reads first in a dispatch.
    fn ahead(&self, op: &Op, worker: &Worker) -> Idle<'_> {
        let part = |weight: WeightId| {
            let matrix = &self.packed[weight.0 as usize];
            matrix.part(worker.share(matrix.tiles()))
        };
        match op {
            Op::Linear(Linear { jobs, .. }) => {
                Idle::in_turn(jobs.iter().map(|job| part(job.weight)))
            }
            Op::GateUp(GateUp { gate, up, .. }) => Idle::by_turns([*gate, *up].map(part)),
            _ => Idle::default(),
        }
    }

    fn norm(&self, op: &Norm, step: &StepView<'_>, r: usize) {
        let Norm { x, add, scale, w, eps, dim, out, rows } = op;
        let from = reference::source_row(*rows, step, r);
        // SAFETY: each row belongs to one worker. With `Selected`, several rows may read the same
        // `x`, and then no row writes it.
        unsafe {
            let add = add.map(|(y, w)| reference::rows::Added {
                out: self.buffers.slice(y, from * dim, *dim),
                w: self.buffers.slice(w, 0, *dim),
                scale: *scale,
            });
            let w = self.buffers.slice(*w, 0, *dim);
            let out = self.buffers.slice_mut(*out, r * dim, *dim);
            match rows {
                RowSet::All | RowSet::Slots(_) => rows::norm(
                    self.isa,
                    self.buffers.slice_mut(*x, from * dim, *dim),
                    add,
                    w,
                    *eps,
                    out,
                ),
                RowSet::Selected => {
                    let mut x = self.buffers.slice(*x, from * dim, *dim).to_vec();
                    rows::norm(self.isa, &mut x, add, w, *eps, out);
                }
            }
        }
    }

    /// Returns whether a worker runs its share of a dispatch. Only a test can omit the last share.
    fn does(&self, dispatch: &Dispatch, worker: &Worker) -> bool {
        self.cut.as_deref() != Some(dispatch.label) || worker.index + 1 < worker.count
    }

    /// Poisons buffers and the working memory of the workers.
    fn poison(&self, buffers: &[poison::Computed]) {
        for poison::Computed { id, .. } in buffers {
            // SAFETY: nothing runs between the pool's calls.
            poison::fill(unsafe { self.buffers.slice_mut(*id, 0, self.buffers.len(*id)) });
        }
        for (work, spare) in self.work.iter().zip(&self.spare) {
            work.lock().unwrap_or_else(|e| e.into_inner()).poison();
            let mut spare = spare.lock().unwrap_or_else(|e| e.into_inner());
            poison::fill(bytemuck::cast_slice_mut(&mut spare));
        }
    }

    fn run_all(&self, recorded: &RecordedPlan, step: &StepView<'_>) {
        let list = &recorded.dispatches;
        self.pool.run(&|worker| {
            let mut since = Instant::now();
            let mut ahead = Idle::default();
            for (i, dispatch) in list.iter().enumerate() {
                if self.does(dispatch, worker) {
                    self.execute(&dispatch.op, recorded.layout, step, worker);
                }
                if i == 0 || dispatch.reads_weights() {
                    let next = list[i + 1..].iter().find(|next| next.reads_weights());
                    ahead = next.map(|next| self.ahead(&next.op, worker)).unwrap_or_default();
                }
                let is_local = |dispatch: &Dispatch| match &dispatch.op {
                    Op::Prepare(op) => !is_cut(op, step, worker.count),
                    _ => dispatch.is_row_local(),
                };
                let next = list.get(i + 1);
                let together = next.is_some_and(|next| {
                    is_local(dispatch) && is_local(next) && dispatch.rows() == next.rows()
                });
                if next.is_some() && !together {
                    worker.barrier_with(|| ahead.fetch());
                }
                if let (0, Some(profile)) = (worker.index, &self.profile) {
                    let now = Instant::now();
                    let (bytes, macs) =
                        (self.bytes_read(&dispatch.op, step), self.macs(&dispatch.op, step));
                    let mut profile = profile.lock().unwrap_or_else(|e| e.into_inner());
                    let seconds = (now - since).as_secs_f64();
                    KernelTime { label: dispatch.label, calls: 1, seconds, bytes, macs }
                        .add_to(&mut profile);
                    since = now;
                }
            }
        });
    }

    /// Runs each dispatch and its reference on the same inputs, with poisoned outputs. Returns an
    /// error at the first difference.
    fn run_checked(
        &self,
        recorded: &RecordedPlan,
        step: &StepView<'_>,
        canonical: &[Matrix<'static>],
    ) -> Result<()> {
        for dispatch in &recorded.dispatches {
            let outputs = dispatch.op.outputs();
            let copy = || -> Vec<Vec<u8>> {
                let bytes = |id: &BufferId| {
                    // SAFETY: nothing runs between the pool's calls.
                    unsafe { self.buffers.slice(*id, 0, self.buffers.len(*id)) }.to_vec()
                };
                outputs.iter().map(bytes).collect()
            };
            let mut before = copy();
            let computed = poison::computed(std::slice::from_ref(dispatch));
            self.poison(&computed);
            reference::run(&dispatch.op, &self.buffers, canonical, recorded.layout, step);
            let mut twins = copy();
            for ((id, before), twin) in outputs.iter().zip(&mut before).zip(&mut twins) {
                if let Some(own) = computed.iter().find(|own| own.id == *id) {
                    poison::trace(before, twin, own.unit);
                }
                // SAFETY: as above.
                unsafe { self.buffers.slice_mut(*id, 0, before.len()) }.copy_from_slice(before);
            }
            self.pool.run(&|worker| {
                if self.does(dispatch, worker) {
                    self.execute(&dispatch.op, recorded.layout, step, worker);
                }
            });
            for (which, (twin, fast)) in twins.iter().zip(&copy()).enumerate() {
                let floats = float_bytes(&dispatch.op, outputs[which]);
                if let Some(at) = first_difference(fast, twin, floats) {
                    let layer = dispatch.layer.map_or(String::new(), |l| format!(" of layer {l}"));
                    let place = format!("first at byte {at} of output {which}");
                    bail!("kernel `{}`{layer} differs from its twin {place}", dispatch.label);
                }
            }
        }
        Ok(())
    }
}

/// Returns whether workers share each row that is prepared, because there are fewer rows than
/// workers. This needs groups that are rounded independently.
fn is_cut(op: &Prepare, step: &StepView<'_>, workers: usize) -> bool {
    let Prepare { act, rows, .. } = op;
    let apart = act.format.int8 && !act.format.hadamard && act.format.group != Group::Row;
    apart && step.live(*rows).len() < workers
}

/// Returns the bytes per float of an output. Returns `None` for integers and for int8 caches,
/// because their NaN has the same bits everywhere.
fn float_bytes(op: &Op, id: BufferId) -> Option<usize> {
    match op {
        Op::Prepare(prepare) if prepare.act.format.int8 && id != prepare.act.scales => None,
        Op::Rope(Rope { kv, .. }) if [kv.scratch_k, kv.scratch_v].contains(&id) => {
            (kv.format != KvFormat::Q8).then(|| kv.format.bytes())
        }
        Op::Choose(choose) if id == choose.chosen => None,
        Op::Commit(_) | Op::Best(_) => None,
        _ => Some(size_of::<f32>()),
    }
}

/// Returns the first byte of a number that differs from the reference. All NaN are equal.
fn first_difference(fast: &[u8], twin: &[u8], floats: Option<usize>) -> Option<usize> {
    let is_nan = |bytes: &[u8]| match *bytes {
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]).is_nan(),
        [a, b] => f16::from_le_bytes([a, b]).is_nan(),
        _ => false,
    };
    let unit = floats.unwrap_or(1);
    let mut pairs = fast.chunks_exact(unit).zip(twin.chunks_exact(unit));
    let same = |a, b| a == b || (is_nan(a) && is_nan(b) && !poison::is_left(a));
    pairs.position(|(a, b)| !same(a, b)).map(|i| i * unit)
}

/// Returns the number of committed positions of each sequence in the step.
fn bases(step: &StepView<'_>) -> impl Iterator<Item = usize> {
    (0..step.rows).filter(|row| step.roots[*row] as usize == *row).map(|row| step.base(row))
}

/// Returns this worker's (kv head, slots) pairs. Blocks are as large as possible while every worker
/// has work.
fn attention_tasks(
    heads: usize,
    slots: usize,
    worker: &Worker,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut size = MAX_SLOTS;
    while size > 1 && heads * slots.div_ceil(size) < 2 * worker.count {
        size /= 2;
    }
    let blocks = slots.div_ceil(size);
    (worker.index..heads * blocks).step_by(worker.count).map(move |task| {
        let start = task % blocks * size;
        (task / blocks, start..(start + size).min(slots))
    })
}

/// Adjacent channels of a key: two int8 codes are multiplied by two channels of a query at once.
pub fn key_block(format: KvFormat) -> usize {
    if format == KvFormat::Q8 { 2 } else { 1 }
}

impl Executor for CpuExecutor {
    fn caps(&self) -> Caps {
        Caps { max_rows: MAX_ROWS, lists_best: false, is_dry: false }
    }

    fn key_block(&self, _: Part) -> fn(KvFormat) -> usize {
        key_block
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        self.buffers.alloc(label, bytes)
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        let first = self.packed.len();
        for LoadJob { label, matrix, .. } in jobs {
            let mut load = || {
                matrix.format.check_cols(matrix.cols)?;
                if let Some(canonical) = &mut self.canonical {
                    canonical.push(matrix.read(0..matrix.rows)?);
                }
                PackedMatrix::load(&matrix, self.isa)
            };
            self.packed.push(load().with_context(|| format!("loading {label}"))?);
        }
        Ok((first..self.packed.len()).map(|i| WeightId(i as u32)).collect())
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        self.buffers.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.buffers.read(buffer, offset, bytes)
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        self.plans.push(RecordedPlan { dispatches: plan.dispatches, step, layout });
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    /// Runs the whole pass before it returns, because the processor could not do other work at the
    /// same time.
    fn start(&mut self, plan: PlanId, _: Option<(BufferId, usize)>) -> Result<bool> {
        let recorded = &self.plans[plan.0 as usize];
        // SAFETY: no kernel writes the step buffer.
        let step = recorded
            .layout
            .view(unsafe { self.buffers.slice(recorded.step, 0, recorded.layout.words()) });
        if self.poisons && step.first == 0 && step.rows > 0 {
            self.poison(&poison::before_pass(&recorded.dispatches, &step));
        }
        match &self.canonical {
            Some(canonical) => self.run_checked(recorded, &step, canonical)?,
            None => self.run_all(recorded, &step),
        }
        Ok(false)
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        result.map_or(Ok(()), |(buffer, bytes)| self.read(buffer, 0, bytes))
    }

    fn lend(&self, buffer: BufferId, bytes: usize) -> Option<&[u8]> {
        // SAFETY: writers exist only inside `start` and `write`, which borrow the executor
        // exclusively.
        Some(unsafe { self.buffers.slice(buffer, 0, bytes) })
    }
}

impl Reports for CpuExecutor {
    fn report(&self) -> Report {
        let threads = self.pool.threads();
        let s = if threads == 1 { "" } else { "s" };
        let held = Held {
            weights: self.packed.iter().map(|w| w.bytes() as u64).sum(),
            buffers: self.buffers.total() as u64,
        };
        let times =
            |p: &Mutex<Vec<KernelTime>>| p.lock().unwrap_or_else(|e| e.into_inner()).clone();
        Report {
            device: format!("cpu: {}, {threads} thread{s}", self.isa),
            identity: format!("cpu: {}", self.isa),
            held,
            allocated: held,
            kernels: self.profile.as_ref().map(times).unwrap_or_default(),
            ..Report::default()
        }
    }

    fn start_profile(&mut self) {
        self.profile = Some(Mutex::default());
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        Some(read_bandwidth(&self.pool, probe_bytes()) * 1e9)
    }

    /// Returns `None`, because weights stay in the host's memory.
    fn upload_bandwidth(&mut self) -> Option<f64> {
        None
    }

    fn set_poison(&mut self, on: bool) {
        self.poisons = on;
    }
}
