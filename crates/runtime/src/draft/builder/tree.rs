//! The draft tree of one text, grown best first by mixed probabilities.

use anyhow::Result;

use super::SharedState;
use super::candidates::TargetRules;
use crate::draft::drafter::DraftContext;
use crate::draft::mix::Candidates;
use crate::draft::proposal::Proposal;
use crate::draft::sources::context::Match;
use crate::draft::sources::model::TreeModel;
use crate::draft::sources::{FreeSources, NodeContext, grammar};
use gemma_base::tensor::Token;
use gemma_model::sampler::Mask;

/// Most nodes of a text per draft model pass.
pub const WIDTH: usize = 8;
/// Most children per node.
const BRANCHES: usize = 8;
/// Least probability of a child.
const FAINT: f32 = 0.002;
/// Least total probability of a draft step's nodes that is worth a pass.
const LEAST: f32 = 0.1;
/// Nodes less likely than this, relative to the most likely node of a step, are not evaluated with
/// it.
pub const SHARE: f32 = 0.1;
/// Assumed upper bound of the most likely continuation's share of a node's probability.
const HOPE: f32 = 0.7;
/// Cost of a draft step, in tokens of plain decoding in the same time, above which a step has only
/// one node.
const EXPENSIVE: f32 = 0.03;

#[derive(Clone, Debug)]
pub struct Node {
    pub token: Token,
    pub parent: u32,
    pub depth: usize,
    /// Probability given the parent, and probability of the whole path.
    pub own: f32,
    pub chance: f32,
    pub source: &'static str,
    /// Longest ending at this node that occurred earlier in the text.
    pub matched: Match,
    /// Continuations of the node, after they were collected.
    pub candidates: Option<Candidates>,
    /// The grammar forces the next token or the end of the text.
    pub forced: bool,
    /// Row in the draft model, after evaluation.
    pub row: Option<u32>,
}

impl Node {
    pub fn new(token: Token, parent: u32, depth: usize, matched: Match) -> Self {
        Node {
            token,
            parent,
            depth,
            own: 0.0,
            chance: 0.0,
            source: "",
            matched,
            candidates: None,
            forced: false,
            row: None,
        }
    }

    /// Returns whether the continuations still have to be collected.
    fn is_open(&self) -> bool {
        self.candidates.is_none() && !self.forced
    }
}

/// The draft tokens of one text.
#[derive(Default)]
pub struct Tree {
    /// Index of the text in the draft model.
    pub text: usize,
    /// Nodes of the last round's tree, root first, parents before children.
    pub nodes: Vec<Node>,
    /// Length of the history at the last proposal; 0 after learning from its outcome.
    pub base_len: usize,
    /// Whether the temperature is above 0.
    pub warm: bool,
    /// Whether the tree was extended after it was proposed.
    pub ahead: bool,
    /// The round's history plus the path to the last expanded node. Empty if the sampler does not
    /// read its context.
    context: Vec<Token>,
}

impl Tree {
    /// Creates an empty tree.
    pub fn new(text: usize) -> Self {
        Tree { text, ..Tree::default() }
    }

    /// Learns from every node of the last tree with an outcome in the history.
    pub fn learn(&mut self, shared: &mut SharedState, history: &[Token]) {
        let base_len = std::mem::take(&mut self.base_len);
        if base_len == 0
            || history.len() <= base_len
            || self.nodes.first().is_none_or(|root| root.token != history[base_len - 1])
        {
            return;
        }
        let mut at = 0u32;
        for &token in &history[base_len..] {
            if let Some(candidates) = &self.nodes[at as usize].candidates {
                shared.mixers[self.warm as usize].learn(candidates, token, &mut shared.chances);
            }
            match self.child(at, token) {
                Some(child) => at = child,
                None => break,
            }
        }
    }

    /// Starts a round with this history.
    pub fn read(&mut self, ctx: &DraftContext<'_>) {
        self.context.clear();
        if ctx.sampler.reads_context() {
            self.context.extend(ctx.history);
        }
    }

    /// Resets the tree to a root.
    pub fn begin(&mut self, root: Token, matched: Match) {
        self.nodes.clear();
        self.nodes.push(Node { own: 1.0, chance: 1.0, ..Node::new(root, 0, 0, matched) });
    }

    /// Adds the most likely nodes to a proposal that holds only the root.
    pub fn propose(&self, nodes: usize, out: &mut Proposal) {
        let mut place = vec![0; self.nodes.len()];
        for i in self.best(nodes) {
            let node = &self.nodes[i as usize];
            place[i as usize] =
                out.add(place[node.parent as usize], node.token, node.own, node.source);
        }
    }

