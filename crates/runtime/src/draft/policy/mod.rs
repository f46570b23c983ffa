//! Policy of drafting: how many draft nodes and draft steps a round uses, for one text or many.
//!
//! **Rule.** A pass over `M` rows takes `c(M)` seconds and yields an expected `E(M)` tokens: one
//! for each text, plus the chances of the draft nodes among its rows. Chances are corrected by the
//! acceptance of earlier ones ([`acceptance`]). After `d` seconds of drafting, the policy keeps the
//! likeliest nodes of all texts, in the number that maximises `E(M) / (c(M) + d)`. Plain decoding,
//! without nodes, is one of the choices. The number of draft steps (passes of the draft model) is
//! chosen in the same way, by the tokens that each step added to those of free sources in earlier
//! rounds.
//!
//! **Estimator.** Each time in the rule is measured: a pass by its rows, a draft step, a request to
//! free sources, and the factor by which work ahead makes passes longer. An estimate is a mean in
//! which old measurements fade ([`estimate`]). A measurement beyond 1.25 times the estimate is an
//! outlier and changes nothing: another program delayed the pass, or kernels were compiled. Four
//! successive outliers are a change, and the estimate follows at once. For passes with draft nodes,
//! one plain pass is run first. It tells whether the cost of nodes or the speed of the machine has
//! changed ([`passes`]). Nothing makes a pass shorter than it is: a measurement far below the
//! estimate is believed at once, so that a cost measured in a bad moment does not end drafting.
//!
//! **Back-off.** A choice that is not the best one by the estimates is tried again after a pause,
//! which doubles with each failed trial ([`budget`]). Examples are a draft step if none pays,
//! drafts if plain decoding is best, and plain decoding if drafts are best. If the text's ending
//! occurred before ([`Round::recent_match`]), free sources are asked at once.
//!
//! **Guarantee.** Drafting delays no text against plain decoding by more than 2 plain passes
//! and 1 % of its time, if the measured times are right. The chances may be wrong by any amount: a
//! round drafts, and keeps nodes, only if the [`LossBudget`] allows all of them to fail. The budget
//! excludes the time in which the draft model reads the prompt or, after a pause, the tokens that
//! it missed: at most three plain passes each time.
//!
//! The simulator (`policy/simulator.rs`) tests texts, devices and sources of all kinds, with times
//! that are 10 % off. It demands .96 of the speed of plain decoding if asking the sources takes .01
//! of a pass, as with passes of 5 ms and more. It demands .94 if asking takes .06 and reading a
//! token .02. Texts of 128 tokens are the slowest ones. A smaller budget would lose most of the
//! gain at temperature 1, because chains of three tokens that fail cost half a pass each
//! (docs/MEASURED.md).
//!
//! The policy does not change any text. Without a clock, its decisions depend only on the tokens
//! and on the initial costs, so they are reproducible.

mod acceptance;
mod budget;
mod estimate;
mod overlap;
mod passes;

use std::time::Duration;

use super::costs::Costs;
use super::figures::{DraftFigures, Habits};
use super::options::{Ahead, DraftOptions, TreeSize};
use super::proposal::Proposal;
use super::round::{Allowance, Pass, Round, RoundOutcome};
use super::sources::{draft_steps, grammar};
use acceptance::AcceptanceRates;
use budget::{BackOff, LossBudget};
use estimate::Estimate;
use overlap::Overlap;
use passes::PassTimes;

/// Minimum gain for which sources are asked in each round. Below it they are asked only in trials.
/// The prior gives sources that always fail a gain of 1.048.
const WORTH: f32 = 1.05;
/// Plain passes that a draft model may spend on reading a prompt, or the tokens that it missed. It
/// only matters for targets as fast as the demo. With 0.4 the demo's drafts lost most of their gain
/// because of missing context. Without a limit, long prompts lost a tenth of the time.
const READING: f32 = 3.0;

/// The current round.
#[derive(Clone, Debug, Default)]
struct Pending {
    texts: usize,
    position: usize,
    /// Draft steps that were allowed; `None` if no source was asked.
    steps: Option<usize>,
    /// Seconds that the target waited for drafts.
    drafting: f32,
    rows: usize,
    /// Draft steps of each node, by text.
    classes: Vec<Vec<usize>>,
    /// Nodes that cannot fail, and the sum of the chances of all other nodes.
    sure: usize,
    promised: f32,
    /// Seconds of work ahead during the pass; `None` for no work ahead.
    ahead: Option<f32>,
}

