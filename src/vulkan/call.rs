//! From operations to kernel calls: which shader, how specialised, over how many workgroups.

mod following;
mod rows;

use super::device::DeviceInfo;
use super::finish::Tail;
use super::footprint::OwnSizes;
use super::layout::{DeviceMatrix, Packing, code_number};
use super::linear::put_beside;
use super::matrix::MatrixShape;
use super::pipeline::{Constants, Shader};
use super::push::{LinearPush, Push};
use crate::compute::step::StepView;
use crate::compute::{
    Act, Attention, Best, BufferId, Commit, Dispatch, Embed, GateUp, KvFormat, KvLayer, Linear,
    LinearJob, Norm, Op, PageRange, Prepare, Rope, RowSet, WeightId, best,
};
use crate::kv::{OffloadedPages, PAGE};
use crate::tensor::trellis::Trellis;
use crate::tensor::{Code, Group};
use anyhow::{Result, bail, ensure};
pub(super) use following::{prepared, reads_before_write};
use rows::{Merge, RowWork};
use std::ops::Range;

/// How many rows (and pages) the recorded commands are for; kernels look up in the step buffer how
/// many there really are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Live rows.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub selected: usize,
    /// Rows to commit.
    pub path: usize,
    /// Pages of the longest row.
    pub pages: usize,
    /// Rows of several sequences, which share no keys.
    pub mixed: bool,
}

impl Bucket {
    /// The smallest bucket that holds these counts: powers of two.
    pub fn holding(rows: usize, selected: usize, path: usize, pages: usize, mixed: bool) -> Bucket {
        let up = |n: usize| if n == 0 { 0 } else { n.next_power_of_two() };
        Bucket { rows: up(rows), selected: up(selected), path: up(path), pages: up(pages), mixed }
    }

    /// The bucket of a step.
    pub fn of_step(step: &StepView<'_>) -> Bucket {
        let live = &step.positions[step.first..];
        let pages = live.iter().max().map_or(0, |last| *last as usize / PAGE + 1);
        let mixed = !live.is_empty() && step.trees() > 1;
        Bucket::holding(live.len(), step.selected.len(), step.path.len(), pages, mixed)
    }

    pub(super) fn of(&self, rows: RowSet) -> usize {
        match rows {
            RowSet::All => self.rows,
            RowSet::Selected => self.selected,
        }
    }
}

/// What a call reads or writes, for barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    Read(BufferId),
    Write(BufferId),
    /// Writes to places that are no other's among calls that touch it so.
    Share(BufferId),
}

/// One kernel call.
#[derive(Clone, Debug)]
pub struct Call {
    pub shader: Shader,
    pub constants: Constants,
    pub push: Push,
    /// The push constants of a linear layer, and how many matrix rows a workgroup takes.
    pub linear: Option<(LinearPush, usize)>,
    /// What its last workgroups do.
    pub tail: Option<Tail>,
    pub groups: [u32; 3],
    pub touches: Vec<Touch>,
    /// Weight bytes read.
    pub bytes: u64,
    /// About how many multiply-adds, by which a pass is cut into submissions.
    pub work: u64,
    pub label: &'static str,
    /// The dispatches that it is part of: more than one where they share calls.
    pub of: Range<usize>,
}

impl Call {
    /// A call that is part of no plan.
    pub fn apart(shader: Shader, constants: Constants, push: Push, groups: [usize; 3]) -> Call {
        Call {
            shader,
            constants,
            push,
            linear: None,
            tail: None,
            groups: groups.map(|g| g as u32),
            touches: Vec::new(),
            bytes: 0,
            work: 0,
            label: "",
            of: 0..0,
        }
    }

    pub fn writes(&self, id: BufferId) -> bool {
        self.touches.contains(&Touch::Write(id))
    }

    pub(super) fn constant(&self, id: u32) -> Option<u32> {
        self.constants.iter().find(|c| c.0 == id).map(|c| c.1)
    }
}

/// Where things lie on the device.
pub struct Places<'a> {
    pub info: &'a DeviceInfo,
    /// The shape of matrices that the device multiplies, if it does.
    pub matrix_shape: Option<MatrixShape>,
    /// Whether elements of matrices lie where `linear_few` and `linear_many` expect them.
    pub known_elements: bool,
    pub addresses: &'a [u64],
    pub matrices: &'a [DeviceMatrix],
    pub step: BufferId,
    pub max_rows: usize,
    /// Whether calls may have tails.
    pub finish: bool,
    /// Most rows of a block of attention, and of a layer with trellis codes.
    pub block_rows: usize,
    /// Buffers of the executor's own.
    pub own: Own,
}