    /// Queues these nodes for the draft model. Their parents were evaluated before, or are in the
    /// same pass.
    pub fn push(&mut self, model: &mut dyn TreeModel, frontier: &[u32]) {
        for &i in frontier {
            let (parent, token) = (self.nodes[i as usize].parent, self.nodes[i as usize].token);
            let above = self.nodes[parent as usize].row.expect("a parent is evaluated first");
            self.nodes[i as usize].row = Some(model.push(self.text, above, token));
        }
    }

    pub fn child(&self, parent: u32, token: Token) -> Option<u32> {
        let after = parent as usize + 1;
        let found = self.nodes[after..]
            .iter()
            .position(|node| node.parent == parent && node.token == token);
        found.map(|i| (after + i) as u32)
    }

    /// Appends the tokens on the path from below the root to a node.
    fn add_path(&self, mut node: u32, out: &mut Vec<Token>) {
        let begin = out.len();
        while node != 0 {
            out.push(self.nodes[node as usize].token);
            node = self.nodes[node as usize].parent;
        }
        out[begin..].reverse();
    }

    /// Collects the continuations of a node from all sources, and adds or updates its children.
    /// `row` is the node's index in the draft model's last batch.
    pub fn expand(
        &mut self,
        shared: &mut SharedState,
        ctx: &DraftContext<'_>,
        at: u32,
        row: Option<usize>,
    ) -> Result<()> {
        if ctx.sampler.is_slow() {
            // Each node would need its own mask, and other texts would wait for all of them.
            self.force(&shared.free, at, None);
            return Ok(());
        }
        let mut context = std::mem::take(&mut self.context);
        if ctx.sampler.reads_context() {
            context.truncate(ctx.history.len());
            self.add_path(at, &mut context);
        }
        let expanded = self.expand_after(&context, shared, ctx, at, row);
        self.context = context;
        expanded
    }

    /// Implements [`expand`](Self::expand), given the tokens up to the node if the sampler reads
    /// them.
    fn expand_after(
        &mut self,
        context: &[Token],
        shared: &mut SharedState,
        ctx: &DraftContext<'_>,
        at: u32,
        row: Option<usize>,
    ) -> Result<()> {
        // If the rule fails, the error is reported later, when the target's own token is picked.
        let mask = ctx.sampler.mask(context).unwrap_or_default();
        let is_forced = |mask: &Mask| mask.only().is_some() || mask.ends() || mask.is_empty();
        if let Some(mask) = mask.as_ref().filter(|mask| is_forced(mask)) {
            let token = mask.only().filter(|token| !mask.ends() && (*token as usize) < ctx.vocab);
            self.force(&shared.free, at, token);
            return Ok(());
        }
        let rules = TargetRules {
            sampler: ctx.sampler,
            mask: mask.as_deref(),
            vocab: ctx.vocab,
            noise: shared.mixing.noise,
        };
        let row = shared.model.as_ref().zip(row).map(|(model, row)| model.row(self.text, row));
        let (node, collector) = (self.node_context(ctx, at), &mut shared.collector);
        let candidates = collector.candidates(&shared.free, row, rules, node, context)?;
        self.add_children(shared, ctx.chain, at, &candidates);
        self.nodes[at as usize].candidates = Some(candidates);
        Ok(())
    }

    fn node_context(&self, ctx: &DraftContext<'_>, at: u32) -> NodeContext {
        let Node { token, parent, depth, matched, .. } = self.nodes[at as usize];
        let previous = match at {
            0 => ctx.history.len().checked_sub(2).map(|i| ctx.history[i]),
            _ => Some(self.nodes[parent as usize].token),
        };
        let position = ctx.history.len() + depth;
        NodeContext { text: self.text, previous, token, matched, position }
    }

    /// Adds the likely candidates as children, and updates the probabilities of existing children.
    fn add_children(
        &mut self,
        shared: &mut SharedState,
        chain: bool,
        at: u32,
        candidates: &Candidates,
    ) {
        let Node { depth, matched, .. } = self.nodes[at as usize];
        let SharedState { free, mixers, chances, .. } = shared;
        let mixer = &mixers[self.warm as usize];
        mixer.chances(candidates, chances);
        let mut order: Vec<usize> = (0..candidates.tokens.len()).collect();
        order.sort_by(|&a, &b| chances[b].total_cmp(&chances[a]));
        for (rank, i) in order.into_iter().enumerate() {
            let (token, own) = (candidates.tokens[i], chances[i]);
            let wanted = rank < if chain { 1 } else { BRANCHES } && own >= FAINT;
            let present = self.child(at, token);
            if !wanted && present.is_none() {
                continue;
            }
            let source = mixer.main_source(candidates, chances, i);
            match present {
                Some(child) => {
                    let child = &mut self.nodes[child as usize];
                    (child.own, child.source) = (own, source);
                }
                None => {
                    let matched = free.step(self.text, matched, token);
                    let child = Node::new(token, at, depth + 1, matched);
                    self.nodes.push(Node { own, source, ..child });
                }
            }
        }
    }

