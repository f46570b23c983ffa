//! Attention loops over int8 keys and values. Keys are multiplied by 16-bit queries as integers.
//! The scale of a value is multiplied into its exponential.

use super::{AttentionInput, CacheFormat, HeadPart, MAX_SLOTS, fits};
use crate::compute::cpu::simd::Lanes;
use crate::compute::poison;
use crate::compute::reference::{MAX_HEAD_DIM, q8};
use crate::kv::PAGE;
use crate::tensor::math::LANES;
use half::f16;
use std::ops::Range;

/// A cache of int8 codes with scales.
pub struct Codes;

/// Buffers of one thread.
#[derive(Default)]
pub struct QuantizedWork {
    queries: Vec<i32>,         // [slots, head_dim / 2]: pairs of codes
    factors: [f32; MAX_SLOTS], // factors of the queries' codes
    weights: Vec<f32>,         // [slots, scales, PAGE]: exponentials times scales of values
}

impl QuantizedWork {
    /// Poisons the memory that the next call computes.
    pub fn poison(&mut self) {
        let QuantizedWork { queries, factors, weights } = self;
        poison::fill(bytemuck::cast_slice_mut(queries));
        poison::fill(bytemuck::cast_slice_mut(factors));
        poison::fill(bytemuck::cast_slice_mut(weights));
    }
}

impl CacheFormat for Codes {
    #[inline(always)]
    fn take_queries<L: Lanes, const N: usize>(q: &[&[f32]; N], work: &mut QuantizedWork) {
        work.queries.clear();
        for (q, factor) in q.iter().zip(&mut work.factors) {
            let mut codes = [0i16; MAX_HEAD_DIM];
            *factor = q8::quantize_query(q, &mut codes[..q.len()]);
            let pairs = codes[..q.len()].as_chunks::<2>().0;
            work.queries
                .extend(pairs.iter().map(|[low, high]| *low as u16 as i32 | (*high as i32) << 16));
        }
    }

    #[inline(always)]
    fn score<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        _: &[&[f32]; N],
        work: &QuantizedWork,
        keys: HeadPart,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let (dim, stride) = (a.op.kv.head_dim, keys.stride);
        let (mut start, end) = (columns.start / LANES * LANES, columns.end.next_multiple_of(LANES));
        let codes: &[i8] = a.read(keys.id, keys.codes, dim * stride);
        let scales: &[f16] = a.read(keys.id, keys.scales, a.op.kv.scales() * stride);
        assert!(
            end <= stride
                && N * stride <= out.len()
                && work.queries.len() == N * dim / 2
                && a.op.kv.key_block == 2
        );
        if columns.is_empty() {
            return;
        }
        let walk = Walk {
            codes,
            scales,
            stride,
            dim,
            group: a.op.kv.format.group(dim),
            scale: a.op.scale,
        };
        while start < end {
            // SAFETY: the columns exist, checked above.
            let vectors = unsafe {
                match (end - start) / LANES {
                    4.. if fits::<L>(N, 4, 8) => walk.vectors::<L, N, 4>(work, start, out),
                    2.. if fits::<L>(N, 2, 8) => walk.vectors::<L, N, 2>(work, start, out),
                    _ => walk.vectors::<L, N, 1>(work, start, out),
                }
            };
            start += LANES * vectors;
        }
    }

    #[inline(always)]
    fn weigh<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        e: &[f32],
        work: &mut QuantizedWork,
        values: HeadPart,
        cached: Range<usize>,
        out: &mut [f32],
    ) {
        let (dim, groups) = (a.op.kv.head_dim, a.op.kv.scales());
        let codes: &[i8] = a.read(values.id, values.codes, dim * PAGE);
        let scales: &[f16] = a.read(values.id, values.scales, groups * PAGE);
        assert!(
            cached.end <= PAGE
                && e.len() >= N * PAGE
                && out.len() >= N * dim
                && dim.is_multiple_of(LANES)
        );
        work.weights.resize(work.weights.len().max(N * groups * PAGE), 0.0);
        for (i, g) in (0..N).flat_map(|i| (0..groups).map(move |g| (i, g))) {
            for p in (cached.start / LANES * LANES..cached.end).step_by(LANES) {
                // SAFETY: whole vectors of a page.
                unsafe {
                    let scale = L::load_f16(scales.as_ptr().add(g * PAGE + p));
                    L::load(e.as_ptr().add(i * PAGE + p))
                        .mul(scale)
                        .store(work.weights.as_mut_ptr().add((i * groups + g) * PAGE + p));
                }
            }
        }
        let mut d = 0;
        while d < dim {
            let (weights, group) = (&work.weights, dim / groups);
            // SAFETY: positions, dimensions and groups are inside the slices, checked above.
            let vectors = unsafe {
                match (dim - d) / LANES {
                    4.. if fits::<L>(N, 4, 16) => {
                        weigh_vectors::<L, N, 4>(weights, codes, dim, group, cached.clone(), d, out)
                    }
                    2.. if fits::<L>(N, 2, 16) => {
                        weigh_vectors::<L, N, 2>(weights, codes, dim, group, cached.clone(), d, out)
                    }
                    _ => {
                        weigh_vectors::<L, N, 1>(weights, codes, dim, group, cached.clone(), d, out)
                    }
                }
            };
            d += LANES * vectors;
        }
    }

    #[inline(always)]
    fn add_value<L: Lanes>(
        a: &AttentionInput<'_>,
        e: f32,
        kv_head: usize,
        row: usize,
        out: &mut [f32],
    ) {
        let (dim, group) = (a.op.kv.head_dim, a.op.kv.format.group(a.op.kv.head_dim));
        let codes: &[i8] =
            a.read(a.op.kv.scratch_v, (row * a.op.kv.n_kv_heads + kv_head) * dim, dim);
        assert!(out.len() == dim && dim.is_multiple_of(LANES));
        for d in (0..dim).step_by(LANES) {
            let at = a.op.kv.scratch_scale_at(a.max_rows, kv_head, d / group, row);
            let scale: &[f16] = a.read(a.op.kv.scratch_v, at, 1);
            let weight = L::splat(e * scale[0].to_f32());
            // SAFETY: d + 16 <= dim.
            unsafe {
                let to = out.as_mut_ptr().add(d);
                weight.fma(L::load_i8(codes.as_ptr().add(d)), L::load(to)).store(to);
            }
        }
    }
}

