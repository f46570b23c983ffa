//! Where the keys and values of a layer lie in its buffers.

use super::operand::BufferId;
use super::step::StepView;
use crate::kv::Pages;

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
    /// Pages of one sequence
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
    /// Bytes of a key and a value.
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

    /// Parts of `k` and `v` that hold a page, as (buffer, first byte, bytes).
    pub fn page_parts(&self, page: usize) -> Vec<(BufferId, usize, usize)> {
        let codes = self.n_kv_heads * crate::kv::PAGE * self.head_dim * self.format.bytes();
        let scales = 2 * self.n_kv_heads * crate::kv::PAGE * self.scales();
        let at = 2 * self.scale_at(page, 0, 0, 0);
        let parts = [self.k, self.v].map(|id| [(id, page * codes, codes), (id, at, scales)]);
        parts.into_iter().flatten().filter(|(_, _, bytes)| *bytes > 0).collect()
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
