//! Lists the buffers and weights that an operation uses.

use super::act::Act;
use super::cache::KvLayer;
use super::op::{
    Attention, Best, Cap, Choose, Combine, Commit, Concat, Embed, ExpertWeights, Experts, GateUp,
    Linear, LinearJob, Norm, Op, Prepare, Rope, RopeKeys,
};
use super::operand::{BufferId, RowSet, WeightId};

/// An operand of an operation, to be read or replaced.
#[derive(Debug)]
pub enum Use<'a> {
    Weight(&'a mut WeightId),
    /// A buffer that is read.
    Read(&'a mut BufferId),
    /// A buffer with live rows that are overwritten; their old content is not read.
    Write(&'a mut BufferId),
    /// A buffer that is changed in place, or partly written.
    Change(&'a mut BufferId),
}

impl Op {
    /// Calls `f` for every operand, once each. Structs are destructured without `..` if possible,
    /// so that a new field cannot be forgotten.
    pub fn uses(&mut self, f: &mut dyn FnMut(Use<'_>)) {
        match self {
            Op::Embed(Embed { table, scale: _, out }) => {
                f(Use::Weight(table));
                // The buffer already holds the rows of images.
                f(Use::Change(out));
            }
            Op::Concat(Concat { left, right, dim: _, out }) => {
                [left, right].into_iter().for_each(|id| f(Use::Read(id)));
                f(Use::Write(out));
            }
            Op::Norm(Norm { x, add, scale: _, w, eps: _, dim: _, out, rows }) => {
                // The norm writes `x` only if it adds to the residual stream of all rows.
                f(if add.is_some() && *rows == RowSet::All {
                    Use::Change(x)
                } else {
                    Use::Read(x)
                });
                if let Some((y, w)) = add {
                    f(Use::Read(y));
                    f(Use::Read(w));
                }
                f(Use::Read(w));
                f(Use::Write(out));
            }
            Op::Prepare(Prepare { input, act, rows: _ }) => {
                f(Use::Read(input));
                prepared(act, &mut |id| f(Use::Write(id)));
            }
            Op::Linear(Linear { jobs, rows: _ }) => {
                for LinearJob { weight, act, out } in jobs {
                    f(Use::Weight(weight));
                    prepared(act, &mut |id| f(Use::Read(id)));
                    f(Use::Write(out));
                }
            }
            Op::GateUp(GateUp { act_gate, gate, act_up, up, out }) => {
                f(Use::Weight(gate));
                f(Use::Weight(up));
                prepared(act_gate, &mut |id| f(Use::Read(id)));
                prepared(act_up, &mut |id| f(Use::Read(id)));
                f(Use::Write(out));
            }
            Op::Choose(_) | Op::Experts(_) | Op::Combine(_) => mixture(self, f),
            Op::Rope(Rope { q, q_norm, keys, eps: _, n_heads: _, rope_table, kv }) => {
                f(Use::Change(q));
                if let Some(RopeKeys { k, v, k_norm, v_norm }) = keys {
                    f(Use::Change(k));
                    f(if *v_norm { Use::Change(v) } else { Use::Read(v) });
                    f(Use::Read(k_norm));
                }
                [q_norm, rope_table].into_iter().for_each(|id| f(Use::Read(id)));
                cache(kv, f);
            }
            Op::Attention(Attention {
                q,
                out,
                n_heads: _,
                scale: _,
                kv,
                whole_images: _,
                range: _,
            }) => {
                f(Use::Read(q));
                cache(kv, f);
                f(Use::Write(out));
            }
            Op::Cap(Cap { logits, vocab: _, cap: _ }) => f(Use::Change(logits)),
            Op::Best(Best { logits, vocab: _, maxima, lists }) => {
                f(Use::Read(logits));
                f(Use::Write(maxima));
                f(Use::Write(lists));
            }
            Op::Commit(Commit { layers }) => layers.iter_mut().for_each(|kv| cache(kv, f)),
        }
    }

    /// Returns a weight of the operation, if it has one.
    pub fn weight(&self) -> Option<WeightId> {
        match self {
            Op::Embed(embed) => Some(embed.table),
            Op::Linear(linear) => linear.jobs.first().map(|j| j.weight),
            Op::GateUp(gate_up) => Some(gate_up.gate),
            Op::Experts(experts) => Some(experts.first()),
            _ => None,
        }
    }
}

/// Operations of a mixture of experts.
fn mixture(op: &mut Op, f: &mut dyn FnMut(Use<'_>)) {
    match op {
        Op::Choose(Choose { scores, factors, experts: _, used: _, chosen, weights }) => {
            [scores, factors].into_iter().for_each(|id| f(Use::Read(id)));
            [chosen, weights].into_iter().for_each(|id| f(Use::Write(id)));
        }
        Op::Experts(Experts { weights, act, chosen, experts: _, used: _, out }) => {
            match weights {
                ExpertWeights::Plain(weight) | ExpertWeights::Fused(weight) => {
                    f(Use::Weight(weight));
                }
                ExpertWeights::Apart { gate, up, act_up } => {
                    [gate, up].into_iter().for_each(|id| f(Use::Weight(id)));
                    prepared(act_up, &mut |id| f(Use::Read(id)));
                }
            }
            prepared(act, &mut |id| f(Use::Read(id)));
            f(Use::Read(chosen));
            f(Use::Write(out));
        }
        Op::Combine(Combine { parts, weights, used: _, dim: _, out }) => {
            [parts, weights].into_iter().for_each(|id| f(Use::Read(id)));
            f(Use::Write(out));
        }
        _ => {}
    }
}

fn prepared(act: &mut Act, f: &mut dyn FnMut(&mut BufferId)) {
    let Act { format: _, cols: _, values, scales, sums } = act;
    [values, scales, sums].into_iter().for_each(f);
}

/// Lists a layer's cache and scratch buffers. They change a few positions at a time.
fn cache(kv: &mut KvLayer, f: &mut dyn FnMut(Use<'_>)) {
    let KvLayer {
        format: _,
        n_kv_heads: _,
        head_dim: _,
        pages: _,
        all_pages: _,
        table: _,
        key_block: _,
        k,
        v,
        scratch_k,
        scratch_v,
    } = kv;
    [k, v, scratch_k, scratch_v].into_iter().for_each(|id| f(Use::Change(id)));
}