/// Decides how many draft nodes a pass has.
#[derive(Default)]
pub struct Policy {
    costs: Costs,
    options: DraftOptions,
    /// Whether decisions may depend on measured times.
    clock: bool,
    acceptance: AcceptanceRates,
    budget: LossBudget,
    passes: PassTimes,
    overlap: Overlap,
    /// Factor by which work ahead makes passes longer.
    stretch: f32,
    /// Seconds of a request to free sources, and seconds of a draft step.
    ask: Estimate,
    step: Estimate,
    /// Pauses before trials of plain decoding, of free sources, and of a draft model. A pause
    /// counts rounds in which its choice is not used.
    plain_trial: BackOff,
    free_trial: BackOff,
    steps_trial: BackOff,
    /// Mean number of nodes that a text kept in recent rounds.
    size: f32,
    /// Whether plain decoding is the best choice by the estimates.
    rests: bool,
    round: Pending,
    figures: DraftFigures,
}

impl Policy {
    /// Creates a policy. With `clock: false` it decides only by `costs`, for tests that need
    /// reproducible trees.
    pub fn new(costs: Costs, options: DraftOptions, clock: bool) -> Self {
        let size = f32::INFINITY;
        let mut policy = Policy { costs, options, clock, size, stretch: 1.0, ..Policy::default() };
        policy.plain_trial.tried(true);
        policy
    }

    /// Creates a policy that never drafts.
    pub fn off() -> Self {
        let options = DraftOptions { tree: TreeSize::Nodes(0), tokens: None };
        Self::new(Costs::default(), options, false)
    }

    /// Uses the measurements of earlier runs as initial values.
    pub fn with(mut self, habits: &Habits) -> Self {
        self.acceptance.inherit(habits);
        self.step.mean = Some(habits.level).filter(|s| s.is_normal() && *s > 0.0).unwrap_or(0.0);
        self
    }

    /// Sets whether drafting overlaps the passes of the target.
    pub fn working_ahead(mut self, wish: Ahead) -> Self {
        self.overlap.wish = wish;
        self
    }

    /// Returns whether any work ahead is allowed: of drafts or of a prompt.
    pub fn works_ahead(&self) -> bool {
        self.overlap.wish != Ahead::Never
    }

    /// Starts the accounting of another text.
    pub fn begin_text(&mut self) {
        self.budget.begin_text();
    }

    /// Returns the time limit for a draft model to read a prompt of `position` tokens.
    pub fn reading(&mut self, position: usize) -> Duration {
        if !self.clock || self.options.fixed().is_some() {
            return Duration::MAX;
        }
        Duration::from_secs_f32(READING * self.costs.at(position).cost(1))
    }

    /// Returns the seconds of a pass with `nodes` draft nodes, at least those of a plain pass.
    fn cost(&mut self, nodes: usize) -> f32 {
        let (texts, curve) = (self.round.texts, self.costs.at(self.round.position));
        curve.cost(texts + nodes).max(curve.cost(texts))
    }

    /// Returns the number of nodes for which a pass has rows.
    fn room(&mut self) -> usize {
        self.costs.at(self.round.position).max_rows().saturating_sub(self.round.texts)
    }

    /// Returns the expected seconds that the target waits for `steps` draft steps.
    fn wait(&self, steps: usize) -> f32 {
        match steps {
            _ if !self.clock => 0.0,
            0 => self.ask.mean,
            steps => steps as f32 * self.step.mean * self.overlap.share(),
        }
    }

    /// Returns how many nodes may all fail, after `drafting` seconds of drafting.
    fn affordable(&mut self, drafting: f32) -> usize {
        let most = ((1.0 + self.budget.room()) * self.cost(0) - drafting) / self.stretch.max(1.0);
        (1..=self.room()).take_while(|nodes| self.cost(*nodes) <= most).count()
    }

