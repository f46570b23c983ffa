//! The tree of one text, grown best first by mixed probabilities.

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

/// Nodes of a text that the draft model evaluates at once.
pub const WIDTH: usize = 8;
/// Children considered of each node.
const BRANCHES: usize = 8;
/// Children less likely than this are not considered.
const FAINT: f32 = 0.002;
/// A draft step is not worth its pass if all its nodes together are less likely than this.
const LEAST: f32 = 0.1;
/// A node is not evaluated along with others if it is this much less likely than the likeliest of
/// them.
pub const SHARE: f32 = 0.1;
/// Assumed upper bound of the likeliest continuation's share of a node's chance.
const HOPE: f32 = 0.7;
/// Price of a draft step, in tokens that plain decoding would bring meanwhile, above which steps
/// are one node wide.
const EXPENSIVE: f32 = 0.03;

#[derive(Clone, Debug)]
pub struct Node {
    pub token: Token,
    pub parent: u32,
    pub depth: usize,
    /// Chance once the parent is taken, and of the whole path.
    pub own: f32,
    pub chance: f32,
    pub source: &'static str,
    /// Longest ending at this node that occurred before.
    pub matched: Match,
    /// Continuations of the node, once they were asked for.
    pub candidates: Option<Candidates>,
    /// The grammar forces the next token, or the end of the text.
    pub forced: bool,
    /// Place in the draft model's work, once it is evaluated.
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

    /// Returns whether the continuations were not asked for yet.
    fn is_open(&self) -> bool {
        self.candidates.is_none() && !self.forced
    }
}

/// The draft tokens of one text.
#[derive(Default)]
pub struct Tree {
    /// The text's place among those of the draft model.
    pub text: usize,
    /// The last round's tree, root first, parents before children.
    pub nodes: Vec<Node>,
    /// Length of the history at the last proposal; 0 after its outcome is learnt.
    pub base_len: usize,
    /// Whether the temperature is above 0.
    pub warm: bool,
    /// The tree was grown since it was proposed.
    pub ahead: bool,
    /// The history of the round, then the path to the last node that was expanded. Empty where the
    /// sampler reads no context.
    context: Vec<Token>,
}

impl Tree {
    /// Makes an empty tree.
    pub fn new(text: usize) -> Self {
        Tree { text, ..Tree::default() }
    }

    /// Takes one learning step for every place of the last tree whose outcome the history shows.
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

    /// Begins a round with this history.
    pub fn read(&mut self, ctx: &DraftContext<'_>) {
        self.context.clear();
        if ctx.sampler.reads_context() {
            self.context.extend(ctx.history);
        }
    }

    /// Empties the tree to its root.
    pub fn begin(&mut self, root: Token, matched: Match) {
        self.nodes.clear();
        self.nodes.push(Node { own: 1.0, chance: 1.0, ..Node::new(root, 0, 0, matched) });
    }

    /// Puts the likeliest nodes into a proposal that holds the root alone.
    pub fn propose(&self, nodes: usize, out: &mut Proposal) {
        let mut place = vec![0; self.nodes.len()];
        for i in self.best(nodes) {
            let node = &self.nodes[i as usize];
            place[i as usize] =
                out.add(place[node.parent as usize], node.token, node.own, node.source);
        }
    }

    /// Queues these nodes for the draft model. It has seen their parents, or sees them in the same
    /// pass.
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

    /// Adds the tokens from below the root to a node.
    fn add_path(&self, mut node: u32, out: &mut Vec<Token>) {
        let begin = out.len();
        while node != 0 {
            out.push(self.nodes[node as usize].token);
            node = self.nodes[node as usize].parent;
        }
        out[begin..].reverse();
    }

    /// Asks all sources for the tokens that follow a node, and adds or corrects its children. `row`
    /// is the node's place in the draft model's last batch.
    pub fn expand(
        &mut self,
        shared: &mut SharedState,
        ctx: &DraftContext<'_>,
        at: u32,
        row: Option<usize>,
    ) -> Result<()> {
        if ctx.sampler.is_slow() {
            // Each node needs a mask of its own, and other texts would wait for all of them.
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

    /// Does [`expand`](Self::expand) with the tokens up to the node, where the sampler reads them.
    fn expand_after(
        &mut self,
        context: &[Token],
        shared: &mut SharedState,
        ctx: &DraftContext<'_>,
        at: u32,
        row: Option<usize>,
    ) -> Result<()> {
        // A rule that fails is an error later, when the target's own token is picked.
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

    /// Adds the likely candidates as children, and gives present children their new chances.
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

    /// Continues a node by the one token that may follow, if any.
    fn force(&mut self, free: &FreeSources, at: u32, token: Option<Token>) {
        let node = &mut self.nodes[at as usize];
        node.forced = true;
        let (depth, matched) = (node.depth + 1, node.matched);
        if let Some(token) = token.filter(|token| self.child(at, *token).is_none()) {
            let child = Node::new(token, at, depth, free.step(self.text, matched, token));
            self.nodes.push(Node { own: 1.0, source: grammar::NAME, ..child });
        }
    }

    /// Computes the chances of whole paths. In a chain only the likeliest child of a node has any.
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

    /// Returns the `n` likeliest nodes besides the root, best first; a parent comes before its
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

    /// Continues every node of the tree by the sources that cost nothing.
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

    /// Returns the nodes that the draft model should see next, of at most `room` rows. Returns none
    /// if they are not worth the text's part of a pass, which takes as long as plain decoding takes
    /// for `price` tokens.
    pub fn frontier(
        &self,
        ctx: &DraftContext<'_>,
        model: &dyn TreeModel,
        price: f32,
        room: usize,
    ) -> Vec<u32> {
        let best = self.best(ctx.nodes);
        // A node that cannot bring a likelier one than the tree has already is of no use.
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
        // Plain decoding would bring `price` tokens in the same time. The factor stands for the
        // rows that the new nodes add to the target's pass.
        if gain < (2.0 * price).max(LEAST) { Vec::new() } else { chosen }
    }
}
