//! How much to draft, for one text and for many.
//!
//! **Rule.** A pass over `M` rows costs `c(M)` seconds and brings `E(M)` tokens: one for each text,
//! and the chances of the guesses among its rows. Chances are multiplied by how far earlier ones
//! came true ([`acceptance`]). Where drafting took `d` seconds, the likeliest guesses of all texts
//! are kept, as many as make `E(M) / (c(M) + d)` greatest; plain decoding, which has no guesses, is
//! among the choices, and others must win over it by [`MARGIN`]. How many passes of the draft model
//! to make before (draft steps, which take time whatever they bring) is decided in the same way, by
//! what each step brought in earlier rounds beyond guesses that cost nothing. One text is the case
//! of many in which there is one.
//!
//! **Estimator.** Each time that enters the rule is measured: a pass by its rows, a draft step,
//! asking without one, and how much longer passes become by work ahead. What is known of it is a
//! mean that fades ([`estimate`]). A measurement beyond 1.25 times that is an outlier, which changes
//! nothing: a program that holds a pass up, or kernels that are compiled. Four outliers in a row on
//! one side are a change, which is believed at once. If passes with guesses are outliers, one plain
//! pass tells whether guesses have another price or the machine another speed ([`costs`]).
//!
//! **Back-off.** What is not the best choice by what is known is tried again after a pause, which
//! doubles with each trial in vain ([`budget`]): a draft step where none pays, asking where plain
//! decoding is best, plain decoding where drafts are, and the other way of working ahead. A source
//! that has seen the text's end before ([`Round::recent_match`]) is asked at once.
//!
//! **Guarantee.** However wrong chances and expectations are, and whatever the text does, drafting
//! makes no text later than plain decoding would by more than half a plain pass and 0.8 % of its
//! time, as far as the times hold that were known beforehand: a round is begun, and its guesses are
//! kept, only if the [`LossBudget`] has room for all of them to fail. The simulator
//! (`policy/simulator.rs`) holds this to texts, devices and sources of all kinds, with times that
//! are 10 % off: at least .98 of plain decoding where asking for guesses takes .01 of a pass, as
//! with passes of 5 ms and more, and at least .93 where it takes .06.
//!
//! Nothing of this changes the text. Without a clock decisions depend on the tokens and on the
//! costs given at the start alone, and are the same each time.

mod acceptance;
mod budget;
mod costs;
mod estimate;
mod overlap;

use std::time::Duration;

pub use acceptance::Habits;
pub use costs::{CostCurve, Costs};

use super::{Ahead, DraftOptions, Figures, Pass, Proposal, TreeSize, forced};
use acceptance::{Acceptance, classes};
use budget::{BackOff, LossBudget};
use estimate::Estimate;
use overlap::Overlap;

/// What drafting must win by what is known, to be worth the errors in that.
const MARGIN: f32 = 1.05;

/// The round that begins.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Texts that share the pass, and the longest history among them.
    pub texts: usize,
    pub position: usize,
    /// Nodes besides the roots that a pass takes at most.
    pub most: usize,
    /// The end of one of the texts has come before, by
    /// [`Drafter::has_recent_match`](super::Drafter::has_recent_match).
    pub recent_match: bool,
}

/// What may be drafted for a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Allowance {
    /// Nodes to ask of each text, and how deep.
    pub nodes: usize,
    pub depth: usize,
    /// One line, no branches.
    pub chain: bool,
    /// Passes of a draft model; with 0 only guesses that cost nothing are wanted.
    pub draft_steps: usize,
    /// Tokens a second that plain decoding brings; `None` asks for decisions that do not depend on
    /// the clock.
    pub rate: Option<f32>,
    /// No source is asked: only what a grammar leaves no choice about is wanted.
    pub only_forced: bool,
}

/// What became of a round.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    pub pass: Pass,
    /// Of each text, in the order of [`Policy::choose`], the nodes that the target took, root
    /// included.
    pub paths: &'a [Vec<u32>],
}

/// What is tried again after a pause, where it was not used lately.
#[derive(Clone, Debug)]
struct Trials {
    /// Plain decoding: what drafting is compared with.
    plain: BackOff,
    /// Guesses that cost nothing but rows.
    free: BackOff,
    /// A draft model.
    steps: BackOff,
}

/// The round whose outcome is not known yet.
#[derive(Clone, Debug, Default)]
struct Pending {
    texts: usize,
    position: usize,
    /// Passes of a draft model that were allowed; `None` where no source was asked.
    steps: Option<usize>,
    /// Seconds that the target waited for guesses.
    drafting: f32,
    rows: usize,
    /// By text: the class of each node, and whether the target is bound to take it.
    nodes: Vec<Vec<(usize, bool)>>,
    /// Tokens that the guesses promise, before any doubt, but those that cannot fail.
    promised: f32,
    sure: usize,
    trust: f32,
    /// Seconds for which to work ahead during the pass.
    ahead: Option<f32>,
}

