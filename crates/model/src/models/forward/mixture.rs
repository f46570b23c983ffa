//! Lowering of a mixture of experts.

use super::builder::Builder;
use super::pass::{PassBuilder, StepValue};
use crate::models::{Config, ExpertSpec, Role};
use anyhow::{Context, Result};
use gemma_base::compute::{BufferId, Choose, Combine, ExpertWeights, Experts, Norm, Op, RowSet};

/// Buffers of a mixture, shared by all layers.
pub struct MixtureBuffers {
    /// f32 `[rows, dim]`: input of the router
    routed: BufferId,
    /// f32 `[rows, experts]`
    scores: BufferId,
    /// u32 and f32 `[rows, used]`
    chosen: BufferId,
    weights: BufferId,
    /// f32 `[rows, used, width]`
    gated: BufferId,
    /// f32 `[rows, used, dim]`
    parts: BufferId,
    /// f32 `[rows, dim]`: output of the mixture
    sum: BufferId,
}

impl MixtureBuffers {
    pub fn new(b: &mut Builder<'_>, c: &Config, experts: ExpertSpec) -> Result<MixtureBuffers> {
        let ExpertSpec { count, used, width, .. } = experts;
        Ok(MixtureBuffers {
            routed: b.rows("routed", c.dim)?,
            scores: b.rows("scores", count)?,
            chosen: b.rows("chosen experts", used)?,
            weights: b.rows("weights of experts", used)?,
            gated: b.rows("gated experts", used * width)?,
            parts: b.rows("outputs of experts", used * c.dim)?,
            sum: b.rows("sum of experts", c.dim)?,
        })
    }
}

impl PassBuilder<'_, '_> {
    /// Appends the mixture of layer `i`, which is added to the output of its MLP.
    pub fn mixture(
        &mut self,
        i: usize,
        spec: ExpertSpec,
        shared: StepValue,
    ) -> Result<Vec<StepValue>> {
        let ExpertSpec { count: experts, used, width, .. } = spec;
        let (layer, all, dim) = (Some(i as u16), RowSet::All, self.config.dim);
        let (residual, normed, output) =
            (self.buffers.residual, self.buffers.normed, self.buffers.output);
        let MixtureBuffers { routed, scores, chosen, weights, gated, parts, sum } =
            *self.buffers.mixture.as_ref().context("buffers of a mixture")?;
        let router_scale = self.b.scaled(Role::RouterScale, i, (dim as f32).sqrt().recip())?;
        let before = self.b.norm(Role::PreExpertNorm, i)?;
        let shared_norm = self.b.norm(Role::PostSharedNorm, i)?;
        let expert_norm = self.b.norm(Role::PostExpertNorm, i)?;
        let eps = self.config.eps;
        let norm =
            |x, add, w, out| Op::Norm(Norm { x, add, scale: 1.0, w, eps, dim, out, rows: all });
        // `shared` is in the buffer of outputs, which is free after its norm.
        self.push("norm", layer, norm(residual, None, router_scale, routed));
        self.push("norm", layer, norm(shared.0, None, shared_norm, sum));
        let router = [(self.b.matrix(Role::Router, i), scores)];
        self.linear("router", layer, (routed, dim), &router, all)?;
        let factors = self.b.scaled(Role::ExpertFactors, i, 1.0)?;
        let op = Choose { scores, factors, experts, used, chosen, weights };
        self.push("choose", layer, Op::Choose(op));
        self.push("norm", layer, norm(residual, None, before, normed));
        let product =
            |weights, act, out| Op::Experts(Experts { weights, act, chosen, experts, used, out });
        let (matrices, act) = match spec.fused {
            true => {
                let (weight, format) = self.b.matrix(Role::ExpertGateUp, i);
                let act = self.prepare(layer, (normed, dim), &[format], all)?[0];
                (ExpertWeights::Fused(weight), act)
            }
            false => {
                let (gate, format) = self.b.matrix(Role::ExpertGate, i);
                let (up, format_up) = self.b.matrix(Role::ExpertUp, i);
                let acts = self.prepare(layer, (normed, dim), &[format, format_up], all)?;
                (ExpertWeights::Apart { gate, up, act_up: acts[1] }, acts[0])
            }
        };
        self.push("experts_gate_up", layer, product(matrices, act, gated));
        let (weight, format) = self.b.matrix(Role::ExpertDown, i);
        let act = self.prepare(layer, (gated, width), &[format], RowSet::Slots(used))?[0];
        self.push("experts_down", layer, product(ExpertWeights::Plain(weight), act, parts));
        let op = Combine { parts, weights, used, dim, out: output };
        self.push("combine", layer, Op::Combine(op));
        // Only the addition of this dispatch is needed; its norm output is unused.
        self.push("norm", layer, norm(sum, Some((output, expert_norm)), before, routed));
        Ok(vec![(sum, dim)])
    }
}
