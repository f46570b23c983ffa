//! The dispatch list: what one forward pass does, in order, as data. Executors run it; nothing here
//! knows a device.
//!
//! Parameters are plain values fixed at recording time. Everything that changes from step to step
//! (tokens, positions, tree, row counts) is read from the step buffer (`step.rs`), so a recorded
//! plan never changes.

use crate::kv::{Pages, Taken};
use crate::tensor::{Code, Format, Group};

/// A buffer of the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// A weight matrix loaded into the executor, in whatever layout its kernels want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightId(pub u32);

/// A recorded plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub u32);

/// Where in a model something belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// A table of which a pass looks up a few rows and reads no more.
    Embedding,
    Layer(u16),
    /// Also an embedding table that serves as the head.
    Head,
}

/// What a linear layer reads: f32 rows, or int8 rows with one scale a row or a group; through a
/// Hadamard or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActFormat {
    pub int8: bool,
    /// Columns that share a scale; `Group::Row` for f32.
    pub group: Group,
    pub hadamard: bool,
}

impl ActFormat {
    /// The activations that weights of `format` are multiplied with.
    pub fn for_weights(format: Format) -> Self {
        let int8 = format.code.is_integer();
        ActFormat {
            int8,
            group: if int8 { format.group } else { Group::Row },
            hadamard: format.hadamard,
        }
    }

    /// Scales in one row of `cols` activations; 0 for f32.
    pub fn groups(self, cols: usize) -> usize {
        Format {
            code: if self.int8 { Code::I8 } else { Code::F32 },
            group: self.group,
            hadamard: self.hadamard,
        }
        .groups(cols)
    }
}

/// Prepared activations of one linear input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    pub format: ActFormat,
    pub cols: usize,
    /// f32 or i8, `[rows, cols]`.
    pub values: BufferId,
    /// f32 `[rows, groups]`: what an int8 value is multiplied by. Unused for f32.
    pub scales: BufferId,
    /// i32 `[rows, groups]`: sum of the int8 values of a group. Unused for f32.
    pub sums: BufferId,
}

/// Which rows an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSet {
    /// All live rows of the step.
    All,
    /// The rows whose logits were asked for, renumbered from 0.
    Selected,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    F16,
    /// int8 codes, and an f16 scale for each group of channels of a position: 8.5 bits a channel. A
    /// group is as narrow as that price allows, since some channels of a key are many times larger
    /// than others. A buffer holds all codes, then all scales.
    Q8,
}

impl KvFormat {
    /// Bytes of one channel, its share of a scale not counted.
    pub const fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::F16 => 2,
            KvFormat::Q8 => 1,
        }
    }

    /// Channels that share a scale, where there are scales.
    pub const fn group(self, head_dim: usize) -> usize {
        if head_dim.is_multiple_of(32) { 32 } else { 16 }
    }

    /// Scales of one head's key or value.
    pub const fn scales(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 | KvFormat::F16 => 0,
            KvFormat::Q8 => head_dim / self.group(head_dim),
        }
    }

    /// Bytes of one head's key or value, with its scales.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + 2 * self.scales(head_dim)
    }
}

/// Keys and values of one layer. Keys lie so that what the device loads at once lies together:
/// `key_block` channels of a position, then the next position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub format: KvFormat,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Of one sequence
    pub pages: Pages,
    /// Sequences that have pages, one after the other
    pub sequences: usize,
    /// See [`crate::compute::Executor::key_block`].
    pub key_block: usize,
    /// `[pages, n_kv_heads, head_dim / key_block, PAGE, key_block]`; scales `[pages, n_kv_heads,
    /// scales, PAGE]`
    pub k: BufferId,
    /// `[pages, n_kv_heads, PAGE, head_dim]`; scales as of `k`
    pub v: BufferId,
    /// This step's keys, not yet committed: `[n_kv_heads, head_dim / key_block, max_rows,
    /// key_block]`; scales `[n_kv_heads, scales, max_rows]`
    pub scratch_k: BufferId,
    /// This step's values: `[max_rows, n_kv_heads, head_dim]`; scales as of `scratch_k`
    pub scratch_v: BufferId,
}

