//! All sources, one tree: grown best first by mixed chances, the draft model asked level by level,
//! several nodes at a time.
//!
//! Context matches and table entries cost nothing, so every node that may be of use is continued by
//! them at once: copied passages become long chains before the draft model is asked at all. What
//! the model then says of a node replaces the chances there.

mod ahead;

use std::time::Instant;

use anyhow::{Context, Result};

use super::automaton::{Automaton, Match};
use super::lm::Lm;
use super::memory::Memory;
use super::mix::{self, Choice, Mixer};
use super::source::{Gather, Rules, Sources, Spot, advocate};
use super::table::Table;
use super::{DraftContext, Drafter, Figures, Proposal, forced};
use crate::engine::Engine;
use crate::tensor::Token;

/// Nodes that the draft model evaluates at once.
const WIDTH: usize = 8;
/// Children considered of each node.
const BRANCHES: usize = 8;
/// Children less likely than this are not considered.
const FAINT: f32 = 0.002;
/// A level is not worth its pass if all its nodes together are less likely than this.
const LEAST: f32 = 0.1;
/// A node is not evaluated along with others if it is this much less likely than the likeliest of
/// them.
const SHARE: f32 = 0.1;
/// What a node's likeliest continuation has of its chance, as a rule at most.
const HOPE: f32 = 0.7;
/// Tokens that the text's end must share with an earlier place to be worth a look in rounds that
/// would not ask.
const REPEATED: u32 = 4;
/// Price of a level, in tokens that plain decoding would bring meanwhile, above which levels are
/// one node wide.
const DEAR: f32 = 0.03;
/// How much the measured time of a level moves with each one.
const RATE: f32 = 0.1;

/// How the sources are made into one tree. The default is the best; the others are there to be
/// measured against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixing {
    /// Begin with the weights learnt elsewhere; else with the same for every place.
    pub prior: bool,
    /// Learn while the text grows, by this step; 0 does not.
    pub rate: f32,
    /// Rank candidates with the noise that the target adds when it draws.
    pub noise: bool,
}

impl Default for Mixing {
    fn default() -> Self {
        Mixing { prior: true, rate: mix::RATE, noise: true }
    }
}

#[derive(Clone, Debug)]
struct Node {
    token: Token,
    parent: u32,
    depth: usize,
    /// Chance once the parent is taken, and of the whole path.
    own: f32,
    chance: f32,
    source: &'static str,
    /// The longest ending here that the text had before.
    matched: Match,
    /// What follows, once that was asked.
    choice: Option<Choice>,
    /// A rule leaves nothing to ask: one token may follow, or none but the end.
    forced: bool,
    /// Place in the draft model's work, once it is evaluated.
    row: Option<u32>,
}

impl Node {
    fn new(token: Token, parent: u32, depth: usize, matched: Match) -> Self {
        Node {
            token,
            parent,
            depth,
            own: 0.0,
            chance: 0.0,
            source: "",
            matched,
            choice: None,
            forced: false,
            row: None,
        }
    }

    /// Whether nobody has asked yet what follows.
    fn is_open(&self) -> bool {
        self.choice.is_none() && !self.forced
    }
}

pub struct Stack {
    name: &'static str,
    sources: Sources,
    /// For temperature 0 and for others.
    mixers: [Mixer; 2],
    mixing: Mixing,
    memory: Option<Memory>,
    gather: Gather,
    chances: Vec<f32>,
    /// The last round's tree, root first, parents before children; and the length of its history.
    nodes: Vec<Node>,
    asked: usize,
    warm: bool,
    /// Seconds that a level of the draft model takes.
    level_time: f32,
    /// The tree was grown since it was proposed.
    ahead: bool,
    figures: Figures,
}

