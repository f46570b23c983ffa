//! Lowers the steps of each layer to dispatches.
//!
//! The norm after a block and the norm before the next one are one dispatch, since both work row by
//! row on the residual stream. The stream stays in f32, because Gemma 3's values peak near 7e5.

use super::mixture::MixtureBuffers;
use super::{Builder, RopeTable};
use crate::models::{Config, KeyNorms, LayerSpec, Role, Step};
use anyhow::{Context, Result, bail};
use gemma_base::compute::{
    Act, ActFormat, Attention, BufferId, Cap, Concat, Embed, GateUp, KvLayer, Linear, LinearJob,
    Norm, Op, PageRange, Plan, Rope, RopeKeys, RowSet, WeightId,
};

/// A value between two steps: its buffer, f32 `[rows, width]`, and its width.
pub(super) type StepValue = (BufferId, usize);

/// A pass under construction.
pub(super) struct PassBuilder<'b, 'w> {
    pub b: &'b mut Builder<'w>,
    pub config: &'b Config,
    ropes: &'b [RopeTable],
    pub plan: Plan,
    pub buffers: PassBuffers,
    /// For an assistant: the target's layer with which it shares its executor.
    home: Option<u16>,
    /// For an assistant: the target's layers with the caches that its own layers read.
    borrowed: Vec<u16>,
    /// Block output that the next norm adds to the residual stream, with that block's norm weights
    /// and the factor of the sum.
    pending: Option<(BufferId, BufferId, f32)>,
}

/// Buffers that all layers share, each sized for the widest layer.
pub(super) struct PassBuffers {
    pub residual: BufferId,
    pub normed: BufferId,
    pub output: BufferId,
    /// Queries; then new keys and new values, if the model has them.
    heads: Vec<BufferId>,
    attended: BufferId,
    ffn: BufferId,
    /// Buffers of a mixture of experts.
    pub mixture: Option<MixtureBuffers>,
}

impl PassBuffers {
    fn new(b: &mut Builder<'_>, c: &Config) -> Result<PassBuffers> {
        let (queries, keys) = (c.most(LayerSpec::query_width), c.most(LayerSpec::kv_width));
        let mut heads = vec![b.rows("queries", queries)?];
        if c.backbone.is_none() {
            heads.extend([b.rows("new keys", keys)?, b.rows("new values", keys)?]);
        }
        Ok(PassBuffers {
            residual: b.rows("residual", c.dim)?,
            normed: b.rows("normed", c.dim)?,
            output: b.rows("block output", c.dim)?,
            heads,
            attended: b.rows("attended", queries)?,
            ffn: b.rows("ffn", c.ffn_dim)?,
            mixture: c.experts.map(|experts| MixtureBuffers::new(b, c, experts)).transpose()?,
        })
    }
}

/// Plans of a pass.
pub struct PassPlans {
    /// The layers.
    pub body: Plan,
    /// The head, which is appended if logits are needed.
    pub tail: Plan,
    /// f32 `[max_rows, dim]`: embeddings, the input of the first layer.
    pub embedded: BufferId,
}

/// Returns the plans of a model's pass.
pub fn pass(
    b: &mut Builder<'_>,
    config: &Config,
    kv: &[KvLayer],
    ropes: &[RopeTable],
    hidden: BufferId,
    logits: BufferId,
) -> Result<PassPlans> {
    let buffers = PassBuffers::new(b, config)?;
    let embedded = buffers.residual;
    let (table, table_act) = b.matrix(Role::Embed, 0);
    let (plan, home, borrowed, pending) = Default::default();
    let mut pass = PassBuilder { b, config, ropes, plan, buffers, home, borrowed, pending };
    let op = Embed { table, scale: config.embed_scale, out: embedded };
    pass.push("embed", None, Op::Embed(op));
    for (i, kv) in kv.iter().enumerate() {
        pass.layer(i, *kv)?;
    }
    let body = std::mem::take(&mut pass.plan);
    pass.norm(Role::FinalNorm, None, hidden, RowSet::Selected)?;
    let head = match pass.b.weights.has_own_head() {
        true => pass.b.matrix(Role::Head, 0),
        false => (table, table_act),
    };
    let input = (hidden, config.dim);
    pass.linear("head", None, input, &[(head, logits)], RowSet::Selected)?;
    if let Some(cap) = config.logit_cap {
        pass.push("cap", None, Op::Cap(Cap { logits, vocab: config.vocab, cap }));
    }
    Ok(PassPlans { body, tail: pass.plan, embedded })
}

