//! Vector kernels for single rows. Norms are the code of the reference, compiled for each
//! instruction set. Preparation and rotation have their own code, with the reference's operations
//! in the same order.

use super::each_isa::for_each_isa;
use super::simd::{Element, Lanes};
use crate::compute::act::{Act, TRIED};
use crate::compute::cache::{KvFormat, KvLayer};
use crate::compute::memory::Buffers;
use crate::compute::op::{Cap, Combine, Rope, RopeKeys};
use crate::compute::operand::BufferId;
use crate::compute::reference::{self, MAX_HEAD_DIM, q8, rows};
use crate::tensor::hadamard;
use crate::tensor::math::{LANES, Scale, max_abs};
use half::f16;
use std::ops::Range;

for_each_isa! {
    /// See [`rows::norm`].
    pub fn norm(
        x: &mut [f32],
        add: Option<rows::Added<'_>>,
        w: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = norm_body
}

#[inline(always)]
fn norm_body<L: Lanes>(
    x: &mut [f32],
    add: Option<rows::Added<'_>>,
    w: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    rows::norm(x, add, w, eps, out);
}

for_each_isa! {
    /// See [`reference::cap`].
    pub fn cap(buffers: &Buffers, op: &Cap, row: usize, part: Range<usize>) = cap_body
}

#[inline(always)]
fn cap_body<L: Lanes>(buffers: &Buffers, op: &Cap, row: usize, part: Range<usize>) {
    reference::cap(buffers, op, row, part);
}

for_each_isa! {
    /// See [`reference::experts::combine`].
    pub fn combine(buffers: &Buffers, op: &Combine, row: usize) = combine_body
}

#[inline(always)]
fn combine_body<L: Lanes>(buffers: &Buffers, op: &Combine, row: usize) {
    reference::experts::combine(buffers, op, row);
}

for_each_isa! {
    /// Runs [`Prepare`](crate::compute::Prepare) for the groups `which` of one row. A row of
    /// floats, or with a Hadamard transform, is prepared as a whole. `spare` is the working memory
    /// of the thread.
    pub fn prepare(
        buffers: &Buffers,
        input: BufferId,
        act: &Act,
        row: usize,
        which: Range<usize>,
        spare: &mut Vec<f32>,
    ) = prepare_body
}

#[inline(always)]
fn prepare_body<L: Lanes>(
    buffers: &Buffers,
    input: BufferId,
    act: &Act,
    row: usize,
    which: Range<usize>,
    spare: &mut Vec<f32>,
) {
    let cols = act.cols;
    // SAFETY: one thread prepares one row; the input is not written by this op.
    let input: &[f32] = unsafe { buffers.slice(input, row * cols, cols) };
    if !act.format.int8 {
        // SAFETY: as above.
        transform::<L>(input, unsafe { buffers.slice_mut(act.values, row * cols, cols) });
        return;
    }
    let input = if act.format.hadamard {
        spare.resize(spare.len().max(cols), 0.0);
        transform::<L>(input, &mut spare[..cols]);
        &spare[..cols]
    } else {
        input
    };
    let groups = act.format.groups(cols);
    let (width, first, n) = (cols / groups, row * groups + which.start, which.len());
    // SAFETY: as above; a group belongs to one thread.
    let (codes, scales, sums): (&mut [i8], &mut [f32], &mut [i32]) = unsafe {
        (
            buffers.slice_mut(act.values, first * width, n * width),
            buffers.slice_mut(act.scales, first, n),
            buffers.slice_mut(act.sums, first, n),
        )
    };
    let input = &input[which.start * width..which.end * width];
    let tried = act.format.tried();
    let groups = input.chunks(2 * width).zip(codes.chunks_mut(2 * width));
    for ((input, codes), (scales, sums)) in groups.zip(scales.chunks_mut(2).zip(sums.chunks_mut(2)))
    {
        let (input, codes) = (input.chunks_exact(width), codes.chunks_exact_mut(width));
        let tops = if tried > 1 { best_tops::<L>(input.clone()) } else { [rows::MAX; 2] };
        let factors = scales.iter_mut().zip(sums);
        for (((input, codes), (scale, sum)), top) in input.zip(codes).zip(factors).zip(tops) {
            (*scale, *sum) = quantize_group::<L>(input, codes, top, tried);
        }
    }
}

/// Returns [`rows::best_top`] of each of one or two groups of equal length. The candidates of a
/// group fill half a vector.
#[inline(always)]
fn best_tops<'a, L: Lanes>(mut groups: impl Iterator<Item = &'a [f32]>) -> [f32; 2] {
    const { assert!(2 * TRIED == LANES) };
    let (Some(first), tops) = (groups.next(), rows::tops()) else { return [rows::MAX; 2] };
    let pair = [first, groups.next().unwrap_or(first)];
    let width = pair[0].len();
    assert_eq!(width, pair[1].len());
    let scales = [scale_of::<L>(pair[0]), scale_of::<L>(pair[1])];
    let inverses: [f32; LANES] =
        std::array::from_fn(|i| scales[i / TRIED].inverse(tops[i % TRIED]));
    // SAFETY: the array is a vector.
    let inverses = unsafe { L::load(inverses.as_ptr()) };
    let (whole, less, minus) = (L::splat(rows::WHOLE), L::splat(-rows::WHOLE), L::splat(-1.0));
    let mut sums = L::zero();
    for lane in 0..LANES {
        let mut squares = L::zero();
        let mut i = lane;
        while i < width {
            let x = L::pair(pair[0][i], pair[1][i]).mul(inverses);
            i += LANES;
            let error = x.fma(minus, x.add(whole).add(less));
            squares = error.fma(error, squares);
        }
        sums = sums.add(squares);
    }
    let sums = array(sums);
    let errors =
        |half: usize| std::array::from_fn(|i| sums[half * TRIED + i] / (tops[i] * tops[i]));
    [rows::best_top(errors(0)), rows::best_top(errors(1))]
}