    /// Returns the limits of drafting for the next round.
    pub fn allow(&mut self, round: &Round) -> Allowance {
        let Round { texts, position, most, recent_match } = *round;
        self.round = Pending { texts, position, ..Pending::default() };
        let all = Allowance {
            nodes: most,
            depth: self.options.tokens.unwrap_or(usize::MAX),
            chain: self.options.tree == TreeSize::Chain,
            draft_steps: usize::MAX,
            ..Allowance::default()
        };
        if let Some(fixed) = self.options.fixed() {
            let nodes = fixed.min(most / texts.max(1));
            self.round.steps = (nodes > 0).then_some(usize::MAX);
            return Allowance { nodes, only_forced: nodes == 0, ..all };
        }
        let most = most.min(self.room());
        self.round.steps = self.steps(recent_match).filter(|_| most > 0);
        let Some(draft_steps) = self.round.steps else {
            return Allowance { nodes: most, only_forced: true, ..all };
        };
        self.size = self.size.min(most as f32);
        let nodes = self.affordable(0.0).min(2 * self.size as usize + 2).min(most);
        let rate = self.clock.then(|| texts as f32 / self.cost(0));
        Allowance { nodes, draft_steps, rate, ..all }
    }

    /// Returns the number of draft steps with the most tokens per second by the estimates, if the
    /// budget allows all of them to fail. Returns `None` for a plain round.
    fn steps(&mut self, recent_match: bool) -> Option<usize> {
        if self.clock && (self.passes.is_doubtful() || self.plain_trial.is_due()) {
            self.plain_trial.tried(self.passes.is_doubtful());
            return None;
        }
        let mut best = (None, WORTH / self.cost(0));
        let mut free_pays = recent_match;
        for (steps, (nodes, tokens)) in self.acceptance.expected().into_iter().enumerate() {
            let nodes = (self.round.texts as f32 * nodes).round() as usize;
            let rate = (1.0 + tokens) / (self.cost(nodes) + self.wait(steps));
            if rate > best.1 {
                best = (Some(steps), rate);
                free_pays |= steps == 0;
            }
        }
        self.rests = best.0.is_none();
        let [free_due, steps_due] = [self.free_trial.is_due(), self.steps_trial.is_due()];
        let wished = best.0.unwrap_or(0).max(steps_due as usize);
        // The time of a draft step is unknown before the first one.
        let most = if self.clock && self.step.mean == 0.0 { 1 } else { wished };
        let affordable = |steps: &usize| self.affordable(self.wait(*steps)) > 0;
        let chosen = (0..=wished.min(most)).rev().find(affordable)?;
        match (chosen, best.0) {
            (1.., wished) => self.steps_trial.tried(wished > Some(0)),
            _ if free_pays => self.free_trial.tried(true),
            (_, None) if free_due => self.free_trial.tried(false),
            // Until then, the budget saves time for a draft step.
            _ => return None,
        }
        Some(chosen)
    }

    /// Reduces the proposals to the nodes that together yield the most tokens per second. The
    /// target waited `drafting` for them, and the draft model made `steps` passes.
    pub fn choose(&mut self, proposals: &mut [&mut Proposal], drafting: Duration, steps: usize) {
        if let Some(allowed) = self.round.steps.filter(|_| self.clock) {
            self.round.drafting = self.waited(drafting.as_secs_f32(), steps, allowed);
        }
        if self.options.fixed().is_none() {
            let keep = self.best_sizes(proposals);
            proposals.iter_mut().zip(&keep).for_each(|(proposal, n)| proposal.keep_best(*n));
            if self.round.steps.is_some() {
                let most = keep.into_iter().max().unwrap_or(0) as f32;
                self.size = most.max(self.size + estimate::RATE * (most - self.size));
            }
        }
        let round = &mut self.round;
        round.rows = proposals.iter().map(|p| p.len()).sum();
        round.classes = proposals.iter().map(|p| draft_steps(p)).collect();
        round.sure = proposals.iter().map(|p| grammar::count(p)).sum();
        round.promised = proposals.iter().map(|p| p.expected()).sum::<f32>() - round.sure as f32;
        let (pass, draft_steps) = (self.cost(self.round.rows - self.round.texts), self.round.steps);
        let longer = pass * (self.stretch - 1.0);
        let ahead = self.overlap.begin(draft_steps.is_some_and(|steps| steps > 0), longer);
        self.round.ahead = ahead.then_some(pass * self.stretch);
    }

