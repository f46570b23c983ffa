//! How much to draft: as many nodes as make the most tokens per second.
//!
//! A pass over `M` rows costs `c(M)` and brings `E(M)` tokens: one, plus the chances of the nodes.
//! With the drafts already made in `d` seconds, the best size maximises `E(M) / (c(M) + d)`; plain
//! decoding is the case `M = 1`. Chances are trusted as far as they came true, and what drafting
//! loses against plain decoding is bounded ([`guard`](super::guard)). None of this changes text.

use std::str::FromStr;
use std::time::Instant;

use anyhow::Result;

use super::cost::{CostCurve, Costs};
use super::depth::{Depth, Habits};
use super::guard::{Account, Idle, Ledger, MARGIN, Pardons, Trust};
use super::outcome::Outcome;
use super::overlap::{Ahead, Overlap};
use super::{DraftContext, Drafter, Figures, Pace, Proposal, forced, source};
use crate::error::Fault;

/// Speed over that of plain decoding below which its cost is measured again now and then, and the
/// rounds between: the nearer the two are, the more depends on it.
const RECHECKS: [(f32, u32); 3] = [(1.1, 12), (1.3, 48), (f32::INFINITY, 128)];
/// Rounds between where passes are not what they were: a machine that is slow for a while must not
/// look like dear guesses.
const DOUBTFUL: u32 = 3;
/// A measured pass is booked as at most this much longer or shorter than is known: a stolen time
/// slice must not look like a price. Where it is one, what is known follows soon.
const SPIKE: f32 = 1.15;
/// How much a plain pass behind drafting moves what is known of [`Paced::wake`].
const WAKE: f32 = 0.05;
/// What guesses that cost nothing take before it is known, in passes over one row.
const UNASKED: f32 = 0.05;
/// Time of a level of a draft model, in plain passes, from which it is dear: it has to bring what
/// it costs by itself, beyond what guesses that cost nothing bring, and leaves them some room for
/// losses.
const DEAR: f32 = 0.1;
const LEFT_TO_OTHERS: f32 = 0.25;
/// Batches that are drafted ahead where the clock has no say.
const AHEAD: usize = 3;

/// `--draft-tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TreeSize {
    /// As many nodes as pay.
    #[default]
    Auto,
    /// One line.
    Chain,
    /// Always this many nodes.
    Nodes(usize),
}

impl FromStr for TreeSize {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match text {
            "auto" => Ok(TreeSize::Auto),
            "chain" => Ok(TreeSize::Chain),
            n => n.parse().ok().filter(|&n| n > 0).map(TreeSize::Nodes).ok_or_else(|| {
                Fault::usage(format!(
                    "a draft tree is `auto`, `chain` or a number of nodes; `{n}` is none of them"
                ))
                .help("--draft off decodes without drafts")
            }),
        }
    }
}

/// What the user wants of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftOptions {
    pub tree: TreeSize,
    /// `--draft-tokens`: longest line drafted, and with [`TreeSize::Chain`] the only one; `None` as
    /// long as pays.
    pub tokens: Option<usize>,
}

impl DraftOptions {
    /// The number of nodes, where the user has set it.
    pub(super) fn fixed(self) -> Option<usize> {
        match (self.tree, self.tokens) {
            (TreeSize::Nodes(n), _) | (TreeSize::Chain, Some(n)) => Some(n),
            _ => None,
        }
    }
}

/// Seconds since some moment.
pub type Clock = Box<dyn Fn() -> f64>;