/// Computes [`hadamard::transform`] from one row to another.
#[inline(always)]
fn transform<L: Lanes>(input: &[f32], out: &mut [f32]) {
    const VECTORS: usize = hadamard::WIDTH / LANES;
    let blocks = input
        .as_chunks::<{ hadamard::WIDTH }>()
        .0
        .iter()
        .zip(out.as_chunks_mut::<{ hadamard::WIDTH }>().0);
    for (block, (from, to)) in blocks.enumerate() {
        let mut v = [L::zero(); VECTORS];
        for (i, v) in v.iter_mut().enumerate() {
            let column = block * hadamard::WIDTH + i * LANES;
            let signs = hadamard::signs(column as u32 / 32) >> (column % 32);
            // SAFETY: the block holds 8 vectors.
            *v = unsafe { L::load(from.as_ptr().add(i * LANES)) }.flip(signs as u16);
        }
        let minus = L::splat(-1.0);
        for half in [4, 2, 1] {
            for i in (0..VECTORS).filter(|i| i & half == 0) {
                (v[i], v[i + half]) = (v[i].add(v[i + half]), v[i + half].fma(minus, v[i]));
            }
        }
        for (i, v) in v.into_iter().enumerate() {
            let v = v.butterfly::<8>().butterfly::<4>().butterfly::<2>().butterfly::<1>();
            // SAFETY: as above.
            unsafe { v.mul(L::splat(hadamard::SCALE)).store(to.as_mut_ptr().add(i * LANES)) };
        }
    }
}

/// Returns the lanes of a vector.
#[inline(always)]
fn array<L: Lanes>(v: L) -> [f32; LANES] {
    let mut lanes = [0f32; LANES];
    // SAFETY: the array has a vector's lanes.
    unsafe { v.store(lanes.as_mut_ptr()) };
    lanes
}

/// Returns the scale of a group that consists of whole vectors.
#[inline(always)]
fn scale_of<L: Lanes>(values: &[f32]) -> Scale {
    let mut most = [L::zero(); 4];
    for (i, vector) in values.as_chunks::<LANES>().0.iter().enumerate() {
        // SAFETY: the chunk is a vector.
        most[i % 4] = most[i % 4].max_abs(unsafe { L::load(vector.as_ptr()) });
    }
    Scale::of(max_abs(&array(most[0].max_abs(most[1]).max_abs(most[2].max_abs(most[3])))))
}

