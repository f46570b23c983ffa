//! Executor that shares the attention of global layers between an NPU and another executor.
//!
//! The NPU computes attention over a share of the sealed pages, the inner executor over all others.
//! Queries are submitted to the NPU first. While it works, the inner executor computes its part.
//! Then both partial results are merged in page order, the NPU's first. The position of a row alone
//! determines its pages on the NPU. If the NPU fails, the inner executor computes the whole
//! attention of that layer and all later ones, because it has all keys and values.
//!
//! The host has work at each global layer, so `start` only runs up to the first of them. A pass
//! without the NPU runs on the inner executor unchanged.

use super::attention::{Dims, FlashPartial, Partials, SealedPages};
use anyhow::Result;
use gemma_base::compute::reference::attention::merge;
use gemma_base::compute::step::StepView;
use gemma_base::compute::{
    AssistReport, Attention, BufferId, Caps, Dispatch, Executor, ExecutorExt, Held, KvFormat,
    KvLayer, LoadJob, Op, PageRange, Part, Plan, PlanId, Report, Reports, RowSet, StepLayout,
    WeightId,
};
use gemma_base::kv::{OffloadedPages, PAGE};
use half::f16;
use std::collections::HashMap;
use std::ops::Range;

/// A step of a pass that uses the NPU.
#[derive(Clone, Copy)]
enum PassPiece {
    Run(PlanId),
    Attend(Attend),
}

/// The attention of one global layer.
#[derive(Clone, Copy)]
struct Attend {
    /// Plans of the inner executor: attention over all pages, and over the pages that the NPU does
    /// not read.
    whole: PlanId,
    rest: PlanId,
    q: BufferId,
    out: BufferId,
    /// Partial results of `rest`.
    partial: BufferId,
    /// Index of the layer's arena.
    layer: usize,
}

struct AssistedPass {
    whole: PlanId,
    /// Empty for a pass without global attention.
    pieces: Vec<PassPiece>,
    commits: bool,
    step: BufferId,
    layout: StepLayout,
}

/// State of a pass that was started but not finished.
enum PassProgress {
    /// The inner executor runs all of it.
    Whole,
    /// The inner executor runs the piece before `next`, if there is one.
    Pieces { pass: usize, next: usize, live: Range<usize> },
}

/// The cache of a global layer in the kernel's layout.
struct LayerCache {
    kv: KvLayer,
    arena: SealedPages,
}

/// An executor that wraps another one and uses an NPU for a part of the attention.
pub struct OffloadExecutor {
    inner: Box<dyn Executor>,
    npu: Option<FlashPartial>,
    dims: Dims,
    /// The NPU's share of the sealed pages, in 256ths.
    share: usize,
    layers: Vec<LayerCache>,
    /// Buffer of partial results, used by one layer at a time.
    partial: Option<BufferId>,
    passes: Vec<AssistedPass>,
    begun: Option<PassProgress>,
    /// Content of each step buffer.
    steps: HashMap<BufferId, (StepLayout, Vec<u32>)>,
    report: AssistReport,
    memory: u64,
    q: Vec<f32>,
    rest: Vec<f32>,
    joined: Vec<f32>,
    pages: Vec<usize>,
    partials: Partials,
}

impl OffloadExecutor {
    /// Returns an executor that uses `npu` together with `inner`. The NPU reads `share`/256 of the
    /// sealed pages.
    pub fn new(
        inner: Box<dyn Executor>,
        npu: FlashPartial,
        dims: Dims,
        share: usize,
    ) -> OffloadExecutor {
        let report = AssistReport {
            device: npu.session().describe(),
            silicon: npu.session().is_real_device(),
            ..AssistReport::default()
        };
        OffloadExecutor {
            inner,
            npu: Some(npu),
            dims,
            share: share.min(256),
            layers: Vec::new(),
            partial: None,
            passes: Vec::new(),
            begun: None,
            steps: HashMap::new(),
            report,
            memory: 0,
            q: Vec::new(),
            rest: Vec::new(),
            joined: Vec::new(),
            pages: Vec::new(),
            partials: Partials::default(),
        }
    }

    /// Stops using the NPU for the rest of the run, and frees its buffers and its context.
    fn give_up(&mut self, why: &anyhow::Error) {
        self.count();
        self.npu = None;
        self.layers.clear();
        let remedy = why
            .chain()
            .find_map(|e| e.downcast_ref::<super::accel::Errno>())
            .and_then(|e| e.remedy());
        let remedy = remedy.map_or(String::new(), |r| format!(" ({r})"));
        self.report.given_up = Some(format!("{why:#}{remedy}"));
    }

