//! Lowers operations to kernel calls: shader, constants, arguments and workgroups of each.

mod attention;
mod experts;
pub mod finish;
mod fuse;
pub mod hazards;
pub mod kernels;
pub mod layout;
mod linear;
mod rows;
pub mod sizes;

use crate::device::DeviceInfo;
use crate::device::matrix::MatrixShape;
use crate::device::pipeline::{Constants, Shader};
use anyhow::{Result, bail};
use finish::Epilogue;
use fuse::Fused;
use gemma_base::compute::step::StepView;
use gemma_base::compute::{
    Act, Attention, Best, BufferId, Cap, Commit, Concat, Dispatch, Embed, GateUp, KvFormat,
    KvLayer, Linear, LinearJob, Norm, Op, PageRange, Prepare, Rope, RopeKeys, RowSet, WeightId,
    best,
};
use gemma_base::kv::{OffloadedPages, PAGE};
use gemma_base::tensor::Group;
use gemma_base::tensor::trellis::Trellis;
use kernels::{
    BestPush, CapPush, CommitPush, ConcatPush, EmbedPush, Kernel, LinearPush, Push, RopePush,
    Specialise, word,
};
use layout::{DeviceMatrix, Packing, code_number, side_number};
use linear::put_or_merge;
use rows::{Merge, RowWork};
use sizes::OwnSizes;
use std::ops::Range;

/// Sizes for which commands are recorded. Kernels read the actual numbers from the step buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Live rows.
    pub rows: usize,
    /// Rows with logits.
    pub selected: usize,
    /// Rows to commit.
    pub path: usize,
    /// Pages of the row with most pages.
    pub pages: usize,
    /// Whether rows belong to several sequences, which share no keys.
    pub mixed: bool,
    /// Whether there are rows of images.
    pub images: bool,
}

impl Bucket {
    /// Returns the smallest bucket for these counts, without images. Counts are rounded up to
    /// powers of two.
    pub fn holding(rows: usize, selected: usize, path: usize, pages: usize, mixed: bool) -> Bucket {
        let up = |n: usize| if n == 0 { 0 } else { n.next_power_of_two() };
        let [rows, selected, path, pages] = [rows, selected, path, pages].map(up);
        Bucket { rows, selected, path, pages, mixed, images: false }
    }

    /// Returns the bucket of a step.
    pub fn of_step(step: &StepView<'_>) -> Bucket {
        let live = &step.positions[step.first..];
        let pages = live.iter().max().map_or(0, |last| *last as usize / PAGE + 1);
        let mixed = !live.is_empty() && step.trees() > 1;
        let (selected, path) = (step.selected.len(), step.path.len());
        let bucket = Bucket::holding(live.len(), selected, path, pages, mixed);
        Bucket { images: step.has_images(), ..bucket }
    }

    pub(crate) fn of(&self, rows: RowSet) -> usize {
        match rows {
            RowSet::All => self.rows,
            RowSet::Selected => self.selected,
            RowSet::Slots(n) => self.rows * n,
        }
    }
}

/// Access of a call to a buffer, for barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read(BufferId),
    Write(BufferId),
    /// Writes to elements that no other call with this access writes.
    Share(BufferId),
}

/// Most workgroups per axis of a dispatch that every Vulkan device supports.
pub(super) const MOST_GROUPS: u32 = 65_535;

/// One kernel call.
#[derive(Clone, Debug)]
pub struct Call {
    pub shader: Shader,
    pub constants: Constants,
    pub push: Push,
    /// Push constants of a linear layer, and its matrix rows per workgroup.
    pub linear: Option<(LinearPush, usize)>,
    /// Work of its last workgroups.
    pub epilogue: Option<Epilogue>,
    pub groups: [u32; 3],
    pub accesses: Vec<Access>,
    /// Weight bytes read.
    pub bytes: u64,
    /// Estimated multiply-adds, used to divide a pass into submissions.
    pub work: u64,
    pub label: &'static str,
    /// Range of its dispatches; several dispatches may share calls.
    pub dispatches: Range<usize>,
}

impl Call {
    /// Returns a call that belongs to no plan.
    pub fn apart<K: Kernel>(kernel: &K, push: &K::Push, groups: [usize; 3]) -> Call {
        Call {
            shader: K::SHADER,
            constants: kernel.constants(),
            push: Push::of(push),
            linear: None,
            epilogue: None,
            groups: groups.map(|g| g as u32),
            accesses: Vec::new(),
            bytes: 0,
            work: 0,
            label: "",
            dispatches: 0..0,
        }
    }

