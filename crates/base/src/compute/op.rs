//! The operations of a plan with named operands. Shapes are `[rows, ...]`; the number of live rows
//! is in the step buffer.

use super::act::Act;
use super::cache::KvLayer;
use super::operand::{BufferId, RowSet, WeightId};
use super::step::StepView;
use crate::kv::{OffloadedPages, PAGE};

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Embed(Embed),
    Concat(Concat),
    Norm(Norm),
    Prepare(Prepare),
    Linear(Linear),
    GateUp(GateUp),
    Choose(Choose),
    Experts(Experts),
    Combine(Combine),
    Rope(Rope),
    Attention(Attention),
    Cap(Cap),
    Best(Best),
    Commit(Commit),
}

/// Embedding: `out[r] = table[token[r]] * scale`, f32 `[rows, dim]`.
///
/// Rows of images keep the values that were written before the pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embed {
    pub table: WeightId,
    pub scale: f32,
    pub out: BufferId,
}

/// Concatenation: `out[r] = [left[r], right[parent[r]]]`, f32 `[rows, 2 * dim]`.
///
/// Every live row has a parent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Concat {
    /// f32 `[rows, dim]`
    pub left: BufferId,
    /// f32 `[rows, dim]`: rows of earlier passes.
    pub right: BufferId,
    pub dim: usize,
    pub out: BufferId,
}

/// RMSNorm, with an optional addition to the residual stream.
///
/// `x = (x + rmsnorm(add) * w_add) * scale` if `add` is present, then `out = rmsnorm(x) * w`; all
/// f32 `[rows, dim]`. With `RowSet::Selected`, row i of `out` is computed from row `selected[i]` of
/// `x` and `add`, and `x` is not written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub x: BufferId,
    /// Buffers `add` and `w_add`.
    pub add: Option<(BufferId, BufferId)>,
    /// 1 if `add` is `None`
    pub scale: f32,
    /// f32 `[dim]`
    pub w: BufferId,
    pub eps: f32,
    pub dim: usize,
    pub out: BufferId,
    pub rows: RowSet,
}

/// Hadamard transform and int8 quantisation as `act.format` requires: f32 `[rows, cols]` -> `act`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prepare {
    pub input: BufferId,
    pub act: Act,
    pub rows: RowSet,
}

/// Independent matrix products; no job reads another's output.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    pub jobs: Vec<LinearJob>,
    pub rows: RowSet,
}

/// One matrix of a linear layer: `out[r, n] = sum_k act[r, k] * weight[n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearJob {
    pub weight: WeightId,
    pub act: Act,
    /// f32 `[rows, n]`
    pub out: BufferId,
}

/// `out = gelu_tanh(act_gate * gate^T) * (act_up * up^T)`, f32 `[rows, ffn]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateUp {
    pub act_gate: Act,
    pub gate: WeightId,
    pub act_up: Act,
    pub up: WeightId,
    pub out: BufferId,
}

/// Selection of experts: each row uses those with the largest scores, ties by lowest index.
///
/// Their weights are the softmax of their scores, times a factor per expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choose {
    /// f32 `[rows, experts]`
    pub scores: BufferId,
    /// f32 `[experts]`
    pub factors: BufferId,
    /// At most [`MAX_EXPERTS`].
    pub experts: usize,
    /// Experts per row, at most [`MAX_USED`].
    pub used: usize,
    /// u32 `[rows, used]`, ascending in a row
    pub chosen: BufferId,
    /// f32 `[rows, used]`
    pub weights: BufferId,
}

/// Limits of the kernels: experts per layer, and experts used per row.
pub const MAX_EXPERTS: usize = 512;
pub const MAX_USED: usize = 32;

/// Products with the matrices of the chosen experts. A slot is an index into `chosen`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub weights: ExpertWeights,
    /// One row of activations per slot; for gates, one per row of the step.
    pub act: Act,
    /// u32 `[rows, used]`
    pub chosen: BufferId,
    pub experts: usize,
    pub used: usize,
    /// f32 `[rows * used, n]`
    pub out: BufferId,
}

/// Matrices of all experts, stacked vertically, and the operation on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertWeights {
    /// `act * weight^T` with `[n, cols]` of each expert.
    Plain(WeightId),
    /// `gelu_tanh(act * gate^T) * (act * up^T)`. Each expert has `n` rows of its gate matrix,
    /// followed by the rows of its up matrix.
    Fused(WeightId),
    /// Like `Fused`, with the gates and up matrices in two weights.
    Apart { gate: WeightId, up: WeightId, act_up: Act },
}

