//! One model on two executors: the first layers and the head on a device, the other layers on the
//! host.
//!
//! The head is on the device with the first layer: it is the largest matrix, every pass reads all
//! of it, and the lists of the best logits are made there. A table that is both embedding and head
//! is there too. A separate embedding table stays on the host, where looking up rows is cheap. A
//! pass therefore crosses twice: with the residual stream after the device's layers, and with the
//! normed rows that the head reads. Prepared activations never cross, since their layout depends on
//! the executor.
//!
//! Buffers are allocated when the first plan that uses them is recorded, on the sides that use
//! them.
//!
//! `start` runs a plan up to the first piece that a device computes in the background. The
//! processor is then free for the caller. `finish` runs the remaining pieces.

pub mod cut;

use super::cache::KvFormat;
use super::executor::{Caps, Executor, Held, LoadJob, Report, Reports};
use super::op::{Commit, Op};
use super::operand::{BufferId, RowSet, WeightId};
use super::plan::{Dispatch, Part, Plan, PlanId};
use super::step::StepLayout;
use super::uses::Use;
use anyhow::{Context, Result, ensure};
pub use cut::Side;
use cut::{Piece, cut};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

struct SplitBuffer {
    label: String,
    bytes: usize,
    /// Its buffers on the device and on the host, if allocated.
    at: [Option<BufferId>; 2],
    /// Writes that came before the buffer was allocated.
    early: Vec<(usize, Vec<u8>)>,
    /// Side with the newest content after a plan has run.
    home: Side,
}

/// A piece of a recorded plan.
enum RecordedPiece {
    Run(Side, PlanId),
    Copy(BufferId, RowSet, Side),
}

struct SplitPass {
    pieces: Arc<[RecordedPiece]>,
    step: BufferId,
    layout: StepLayout,
}

/// State of a plan that was started.
struct PlanProgress {
    plan: PlanId,
    /// Index of the next piece, and the side that still works on the one before.
    next: usize,
    running: Option<Side>,
    /// Rows of the step: all live rows, and selected rows.
    live: [Range<usize>; 2],
}

/// Two executors as one.
pub struct SplitExecutor {
    sides: [Box<dyn Executor>; 2],
    /// Layers on the device, and layers in total.
    layers: [u16; 2],
    buffers: Vec<SplitBuffer>,
    weights: Vec<(Side, WeightId)>,
    passes: Vec<SplitPass>,
    /// The caller's last write to each step buffer.
    steps: HashMap<BufferId, Vec<u32>>,
    crossing: Vec<u8>,
    begun: Option<PlanProgress>,
}

impl SplitExecutor {
    /// Assigns the first `on_device` of `layers` layers and the head to `device`.
    pub fn new(
        device: Box<dyn Executor>,
        host: Box<dyn Executor>,
        on_device: u16,
        layers: u16,
    ) -> SplitExecutor {
        SplitExecutor {
            sides: [device, host],
            layers: [on_device.min(layers), layers],
            buffers: Vec::new(),
            weights: Vec::new(),
            passes: Vec::new(),
            steps: HashMap::new(),
            crossing: Vec::new(),
            begun: None,
        }
    }

    /// Returns one of the two executors.
    pub fn side(&self, side: Side) -> &dyn Executor {
        self.sides[side as usize].as_ref()
    }

    fn side_of(&self, part: Part) -> Side {
        match part {
            Part::Layer(layer) if layer >= self.layers[0] => Side::Host,
            Part::Embedding => Side::Host,
            Part::Layer(_) | Part::Head => Side::Device,
        }
    }

    /// Assigns a side to each dispatch. Commits are divided by side.
    fn sided(&self, plan: Plan) -> Vec<(Side, Dispatch)> {
        let named = |d: &Dispatch| match (d.layer, d.op.weight()) {
            (Some(layer), _) => Some(self.side_of(Part::Layer(layer))),
            (None, weight) => weight.map(|w| self.weights[w.0 as usize].0),
        };
        let mut out: Vec<(Side, Dispatch)> = Vec::new();
        for (i, dispatch) in plan.dispatches.iter().enumerate() {
            if let Op::Commit(Commit { layers }) = &dispatch.op {
                let cut = layers.len().min(self.layers[0] as usize);
                let parts = [(Side::Device, &layers[..cut]), (Side::Host, &layers[cut..])];
                for (side, layers) in parts.into_iter().filter(|p| !p.1.is_empty()) {
                    let op = Op::Commit(Commit { layers: layers.to_vec() });
                    out.push((side, Dispatch { op, ..dispatch.clone() }));
                }
                continue;
            }
            let before = || out.last().map(|(side, _)| *side);
            let after = || plan.dispatches[i..].iter().find_map(named);
            let side = match &dispatch.op {
                // Prepared on the side that reads it, since its layout depends on the kernels.
                Op::Prepare(_) => after().or_else(before),
                // A norm without a layer follows the last layer: half of its input comes from
                // there.
                _ => named(dispatch).or_else(before),
            };
            out.push((side.unwrap_or(Side::Host), dispatch.clone()));
        }
        out
    }