    pub fn writes(&self, id: BufferId) -> bool {
        self.accesses.contains(&Access::Write(id))
    }
}

/// Inputs of lowering: the device, and the addresses of buffers and matrices.
pub struct Lowering<'a> {
    pub info: &'a DeviceInfo,
    /// Matrix shape that the device supports, if any.
    pub matrix_shape: Option<MatrixShape>,
    /// Whether elements of matrices are in the lanes that `linear_few` and `linear_many` expect.
    pub known_elements: bool,
    pub addresses: &'a [u64],
    pub matrices: &'a [DeviceMatrix],
    pub step: BufferId,
    pub max_rows: usize,
    /// Whether calls may have epilogues.
    pub finish: bool,
    /// Most rows per block of attention, and of a layer with trellis codes.
    pub block_rows: usize,
    /// The executor's own buffers.
    pub own: Own,
}

/// Buffers of the executor that do not belong to a plan.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// f32 `[max_rows, widest ffn]` each: gate and up before they are multiplied. The first holds
    /// both for experts.
    pub gate: BufferId,
    pub up: BufferId,
    /// f32 partial results of attention pages, and the number of floats that fit.
    pub partials: BufferId,
    pub partial_floats: usize,
    /// Addresses of all layers' caches, for commits.
    pub layers: BufferId,
    /// Epilogues of calls, and the counters that they use.
    pub epilogues: BufferId,
    pub counts: BufferId,
    /// Slots of a mixture by expert, see `experts.rs`.
    pub choices: BufferId,
    pub sizes: OwnSizes,
}