    /// Copies the counters into the report.
    fn count(&mut self) {
        let Some(npu) = &self.npu else { return };
        let c = npu.counters;
        let r = &mut self.report;
        (r.jobs, r.pages_sealed, r.pages_read) = (c.jobs, c.sealed, c.pages);
        (r.row_pages, r.bytes, r.checks) = (c.row_pages, c.bytes, c.checks);
        self.memory = npu.session().memory();
    }

    fn offloaded(&self, layout: StepLayout) -> OffloadedPages {
        OffloadedPages { lag: layout.max_rows, share: self.share }
    }

    /// Returns the index of the layer with this cache. Adds it if it is new. Returns `None` without
    /// an NPU.
    fn layer_of(&mut self, kv: KvLayer) -> Result<Option<usize>> {
        if let Some(at) = self.layers.iter().position(|l| l.kv.k == kv.k) {
            return Ok(Some(at));
        }
        let Some(npu) = &mut self.npu else { return Ok(None) };
        match npu.arena(kv.pages.count) {
            Ok(arena) => self.layers.push(LayerCache { kv, arena }),
            Err(why) => {
                self.give_up(&why.context("making room for the NPU's pages"));
                return Ok(None);
            }
        }
        Ok(Some(self.layers.len() - 1))
    }

    /// Splits a plan at global attention. Returns no pieces if the plan has no global attention or
    /// there is no NPU.
    fn cut(&mut self, plan: &Plan, step: BufferId, layout: StepLayout) -> Result<Vec<PassPiece>> {
        let mut pieces = Vec::new();
        let mut run = Plan::default();
        for dispatch in &plan.dispatches {
            let attention = match &dispatch.op {
                Op::Attention(op) if op.kv.pages.window.is_none() && self.share > 0 => {
                    self.layer_of(op.kv)?.map(|layer| (*op, layer))
                }
                _ => None,
            };
            let Some((attention, layer)) = attention else {
                run.dispatches.push(dispatch.clone());
                continue;
            };
            if !run.dispatches.is_empty() {
                pieces.push(PassPiece::Run(self.inner.record(
                    std::mem::take(&mut run),
                    step,
                    layout,
                )?));
            }
            let partial = match self.partial {
                Some(partial) => partial,
                None => {
                    if let Some(Err(why)) =
                        self.npu.as_mut().map(|npu| npu.reserve(layout.max_rows))
                    {
                        self.give_up(&why.context("making the NPU's queues"));
                    }
                    let floats = layout.max_rows * attention.n_heads * (attention.kv.head_dim + 2);
                    *self.partial.insert(self.inner.alloc("attention next to the NPU", 4 * floats)?)
                }
            };
            let range = PageRange::After(self.offloaded(layout));
            let op = Op::Attention(Attention { out: partial, range, ..attention });
            let rest = Plan { dispatches: vec![Dispatch { op, ..dispatch.clone() }] };
            pieces.push(PassPiece::Attend(Attend {
                rest: self.inner.record(rest, step, layout)?,
                whole: self.inner.record(
                    Plan { dispatches: vec![dispatch.clone()] },
                    step,
                    layout,
                )?,
                q: attention.q,
                out: attention.out,
                partial,
                layer,
            }));
        }
        if !pieces.is_empty() && !run.dispatches.is_empty() {
            pieces.push(PassPiece::Run(self.inner.record(run, step, layout)?));
        }
        Ok(pieces)
    }