/// Persistent buffers of an assistant's pass, and the target's embedding table.
#[derive(Clone, Copy)]
pub struct AssistantBuffers {
    pub table: WeightId,
    pub embed_scale: f32,
    /// f32 `[max_rows, backbone]`
    pub states: BufferId,
    /// f32 `[max_rows, dim]`
    pub hidden: BufferId,
    pub logits: BufferId,
}

/// Returns the plan of an assistant's pass over rows with parents that have states.
///
/// `kv` lists, for each layer of the assistant, a layer of the target and its cache. `home` is the
/// target's layer that determines where the assistant runs.
pub fn assistant_pass(
    b: &mut Builder<'_>,
    config: &Config,
    kv: &[(u16, KvLayer)],
    ropes: &[RopeTable],
    io: AssistantBuffers,
    home: u16,
) -> Result<Plan> {
    let backbone = config.backbone.context("an assistant")?;
    let (embedded, joined) = (b.rows("embedded", backbone)?, b.rows("joined", 2 * backbone)?);
    let buffers = PassBuffers::new(b, config)?;
    let (residual, normed) = (buffers.residual, buffers.normed);
    let (plan, pending) = Default::default();
    let (home, borrowed) = (Some(home), kv.iter().map(|(layer, _)| *layer).collect());
    let mut pass = PassBuilder { b, config, ropes, plan, buffers, home, borrowed, pending };
    let op = Embed { table: io.table, scale: io.embed_scale, out: embedded };
    // Runs on the executor that holds the table.
    pass.plan.push("embed", None, Op::Embed(op));
    let op = Concat { left: embedded, right: io.states, dim: backbone, out: joined };
    pass.push("concat", None, Op::Concat(op));
    let jobs = [(pass.b.matrix(Role::PreProjection, 0), residual)];
    pass.linear("pre", None, (joined, 2 * backbone), &jobs, RowSet::All)?;
    for (i, (_, kv)) in kv.iter().enumerate() {
        pass.layer(i, *kv)?;
    }
    pass.norm(Role::FinalNorm, None, normed, RowSet::All)?;
    let jobs = [(pass.b.matrix(Role::PostProjection, 0), io.states)];
    pass.linear("post", None, (normed, config.dim), &jobs, RowSet::All)?;
    pass.norm(Role::FinalNorm, None, io.hidden, RowSet::Selected)?;
    let role = if pass.b.weights.has_own_head() { Role::Head } else { Role::Embed };
    let jobs = [(pass.b.matrix(role, 0), io.logits)];
    pass.linear("head", None, (io.hidden, config.dim), &jobs, RowSet::Selected)?;
    Ok(pass.plan)
}

impl PassBuilder<'_, '_> {
    /// Appends a dispatch of the model's layer, or of none.
    pub fn push(&mut self, label: &'static str, layer: Option<u16>, op: Op) {
        self.plan.push(label, self.home.or(layer), op);
    }

    /// Appends a dispatch that works on the cache of a layer.
    fn push_at_cache(&mut self, label: &'static str, i: usize, op: Op) {
        let layer = self.borrowed.get(i).copied().unwrap_or(i as u16);
        self.plan.push(label, Some(layer), op);
    }

    fn layer(&mut self, i: usize, kv: KvLayer) -> Result<()> {
        let mut values: Vec<StepValue> = Vec::new();
        for step in self.config.steps(i) {
            values = self.step(i, kv, &step, &values).with_context(|| format!("layer {i}"))?;
        }
        Ok(())
    }

