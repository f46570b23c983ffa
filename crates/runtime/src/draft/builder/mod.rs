//! Drafter that combines all sources: one tree per text, grown best first by mixed probabilities.
//!
//! Free sources need no model pass, so they immediately extend every useful node. Copied passages
//! become long chains before the draft model runs. The draft model runs step by step, for several
//! nodes of all texts per pass. Its probabilities replace those of a node's children.

mod ahead;
mod candidates;
mod tree;

use std::time::{Duration, Instant};

use anyhow::Result;

use super::drafter::{DraftRequest, Drafter};
use super::figures::DraftFigures;
use super::mix::{self, Mixer};
use super::sources::assistant::AssistantModel;
use super::sources::model::{DraftModel, Start, TreeModel};
use super::sources::{CandidateSource, FreeSources};
use candidates::CandidateCollector;
use gemma_base::tensor::Token;
use gemma_model::engine::{Assistant, Engine};
use tree::Tree;

/// Length of a repeated ending that makes drafting worthwhile in rounds that would otherwise not
/// draft.
const REPEATED: u32 = 4;
/// Weight of the newest measurement in the mean time of a draft step.
const RATE: f32 = 0.1;

/// How the sources are mixed into one tree. Non-default settings are for measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixing {
    /// Start with trained weights instead of one weight set for all contexts.
    pub prior: bool,
    /// Learning rate during generation; 0 disables learning.
    pub rate: f32,
    /// Rank candidates with the target's sampling noise.
    pub noise: bool,
}

impl Default for Mixing {
    fn default() -> Self {
        Mixing { prior: true, rate: mix::RATE, noise: true }
    }
}

/// State shared by the trees of all texts.
pub struct SharedState {
    free: FreeSources,
    model: Option<Box<dyn TreeModel>>,
    /// One for temperature 0, and one for other temperatures.
    mixers: [Mixer; 2],
    mixing: Mixing,
    collector: CandidateCollector,
    chances: Vec<f32>,
    /// Mean time of a draft step in seconds.
    step_time: f32,
}

pub struct TreeBuilder {
    shared: SharedState,
    /// Trees by text.
    trees: Vec<Tree>,
    figures: DraftFigures,
}

impl TreeBuilder {
    /// Creates a drafter from the free sources among `sources` and an optional draft model.
    pub fn new(model: Option<DraftModel>, sources: &[CandidateSource], mixing: Mixing) -> Self {
        Self::mixed(model.map(|model| Box::new(model) as _), sources, mixing)
    }

    /// Creates a drafter from the free sources among `sources` and the target's assistant.
    pub fn assisted(model: AssistantModel, sources: &[CandidateSource], mixing: Mixing) -> Self {
        Self::mixed(Some(Box::new(model)), sources, mixing)
    }

    fn mixed(
        model: Option<Box<dyn TreeModel>>,
        sources: &[CandidateSource],
        mixing: Mixing,
    ) -> Self {
        let mixer = |warm: bool| {
            if mixing.prior { Mixer::new(warm) } else { Mixer::fixed(warm) }.at_rate(mixing.rate)
        };
        let mixers = [false, true].map(|warm| mixer(warm && mixing.noise));
        let (collector, chances, step_time) = Default::default();
        let free = FreeSources::new(sources);
        TreeBuilder {
            shared: SharedState { free, model, mixers, mixing, collector, chances, step_time },
            trees: Vec::new(),
            figures: DraftFigures::default(),
        }
    }

    /// Creates a drafter with only a draft model.
    pub fn of_model(engine: Box<dyn Engine>) -> Self {
        Self::new(Some(DraftModel::new(engine)), &[], Mixing::default())
    }

    /// Creates a drafter without a draft model: `--draft ngram`.
    pub fn of_text() -> Self {
        Self::of_all(None, Mixing::default())
    }