    /// Computes the attention of one global layer for the rows `live` of a pass.
    fn attend(&mut self, a: Attend, live: Range<usize>) -> Result<()> {
        let Dims { n_heads, head_dim, .. } = self.dims;
        let width = n_heads * head_dim;
        let sent = match (&mut self.npu, self.layers.get(a.layer)) {
            (Some(npu), Some(layer)) => {
                self.q.resize(live.len() * width, 0.0);
                self.inner.read(
                    a.q,
                    live.start * width * 4,
                    bytemuck::cast_slice_mut(&mut self.q),
                )?;
                npu.submit(&layer.arena, &self.q, &self.pages)
            }
            _ => return self.inner.run(a.whole),
        };
        if let Err(why) = sent {
            self.give_up(&why);
            return self.inner.run(a.whole);
        }
        self.inner.run(a.rest)?;
        let joined = self.npu.as_mut().map(|npu| npu.join(live.len(), &mut self.partials));
        if let Some(Err(why)) = joined {
            self.give_up(&why);
            return self.inner.run(a.whole);
        }
        let each = head_dim + 2;
        self.rest.resize(live.len() * n_heads * each, 0.0);
        self.inner.read(
            a.partial,
            live.start * n_heads * each * 4,
            bytemuck::cast_slice_mut(&mut self.rest),
        )?;
        self.joined.resize(live.len() * width, 0.0);
        for (i, (rest, out)) in
            self.rest.chunks_exact(each).zip(self.joined.chunks_exact_mut(head_dim)).enumerate()
        {
            let (rest_o, rest_m, rest_l) = (&rest[..head_dim], rest[head_dim], rest[head_dim + 1]);
            if self.partials.l[i] == 0.0 {
                out.iter_mut().zip(rest_o).for_each(|(out, o)| *out = o / rest_l);
                continue;
            }
            let (mut m, mut l) = (self.partials.m[i], self.partials.l[i]);
            out.copy_from_slice(&self.partials.o[i * head_dim..][..head_dim]);
            merge(&mut m, &mut l, out, (rest_m, rest_l, rest_o));
            out.iter_mut().for_each(|o| *o /= l);
        }
        self.inner.write(a.out, live.start * width * 4, bytemuck::cast_slice(&self.joined))
    }

    /// Copies newly filled pages to the NPU, each once. First drops pages from position `base` on,
    /// because the caller overwrites them. The step must have the page table of the only sequence.
    fn seal(&mut self, step: BufferId, base: usize, committed: usize) {
        let mut read = FloatPage::default();
        let Some((layout, words)) = self.steps.get(&step) else { return };
        let step = layout.view(words);
        for i in 0..self.layers.len() {
            let LayerCache { kv, arena } = &mut self.layers[i];
            arena.sealed = arena.sealed.min(base / PAGE);
            while arena.sealed < committed / PAGE {
                let Some(npu) = &mut self.npu else { return };
                let sealed = read
                    .fill(self.inner.as_mut(), kv, kv.page(&step, 0, arena.sealed))
                    .and_then(|()| npu.seal(arena, &read.keys, &read.values));
                if let Err(why) = sealed {
                    return self.give_up(&why);
                }
            }
        }
    }
}

/// A page of all kv heads as floats, `[n_kv_heads, PAGE, head_dim]`.
#[derive(Default)]
struct FloatPage {
    keys: Vec<f32>,
    values: Vec<f32>,
    stored: Vec<u8>,
    scales: Vec<u8>,
}