/// [`rows::quantize_group`] in vectors, with the code of the largest value as an argument.
#[inline(always)]
fn quantize_group<L: Lanes>(
    values: &[f32],
    codes: &mut [i8],
    top: f32,
    tried: usize,
) -> (f32, i32) {
    if !values.len().is_multiple_of(LANES) {
        return rows::quantize_group(values, codes, tried);
    }
    assert_eq!(values.len(), codes.len());
    let vectors = values.len() / LANES;
    let load = |i: usize| {
        debug_assert!(i < vectors);
        // SAFETY: callers count up to `vectors`.
        unsafe { L::load(values.as_ptr().add(i * LANES)) }
    };
    let scale = scale_of::<L>(values);
    if !scale.has_codes() {
        codes.fill(0);
        return (scale.step(rows::MAX), 0);
    }
    let (whole, less) = (L::splat(rows::WHOLE), L::splat(-rows::WHOLE));
    let (inv, mut products) = (L::splat(scale.inverse(top)), L::zero());
    for i in 0..vectors {
        let x = load(i).mul(inv);
        products = x.add(whole).add(less).fma(x, products);
        // SAFETY: the codes are as many as the values, checked above.
        unsafe { x.store_i8(codes.as_mut_ptr().add(i * LANES)) };
    }
    let fit = if tried > 1 { rows::fit(&array(products), codes) } else { 1.0 };
    (scale.step(top) * fit, codes.iter().map(|c| *c as i32).sum())
}

for_each_isa! {
    /// Runs [`Rope`] for some heads of one row. `heads` counts kv heads, each with the query heads
    /// that share it. Threads divide heads and not rows, because scratch keys of adjacent rows
    /// share a cache line. `spare` is the working memory of the thread.
    pub fn rope(
        buffers: &Buffers,
        op: &Rope,
        max_rows: usize,
        row: usize,
        heads: Range<usize>,
        spare: &mut Vec<f32>,
    ) = rope_body
}

#[inline(always)]
fn rope_body<L: Lanes>(
    buffers: &Buffers,
    op: &Rope,
    max_rows: usize,
    row: usize,
    heads: Range<usize>,
    spare: &mut Vec<f32>,
) {
    let Rope { q, q_norm, keys, eps, n_heads, rope_table, kv } = op;
    let (dim, n_kv) = (kv.head_dim, kv.n_kv_heads);
    let group = n_heads / n_kv;
    if heads.is_empty() {
        return;
    }
    // SAFETY: one thread owns these heads of q, k and scratch; the rest is read only.
    unsafe {
        let (cos, sin) = buffers.slice::<f32>(*rope_table, row * dim, dim).split_at(dim / 2);
        let q_norm = buffers.slice(*q_norm, 0, dim);
        let queries = buffers.slice_mut::<f32>(
            *q,
            (row * n_heads + heads.start * group) * dim,
            heads.len() * group * dim,
        );
        for head in queries.chunks_exact_mut(dim) {
            rows::norm_rope(head, q_norm, *eps, cos, sin);
        }
        let Some(RopeKeys { k, v, k_norm, v_norm }) = keys else { return };
        let k_norm = buffers.slice(*k_norm, 0, dim);
        let at = (row * n_kv + heads.start) * dim;
        let keys: &mut [f32] = buffers.slice_mut(*k, at, heads.len() * dim);
        for head in keys.chunks_exact_mut(dim) {
            rows::norm_rope(head, k_norm, *eps, cos, sin);
        }
        let values: &mut [f32] = buffers.slice_mut(*v, at, heads.len() * dim);
        if *v_norm {
            values.chunks_exact_mut(dim).for_each(|head| rows::norm_head(head, *eps));
        }
        let values = &*values;
        if kv.format == KvFormat::Q8 {
            for (h, head) in heads.enumerate() {
                store_codes::<L>(
                    buffers,
                    kv,
                    [&keys[h * dim..][..dim], &values[h * dim..][..dim]],
                    max_rows,
                    (row, head),
                );
            }
            return;
        }
        let (column, to) = ((kv.scratch_k, heads.start * dim * max_rows + row), (kv.scratch_v, at));
        match kv.format {
            KvFormat::F32 => {
                store_row::<L, f32>(buffers, keys, values, column, to, max_rows, spare)
            }
            KvFormat::F16 => {
                store_row::<L, f16>(buffers, keys, values, column, to, max_rows, spare)
            }
            KvFormat::Q8 => {}
        }
    }
}