/// Buffers that no plan names.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// f32 `[max_rows, widest ffn]`, twice: gate and up before they are joined.
    pub gate: BufferId,
    pub up: BufferId,
    /// f32 partials of attention pages, and how many floats fit.
    pub partials: BufferId,
    pub partial_floats: usize,
    /// Addresses of all layers' caches, for commits.
    pub layers: BufferId,
    /// Tails of calls, and the counters that these use.
    pub tails: BufferId,
    pub counts: BufferId,
    pub sizes: OwnSizes,
}

impl Own {
    /// Those of these sizes, by whoever allocates a label's bytes.
    pub fn of(
        sizes: OwnSizes,
        alloc: impl FnMut((&'static str, usize)) -> Result<BufferId>,
    ) -> Result<Own> {
        let [gate, up, partials, layers, tails, counts] = sizes.buffers().map(alloc);
        let (gate, up, partials, layers, tails, counts) =
            (gate?, up?, partials?, layers?, tails?, counts?);
        Ok(Own {
            gate,
            up,
            partials,
            partial_floats: sizes.partial_floats,
            layers,
            tails,
            counts,
            sizes,
        })
    }
}

/// Multiply-adds that a workgroup of neither a linear layer nor attention counts as.
const OTHER_WORK: u64 = 4096;
/// Most rows that page partials are split over workgroups for.
const SPLIT_ROWS: usize = 32;

impl Places<'_> {
    pub(super) fn at(&self, id: BufferId) -> u64 {
        self.addresses[id.0 as usize]
    }

    pub(super) fn matrix(&self, id: WeightId) -> &DeviceMatrix {
        &self.matrices[id.0 as usize]
    }

    /// The calls of `dispatches`, in order.
    pub fn calls(&self, dispatches: &[Dispatch], bucket: Bucket) -> Result<Vec<Call>> {
        let mut out = Vec::new();
        let mut i = 0;
        while i < dispatches.len() {
            let Dispatch { op, label, .. } = &dispatches[i];
            let before = out.len();
            let rest = &dispatches[i + 1..];
            let prepare = prepared(op, rest);
            let written = op.outputs();
            let mut end = i + 1 + prepare.is_some() as usize;
            let read_later = reads_before_write(dispatches[end..].iter(), written.last().copied());
            match op {
                Op::Embed(op) => out.push(self.embed(op, bucket)?),
                Op::Norm(op) => out.push(self.norm(op, prepare, read_later, bucket)),
                Op::Prepare(op) => out.push(self.prepare(op, bucket)),
                Op::Linear(Linear { jobs, rows }) => {
                    let norm = self.norm_behind(jobs, *rows, rest, bucket);
                    for job in jobs {
                        let call = self.linear(job, *rows, bucket, norm.is_some())?;
                        put_beside(&mut out, before, call, label);
                    }
                    if let Some((norm, dispatches)) = norm
                        && self.finish_norm(&mut out[before], norm)
                    {
                        end += dispatches;
                    }
                    let all = *rows == RowSet::All;
                    end += (all && self.finish_rope(&mut out[before..], jobs, rest.first(), bucket))
                        as usize;
                }
                Op::GateUp(GateUp { act_gate, gate, act_up, up, out: result }) => {
                    let jobs = [(*gate, *act_gate, self.own.gate), (*up, *act_up, self.own.up)];
                    for (weight, act, out_) in jobs {
                        let call = self.linear(
                            &LinearJob { weight, act, out: out_ },
                            RowSet::All,
                            bucket,
                            false,
                        )?;
                        put_beside(&mut out, before, call, label);
                    }
                    let cols = self.matrix(*gate).rows;
                    out.push(self.glu(*result, cols, prepare, read_later, bucket));
                }
                Op::Rope(op) => out.push(self.rope(op, bucket)),
                Op::Attention(op) => match op.range {
                    PageRange::All => {
                        self.attention(op, prepare.as_ref(), read_later, bucket, &mut out)?
                    }
                    PageRange::After(offloaded) => {
                        out.push(self.partial_attention(op, offloaded, bucket)?)
                    }
                },
                Op::Best(op) => out.extend(self.best(op, bucket)),
                Op::Commit(op) => out.extend(self.commit(op, bucket)),
            }
            for call in out.iter_mut().rev().take_while(|c| c.label.is_empty()) {
                call.label = label;
            }
            out[before..].iter_mut().for_each(|call| call.of = i..end);
            i = end;
        }
        out.retain(|c| c.groups.iter().all(|g| *g > 0));
        Ok(out)
    }

    pub(super) fn call(
        &self,
        shader: Shader,
        constants: Constants,
        push: Push,
        groups: [usize; 3],
        touches: Vec<Touch>,
    ) -> Call {
        let work = groups.iter().product::<usize>() as u64 * OTHER_WORK;
        Call { touches, work, ..Call::apart(shader, constants, push, groups) }
    }

    fn embed(&self, op: &Embed, bucket: Bucket) -> Result<Call> {
        let Embed { table, scale, out } = op;
        let m = self.matrix(*table);
        let packing = Packing::of(m.format, m.rows, m.cols)?;
        let mut constants = vec![
            (0, 256),
            (1, self.info.subgroup),
            (2, 256),
            (3, m.cols as u32),
            (4, code_number(m.format.code)),
            (5, packing.map_or(32, |p| p.width as u32)),
            (6, group(m.format.group)),
            (7, m.format.hadamard as u32),
        ];
        constants.extend(trellis_constants(m.format.code, [9, 11]));
        let push = Push::new()
            .at(m.codes)
            .at(m.scales)
            .at(self.at(*out))
            .at(self.at(self.step))
            .float(*scale)
            .word(self.max_rows);
        Ok(self.call(Shader::Embed, constants, push, [bucket.rows, 1, 1], vec![Touch::Write(*out)]))
    }

    pub(super) fn rope(&self, op: &Rope, bucket: Bucket) -> Call {
        let Rope { q, k, v, q_norm, k_norm, eps, n_heads, rope_table, kv } = op;
        let constants = vec![
            (0, self.info.subgroup),
            (1, self.info.subgroup),
            (2, kv.head_dim as u32),
            (3, kv_code(kv)),
        ];
        let push =
            [*q, *k, *v, *q_norm, *k_norm, *rope_table, kv.scratch_k, kv.scratch_v, self.step];
        let push = push.into_iter().fold(Push::new(), |p, id| p.at(self.at(id)));
        let push = push.float(*eps).word(*n_heads).word(kv.n_kv_heads).word(self.max_rows);
        let touches = vec![
            Touch::Write(*q),
            Touch::Write(*k),
            Touch::Read(*v),
            Touch::Write(kv.scratch_k),
            Touch::Write(kv.scratch_v),
        ];
        let groups = [n_heads + 2 * kv.n_kv_heads, bucket.rows, 1];
        self.call(Shader::Rope, constants, push, groups, touches)
    }

    fn attention(
        &self,
        op: &Attention,
        prepare: Option<&Act>,
        read_later: bool,
        bucket: Bucket,
        out_calls: &mut Vec<Call>,
    ) -> Result<()> {
        let Attention { q, out, n_heads, scale, kv, range: _ } = op;
        let (dim, gq) = (head_dim(kv)?, n_heads / kv.n_kv_heads);
        // Pages of a row: all of them, or those that a window can touch.
        let slots =
            kv.pages.window.map_or(bucket.pages, |w| bucket.pages.min(w.div_ceil(PAGE) + 1));
        let floats = bucket.rows * n_heads * slots * (dim + 2);
        let split = bucket.rows <= SPLIT_ROWS && floats <= self.own.partial_floats;
        // Rows of a block: as many as the shared memory holds queries and exponentials for.
        let shared = |rows: usize| {
            rows * gq * (dim + PAGE + 32) * 4 + rows * PAGE * 2 + kv.scales() * PAGE * 4
        };
        let fits = |rows: usize| shared(rows) <= self.info.max_shared.min(48 << 10) as usize;
        // Fewer rows a block keep more of a large device busy while there are few pages.
        let busy = |rows: usize| {
            kv.n_kv_heads * bucket.rows.div_ceil(rows) * if split { slots } else { 1 }
                >= self.info.busy
        };
        let most = if bucket.mixed { 1 } else { bucket.rows.clamp(1, self.block_rows) };
        let rows: Vec<usize> =
            [8, 4, 2, 1].into_iter().filter(|r| *r <= most && r * gq <= 16 && fits(*r)).collect();
        let rows = rows.iter().find(|r| busy(**r)).or(rows.last()).copied();
        let Some(rows) = rows else {
            bail!("{gq} query heads of {dim} channels do not fit the GPU's shared memory")
        };
        let constants = vec![
            (1, self.info.subgroup),
            (2, dim as u32),
            (3, gq as u32),
            (4, rows as u32),
            (5, kv_code(kv)),
            (6, split as u32),
        ];
        let target = if split { self.own.partials } else { *out };
        let push = [*q, target, kv.k, kv.v, kv.scratch_k, kv.scratch_v, self.step];
        let push = push.into_iter().fold(Push::new(), |p, id| p.at(self.at(id)));
        let window = kv.pages.window.unwrap_or(0);
        let push = push.float(*scale).word(kv.n_kv_heads).word(kv.pages.count).word(kv.all_pages());
        let push = push.word(window).word(self.max_rows).word(slots).word(0).at(0);
        // Rows of a block may look at pages apart by one.
        let pages =
            if split { slots + (kv.pages.window.is_some() && rows > 1) as usize } else { 1 };
        let groups = [kv.n_kv_heads, bucket.rows.div_ceil(rows), pages];
        let touches = vec![
            Touch::Read(*q),
            Touch::Read(kv.scratch_k),
            Touch::Read(kv.scratch_v),
            Touch::Write(target),
        ];
        let mut call = self.call(Shader::Attention, constants, push, groups, touches);
        call.work = 2 * (bucket.rows * slots * PAGE * n_heads * dim) as u64;
        if split {
            let z = (prepare.is_none() || read_later).then_some(*out);
            let joins = self.can_join(prepare, groups, rows, gq * dim, bucket);
            let merge = Some(Merge { head_dim: dim, window, slots: if joins { 0 } else { slots } });
            let (add, w_add, w, cols, rows) = (None, None, None, n_heads * dim, RowSet::All);
            let work = RowWork {
                x: target,
                add,
                w_add,
                w,
                z,
                prepare,
                cols,
                eps: 0.0,
                rows,
                glu: false,
                merge,
            };
            let merge = self.row_call(work, bucket);
            if joins {
                self.finish_join(&mut call, merge);
                out_calls.push(call);
            } else {
                out_calls.extend([call, merge]);
            }
            return Ok(());
        }
        out_calls.push(call);
        if let Some(act) = prepare {
            let op = Prepare { input: *out, act: *act, rows: RowSet::All };
            out_calls.push(self.prepare(&op, bucket));
        }
        Ok(())
    }

    /// Attention over the pages behind those that another device attends.
    fn partial_attention(
        &self,
        op: &Attention,
        offloaded: OffloadedPages,
        bucket: Bucket,
    ) -> Result<Call> {
        let Attention { q, out, n_heads, scale, kv, range: _ } = op;
        let dim = head_dim(kv)?;
        let push = [*q, *out, kv.k, kv.v, kv.scratch_k, kv.scratch_v, self.step];
        let push = push.into_iter().fold(Push::new(), |p, id| p.at(self.at(id)));
        let push = push
            .float(*scale)
            .word(*n_heads)
            .word(kv.n_kv_heads)
            .word(kv.pages.count)
            .word(kv.all_pages());
        let push = push.word(self.max_rows);
        let touches = vec![
            Touch::Read(*q),
            Touch::Read(kv.scratch_k),
            Touch::Read(kv.scratch_v),
            Touch::Write(*out),
        ];
        let constants = vec![(2, dim as u32), (5, kv_code(kv))];
        let groups = [*n_heads, bucket.rows, 1];
        Ok(self.call(
            Shader::PartialAttention,
            constants,
            push.word(offloaded.lag).word(offloaded.share),
            groups,
            touches,
        ))
    }

    fn best(&self, op: &Best, bucket: Bucket) -> [Call; 2] {
        let Best { logits, vocab, maxima, lists } = op;
        [0, 1].map(|stage| {
            let push = [*logits, *maxima, *lists, self.step]
                .into_iter()
                .fold(Push::new(), |p, id| p.at(self.at(id)));
            let touches = vec![Touch::Read(*logits), Touch::Write(*maxima), Touch::Write(*lists)];
            let constants = vec![(1, stage), (2, best::MOST as u32)];
            self.call(
                Shader::Best,
                constants,
                push.word(*vocab),
                [best::CHUNKS, bucket.selected, 1],
                touches,
            )
        })
    }

    fn commit(&self, op: &Commit, bucket: Bucket) -> Option<Call> {
        let Commit { layers } = op;
        let first = layers.first()?;
        let constants = vec![(0, 64), (1, kv_code(first))];
        let push = Push::new().at(self.at(self.own.layers)).at(self.at(self.step));
        let push = push.word(first.n_kv_heads).word(first.head_dim).word(self.max_rows);
        let touches =
            layers.iter().flat_map(|kv| [Touch::Write(kv.k), Touch::Write(kv.v)]).collect();
        let groups = [bucket.path, first.n_kv_heads, layers.len()];
        Some(self.call(Shader::Commit, constants, push, groups, touches))
    }
}

/// Channels of a head, if the kernels of attention take so many.
fn head_dim(kv: &KvLayer) -> Result<usize> {
    let dim = kv.head_dim;
    ensure!(
        dim.is_power_of_two() && (16..=256).contains(&dim),
        "the GPU kernels take head dimensions of 16 to 256 that are powers of two, not {dim}"
    );
    Ok(dim)
}

/// `KV` of `kv.glsl`.
fn kv_code(kv: &KvLayer) -> u32 {
    match kv.format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Q8 => 2,
    }
}

/// Columns that share a scale; 0 for a whole row.
fn group(group: Group) -> u32 {
    match group {
        Group::Row => 0,
        Group::Cols(n) => n as u32,
    }
}

pub(super) fn trellis_constants(code: Code, [step, multiplier]: [u32; 2]) -> Constants {
    Trellis::of(code).map_or_else(Vec::new, |t| vec![(step, t.step), (multiplier, t.multiplier)])
}
