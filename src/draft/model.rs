//! A small language model as a drafter: it grows the tree level by level, each level one batch.

use std::time::Instant;

use anyhow::Result;

use super::calibrate::{Calibration, Outcome};
use super::{DraftContext, Drafter, Proposal};
use crate::engine::{Engine, Rows, Scores, Timeline, TokenTree};
use crate::sampler::Candidate;
use crate::tensor::Token;

/// Nodes evaluated at once.
const WIDTH: usize = 8;
/// Children considered of each node.
const BRANCHES: usize = 4;
/// A level is not worth its pass if all its nodes together are less likely than this.
const LEAST: f32 = 0.05;
/// A node is not evaluated along with others if it is this much less likely than the likeliest of them.
const SHARE: f32 = 0.1;
/// Price of a level, in tokens that plain decoding would bring meanwhile, above which levels are one node wide.
const DEAR: f32 = 0.03;
/// Tokens newer than the cache that still go into the first pass of a round instead of a prefill.
const PENDING: usize = 16;
/// How much the measured time of a level moves with each one.
const RATE: f32 = 0.1;

pub struct ModelDrafter {
    name: &'static str,
    timeline: Timeline,
    /// What the engine evaluates: tokens newer than the cache in a line, then nodes of the proposal.
    work: TokenTree,
    scores: Scores,
    ranked: Vec<Candidate>,
    /// By rank among the siblings.
    calibration: [Calibration; BRANCHES],
    outcome: Outcome,
    /// Rank among the siblings and the model's own estimate for each node proposed. `[nodes]`
    raw: Vec<(usize, f32)>,
    /// Seconds that a level takes.
    level_time: f32,
}

impl ModelDrafter {
    /// `name` appears in the statistics. The engine's tokenizer must be the target's; its rows may be fewer or more.
    pub fn new(name: &'static str, engine: Box<dyn Engine>) -> Self {
        ModelDrafter {
            name,
            timeline: Timeline::new(engine),
            work: TokenTree::default(),
            scores: Scores::default(),
            ranked: Vec::new(),
            calibration: Default::default(),
            outcome: Outcome::default(),
            raw: Vec::new(),
            level_time: 0.0,
        }
    }

    pub fn engine(&self) -> &dyn Engine {
        self.timeline.engine()
    }

    /// Evaluates the root; false if the model does not know a token. Most of what the target accepted is in scratch since the
    /// last round and costs nothing.
    fn begin(&mut self, history: &[Token]) -> Result<bool> {
        let (_, past) = history.split_last().expect("a history has at least one token");
        let cached = self.timeline.adopt(past)?;
        if history[cached..].iter().any(|&token| token as usize >= self.engine().vocab()) {
            return Ok(false);
        }
        if history.len() - cached > PENDING.min(self.engine().max_rows() / 4).max(1) {
            self.timeline.sync(past, &mut |_| true)?;
        }
        self.work = TokenTree::chain(&history[self.timeline.position()..]);
        self.timeline.forward(&self.work, Rows::Last, &mut self.scores)?;
        Ok(true)
    }

    /// Adds the children of `node`, whose logits are row `row` of the last pass.
    fn branch(&mut self, ctx: &DraftContext<'_>, context: &[Token], out: &mut Proposal, node: u32, row: usize) -> Result<()> {
        let position = ctx.history.len() + out.tree.path(node).len();
        let branches = if ctx.chain { 1 } else { BRANCHES.min(ctx.nodes) };
        ctx.sampler.rank(position, self.scores.row(row), context, branches, &mut self.ranked)?;
        for (rank, candidate) in self.ranked.iter().enumerate() {
            out.add(node, candidate.token, self.calibration[rank].chance(candidate.chance), self.name);
            self.raw.push((rank, candidate.chance));
        }
        Ok(())
    }

    /// The likeliest nodes that are worth a pass: unevaluated, of use to a tree of `ctx.nodes`, and not at full depth.
    fn frontier(&self, ctx: &DraftContext<'_>, out: &Proposal, row_of: &[Option<u32>]) -> Vec<u32> {
        let room = self.engine().max_rows().saturating_sub(self.work.len());
        let mut nodes = out.by_chance();
        nodes.truncate(ctx.nodes);
        nodes.retain(|&node| row_of[node as usize].is_none() && self.engine().vocab() > out.tree.tokens[node as usize] as usize);
        nodes.retain(|&node| out.tree.path(node).len() < ctx.depth);
        // Where a level costs as much as some share of a token, one node a level must do; its siblings come free.
        let price = ctx.pace.map_or(0.0, |pace| pace * self.level_time);
        nodes.truncate(if ctx.chain || price > DEAR { 1 } else { WIDTH }.min(room));
        let best = nodes.first().map_or(0.0, |&node| out.chance[node as usize]);
        nodes.retain(|&node| out.chance[node as usize] >= SHARE * best);
        let gain: f32 = nodes.iter().map(|&node| out.chance[node as usize]).sum();
        // The same time would bring `price` tokens otherwise, and the target must check what is found there too.
        let price = 2.0 * price;
        if gain < price.max(LEAST) { Vec::new() } else { nodes }
    }
}

impl Drafter for ModelDrafter {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(&mut self, history: &[Token]) -> Result<()> {
        let known = history.iter().all(|&token| (token as usize) < self.engine().vocab());
        if known && history.len() < self.engine().context() {
            self.timeline.sync(history, &mut |_| true)?;
        }
        Ok(())
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        let (calibration, raw) = (&mut self.calibration, &self.raw);
        self.outcome.settle(ctx.history, |node, _, taken| {
            let (rank, estimate) = raw[node];
            calibration[rank].observe(estimate, taken);
        });
        let ctx = &DraftContext { depth: ctx.depth.min(self.engine().context().saturating_sub(ctx.history.len())), ..*ctx };
        if ctx.nodes == 0 || ctx.depth == 0 || !self.begin(ctx.history)? {
            return Ok(());
        }
        let offset = self.work.len() as u32 - 1;
        // Where each node stands in `work`, once it is evaluated.
        let mut row_of: Vec<Option<u32>> = vec![Some(offset)];
        let mut context = if ctx.sampler.reads_context() { ctx.history.to_vec() } else { Vec::new() };
        self.raw.clear();
        self.raw.push((0, 1.0));
        self.branch(ctx, &context, out, 0, 0)?;
        loop {
            row_of.resize(out.len(), None);
            let frontier = self.frontier(ctx, out, &row_of);
            if frontier.is_empty() {
                break;
            }
            let start = Instant::now();
            let first_new = self.work.len();
            for &node in &frontier {
                let parent =
                    out.tree.parent[node as usize].and_then(|p| row_of[p as usize]).expect("a parent is evaluated first");
                row_of[node as usize] = Some(self.work.push(parent, out.tree.tokens[node as usize]));
            }
            self.timeline.forward_more(&self.work, first_new, Rows::All, &mut self.scores)?;
            for (row, &node) in frontier.iter().enumerate() {
                if ctx.sampler.reads_context() {
                    context.truncate(ctx.history.len());
                    context.extend(out.tree.path(node));
                }
                self.branch(ctx, &context, out, node, row)?;
            }
            self.level_time += RATE * (start.elapsed().as_secs_f32() - self.level_time);
        }
        self.outcome.remember(ctx.history, out);
        out.keep_best(ctx.nodes);
        Ok(())
    }

    fn note(&self) -> Option<String> {
        let position = self.timeline.position();
        (position + 1 >= self.engine().context()).then(|| format!("{}: the draft model's context is full", self.name))
    }
}