    /// Returns the buffer's id on a side; allocates it at first use.
    fn place(&mut self, id: BufferId, side: Side) -> Result<BufferId> {
        let buffer = &mut self.buffers[id.0 as usize];
        if let Some(at) = buffer.at[side as usize] {
            return Ok(at);
        }
        let at = self.sides[side as usize].alloc(&buffer.label, buffer.bytes)?;
        buffer.at[side as usize] = Some(at);
        match buffer.at[1 - side as usize] {
            Some(other) => {
                let mut bytes = vec![0; buffer.bytes];
                self.sides[1 - side as usize].read(other, 0, &mut bytes)?;
                self.sides[side as usize].write(at, 0, &bytes)?;
            }
            None => {
                for (offset, bytes) in std::mem::take(&mut buffer.early) {
                    self.sides[side as usize].write(at, offset, &bytes)?;
                }
            }
        }
        Ok(at)
    }

    /// Translates the buffer and weight ids of dispatches to those of a side.
    fn translate(&mut self, side: Side, mut dispatches: Vec<Dispatch>) -> Result<Plan> {
        let mut failed = Ok(());
        for dispatch in &mut dispatches {
            dispatch.op.uses(&mut |used| match used {
                Use::Weight(id) => {
                    let (at, own) = self.weights[id.0 as usize];
                    assert_eq!(at, side, "a weight is used where it was not loaded");
                    *id = own;
                }
                Use::Read(id) | Use::Write(id) | Use::Change(id) => match self.place(*id, side) {
                    Ok(own) => *id = own,
                    Err(e) => failed = Err(e),
                },
            });
        }
        failed.map(|()| Plan { dispatches })
    }

    /// Copies the rows of a buffer up to the last live one from the other side to `to`.
    ///
    /// The buffer is sized for the widest layer. Rows of a narrower layer are closer together.
    fn copy(&mut self, id: BufferId, rows: Range<usize>, max_rows: usize, to: Side) -> Result<()> {
        let buffer = &self.buffers[id.0 as usize];
        let width = buffer.bytes / max_rows;
        let (from, at) = (buffer.at[1 - to as usize], buffer.at[to as usize]);
        let (Some(from), Some(at)) = (from, at) else {
            unreachable!("both sides use what crosses")
        };
        self.crossing.resize(rows.end * width, 0);
        self.sides[1 - to as usize].read(from, 0, &mut self.crossing)?;
        self.sides[to as usize].write(at, 0, &self.crossing)
    }

    /// Runs pieces of the started plan until a side works in the background, or to the end.
    ///
    /// Returns whether a side is working.
    fn advance(&mut self) -> Result<bool> {
        let Some(mut begun) = self.begun.take() else { return Ok(false) };
        if let Some(side) = begun.running.take() {
            self.sides[side as usize].finish(None)?;
        }
        let SplitPass { pieces, layout, .. } = &self.passes[begun.plan.0 as usize];
        let (pieces, max_rows) = (pieces.clone(), layout.max_rows);
        for (i, piece) in pieces.iter().enumerate().skip(begun.next) {
            match *piece {
                RecordedPiece::Run(side, plan) => {
                    if self.sides[side as usize].start(plan, None)? {
                        self.begun =
                            Some(PlanProgress { next: i + 1, running: Some(side), ..begun });
                        return Ok(true);
                    }
                    self.sides[side as usize].finish(None)?;
                }
                RecordedPiece::Copy(id, rows, to) => {
                    let rows = begun.live[(rows == RowSet::Selected) as usize].clone();
                    if !rows.is_empty() {
                        self.copy(id, rows, max_rows, to)?;
                    }
                }
            }
        }
        Ok(false)
    }

    /// Returns the side and id with the newest content of a buffer.
    fn newest(&self, id: BufferId) -> Option<(Side, BufferId)> {
        let buffer = &self.buffers[id.0 as usize];
        let sides = [buffer.home, Side::Device, Side::Host].into_iter();
        sides.filter_map(|side| Some((side, buffer.at[side as usize]?))).next()
    }
}

impl Executor for SplitExecutor {
    fn caps(&self) -> Caps {
        let [device, host] = self.sides.each_ref().map(|s| s.caps());
        Caps {
            max_rows: device.max_rows.min(host.max_rows),
            // The head is on the device.
            lists_best: device.lists_best,
            is_dry: device.is_dry && host.is_dry,
        }
    }

    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize {
        self.side(self.side_of(part)).key_block(part)
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let (label, early) = (label.to_owned(), Vec::new());
        self.buffers.push(SplitBuffer { label, bytes, at: [None; 2], early, home: Side::Host });
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        let sides: Vec<Side> = jobs.iter().map(|job| self.side_of(job.part)).collect();
        let mut parts = [Vec::new(), Vec::new()];
        jobs.into_iter().zip(&sides).for_each(|(job, side)| parts[*side as usize].push(job));
        let mut own = Vec::with_capacity(2);
        for (side, jobs) in self.sides.iter_mut().zip(parts) {
            own.push(if jobs.is_empty() { Vec::new() } else { side.load(jobs)? }.into_iter());
        }
        let first = self.weights.len();
        self.weights.extend(
            sides
                .into_iter()
                .map(|side| (side, own[side as usize].next().expect("one for each job"))),
        );
        Ok((first..self.weights.len()).map(|i| WeightId(i as u32)).collect())
    }

