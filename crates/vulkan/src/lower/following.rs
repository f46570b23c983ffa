//! Operations that follow another in a plan and may share its call.

use gemma_base::compute::{Act, BufferId, Dispatch, Op, Prepare, RowSet};

/// Returns the activation that the next dispatch prepares from the result of `op`. A norm, a gate
/// or attention shares a call with that preparation where possible.
pub fn prepared(op: &Op, rest: &[Dispatch]) -> Option<Act> {
    let Some(Op::Prepare(Prepare { input, act, rows: prepared })) = rest.first().map(|d| &d.op)
    else {
        return None;
    };
    let (out, rows) = match op {
        Op::Norm(norm) => (norm.out, norm.rows),
        Op::GateUp(gate_up) => (gate_up.out, RowSet::All),
        Op::Attention(attention) if !attention.is_partial() => (attention.out, RowSet::All),
        _ => return None,
    };
    (*input == out && *prepared == rows).then_some(*act)
}

/// Returns whether a later operation reads `buffer` before another one overwrites it.
pub fn reads_before_write<'a>(
    mut rest: impl Iterator<Item = &'a Dispatch>,
    buffer: Option<BufferId>,
) -> bool {
    let Some(buffer) = buffer else { return false };
    rest.find_map(|d| {
        let reads = match &d.op {
            Op::Prepare(prepare) => prepare.input == buffer,
            Op::Linear(linear) => linear.jobs.iter().any(|j| j.act.values == buffer),
            Op::GateUp(op) => op.act_gate.values == buffer || op.act_up.values == buffer,
            _ => false,
        };
        (reads || d.op.outputs().contains(&buffer)).then_some(reads)
    })
    .unwrap_or(false)
}
