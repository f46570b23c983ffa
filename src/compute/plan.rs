//! The dispatch list: what one forward pass does, in order, as data. Executors run it; nothing here
//! knows a device.
//!
//! Parameters are plain values fixed at recording time. Everything that changes from step to step
//! (tokens, positions, tree, row counts) is read from the step buffer (`step.rs`), so a recorded
//! plan never changes.

use super::op::Op;
use super::step::StepView;
use crate::kv::Pages;
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
    /// Pages of the buffers; sequences share them out by their page tables
    pub all_pages: usize,
    /// Where the tables of the step begin for this layer: `[sequences, pages.count]` places in `k`
    /// and `v`
    pub table: usize,
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

    /// Which page of `k` and `v` the nth page of a sequence is, as the step's tables say.
    #[inline(always)]
    pub fn page(&self, step: &StepView<'_>, sequence: usize, nth: usize) -> usize {
        let entry = sequence * self.pages.count + self.pages.entry(nth);
        step.tables[self.table + entry] as usize
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
        let codes = self.all_pages * crate::kv::PAGE * self.n_kv_heads * self.head_dim;
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
        matches!(self.op, Op::Embed(_) | Op::Norm(_) | Op::Prepare(_))
    }

    /// The rows it works on.
    pub fn rows(&self) -> RowSet {
        match &self.op {
            Op::Norm(norm) => norm.rows,
            Op::Prepare(prepare) => prepare.rows,
            Op::Linear(linear) => linear.rows,
            Op::Best(_) => RowSet::Selected,
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
