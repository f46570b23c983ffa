//! All sources, one tree for each text: grown best first by mixed chances, the draft model asked
//! step by step, several nodes of all texts at a time.
//!
//! Context matches and table entries cost nothing, so every node that may be of use is continued by
//! them at once: copied passages become long chains before the draft model is asked at all. What
//! the model then says of a node replaces the chances there.
//!
//! Each text has a tree and an automaton of its own; the table, the mixers and the draft model are
//! shared. A draft step is one pass of the model over nodes of all texts that want one.

mod ahead;
mod tree;

use std::time::Instant;

use anyhow::Result;

use super::lm::{Lm, Start};
use super::mix::{self, Mixer};
use super::source::CandidateCollector;
use super::table::Table;
use super::{Ask, Drafter, Figures};
use crate::engine::Engine;
use crate::tensor::Token;
use tree::Tree;

/// Tokens that the text's end must share with an earlier place to be worth a look in rounds that
/// would not ask.
const REPEATED: u32 = 4;
/// How much the measured time of a draft step moves with each one.
const RATE: f32 = 0.1;

/// How the sources are mixed into one tree. The default is the best; the other settings are for
/// comparison.
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

/// State that the trees of all texts share.
pub struct SharedState {
    table: Option<Table>,
    lm: Option<Lm>,
    /// For temperature 0 and for others.
    mixers: [Mixer; 2],
    mixing: Mixing,
    gather: CandidateCollector,
    chances: Vec<f32>,
    /// Seconds that a draft step takes.
    step_time: f32,
}

pub struct TreeBuilder {
    ways: SharedState,
    /// Whether earlier text is a source.
    reads_text: bool,
    /// Trees by text.
    trees: Vec<Tree>,
    figures: Figures,
}

impl TreeBuilder {
    /// Makes a drafter. Without a draft model, guesses come from earlier text and from the table.
    pub fn new(lm: Option<Lm>, context: bool, table: Option<Table>, mixing: Mixing) -> Self {
        let mixer = |warm: bool| {
            if mixing.prior { Mixer::new(warm) } else { Mixer::fixed(warm) }.at_rate(mixing.rate)
        };
        let mixers = [false, true].map(|warm| mixer(warm && mixing.noise));
        let (gather, chances, step_time) = Default::default();
        TreeBuilder {
            ways: SharedState { table, lm, mixers, mixing, gather, chances, step_time },
            reads_text: context,
            trees: Vec::new(),
            figures: Figures::default(),
        }
    }

    /// Makes a drafter of the draft model alone.
    pub fn of_model(engine: Box<dyn Engine>) -> Self {
        Self::new(Some(Lm::new(engine)), false, None, Mixing::default())
    }

    /// Makes a drafter without a draft model: `--draft ngram`.
    pub fn of_text() -> Self {
        Self::new(None, true, Some(Table::new()), Mixing::default())
    }

    /// Makes a drafter of all sources.
    pub fn of_both(engine: Box<dyn Engine>) -> Self {
        Self::new(Some(Lm::new(engine)), true, Some(Table::new()), Mixing::default())
    }

    /// Returns the mixer's weights for temperature 0, set by set.
    pub fn weights(&self) -> Vec<Vec<f32>> {
        self.ways.mixers[0].sets().iter().map(|set| set.to_vec()).collect()
    }

    /// Returns the tree of a text.
    fn tree(&mut self, text: usize) -> &mut Tree {
        while self.trees.len() <= text {
            self.trees.push(Tree::new(self.trees.len(), self.reads_text));
        }
        &mut self.trees[text]
    }