/// The keys of a loop over scores.
struct Walk<'a> {
    codes: &'a [i8],   // [head_dim / 2, stride, 2]
    scales: &'a [f16], // [scales, stride]
    stride: usize,
    dim: usize,
    group: usize,
    scale: f32,
}

impl Walk<'_> {
    /// Computes the scores of `B` vectors of keys. Returns `B`.
    ///
    /// # Safety
    /// Columns `start..start + 16 * B` exist in the keys and in `out`, and `work` holds `N`
    /// queries.
    #[inline(always)]
    unsafe fn vectors<L: Lanes, const N: usize, const B: usize>(
        &self,
        work: &QuantizedWork,
        start: usize,
        out: &mut [f32],
    ) -> usize {
        let (pairs, stride) = (self.dim / 2, self.stride);
        let mut total = [[L::zero(); B]; N];
        for g in 0..self.dim / self.group {
            let mut sums = [[L::no_sums(); B]; N];
            for d in g * self.group / 2..(g + 1) * self.group / 2 {
                // SAFETY: the caller upholds the contract.
                unsafe {
                    let at = self.codes.as_ptr().add((d * stride + start) * 2);
                    let keys: [L::Pairs; B] =
                        std::array::from_fn(|b| L::load_pairs(at.add(b * 2 * LANES)));
                    for i in 0..N {
                        let q = *work.queries.get_unchecked(i * pairs + d);
                        for b in 0..B {
                            sums[i][b] = L::add_pairs(sums[i][b], keys[b], q);
                        }
                    }
                }
            }
            for b in 0..B {
                // SAFETY: the caller upholds the contract.
                let scale = unsafe {
                    L::load_f16(self.scales.as_ptr().add(g * stride + start + b * LANES))
                };
                for i in 0..N {
                    total[i][b] = scale.fma(L::floats(sums[i][b]), total[i][b]);
                }
            }
        }
        for (i, total) in total.into_iter().enumerate() {
            let scale = L::splat(work.factors[i] * self.scale);
            for (b, total) in total.into_iter().enumerate() {
                // SAFETY: the caller upholds the contract.
                unsafe {
                    total.mul(scale).store(out.as_mut_ptr().add(i * stride + start + b * LANES))
                };
            }
        }
        B
    }
}

/// Computes `B` vectors of the weighted sum of values, for channels from `d` on. Returns `B`.
///
/// # Safety
/// `weights` is `[N, dim / group, PAGE]`, `codes` `[cached.end, dim]`, `out` `[N, dim]`, and d + 16
/// * B <= dim.
#[inline(always)]
unsafe fn weigh_vectors<L: Lanes, const N: usize, const B: usize>(
    weights: &[f32],
    codes: &[i8],
    dim: usize,
    group: usize,
    cached: Range<usize>,
    d: usize,
    out: &mut [f32],
) -> usize {
    let of_group: [usize; B] = std::array::from_fn(|b| (d + b * LANES) / group * PAGE);
    let of_slot = dim / group * PAGE;
    let mut acc = [[L::zero(); B]; N];
    for p in cached {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let value: [L; B] =
                std::array::from_fn(|b| L::load_i8(codes.as_ptr().add(p * dim + d + b * LANES)));
            for i in 0..N {
                for b in 0..B {
                    let weight = L::splat(*weights.get_unchecked(i * of_slot + of_group[b] + p));
                    acc[i][b] = weight.fma(value[b], acc[i][b]);
                }
            }
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        for (b, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller upholds the contract.
            unsafe { acc.store(out.as_mut_ptr().add(i * dim + d + b * LANES)) };
        }
    }
    B
}
