//! Layout of the keys and values of a layer in its buffers.

use super::operand::BufferId;
use super::step::StepView;
use crate::kv::Pages;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    F16,
    /// int8 codes with one f16 scale per group of channels of a position: 8.5 bits per channel.
    ///
    /// Groups are as narrow as that size allows, since some channels of a key are many times larger
    /// than others. A buffer holds all codes, then all scales.
    Q8,
}

impl KvFormat {
    /// Bytes of one channel, without its share of a scale.
    pub const fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::F16 => 2,
            KvFormat::Q8 => 1,
        }
    }

    /// Channels that share a scale, if the format has scales.
    pub const fn group(self, head_dim: usize) -> usize {
        if head_dim.is_multiple_of(32) { 32 } else { 16 }
    }

    /// Number of scales of one head's key or value.
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

/// Keys and values of one layer.
///
/// `key_block` channels of one position are contiguous, followed by those of the next position, so
/// that the device loads them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub format: KvFormat,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Pages of one sequence
    pub pages: Pages,
    /// Pages in the buffers. The page tables assign them to sequences.
    pub all_pages: usize,
    /// Offset of this layer's tables in the step's tables: `[sequences, pages.count]` page indices
    /// in `k` and `v`.
    pub table: usize,
    /// See [`crate::compute::Executor::key_block`].
    pub key_block: usize,
    /// `[pages, n_kv_heads, head_dim / key_block, PAGE, key_block]`; scales `[pages, n_kv_heads,
    /// scales, PAGE]`
    pub k: BufferId,
    /// `[pages, n_kv_heads, PAGE, head_dim]`; scales like `k`
    pub v: BufferId,
    /// This step's keys, not yet committed: `[n_kv_heads, head_dim / key_block, max_rows,
    /// key_block]`; scales `[n_kv_heads, scales, max_rows]`
    pub scratch_k: BufferId,
    /// This step's values: `[max_rows, n_kv_heads, head_dim]`; scales like `scratch_k`
    pub scratch_v: BufferId,
}

impl KvLayer {
    /// Bytes of the key and value of one position, over all heads.
    pub fn bytes_per_position(&self) -> usize {
        2 * self.n_kv_heads * self.format.head_bytes(self.head_dim)
    }

    /// Looks up in the step's tables the page of `k` and `v` that holds a sequence's nth page.
    #[inline(always)]
    pub fn page(&self, step: &StepView<'_>, sequence: usize, nth: usize) -> usize {
        let entry = sequence * self.pages.count + self.pages.entry(nth);
        step.tables[self.table + entry] as usize
    }

    /// Index of an element of `k`.
    pub fn key_at(&self, page: usize, head: usize, d: usize, slot: usize) -> usize {
        let b = self.key_block;
        (((page * self.n_kv_heads + head) * (self.head_dim / b) + d / b) * crate::kv::PAGE + slot)
            * b
            + d % b
    }

    /// Returns the byte ranges of `k` and `v` that hold a page, as (buffer, first byte, bytes).
    pub fn page_parts(&self, page: usize) -> Vec<(BufferId, usize, usize)> {
        let codes = self.n_kv_heads * crate::kv::PAGE * self.head_dim * self.format.bytes();
        let scales = 2 * self.n_kv_heads * crate::kv::PAGE * self.scales();
        let at = 2 * self.scale_at(page, 0, 0, 0);
        let parts = [self.k, self.v].map(|id| [(id, page * codes, codes), (id, at, scales)]);
        parts.into_iter().flatten().filter(|(_, _, bytes)| *bytes > 0).collect()
    }

    /// Index of an element of `scratch_k`.
    pub fn scratch_key_at(&self, max_rows: usize, head: usize, d: usize, row: usize) -> usize {
        let b = self.key_block;
        ((head * (self.head_dim / b) + d / b) * max_rows + row) * b + d % b
    }

    /// Number of scales of one head's key or value.
    pub fn scales(&self) -> usize {
        self.format.scales(self.head_dim)
    }

    /// Index of a scale in `k` or `v`, in units of scales.
    pub fn scale_at(&self, page: usize, head: usize, group: usize, slot: usize) -> usize {
        let codes = self.all_pages * crate::kv::PAGE * self.n_kv_heads * self.head_dim;
        codes / 2
            + ((page * self.n_kv_heads + head) * self.scales() + group) * crate::kv::PAGE
            + slot
    }

    /// Index of a scale in `scratch_k` or `scratch_v`, in units of scales.
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
