//! Lowering: the steps of each layer to dispatches.
//!
//! The norm behind a block and the norm before the next one are one dispatch, since both work row
//! by row on the residual stream, which stays in f32 (Gemma 3's peaks near 7e5).

use super::{Builder, RopeTable};
use crate::compute::{
    ActFormat, Attention, BufferId, Cap, Embed, GateUp, KvLayer, Linear, LinearJob, Norm, Op,
    PageRange, Plan, Rope, RowSet, WeightId,
};
use crate::models::{Config, LayerSpec, Role, Step};
use anyhow::{Context, Result, bail};

/// A value between two steps: its buffer, f32 `[rows, width]`, and its width.
type Value = (BufferId, usize);

/// A pass under construction.
struct Pass<'b, 'w> {
    b: &'b mut Builder<'w>,
    config: &'b Config,
    ropes: &'b [RopeTable],
    plan: Plan,
    buffers: Buffers,
    /// The block output that the next norm adds to the residual stream, the norm's weights, and the
    /// factor of the sum.
    pending: Option<(BufferId, BufferId, f32)>,
}

/// Buffers that all layers share, each as wide as the widest layer needs.
struct Buffers {
    residual: BufferId,
    normed: BufferId,
    output: BufferId,
    /// Queries, new keys and new values.
    heads: [BufferId; 3],
    attended: BufferId,
    ffn: BufferId,
}

impl Buffers {
    fn new(b: &mut Builder<'_>, c: &Config) -> Result<Buffers> {
        let (queries, keys) = (c.most(LayerSpec::query_width), c.most(LayerSpec::kv_width));
        Ok(Buffers {
            residual: b.rows("residual", c.dim)?,
            normed: b.rows("normed", c.dim)?,
            output: b.rows("block output", c.dim)?,
            heads: [
                b.rows("queries", queries)?,
                b.rows("new keys", keys)?,
                b.rows("new values", keys)?,
            ],
            attended: b.rows("attended", queries)?,
            ffn: b.rows("ffn", c.ffn_dim)?,
        })
    }
}

/// Returns the plan of the layers, and that of the head, which follows where logits are wanted.
pub fn pass(
    b: &mut Builder<'_>,
    config: &Config,
    kv: &[KvLayer],
    ropes: &[RopeTable],
    hidden: BufferId,
    logits: BufferId,
) -> Result<(Plan, Plan)> {
    let buffers = Buffers::new(b, config)?;
    let (table, table_act) = b.matrix(Role::Embed, 0);
    let mut pass = Pass { b, config, ropes, plan: Plan::default(), buffers, pending: None };
    let op = Embed { table, scale: config.embed_scale, out: pass.buffers.residual };
    pass.plan.push("embed", None, Op::Embed(op));
    for (i, kv) in kv.iter().enumerate() {
        pass.layer(i, *kv)?;
    }
    let layers = std::mem::take(&mut pass.plan);
    pass.norm(Role::FinalNorm, None, hidden, RowSet::Selected)?;
    let head = match pass.b.weights.has_own_head() {
        true => pass.b.matrix(Role::Head, 0),
        false => (table, table_act),
    };
    let input = (hidden, config.dim);
    pass.linear("head", None, input, &[(head, logits)], RowSet::Selected)?;
    if let Some(cap) = config.logit_cap {
        pass.plan.push("cap", None, Op::Cap(Cap { logits, vocab: config.vocab, cap }));
    }
    Ok((layers, pass.plan))
}

impl Pass<'_, '_> {
    fn layer(&mut self, i: usize, kv: KvLayer) -> Result<()> {
        let mut values: Vec<Value> = Vec::new();
        for step in self.config.steps(i) {
            values = self.step(i, kv, &step, &values).with_context(|| format!("layer {i}"))?;
        }
        Ok(())
    }

