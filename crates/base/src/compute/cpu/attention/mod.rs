//! Attention for several (row, head) pairs at once, so that they share the reads of keys and
//! values.
//!
//! A slot is one query: row `first + slot / group`, head `kv_head * group + slot % group`. In a
//! page, each score is a chain of multiply-adds over the head dimension, and each output element
//! one over positions in ascending order. These are exactly the operations of the reference,
//! whatever other slots are in the block.

mod float;
mod q8;

use super::each_isa::for_each_isa;
use super::isa::Isa;
use super::simd::Lanes;
use crate::compute::cache::KvFormat;
use crate::compute::memory::Buffers;
use crate::compute::op;
use crate::compute::operand::BufferId;
use crate::compute::poison;
use crate::compute::reference::attention::merge;
use crate::compute::step::StepView;
use crate::kv::PAGE;
use crate::tensor::math::{self, LANES};
use bytemuck::Pod;
use float::Floats;
use half::f16;
use std::ops::Range;

/// Limit for the queries that share one loop over the keys.
pub const MAX_SLOTS: usize = 8;

/// Input of the kernel in addition to its block of slots.
pub struct AttentionInput<'a> {
    pub buffers: &'a Buffers,
    pub op: &'a op::Attention,
    pub max_rows: usize,
    pub step: &'a StepView<'a>,
}

/// Buffers of one thread, reused between calls.
#[derive(Default)]
pub struct Work {
    paths: Vec<u32>,   // [slots, max_rows]
    scratch: Vec<f32>, // [slots, max_rows]: scores against this step's keys
    scores: Vec<f32>,  // [slots, PAGE]
    page_o: Vec<f32>,  // [slots, head_dim]
    total_o: Vec<f32>, // [slots, head_dim]
    q8: q8::QuantizedWork,
}

impl Work {
    fn make_room(&mut self, max_rows: usize, head_dim: usize) {
        self.paths.resize(MAX_SLOTS * max_rows, 0);
        self.scratch.resize(MAX_SLOTS * max_rows, 0.0);
        self.scores.resize(MAX_SLOTS * PAGE, 0.0);
        self.page_o.resize(MAX_SLOTS * head_dim, 0.0);
        self.total_o.resize(MAX_SLOTS * head_dim, 0.0);
    }

    /// Poisons the memory that the next call computes.
    pub fn poison(&mut self) {
        let Work { paths, scratch, scores, page_o, total_o, q8 } = self;
        poison::fill(bytemuck::cast_slice_mut(paths));
        for floats in [scratch, scores, page_o, total_o] {
            poison::fill(bytemuck::cast_slice_mut(floats));
        }
        q8.poison();
    }
}

/// The keys or values of one kv head, in a page or in scratch.
#[derive(Clone, Copy)]
struct HeadPart {
    id: BufferId,
    /// Index of the first element.
    codes: usize,
    /// Index of the first scale, if the format has scales.
    scales: usize,
    /// Number of positions.
    stride: usize,
}

/// A cache format as attention reads it. `N` queries share each loop.
trait CacheFormat {
    /// Rounds the queries to integers, if the format computes scores from integers.
    fn take_queries<L: Lanes, const N: usize>(q: &[&[f32]; N], work: &mut q8::QuantizedWork);
    /// Computes scaled dot products with the keys of `columns`, extended to whole vectors. `out` is
    /// `[N, keys.stride]`.
    fn score<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        q: &[&[f32]; N],
        work: &q8::QuantizedWork,
        keys: HeadPart,
        columns: Range<usize>,
        out: &mut [f32],
    );
    /// Computes `out[i] = sum over cached p of e[i, p] * values[p]`, in ascending order of p. `e`
    /// is `[N, PAGE]`.
    fn weigh<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        e: &[f32],
        work: &mut q8::QuantizedWork,
        values: HeadPart,
        cached: Range<usize>,
        out: &mut [f32],
    );
    /// Computes `out += e * value` for the value of a scratch row.
    fn add_value<L: Lanes>(
        a: &AttentionInput<'_>,
        e: f32,
        kv_head: usize,
        row: usize,
        out: &mut [f32],
    );
}

