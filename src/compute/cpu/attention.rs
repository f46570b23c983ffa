//! Attention for several (row, head) pairs at once, so that keys and values are read once for all of them.
//!
//! A slot is one query: row `first + slot / group`, head `kv_head * group + slot % group`. Within a page each score is a
//! chain of multiply-adds over the head dimension, and each output element one over positions in ascending order: exactly
//! the twin's operations, whatever else shares the block.

use super::simd::{Element, Lanes, for_each_isa};
use crate::compute::memory::Buffers;
use crate::compute::plan::{BufferId, KvFormat, KvLayer};
use crate::compute::reference::attention::merge;
use crate::compute::step::StepView;
use crate::kv::PAGE;
use crate::tensor::math::{self, LANES};
use half::f16;
use std::ops::Range;

/// Most queries that share one walk over the keys.
pub const MAX_SLOTS: usize = 8;

/// What the kernel needs to know besides the block it works on.
pub struct Attention<'a> {
    pub buffers: &'a Buffers,
    pub kv: &'a KvLayer,
    pub max_rows: usize,
    pub step: &'a StepView<'a>,
    pub q: BufferId,
    pub out: BufferId,
    pub n_heads: usize,
    pub scale: f32,
}

/// Buffers of one thread, reused between calls.
#[derive(Default)]
pub struct Work {
    paths: Vec<u32>,   // [slots, max_rows]
    scratch: Vec<f32>, // [slots, max_rows]: scores against this step's keys
    scores: Vec<f32>,  // [slots, PAGE]
    page_o: Vec<f32>,  // [slots, head_dim]
    total_o: Vec<f32>, // [slots, head_dim]
}

impl Attention<'_> {
    /// Queries of one kv head: live rows times heads that share it.
    pub fn slots(&self) -> usize {
        (self.step.rows - self.step.first) * self.group()
    }

    fn group(&self) -> usize {
        self.n_heads / self.kv.n_kv_heads
    }

    /// Where a slot's query and output lie.
    fn at(&self, kv_head: usize, slot: usize) -> usize {
        let row = self.step.first + slot / self.group();
        (row * self.n_heads + kv_head * self.group() + slot % self.group()) * self.kv.head_dim
    }

    fn row(&self, slot: usize) -> usize {
        self.step.first + slot / self.group()
    }
}

