//! Attention loops over keys and values that are stored as floats.

use super::{AttentionInput, CacheFormat, HeadPart, fits, q8};
use crate::compute::cpu::simd::{Element, Lanes, prefetch};
use crate::kv::PAGE;
use crate::tensor::math::LANES;
use std::ops::Range;

/// Cache lines that are prefetched, one per step of a loop. Each is at a new address, which the
/// hardware only predicts in long loops.
const AHEAD: usize = 16;

/// A cache with elements of type `E`.
pub struct Floats<E>(std::marker::PhantomData<E>);

impl<E: Element> CacheFormat for Floats<E> {
    #[inline(always)]
    fn take_queries<L: Lanes, const N: usize>(_: &[&[f32]; N], _: &mut q8::QuantizedWork) {}

    #[inline(always)]
    fn score<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        q: &[&[f32]; N],
        _: &q8::QuantizedWork,
        keys: HeadPart,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let stored: &[E] = a.read(keys.id, keys.codes, a.op.kv.head_dim * keys.stride);
        scores::<L, E, N>(q, stored, keys.stride, columns, out, a.op.scale);
    }

    #[inline(always)]
    fn weigh<L: Lanes, const N: usize>(
        a: &AttentionInput<'_>,
        e: &[f32],
        _: &mut q8::QuantizedWork,
        values: HeadPart,
        cached: Range<usize>,
        out: &mut [f32],
    ) {
        let stored: &[E] = a.read(values.id, values.codes, a.op.kv.head_dim * PAGE);
        weigh_values::<L, E, N>(e, stored, a.op.kv.head_dim, cached, out);
    }

    #[inline(always)]
    fn add_value<L: Lanes>(
        a: &AttentionInput<'_>,
        e: f32,
        kv_head: usize,
        row: usize,
        out: &mut [f32],
    ) {
        let at = (row * a.op.kv.n_kv_heads + kv_head) * a.op.kv.head_dim;
        add_value::<L, E>(e, a.read(a.op.kv.scratch_v, at, a.op.kv.head_dim), out);
    }
}

/// Computes scaled dot products of `N` queries with the keys of `columns`, extended to whole
/// vectors. `keys` is `[head_dim, stride]`, `out` is `[N, stride]`.
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
    // Several vectors of keys at once provide enough independent chains of multiply-adds.
    while start < end {
        // SAFETY: the columns exist, checked above.
        let vectors = unsafe {
            match (end - start) / LANES {
                4.. if fits::<L>(N, 4, 16) => {
                    score_vectors::<L, E, N, 4>(q, keys, stride, start, out, scale)
                }
                2.. if fits::<L>(N, 2, 16) => {
                    score_vectors::<L, E, N, 2>(q, keys, stride, start, out, scale)
                }
                _ => score_vectors::<L, E, N, 1>(q, keys, stride, start, out, scale),
            }
        };
        start += LANES * vectors;
    }
}

/// Computes [`scores`] of `B` vectors of keys. Returns `B`.
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
        for b in 0..B {
            prefetch(keys.as_ptr().wrapping_add((d + AHEAD) * stride + start + b * LANES));
        }
        // SAFETY: the caller upholds the contract, and every query is as long as the first.
        unsafe {
            let key: [L; B] = std::array::from_fn(|b| {
                E::load::<L>(keys.as_ptr().add(d * stride + start + b * LANES))
            });
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
            // SAFETY: the caller upholds the contract.
            unsafe {
                acc.mul(L::splat(scale)).store(out.as_mut_ptr().add(i * stride + start + b * LANES))
            };
        }
    }
    B
}

/// Computes `out[i] = sum over cached p of e[i, p] * values[p]`, in ascending order of p.
#[inline(always)]
fn weigh_values<L: Lanes, E: Element, const N: usize>(
    e: &[f32],
    values: &[E],
    dim: usize,
    cached: Range<usize>,
    out: &mut [f32],
) {
    assert!(
        cached.end <= PAGE
            && values.len() >= cached.end * dim
            && e.len() >= N * PAGE
            && out.len() >= N * dim
    );
    assert!(dim.is_multiple_of(LANES));
    let mut d = 0;
    while d < dim {
        // SAFETY: positions, dimensions and slots are inside the slices, checked above.
        let vectors = unsafe {
            match (dim - d) / LANES {
                4.. if fits::<L>(N, 4, 16) => {
                    weigh_vectors::<L, E, N, 4>(e, values, dim, cached.clone(), d, out)
                }
                2.. if fits::<L>(N, 2, 16) => {
                    weigh_vectors::<L, E, N, 2>(e, values, dim, cached.clone(), d, out)
                }
                _ => weigh_vectors::<L, E, N, 1>(e, values, dim, cached.clone(), d, out),
            }
        };
        d += LANES * vectors;
    }
}

/// Computes [`weigh_values`] of `B` vectors of dimensions, starting at `d`. Returns `B`.
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
        for b in 0..B {
            prefetch(values.as_ptr().wrapping_add((p + AHEAD) * dim + d + b * LANES));
        }
        // SAFETY: the caller upholds the contract.
        unsafe {
            let value: [L; B] =
                std::array::from_fn(|b| E::load::<L>(values.as_ptr().add(p * dim + d + b * LANES)));
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
            // SAFETY: the caller upholds the contract.
            unsafe { acc.store(out.as_mut_ptr().add(i * dim + d + b * LANES)) };
        }
    }
    B
}

/// Computes `out += e * value`.
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