impl KvLayer {
    /// Of a key and a value.
    pub fn bytes_per_position(&self) -> usize {
        2 * self.n_kv_heads * self.format.head_bytes(self.head_dim)
    }

    /// Place of a sequence's logical page among all that there are.
    #[inline(always)]
    pub fn page(&self, sequence: usize, page: usize) -> usize {
        sequence * self.pages.count + self.pages.physical(page)
    }

    /// Pages of all sequences.
    pub fn all_pages(&self) -> usize {
        self.sequences * self.pages.count
    }

    /// Element of `k`.
    pub fn key_at(&self, page: usize, head: usize, d: usize, slot: usize) -> usize {
        let b = self.key_block;
        (((page * self.n_kv_heads + head) * (self.head_dim / b) + d / b) * crate::kv::PAGE + slot)
            * b
            + d % b
    }

    /// Element of `scratch_k`.
    pub fn scratch_key_at(&self, max_rows: usize, head: usize, d: usize, row: usize) -> usize {
        let b = self.key_block;
        ((head * (self.head_dim / b) + d / b) * max_rows + row) * b + d % b
    }

    /// Scales of one head's key or value.
    pub fn scales(&self) -> usize {
        self.format.scales(self.head_dim)
    }

    /// Place of a scale in `k` or `v`, counted in scales.
    pub fn scale_at(&self, page: usize, head: usize, group: usize, slot: usize) -> usize {
        let codes = self.all_pages() * crate::kv::PAGE * self.n_kv_heads * self.head_dim;
        codes / 2
            + ((page * self.n_kv_heads + head) * self.scales() + group) * crate::kv::PAGE
            + slot
    }

    /// Place of a scale in `scratch_k` or `scratch_v`, counted in scales.
    pub fn scratch_scale_at(
        &self,
        max_rows: usize,
        head: usize,
        group: usize,
        row: usize,
    ) -> usize {
        max_rows * self.n_kv_heads * self.head_dim / 2
            + (head * self.scales() + group) * max_rows
            + row
    }
}

/// One matrix of a linear dispatch: `out[r, n] = sum_k act[r, k] * weight[n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearJob {
    pub weight: WeightId,
    pub act: Act,
    /// f32 `[rows, n]`
    pub out: BufferId,
}

/// One operation. Shapes are `[rows, ...]` with the live row count read from the step buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[r] = table[token[r]] * scale`, f32 `[rows, dim]`.
    Embed { table: WeightId, scale: f32, out: BufferId },
    /// `x += rmsnorm(add) * (1 + w_add)` where given, then `out = rmsnorm(x) * (1 + w)`; all f32
    /// `[rows, dim]`. With `RowSet::Selected`, `out` row i is made from `x` and `add` row
    /// `selected[i]`, and `x` is not written.
    Norm {
        x: BufferId,
        add: Option<(BufferId, BufferId)>,
        w: BufferId,
        eps: f32,
        dim: usize,
        out: BufferId,
        rows: RowSet,
    },
    /// Hadamard and int8 quantisation as `act` asks: f32 `[rows, cols]` -> act.
    Prepare { input: BufferId, act: Act, rows: RowSet },
    /// Independent matrix products; no job reads another's output.
    Linear { jobs: Vec<LinearJob>, rows: RowSet },
    /// `out = gelu_tanh(act * gate^T) * (act * up^T)`, f32 `[rows, ffn]`.
    GateUp { act_gate: Act, gate: WeightId, act_up: Act, up: WeightId, out: BufferId },
    /// Per-head RMSNorm of q and k, rotation by the step's table `rope_table`, queries in place,
    /// keys and values to scratch.
    Rope {
        /// f32 `[rows, n_heads, head_dim]`, in place
        q: BufferId,
        /// f32 `[rows, n_kv_heads, head_dim]`
        k: BufferId,
        v: BufferId,
        /// f32 `[head_dim]`
        q_norm: BufferId,
        k_norm: BufferId,
        eps: f32,
        n_heads: usize,
        /// f32 `[max_rows, 2, head_dim / 2]`: cosines then sines of each row's position
        rope_table: BufferId,
        kv: KvLayer,
    },
    /// Softmax attention over committed pages and the row's ancestors in scratch, page partials
    /// merged in page order.
    Attention { q: BufferId, out: BufferId, n_heads: usize, scale: f32, kv: KvLayer },
    /// The same over the pages that are not taken, before the division: `out` is f32 `[max_rows,
    /// n_heads, head_dim + 2]`, sums of exponentials times values, then the largest score and the
    /// sum of exponentials. The layer has no window.
    AttentionRest {
        q: BufferId,
        out: BufferId,
        n_heads: usize,
        scale: f32,
        kv: KvLayer,
        taken: Taken,
    },
    /// The largest logits of each selected row as lists, see [`crate::compute::best`].
    Best { logits: BufferId, vocab: usize, maxima: BufferId, lists: BufferId },
    /// Copies the accepted path's keys and values from scratch to the cache, for every layer.
    Commit { layers: Vec<KvLayer> },
}