impl FloatPage {
    /// Reads a page from an executor's cache, in any format.
    fn fill(&mut self, exec: &mut dyn Executor, kv: &KvLayer, page: usize) -> Result<()> {
        let (heads, dim, width) = (kv.n_kv_heads, kv.head_dim, kv.format.bytes());
        let (size, groups) = (heads * PAGE * dim, kv.scales());
        for is_key in [true, false] {
            let id = if is_key { kv.k } else { kv.v };
            self.stored.resize(size * width, 0);
            exec.read(id, page * size * width, &mut self.stored)?;
            self.scales.resize(2 * heads * groups * PAGE, 0);
            if groups > 0 {
                exec.read(id, 2 * kv.scale_at(page, 0, 0, 0), &mut self.scales)?;
            }
            let to = if is_key { &mut self.keys } else { &mut self.values };
            to.clear();
            let half = |bytes: &[u8], at: usize| {
                f16::from_bits(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])).to_f32()
            };
            for h in 0..heads {
                for slot in 0..PAGE {
                    for d in 0..dim {
                        let at = if is_key {
                            kv.key_at(0, h, d, slot)
                        } else {
                            (h * PAGE + slot) * dim + d
                        };
                        to.push(match kv.format {
                            KvFormat::F32 => f32::from_le_bytes(
                                self.stored[4 * at..][..4].try_into().expect("four bytes"),
                            ),
                            KvFormat::F16 => half(&self.stored, at),
                            KvFormat::Q8 => {
                                let group = d / kv.format.group(dim);
                                self.stored[at] as i8 as f32
                                    * half(&self.scales, (h * groups + group) * PAGE + slot)
                            }
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

impl Executor for OffloadExecutor {
    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize {
        self.inner.key_block(part)
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        self.inner.alloc(label, bytes)
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        self.inner.load(jobs)
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        if let Some((layout, words)) = self.steps.get_mut(&buffer) {
            bytemuck::cast_slice_mut::<u32, u8>(words)[offset..offset + bytes.len()]
                .copy_from_slice(bytes);
            // If a page of the sequence is replaced, it and all later pages must be sealed again.
            let entries = (offset / 4).max(layout.tables_at())..(offset + bytes.len()) / 4;
            for LayerCache { kv, arena } in self.layers.iter_mut().filter(|_| !entries.is_empty()) {
                let table = layout.tables_at() + kv.table;
                if entries.end > table && entries.start < table + kv.pages.count {
                    arena.sealed = arena.sealed.min(entries.start.saturating_sub(table));
                }
            }
        }
        self.inner.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.inner.read(buffer, offset, bytes)
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        self.steps.entry(step).or_insert_with(|| (layout, vec![0; layout.words()]));
        let pieces = self.cut(&plan, step, layout)?;
        let commits = plan.dispatches.iter().any(|d| matches!(d.op, Op::Commit(_)));
        self.passes.push(AssistedPass {
            whole: self.inner.record(plan, step, layout)?,
            pieces,
            commits,
            step,
            layout,
        });
        self.count();
        Ok(PlanId(self.passes.len() as u32 - 1))
    }

    fn start(&mut self, plan: PlanId, result: Option<(BufferId, usize)>) -> Result<bool> {
        self.begun = None;
        let at = plan.0 as usize;
        let AssistedPass { whole, commits, step: buffer, layout, .. } = self.passes[at];
        let step: StepView<'_> = layout.view(&self.steps[&buffer].1);
        if commits {
            let base = step.path.first().map_or(0, |root| step.positions[*root as usize] as usize);
            let committed = base + step.path.len();
            self.inner.run(whole)?;
            self.seal(buffer, base, committed);
            self.count();
            return Ok(false);
        }
        if self.npu.is_none() || self.passes[at].pieces.is_empty() {
            self.begun = Some(PassProgress::Whole);
            return self.inner.start(whole, result);
        }
        let live = step.live(RowSet::All);
        let offloaded = self.offloaded(layout);
        self.pages.clear();
        let counts = step.positions[live.clone()].iter().map(|p| offloaded.count(*p as usize));
        self.pages.extend(counts);
        // A sequence that starts with a cached prefix has filled pages without a commit.
        let base = step.base(live.start);
        self.seal(buffer, base, base);
        let (next, works) = match self.passes[at].pieces[0] {
            PassPiece::Run(plan) => (1, self.inner.start(plan, None)?),
            PassPiece::Attend(_) => (0, false),
        };
        self.begun = Some(PassProgress::Pieces { pass: at, next, live });
        Ok(works)
    }

    fn is_busy(&self) -> bool {
        self.begun.is_some() && self.inner.is_busy()
    }

    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        match self.begun.take() {
            Some(PassProgress::Whole) => return self.inner.finish(result),
            Some(PassProgress::Pieces { pass, next, live }) => {
                if next > 0 {
                    self.inner.finish(None)?;
                }
                for i in next..self.passes[pass].pieces.len() {
                    match self.passes[pass].pieces[i] {
                        PassPiece::Run(plan) => self.inner.run(plan)?,
                        PassPiece::Attend(attend) => self.attend(attend, live.clone())?,
                    }
                }
                self.count();
            }
            None => {}
        }
        result.map_or(Ok(()), |(buffer, bytes)| self.inner.read(buffer, 0, bytes))
    }

    fn lend(&self, buffer: BufferId, bytes: usize) -> Option<&[u8]> {
        self.inner.lend(buffer, bytes)
    }
}

impl Reports for OffloadExecutor {
    fn report(&self) -> Report {
        let inner = self.inner.report();
        let npu = if self.npu.is_some() { self.report.device.as_str() } else { "given up" };
        let more = |held: Held| Held { buffers: held.buffers + self.memory, ..held };
        Report {
            device: format!("{}, npu: {npu}", inner.device),
            held: more(inner.held),
            allocated: more(inner.allocated),
            assist: Some(self.report.clone()),
            ..inner
        }
    }

    fn start_profile(&mut self) {
        self.inner.start_profile();
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.inner.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.inner.upload_bandwidth()
    }

    fn set_poison(&mut self, on: bool) {
        self.inner.set_poison(on);
    }
}