/// A drafter that proposes as much of another's guesses as pays.
pub struct Paced {
    inner: Box<dyn Drafter>,
    costs: Costs,
    options: DraftOptions,
    /// Seconds since some moment, where decisions may depend on measured times.
    clock: Option<Clock>,
    /// What the inner drafter proposed, and what was kept of it.
    offered: Outcome,
    kept: Outcome,
    round: Round,
    trust: Trust,
    /// Of rounds that asked a draft model, and of those that took only what costs nothing.
    accounts: [Account; 2],
    ledger: Ledger,
    idle: Idle,
    /// For passes, and for drafting.
    pardons: [Pardons; 2],
    overlap: Overlap,
    /// How deep to draft, where the clock may say so.
    depth: Depth,
    /// Nodes that paid lately, fading.
    size: f32,
    /// Rounds since plain decoding was last timed, and speed over that of plain decoding, fading.
    drafted: u32,
    gain: f32,
    /// Seconds that guesses without a draft model take, fading.
    free: f32,
    /// Times the usual that a plain pass takes right behind guesses that cost nothing, and behind
    /// those of a draft model: they leave the processor's caches full of what is not the target's.
    wake: [f32; 2],
    figures: Figures,
}

/// The round whose outcome is not known yet.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// Levels that a draft model could be asked for; `None` without drafts.
    levels: Option<usize>,
    /// Seconds that drafting took before the pass.
    drafting: f32,
    /// Nodes that cannot fail; tokens that the other kept nodes promise, before any doubt; and the
    /// trust in that then.
    sure: usize,
    expected: f32,
    trust: f32,
    /// Worked ahead during the pass.
    ahead: bool,
}

impl Paced {
    /// `clock: false` decides by `curve` alone, for tests that want the same trees each time.
    pub fn new(
        inner: Box<dyn Drafter>,
        curve: CostCurve,
        options: DraftOptions,
        clock: bool,
    ) -> Self {
        Paced {
            inner,
            costs: Costs::new(curve, 0),
            options,
            clock: clock.then(wall),
            offered: Outcome::default(),
            kept: Outcome::default(),
            round: Round::default(),
            trust: Trust::default(),
            accounts: Default::default(),
            ledger: Ledger::default(),
            idle: Idle::default(),
            pardons: Default::default(),
            overlap: Overlap::new(Ahead::Auto),
            depth: Depth::default(),
            size: 8.0,
            drafted: 0,
            gain: 1.0,
            free: 0.0,
            wake: [1.0; 2],
            figures: Figures::default(),
        }
    }

    /// Begins with what earlier runs have measured and learnt.
    pub fn with(mut self, costs: Costs, habits: &Habits) -> Self {
        self.costs = costs;
        self.depth.inherit(habits);
        self
    }

    /// Whether to draft while the target's device works.
    pub fn ahead(mut self, wish: Ahead) -> Self {
        self.overlap = Overlap::new(wish);
        self
    }

    /// Another clock than the wall's, to see what it would do.
    pub fn timed_by(mut self, clock: Clock) -> Self {
        self.clock = Some(clock);
        self
    }

    fn now(&self) -> f64 {
        self.clock.as_ref().map_or(0.0, |clock| clock())
    }

