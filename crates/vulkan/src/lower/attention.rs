//! Kernel calls of attention.

use super::fuse::Forms;
use super::kernels::{AttentionPush, Join, PartialAttentionPush};
use super::sizes::partial_floats;
use super::*;
use anyhow::{Context, ensure};

/// Most rows of a pass with pages split over workgroups.
const SPLIT_ROWS: usize = 32;

/// Most (row, query head) pairs in a block of one row.
const PAIRS: usize = 16;
/// Most (row, query head) pairs in a block of several rows. A thread keeps the sums of each pair in
/// registers; using fewer registers allows more concurrent workgroups.
const PAIRS_OF_ROWS: usize = 8;
/// Most output channels of a block, 8 per thread.
const OUTPUTS: usize = 2048;

impl Lowering<'_> {
    /// Appends the calls of attention over all pages, and of the preparation of its result.
    pub(super) fn attention(
        &self,
        op: &Attention,
        forms: &Forms,
        bucket: Bucket,
        out_calls: &mut Vec<Call>,
    ) -> Result<()> {
        let Attention { q, out, n_heads, scale, kv, whole_images, range: _ } = op;
        let (dim, prepare) = (head_dim(kv)?, forms.act.as_ref());
        let whole_images = *whole_images && bucket.images;
        // Pages of a row: all, or those that a window can touch.
        let slots =
            kv.pages.window.map_or(bucket.pages, |w| bucket.pages.min(w.div_ceil(PAGE) + 1));
        let floats = partial_floats(bucket.rows * n_heads * slots, dim);
        // Rows of images see pages after their own, which the merge of partials does not support.
        let split = bucket.rows <= SPLIT_ROWS
            && !whole_images
            && floats <= self.own.partial_floats
            && slots < MOST_GROUPS as usize;
        let (rows, heads) = self.attention_block(op, bucket, if split { slots } else { 1 })?;
        let parts = n_heads / heads;
        let kernel = kernels::Attention {
            subgroup: self.info.subgroup,
            head_dim: word(dim),
            group_heads: word(heads),
            rows: word(rows),
            kv: kv_code(kv),
            split,
            shares: word(parts / kv.n_kv_heads),
            whole_images,
        };
        let target = if split { self.own.partials } else { *out };
        let window = kv.pages.window.unwrap_or(0);
        let push = AttentionPush {
            q: self.at(*q),
            out: self.at(target),
            k: self.at(kv.k),
            v: self.at(kv.v),
            scratch_k: self.at(kv.scratch_k),
            scratch_v: self.at(kv.scratch_v),
            step: self.at(self.step),
            scale: *scale,
            n_kv: word(kv.n_kv_heads),
            pages: word(kv.pages.count),
            all_pages: word(kv.all_pages),
            window: word(window),
            max_rows: word(self.max_rows),
            slots: word(slots),
            table: word(kv.table),
            epilogue: 0,
        };
        // The first pages of the rows in a block differ by at most one.
        let pages =
            if split { slots + (kv.pages.window.is_some() && rows > 1) as usize } else { 1 };
        let groups = [parts, bucket.rows.div_ceil(rows), pages];
        let accesses = vec![
            Access::Read(*q),
            Access::Read(kv.scratch_k),
            Access::Read(kv.scratch_v),
            Access::Write(target),
        ];
        let mut call = self.call(&kernel, &push, groups, accesses);
        call.work = 2 * (bucket.rows * slots * PAGE * n_heads * dim) as u64;
        if split {
            let z = forms.floats.then_some(*out);
            let joins = self.can_join(prepare, groups, rows, heads * dim, bucket);
            let merge = Some(Merge { head_dim: dim, window, slots: if joins { 0 } else { slots } });
            let work = RowWork { z, prepare, merge, ..RowWork::new(target, n_heads * dim) };
            self.append_merged(call, work, joins, bucket, out_calls);
            return Ok(());
        }
        out_calls.push(call);
        if let Some(act) = prepare {
            let op = Prepare { input: *out, act: *act, rows: RowSet::All };
            out_calls.push(self.prepare(&op, bucket));
        }
        Ok(())
    }

    /// Appends a call of split attention and the merge of its parts. If it `joins`, the last
    /// workgroup of a row merges them.
    fn append_merged(
        &self,
        mut call: Call,
        work: RowWork<'_>,
        joins: bool,
        bucket: Bucket,
        out_calls: &mut Vec<Call>,
    ) {
        let (prepare, cols) = (work.prepare, work.cols);
        let merge = self.row_call(work, bucket);
        if joins {
            let (hadamard, int8, group) = preparation(prepare);
            let join = Join { join: true, hadamard, int8, group, cols: word(cols) };
            self.finish_join(&mut call, join, merge);
            out_calls.push(call);
        } else {
            out_calls.extend([call, merge]);
        }
    }

    /// Returns the rows and query heads of an attention block: as many query heads of one KV head
    /// as fit. A block's pages are divided among `shares` workgroups.
    fn attention_block(
        &self,
        op: &Attention,
        bucket: Bucket,
        shares: usize,
    ) -> Result<(usize, usize)> {
        let gq = op.n_heads / op.kv.n_kv_heads;
        let sets = (1..=gq).filter(|n| gq.is_multiple_of(*n)).map(|n| gq / n);
        let mut blocks =
            sets.filter_map(|n| Some((self.attention_rows(op, bucket, shares, n)?, n)));
        blocks.next().with_context(|| {
            format!(
                "{gq} query heads of {} channels do not fit the GPU's shared memory",
                op.kv.head_dim
            )
        })
    }

    /// Returns the rows of a block with `gq` query heads; `None` if not even one row fits.
    fn attention_rows(
        &self,
        op: &Attention,
        bucket: Bucket,
        shares: usize,
        gq: usize,
    ) -> Option<usize> {
        let (kv, dim) = (&op.kv, op.kv.head_dim);
        // Shared memory holds the queries and exponentials of all rows of a block.
        let shared =
            |rows: usize| rows * gq * (dim + PAGE + 32) * 4 + (rows + kv.scales()) * PAGE * 2;
        let fits = |rows: usize| {
            rows * gq <= if rows == 1 { PAIRS } else { PAIRS_OF_ROWS }
                && rows * gq * dim <= OUTPUTS
                && shared(rows) <= self.info.max_shared.min(48 << 10) as usize
        };
        // With few pages, blocks of fewer rows keep more of a large device busy.
        let busy =
            |rows: usize| op.n_heads / gq * bucket.rows.div_ceil(rows) * shares >= self.info.busy;
        let most = if bucket.mixed { 1 } else { bucket.rows.clamp(1, self.block_rows) };
        let rows: Vec<usize> =
            [8, 4, 2, 1].into_iter().filter(|r| *r <= most && fits(*r)).collect();
        rows.iter().find(|r| busy(**r)).or(rows.last()).copied()
    }

    /// Returns the call of attention over the pages after those that another device attends.
    pub(super) fn partial_attention(
        &self,
        op: &Attention,
        offloaded: OffloadedPages,
        bucket: Bucket,
    ) -> Result<Call> {
        let Attention { q, out, n_heads, scale, kv, whole_images, range: _ } = op;
        let dim = head_dim(kv)?;
        ensure!(dim <= 256, "attention next to an NPU supports heads of up to 256 channels");
        let kernel = kernels::PartialAttention {
            head_dim: word(dim),
            kv: kv_code(kv),
            whole_images: *whole_images && bucket.images,
        };
        let push = PartialAttentionPush {
            q: self.at(*q),
            out: self.at(*out),
            k: self.at(kv.k),
            v: self.at(kv.v),
            scratch_k: self.at(kv.scratch_k),
            scratch_v: self.at(kv.scratch_v),
            step: self.at(self.step),
            scale: *scale,
            n_heads: word(*n_heads),
            n_kv: word(kv.n_kv_heads),
            pages: word(kv.pages.count),
            all_pages: word(kv.all_pages),
            max_rows: word(self.max_rows),
            lag: word(offloaded.lag),
            share: word(offloaded.share),
            table: word(kv.table),
            _gap: 0,
        };
        let accesses = vec![
            Access::Read(*q),
            Access::Read(kv.scratch_k),
            Access::Read(kv.scratch_v),
            Access::Write(*out),
        ];
        Ok(self.call(&kernel, &push, [*n_heads, bucket.rows, 1], accesses))
    }
}

/// Returns the head dimension. Fails for sizes that the attention kernels do not support.
fn head_dim(kv: &KvLayer) -> Result<usize> {
    let dim = kv.head_dim;
    ensure!(
        dim.is_power_of_two() && (16..=512).contains(&dim),
        "the GPU kernels support head dimensions of 16 to 512 that are powers of two, not {dim}"
    );
    Ok(dim)
}
