//! One text's tree: grown best first by mixed chances.

use anyhow::Result;

use super::SharedState;
use crate::draft::automaton::{Automaton, Match};
use crate::draft::lm::Lm;
use crate::draft::mix::Candidates;
use crate::draft::source::{NodeContext, Rules, Sources, advocate};
use crate::draft::{DraftContext, Proposal, forced};
use crate::tensor::Token;

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
    /// The grammar leaves no choice: one token may follow, or none but the end.
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

/// The guesses of one text.
#[derive(Default)]
pub struct Tree {
    /// The text's place among those of the draft model.
    pub text: usize,
    pub context: Option<Automaton>,
    /// The last round's tree, root first, parents before children; and the length of its history.
    pub nodes: Vec<Node>,
    pub asked: usize,
    /// Whether the temperature is above 0.
    pub warm: bool,
    /// The tree was grown since it was proposed.
    pub ahead: bool,
}

impl Tree {
    /// Makes an empty tree. `reads_text` says whether earlier text is a source.
    pub fn new(text: usize, reads_text: bool) -> Self {
        Tree { text, context: reads_text.then(Automaton::new), ..Tree::default() }
    }

    /// Reads the new tokens of the history. Returns the longest ending that occurred before.
    pub fn follow(&mut self, history: &[Token]) -> Match {
        self.context.as_mut().map_or(Match::default(), |automaton| {
            automaton.sync(history);
            automaton.ending()
        })
    }

    /// Takes one learning step for every place of the last tree whose outcome the history shows.
    pub fn learn(&mut self, ways: &mut SharedState, history: &[Token]) {
        let asked = std::mem::take(&mut self.asked);
        if asked == 0
            || history.len() <= asked
            || self.nodes.first().is_none_or(|root| root.token != history[asked - 1])
        {
            return;
        }
        let mut at = 0u32;
        for &token in &history[asked..] {
            if let Some(candidates) = &self.nodes[at as usize].candidates {
                ways.mixers[self.warm as usize].learn(candidates, token, &mut ways.chances);
            }
            match self.child(at, token) {
                Some(child) => at = child,
                None => break,
            }
        }
    }