    /// Takes in what became of the round before.
    fn learn(&mut self, ctx: &DraftContext<'_>) {
        let round = std::mem::take(&mut self.round);
        let drafted = self.offered.levels();
        self.offered.settle(ctx.history);
        let (rows, levels) = (self.kept.rows(), self.kept.levels());
        let Some(path) = self.kept.settle(ctx.history) else { return };
        let taken = path.len();
        let curve = self.costs.at(ctx.history.len());
        let (plain, mut spent) = (curve.cost(1), curve.cost(rows));
        let asked = round.levels.map_or(0, |levels| levels.min(drafted.max(1)));
        let mut drafting =
            if round.levels.is_some() { self.waited(asked, round.drafting, plain) } else { 0.0 };
        let curve = self.costs.at(ctx.history.len());
        let stretch = if round.ahead { self.overlap.stretch() } else { 1.0 };
        let timed = ctx.last_pass.filter(|_| self.clock.is_some());
        let times = timed.map_or(1.0, |pass| {
            (pass.time - pass.late.min(pass.time)).as_secs_f32() / (spent * stretch)
        });
        if let Some(pass) = timed.filter(|_| !self.pardons[0].grants(rows, times)) {
            // It is not known when the pass was done if the drafter was late to look: then as
            // expected, within what is possible.
            let usual = curve.cost(rows);
            let (least, most) =
                (pass.time.saturating_sub(pass.late).as_secs_f32(), pass.time.as_secs_f32());
            let time = (usual * self.overlap.stretch()).clamp(least, most);
            drafting += most - time;
            if round.levels.is_some_and(|levels| levels > 0) {
                self.overlap.observe(round.ahead, drafting, time, usual);
            }
            let wake = &mut self.wake[(asked > 0) as usize];
            let times = time / usual;
            match rows == 1 && round.levels.is_some() {
                // Plain decoding is timed in rounds without drafts, but a machine that has become
                // slow is noticed at once.
                true if (1.0 / SPIKE..SPIKE).contains(&times) => {
                    *wake = (*wake + WAKE * (times - *wake)).max(1.0)
                }
                true => curve.observe(rows, time / *wake),
                false => curve
                    .observe(rows, time / if round.ahead { self.overlap.stretch() } else { 1.0 }),
            }
            let usual = curve.cost(rows);
            spent = (time / stretch).clamp(usual / SPIKE, usual * SPIKE);
        }
        let (plain, tokens) = (curve.cost(1), 1.0 + taken as f32);
        self.figures.plain_tokens += 1 + taken as u64;
        self.figures.plain_seconds += (tokens * plain) as f64;
        if rows == 1 {
            self.trust.fade();
        } else {
            self.trust.observe(round.expected, taken.saturating_sub(round.sure) as f32);
        }
        let Some(asked) = round.levels else {
            self.accounts.iter_mut().for_each(Account::pass);
            self.ledger.book(tokens, 1.0);
            return;
        };
        self.figures.rounds += 1;
        self.figures.predicted += ((1 + round.sure) as f32 + round.trust * round.expected) as f64;
        self.figures.realised += tokens as f64;
        let costly = asked > 0;
        let [own, own_nodes] = self.own(costly && self.is_dear(plain), &path, rows as u32);
        if self.clock.is_some() && costly {
            // Guesses that were all thrown away count as one level that failed.
            let kept = if drafted > 0 { levels.max(1) } else { 0 };
            self.depth.observe(kept, [own, taken - own], rows - 1, asked.min(drafted), drafting);
        }
        // That plain decoding took shorter or longer than plain decoding is neither won nor lost.
        let passes = if rows == 1 { self.wake[costly as usize] } else { spent * stretch / plain }
            + drafting / plain;
        self.gain += 0.05 * (tokens / passes - self.gain);
        if self.options.fixed().is_none() {
            self.ledger.book(tokens, passes);
            // Rows of guesses that would have been there without are not the model's to pay for.
            let others = (rows - 1 - own_nodes) as f32 / (rows - 1).max(1) as f32
                * (spent * stretch / plain - 1.0);
            self.accounts[!costly as usize].book(1.0 + own as f32, passes - others);
            self.accounts[costly as usize].pass();
        }
    }

    /// Whether a level of a draft model takes long enough that free guesses alone may be better,
    /// where the clock may say so.
    fn is_dear(&self, plain: f32) -> bool {
        self.clock.is_some() && self.depth.level() > DEAR * plain
    }

    /// Tokens taken and nodes proposed that are to a round's credit: a `dear` draft model's own,
    /// else all.
    fn own(&self, dear: bool, taken: &[u32], rows: u32) -> [usize; 2] {
        let own = |node: &u32| !dear || !source::is_free(self.kept.source(*node));
        [taken.iter().filter(|&node| own(node)).count(), (1..rows).filter(own).count()]
    }

    /// What the target will wait for so many levels of a draft model, as far as is known.
    fn expected_wait(&self, levels: usize, plain: f32) -> f32 {
        let known = if levels == 0 { self.free } else { levels as f32 * self.depth.level() };
        if known > 0.0 { known } else { UNASKED * plain }
    }