    fn write(&mut self, id: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        if let Some(words) = self.steps.get_mut(&id) {
            bytemuck::cast_slice_mut::<u32, u8>(words)[offset..offset + bytes.len()]
                .copy_from_slice(bytes);
        }
        let buffer = &mut self.buffers[id.0 as usize];
        ensure!(
            offset + bytes.len() <= buffer.bytes,
            "write of {} bytes at {offset} leaves the buffer",
            bytes.len()
        );
        if buffer.at == [None; 2] {
            buffer.early.push((offset, bytes.to_vec()));
        }
        for (side, at) in self.sides.iter_mut().zip(buffer.at) {
            at.map_or(Ok(()), |at| side.write(at, offset, bytes))?;
        }
        Ok(())
    }

    fn read(&mut self, id: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let label = &self.buffers[id.0 as usize].label;
        let newest = self.newest(id);
        let (side, at) = newest.with_context(|| format!("no plan uses the buffer `{label}`"))?;
        self.sides[side as usize].read(at, offset, bytes)
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        self.steps.entry(step).or_insert_with(|| vec![0; layout.words()]);
        let mut pieces = Vec::new();
        for piece in cut(self.sided(plan)) {
            pieces.push(match piece {
                Piece::Copy(id, rows, to) => RecordedPiece::Copy(id, rows, to),
                Piece::Run(side, mut dispatches) => {
                    for dispatch in &mut dispatches {
                        dispatch.op.uses(&mut |used| {
                            if let Use::Write(id) | Use::Change(id) = used {
                                self.buffers[id.0 as usize].home = side;
                            }
                        });
                    }
                    let plan = self.translate(side, dispatches)?;
                    let step = self.place(step, side)?;
                    RecordedPiece::Run(side, self.sides[side as usize].record(plan, step, layout)?)
                }
            });
        }
        self.passes.push(SplitPass { pieces: pieces.into(), step, layout });
        Ok(PlanId(self.passes.len() as u32 - 1))
    }

    fn start(&mut self, plan: PlanId, _: Option<(BufferId, usize)>) -> Result<bool> {
        let pass = &self.passes[plan.0 as usize];
        let step = pass.layout.view(&self.steps[&pass.step]);
        let live = [RowSet::All, RowSet::Selected].map(|set| step.live(set));
        self.begun = Some(PlanProgress { plan, next: 0, live, running: None });
        self.advance()
    }

    fn is_busy(&self) -> bool {
        let running = self.begun.as_ref().and_then(|begun| begun.running);
        running.is_some_and(|side| self.sides[side as usize].is_busy())
    }

    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        while self.advance()? {}
        result.map_or(Ok(()), |(id, bytes)| self.read(id, 0, bytes))
    }

    fn lend(&self, id: BufferId, bytes: usize) -> Option<&[u8]> {
        let (side, at) = self.newest(id)?;
        self.side(side).lend(at, bytes)
    }
}

/// Reports the sums over both sides.
impl Reports for SplitExecutor {
    fn report(&self) -> Report {
        let [device, host] = self.sides.each_ref().map(|side| side.report());
        let [first, layers] = self.layers;
        let both = |a: Held, b: Held| Held {
            weights: a.weights + b.weights,
            buffers: a.buffers + b.buffers,
        };
        // Times of kernels with the same name are added, regardless of their side.
        let mut kernels = device.kernels;
        host.kernels.into_iter().for_each(|time| time.add_to(&mut kernels));
        Report {
            device: format!(
                "{first} of {layers} layers and the head on {}; the others on {}",
                device.device, host.device
            ),
            identity: format!("{first} of {layers} on {}, {}", device.identity, host.identity),
            held: both(device.held, host.held),
            allocated: both(device.allocated, host.allocated),
            loading: device.loading.or(host.loading),
            assist: device.assist.or(host.assist),
            kernels,
        }
    }

    fn set_poison(&mut self, on: bool) {
        self.sides.iter_mut().for_each(|s| s.set_poison(on));
    }

    fn start_profile(&mut self) {
        self.sides.iter_mut().for_each(|s| s.start_profile());
    }

    /// Returns the bandwidth of a pass over all weights: total bytes divided by total seconds.
    fn read_bandwidth(&mut self) -> Option<f64> {
        let bytes = Side::BOTH.map(|s| self.side(s).report().held.weights as f64);
        let mut seconds = 0.0;
        for (side, bytes) in self.sides.iter_mut().zip(bytes).filter(|(_, bytes)| *bytes > 0.0) {
            seconds += bytes / side.read_bandwidth()?;
        }
        (seconds > 0.0).then(|| (bytes[0] + bytes[1]) / seconds)
    }

    /// Returns the device's bandwidth. The host's layers are not copied after they are read.
    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.sides[Side::Device as usize].upload_bandwidth()
    }
}