    /// Returns the ending that `token` makes of another one.
    fn step(&self, matched: Match, token: Token) -> Match {
        self.context.as_ref().map_or(Match::default(), |a| a.step(matched, token))
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
    pub fn push(&mut self, lm: &mut Lm, frontier: &[u32]) {
        for &i in frontier {
            let (parent, token) = (self.nodes[i as usize].parent, self.nodes[i as usize].token);
            let above = self.nodes[parent as usize].row.expect("a parent is evaluated first");
            self.nodes[i as usize].row = Some(lm.push(self.text, above, token));
        }
    }

    pub fn child(&self, parent: u32, token: Token) -> Option<u32> {
        let after = parent as usize + 1;
        let found = self.nodes[after..]
            .iter()
            .position(|node| node.parent == parent && node.token == token);
        found.map(|i| (after + i) as u32)
    }

    /// Returns the tokens from below the root to a node.
    fn path(&self, mut node: u32) -> Vec<Token> {
        let mut path = Vec::new();
        while node != 0 {
            path.push(self.nodes[node as usize].token);
            node = self.nodes[node as usize].parent;
        }
        path.reverse();
        path
    }

    /// Asks all sources what follows a node, the draft model if `row` of its last batch is the
    /// node's, and adds or corrects the children.
    pub fn expand(
        &mut self,
        ways: &mut SharedState,
        ctx: &DraftContext<'_>,
        at: u32,
        row: Option<usize>,
    ) -> Result<()> {
        let node = &self.nodes[at as usize];
        let previous =
            if at == 0 { ctx.history.len().checked_sub(2).map(|i| ctx.history[i]) } else { None };
        let around = NodeContext {
            previous: previous
                .or_else(|| (at != 0).then(|| self.nodes[node.parent as usize].token)),
            token: node.token,
            matched: node.matched,
            position: ctx.history.len() + node.depth,
        };
        let (depth, matched) = (node.depth, node.matched);
        let context = if ctx.sampler.reads_context() {
            [ctx.history, &self.path(at)].concat()
        } else {
            Vec::new()
        };
        // Where the rule fails guesses are as good as without; it will say so when the target's own
        // token is picked.
        let mask = ctx.sampler.mask(&context).unwrap_or_default();
        if let Some(mask) =
            mask.as_ref().filter(|mask| mask.only().is_some() || mask.ends() || mask.is_empty())
        {
            let token = mask.only().filter(|token| !mask.ends() && (*token as usize) < ctx.vocab);
            self.force(at, token);
            return Ok(());
        }
        let rules = Rules {
            sampler: ctx.sampler,
            mask: mask.as_deref(),
            vocab: ctx.vocab,
            noise: ways.mixing.noise,
        };
        let sources = Sources {
            context: self.context.as_ref(),
            table: ways.table.as_ref(),
            lm: ways.lm.as_ref().map(|lm| (lm, self.text)),
        };
        let candidates = ways.gather.candidates(&sources, rules, around, row, &context)?;
        let mixer = &ways.mixers[self.warm as usize];
        mixer.chances(&candidates, &mut ways.chances);
        let mut order: Vec<usize> = (0..candidates.tokens.len()).collect();
        order.sort_by(|&a, &b| ways.chances[b].total_cmp(&ways.chances[a]));
        for (rank, i) in order.into_iter().enumerate() {
            let (token, own) = (candidates.tokens[i], ways.chances[i]);
            let wanted = rank < if ctx.chain { 1 } else { BRANCHES } && own >= FAINT;
            let there = self.child(at, token);
            if !wanted && there.is_none() {
                continue;
            }
            let source = advocate(mixer, &candidates, &ways.chances, i);
            match there {
                Some(child) => {
                    let child = &mut self.nodes[child as usize];
                    (child.own, child.source) = (own, source);
                }
                None => {
                    let matched = self.step(matched, token);
                    self.nodes.push(Node {
                        own,
                        source,
                        ..Node::new(token, at, depth + 1, matched)
                    });
                }
            }
        }
        self.nodes[at as usize].candidates = Some(candidates);
        Ok(())
    }

    /// Continues a node by the one token that may follow, if any.
    fn force(&mut self, at: u32, token: Option<Token>) {
        let node = &mut self.nodes[at as usize];
        node.forced = true;
        let (depth, matched) = (node.depth + 1, node.matched);
        if let Some(token) = token.filter(|token| self.child(at, *token).is_none()) {
            let matched = self.step(matched, token);
            self.nodes.push(Node {
                own: 1.0,
                source: forced::NAME,
                ..Node::new(token, at, depth, matched)
            });
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
    pub fn spread(&mut self, ways: &mut SharedState, ctx: &DraftContext<'_>) -> Result<()> {
        loop {
            self.weigh(ctx.chain);
            let open = |&i: &u32| {
                self.nodes[i as usize].is_open() && self.nodes[i as usize].depth < ctx.depth
            };
            let open: Vec<u32> = self.best(ctx.nodes).into_iter().filter(open).collect();
            if open.is_empty() {
                return Ok(());
            }
            open.into_iter().try_for_each(|node| self.expand(ways, ctx, node, None))?;
        }
    }

    /// Returns the nodes that the draft model should see next, of at most `room` rows. Returns none
    /// if they are not worth the text's part of a pass, which takes as long as plain decoding takes
    /// for `price` tokens.
    pub fn frontier(&self, ctx: &DraftContext<'_>, lm: &Lm, price: f32, room: usize) -> Vec<u32> {
        let best = self.best(ctx.nodes);
        // What cannot bring a likelier node than the tree has already is of no use.
        let cutoff = if best.len() < ctx.nodes {
            0.0
        } else {
            best.last().map_or(0.0, |&i| self.nodes[i as usize].chance)
        };
        let width = if price > EXPENSIVE { 1 } else { WIDTH };
        let deepest = ctx.depth.min(lm.left(self.text, ctx.history.len()));
        let mut chosen: Vec<u32> = Vec::new();
        let (mut most, mut rows) = (0.0f32, 0);
        for i in best {
            let node = &self.nodes[i as usize];
            let ready =
                self.nodes[node.parent as usize].row.is_some() || chosen.contains(&node.parent);
            let of_use = HOPE * node.chance > cutoff && node.chance >= SHARE * most;
            if node.row.is_none()
                && ready
                && of_use
                && node.depth < deepest
                && lm.knows(node.token)
                && chosen.len() < width
                && rows + lm.rows_of(node.token) <= room
            {
                rows += lm.rows_of(node.token);
                most = most.max(node.chance);
                chosen.push(i);
            }
        }
        let gain: f32 = chosen.iter().map(|&i| self.nodes[i as usize].chance).sum();
        // The same time would bring `price` tokens otherwise, and the target must check what is
        // found there too.
        if gain < (2.0 * price).max(LEAST) { Vec::new() } else { chosen }
    }
}