impl Op {
    /// The buffers it reads, weights aside; one may occur twice.
    pub fn inputs(&self) -> Vec<BufferId> {
        let act = |a: &Act| [a.values, a.scales, a.sums];
        match self {
            Op::Embed { .. } => Vec::new(),
            Op::Norm { x, add, w, .. } => {
                [*x, *w].into_iter().chain(add.iter().flat_map(|(y, w)| [*y, *w])).collect()
            }
            Op::Prepare { input, .. } => vec![*input],
            Op::Linear { jobs, .. } => jobs.iter().flat_map(|j| act(&j.act)).collect(),
            Op::GateUp { act_gate, act_up, .. } => [act(act_gate), act(act_up)].concat(),
            Op::Rope { q, k, v, q_norm, k_norm, rope_table, .. } => {
                vec![*q, *k, *v, *q_norm, *k_norm, *rope_table]
            }
            Op::Attention { q, kv, .. } | Op::AttentionRest { q, kv, .. } => {
                vec![*q, kv.k, kv.v, kv.scratch_k, kv.scratch_v]
            }
            Op::Best { logits, .. } => vec![*logits],
            Op::Commit { layers } => {
                layers.iter().flat_map(|kv| [kv.scratch_k, kv.scratch_v]).collect()
            }
        }
    }

    /// The buffers it writes.
    pub fn outputs(&self) -> Vec<BufferId> {
        match self {
            Op::Embed { out, .. }
            | Op::GateUp { out, .. }
            | Op::Attention { out, .. }
            | Op::AttentionRest { out, .. } => {
                vec![*out]
            }
            Op::Norm { x, out, .. } => vec![*x, *out],
            Op::Prepare { act, .. } if act.format.int8 => vec![act.values, act.scales, act.sums],
            Op::Prepare { act, .. } => vec![act.values],
            Op::Linear { jobs, .. } => jobs.iter().map(|j| j.out).collect(),
            Op::Rope { q, k, kv, .. } => vec![*q, *k, kv.scratch_k, kv.scratch_v],
            Op::Best { maxima, lists, .. } => vec![*maxima, *lists],
            Op::Commit { layers } => layers.iter().flat_map(|kv| [kv.k, kv.v]).collect(),
        }
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    pub op: Op,
    /// What the profile calls it, such as `qkv` or `gate_up`.
    pub label: &'static str,
    pub layer: Option<u16>,
}

impl Dispatch {
    /// True where row r of the output depends on row r of the inputs alone: neighbours need no
    /// barrier between them.
    pub fn is_row_local(&self) -> bool {
        matches!(self.op, Op::Embed { .. } | Op::Norm { .. } | Op::Prepare { .. })
    }

    /// The rows it works on.
    pub fn rows(&self) -> RowSet {
        match self.op {
            Op::Norm { rows, .. } | Op::Prepare { rows, .. } | Op::Linear { rows, .. } => rows,
            Op::Best { .. } => RowSet::Selected,
            _ => RowSet::All,
        }
    }
}

/// A whole pass.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub dispatches: Vec<Dispatch>,
}

impl Plan {
    pub fn push(&mut self, label: &'static str, layer: Option<u16>, op: Op) {
        self.dispatches.push(Dispatch { op, label, layer });
    }
}