impl Experts {
    /// Returns the only weight, or the weight of the gates.
    pub fn first(&self) -> WeightId {
        match self.weights {
            ExpertWeights::Plain(weight) | ExpertWeights::Fused(weight) => weight,
            ExpertWeights::Apart { gate, .. } => gate,
        }
    }

    /// Returns the weight of the up products, if it is separate.
    pub fn second(&self) -> Option<(WeightId, &Act)> {
        match &self.weights {
            ExpertWeights::Apart { up, act_up, .. } => Some((*up, act_up)),
            ExpertWeights::Plain(_) | ExpertWeights::Fused(_) => None,
        }
    }

    pub fn is_gated(&self) -> bool {
        !matches!(self.weights, ExpertWeights::Plain(_))
    }

    /// Floats per slot in `out`, if the first matrix has `rows` rows.
    pub fn width(&self, rows: usize) -> usize {
        let halves = if matches!(self.weights, ExpertWeights::Fused(_)) { 2 } else { 1 };
        rows / self.experts / halves
    }

    /// Number of slots that share a row of activations.
    pub fn slots_of_act(&self) -> usize {
        if self.is_gated() { self.used } else { 1 }
    }
}

/// Weighted sum: `out[r] = sum_i weights[r, i] * parts[r, i]`, from i = 0 upwards, f32 `[rows,
/// dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Combine {
    /// f32 `[rows, used, dim]`
    pub parts: BufferId,
    /// f32 `[rows, used]`
    pub weights: BufferId,
    pub used: usize,
    pub dim: usize,
    pub out: BufferId,
}

/// Per-head RMSNorm and rotary embedding (RoPE) of queries and keys.
///
/// Values are normalised without weights if `v_norm`. Rotation angles come from `rope_table`.
/// Queries are changed in place; keys and values go to the scratch buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// f32 `[rows, n_heads, head_dim]`, in place
    pub q: BufferId,
    /// f32 `[head_dim]`
    pub q_norm: BufferId,
    /// `None` if the rows have no keys of their own.
    pub keys: Option<RopeKeys>,
    pub eps: f32,
    pub n_heads: usize,
    /// f32 `[max_rows, 2, head_dim / 2]`: cosines then sines of each row's position
    pub rope_table: BufferId,
    pub kv: KvLayer,
}

/// Keys and values of a `Rope` operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeKeys {
    /// f32 `[rows, n_kv_heads, head_dim]`
    pub k: BufferId,
    /// Shape as `k`; changed in place if `v_norm`.
    pub v: BufferId,
    /// f32 `[head_dim]`
    pub k_norm: BufferId,
    /// Whether values are normalised, without weights.
    pub v_norm: bool,
}

/// Softmax attention over committed pages and the row's ancestors in scratch.
///
/// Page partials are merged in page order. The positions that a row sees are contiguous.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// f32 `[rows, n_heads, head_dim]`
    pub q: BufferId,
    pub out: BufferId,
    pub n_heads: usize,
    pub scale: f32,
    pub kv: KvLayer,
    /// Whether a row of an image sees the later rows of the same image.
    pub whole_images: bool,
    /// Pages to attend; also determines the layout of `out`.
    pub range: PageRange,
}

/// The pages that an attention operation covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageRange {
    /// All pages that the row sees. `out` is the attention, f32 `[rows, n_heads, head_dim]`.
    All,
    /// The pages after those that another device attends; the layer has no window.
    ///
    /// `out` is not divided yet, f32 `[rows, n_heads, head_dim + 2]`: sums of exponentials times
    /// values, then the largest score and the sum of exponentials.
    After(OffloadedPages),
}

impl Attention {
    /// Returns the first position that a row at `position` attends.
    #[inline(always)]
    pub fn first(&self, position: usize) -> usize {
        match self.range {
            PageRange::All => self.kv.pages.first_visible(position),
            PageRange::After(offloaded) => offloaded.count(position) * PAGE,
        }
    }

    /// Returns the last row that `row` attends to: itself, or the last row of its image.
    #[inline(always)]
    pub fn end(&self, step: &StepView<'_>, row: usize) -> usize {
        if self.whole_images { step.image_end(row).unwrap_or(row) } else { row }
    }