    /// Appends a step that reads `input`; returns the values that it gives.
    fn step(&mut self, i: usize, kv: KvLayer, step: &Step, input: &[Value]) -> Result<Vec<Value>> {
        let (layer, all) = (Some(i as u16), RowSet::All);
        match step {
            Step::Norm(role) => {
                self.norm(*role, layer, self.buffers.normed, all)?;
                Ok(vec![(self.buffers.normed, self.config.dim)])
            }
            Step::Linear(label, matrices) => {
                let (output, heads) = ([self.buffers.output], self.buffers.heads);
                let buffers = if matrices.len() == 1 { &output[..] } else { &heads };
                let (mut jobs, mut values) = (Vec::new(), Vec::new());
                for (&(role, width), out) in matrices.iter().zip(buffers) {
                    jobs.push((self.b.matrix(role, i), *out));
                    values.push((*out, width));
                }
                self.linear(label, layer, input[0], &jobs, all)?;
                Ok(values)
            }
            Step::Attend { q_norm, k_norm, v_norm } => {
                self.attend(i, kv, [*q_norm, *k_norm], *v_norm, input)
            }
            Step::GateUp { gate, up, rows } => {
                let ((gate, gate_act), (up, up_act)) =
                    (self.b.matrix(*gate, i), self.b.matrix(*up, i));
                let formats = [gate_act, up_act];
                let acts = self.b.prepare(&mut self.plan, layer, input[0], &formats, all)?;
                let out = self.buffers.ffn;
                let op = GateUp { act_gate: acts[0], gate, act_up: acts[1], up, out };
                self.plan.push("gate_up", layer, Op::GateUp(op));
                Ok(vec![(out, *rows)])
            }
            Step::Add { norm, scale } => {
                let norm = self.b.norm(*norm, i)?;
                let scale = scale.map_or(Ok(1.0), |role| self.b.number(role, i))?;
                self.pending = Some((input[0].0, norm, scale));
                Ok(Vec::new())
            }
        }
    }

    /// Appends the norm of the residual stream, to which it first adds what is pending.
    fn norm(&mut self, role: Role, layer: Option<u16>, out: BufferId, rows: RowSet) -> Result<()> {
        let w = self.b.norm(role, layer.map_or(0, usize::from))?;
        let (add, scale) = match self.pending.take() {
            Some((output, norm, scale)) => (Some((output, norm)), scale),
            None => (None, 1.0),
        };
        let (x, eps, dim) = (self.buffers.residual, self.config.eps, self.config.dim);
        let op = Norm { x, add, scale, w, eps, dim, out, rows };
        self.plan.push("norm", layer, Op::Norm(op));
        Ok(())
    }

    /// Appends products of `input` with matrices, each with the buffer that it goes to.
    fn linear(
        &mut self,
        label: &'static str,
        layer: Option<u16>,
        input: Value,
        jobs: &[((WeightId, ActFormat), BufferId)],
        rows: RowSet,
    ) -> Result<()> {
        let formats: Vec<ActFormat> = jobs.iter().map(|((_, format), _)| *format).collect();
        let acts = self.b.prepare(&mut self.plan, layer, input, &formats, rows)?;
        let jobs = jobs
            .iter()
            .zip(acts)
            .map(|(((weight, _), out), act)| LinearJob { weight: *weight, act, out: *out })
            .collect();
        self.plan.push(label, layer, Op::Linear(Linear { jobs, rows }));
        Ok(())
    }

    fn attend(
        &mut self,
        i: usize,
        kv: KvLayer,
        [q_norm, k_norm]: [Role; 2],
        v_norm: bool,
        input: &[Value],
    ) -> Result<Vec<Value>> {
        let spec = &self.config.layers[i];
        let [(q, width), (k, _), (v, _)] = *input else { bail!("attention reads three values") };
        let key = |table: &&RopeTable| (table.rope, table.head_dim) == (spec.rope, spec.head_dim);
        let rope_table = self.ropes.iter().find(key).context("a table of angles")?.buffer;
        let (n_heads, eps) = (spec.n_heads, self.config.eps);
        let (q_norm, k_norm) = (self.b.norm(q_norm, i)?, self.b.norm(k_norm, i)?);
        let op = Rope { q, k, v, q_norm, k_norm, v_norm, eps, n_heads, rope_table, kv };
        self.plan.push("rope", Some(i as u16), Op::Rope(op));
        let (scale, out) = (spec.query_scale, self.buffers.attended);
        let op = Attention { q, out, n_heads, scale, kv, range: PageRange::All };
        self.plan.push("attention", Some(i as u16), Op::Attention(op));
        Ok(vec![(out, width)])
    }
}