for_each_isa! {
    /// Attention of the slots of one kv head; `slots` spans at most [`MAX_SLOTS`].
    pub fn attend(a: &Attention<'_>, kv_head: usize, slots: Range<usize>, work: &mut Work) = attend_body
}

#[inline(always)]
fn attend_body<L: Lanes>(a: &Attention<'_>, kv_head: usize, slots: Range<usize>, work: &mut Work) {
    match a.kv.format {
        KvFormat::F32 => attend_in_blocks::<L, f32>(a, kv_head, slots, work),
        KvFormat::F16 => attend_in_blocks::<L, f16>(a, kv_head, slots, work),
    }
}

#[inline(always)]
fn attend_in_blocks<L: Lanes, E: Element>(a: &Attention<'_>, kv_head: usize, slots: Range<usize>, work: &mut Work) {
    let mut at = slots.start;
    while at < slots.end {
        at += match slots.end - at {
            8.. => block::<L, E, 8>(a, kv_head, at, work),
            4.. => block::<L, E, 4>(a, kv_head, at, work),
            2.. => block::<L, E, 2>(a, kv_head, at, work),
            _ => block::<L, E, 1>(a, kv_head, at, work),
        };
    }
}

/// `N` slots from `first`; returns `N`.
#[inline(always)]
fn block<L: Lanes, E: Element, const N: usize>(a: &Attention<'_>, kv_head: usize, first: usize, work: &mut Work) -> usize {
    let (kv, step, dim) = (a.kv, a.step, a.kv.head_dim);
    work.paths.resize(MAX_SLOTS * a.max_rows, 0);
    work.scratch.resize(MAX_SLOTS * a.max_rows, 0.0);
    work.scores.resize(MAX_SLOTS * PAGE, 0.0);
    work.page_o.resize(MAX_SLOTS * dim, 0.0);
    work.total_o.resize(MAX_SLOTS * dim, 0.0);
    // SAFETY (of every block below): queries and caches are only read during attention, and each output belongs to one slot.
    let q: [&[f32]; N] = std::array::from_fn(|i| unsafe { a.buffers.slice(a.q, a.at(kv_head, first + i), dim) });
    let mut last = [0usize; N]; // position of each slot's row
    for i in 0..N {
        last[i] = step.base + step.ancestors(a.row(first + i), &mut work.paths[i * a.max_rows..][..a.max_rows]) - 1;
    }
    let begin: [usize; N] = last.map(|p| kv.pages.first_visible(p));
    let lowest = begin.into_iter().min().unwrap_or(0);
    let highest = last.into_iter().max().unwrap_or(0);

    let scratch_rows = a.row(first + N - 1) + 1;
    let keys: &[E] = unsafe { a.buffers.slice(kv.scratch_k, kv_head * dim * a.max_rows, dim * a.max_rows) };
    scores::<L, E, N>(&q, keys, a.max_rows, 0..scratch_rows, &mut work.scratch, a.scale);

    let (mut m, mut l) = ([0f32; N], [0f32; N]);
    let mut started = [false; N];
    for page in lowest / PAGE..=highest / PAGE {
        let span = page * PAGE..(page + 1) * PAGE;
        let committed = lowest.max(span.start)..step.base.min(span.end).max(lowest.max(span.start));
        let physical = kv.pages.physical(page) * kv.n_kv_heads + kv_head;
        let keys: &[E] = unsafe { a.buffers.slice(kv.k, physical * dim * PAGE, dim * PAGE) };
        let values: &[E] = unsafe { a.buffers.slice(kv.v, physical * dim * PAGE, dim * PAGE) };
        let cached = committed.start - span.start..committed.end - span.start;
        scores::<L, E, N>(&q, keys, PAGE, cached.clone(), &mut work.scores, a.scale);
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
            for p in visible.start.max(step.base)..visible.end {
                work.scores[i * PAGE + p - span.start] = work.scratch[i * a.max_rows + path[p - step.base] as usize];
            }
            seen[i] = visible.start - span.start..visible.end - span.start;
            (page_m[i], page_l[i]) = softmax(&mut work.scores[i * PAGE..][..PAGE], seen[i].clone(), cached.clone());
        }
        weigh_values::<L, E, N>(&work.scores, values, dim, cached, &mut work.page_o);
        for i in 0..N {
            if seen[i].is_empty() {
                continue;
            }
            let o = &mut work.page_o[i * dim..][..dim];
            let path = &work.paths[i * a.max_rows..];
            for p in (seen[i].start + span.start).max(step.base)..seen[i].end + span.start {
                let at = (path[p - step.base] as usize * kv.n_kv_heads + kv_head) * dim;
                let value: &[E] = unsafe { a.buffers.slice(kv.scratch_v, at, dim) };
                add_value::<L, E>(work.scores[i * PAGE + p - span.start], value, o);
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
        let out: &mut [f32] = unsafe { a.buffers.slice_mut(a.out, a.at(kv_head, first + i), dim) };
        for (o, t) in out.iter_mut().zip(&work.total_o[i * dim..][..dim]) {
            *o = t / l[i];
        }
    }
    N
}

/// Scaled dot products of `N` queries with the keys of `columns`, rounded out to whole vectors: `keys` is `[head_dim, stride]`,
/// `out` is `[N, stride]`.
#[inline(always)]
fn scores<L: Lanes, E: Element, const N: usize>(
    q: &[&[f32]; N],
    keys: &[E],
    stride: usize,
    columns: Range<usize>,
    out: &mut [f32],
    scale: f32,
) {
    let (mut start, end) = (columns.start / LANES * LANES, columns.end.next_multiple_of(LANES));
    assert!(q[0].len() * stride <= keys.len() && end <= stride && N * stride <= out.len());
    if columns.is_empty() {
        return;
    }
    // Several vectors of keys at once, so that enough independent chains of multiply-adds are under way.
    while start < end {
        // SAFETY: the columns exist, checked above.
        start += LANES
            * match (end - start) / LANES {
                4.. if N <= 4 => unsafe { score_vectors::<L, E, N, 4>(q, keys, stride, start, out, scale) },
                2.. => unsafe { score_vectors::<L, E, N, 2>(q, keys, stride, start, out, scale) },
                _ => unsafe { score_vectors::<L, E, N, 1>(q, keys, stride, start, out, scale) },
            };
    }
}

/// [`scores`] of `B` vectors of keys; returns `B`.
///
/// # Safety
/// Columns `start..start + 16 * B` exist in `keys` and `out`.
#[inline(always)]
unsafe fn score_vectors<L: Lanes, E: Element, const N: usize, const B: usize>(
    q: &[&[f32]; N],
    keys: &[E],
    stride: usize,
    start: usize,
    out: &mut [f32],
    scale: f32,
) -> usize {
    let mut acc = [[L::zero(); B]; N];
    for d in 0..q[0].len() {
        // SAFETY: passed on to the caller; every query is as long as the first.
        unsafe {
            let key: [L; B] = std::array::from_fn(|b| E::load::<L>(keys.as_ptr().add(d * stride + start + b * LANES)));
            for i in 0..N {
                let q = L::splat(*q[i].get_unchecked(d));
                for b in 0..B {
                    acc[i][b] = q.fma(key[b], acc[i][b]);
                }
            }
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        for (b, acc) in acc.into_iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { acc.mul(L::splat(scale)).store(out.as_mut_ptr().add(i * stride + start + b * LANES)) };
        }
    }
    B
}

/// Turns the scores of the `seen` part of a page into e^(s - max), zero elsewhere in `cached`; returns the maximum and the sum.
#[inline(always)]
fn softmax(scores: &mut [f32], seen: Range<usize>, cached: Range<usize>) -> (f32, f32) {
    if cached.start < seen.start {
        scores[cached.start..seen.start.min(cached.end)].fill(0.0);
    }
    if seen.end < cached.end {
        scores[seen.end.max(cached.start)..cached.end].fill(0.0);
    }
    // Whole vectors: what lies outside `seen` counts as minus infinity, then as zero.
    let vectors = seen.start / LANES * LANES..seen.end.next_multiple_of(LANES);
    scores[vectors.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..vectors.end].fill(f32::NEG_INFINITY);
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for v in scores[vectors.clone()].as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] = if v[i] > lanes[i] { v[i] } else { lanes[i] };
        }
    }
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, |m, s| if s > m { s } else { m });
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