    /// Records the seconds that the target waited for drafts. Returns the seconds to charge to the
    /// round.
    fn waited(&mut self, seconds: f32, steps: usize, allowed: usize) -> f32 {
        let most = 2.0 * self.step.mean * steps.max(1) as f32;
        let seconds = match self.overlap.was_ahead {
            _ if allowed == 0 => return self.ask.observe(seconds),
            true => seconds.min(most),
            false if steps == 0 => return self.ask.observe(seconds),
            false => self.step.observe(seconds / steps as f32) * steps as f32,
        };
        self.overlap.observe(seconds);
        seconds
    }

    /// Returns how many nodes each text keeps.
    fn best_sizes(&mut self, proposals: &[&mut Proposal]) -> Vec<usize> {
        let (texts, drafting, trust) =
            (proposals.len(), self.round.drafting, self.acceptance.trust());
        // Nodes that cannot fail come first. They do not use the budget.
        let mut order = grammar::by_chance(proposals);
        let sure = order.iter().filter(|(_, sure, _)| *sure).count();
        order.truncate(self.affordable(drafting).max(sure).min(self.room()));
        let mut tokens = texts as f32;
        let mut best = (0, tokens / (self.cost(0) + drafting));
        for (i, (chance, sure, _)) in order.iter().enumerate() {
            tokens += if *sure { 1.0 } else { trust * chance };
            let rate = tokens / (self.cost(i + 1) + drafting);
            if rate > best.1 {
                best = (i + 1, rate);
            }
        }
        let mut keep = vec![0; texts];
        order[..best.0].iter().for_each(|(_, _, text)| keep[*text] += 1);
        keep
    }

    /// Returns the time limit for work ahead of a draft model during the pass; `None` for no work
    /// ahead.
    pub fn ahead(&self) -> Option<Duration> {
        let seconds = self.round.ahead?;
        Some(if self.clock { Duration::from_secs_f32(seconds) } else { Duration::MAX })
    }

    /// Records the outcome of the round.
    pub fn observe(&mut self, outcome: &RoundOutcome<'_>) {
        let spent = self.spent(outcome.pass);
        let (plain, round) = (self.cost(0), std::mem::take(&mut self.round));
        let taken: usize = outcome.paths.iter().map(|path| path.len() - 1).sum();
        let (texts, all) = (round.texts.max(1) as f32, taken + round.texts);
        self.figures.plain(all, all as f32 / texts * plain);
        if self.options.fixed().is_none() {
            // A pass without nodes is plain decoding, however long it takes.
            let time = if round.rows > round.texts { spent } else { plain + round.drafting };
            self.budget.book(all as f32 / texts, time / plain);
        }
        if let Some(steps) = round.steps {
            let expected = self.acceptance.trust() * round.promised + round.sure as f32;
            self.figures.drafted(round.texts, expected, all);
            for (classes, path) in round.classes.iter().zip(outcome.paths) {
                self.acceptance.observe(steps > 0, classes, path);
            }
        }
        self.acceptance.settle(round.promised, taken.saturating_sub(round.sure) as f32);
    }

    /// Returns the seconds to charge to a round.
    fn spent(&mut self, pass: Pass) -> f32 {
        let Pending { texts, rows, drafting, .. } = self.round;
        let curve = self.costs.at(self.round.position);
        // If prompts are read in the same pass, the time of the trees is unknown.
        if !self.clock || pass.rows > rows {
            return curve.cost(rows) + drafting;
        }
        let stretch = self.round.ahead.is_some().then_some(&mut self.stretch);
        // If the drafter checked late, the end of the pass is only known to be in a range. The
        // expected time is used, limited to this range.
        let usual = curve.cost(rows) * stretch.as_ref().map_or(1.0, |stretch| **stretch);
        let most = pass.time.as_secs_f32();
        let time = usual.clamp(pass.time.saturating_sub(pass.late).as_secs_f32(), most);
        self.passes.observe(curve, [texts, rows], time, stretch) + drafting + (most - time)
    }

    /// Adds the policy's counts to `out`.
    pub fn figures(&self, out: &mut DraftFigures) {
        out.add(&self.figures);
        out.trust = self.acceptance.trust();
        // Without a clock, nothing was measured.
        out.costs = self.clock.then(|| self.costs.clone());
        out.habits = Habits { survival: self.acceptance.survival(), level: self.step.mean };
    }

    /// Returns the reason why nothing is drafted, if so.
    pub fn note(&self) -> Option<String> {
        self.rests.then(|| "drafting rests: it does not pay on this text".to_owned())
    }
}

#[cfg(test)]
mod simulator;

#[cfg(test)]
mod tests;
