//! Twin of the attention kernel: one query head at a time, directly from the definition of page
//! partials.

use super::q8;
use crate::compute::cache::{KvFormat, KvLayer};
use crate::compute::memory::Buffers;
use crate::compute::op::Attention;
use crate::compute::operand::BufferId;
use crate::compute::step::StepView;
use crate::kv::PAGE;
use crate::tensor::math::{self, LANES};
use half::f16;

/// Softmax attention over one page, not yet divided.
///
/// `o / l` is the attention over the page alone; `m` is its largest score.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    pub m: f32,
    pub l: f32,
    pub o: Vec<f32>, // [head_dim]
}

/// Merges the next page's partial into a running one. All pages are merged in page order by this
/// function.
#[inline(always)]
pub fn merge(m: &mut f32, l: &mut f32, o: &mut [f32], page: (f32, f32, &[f32])) {
    let (pm, pl, po) = page;
    let max = if pm > *m || pm.is_nan() { pm } else { *m };
    let (a, b) = (math::exp(*m - max), math::exp(pm - max));
    *l = (*l).mul_add(a, pl * b);
    for (o, p) in o.iter_mut().zip(po) {
        *o = (*o).mul_add(a, p * b);
    }
    *m = max;
}

/// Keys and values of one KV head, as visible to a row with these ancestors.
struct Seen<'a> {
    buffers: &'a Buffers,
    kv: &'a KvLayer,
    max_rows: usize,
    step: &'a StepView<'a>,
    sequence: usize,
    base: usize,
    head: usize,
    path: &'a [u32],
}

impl Seen<'_> {
    /// Returns element `index` of a key or value buffer as f32; int8 codes are not scaled.
    fn element(&self, id: BufferId, index: usize) -> f32 {
        // SAFETY: no thread writes these buffers during attention.
        unsafe {
            match self.kv.format {
                KvFormat::F32 => self.buffers.slice::<f32>(id, index, 1)[0],
                KvFormat::F16 => {
                    f16::from_bits(self.buffers.slice::<u16>(id, index, 1)[0]).to_f32()
                }
                KvFormat::Q8 => self.buffers.slice::<i8>(id, index, 1)[0] as f32,
            }
        }
    }

    /// Returns `Ok(page)` of a committed position, or `Err(scratch row)` of an uncommitted one.
    fn place(&self, p: usize) -> Result<usize, usize> {
        match p.checked_sub(self.base) {
            None => Ok(self.kv.page(self.step, self.sequence, p / PAGE)),
            Some(depth) => Err(self.path[depth] as usize),
        }
    }

    fn key(&self, p: usize, d: usize) -> f32 {
        match self.place(p) {
            Ok(page) => self.element(self.kv.k, self.kv.key_at(page, self.head, d, p % PAGE)),
            Err(row) => self.element(
                self.kv.scratch_k,
                self.kv.scratch_key_at(self.max_rows, self.head, d, row),
            ),
        }
    }

    fn value(&self, p: usize, d: usize) -> f32 {
        let (heads, dim) = (self.kv.n_kv_heads, self.kv.head_dim);
        match self.place(p) {
            Ok(page) => {
                self.element(self.kv.v, ((page * heads + self.head) * PAGE + p % PAGE) * dim + d)
            }
            Err(row) => self.element(self.kv.scratch_v, (row * heads + self.head) * dim + d),
        }
    }

    /// Returns the scale of a group of channels of a key or value.
    fn scale(&self, [cache, scratch]: [BufferId; 2], p: usize, group: usize) -> f32 {
        let (id, at) = match self.place(p) {
            Ok(page) => (cache, self.kv.scale_at(page, self.head, group, p % PAGE)),
            Err(row) => (scratch, self.kv.scratch_scale_at(self.max_rows, self.head, group, row)),
        };
        // SAFETY: as above.
        f16::from_bits(unsafe { self.buffers.slice::<u16>(id, at, 1)[0] }).to_f32()
    }

    /// Returns the scaled dot products of `q` with the keys of these positions.
    fn scores(&self, q: &[f32], visible: std::ops::Range<usize>, scale: f32) -> Vec<f32> {
        if self.kv.format != KvFormat::Q8 {
            return visible
                .map(|p| {
                    q.iter().enumerate().fold(0.0, |acc, (d, q)| q.mul_add(self.key(p, d), acc))
                        * scale
                })
                .collect();
        }
        let mut codes = vec![0i16; q.len()];
        let scale = q8::quantize_query(q, &mut codes) * scale;
        let scales = |p| {
            (0..self.kv.scales()).map(move |g| self.scale([self.kv.k, self.kv.scratch_k], p, g))
        };
        visible.map(|p| q8::dot(&codes, |d| self.key(p, d) as i8, scales(p)) * scale).collect()
    }

    /// Adds `e * value` to `o`. The scale of an int8 value is multiplied into `e` first.
    fn add_value(&self, e: f32, p: usize, o: &mut [f32]) {
        let group = self.kv.format.group(self.kv.head_dim);
        for (d, o) in o.iter_mut().enumerate() {
            let e = match self.kv.format {
                KvFormat::Q8 => e * self.scale([self.kv.v, self.kv.scratch_v], p, d / group),
                _ => e,
            };
            *o = e.mul_add(self.value(p, d), *o);
        }
    }
}

/// Attention of one (row, head) over the pages of `op.range`, not yet divided.
///
/// `q` is `[head_dim]`. `path` holds the rows from the root to the last visible row, see
/// [`Attention::end`].
pub fn attend(
    buffers: &Buffers,
    op: &Attention,
    max_rows: usize,
    step: &StepView<'_>,
    q: &[f32],
    (row, head): (usize, usize),
    path: &[u32],
) -> Partial {
    let seen = Seen {
        buffers,
        kv: &op.kv,
        max_rows,
        step,
        sequence: step.sequences[row] as usize,
        base: step.base(row),
        head: head / (op.n_heads / op.kv.n_kv_heads),
        path,
    };
    let (first, end) = (op.first(step.positions[row] as usize), seen.base + path.len());
    let mut total: Option<Partial> = None;
    for page in first / PAGE..end.div_ceil(PAGE) {
        let visible = first.max(page * PAGE)..end.min((page + 1) * PAGE);
        let partial = page_partial(&seen, q, op.scale, visible);
        match &mut total {
            None => total = Some(partial),
            Some(t) => merge(&mut t.m, &mut t.l, &mut t.o, (partial.m, partial.l, &partial.o)),
        }
    }
    total.expect("a row sees at least one position")
}

fn page_partial(
    seen: &Seen<'_>,
    q: &[f32],
    scale: f32,
    visible: std::ops::Range<usize>,
) -> Partial {
    let scores = seen.scores(q, visible.clone(), scale);
    let m = math::max_finite(&scores);
    let mut lanes = [0f32; LANES];
    let mut o = vec![0f32; q.len()];
    for (p, score) in visible.zip(scores) {
        let e = math::exp(score - m);
        lanes[p % LANES] += e;
        seen.add_value(e, p, &mut o);
    }
    Partial { m, l: math::fold(lanes), o }
}
