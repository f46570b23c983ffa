//! Twin of the attention kernel: one query head at a time, straight from the definition of page partials.

use crate::compute::memory::Buffers;
use crate::compute::plan::{BufferId, KvFormat, KvLayer};
use crate::compute::step::StepView;
use crate::kv::PAGE;
use crate::tensor::math::{self, LANES};
use half::f16;

/// Softmax attention over one page, not yet divided: `o / l` with maximum `m` is the page's own attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    pub m: f32,
    pub l: f32,
    pub o: Vec<f32>, // [head_dim]
}

/// Joins the next page's partial into a running one. Pages are joined in page order, always by this function.
#[inline(always)]
pub fn merge(m: &mut f32, l: &mut f32, o: &mut [f32], page: (f32, f32, &[f32])) {
    let (pm, pl, po) = page;
    let max = if pm > *m { pm } else { *m };
    let (a, b) = (math::exp(*m - max), math::exp(pm - max));
    *l = (*l).mul_add(a, pl * b);
    for (o, p) in o.iter_mut().zip(po) {
        *o = (*o).mul_add(a, p * b);
    }
    *m = max;
}

/// Element `index` of a key or value buffer, as f32.
pub fn element(buffers: &Buffers, format: KvFormat, id: BufferId, index: usize) -> f32 {
    // SAFETY: the caller runs alone or reads buffers that nobody writes during attention.
    unsafe {
        match format {
            KvFormat::F32 => buffers.slice::<f32>(id, index, 1)[0],
            KvFormat::F16 => f16::from_bits(buffers.slice::<u16>(id, index, 1)[0]).to_f32(),
        }
    }
}

/// Attention of one (row, head): `q` is `[head_dim]`, `path` holds the rows of the root ... row itself.
pub fn attend(
    buffers: &Buffers,
    kv: &KvLayer,
    max_rows: usize,
    step: &StepView<'_>,
    q: &[f32],
    head: usize,
    path: &[u32],
    scale: f32,
) -> Vec<f32> {
    let position = step.base + path.len() - 1;
    let first = kv.pages.first_visible(position);
    let mut total: Option<Partial> = None;
    for page in first / PAGE..=position / PAGE {
        let visible = first.max(page * PAGE)..(position + 1).min((page + 1) * PAGE);
        let partial = page_partial(buffers, kv, max_rows, step, q, head, path, scale, visible);
        match &mut total {
            None => total = Some(partial),
            Some(t) => merge(&mut t.m, &mut t.l, &mut t.o, (partial.m, partial.l, &partial.o)),
        }
    }
    let total = total.expect("a row sees at least itself");
    total.o.iter().map(|o| o / total.l).collect()
}

#[allow(clippy::too_many_arguments)]
fn page_partial(
    buffers: &Buffers,
    kv: &KvLayer,
    max_rows: usize,
    step: &StepView<'_>,
    q: &[f32],
    head: usize,
    path: &[u32],
    scale: f32,
    visible: std::ops::Range<usize>,
) -> Partial {
    let (heads, dim) = (kv.n_kv_heads, kv.head_dim);
    let page = kv.pages.physical(visible.start / PAGE);
    let key = |p: usize, d: usize| match p.checked_sub(step.base) {
        None => element(buffers, kv.format, kv.k, kv.key_at(page, head, d, p % PAGE)),
        Some(depth) => element(buffers, kv.format, kv.scratch_k, kv.scratch_key_at(max_rows, head, d, path[depth] as usize)),
    };
    let value = |p: usize, d: usize| match p.checked_sub(step.base) {
        None => element(buffers, kv.format, kv.v, ((page * heads + head) * PAGE + p % PAGE) * dim + d),
        Some(depth) => element(buffers, kv.format, kv.scratch_v, (path[depth] as usize * heads + head) * dim + d),
    };
    let scores: Vec<f32> =
        visible.clone().map(|p| q.iter().enumerate().fold(0.0, |acc, (d, q)| q.mul_add(key(p, d), acc)) * scale).collect();
    let m = scores.iter().fold(f32::NEG_INFINITY, |m, s| if *s > m { *s } else { m });
    let mut lanes = [0f32; LANES];
    let mut o = vec![0f32; dim];
    for (p, score) in visible.zip(scores) {
        let e = math::exp(score - m);
        lanes[p % LANES] += e;
        for (d, o) in o.iter_mut().enumerate() {
            *o = e.mul_add(value(p, d), *o);
        }
    }
    Partial { m, l: math::fold(lanes), o }
}