/// Rounds keys and values to the cache's format. Keys are stored in a column with `max_rows`
/// elements between them, values in a row.
///
/// # Safety
/// No other thread accesses that column and that row.
#[inline(always)]
unsafe fn store_row<L: Lanes, E: Element>(
    buffers: &Buffers,
    keys: &[f32],
    values: &[f32],
    column: (BufferId, usize),
    to: (BufferId, usize),
    max_rows: usize,
    spare: &mut Vec<f32>,
) {
    let n = keys.len();
    assert!(n.is_multiple_of(LANES) && values.len() == n && size_of::<E>() <= size_of::<f32>());
    spare.resize(spare.len().max(n), 0.0);
    let rounded: *mut E = spare.as_mut_ptr().cast();
    let column: *mut E = buffers.part(column.0, column.1, (n - 1) * max_rows + 1);
    let to: *mut E = buffers.part(to.0, to.1, n);
    for i in (0..n).step_by(LANES) {
        // SAFETY: i + 16 <= n, and all three hold n elements (the column with a stride).
        unsafe {
            E::store(L::load(keys.as_ptr().add(i)), rounded.add(i));
            E::store(L::load(values.as_ptr().add(i)), to.add(i));
        }
    }
    for d in 0..n {
        // SAFETY: as above.
        unsafe { *column.add(d * max_rows) = *rounded.add(d) };
    }
}

/// Stores one head's key and value as int8 with scales, see [`q8::quantize_group`].
///
/// # Safety
/// No other thread accesses that head of that row.
#[inline(always)]
unsafe fn store_codes<L: Lanes>(
    buffers: &Buffers,
    kv: &KvLayer,
    [key, value]: [&[f32]; 2],
    max_rows: usize,
    (row, head): (usize, usize),
) {
    let (dim, group) = (kv.head_dim, kv.format.group(kv.head_dim));
    let mut codes = [0i8; MAX_HEAD_DIM];
    assert!(dim <= MAX_HEAD_DIM && group.is_multiple_of(LANES) && kv.key_block == 2);
    for (id, values) in [(kv.scratch_k, key), (kv.scratch_v, value)] {
        for (g, (values, codes)) in
            values.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate()
        {
            let mut most = L::zero();
            // SAFETY: a group is whole vectors, and i the first lane of one.
            let load = |i| unsafe { L::load(values.as_ptr().add(i)) };
            (0..group).step_by(LANES).for_each(|i| most = most.max_abs(load(i)));
            let scale = q8::scale_of(max_abs(&array(most)));
            match q8::inverse(scale).map(L::splat) {
                None => codes.fill(0),
                Some(inv) => (0..group).step_by(LANES).for_each(|i| {
                    // SAFETY: the group of codes has as many vectors.
                    unsafe { load(i).mul(inv).store_i8(codes.as_mut_ptr().add(i)) }
                }),
            }
            // SAFETY: the caller upholds the contract.
            unsafe {
                buffers.slice_mut(id, kv.scratch_scale_at(max_rows, head, g, row), 1)[0] = scale
            };
        }
        // SAFETY: the caller upholds the contract.
        unsafe {
            if id == kv.scratch_v {
                buffers
                    .slice_mut(id, (row * kv.n_kv_heads + head) * dim, dim)
                    .copy_from_slice(&codes[..dim]);
                continue;
            }
            // Pairs of channels are stored with a distance of `max_rows` pairs.
            let column: *mut [i8; 2] =
                buffers.part(id, head * dim / 2 * max_rows + row, (dim / 2 - 1) * max_rows + 1);
            for (d, pair) in codes[..dim].as_chunks::<2>().0.iter().enumerate() {
                *column.add(d * max_rows) = *pair;
            }
        }
    }
}
