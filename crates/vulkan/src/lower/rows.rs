//! Kernel calls of `row.comp`: norms, gates and preparation of whole rows.

use super::fuse::Forms;
use super::kernels::RowPush;
use super::*;

/// Work of `row.comp` per row.
pub struct RowWork<'a> {
    /// Input, `[rows, cols]`.
    pub x: BufferId,
    /// Rows that are normalised with the weights `w_add` and added to `x` first. With `glu`, these
    /// are the factors of `x`; if absent, they are in `x` too, each row after its row of `x`.
    pub add: Option<BufferId>,
    pub w_add: Option<BufferId>,
    /// Weights of the norm.
    pub w: Option<BufferId>,
    /// Output buffer for the floats of the result.
    pub z: Option<BufferId>,
    pub prepare: Option<&'a Act>,
    pub cols: usize,
    pub eps: f32,
    /// Factor of the sum of `x` and `add`.
    pub scale: f32,
    pub rows: RowSet,
    pub glu: bool,
    pub merge: Option<Merge>,
}

impl RowWork<'_> {
    /// Creates work that reads all rows of `x` and has no outputs yet.
    pub fn new(x: BufferId, cols: usize) -> Self {
        RowWork {
            x,
            add: None,
            w_add: None,
            w: None,
            z: None,
            prepare: None,
            cols,
            eps: 0.0,
            scale: 1.0,
            rows: RowSet::All,
            glu: false,
            merge: None,
        }
    }
}

/// Page partials of attention to be merged.
#[derive(Clone, Copy)]
pub struct Merge {
    pub head_dim: usize,
    pub window: usize,
    pub slots: usize,
}

impl Lowering<'_> {
    /// Returns the threads of a workgroup that processes a whole row.
    ///
    /// The number of subgroups divides the blocks of 128 channels evenly, unless that leaves fewer
    /// than a third of the subgroups. Two or three blocks per subgroup are faster than one, because
    /// fewer subgroups wait for each other.
    pub(super) fn row_threads(&self, cols: usize) -> u32 {
        let blocks = cols.div_ceil(128) as u32;
        let most =
            (1024.min(self.info.max_workgroup) / self.info.subgroup).min(self.info.max_subgroups);
        let most = most.min(if blocks <= 64 { 16 } else { 32 }).min(blocks);
        let even = (1..=most).rev().find(|n| blocks.is_multiple_of(*n)).unwrap_or(1);
        (if 3 * even >= most { even } else { most }) * self.info.subgroup
    }

    pub(super) fn row_call(&self, r: RowWork<'_>, bucket: Bucket) -> Call {
        let (hadamard, int8, group) = preparation(r.prepare);
        // A norm, or a scale for the whole row, needs one workgroup. Other work is spread over
        // several.
        let spread =
            r.w.is_none() && !(int8 && r.prepare.is_some_and(|a| a.format.group == Group::Row));
        let threads =
            if spread { 8 * self.info.subgroup.min(32) } else { self.row_threads(r.cols) };
        let shares =
            if spread { r.cols.div_ceil(128 * (threads / self.info.subgroup) as usize) } else { 1 };
        let kernel = kernels::Row {
            local: threads,
            subgroup: self.info.subgroup,
            threads,
            cols: word(r.cols),
            norm: r.w.is_some(),
            selected: r.rows == RowSet::Selected,
            prepare: r.prepare.is_some(),
            hadamard,
            int8,
            group,
            glu: r.glu,
            merge: r.merge.map_or(0, |m| word(m.head_dim)),
            spread,
            slots: if let RowSet::Slots(n) = r.rows { word(n) } else { 1 },
            pairs: r.glu && r.add.is_none(),
        };
        let at = |id: Option<BufferId>| id.map_or(0, |id| self.at(id));
        let push = RowPush {
            x: self.at(r.x),
            add: at(r.add),
            w_add: at(r.w_add),
            w: at(r.w),
            z: at(r.z),
            values: at(r.prepare.map(|a| a.values)),
            scales: at(r.prepare.map(|a| a.scales)),
            sums: at(r.prepare.map(|a| a.sums)),
            step: self.at(self.step),
            eps: r.eps,
            stride: word(r.cols * if int8 { 1 } else { 4 }),
            max_rows: word(self.max_rows),
            window: r.merge.map_or(0, |m| word(m.window)),
            slots: r.merge.map_or(0, |m| word(m.slots)),
            scale: r.scale,
        };
        let mut accesses = vec![Access::Read(r.x)];
        accesses.extend(r.add.map(Access::Read));
        accesses.extend(r.z.map(Access::Write));
        if r.add.is_some() && !r.glu && r.rows == RowSet::All {
            accesses.push(Access::Write(r.x));
        }
        if let Some(a) = r.prepare {
            accesses.extend([a.values, a.scales, a.sums].map(Access::Write));
        }
        self.call(&kernel, &push, [bucket.of(r.rows), shares, 1], accesses)
    }

    pub(super) fn norm(&self, op: &Norm, forms: &Forms, bucket: Bucket) -> Call {
        let Norm { x, add, scale, w, eps, dim, out, rows } = op;
        let z = (forms.floats || *rows == RowSet::Selected).then_some(*out);
        let (add, w_add) = (add.map(|a| a.0), add.map(|a| a.1));
        let work = RowWork {
            add,
            w_add,
            w: Some(*w),
            z,
            prepare: forms.act.as_ref(),
            eps: *eps,
            scale: *scale,
            rows: *rows,
            ..RowWork::new(*x, *dim)
        };
        self.row_call(work, bucket)
    }

    pub(super) fn prepare(&self, op: &Prepare, bucket: Bucket) -> Call {
        let Prepare { input, act, rows } = op;
        let work = RowWork { prepare: Some(act), rows: *rows, ..RowWork::new(*input, act.cols) };
        self.row_call(work, bucket)
    }

    pub(super) fn glu(&self, out: BufferId, cols: usize, forms: &Forms, bucket: Bucket) -> Call {
        let work = RowWork {
            add: Some(self.own.up),
            z: forms.floats.then_some(out),
            prepare: forms.act.as_ref(),
            glu: true,
            ..RowWork::new(self.own.gate, cols)
        };
        self.row_call(work, bucket)
    }
}