impl AttentionInput<'_> {
    /// Returns the number of queries of one kv head: live rows times heads that share it.
    pub fn slots(&self) -> usize {
        (self.step.rows - self.step.first) * self.group()
    }

    fn group(&self) -> usize {
        self.op.n_heads / self.op.kv.n_kv_heads
    }

    /// Returns the index of a slot's query and output.
    fn at(&self, kv_head: usize, slot: usize) -> usize {
        let row = self.step.first + slot / self.group();
        (row * self.op.n_heads + kv_head * self.group() + slot % self.group()) * self.op.kv.head_dim
    }

    fn row(&self, slot: usize) -> usize {
        self.step.first + slot / self.group()
    }

    /// Returns the first slot after those of the same tree.
    fn end_of_tree(&self, slot: usize) -> usize {
        (self.step.tree(self.row(slot)).end - self.step.first) * self.group()
    }

    /// Returns the keys or values of a physical page.
    fn page(&self, id: BufferId, page: usize, kv_head: usize) -> HeadPart {
        let codes = (page * self.op.kv.n_kv_heads + kv_head) * self.op.kv.head_dim * PAGE;
        HeadPart { id, codes, scales: self.op.kv.scale_at(page, kv_head, 0, 0), stride: PAGE }
    }

    /// Returns elements of a buffer that attention only reads: queries and caches.
    #[inline(always)]
    fn read<T: Pod>(&self, id: BufferId, start: usize, len: usize) -> &[T] {
        debug_assert_ne!(id, self.op.out);
        // SAFETY: while attention runs, threads only write to its output.
        unsafe { self.buffers.slice(id, start, len) }
    }

    fn scratch_keys(&self, kv_head: usize) -> HeadPart {
        let codes = kv_head * self.op.kv.head_dim * self.max_rows;
        let scales = self.op.kv.scratch_scale_at(self.max_rows, kv_head, 0, 0);
        HeadPart { id: self.op.kv.scratch_k, codes, scales, stride: self.max_rows }
    }
}

for_each_isa! {
    /// Computes the attention of slots of one kv head. `slots` must have at most [`MAX_SLOTS`].
    pub fn attend(
        a: &AttentionInput<'_>,
        kv_head: usize,
        slots: Range<usize>,
        work: &mut Work,
    ) = attend_body
}

#[inline(always)]
fn attend_body<L: Lanes>(
    a: &AttentionInput<'_>,
    kv_head: usize,
    slots: Range<usize>,
    work: &mut Work,
) {
    match a.op.kv.format {
        KvFormat::F32 => attend_in_blocks::<L, Floats<f32>>(a, kv_head, slots, work),
        KvFormat::F16 => attend_in_blocks::<L, Floats<f16>>(a, kv_head, slots, work),
        KvFormat::Q8 => attend_in_blocks::<L, q8::Codes>(a, kv_head, slots, work),
    }
}

/// Returns whether sums of `n` queries times `b` vectors fit in the registers, together with their
/// operands. `wide` is the limit for 32 registers of a whole vector each. AVX2 has 16 registers of
/// half a vector, NEON 32 of a quarter.
#[inline(always)]
fn fits<L: Lanes>(n: usize, b: usize, wide: usize) -> bool {
    n * b <= if matches!(L::ISA, Isa::Avx2 | Isa::NeonDot) { 4 } else { wide }
}

#[inline(always)]
fn attend_in_blocks<L: Lanes, S: CacheFormat>(
    a: &AttentionInput<'_>,
    kv_head: usize,
    slots: Range<usize>,
    work: &mut Work,
) {
    let mut at = slots.start;
    while at < slots.end {
        // Queries of one sequence share a loop over its keys.
        at += match slots.end.min(a.end_of_tree(at)) - at {
            8.. if fits::<L>(8, 1, 8) => block::<L, S, 8>(a, kv_head, at, work),
            4.. => block::<L, S, 4>(a, kv_head, at, work),
            2.. => block::<L, S, 2>(a, kv_head, at, work),
            _ => block::<L, S, 1>(a, kv_head, at, work),
        };
    }
}