    /// Seconds of drafting before the pass, for so many levels of a draft model: as expected where
    /// it took far longer once.
    fn waited(&mut self, levels: usize, seconds: f32, plain: f32) -> f32 {
        let (free, expected) = (levels == 0, self.expected_wait(levels, plain));
        let pardoned = self.pardons[1].grants(1 + free as usize, seconds / expected);
        let waited = if pardoned { expected } else { seconds.min(4.0 * expected) };
        if free {
            self.free =
                if self.free > 0.0 { self.free + 0.1 * (waited - self.free) } else { waited };
        }
        waited
    }

    /// The number of nodes that makes the most tokens per second, of those whose failure can be
    /// afforded.
    fn best_size(&mut self, ctx: &DraftContext<'_>, out: &Proposal, drafting: f32) -> usize {
        let affordable = self.affordable(ctx, drafting);
        let (trust, curve) = (self.trust.factor(), self.costs.at(ctx.history.len()));
        let mut tokens = 1.0;
        let mut best = (0, MARGIN / (curve.cost(1) + drafting));
        // What cannot fail can be afforded.
        for (i, node) in
            out.by_chance().into_iter().enumerate().take(affordable.max(forced::count(out)))
        {
            tokens += if forced::is_sure(out, node as usize) {
                1.0
            } else {
                trust * out.chance[node as usize]
            };
            let rate = tokens / (curve.cost(i + 2) + drafting);
            if rate > best.1 {
                best = (i + 1, rate);
            }
        }
        best.0
    }

    /// The most nodes that may all fail, after drafting for so long.
    fn affordable(&mut self, ctx: &DraftContext<'_>, drafting: f32) -> usize {
        let stretch = if self.overlap.wants() { self.overlap.stretch().max(1.0) } else { 1.0 };
        let curve = self.costs.at(ctx.history.len());
        let most = (1.0 + self.ledger.room()) * curve.cost(1);
        (1..curve.max_rows())
            .take_while(|nodes| curve.cost(nodes + 1) * stretch + drafting <= most)
            .count()
    }

    /// How many levels a draft model may be asked for; `None` for a plain round.
    fn levels(&mut self, ctx: &DraftContext<'_>) -> Option<usize> {
        let [model, free] = [0, 1].map(|i| self.accounts[i].allows());
        if self.clock.is_none() {
            return model.then_some(usize::MAX);
        }
        self.drafted += 1;
        let doubtful = self.costs.at(ctx.history.len()).is_doubtful() && self.drafted >= DOUBTFUL;
        if doubtful
            || RECHECKS.iter().any(|(gain, rounds)| self.gain < *gain && self.drafted >= *rounds)
        {
            // Whatever is believed of plain decoding rests on its last measurement.
            self.drafted = 0;
            return None;
        }
        if self.idle.skips() && !self.inner.stirs(ctx.history) {
            self.drafted = 0;
            return None;
        }
        let mut levels =
            if model { self.depth.choose(self.costs.at(ctx.history.len())) } else { 0 };
        if self.depth.level() == 0.0 {
            // Nobody knows yet what a level costs.
            levels = levels.min(1);
        }
        let plain = self.costs.at(ctx.history.len()).cost(1);
        let reserve = if self.is_dear(plain) { LEFT_TO_OTHERS * plain } else { 0.0 };
        while levels > 0 && self.affordable(ctx, levels as f32 * self.depth.level() + reserve) == 0
        {
            levels -= 1;
        }
        (levels > 0 || free && self.affordable(ctx, 0.0) > 0).then_some(levels)
    }
}