/// Decides how much of the texts' guesses a pass takes.
pub struct Policy {
    costs: Costs,
    options: DraftOptions,
    /// Whether decisions may depend on measured times.
    clock: bool,
    acceptance: Acceptance,
    budget: LossBudget,
    trials: Trials,
    overlap: Overlap,
    /// What asking takes without a draft model, and what a draft step takes.
    ask: Estimate,
    step: Estimate,
    /// How much longer a plain pass takes behind guesses that were all thrown away: they leave the
    /// processor's caches full of what is not the target's.
    cache_pollution: f32,
    /// Nodes that a text kept lately.
    size: f32,
    /// Plain decoding is the best that is known.
    rests: bool,
    round: Pending,
    figures: Figures,
}

impl Policy {
    /// `clock: false` decides by `costs` alone, for tests that want the same trees each time.
    pub fn new(costs: Costs, options: DraftOptions, clock: bool) -> Self {
        let trials =
            Trials { plain: BackOff::default(), free: BackOff::due(), steps: BackOff::due() };
        Policy {
            costs,
            options,
            clock,
            acceptance: Acceptance::default(),
            budget: LossBudget::default(),
            trials,
            overlap: Overlap::new(Ahead::Auto),
            ask: Estimate::default(),
            step: Estimate::default(),
            cache_pollution: 1.0,
            size: f32::INFINITY,
            rests: false,
            round: Pending::default(),
            figures: Figures::default(),
        }
    }

    /// Plain decoding.
    pub fn off() -> Self {
        let options = DraftOptions { tree: TreeSize::Nodes(0), tokens: None };
        Self::new(Costs::new(CostCurve::new(&[(1, 1.0)]), 0), options, false)
    }

    /// Begins with what earlier runs have learnt.
    pub fn with(mut self, habits: &Habits) -> Self {
        self.acceptance.inherit(habits);
        if habits.level.is_normal() && habits.level > 0.0 {
            self.step = Estimate::of(habits.level);
        }
        self
    }

    /// Whether to draft while the target's device works.
    pub fn working_ahead(mut self, wish: Ahead) -> Self {
        self.overlap = Overlap::new(wish);
        self
    }

    /// Whether work ahead is wanted at all, be it of a prompt.
    pub fn works_ahead(&self) -> bool {
        self.overlap.is_wanted()
    }

    /// Another text has come.
    pub fn begin_text(&mut self) {
        self.budget.begin_text();
    }

    /// What passes have come to cost.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Seconds of a pass over so many rows, no less than those of a plain one.
    fn cost(&mut self, rows: usize) -> f32 {
        let curve = self.costs.at(self.round.position);
        let plain = curve.cost(self.round.texts);
        if rows <= self.round.texts { plain } else { curve.cost(rows).max(plain) }
    }

    /// Seconds that the target is expected to wait for so many draft steps.
    fn wait(&self, steps: usize) -> f32 {
        match steps {
            _ if !self.clock => 0.0,
            0 => self.ask.mean,
            steps => steps as f32 * self.step.mean * self.overlap.share(),
        }
    }

    /// Guesses that may all fail, after drafting for so many seconds.
    fn affordable(&mut self, drafting: f32) -> usize {
        let texts = self.round.texts;
        let stretch = self.overlap.stretch.max(1.0);
        let most = (1.0 + self.budget.room()) * self.cost(texts) - drafting;
        let rows = self.costs.at(self.round.position).max_rows();
        (texts + 1..=rows).take_while(|rows| self.cost(*rows) * stretch <= most).count()
    }

    /// What may be drafted for the round that begins.
    pub fn allow(&mut self, round: &Round) -> Allowance {
        let Round { texts, position, .. } = *round;
        self.round = Pending { texts, position, ..Pending::default() };
        let rows = self.costs.at(position).max_rows();
        let all = Allowance {
            nodes: round.most,
            depth: self.options.tokens.unwrap_or(usize::MAX),
            chain: self.options.tree == TreeSize::Chain,
            draft_steps: usize::MAX,
            rate: None,
            only_forced: false,
        };
        if let Some(fixed) = self.options.fixed() {
            let nodes = fixed.min(round.most / texts.max(1));
            self.round.steps = (nodes > 0).then_some(usize::MAX);
            return Allowance { nodes, only_forced: nodes == 0, ..all };
        }
        let most = round.most.min(rows.saturating_sub(texts));
        self.round.steps = self.steps(round.recent_match).filter(|_| most > 0);
        let Some(draft_steps) = self.round.steps else {
            return Allowance { nodes: most, only_forced: true, ..all };
        };
        self.size = self.size.min(rows as f32);
        let wanted = 2 * self.size as usize + 2;
        Allowance {
            nodes: most.min(self.affordable(0.0)).min(wanted),
            draft_steps,
            rate: self.clock.then(|| texts as f32 / self.cost(texts)),
            ..all
        }
    }