impl Stack {
    /// `name` appears in the statistics. Without the draft model guesses come from what was there
    /// before.
    pub fn new(
        name: &'static str,
        lm: Option<Lm>,
        context: bool,
        table: Option<Table>,
        mixing: Mixing,
    ) -> Self {
        let context = context.then(Automaton::new);
        let mixer = |warm: bool| {
            if mixing.prior { Mixer::new(warm) } else { Mixer::fixed(warm) }.at_rate(mixing.rate)
        };
        Stack {
            name,
            sources: Sources { context, table, lm },
            mixers: [false, true].map(|warm| mixer(warm && mixing.noise)),
            mixing,
            memory: None,
            gather: Gather::default(),
            chances: Vec::new(),
            nodes: Vec::new(),
            asked: 0,
            warm: false,
            level_time: 0.0,
            ahead: false,
            figures: Figures::default(),
        }
    }

    /// The draft model alone.
    pub fn of_model(name: &'static str, engine: Box<dyn Engine>) -> Self {
        Self::new(name, Some(Lm::new(name, engine)), false, None, Mixing::default())
    }

    /// What was there before, without a draft model: `--draft ngram`.
    pub fn of_text() -> Self {
        Self::new("ngram", None, true, Some(Table::new()), Mixing::default())
    }

    /// All of it.
    pub fn of_both(name: &'static str, engine: Box<dyn Engine>) -> Self {
        Self::new("mixed", Some(Lm::new(name, engine)), true, Some(Table::new()), Mixing::default())
    }

    /// Goes on with what an earlier run has learnt, and leaves this run's there. An error says why
    /// the file is not used; it is replaced all the same.
    pub fn remember(&mut self, memory: Memory) -> Result<()> {
        let kept =
            memory.load().with_context(|| format!("{} is not used", memory.path().display()));
        self.memory = Some(memory);
        if let Some(kept) = kept? {
            self.sources.table = self.sources.table.take().map(|_| kept.table);
            if let Some(mixers) = kept.mixers.filter(|_| self.mixing.prior) {
                self.mixers = mixers.map(|mixer| mixer.at_rate(self.mixing.rate));
            }
        }
        Ok(())
    }

    /// One step of learning for every place of the last tree whose outcome the history shows.
    fn learn(&mut self, history: &[Token]) {
        let asked = std::mem::take(&mut self.asked);
        if asked == 0
            || history.len() <= asked
            || self.nodes.first().is_none_or(|root| root.token != history[asked - 1])
        {
            return;
        }
        let mut at = 0u32;
        for &token in &history[asked..] {
            if let Some(choice) = &self.nodes[at as usize].choice {
                self.mixers[self.warm as usize].learn(choice, token, &mut self.chances);
            }
            match self.child(at, token) {
                Some(child) => at = child,
                None => break,
            }
        }
    }

    fn child(&self, parent: u32, token: Token) -> Option<u32> {
        let after = parent as usize + 1;
        let found = self.nodes[after..]
            .iter()
            .position(|node| node.parent == parent && node.token == token);
        found.map(|i| (after + i) as u32)
    }

    /// Tokens from below the root to a node.
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
    fn expand(&mut self, ctx: &DraftContext<'_>, at: u32, row: Option<usize>) -> Result<()> {
        let node = &self.nodes[at as usize];
        let previous =
            if at == 0 { ctx.history.len().checked_sub(2).map(|i| ctx.history[i]) } else { None };
        let spot = Spot {
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
            noise: self.mixing.noise,
        };
        let choice = self.gather.choice(&self.sources, rules, spot, row, &context)?;
        let mixer = &self.mixers[self.warm as usize];
        mixer.chances(&choice, &mut self.chances);
        let mut order: Vec<usize> = (0..choice.tokens.len()).collect();
        order.sort_by(|&a, &b| self.chances[b].total_cmp(&self.chances[a]));
        let model = self.sources.lm.as_ref().map_or("model", |lm| lm.name());
        for (rank, i) in order.into_iter().enumerate() {
            let (token, own) = (choice.tokens[i], self.chances[i]);
            let wanted = rank < if ctx.chain { 1 } else { BRANCHES } && own >= FAINT;
            let there = self.child(at, token);
            if !wanted && there.is_none() {
                continue;
            }
            let source = advocate(mixer, &choice, &self.chances, i, model);
            match there {
                Some(child) => {
                    let child = &mut self.nodes[child as usize];
                    (child.own, child.source) = (own, source);
                }
                None => {
                    let matched = self
                        .sources
                        .context
                        .as_ref()
                        .map_or(Match::default(), |a| a.step(matched, token));
                    self.nodes.push(Node {
                        own,
                        source,
                        ..Node::new(token, at, depth + 1, matched)
                    });
                }
            }
        }
        self.nodes[at as usize].choice = Some(choice);
        Ok(())
    }