impl Drafter for Paced {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        // What is learnt of the round before is part of what drafting takes.
        let start = self.now();
        self.learn(ctx);
        let fixed = self.options.fixed().map(|n| n.min(ctx.nodes));
        let levels = if fixed.is_some() { Some(usize::MAX) } else { self.levels(ctx) };
        self.round = Round { levels, trust: self.trust.factor(), ..Round::default() };
        if let Some(levels) = levels {
            let affordable = self.affordable(ctx, 0.0);
            let curve = self.costs.at(ctx.history.len());
            let most = ctx.nodes.min(curve.max_rows() - 1).min(affordable);
            let asked = DraftContext {
                nodes: fixed.unwrap_or(most.min(2 * self.size as usize + 6)),
                depth: ctx.depth.min(self.options.tokens.unwrap_or(usize::MAX)),
                chain: ctx.chain || self.options.tree == TreeSize::Chain,
                pace: (self.clock.is_some() && fixed.is_none())
                    .then(|| Pace { rate: 1.0 / curve.cost(1), levels }),
                ..*ctx
            };
            self.inner.propose(&asked, out)?;
            self.round.drafting = (self.now() - start) as f32;
            out.limit(&asked);
            self.offered.remember(ctx.history, out);
            // A stolen time slice is lost whatever is done about it now.
            let plain = self.costs.at(ctx.history.len()).cost(1);
            let usual = self.expected_wait(levels.min(self.offered.levels().max(1)), plain);
            let drafting = self.round.drafting.min(2.0 * usual);
            if fixed.is_none() {
                let size = self.best_size(ctx, out, drafting);
                out.keep_best(size);
                self.size += 0.1 * (size as f32 - self.size);
                self.idle.asked(size > 0);
            }
            self.round.sure = forced::count(out);
            self.round.expected = out.expected() - self.round.sure as f32;
        } else {
            // What cannot be wrong pays even where guesses do not.
            let most = self.costs.at(ctx.history.len()).max_rows() - 1;
            forced::chain(&DraftContext { nodes: ctx.nodes.min(most), ..*ctx }, out);
            let size = self.best_size(ctx, out, 0.0);
            out.keep_best(size);
            self.round.sure = forced::count(out);
        }
        self.kept.remember(ctx.history, out);
        Ok(())
    }

    fn meanwhile(
        &mut self,
        ctx: &DraftContext<'_>,
        proposal: &Proposal,
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let asked = self.round.levels.is_some_and(|levels| levels > 0);
        if !asked || !self.overlap.wants() {
            return Ok(());
        }
        self.round.ahead = true;
        let ctx = DraftContext { chain: ctx.chain || self.options.tree == TreeSize::Chain, ..*ctx };
        let Some(clock) = &self.clock else {
            let mut batches = 0..AHEAD;
            return self.inner.meanwhile(&ctx, proposal, &mut || {
                more();
                batches.next().is_some()
            });
        };
        let usual = self.costs.at(ctx.history.len()).cost(proposal.len()) * self.overlap.stretch();
        let (start, mut last) = (clock(), 0.0);
        self.inner.meanwhile(&ctx, proposal, &mut || {
            // Half of a batch may run on after the pass: it is not lost if the guess is right.
            let now = (clock() - start) as f32;
            let batch = now - last;
            last = now;
            now + 0.5 * batch < usual && more()
        })
    }

    fn read_ahead(
        &mut self,
        history: &[crate::tensor::Token],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        if self.overlap.is_wanted() { self.inner.read_ahead(history, more) } else { Ok(()) }
    }

    fn prepare(&mut self, history: &[crate::tensor::Token]) -> Result<()> {
        self.ledger.begin_text();
        self.idle = Idle::default();
        self.inner.prepare(history)
    }

    fn reads_target(&self) -> bool {
        self.inner.reads_target()
    }

    fn save(&self) -> Result<()> {
        self.inner.save()
    }

    fn figures(&self, out: &mut Figures) {
        self.inner.figures(out);
        out.add(&self.figures);
        out.trust = self.trust.factor();
        out.costs = Some(self.costs.clone());
        out.habits = self.depth.habits();
    }

    fn note(&self) -> Option<String> {
        let own = self
            .accounts
            .iter()
            .all(|a| !a.allows())
            .then(|| "drafting rests: it does not pay on this text".to_owned());
        let notes: Vec<String> = own.into_iter().chain(self.inner.note()).collect();
        (!notes.is_empty()).then(|| notes.join("; "))
    }
}

/// Seconds of the wall clock.
fn wall() -> Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod losses;

#[cfg(test)]
mod tests;
