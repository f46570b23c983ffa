//! The pass of an assistant on its target's executor, using the target's caches.
//!
//! Its rows are in the target's step buffer. Each row has a position before its root, so it sees
//! the committed tokens and no other row. The pass reads the state of the row's parent, and writes
//! the state of the row.

use super::builder::Builder;
use super::pass::{self, AssistantBuffers};
use super::{Forward, RopeTable, ropes};
use crate::models::{Config, LayerSpec, Weights};
use anyhow::Result;
use gemma_base::compute::{BufferId, Executor, KvLayer, Op, Part, PlanId};
use gemma_base::error::Fault;
use gemma_base::kv::Pages;

/// An assistant loaded next to its target, ready to run.
pub struct AssistantForward {
    pub ropes: Vec<RopeTable>,
    /// f32 `[max_rows, dim of the target]`: the state after each row.
    pub states: BufferId,
    /// Scores the step's rows, writing to the target's buffer of logits.
    pub pass: PlanId,
    /// Like `pass`, with lists of the largest logits, if the executor uses them.
    pub pass_with_best: Option<PlanId>,
}

/// Loads an assistant into its target's executor.
pub fn load(
    weights: &Weights,
    target: &Forward,
    exec: &mut dyn Executor,
) -> Result<AssistantForward> {
    let config = weights.config();
    fits(config, &target.config)?;
    let kv: Vec<(u16, KvLayer)> =
        config.layers.iter().filter_map(|spec| borrowed(spec, target)).collect();
    let (layout, step) = (target.layout, target.step);
    let home = target.kv.len() as u16 - 1;
    let mut b = Builder::new(weights, exec, layout, Some(Part::Layer(home)))?;
    let ropes = ropes(&mut b, config)?;
    let states = b.rows("states", target.config.dim)?;
    let io = AssistantBuffers {
        table: target.table,
        embed_scale: target.config.embed_scale,
        states,
        hidden: b.rows("hidden", config.dim)?,
        logits: target.logits,
    };
    let plan = pass::assistant_pass(&mut b, config, &kv, &ropes, io, home)?;
    let with_best = target.best.map(|best| {
        let mut plan = plan.clone();
        plan.push("best", None, Op::Best(best));
        plan
    });
    Ok(AssistantForward {
        ropes,
        states,
        pass: b.exec.record(plan, step, layout)?,
        pass_with_best: with_best.map(|plan| b.exec.record(plan, step, layout)).transpose()?,
    })
}

/// Fails for an assistant that belongs to another model.
pub fn fits(config: &Config, target: &Config) -> Result<(), Fault> {
    let backbone = config.backbone.unwrap_or(0);
    let what = if backbone != target.dim {
        format!("it reads hidden states of {backbone} channels, and the model has {}", target.dim)
    } else if config.vocab != target.vocab {
        format!("it knows {} tokens, and the model {}", config.vocab, target.vocab)
    } else if let Some(spec) = config.layers.iter().find(|spec| lender(spec, target).is_none()) {
        let LayerSpec { n_heads, head_dim, .. } = spec;
        format!("no keys of the model are for its {n_heads} heads of {head_dim} channels")
    } else {
        return Ok(());
    };
    Err(Fault::model(format!("the assistant belongs to another model: {what}")))
}

/// Returns the layer of the target that provides the KV cache for a layer of an assistant: the last
/// one of the same kind, if the heads agree.
fn lender(spec: &LayerSpec, target: &Config) -> Option<usize> {
    let last = target.layers.iter().rposition(|layer| layer.is_global() == spec.is_global())?;
    let LayerSpec { head_dim, n_kv_heads, .. } = target.layers[last];
    (head_dim == spec.head_dim && spec.n_heads.is_multiple_of(n_kv_heads)).then_some(last)
}

/// Returns that layer and its cache as the assistant uses it. The assistant's window counts the row
/// itself, which is not in the cache.
fn borrowed(spec: &LayerSpec, target: &Forward) -> Option<(u16, KvLayer)> {
    let last = lender(spec, &target.config)?;
    let kv = target.kv[last];
    let window = spec.window.zip(kv.pages.window).map(|(own, kept)| own.min(kept).max(2) - 1);
    Some((last as u16, KvLayer { pages: Pages { window, ..kv.pages }, ..kv }))
}