    /// Continues a node by the one token that may follow, if any.
    fn force(&mut self, at: u32, token: Option<Token>) {
        let node = &mut self.nodes[at as usize];
        node.forced = true;
        let (depth, matched) = (node.depth + 1, node.matched);
        if let Some(token) = token.filter(|token| self.child(at, *token).is_none()) {
            let matched =
                self.sources.context.as_ref().map_or(Match::default(), |a| a.step(matched, token));
            self.nodes.push(Node {
                own: 1.0,
                source: forced::NAME,
                ..Node::new(token, at, depth, matched)
            });
        }
    }

    /// Chances of whole paths. In a chain only the likeliest child of a node has any.
    fn weigh(&mut self, chain: bool) {
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

    /// The `n` likeliest nodes besides the root, best first; a parent comes before its children.
    fn best(&self, n: usize) -> Vec<u32> {
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

    /// Continues every node of the tree by what costs nothing.
    fn spread(&mut self, ctx: &DraftContext<'_>) -> Result<()> {
        loop {
            self.weigh(ctx.chain);
            let open = |&i: &u32| {
                self.nodes[i as usize].is_open() && self.nodes[i as usize].depth < ctx.depth
            };
            let open: Vec<u32> = self.best(ctx.nodes).into_iter().filter(open).collect();
            if open.is_empty() {
                return Ok(());
            }
            open.into_iter().try_for_each(|node| self.expand(ctx, node, None))?;
        }
    }

    /// The nodes that the draft model should see next; none if that is not worth a pass.
    fn frontier(&self, ctx: &DraftContext<'_>, lm: &Lm) -> Vec<u32> {
        let best = self.best(ctx.nodes);
        // What cannot bring a likelier node than the tree has already is of no use.
        let cutoff = if best.len() < ctx.nodes {
            0.0
        } else {
            best.last().map_or(0.0, |&i| self.nodes[i as usize].chance)
        };
        let price = ctx.rate.map_or(0.0, |rate| rate * self.level_time);
        let width = if price > DEAR { 1 } else { WIDTH }.min(lm.room());
        let deepest = ctx.depth.min(lm.left(ctx.history.len()));
        let mut chosen: Vec<u32> = Vec::new();
        let mut most = 0.0f32;
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
            {
                most = most.max(node.chance);
                chosen.push(i);
            }
        }
        let gain: f32 = chosen.iter().map(|&i| self.nodes[i as usize].chance).sum();
        // The same time would bring `price` tokens otherwise, and the target must check what is
        // found there too.
        if gain < (2.0 * price).max(LEAST) { Vec::new() } else { chosen }
    }

    /// Lets the draft model see one more level; false if that is not worth it.
    fn ask_model(&mut self, ctx: &DraftContext<'_>) -> Result<bool> {
        let start = Instant::now();
        let frontier = self.sources.lm.as_ref().map_or(Vec::new(), |lm| self.frontier(ctx, lm));
        if frontier.is_empty() {
            return Ok(false);
        }
        self.evaluate(ctx, &frontier)?;
        self.level_time += RATE * (start.elapsed().as_secs_f32() - self.level_time);
        Ok(true)
    }

    /// Lets the draft model see these nodes, whose parents it has seen.
    fn evaluate(&mut self, ctx: &DraftContext<'_>, frontier: &[u32]) -> Result<()> {
        let Some(lm) = self.sources.lm.as_mut() else { return Ok(()) };
        let mut first = u32::MAX;
        for &i in frontier {
            let (parent, token) = (self.nodes[i as usize].parent, self.nodes[i as usize].token);
            let above = self.nodes[parent as usize].row.expect("a parent is evaluated first");
            let row = lm.push(above, token);
            first = first.min(row);
            self.nodes[i as usize].row = Some(row);
        }
        lm.evaluate(first)?;
        for (row, &i) in frontier.iter().enumerate() {
            self.expand(ctx, i, Some(row))?;
        }
        Ok(())
    }

    /// Grows the tree from its root, in as many passes of the draft model as the context allows.
    fn grow(&mut self, ctx: &DraftContext<'_>) -> Result<()> {
        let mut levels = ctx.draft_steps;
        if self.nodes[0].row.is_none() {
            let lm = self.sources.lm.as_mut().filter(|_| levels > 0);
            let row = lm.map_or(Ok(None), |lm| lm.begin(ctx.history))?;
            levels -= row.is_some() as usize;
            self.nodes[0].row = row;
            self.expand(ctx, 0, row.map(|_| 0))?;
        }
        self.spread(ctx)?;
        while self.nodes[0].row.is_some() && levels > 0 && self.ask_model(ctx)? {
            levels -= 1;
            self.spread(ctx)?;
        }
        Ok(())
    }
}

impl Drafter for Stack {
    fn name(&self) -> &'static str {
        self.name
    }

