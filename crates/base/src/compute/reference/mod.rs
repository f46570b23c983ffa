//! Scalar twins of all kernels on the executor's own buffers, one row after the other. They are
//! deliberately slow and plain: `--check` and the tests compare the fast kernels with them, bit for
//! bit.

pub mod attention;
pub mod experts;
pub mod linear;
pub mod q8;
pub mod rows;

use super::act::Act;
use super::act::{ActValues, ActView};
use super::best;
use super::cache::{KvFormat, KvLayer};
use super::memory::Buffers;
use super::op::{
    Attention, Best, Cap, Commit, Concat, Embed, GateUp, Linear, Norm, Op, Prepare, Rope, RopeKeys,
};
use super::operand::{BufferId, RowSet};
use super::step::{StepLayout, StepView};
use crate::kv::PAGE;
use crate::tensor::{Matrix, is_place, math};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Runs `op` by its definition. `weights` are the canonical matrices, indexed by
/// [`super::WeightId`].
pub fn run(
    op: &Op,
    buffers: &Buffers,
    weights: &[Matrix<'static>],
    layout: StepLayout,
    step: &StepView<'_>,
) {
    match op {
        Op::Embed(op) => step.live(RowSet::All).for_each(|r| embed(buffers, op, weights, step, r)),
        Op::Concat(op) => step.live(RowSet::All).for_each(|r| concat(buffers, op, step, r)),
        Op::Norm(op) => step.live(op.rows).for_each(|r| norm(buffers, op, step, r)),
        Op::Prepare(Prepare { input, act, rows }) => {
            step.live(*rows).for_each(|r| prepare(buffers, *input, act, r))
        }
        Op::Linear(op) => linear_jobs(buffers, op, weights, step),
        Op::GateUp(op) => gate_up(buffers, op, weights, step),
        Op::Choose(op) => {
            step.live(RowSet::All).for_each(|r| experts::choose(buffers, op, r));
        }
        Op::Experts(op) => experts::experts(buffers, op, weights, step),
        Op::Combine(op) => {
            step.live(RowSet::All).for_each(|r| experts::combine(buffers, op, r));
        }
        Op::Rope(op) => step.live(RowSet::All).for_each(|r| rope(buffers, op, layout.max_rows, r)),
        Op::Attention(op) => {
            let mut path = vec![0u32; layout.max_rows];
            for r in step.live(RowSet::All) {
                let n = step.ancestors(op.end(step, r), &mut path);
                (0..op.n_heads).for_each(|head| {
                    attend(buffers, op, layout.max_rows, step, (r, head), &path[..n])
                });
            }
        }
        Op::Cap(op) => step.live(RowSet::Selected).for_each(|r| cap(buffers, op, r, 0..op.vocab)),
        Op::Best(op) => best(buffers, step, op),
        Op::Commit(Commit { layers }) => {
            layers.iter().for_each(|kv| commit(buffers, kv, layout.max_rows, step))
        }
    }
}

/// Runs [`Op::Embed`] for one row.
fn embed(
    buffers: &Buffers,
    op: &Embed,
    weights: &[Matrix<'static>],
    step: &StepView<'_>,
    r: usize,
) {
    if is_place(step.tokens[r]) {
        return;
    }
    let table = &weights[op.table.0 as usize];
    // SAFETY: the caller runs alone, and no other slice lives.
    let out: &mut [f32] = unsafe { buffers.slice_mut(op.out, r * table.cols, table.cols) };
    table.dequantize_row(step.tokens[r] as usize, out);
    out.iter_mut().for_each(|v| *v *= op.scale);
}

/// Runs [`Op::Norm`] for one row.
fn norm(buffers: &Buffers, op: &Norm, step: &StepView<'_>, r: usize) {
    let Norm { x, add, scale, w, eps, dim, out, rows } = *op;
    let from = source_row(rows, step, r);
    // SAFETY: the caller runs alone. The two written rows and the inputs are in different buffers.
    unsafe {
        let w: &[f32] = buffers.slice(w, 0, dim);
        let add = add.map(|(y, w)| rows::Added {
            out: buffers.slice(y, from * dim, dim),
            w: buffers.slice(w, 0, dim),
            scale,
        });
        let x: &mut [f32] = buffers.slice_mut(x, from * dim, dim);
        let out = buffers.slice_mut(out, r * dim, dim);
        match rows {
            RowSet::All | RowSet::Slots(_) => rows::norm(x, add, w, eps, out),
            RowSet::Selected => rows::norm(&mut x.to_vec(), add, w, eps, out),
        }
    }
}

/// Runs [`Op::Linear`] for all rows.
fn linear_jobs(buffers: &Buffers, op: &Linear, weights: &[Matrix<'static>], step: &StepView<'_>) {
    let live = step.live(op.rows);
    for job in &op.jobs {
        let matrix = &weights[job.weight.0 as usize];
        let (start, len) = (live.start * matrix.rows, live.len() * matrix.rows);
        // SAFETY: the caller runs alone; activations and outputs are different buffers.
        let (x, out) = unsafe {
            (act_view(buffers, &job.act, live.clone()), buffers.slice_mut(job.out, start, len))
        };
        linear::linear(matrix, &x, out);
    }
}

/// Runs [`Op::GateUp`] for all rows.
fn gate_up(buffers: &Buffers, op: &GateUp, weights: &[Matrix<'static>], step: &StepView<'_>) {
    let live = step.live(RowSet::All);
    let (gate, up) = (&weights[op.gate.0 as usize], &weights[op.up.0 as usize]);
    let mut g = vec![0f32; live.len() * gate.rows];
    let mut u = g.clone();
    // SAFETY: the caller runs alone; activations and outputs are different buffers.
    let (x_gate, x_up, out): (_, _, &mut [f32]) = unsafe {
        (
            act_view(buffers, &op.act_gate, live.clone()),
            act_view(buffers, &op.act_up, live.clone()),
            buffers.slice_mut(op.out, live.start * gate.rows, g.len()),
        )
    };
    linear::linear(gate, &x_gate, &mut g);
    linear::linear(up, &x_up, &mut u);
    for ((o, g), u) in out.iter_mut().zip(g).zip(u) {
        *o = math::gelu_tanh(g) * u;
    }
}

/// Runs [`Op::Concat`] for one row.
#[inline(always)]
pub fn concat(buffers: &Buffers, op: &Concat, step: &StepView<'_>, r: usize) {
    let Concat { left, right, dim, out } = *op;
    let parent = step.parents[r] as usize;
    // SAFETY: one thread writes row r of the output; both inputs are only read.
    unsafe {
        let out: &mut [f32] = buffers.slice_mut(out, 2 * r * dim, 2 * dim);
        out[..dim].copy_from_slice(buffers.slice(left, r * dim, dim));
        out[dim..].copy_from_slice(buffers.slice(right, parent * dim, dim));
    }
}

/// Runs [`Op::Attention`] for one head of one row. `path` holds the rows from the root to the row.
fn attend(
    buffers: &Buffers,
    op: &Attention,
    max_rows: usize,
    step: &StepView<'_>,
    (row, head): (usize, usize),
    path: &[u32],
) {
    let (dim, width) = (op.kv.head_dim, op.out_width());
    let at = row * op.n_heads + head;
    // SAFETY: the caller runs alone; queries and output are different buffers.
    let (q, out): (&[f32], &mut [f32]) = unsafe {
        (buffers.slice(op.q, at * dim, dim), buffers.slice_mut(op.out, at * width, width))
    };
    let total = attention::attend(buffers, op, max_rows, step, q, (row, head), path);
    if op.is_partial() {
        out[..dim].copy_from_slice(&total.o);
        (out[dim], out[dim + 1]) = (total.m, total.l);
    } else {
        out.iter_mut().zip(&total.o).for_each(|(out, o)| *out = o / total.l);
    }
}

/// Returns the row of the residual stream that belongs to row `r` of a row set.
pub fn source_row(rows: RowSet, step: &StepView<'_>, r: usize) -> usize {
    match rows {
        RowSet::All | RowSet::Slots(_) => r,
        RowSet::Selected => step.selected[r] as usize,
    }
}

/// Returns a view of rows of prepared activations.
///
/// # Safety
/// No thread writes these rows while the view lives.
pub unsafe fn act_view<'a>(
    buffers: &'a Buffers,
    act: &Act,
    rows: std::ops::Range<usize>,
) -> ActView<'a> {
    let groups = act.format.groups(act.cols);
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        ActView {
            rows: rows.len(),
            cols: act.cols,
            values: if act.format.int8 {
                ActValues::I8(buffers.slice(
                    act.values,
                    rows.start * act.cols,
                    rows.len() * act.cols,
                ))
            } else {
                ActValues::F32(buffers.slice(
                    act.values,
                    rows.start * act.cols,
                    rows.len() * act.cols,
                ))
            },
            scales: buffers.slice(act.scales, rows.start * groups, rows.len() * groups),
            sums: buffers.slice(act.sums, rows.start * groups, rows.len() * groups),
        }
    }
}

/// Runs [`Op::Prepare`] for one row.
#[inline(always)]
pub fn prepare(buffers: &Buffers, input: BufferId, act: &Act, r: usize) {
    let cols = act.cols;
    // SAFETY: one thread prepares one row; the input is not written by this op.
    unsafe {
        let input: &[f32] = buffers.slice(input, r * cols, cols);
        if !act.format.int8 {
            let out = buffers.slice_mut(act.values, r * cols, cols);
            out.copy_from_slice(input);
            rows::rotate_input(out, act.format);
            return;
        }
        let rotated: Vec<f32>;
        let input = if act.format.hadamard {
            let mut copy = input.to_vec();
            rows::rotate_input(&mut copy, act.format);
            rotated = copy;
            &rotated[..]
        } else {
            input
        };
        let groups = act.format.groups(cols);
        let codes: &mut [i8] = buffers.slice_mut(act.values, r * cols, cols);
        let scales: &mut [f32] = buffers.slice_mut(act.scales, r * groups, groups);
        let sums: &mut [i32] = buffers.slice_mut(act.sums, r * groups, groups);
        let width = cols / groups;
        for g in 0..groups {
            (scales[g], sums[g]) = rows::quantize_group(
                &input[g * width..][..width],
                &mut codes[g * width..][..width],
                act.format.tried(),
            );
        }
    }
}

/// Largest head dimension that the kernels support.
pub const MAX_HEAD_DIM: usize = 512;

/// Runs [`Op::Rope`] for one row.
#[inline(always)]
pub fn rope(buffers: &Buffers, op: &Rope, max_rows: usize, r: usize) {
    let Rope { q, q_norm, keys, eps, n_heads, rope_table, kv } = op;
    let (dim, n_kv) = (kv.head_dim, kv.n_kv_heads);
    // SAFETY: one thread owns row r of q, k and of the scratch columns; the rest is only read.
    unsafe {
        let angles: &[f32] = buffers.slice(*rope_table, r * dim, dim);
        let (cos, sin) = angles.split_at(dim / 2);
        let q_norm = buffers.slice(*q_norm, 0, dim);
        for head in 0..*n_heads {
            rows::norm_rope(
                buffers.slice_mut(*q, (r * n_heads + head) * dim, dim),
                q_norm,
                *eps,
                cos,
                sin,
            );
        }
        let Some(RopeKeys { k, v, k_norm, v_norm }) = keys else { return };
        let k_norm = buffers.slice(*k_norm, 0, dim);
        for head in 0..n_kv {
            let key: &mut [f32] = buffers.slice_mut(*k, (r * n_kv + head) * dim, dim);
            rows::norm_rope(key, k_norm, *eps, cos, sin);
            let value: &mut [f32] = buffers.slice_mut(*v, (r * n_kv + head) * dim, dim);
            if *v_norm {
                rows::norm_head(value, *eps);
            }
            let value = &*value;
            let (k_at, v_at) =
                (|d| kv.scratch_key_at(max_rows, head, d, r), (r * n_kv + head) * dim);
            match kv.format {
                KvFormat::F32 => {
                    let column: &[f32] = key;
                    scatter(buffers, kv.scratch_k, k_at, column);
                    buffers.slice_mut(kv.scratch_v, v_at, dim).copy_from_slice(value);
                }
                KvFormat::F16 => {
                    let mut half = [f16::ZERO; MAX_HEAD_DIM];
                    half[..dim].convert_from_f32_slice(key);
                    scatter(buffers, kv.scratch_k, k_at, &half[..dim]);
                    buffers.slice_mut::<f16>(kv.scratch_v, v_at, dim).convert_from_f32_slice(value);
                }
                KvFormat::Q8 => {
                    let (mut codes, group) = ([0i8; MAX_HEAD_DIM], kv.format.group(dim));
                    for (id, values) in [(kv.scratch_k, &*key), (kv.scratch_v, value)] {
                        for (g, values) in values.chunks_exact(group).enumerate() {
                            let scale =
                                q8::quantize_group(values, &mut codes[g * group..][..group]);
                            buffers.slice_mut(id, kv.scratch_scale_at(max_rows, head, g, r), 1)
                                [0] = scale;
                        }
                        match id == kv.scratch_k {
                            true => scatter(buffers, id, k_at, &codes[..dim]),
                            false => {
                                buffers.slice_mut(id, v_at, dim).copy_from_slice(&codes[..dim])
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes `column[d]` to element `at(d)` for each d.
///
/// # Safety
/// No other code accesses those elements.
#[inline(always)]
unsafe fn scatter<T: bytemuck::Pod>(
    buffers: &Buffers,
    id: BufferId,
    at: impl Fn(usize) -> usize,
    column: &[T],
) {
    for (d, value) in column.iter().enumerate() {
        // SAFETY: the caller upholds this function's contract.
        unsafe { buffers.slice_mut::<T>(id, at(d), 1)[0] = *value };
    }
}

/// Runs [`Op::Cap`] for a range of a row's logits.
#[inline(always)]
pub fn cap(buffers: &Buffers, op: &Cap, r: usize, part: std::ops::Range<usize>) {
    // SAFETY: one thread works on these logits.
    let logits: &mut [f32] =
        unsafe { buffers.slice_mut(op.logits, r * op.vocab + part.start, part.len()) };
    logits.iter_mut().for_each(|v| *v = math::soft_cap(*v, op.cap));
}

/// Runs [`Op::Best`] for all selected rows.
pub fn best(buffers: &Buffers, step: &StepView<'_>, op: &Best) {
    let Best { logits, vocab, maxima, lists } = *op;
    for r in step.live(RowSet::Selected) {
        // SAFETY: one thread works on the rows; the logits are not written by this op.
        unsafe {
            let usable = vocab.min(step.usable as usize);
            let row: &[f32] = buffers.slice(logits, r * vocab, usable);
            let maxima = buffers.slice_mut(maxima, r * best::CHUNKS, best::CHUNKS);
            let list = buffers.slice_mut(lists, r * best::WORDS, best::WORDS);
            best::list(row, step.n_best as usize, maxima, list);
        }
    }
}

/// Runs [`Op::Commit`] for one layer.
pub fn commit(buffers: &Buffers, kv: &KvLayer, max_rows: usize, step: &StepView<'_>) {
    match kv.format {
        KvFormat::F32 => commit_as::<u32>(buffers, kv, max_rows, step),
        KvFormat::F16 => commit_as::<u16>(buffers, kv, max_rows, step),
        KvFormat::Q8 => {
            commit_as::<u8>(buffers, kv, max_rows, step);
            commit_scales(buffers, kv, max_rows, step);
        }
    }
}

fn commit_as<T: bytemuck::Pod>(
    buffers: &Buffers,
    kv: &KvLayer,
    max_rows: usize,
    step: &StepView<'_>,
) {
    let (heads, dim, block) = (kv.n_kv_heads, kv.head_dim, kv.key_block);
    for head in 0..heads {
        for row in step.path.iter().map(|row| *row as usize) {
            let position = step.positions[row] as usize;
            let page = kv.page(step, step.sequences[row] as usize, position / PAGE);
            let to = ((page * heads + head) * PAGE + position % PAGE) * dim;
            let all_to = kv.key_at(page, head, 0, 0);
            let all_from = kv.scratch_key_at(max_rows, head, 0, 0);
            // SAFETY: a commit runs alone on its layer; scratch and cache are different buffers.
            let [from, keys_from]: [&[T]; 2] = unsafe {
                [
                    buffers.slice(kv.scratch_v, (row * heads + head) * dim, dim),
                    buffers.slice(kv.scratch_k, all_from, dim * max_rows),
                ]
            };
            // SAFETY: as above; keys and values are different buffers.
            let [to, keys_to]: [&mut [T]; 2] = unsafe {
                [buffers.slice_mut(kv.v, to, dim), buffers.slice_mut(kv.k, all_to, dim * PAGE)]
            };
            to.copy_from_slice(from);
            for (i, j) in (0..dim / block).flat_map(|i| (0..block).map(move |j| (i, j))) {
                keys_to[(i * PAGE + position % PAGE) * block + j] =
                    keys_from[(i * max_rows + row) * block + j];
            }
        }
    }
}

fn commit_scales(buffers: &Buffers, kv: &KvLayer, max_rows: usize, step: &StepView<'_>) {
    for (head, group) in (0..kv.n_kv_heads).flat_map(|h| (0..kv.scales()).map(move |g| (h, g))) {
        for row in step.path.iter().map(|row| *row as usize) {
            let position = step.positions[row] as usize;
            let to = kv.scale_at(
                kv.page(step, step.sequences[row] as usize, position / PAGE),
                head,
                group,
                position % PAGE,
            );
            let from = kv.scratch_scale_at(max_rows, head, group, row);
            for (cache, scratch) in [(kv.k, kv.scratch_k), (kv.v, kv.scratch_v)] {
                // SAFETY: as above.
                unsafe {
                    buffers.slice_mut::<u16>(cache, to, 1)[0] = buffers.slice(scratch, from, 1)[0]
                };
            }
        }
    }
}