/// Computes `N` slots, starting at `first`. Returns `N`.
#[inline(always)]
fn block<L: Lanes, S: CacheFormat, const N: usize>(
    a: &AttentionInput<'_>,
    kv_head: usize,
    first: usize,
    work: &mut Work,
) -> usize {
    let (kv, step, dim) = (&a.op.kv, a.step, a.op.kv.head_dim);
    work.make_room(a.max_rows, dim);
    let q: [&[f32]; N] = std::array::from_fn(|i| a.read(a.op.q, a.at(kv_head, first + i), dim));
    let root = step.roots[a.row(first)] as usize;
    let (base, sequence) = (step.base(root), step.sequences[root] as usize);
    let ends: [usize; N] = std::array::from_fn(|i| a.op.end(step, a.row(first + i)));
    let mut last = [0usize; N]; // last position that each slot's row sees
    for i in 0..N {
        let path = &mut work.paths[i * a.max_rows..][..a.max_rows];
        last[i] = base + step.ancestors(ends[i], path) - 1;
    }
    let begin: [usize; N] =
        std::array::from_fn(|i| a.op.first(step.positions[a.row(first + i)] as usize));
    let lowest = begin.into_iter().min().unwrap_or(0);
    let highest = last.into_iter().max().unwrap_or(0);

    let scratch_rows = ends.into_iter().max().unwrap_or(0) + 1;
    S::take_queries::<L, N>(&q, &mut work.q8);
    if highest >= base {
        let keys = a.scratch_keys(kv_head);
        S::score::<L, N>(a, &q, &work.q8, keys, root..scratch_rows, &mut work.scratch);
    }

    let (mut m, mut l, mut started) = ([0f32; N], [0f32; N], [false; N]);
    for page in lowest / PAGE..=highest / PAGE {
        let span = page * PAGE..(page + 1) * PAGE;
        let committed = lowest.max(span.start)..base.min(span.end).max(lowest.max(span.start));
        let place = kv.page(step, sequence, page);
        let [keys, values] = [kv.k, kv.v].map(|id| a.page(id, place, kv_head));
        let cached = committed.start - span.start..committed.end - span.start;
        S::score::<L, N>(a, &q, &work.q8, keys, cached.clone(), &mut work.scores);
        let mut page_m = [0f32; N];
        let mut page_l = [0f32; N];
        let mut seen: [Range<usize>; N] = std::array::from_fn(|_| 0..0);
        for i in 0..N {
            let visible = begin[i].max(span.start)..(last[i] + 1).min(span.end);
            if visible.is_empty() {
                work.scores[i * PAGE..][cached.clone()].fill(0.0);
                continue;
            }
            let path = &work.paths[i * a.max_rows..];
            for p in visible.start.max(base)..visible.end {
                work.scores[i * PAGE + p - span.start] =
                    work.scratch[i * a.max_rows + path[p - base] as usize];
            }
            seen[i] = visible.start - span.start..visible.end - span.start;
            (page_m[i], page_l[i]) =
                softmax(&mut work.scores[i * PAGE..][..PAGE], seen[i].clone(), cached.clone());
        }
        S::weigh::<L, N>(a, &work.scores, &mut work.q8, values, cached, &mut work.page_o);
        for i in 0..N {
            if seen[i].is_empty() {
                continue;
            }
            let o = &mut work.page_o[i * dim..][..dim];
            let path = &work.paths[i * a.max_rows..];
            for p in (seen[i].start + span.start).max(base)..seen[i].end + span.start {
                let (score, row) = (work.scores[i * PAGE + p - span.start], path[p - base]);
                S::add_value::<L>(a, score, kv_head, row as usize, o);
            }
            let total = &mut work.total_o[i * dim..][..dim];
            if started[i] {
                merge(&mut m[i], &mut l[i], total, (page_m[i], page_l[i], o));
            } else {
                (m[i], l[i], started[i]) = (page_m[i], page_l[i], true);
                total.copy_from_slice(o);
            }
        }
    }
    for i in 0..N {
        write_output(a, a.at(kv_head, first + i), &work.total_o[i * dim..][..dim], m[i], l[i]);
    }
    N
}

/// Writes the result of a slot with queries at `at`: `total` divided by the sum of the
/// exponentials, or for partial results `total` with their maximum and sum.
fn write_output(a: &AttentionInput<'_>, at: usize, total: &[f32], max: f32, sum: f32) {
    let (dim, width) = (total.len(), a.op.out_width());
    // SAFETY: each part of the output belongs to one slot, and each slot to one thread.
    let out: &mut [f32] = unsafe { a.buffers.slice_mut(a.op.out, at / dim * width, width) };
    if a.op.is_partial() {
        out[..dim].copy_from_slice(total);
        (out[dim], out[dim + 1]) = (max, sum);
        return;
    }
    for (o, t) in out.iter_mut().zip(total) {
        *o = t / sum;
    }
}

/// Replaces the scores of the `seen` part of a page by e^(s - max), and the others of `cached` by
/// zero. Returns the maximum and the sum. All become NaN if a score is not finite.
#[inline(always)]
fn softmax(scores: &mut [f32], seen: Range<usize>, cached: Range<usize>) -> (f32, f32) {
    if cached.start < seen.start {
        scores[cached.start..seen.start.min(cached.end)].fill(0.0);
    }
    if seen.end < cached.end {
        scores[seen.end.max(cached.start)..cached.end].fill(0.0);
    }
    // Whole vectors are processed. Scores outside `seen` are first the smallest number, later zero.
    let vectors = seen.start / LANES * LANES..seen.end.next_multiple_of(LANES);
    scores[vectors.start..seen.start].fill(f32::MIN);
    scores[seen.end..vectors.end].fill(f32::MIN);
    let max = math::max_finite(&scores[vectors.clone()]);
    for s in &mut scores[vectors.clone()] {
        *s = math::exp(*s - max);
    }
    scores[vectors.start..seen.start].fill(0.0);
    scores[seen.end..vectors.end].fill(0.0);
    let mut lanes = [0f32; LANES];
    for v in scores[vectors].as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] += v[i];
        }
    }
    (max, math::fold(lanes))
}