/// `out[i] = sum over cached p of e[i, p] * values[p]`, in ascending p.
#[inline(always)]
fn weigh_values<L: Lanes, E: Element, const N: usize>(
    e: &[f32],
    values: &[E],
    dim: usize,
    cached: Range<usize>,
    out: &mut [f32],
) {
    assert!(cached.end <= PAGE && values.len() >= cached.end * dim && e.len() >= N * PAGE && out.len() >= N * dim);
    assert!(dim.is_multiple_of(LANES));
    let mut d = 0;
    while d < dim {
        // SAFETY: positions, dimensions and slots are inside the slices, checked above.
        d += LANES
            * match (dim - d) / LANES {
                4.. if N <= 4 => unsafe { weigh_vectors::<L, E, N, 4>(e, values, dim, cached.clone(), d, out) },
                2.. => unsafe { weigh_vectors::<L, E, N, 2>(e, values, dim, cached.clone(), d, out) },
                _ => unsafe { weigh_vectors::<L, E, N, 1>(e, values, dim, cached.clone(), d, out) },
            };
    }
}

/// [`weigh_values`] of `B` vectors of dimensions from `d`; returns `B`.
///
/// # Safety
/// `e` is `[N, PAGE]`, `values` `[cached.end, dim]`, `out` `[N, dim]`, and d + 16 * B <= dim.
#[inline(always)]
unsafe fn weigh_vectors<L: Lanes, E: Element, const N: usize, const B: usize>(
    e: &[f32],
    values: &[E],
    dim: usize,
    cached: Range<usize>,
    d: usize,
    out: &mut [f32],
) -> usize {
    let mut acc = [[L::zero(); B]; N];
    for p in cached {
        // SAFETY: passed on to the caller.
        unsafe {
            let value: [L; B] = std::array::from_fn(|b| E::load::<L>(values.as_ptr().add(p * dim + d + b * LANES)));
            for i in 0..N {
                let e = L::splat(*e.get_unchecked(i * PAGE + p));
                for b in 0..B {
                    acc[i][b] = e.fma(value[b], acc[i][b]);
                }
            }
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        for (b, acc) in acc.into_iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { acc.store(out.as_mut_ptr().add(i * dim + d + b * LANES)) };
        }
    }
    B
}

/// `out += e * value`.
#[inline(always)]
fn add_value<L: Lanes, E: Element>(e: f32, value: &[E], out: &mut [f32]) {
    let dim = out.len();
    assert!(value.len() == dim && dim.is_multiple_of(LANES));
    for d in (0..dim).step_by(LANES) {
        // SAFETY: d + 16 <= dim.
        unsafe {
            let at = out.as_mut_ptr().add(d);
            L::splat(e).fma(E::load::<L>(value.as_ptr().add(d)), L::load(at)).store(at);
        }
    }
}