    /// Continues a node with the only allowed token, if there is one.
    fn force(&mut self, free: &FreeSources, at: u32, token: Option<Token>) {
        let node = &mut self.nodes[at as usize];
        node.forced = true;
        let (depth, matched) = (node.depth + 1, node.matched);
        if let Some(token) = token.filter(|token| self.child(at, *token).is_none()) {
            let child = Node::new(token, at, depth, free.step(self.text, matched, token));
            self.nodes.push(Node { own: 1.0, source: grammar::NAME, ..child });
        }
    }

    /// Computes path probabilities. In a chain, only the most likely child of a node has a nonzero
    /// one.
    pub fn weigh(&mut self, chain: bool) {
        let mut heir: Vec<u32> = if chain { vec![0; self.nodes.len()] } else { Vec::new() };
        if chain {
            for (i, node) in self.nodes.iter().enumerate().skip(1) {
                let best = &mut heir[node.parent as usize];
                if *best == 0 || node.own > self.nodes[*best as usize].own {
                    *best = i as u32;
                }
            }
        }
        for i in 1..self.nodes.len() {
            let (parent, own) = (self.nodes[i].parent as usize, self.nodes[i].own);
            let lost = chain && heir[parent] != i as u32;
            self.nodes[i].chance = if lost { 0.0 } else { own * self.nodes[parent].chance };
        }
    }

    /// Returns the `n` most likely nodes without the root, best first; parents come before
    /// children.
    pub fn best(&self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> =
            (1..self.nodes.len() as u32).filter(|&i| self.nodes[i as usize].chance > 0.0).collect();
        let by = |a: &u32, b: &u32| {
            self.nodes[*b as usize].chance.total_cmp(&self.nodes[*a as usize].chance).then(a.cmp(b))
        };
        if n < order.len() {
            order.select_nth_unstable_by(n, by);
            order.truncate(n);
        }
        order.sort_unstable_by(by);
        order
    }

    /// Extends every node of the tree with the free sources.
    pub fn spread(&mut self, shared: &mut SharedState, ctx: &DraftContext<'_>) -> Result<()> {
        loop {
            self.weigh(ctx.chain);
            let open = |&i: &u32| {
                self.nodes[i as usize].is_open() && self.nodes[i as usize].depth < ctx.depth
            };
            let open: Vec<u32> = self.best(ctx.nodes).into_iter().filter(open).collect();
            if open.is_empty() {
                return Ok(());
            }
            open.into_iter().try_for_each(|node| self.expand(shared, ctx, node, None))?;
        }
    }

    /// Returns the nodes to evaluate next with the draft model, with at most `room` rows. Returns
    /// none if they are not worth the text's share of a pass. That share takes as long as plain
    /// decoding of `price` tokens.
    pub fn frontier(
        &self,
        ctx: &DraftContext<'_>,
        model: &dyn TreeModel,
        price: f32,
        room: usize,
    ) -> Vec<u32> {
        let best = self.best(ctx.nodes);
        // A node is useless if it cannot lead to a likelier node than the tree already has.
        let cutoff = if best.len() < ctx.nodes {
            0.0
        } else {
            best.last().map_or(0.0, |&i| self.nodes[i as usize].chance)
        };
        let width = if price > EXPENSIVE { 1 } else { WIDTH };
        let deepest = ctx.depth.min(model.left(self.text, ctx.history.len()));
        let mut chosen: Vec<u32> = Vec::new();
        let (mut most, mut rows) = (0.0f32, 0);
        for i in best {
            let node = &self.nodes[i as usize];
            let ready = self.nodes[node.parent as usize].row.is_some()
                || model.reads_texts() && chosen.contains(&node.parent);
            let of_use = HOPE * node.chance > cutoff && node.chance >= SHARE * most;
            if node.row.is_none()
                && ready
                && of_use
                && node.depth < deepest
                && model.knows(node.token)
                && chosen.len() < width
                && rows + model.rows_of(node.token) <= room
            {
                rows += model.rows_of(node.token);
                most = most.max(node.chance);
                chosen.push(i);
            }
        }
        let gain: f32 = chosen.iter().map(|&i| self.nodes[i as usize].chance).sum();
        // Plain decoding would generate `price` tokens in the same time. The factor accounts for
        // the rows that the new nodes add to the target's pass.
        if gain < (2.0 * price).max(LEAST) { Vec::new() } else { chosen }
    }
}