impl Own {
    /// Allocates buffers of these sizes. `alloc` receives the label and the bytes of each.
    pub fn of(
        sizes: OwnSizes,
        alloc: impl FnMut((&'static str, usize)) -> Result<BufferId>,
    ) -> Result<Own> {
        let [gate, up, partials, layers, epilogues, counts, choices] = sizes.buffers().map(alloc);
        let (gate, up, partials, layers, epilogues, counts, choices) =
            (gate?, up?, partials?, layers?, epilogues?, counts?, choices?);
        Ok(Own {
            gate,
            up,
            partials,
            partial_floats: sizes.partial_floats,
            layers,
            epilogues,
            counts,
            choices,
            sizes,
        })
    }

    /// Returns the buffers that calls write before they read them.
    pub fn scratch(&self) -> [BufferId; 3] {
        [self.gate, self.up, self.partials]
    }
}

/// Estimated multiply-adds of a workgroup outside of linear layers and attention.
const OTHER_WORK: u64 = 4096;

impl Lowering<'_> {
    pub(crate) fn at(&self, id: BufferId) -> u64 {
        self.addresses[id.0 as usize]
    }

    pub(crate) fn matrix(&self, id: WeightId) -> &DeviceMatrix {
        &self.matrices[id.0 as usize]
    }

    /// Returns the calls of `dispatches`, in order.
    pub fn calls(&self, dispatches: &[Dispatch], bucket: Bucket) -> Result<Vec<Call>> {
        let mut out = Vec::new();
        for fused in fuse::fused(dispatches) {
            self.lower(&fused, bucket, &mut out)?;
        }
        out.retain(|c| c.groups.iter().all(|g| *g > 0));
        // A driver silently ignores a dispatch with more workgroups.
        if let Some(call) = out.iter().find(|c| c.groups.iter().any(|g| *g > MOST_GROUPS)) {
            bail!("{} needs {:?} workgroups, more than a dispatch has", call.label, call.groups);
        }
        Ok(out)
    }

    /// Appends the calls of fused dispatches.
    fn lower(&self, fused: &Fused<'_>, bucket: Bucket, out: &mut Vec<Call>) -> Result<()> {
        let Fused { op, forms, next, label, dispatches } = fused;
        let (begin, mut dispatches, mut next) = (out.len(), dispatches.clone(), next.as_deref());
        match op {
            Op::Embed(op) => out.push(self.embed(op, bucket)?),
            Op::Concat(op) => out.push(self.concat(op, bucket)),
            Op::Norm(op) => out.push(self.norm(op, forms, bucket)),
            Op::Prepare(op) => out.push(self.prepare(op, bucket)),
            Op::Linear(Linear { jobs, rows }) => {
                let norm = next.is_some_and(|next| self.can_norm(next.op, bucket));
                for job in jobs {
                    put_or_merge(out, begin, self.linear(job, *rows, bucket, norm)?);
                }
                let calls = &mut out[begin..];
                calls.iter_mut().for_each(|call| self.share_parts(call));
                if let Some(done) = next.take_if(|next| self.finish_linear(calls, next, bucket)) {
                    dispatches.end = done.dispatches.end;
                }
            }
            Op::GateUp(GateUp { act_gate, gate, act_up, up, out: result }) => {
                let jobs = [(*gate, *act_gate, self.own.gate), (*up, *act_up, self.own.up)];
                for (weight, act, out_) in jobs {
                    let job = LinearJob { weight, act, out: out_ };
                    put_or_merge(out, begin, self.linear(&job, RowSet::All, bucket, false)?);
                }
                out[begin..].iter_mut().for_each(|call| self.share_parts(call));
                out.push(self.glu(*result, self.matrix(*gate).rows, forms, bucket));
            }
            Op::Choose(op) => out.push(self.choose(op, bucket)),
            Op::Experts(op) => self.experts(op, forms, bucket, out)?,
            Op::Combine(op) => out.push(self.combine(op, bucket)),
            Op::Rope(op) => out.push(self.rope(op, bucket)),
            Op::Attention(op) => match op.range {
                PageRange::All => self.attention(op, forms, bucket, out)?,
                PageRange::After(pages) => out.push(self.partial_attention(op, pages, bucket)?),
            },
            Op::Cap(op) => out.push(self.cap(op, bucket)),
            Op::Best(op) => out.extend(self.best(op, bucket)),
            Op::Commit(op) => out.extend(self.commit(op, bucket)),
        }
        for call in &mut out[begin..] {
            (call.label, call.dispatches) = (*label, dispatches.clone());
        }
        next.map_or(Ok(()), |next| self.lower(next, bucket, out))
    }

    pub(crate) fn call<K: Kernel>(
        &self,
        kernel: &K,
        push: &K::Push,
        groups: [usize; 3],
        accesses: Vec<Access>,
    ) -> Call {
        let work = groups.iter().product::<usize>() as u64 * OTHER_WORK;
        Call { accesses, work, ..Call::apart(kernel, push, groups) }
    }

    fn embed(&self, op: &Embed, bucket: Bucket) -> Result<Call> {
        let Embed { table, scale, out } = op;
        let m = self.matrix(*table);
        let packing = Packing::of(m.format, m.rows, m.cols)?;
        let kernel = kernels::Embed {
            local: 256,
            subgroup: self.info.subgroup,
            threads: 256,
            cols: word(m.cols),
            code: code_number(m.format.code),
            width: word(packing.map_or(32, |p| p.width)),
            grouped: m.format.group != Group::Row,
            hadamard: m.format.hadamard,
            side: side_number(m.format.code),
        };
        let push = EmbedPush {
            codes: m.codes,
            side: m.side,
            out: self.at(*out),
            step: self.at(self.step),
            factor: *scale,
            max_rows: word(self.max_rows),
            n: word(m.rows),
            _gap: 0,
        };
        let accesses = vec![Access::Write(*out)];
        let mut call = self.call(&kernel, &push, [bucket.rows, 1, 1], accesses);
        if let Some(Trellis { step, multiplier, .. }) = m.format.code.trellis() {
            call.constants.extend(kernels::EmbedTrellis { step, multiplier }.constants());
        }
        Ok(call)
    }

    fn concat(&self, op: &Concat, bucket: Bucket) -> Call {
        let Concat { left, right, dim, out } = *op;
        let push = ConcatPush {
            left: self.at(left),
            right: self.at(right),
            out: self.at(out),
            step: self.at(self.step),
            dim: word(dim),
            max_rows: word(self.max_rows),
        };
        let groups = [(2 * dim).div_ceil(256), bucket.rows, 1];
        let accesses = vec![Access::Read(left), Access::Read(right), Access::Write(out)];
        self.call(&kernels::Concat {}, &push, groups, accesses)
    }

    pub(crate) fn rope(&self, op: &Rope, bucket: Bucket) -> Call {
        let Rope { q, q_norm, keys, eps, n_heads, rope_table, kv } = op;
        // Without keys there are no workgroups that read these addresses.
        let of_keys = |of: fn(&RopeKeys) -> BufferId| keys.as_ref().map_or(0, |k| self.at(of(k)));
        let v_norm = keys.is_some_and(|keys| keys.v_norm);
        let kernel = kernels::Rope {
            local: self.info.subgroup,
            subgroup: self.info.subgroup,
            head_dim: word(kv.head_dim),
            kv: kv_code(kv),
            v_norm,
        };
        let push = RopePush {
            q: self.at(*q),
            k: of_keys(|keys| keys.k),
            v: of_keys(|keys| keys.v),
            q_norm: self.at(*q_norm),
            k_norm: of_keys(|keys| keys.k_norm),
            table: self.at(*rope_table),
            scratch_k: self.at(kv.scratch_k),
            scratch_v: self.at(kv.scratch_v),
            step: self.at(self.step),
            eps: *eps,
            n_heads: word(*n_heads),
            n_kv: word(kv.n_kv_heads),
            max_rows: word(self.max_rows),
        };
        let mut accesses = vec![Access::Write(*q)];
        if let Some(RopeKeys { k, v, v_norm, .. }) = keys {
            let values = if *v_norm { Access::Write(*v) } else { Access::Read(*v) };
            accesses.extend([Access::Write(*k), values]);
            accesses.extend([kv.scratch_k, kv.scratch_v].map(Access::Write));
        }
        let heads = n_heads + keys.map_or(0, |_| 2 * kv.n_kv_heads);
        let groups = [heads, bucket.rows, 1];
        self.call(&kernel, &push, groups, accesses)
    }

    fn cap(&self, op: &Cap, bucket: Bucket) -> Call {
        let Cap { logits, vocab, cap } = op;
        let push = CapPush {
            logits: self.at(*logits),
            step: self.at(self.step),
            vocab: word(*vocab),
            cap: *cap,
        };
        let groups = [vocab.div_ceil(256), bucket.selected, 1];
        self.call(&kernels::Cap {}, &push, groups, vec![Access::Write(*logits)])
    }

    fn best(&self, op: &Best, bucket: Bucket) -> [Call; 2] {
        let Best { logits, vocab, maxima, lists } = op;
        [0, 1].map(|stage| {
            let kernel = kernels::Best { stage, most: word(best::MOST) };
            let push = BestPush {
                logits: self.at(*logits),
                maxima: self.at(*maxima),
                lists: self.at(*lists),
                step: self.at(self.step),
                vocab: word(*vocab),
                _gap: 0,
            };
            let accesses =
                vec![Access::Read(*logits), Access::Write(*maxima), Access::Write(*lists)];
            self.call(&kernel, &push, [best::CHUNKS, bucket.selected, 1], accesses)
        })
    }

    /// Returns one call per shape of heads. Layers of one shape are contiguous in `own.layers`.
    fn commit(&self, op: &Commit, bucket: Bucket) -> Vec<Call> {
        let (mut calls, mut at) = (Vec::new(), self.at(self.own.layers));
        for layers in by_shape(&op.layers) {
            let first = layers[0];
            let kernel = kernels::Commit { local: 64, kv: kv_code(first) };
            let push = CommitPush {
                layers: at,
                step: self.at(self.step),
                n_kv: word(first.n_kv_heads),
                head_dim: word(first.head_dim),
                max_rows: word(self.max_rows),
                _gap: 0,
            };
            let accesses =
                layers.iter().flat_map(|kv| [Access::Write(kv.k), Access::Write(kv.v)]).collect();
            let groups = [bucket.path, first.n_kv_heads, layers.len()];
            calls.push(self.call(&kernel, &push, groups, accesses));
            at += (layers.len() * LAYER_BYTES) as u64;
        }
        calls
    }
}

/// Bytes per layer in `commit.comp`.
pub(crate) const LAYER_BYTES: usize = 48;

/// Groups the layers of a commit by the shape of their heads, in the order of each group's first
/// layer.
pub(crate) fn by_shape(layers: &[KvLayer]) -> Vec<Vec<&KvLayer>> {
    let mut groups: Vec<Vec<&KvLayer>> = Vec::new();
    let shape = |kv: &KvLayer| (kv.n_kv_heads, kv.head_dim, kv.format);
    for kv in layers {
        match groups.iter_mut().find(|group| shape(group[0]) == shape(kv)) {
            Some(group) => group.push(kv),
            None => groups.push(vec![kv]),
        }
    }
    groups
}

/// Returns the number of a cache format, `KV` of `kv.glsl`.
pub(crate) fn kv_code(kv: &KvLayer) -> u32 {
    match kv.format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Q8 => 2,
    }
}

/// Returns the number of columns that share a scale; 0 for a whole row.
fn group(group: Group) -> u32 {
    match group {
        Group::Row => 0,
        Group::Cols(n) => n as u32,
    }
}

/// Returns the preparation of an activation: whether it has a Hadamard transform, whether it is
/// int8, and the columns that share a scale (0 for a whole row or without scales).
pub(crate) fn preparation(act: Option<&Act>) -> (bool, bool, u32) {
    act.map_or((false, false, 0), |act| {
        let int8 = act.format.int8;
        (act.format.hadamard, int8, if int8 { group(act.format.group) } else { 0 })
    })
}
