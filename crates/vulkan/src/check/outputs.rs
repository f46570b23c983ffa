//! Outputs of each operation and their tolerances, for `--check`.

use super::compare::{EXPONENTIALS, OutputLayout, PRODUCTS, Rule, SUMS};
use gemma_base::compute::reference::rows::{self, errors, fit, rotate_input, tops};
use gemma_base::compute::{
    Act, Attention, Best, BufferId, Cap, Choose, Combine, Commit, Concat, Embed, Experts, GateUp,
    KvFormat, KvLayer, Linear, LinearJob, Norm, Op, Rope, RopeKeys, RowSet,
};
use gemma_base::kv::PAGE;
use gemma_base::tensor::math::{LANES, Scale};
use gemma_base::tensor::{Format, Group, Matrix, hadamard, math};

/// Content of a buffer with its tolerance.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    F32(OutputLayout, Rule),
    F16(OutputLayout, Rule),
    /// int8 activations of the floats in `input`. The tolerance of the floats is a share `near` of
    /// the largest float in their row.
    Codes {
        input: BufferId,
        act: Act,
        near: f32,
    },
    /// f32 `[rows, groups]`: the scales of these codes. Another of the candidate scales is valid
    /// too if its error is equally small.
    Scales {
        input: BufferId,
        act: Act,
        near: f32,
    },
    /// i32 `[rows, groups]`: sums of the codes in the buffer `codes`.
    Sums {
        codes: BufferId,
        cols: usize,
        groups: usize,
    },
    /// An int8 cache: codes in the layout `grid`, then f16 scales. If `exact`, the unrounded floats
    /// have no tolerance.
    Q8 {
        grid: OutputLayout,
        codes: usize,
        exact: bool,
    },
    /// Lists of the best logits.
    Lists,
}

/// A buffer that an operation writes.
#[derive(Clone, Copy, Debug)]
pub struct CheckedOutput {
    pub id: BufferId,
    pub name: &'static str,
    pub content: Content,
}

fn floats(id: BufferId, name: &'static str, width: usize, rule: Rule) -> CheckedOutput {
    CheckedOutput { id, name, content: Content::F32(OutputLayout::rows(width), rule) }
}