    /// Passes of a draft model that make the most tokens a second by what is known; `None` for a
    /// plain round.
    fn steps(&mut self, recent_match: bool) -> Option<usize> {
        if self.clock && self.costs.at(self.round.position).is_doubtful() {
            self.trials.plain = BackOff::default();
            return None;
        }
        if self.clock && self.trials.plain.is_due() {
            self.trials.plain.tried();
            return None;
        }
        let texts = self.round.texts as f32;
        let plain = 1.0 / self.cost(self.round.texts);
        let (mut best, mut free_pays) = ((None, MARGIN * plain), recent_match);
        for (steps, (nodes, tokens)) in self.acceptance.expected().into_iter().enumerate() {
            let rows = (texts * (1.0 + nodes)).round() as usize;
            let rate = (1.0 + tokens) / (self.cost(rows) + self.wait(steps));
            let margin = if best.0 == Some(0) { MARGIN } else { 1.0 };
            if rate > margin * best.1 {
                best = (Some(steps), rate);
                free_pays |= steps == 0;
            }
        }
        let best = best.0;
        self.rests = best.is_none();
        let free_due = self.trials.free.is_due();
        let steps_due = self.trials.steps.is_due();
        let mut wished = best.unwrap_or(0).max(steps_due as usize);
        if self.clock && self.step.mean == 0.0 {
            // Nobody knows yet what a step takes.
            wished = wished.min(1);
        }
        let chosen = (0..=wished).rev().find(|steps| self.affordable(self.wait(*steps)) > 0)?;
        match (chosen, best) {
            (1.., Some(1..)) => self.trials.steps = BackOff::default(),
            (1.., _) => self.trials.steps.tried(),
            _ if free_pays => self.trials.free = BackOff::default(),
            (_, None) if free_due => self.trials.free.tried(),
            // What a draft step takes is saved up.
            _ => return None,
        }
        Some(chosen)
    }

    /// Leaves the texts the guesses that make the most tokens a second together. They took the
    /// target so many seconds of waiting, and a draft model so many passes.
    pub fn choose(&mut self, proposals: &mut [&mut Proposal], drafting: Duration, steps: usize) {
        if self.clock
            && let Some(allowed) = self.round.steps
        {
            self.round.drafting = self.waited(drafting.as_secs_f32(), steps, allowed);
        }
        self.round.trust = self.acceptance.trust();
        if self.options.fixed().is_none() {
            let keep = self.best_sizes(proposals);
            proposals.iter_mut().zip(&keep).for_each(|(proposal, n)| proposal.keep_best(*n));
            let most = keep.into_iter().max().unwrap_or(0) as f32;
            if self.round.steps.is_some() {
                self.size = most.max(self.size + estimate::RATE * (most - self.size));
            }
        }
        self.round.rows = proposals.iter().map(|p| p.len()).sum();
        for proposal in proposals.iter() {
            let sure = (0..proposal.len()).map(|node| forced::is_sure(proposal, node));
            self.round.nodes.push(classes(proposal).into_iter().zip(sure).collect());
            self.round.sure += forced::count(proposal);
            self.round.promised += proposal.expected();
        }
        self.round.promised -= self.round.sure as f32;
        let wanted = self.round.steps.is_some_and(|steps| steps > 0);
        let pass = self.cost(self.round.rows);
        if wanted && self.overlap.begin(pass) {
            self.round.ahead = Some(pass * self.overlap.stretch);
        } else {
            self.overlap.rest();
        }
    }

    /// Takes in the seconds that the target waited for guesses. Returns those to book.
    fn waited(&mut self, seconds: f32, steps: usize, allowed: usize) -> f32 {
        let was_ahead = self.overlap.was_ahead();
        if allowed == 0 || steps == 0 && !was_ahead {
            return self.ask.observe(seconds);
        }
        let most = 2.0 * self.step.mean * steps.max(1) as f32;
        let seconds = match was_ahead {
            true => seconds.min(most),
            false => self.step.observe(seconds / steps as f32) * steps as f32,
        };
        self.overlap.observe(seconds);
        seconds
    }