    /// Returns whether `out` holds page partials that are not divided yet.
    #[inline(always)]
    pub fn is_partial(&self) -> bool {
        self.range != PageRange::All
    }

    /// Returns the floats of one head in a row of `out`.
    #[inline(always)]
    pub fn out_width(&self) -> usize {
        self.kv.head_dim + if self.is_partial() { 2 } else { 0 }
    }
}

/// Soft cap: `logits = cap tanh(logits / cap)`, f32 `[selected rows, vocab]`, in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cap {
    pub logits: BufferId,
    pub vocab: usize,
    pub cap: f32,
}

/// The largest logits of each selected row as lists, see [`crate::compute::best`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// f32 `[rows, vocab]`
    pub logits: BufferId,
    pub vocab: usize,
    /// f32 `[rows, best::CHUNKS]`
    pub maxima: BufferId,
    /// u32 `[rows, best::WORDS]`
    pub lists: BufferId,
}

/// Copies the accepted path's keys and values from scratch to the cache, for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    pub layers: Vec<KvLayer>,
}

impl Op {
    /// Returns the buffers that the operation reads, without weights. One may occur twice.
    pub fn inputs(&self) -> Vec<BufferId> {
        let act = |a: &Act| [a.values, a.scales, a.sums];
        match self {
            Op::Embed(_) => Vec::new(),
            Op::Concat(concat) => vec![concat.left, concat.right],
            Op::Norm(Norm { x, add, w, .. }) => {
                [*x, *w].into_iter().chain(add.iter().flat_map(|(y, w)| [*y, *w])).collect()
            }
            Op::Prepare(prepare) => vec![prepare.input],
            Op::Linear(linear) => linear.jobs.iter().flat_map(|j| act(&j.act)).collect(),
            Op::GateUp(gate_up) => [act(&gate_up.act_gate), act(&gate_up.act_up)].concat(),
            Op::Choose(choose) => vec![choose.scores, choose.factors],
            Op::Experts(experts) => {
                let up = experts.second().map(|(_, up)| act(up));
                let acts = [act(&experts.act)].into_iter().chain(up).flatten();
                acts.chain([experts.chosen]).collect()
            }
            Op::Combine(combine) => vec![combine.parts, combine.weights],
            Op::Rope(r) => {
                let keys = r.keys.iter().flat_map(|own| [own.k, own.v, own.k_norm]);
                keys.chain([r.q, r.q_norm, r.rope_table]).collect()
            }
            Op::Attention(Attention { q, kv, .. }) => {
                vec![*q, kv.k, kv.v, kv.scratch_k, kv.scratch_v]
            }
            Op::Cap(cap) => vec![cap.logits],
            Op::Best(best) => vec![best.logits],
            Op::Commit(commit) => {
                commit.layers.iter().flat_map(|kv| [kv.scratch_k, kv.scratch_v]).collect()
            }
        }
    }

    /// Returns the buffers that the operation writes.
    pub fn outputs(&self) -> Vec<BufferId> {
        match self {
            Op::Embed(embed) => vec![embed.out],
            Op::Concat(concat) => vec![concat.out],
            Op::Norm(norm) => vec![norm.x, norm.out],
            Op::Prepare(Prepare { act, .. }) if act.format.int8 => {
                vec![act.values, act.scales, act.sums]
            }
            Op::Prepare(prepare) => vec![prepare.act.values],
            Op::Linear(linear) => linear.jobs.iter().map(|j| j.out).collect(),
            Op::GateUp(gate_up) => vec![gate_up.out],
            Op::Choose(choose) => vec![choose.chosen, choose.weights],
            Op::Experts(experts) => vec![experts.out],
            Op::Combine(combine) => vec![combine.out],
            Op::Rope(Rope { q, keys, kv, .. }) => {
                let mut written = vec![*q];
                if let Some(RopeKeys { k, v, v_norm, .. }) = keys {
                    written.push(*k);
                    written.extend(v_norm.then_some(*v));
                    written.extend([kv.scratch_k, kv.scratch_v]);
                }
                written
            }
            Op::Attention(attention) => vec![attention.out],
            Op::Cap(cap) => vec![cap.logits],
            Op::Best(best) => vec![best.maxima, best.lists],
            Op::Commit(commit) => commit.layers.iter().flat_map(|kv| [kv.k, kv.v]).collect(),
        }
    }
}