/// Returns the outputs of an operation. A `fused` operation shares a call with the operation that
/// computes its input, and inherits its tolerance.
pub fn outputs(
    op: &Op,
    weights: &[Matrix<'static>],
    max_rows: usize,
    fused: bool,
) -> Vec<CheckedOutput> {
    match op {
        Op::Embed(Embed { table, out, .. }) => {
            let table = &weights[table.0 as usize];
            // The product of a code and a scale is exact.
            vec![floats(*out, "the embeddings", table.cols, Rule::Same)]
        }
        Op::Concat(Concat { dim, out, .. }) => {
            vec![floats(*out, "the rows side by side", 2 * dim, Rule::Same)]
        }
        Op::Norm(Norm { x, add, out, dim, rows, .. }) => {
            let written = (add.is_some() && *rows == RowSet::All)
                .then(|| floats(*x, "the residual", *dim, Rule::Near(SUMS)));
            written.into_iter().chain([floats(*out, "the norm", *dim, Rule::Near(SUMS))]).collect()
        }
        Op::Prepare(prepare) => prepared(prepare.input, &prepare.act, fused),
        Op::Linear(Linear { jobs, .. }) => {
            let job = |j: &LinearJob| {
                let matrix = &weights[j.weight.0 as usize];
                floats(j.out, "the products", matrix.rows, product_rule(matrix))
            };
            jobs.iter().map(job).collect()
        }
        Op::GateUp(GateUp { gate, out, .. }) => {
            vec![floats(
                *out,
                "the gated products",
                weights[gate.0 as usize].rows,
                Rule::Near(EXPONENTIALS),
            )]
        }
        Op::Choose(Choose { chosen, weights, used, .. }) => vec![
            floats(*chosen, "the chosen experts", *used, Rule::Same),
            floats(*weights, "the weights of experts", *used, Rule::Near(EXPONENTIALS)),
        ],
        Op::Experts(op @ Experts { used, out, .. }) => {
            let matrix = &weights[op.first().0 as usize];
            let rule = if op.is_gated() { Rule::Near(EXPONENTIALS) } else { product_rule(matrix) };
            vec![floats(*out, "the products of experts", used * op.width(matrix.rows), rule)]
        }
        Op::Combine(Combine { dim, out, .. }) => {
            vec![floats(*out, "the sum of experts", *dim, Rule::Near(SUMS))]
        }
        Op::Rope(rope) => turned(rope, max_rows, fused),
        Op::Attention(op @ Attention { out, n_heads, .. }) => {
            let name = if op.is_partial() { "the undivided attention" } else { "the attention" };
            vec![floats(*out, name, n_heads * op.out_width(), Rule::Near(EXPONENTIALS))]
        }
        Op::Cap(Cap { logits, vocab, .. }) => {
            vec![floats(*logits, "the capped logits", *vocab, Rule::Near(EXPONENTIALS))]
        }
        Op::Best(Best { maxima, lists, .. }) => {
            let lists = CheckedOutput { id: *lists, name: "the lists", content: Content::Lists };
            vec![
                floats(
                    *maxima,
                    "the largest of the chunks",
                    gemma_base::compute::best::CHUNKS,
                    Rule::Same,
                ),
                lists,
            ]
        }
        Op::Commit(Commit { layers }) => layers.iter().flat_map(committed).collect(),
    }
}

/// Returns the outputs of the rotation of queries and keys.
fn turned(rope: &Rope, max_rows: usize, fused: bool) -> Vec<CheckedOutput> {
    let Rope { q, keys: own, kv, n_heads, .. } = rope;
    let keys = OutputLayout {
        heads: kv.n_kv_heads,
        dim: kv.head_dim,
        block: kv.key_block,
        rows: max_rows,
    };
    let values = OutputLayout::rows(kv.n_kv_heads * kv.head_dim);
    // Unfused, values are only rounded, in a direction that Vulkan leaves to the driver.
    let [turned, copied] = if fused {
        [PRODUCTS + SUMS, PRODUCTS]
    } else {
        [SUMS, if own.is_some_and(|own| own.v_norm) { SUMS } else { 0.0 }]
    }
    .map(Rule::Near);
    let width = kv.n_kv_heads * kv.head_dim;
    let mut all = vec![floats(*q, "the queries", n_heads * kv.head_dim, turned)];
    let Some(RopeKeys { k, v, v_norm, .. }) = own else { return all };
    all.push(floats(*k, "the keys", width, turned));
    all.extend(v_norm.then(|| floats(*v, "the values", width, turned)));
    all.extend([
        cached(kv, kv.scratch_k, "the scratch keys", max_rows, keys, turned),
        cached(kv, kv.scratch_v, "the scratch values", max_rows, values, copied),
    ]);
    all
}

/// Returns the keys and values of a layer's cache, which a commit writes.
fn committed(kv: &KvLayer) -> [CheckedOutput; 2] {
    let values =
        OutputLayout { heads: kv.n_kv_heads, dim: kv.head_dim, block: kv.head_dim, rows: PAGE };
    let keys = OutputLayout { block: kv.key_block, ..values };
    let all = kv.all_pages * PAGE;
    let keys = cached(kv, kv.k, "the cached keys", all, keys, Rule::Same);
    [keys, cached(kv, kv.v, "the cached values", all, values, Rule::Same)]
}

/// Returns the tolerance of products. Integer sums with a single scale are exact. Scales of groups,
/// or minima, need sums of floats.
fn product_rule(matrix: &Matrix<'_>) -> Rule {
    let Format { code, group, .. } = matrix.format;
    match (code.is_integer(), group) {
        (false, _) => Rule::Near(PRODUCTS),
        (true, Group::Cols(_)) => Rule::Near(PRODUCTS),
        (true, Group::Row) if code.spec().side.has_min() => Rule::Near(SUMS),
        (true, Group::Row) => Rule::Same,
    }
}

/// Returns the output with the keys or values of `positions` positions.
fn cached(
    kv: &KvLayer,
    id: BufferId,
    name: &'static str,
    positions: usize,
    grid: OutputLayout,
    rule: Rule,
) -> CheckedOutput {
    let content = match kv.format {
        KvFormat::F32 => Content::F32(grid, rule),
        KvFormat::F16 => Content::F16(grid, rule),
        KvFormat::Q8 => Content::Q8 {
            grid,
            codes: positions * kv.n_kv_heads * kv.head_dim,
            exact: rule == Rule::Same,
        },
    };
    CheckedOutput { id, name, content }
}

/// Returns the outputs of prepared activations: floats, or codes with their scales and sums.
fn prepared(input: BufferId, act: &Act, fused: bool) -> Vec<CheckedOutput> {
    let near = if fused { EXPONENTIALS } else { SUMS };
    if !act.format.int8 {
        return vec![floats(act.values, "the prepared floats", act.cols, Rule::Near(near))];
    }
    let groups = act.format.groups(act.cols);
    vec![
        CheckedOutput {
            id: act.values,
            name: "the codes",
            content: Content::Codes { input, act: *act, near },
        },
        CheckedOutput {
            id: act.scales,
            name: "the scales",
            content: Content::Scales { input, act: *act, near },
        },
        CheckedOutput {
            id: act.sums,
            name: "the sums",
            content: Content::Sums { codes: act.values, cols: act.cols, groups },
        },
    ]
}

/// Share by which a group's error may exceed the least error.
const AS_SMALL: f32 = 0.01;

/// Returns the valid scales of a row: the device's that fit its codes, if they have the least
/// error, else the twin's.
pub fn right_scales(
    input: &[f32],
    act: &Act,
    near: f32,
    (device, codes): (&[f32], &[i8]),
    twin: &[f32],
) -> Vec<f32> {
    let mut row = input.to_vec();
    rotate_input(&mut row, act.format);
    let width = row.len() / act.format.groups(act.cols);
    let groups = row.chunks_exact(width).zip(codes.chunks_exact(width));
    groups
        .zip(device.iter().zip(twin))
        .map(|((values, codes), (device, twin))| {
            let scale = Scale::of(math::max_abs(values));
            let errors = &errors(values, scale)[..act.format.tried()];
            let least = errors.iter().copied().fold(f32::INFINITY, f32::min);
            let mut products = [0.0; LANES];
            for (i, (v, code)) in values.iter().zip(codes).enumerate() {
                products[i % LANES] += v * *code as f32;
            }
            let off = (device - fit(&products, codes)).abs();
            let is_right = off <= 4.0 * near * scale.step(rows::MAX)
                && (tops().iter().zip(errors))
                    .any(|(top, e)| *top == top_of(codes) && *e <= least * (1.0 + AS_SMALL));
            if is_right { *device } else { *twin }
        })
        .collect()
}

/// Returns the code of the largest value of a group.
fn top_of(codes: &[i8]) -> f32 {
    codes.iter().map(|code| code.unsigned_abs()).max().unwrap_or(0) as f32
}

/// Returns the codes of a row before rounding, each with its tolerance. The tolerance of `input` is
/// a share `near` of its largest number. `device` holds the device's scales and codes.
pub fn unrounded(
    input: &[f32],
    act: &Act,
    near: f32,
    (scales, codes): (&[f32], &[i8]),
) -> Vec<(f32, f32)> {
    let mut row = input.to_vec();
    rotate_input(&mut row, act.format);
    // A transformed number is a sum of 128 numbers with that tolerance. So is the largest number of
    // a group, by which the group is divided.
    let terms = if act.format.hadamard { (hadamard::WIDTH as f32).sqrt() } else { 1.0 };
    let off = 2.0 * near * terms * math::max_abs(input);
    let mut out = Vec::with_capacity(row.len());
    let width = row.len() / act.format.groups(act.cols);
    let groups = row.chunks_exact(width).zip(codes.chunks_exact(width));
    for ((group, codes), scale) in groups.zip(scales) {
        // A scale that was fitted to the codes is not the one used to round them.
        let per_unit = match act.format.tried() > 1 {
            _ if scale.is_nan() || *scale == 0.0 => 0.0,
            true => Scale::of(math::max_abs(group)).inverse(top_of(codes)),
            false => 1.0 / scale,
        };
        out.extend(group.iter().map(|v| (v * per_unit, off * per_unit)));
    }
    out
}