    /// Appends a step that reads `input`; returns the values that it computes.
    fn step(
        &mut self,
        i: usize,
        kv: KvLayer,
        step: &Step,
        input: &[StepValue],
    ) -> Result<Vec<StepValue>> {
        let (layer, all) = (Some(i as u16), RowSet::All);
        match step {
            Step::Norm(role) => {
                self.norm(*role, layer, self.buffers.normed, all)?;
                Ok(vec![(self.buffers.normed, self.config.dim)])
            }
            Step::Linear(label, matrices) => {
                let buffers = match matrices[0].0 {
                    Role::Q => self.buffers.heads.clone(),
                    _ => vec![self.buffers.output],
                };
                let (mut jobs, mut values) = (Vec::new(), Vec::new());
                for (&(role, width), out) in matrices.iter().zip(buffers) {
                    jobs.push((self.b.matrix(role, i), out));
                    values.push((out, width));
                }
                self.linear(label, layer, input[0], &jobs, all)?;
                Ok(values)
            }
            Step::Attend { q_norm, keys } => self.attend(i, kv, *q_norm, *keys, input),
            Step::GateUp { gate, up, rows } => {
                let ((gate, gate_act), (up, up_act)) =
                    (self.b.matrix(*gate, i), self.b.matrix(*up, i));
                let formats = [gate_act, up_act];
                let acts = self.prepare(layer, input[0], &formats, all)?;
                let out = self.buffers.ffn;
                let op = GateUp { act_gate: acts[0], gate, act_up: acts[1], up, out };
                self.push("gate_up", layer, Op::GateUp(op));
                Ok(vec![(out, *rows)])
            }
            Step::Mixture(experts) => self.mixture(i, *experts, input[0]),
            Step::Add { norm, scale } => {
                let norm = self.b.norm(*norm, i)?;
                let scale = scale.map_or(Ok(1.0), |role| self.b.number(role, i))?;
                self.pending = Some((input[0].0, norm, scale));
                Ok(Vec::new())
            }
        }
    }

    /// Appends the norm of the residual stream, after adding the pending block output.
    fn norm(&mut self, role: Role, layer: Option<u16>, out: BufferId, rows: RowSet) -> Result<()> {
        let w = self.b.norm(role, layer.map_or(0, usize::from))?;
        let (add, scale) = match self.pending.take() {
            Some((output, norm, scale)) => (Some((output, norm)), scale),
            None => (None, 1.0),
        };
        let (x, eps, dim) = (self.buffers.residual, self.config.eps, self.config.dim);
        let op = Norm { x, add, scale, w, eps, dim, out, rows };
        self.push("norm", layer, Op::Norm(op));
        Ok(())
    }

    /// Appends the preparation of `input` for matrices of these formats.
    pub fn prepare(
        &mut self,
        layer: Option<u16>,
        input: StepValue,
        formats: &[ActFormat],
        rows: RowSet,
    ) -> Result<Vec<Act>> {
        self.b.prepare(&mut self.plan, self.home.or(layer), input, formats, rows)
    }

    /// Appends products of `input` with matrices, each with its output buffer.
    pub fn linear(
        &mut self,
        label: &'static str,
        layer: Option<u16>,
        input: StepValue,
        jobs: &[((WeightId, ActFormat), BufferId)],
        rows: RowSet,
    ) -> Result<()> {
        let formats: Vec<ActFormat> = jobs.iter().map(|((_, format), _)| *format).collect();
        let acts = self.prepare(layer, input, &formats, rows)?;
        let jobs = jobs
            .iter()
            .zip(acts)
            .map(|(((weight, _), out), act)| LinearJob { weight: *weight, act, out: *out })
            .collect();
        self.push(label, layer, Op::Linear(Linear { jobs, rows }));
        Ok(())
    }

    fn attend(
        &mut self,
        i: usize,
        kv: KvLayer,
        q_norm: Role,
        keys: Option<KeyNorms>,
        input: &[StepValue],
    ) -> Result<Vec<StepValue>> {
        let spec = &self.config.layers[i];
        let (q, width) = input[0];
        let keys = match (keys, input) {
            (Some(KeyNorms { k_norm, v_norm }), [_, (k, _), (v, _)]) => {
                Some(RopeKeys { k: *k, v: *v, k_norm: self.b.norm(k_norm, i)?, v_norm })
            }
            (None, [_]) => None,
            _ => bail!("attention reads queries, keys and values, or queries alone"),
        };
        let key = |table: &&RopeTable| (table.rope, table.head_dim) == (spec.rope, spec.head_dim);
        let rope_table = self.ropes.iter().find(key).context("a table of angles")?.buffer;
        let (n_heads, eps) = (spec.n_heads, self.config.eps);
        let q_norm = self.b.norm(q_norm, i)?;
        let op = Rope { q, q_norm, keys, eps, n_heads, rope_table, kv };
        self.push_at_cache("rope", i, Op::Rope(op));
        let (scale, out) = (spec.query_scale, self.buffers.attended);
        let (whole_images, range) = (spec.whole_images, PageRange::All);
        let op = Attention { q, out, n_heads, scale, kv, whole_images, range };
        self.push_at_cache("attention", i, Op::Attention(op));
        Ok(vec![(out, width)])
    }
}
