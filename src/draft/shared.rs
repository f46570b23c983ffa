//! How much to draft where several texts share a pass: of all their guesses as many as make the
//! most tokens a second together.
//!
//! A pass over the newest tokens of `T` texts costs `c(T)` and brings `T` tokens. Guesses of any of
//! them make it longer, the likeliest first, as long as tokens per second grow by that; the rule of
//! [`length`](super::length), over all texts at once. Chances are trusted as far as they came true,
//! and what guesses lose against passes without any is bounded ([`guard`](super::guard)); the unit
//! is the pass over the newest tokens alone, and the tokens that such a pass brings each text.

use super::cost::Costs;
use super::guard::{Account, Ledger, MARGIN, Pardons, Trust};
use super::{DraftOptions, Proposal, TreeSize, forced};

/// How much of the texts' guesses a pass takes.
pub struct Shared {
    costs: Costs,
    options: DraftOptions,
    /// Whether what passes take changes what they are believed to cost.
    clock: bool,
    trust: Trust,
    account: Account,
    ledger: Ledger,
    pardons: Pardons,
    round: Round,
}

/// The pass whose outcome is not known yet.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// Guesses were asked for, which took so many seconds.
    asked: bool,
    drafting: f32,
    /// Guesses, those of them that cannot fail, and tokens that the others promise, before any
    /// doubt.
    drafted: usize,
    sure: usize,
    expected: f32,
}

impl Shared {
    /// `clock: false` decides by `costs` alone, for tests that want the same trees each time.
    pub fn new(costs: Costs, options: DraftOptions, clock: bool) -> Self {
        let (trust, account, ledger, pardons) = Default::default();
        Shared { costs, options, clock, trust, account, ledger, pardons, round: Round::default() }
    }

    /// Another text has come.
    pub fn begin_text(&mut self) {
        self.ledger.begin_text();
    }

    /// Nodes, besides its root, to ask of each of `running` texts, the longest of `position`
    /// tokens, where a pass takes `most` of them; `None` where only what cannot fail is wanted.
    pub fn nodes(&mut self, running: usize, position: usize, most: usize) -> Option<usize> {
        let nodes = match self.options.fixed() {
            Some(n) => Some(n.min(most / running.max(1))),
            None => self
                .account
                .allows()
                .then(|| self.affordable(running, position).min(most))
                .filter(|nodes| *nodes > 0),
        };
        self.round = Round { asked: nodes.is_some(), ..Round::default() };
        nodes
    }

    /// The most guesses that may all fail.
    fn affordable(&mut self, running: usize, position: usize) -> usize {
        let curve = self.costs.at(position);
        let most = (1.0 + self.ledger.room()) * curve.cost(running);
        (1..)
            .take_while(|nodes| {
                running + nodes <= curve.max_rows() && curve.cost(running + nodes) <= most
            })
            .count()
    }

    pub fn is_chain(&self) -> bool {
        self.options.tree == TreeSize::Chain
    }

    /// The longest line of guesses where `left` would be of use.
    pub fn depth(&self, left: usize) -> usize {
        left.min(self.options.tokens.unwrap_or(usize::MAX))
    }

    /// Leaves the texts the guesses that pay, made in so many seconds.
    pub fn limit(&mut self, proposals: &mut [&mut Proposal], position: usize, seconds: f32) {
        self.round.drafting = if self.clock { seconds } else { 0.0 };
        if self.options.fixed().is_none() {
            let keep = self.choose(proposals, position);
            proposals.iter_mut().zip(keep).for_each(|(proposal, n)| proposal.keep_best(n));
        }
        self.round.drafted = proposals.iter().map(|p| p.len() - 1).sum();
        self.round.sure = proposals.iter().map(|p| forced::count(p)).sum();
        self.round.expected =
            proposals.iter().map(|p| p.expected()).sum::<f32>() - self.round.sure as f32;
    }

    /// How many nodes each text keeps.
    fn choose(&mut self, proposals: &[&mut Proposal], position: usize) -> Vec<usize> {
        let (trust, texts) = (self.trust.factor(), proposals.len());
        let affordable = self.affordable(texts, position);
        let mut order: Vec<(f32, bool, usize)> = Vec::new();
        for (text, proposal) in proposals.iter().enumerate() {
            order.extend(
                (1..proposal.len())
                    .map(|node| (proposal.chance[node], forced::is_sure(proposal, node), text)),
            );
        }
        // What cannot fail comes first, and can be afforded.
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let sure = order.iter().filter(|(_, sure, _)| *sure).count();
        let (curve, drafting) = (self.costs.at(position), self.round.drafting);
        order.truncate(affordable.max(sure).min(curve.max_rows().saturating_sub(texts)));
        let mut tokens = texts as f32;
        let mut best = (0, MARGIN * tokens / (curve.cost(texts) + drafting));
        for (i, (chance, sure, _)) in order.iter().enumerate() {
            tokens += if *sure { 1.0 } else { trust * chance };
            let rate = tokens / (curve.cost(texts + i + 1) + drafting);
            if rate > best.1 {
                best = (i + 1, rate);
            }
        }
        let mut keep = vec![0; texts];
        order[..best.0].iter().for_each(|(_, _, text)| keep[*text] += 1);
        keep
    }