    /// Creates a drafter of all sources with the default mixing.
    pub fn of_both(engine: Box<dyn Engine>) -> Self {
        Self::of_all(Some(DraftModel::new(engine)), Mixing::default())
    }

    /// Creates a drafter of all sources.
    pub fn of_all(model: Option<DraftModel>, mixing: Mixing) -> Self {
        Self::new(model, &CandidateSource::mixed().collect::<Vec<_>>(), mixing)
    }

    /// Returns the mixer's weight sets for temperature 0.
    pub fn weights(&self) -> Vec<Vec<f32>> {
        self.shared.mixers[0].sets().iter().map(|set| set.to_vec()).collect()
    }

    /// Returns the tree of a text.
    fn tree(&mut self, text: usize) -> &mut Tree {
        while self.trees.len() <= text {
            self.trees.push(Tree::new(self.trees.len()));
        }
        &mut self.trees[text]
    }

    /// Starts the texts' trees, or continues the trees of the last round. Returns how each text
    /// starts: some must wait until the draft model has evaluated their roots.
    fn begin(
        &mut self,
        requests: &[DraftRequest<'_>],
        target: &mut Option<&mut dyn Assistant>,
    ) -> Result<Vec<Start>> {
        let mut found = Vec::with_capacity(requests.len());
        let mut matches = Vec::with_capacity(requests.len());
        for request in requests {
            let (ctx, history) = (&request.ctx, request.ctx.history);
            self.tree(request.text);
            let (tree, shared) = (&mut self.trees[request.text], &mut self.shared);
            tree.read(ctx);
            let base_len = tree.base_len;
            tree.learn(shared, history);
            if let Some(verified) = ctx.verified {
                shared.free.learn(history, verified, ctx.sampler);
            }
            matches.push(shared.free.follow(request.text, history));
            tree.warm = ctx.sampler.config().temperature > 0.0;
            found.push(tree.find(history, base_len));
        }
        let wants_model =
            |request: &DraftRequest<'_>| request.ctx.draft_steps > 0 && !request.is_idle();
        let mut starts = vec![Start::Cannot; requests.len()];
        if let Some(model) = &mut self.shared.model {
            let wanting: Vec<usize> =
                (0..requests.len()).filter(|i| wants_model(&requests[*i])).collect();
            let texts: Vec<_> = wanting
                .iter()
                .map(|i| {
                    (requests[*i].text, requests[*i].ctx.history, found[*i].map(|(_, row)| row))
                })
                .collect();
            let begun = model.begin(&texts, target)?;
            wanting.into_iter().zip(begun).for_each(|(i, start)| starts[i] = start);
        }
        for (i, request) in requests.iter().enumerate() {
            let tree = &mut self.trees[request.text];
            let goes_on = starts[i] == Start::GoesOn;
            let worked = std::mem::take(&mut tree.ahead);
            self.figures.ahead += worked as u64;
            self.figures.hits += (worked && goes_on) as u64;
            match found[i].filter(|_| goes_on) {
                Some((root, _)) => tree.take_over(&self.shared.free, root, matches[i]),
                None => tree.begin(request.ctx.root(), matches[i]),
            }
        }
        Ok(starts)
    }

    /// Grows the texts' trees from their roots, with as many draft model passes as they allow.
    /// Returns the number of passes.
    fn grow(
        &mut self,
        requests: &[DraftRequest<'_>],
        starts: &[Start],
        target: &mut Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        // Remaining draft steps per text.
        let mut left: Vec<usize> = requests.iter().map(|request| request.ctx.draft_steps).collect();
        for ((request, start), left) in requests.iter().zip(starts).zip(&mut left) {
            let tree = &mut self.trees[request.text];
            match start {
                _ if request.is_idle() => *left = 0,
                Start::Waits(_) => continue,
                Start::GoesOn => tree.spread(&mut self.shared, &request.ctx)?,
                Start::Cannot => {
                    tree.expand(&mut self.shared, &request.ctx, 0, None)?;
                    tree.spread(&mut self.shared, &request.ctx)?;
                    *left = 0;
                }
            }
        }
        let mut steps = 0;
        let mut frontiers: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
        loop {
            let Some(model) = &mut self.shared.model else { return Ok(steps) };
            let begun = Instant::now();
            let active = left.iter().filter(|left| **left > 0).count().max(1);
            let room = model.room() / active;
            for (i, (request, left)) in requests.iter().zip(&mut left).enumerate() {
                frontiers[i].clear();
                if *left == 0 {
                    continue;
                }
                let tree = &mut self.trees[request.text];
                if let (0, Start::Waits(row)) = (steps, starts[i]) {
                    tree.nodes[0].row = Some(row);
                    frontiers[i].push(0);
                } else {
                    // Texts that share a pass divide its cost.
                    let price = request.ctx.rate.map_or(0.0, |rate| rate * self.shared.step_time);
                    let price = price / active as f32;
                    frontiers[i] = tree.frontier(&request.ctx, model.as_ref(), price, room);
                    tree.push(model.as_mut(), &frontiers[i]);
                }
                *left = if frontiers[i].is_empty() { 0 } else { *left - 1 };
            }
            if frontiers.iter().all(Vec::is_empty) {
                return Ok(steps);
            }
            model.evaluate(target)?;
            let reads_texts = model.reads_texts();
            for (request, frontier) in
                requests.iter().zip(&frontiers).filter(|(_, f)| !f.is_empty())
            {
                let tree = &mut self.trees[request.text];
                for (row, &node) in frontier.iter().enumerate() {
                    tree.expand(&mut self.shared, &request.ctx, node, Some(row))?;
                }
            }
            // The first step of a round may also read many tokens, so it is not measured.
            if steps > 0 || !reads_texts || starts.iter().all(|start| *start == Start::GoesOn) {
                let seconds = begun.elapsed().as_secs_f32();
                self.shared.step_time += RATE * (seconds - self.shared.step_time);
            }
            for (request, _) in requests.iter().zip(&frontiers).filter(|(_, f)| !f.is_empty()) {
                self.trees[request.text].spread(&mut self.shared, &request.ctx)?;
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
        self.shared.model.as_mut().map_or(Ok(()), |model| model.read_ahead(text, history, more))
    }

    fn prepare(&mut self, text: usize, history: &[Token], most: Duration) -> Result<()> {
        // The text or its sampler may have changed.
        let tree = self.tree(text);
        (tree.base_len, tree.ahead) = (0, false);
        self.shared.free.follow(text, history);
        self.shared.model.as_mut().map_or(Ok(()), |model| model.read_within(text, history, most))
    }

    fn propose(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        mut target: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        let starts = self.begin(requests, &mut target)?;
        let steps = self.grow(requests, &starts, &mut target)?;
        for request in requests.iter_mut().filter(|request| !request.is_idle()) {
            let tree = &mut self.trees[request.text];
            tree.base_len = request.ctx.history.len();
            tree.propose(request.ctx.nodes, request.out);
        }
        Ok(steps)
    }

    fn draft_ahead(
        &mut self,
        requests: &[DraftRequest<'_>],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.work_ahead(requests, more)
    }

    fn figures(&self, out: &mut DraftFigures) {
        out.add(&self.figures);
        let [passes, rows] = self.shared.model.as_ref().map_or([0; 2], |model| model.work_done());
        (out.draft_passes, out.draft_rows) = (out.draft_passes + passes, out.draft_rows + rows);
    }

    fn reads_target(&self) -> bool {
        self.shared.free.reads_target()
    }

    fn has_recent_match(&mut self, text: usize, history: &[Token]) -> bool {
        self.shared.free.follow(text, history).len >= REPEATED
    }

    fn note(&self) -> Option<String> {
        self.shared.model.as_ref().and_then(|model| model.note())
    }
}

#[cfg(test)]
mod tests;