    /// Begins the texts' trees, or goes on with those of the round before. Returns how each text
    /// starts: some wait until the draft model has seen their roots.
    fn begin(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Start>> {
        let mut found = Vec::with_capacity(asks.len());
        let mut matches = Vec::with_capacity(asks.len());
        for ask in asks {
            let (ctx, history) = (&ask.ctx, ask.ctx.history);
            self.tree(ask.text);
            let (tree, ways) = (&mut self.trees[ask.text], &mut self.ways);
            let asked = tree.asked;
            tree.learn(ways, history);
            if let (Some(table), Some(verified)) = (&mut ways.table, ctx.verified) {
                table.feed(history, verified, ctx.sampler);
            }
            matches.push(tree.follow(history));
            tree.warm = ctx.sampler.config().temperature > 0.0;
            found.push(tree.find(history, asked));
        }
        let wants_model = |ask: &Ask<'_>| ask.ctx.draft_steps > 0 && !ask.is_idle();
        let mut starts = vec![Start::Cannot; asks.len()];
        if let Some(lm) = &mut self.ways.lm {
            let wanting: Vec<usize> = (0..asks.len()).filter(|i| wants_model(&asks[*i])).collect();
            let texts: Vec<_> = wanting
                .iter()
                .map(|i| (asks[*i].text, asks[*i].ctx.history, found[*i].map(|(_, row)| row)))
                .collect();
            let begun = lm.begin(&texts)?;
            wanting.into_iter().zip(begun).for_each(|(i, start)| starts[i] = start);
        }
        for (i, ask) in asks.iter().enumerate() {
            let tree = &mut self.trees[ask.text];
            let goes_on = starts[i] == Start::GoesOn;
            let worked = std::mem::take(&mut tree.ahead);
            self.figures.ahead += worked as u64;
            self.figures.hits += (worked && goes_on) as u64;
            match found[i].filter(|_| goes_on) {
                Some((root, _)) => tree.take_over(root, matches[i]),
                None => tree.begin(ask.ctx.root(), matches[i]),
            }
        }
        Ok(starts)
    }

    /// Grows the texts' trees from their roots, in as many passes of the draft model as they allow.
    /// Returns how many those were.
    fn grow(&mut self, asks: &[Ask<'_>], starts: &[Start]) -> Result<usize> {
        // Draft steps that each text has left.
        let mut left: Vec<usize> = asks.iter().map(|ask| ask.ctx.draft_steps).collect();
        for ((ask, start), left) in asks.iter().zip(starts).zip(&mut left) {
            let tree = &mut self.trees[ask.text];
            match start {
                _ if ask.is_idle() => *left = 0,
                Start::Waits(_) => continue,
                Start::GoesOn => tree.spread(&mut self.ways, &ask.ctx)?,
                Start::Cannot => {
                    tree.expand(&mut self.ways, &ask.ctx, 0, None)?;
                    tree.spread(&mut self.ways, &ask.ctx)?;
                    *left = 0;
                }
            }
        }
        let mut steps = 0;
        let mut frontiers: Vec<Vec<u32>> = vec![Vec::new(); asks.len()];
        loop {
            let Some(lm) = &mut self.ways.lm else { return Ok(steps) };
            let begun = Instant::now();
            let active = left.iter().filter(|left| **left > 0).count().max(1);
            let room = lm.room() / active;
            for (i, (ask, left)) in asks.iter().zip(&mut left).enumerate() {
                frontiers[i].clear();
                if *left == 0 {
                    continue;
                }
                let tree = &mut self.trees[ask.text];
                if let (0, Start::Waits(row)) = (steps, starts[i]) {
                    tree.nodes[0].row = Some(row);
                    frontiers[i].push(0);
                } else {
                    // The texts that share a pass share its price.
                    let price = ask.ctx.rate.map_or(0.0, |rate| rate * self.ways.step_time);
                    frontiers[i] = tree.frontier(&ask.ctx, lm, price / active as f32, room);
                    tree.push(lm, &frontiers[i]);
                }
                *left = if frontiers[i].is_empty() { 0 } else { *left - 1 };
            }
            if frontiers.iter().all(Vec::is_empty) {
                return Ok(steps);
            }
            lm.evaluate()?;
            for (ask, frontier) in asks.iter().zip(&frontiers).filter(|(_, f)| !f.is_empty()) {
                let tree = &mut self.trees[ask.text];
                for (row, &node) in frontier.iter().enumerate() {
                    tree.expand(&mut self.ways, &ask.ctx, node, Some(row))?;
                }
            }
            // The first step of a round may read many tokens.
            if steps > 0 || starts.iter().all(|start| *start == Start::GoesOn) {
                let seconds = begun.elapsed().as_secs_f32();
                self.ways.step_time += RATE * (seconds - self.ways.step_time);
            }
            for (ask, _) in asks.iter().zip(&frontiers).filter(|(_, f)| !f.is_empty()) {
                self.trees[ask.text].spread(&mut self.ways, &ask.ctx)?;
            }
            steps += 1;
        }
    }
}

impl Drafter for TreeBuilder {
    fn read_ahead(
        &mut self,
        text: usize,
        history: &[Token],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.ways.lm.as_mut().map_or(Ok(()), |lm| lm.read(text, history, more))
    }

    fn prepare(&mut self, text: usize, history: &[Token]) -> Result<()> {
        // Another text, or another sampler.
        let tree = self.tree(text);
        (tree.asked, tree.ahead) = (0, false);
        tree.follow(history);
        self.read_ahead(text, history, &mut || true)
    }

    fn propose(&mut self, asks: &mut [Ask<'_>]) -> Result<usize> {
        let starts = self.begin(asks)?;
        let steps = self.grow(asks, &starts)?;
        for ask in asks.iter_mut().filter(|ask| !ask.is_idle()) {
            let tree = &mut self.trees[ask.text];
            tree.asked = ask.ctx.history.len();
            tree.propose(ask.ctx.nodes, ask.out);
        }
        Ok(steps)
    }

    fn meanwhile(&mut self, asks: &[Ask<'_>], more: &mut dyn FnMut() -> bool) -> Result<()> {
        self.work_ahead(asks, more)
    }

    fn figures(&self, out: &mut Figures) {
        out.add(&self.figures);
        let [passes, rows] = self.ways.lm.as_ref().map_or([0; 2], Lm::work_done);
        (out.draft_passes, out.draft_rows) = (out.draft_passes + passes, out.draft_rows + rows);
    }

    fn reads_target(&self) -> bool {
        self.ways.table.is_some()
    }

    fn has_recent_match(&mut self, text: usize, history: &[Token]) -> bool {
        self.tree(text).follow(history).len >= REPEATED
    }

    fn note(&self) -> Option<String> {
        self.ways.lm.as_ref().and_then(Lm::note)
    }
}

#[cfg(test)]
mod tests;