    /// Takes in a pass over `rows` rows of `running` texts: accepted guesses, and seconds.
    pub fn observe(
        &mut self,
        running: usize,
        position: usize,
        rows: usize,
        taken: usize,
        seconds: f32,
    ) {
        let round = std::mem::take(&mut self.round);
        let curve = self.costs.at(position);
        // A pass out of the ordinary is booked as what its size is known to cost.
        if self.clock && !self.pardons.grants(rows, seconds / curve.cost(rows)) {
            curve.observe(rows, seconds);
            curve.temper(rows);
        }
        let passes = (curve.cost(rows) + round.drafting) / curve.cost(running);
        let tokens = 1.0 + taken as f32 / running as f32;
        self.ledger.book(tokens, passes);
        if round.drafted > round.sure {
            self.trust.observe(round.expected, taken.saturating_sub(round.sure) as f32);
        } else {
            self.trust.fade();
        }
        match round.asked {
            true => self.account.book(tokens, passes),
            false => self.account.pass(),
        }
    }

    /// What passes have come to cost.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }
}

#[cfg(test)]
mod tests {
    use super::super::CostCurve;
    use super::*;

    fn proposal(chances: &[f32]) -> Proposal {
        let mut p = Proposal::root(1);
        chances.iter().enumerate().for_each(|(i, chance)| {
            p.add(0, 10 + i as u32, *chance, "x");
        });
        p
    }

    fn kept(points: &[(usize, f32)], options: DraftOptions, chances: &[&[f32]]) -> Vec<usize> {
        let mut all: Vec<Proposal> = chances.iter().map(|c| proposal(c)).collect();
        let mut all: Vec<&mut Proposal> = all.iter_mut().collect();
        Shared::new(Costs::new(CostCurve::new(points), 0), options, false).limit(&mut all, 10, 0.0);
        all.iter().map(|p| p.len() - 1).collect()
    }

    #[test]
    fn the_likeliest_guesses_of_all_texts_are_kept() {
        let flat = [(1, 1.0), (6, 1.0), (7, 5.0), (32, 9.0)];
        let auto = DraftOptions::default();
        // Three of six rows are the texts' own.
        assert_eq!(kept(&flat, auto, &[&[0.9, 0.2], &[0.1], &[0.8, 0.5, 0.3]]), [1, 0, 2]);
        assert_eq!(kept(&flat, auto, &[&[0.2], &[], &[]]), [1, 0, 0]);
        assert_eq!(
            kept(&[(1, 1.0), (32, 32.0)], auto, &[&[0.9], &[0.9]]),
            [0, 0],
            "rows have their price"
        );
        let fixed = DraftOptions { tree: TreeSize::Nodes(2), tokens: None };
        assert_eq!(kept(&flat, fixed, &[&[0.1, 0.1], &[0.1]]), [2, 1]);
        // More texts than the curve has rows.
        assert_eq!(kept(&[(1, 1.0), (2, 1.0)], auto, &[&[0.9], &[0.9], &[0.9]]), [0, 0, 0]);
    }

    #[test]
    fn passes_out_of_the_ordinary_change_no_price() {
        let costs = Costs::new(CostCurve::new(&[(1, 1.0), (32, 2.0)]), 0);
        let mut shared = Shared::new(costs.clone(), DraftOptions::default(), true);
        [2, 3, 8].into_iter().for_each(|rows| shared.observe(2, 10, rows, 0, 400.0));
        assert_eq!(shared.costs(), &costs, "the first of their sizes: kernels were compiled");
        (0..40).for_each(|_| shared.observe(2, 10, 8, 0, 1.9));
        let before = shared.costs().clone();
        shared.observe(2, 10, 8, 0, 60.0);
        assert_eq!(shared.costs(), &before, "held up once");
        (0..40).for_each(|_| shared.observe(2, 10, 8, 0, 4.0));
        assert!(shared.costs.at(10).cost(8) > 3.0, "but not without end");
    }

    #[test]
    fn drafting_rests_where_it_does_not_pay() {
        let curve = CostCurve::new(&[(1, 1.0), (8, 1.5), (32, 4.0)]);
        let mut shared = Shared::new(Costs::new(curve, 0), DraftOptions::default(), false);
        // As many as may fail at once: for .3 of a pass at first, for a whole one once there are
        // tokens enough to make up for it.
        assert_eq!(shared.nodes(2, 10, 100), Some(4));
        for _ in 0..64 {
            shared.round = Round::default();
            shared.observe(2, 10, 2, 0, 0.0);
        }
        assert!(shared.nodes(2, 10, 100) >= Some(12), "and 1 % of what there was");
        assert_eq!(shared.nodes(2, 10, 5), Some(5));
        let mut rested = 0;
        for _ in 0..200 {
            if shared.nodes(2, 10, 100).is_none() {
                rested += 1;
                shared.limit(&mut [&mut proposal(&[]), &mut proposal(&[])], 10, 0.0);
            } else {
                shared.limit(&mut [&mut proposal(&[0.9, 0.9]), &mut proposal(&[0.9])], 10, 0.0);
            }
            shared.observe(2, 10, 2 + shared.round.drafted, 0, 0.0);
        }
        assert!(rested > 100, "{rested}");
        let fixed = DraftOptions { tree: TreeSize::Chain, tokens: Some(3) };
        let mut shared = Shared::new(Costs::new(CostCurve::guess(), 0), fixed, false);
        assert_eq!(
            (shared.nodes(4, 10, 100), shared.nodes(4, 10, 8), shared.depth(9), shared.depth(1)),
            (Some(3), Some(2), 3, 1)
        );
        assert!(shared.is_chain());
    }
}