    fn read_ahead(&mut self, history: &[Token], more: &mut dyn FnMut() -> bool) -> Result<()> {
        self.sources.lm.as_mut().map_or(Ok(()), |lm| lm.read(history, more))
    }

    fn prepare(&mut self, history: &[Token]) -> Result<()> {
        // Another text, or another sampler.
        (self.asked, self.ahead) = (0, false);
        if let Some(automaton) = &mut self.sources.context {
            automaton.sync(history);
        }
        self.sources.lm.as_mut().map_or(Ok(()), |lm| lm.read(history, &mut || true))
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        let asked = self.asked;
        self.learn(ctx.history);
        if let (Some(table), Some(verified)) = (&mut self.sources.table, ctx.verified) {
            table.feed(ctx.history, verified, ctx.sampler);
        }
        let matched = self.sources.context.as_mut().map_or(Match::default(), |automaton| {
            automaton.sync(ctx.history);
            automaton.ending()
        });
        self.warm = ctx.sampler.config().temperature > 0.0;
        if !self.resume(ctx, asked, matched) {
            self.nodes.clear();
            self.nodes.push(Node { own: 1.0, chance: 1.0, ..Node::new(ctx.root(), 0, 0, matched) });
        }
        if ctx.nodes == 0 || ctx.depth == 0 {
            return Ok(());
        }
        self.grow(ctx)?;
        self.asked = ctx.history.len();
        let mut place = vec![0; self.nodes.len()];
        for i in self.best(ctx.nodes) {
            let node = &self.nodes[i as usize];
            place[i as usize] =
                out.add(place[node.parent as usize], node.token, node.own, node.source);
        }
        Ok(())
    }

    fn meanwhile(
        &mut self,
        ctx: &DraftContext<'_>,
        proposal: &Proposal,
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.work_ahead(ctx, proposal, more)
    }

    fn figures(&self, out: &mut Figures) {
        out.add(&self.figures);
        let [passes, rows] = self.sources.lm.as_ref().map_or([0; 2], Lm::work_done);
        (out.draft_passes, out.draft_rows) = (out.draft_passes + passes, out.draft_rows + rows);
    }

    fn reads_target(&self) -> bool {
        self.sources.table.is_some()
    }

    fn has_recent_match(&mut self, history: &[Token]) -> bool {
        self.sources.context.as_mut().is_some_and(|automaton| {
            automaton.sync(history);
            automaton.ending().len >= REPEATED
        })
    }

    fn save(&self) -> Result<()> {
        match (&self.memory, &self.sources.table) {
            (Some(memory), Some(table)) => memory.save(table, &self.mixers),
            _ => Ok(()),
        }
    }

    fn note(&self) -> Option<String> {
        self.sources.lm.as_ref().and_then(Lm::note)
    }
}

#[cfg(test)]
mod tests;