    /// How many nodes each text keeps.
    fn best_sizes(&mut self, proposals: &[&mut Proposal]) -> Vec<usize> {
        let (texts, drafting) = (proposals.len(), self.round.drafting);
        let mut order: Vec<(f32, bool, usize)> = Vec::new();
        for (text, proposal) in proposals.iter().enumerate() {
            let nodes = 1..proposal.len();
            order.extend(
                nodes.map(|node| (proposal.chance[node], forced::is_sure(proposal, node), text)),
            );
        }
        // What cannot fail comes first, and can be afforded.
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let sure = order.iter().filter(|(_, sure, _)| *sure).count();
        let rows = self.costs.at(self.round.position).max_rows();
        order.truncate(self.affordable(drafting).max(sure).min(rows.saturating_sub(texts)));
        let mut tokens = texts as f32;
        let mut best = (0, MARGIN * tokens / (self.cost(texts) + drafting));
        for (i, (chance, sure, _)) in order.iter().enumerate() {
            tokens += if *sure { 1.0 } else { self.round.trust * chance };
            let rate = tokens / (self.cost(texts + i + 1) + drafting);
            if rate > best.1 {
                best = (i + 1, rate);
            }
        }
        let mut keep = vec![0; texts];
        order[..best.0].iter().for_each(|(_, _, text)| keep[*text] += 1);
        keep
    }

    /// For how long a draft model may work ahead while the target's device scores what was chosen;
    /// `None` for not at all.
    pub fn ahead(&self) -> Option<Duration> {
        let seconds = self.round.ahead?;
        Some(if self.clock { Duration::from_secs_f32(seconds) } else { Duration::MAX })
    }

    /// Takes in what became of the round.
    pub fn observe(&mut self, outcome: &Outcome<'_>) {
        let round = std::mem::take(&mut self.round);
        (self.round.texts, self.round.position) = (round.texts, round.position);
        let taken: usize = outcome.paths.iter().map(|path| path.len() - 1).sum();
        let tokens = 1.0 + taken as f32 / round.texts.max(1) as f32;
        let spent = self.spent(&round, outcome.pass);
        let plain = self.cost(round.texts);
        let brought = taken.saturating_sub(round.sure) as f32;
        self.acceptance.settle(round.promised, brought);
        let all = (taken + round.texts) as f64;
        self.figures.plain_tokens += all as u64;
        self.figures.plain_seconds += all * plain as f64 / round.texts.max(1) as f64;
        if self.options.fixed().is_none() {
            self.budget.book(tokens, spent / plain);
        }
        let Some(steps) = round.steps else { return };
        self.figures.rounds += round.texts as u64;
        self.figures.predicted +=
            ((round.texts + round.sure) as f32 + round.trust * round.promised) as f64;
        self.figures.realised += all;
        for (nodes, path) in round.nodes.iter().zip(outcome.paths) {
            let kept: Vec<usize> = nodes[1..].iter().map(|node| node.0).collect();
            let taken = path[1..].iter().map(|node| nodes[*node as usize].0);
            self.acceptance.observe(steps > 0, &kept, taken);
        }
    }

    /// Seconds to book for a round.
    fn spent(&mut self, round: &Pending, pass: Pass) -> f32 {
        let curve = self.costs.at(round.position);
        if !self.clock {
            return curve.cost(round.rows);
        }
        let stretch = match round.steps {
            Some(_) if round.rows == round.texts => Some(&mut self.cache_pollution),
            _ if round.ahead.is_some() => Some(&mut self.overlap.stretch),
            _ => None,
        };
        // It is not known when the pass was done if the drafter was late to look: then as expected,
        // within what is possible.
        let usual = curve.cost(round.rows) * stretch.as_ref().map_or(1.0, |stretch| **stretch);
        let most = pass.time.as_secs_f32();
        let time = usual.clamp(most - pass.late.min(pass.time).as_secs_f32(), most);
        curve.observe(round.texts, round.rows, time, stretch) + round.drafting + (most - time)
    }

    /// Adds up what there is to say.
    pub fn figures(&self, out: &mut Figures) {
        out.add(&self.figures);
        out.trust = self.acceptance.trust();
        out.costs = Some(self.costs.clone());
        out.habits = Habits { survival: self.acceptance.survival(), level: self.step.mean };
    }

    /// Why nothing is being drafted, if so.
    pub fn note(&self) -> Option<String> {
        self.rests.then(|| "drafting rests: it does not pay on this text".to_owned())
    }
}

#[cfg(test)]
mod simulator;

#[cfg(test)]
mod tests;
