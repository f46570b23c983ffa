//! Fusion: finds dispatches of a plan that can share calls.
//!
//! A norm, a gate or attention also prepares its result for the linear layers after it. Linear
//! layers are fused with the norm or rotation of their result: `finish.rs` turns it into their
//! epilogue if device and row count allow, and otherwise it is lowered separately.

use gemma_base::compute::{Act, BufferId, Dispatch, Linear, Norm, Op, Rope, RowSet};
use std::ops::Range;

/// A dispatch, or several that are lowered together.
pub struct Fused<'a> {
    pub op: &'a Op,
    /// Forms in which later operations read the result of a norm, a gate or attention.
    pub forms: Forms,
    /// Norm or rotation of the results of linear layers.
    pub next: Option<Box<Fused<'a>>>,
    pub label: &'static str,
    /// Range of the dispatches, without those of `next`.
    pub dispatches: Range<usize>,
}

/// Forms in which later operations read a result.
#[derive(Clone, Copy, Debug)]
pub struct Forms {
    pub floats: bool,
    /// Activations prepared for linear layers.
    pub act: Option<Act>,
}

/// Returns all dispatches in order, fused.
pub fn fused(dispatches: &[Dispatch]) -> Vec<Fused<'_>> {
    let (mut all, mut at) = (Vec::new(), 0);
    while let Some(fused) = Fused::at(dispatches, at) {
        at = fused.end();
        all.push(fused);
    }
    all
}

impl<'a> Fused<'a> {
    /// Fuses the dispatches that start at index `at`; `None` at the end.
    fn at(dispatches: &'a [Dispatch], at: usize) -> Option<Fused<'a>> {
        let &Dispatch { ref op, label, .. } = dispatches.get(at)?;
        let rest = &dispatches[at + 1..];
        let forms = match op {
            Op::Norm(op) => Forms::of(op.out, op.rows, rest),
            Op::GateUp(op) => Forms::of(op.out, RowSet::All, rest),
            Op::Experts(op) if op.is_gated() => Forms::of(op.out, RowSet::Slots(op.used), rest),
            Op::Attention(op) if !op.is_partial() => Forms::of(op.out, RowSet::All, rest),
            _ => Forms { floats: true, act: None },
        };
        let end = at + 1 + forms.act.is_some() as usize;
        let next = rest.first().filter(|next| continues(op, &next.op));
        let next = next.and_then(|_| Fused::at(dispatches, at + 1)).map(Box::new);
        Some(Fused { op, forms, next, label, dispatches: at..end })
    }

    fn end(&self) -> usize {
        self.next.as_ref().map_or(self.dispatches.end, |next| next.dispatches.end)
    }
}

impl Forms {
    /// Returns the forms in which `rest` reads `out`. The first dispatch may prepare its `rows`.
    fn of(out: BufferId, rows: RowSet, rest: &[Dispatch]) -> Forms {
        let act = match rest.first().map(|d| &d.op) {
            Some(Op::Prepare(next)) if (next.input, next.rows) == (out, rows) => Some(next.act),
            _ => None,
        };
        let floats = act.is_none_or(|_| reads_before_write(&rest[1..], out));
        Forms { floats, act }
    }
}

/// Returns whether `op` is a set of linear layers and `next` normalises or rotates all of their
/// results.
fn continues(op: &Op, next: &Op) -> bool {
    let Op::Linear(Linear { jobs, rows: RowSet::All }) = op else { return false };
    let outs = jobs.iter().map(|job| job.out);
    match next {
        Op::Norm(Norm { add: Some((added, _)), rows: RowSet::All, .. }) => outs.eq([*added]),
        Op::Rope(Rope { q, keys, .. }) => {
            outs.eq([*q].into_iter().chain(keys.iter().flat_map(|own| [own.k, own.v])))
        }
        _ => false,
    }
}

/// Returns whether a dispatch reads the floats of `buffer` before another one overwrites them.
fn reads_before_write(dispatches: &[Dispatch], buffer: BufferId) -> bool {
    let access = dispatches.iter().find_map(|d| {
        let reads = match &d.op {
            Op::Prepare(prepare) => prepare.input == buffer,
            Op::Linear(linear) => linear.jobs.iter().any(|j| j.act.values == buffer),
            Op::GateUp(op) => op.act_gate.values == buffer || op.act_up.values == buffer,
            Op::Experts(op) => {
                op.act.values == buffer || op.second().is_some_and(|(_, act)| act.values == buffer)
            }
            _ => false,
        };
        (reads || d.op.outputs().contains(&buffer)).then_some(reads)
    });
    access.unwrap_or(false)
}
