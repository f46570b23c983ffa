//! Counts and times of generation.

use std::time::Duration;

use super::Verdict;
use crate::draft::{Pass, Proposal};

/// Counts of drafted and accepted nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub drafted: u64,
    pub accepted: u64,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }

    /// Returns the acceptance rate: accepted divided by drafted.
    pub fn rate(self) -> f64 {
        ratio(self.accepted, self.drafted)
    }
}

/// Counts and times of one or more calls of [`generate`](super::generate).
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Tokens of the history before generation.
    pub prompt_tokens: u64,
    /// Tokens of the history that were not cached.
    pub prefilled: u64,
    /// Tokens generated.
    pub tokens: u64,
    /// Verification passes of the target.
    pub passes: u64,
    pub total: Tally,
    /// Passes by accepted length: entry `n` counts passes that added `n + 1` tokens, including the
    /// target's own.
    pub lengths: Vec<u64>,
    /// Entry `n` counts nodes at depth `n + 1`. A drafted node counts as accepted if its whole path
    /// is.
    pub by_depth: Vec<Tally>,
    pub by_source: Vec<(&'static str, Tally)>,
    pub prefill_time: Duration,
    /// Total time after prefill.
    pub decode_time: Duration,
    /// Parts of `decode_time`: drafting while the target waits, and passes of the target.
    pub draft_time: Duration,
    pub pass_time: Duration,
    /// Drafting while the target's device runs: part of `pass_time`.
    pub hidden_time: Duration,
    /// From the call to the first token.
    pub first_token: Option<Duration>,
}

impl Stats {
    /// Counts a round.
    pub fn round(
        &mut self,
        proposal: &Proposal,
        verdict: &Verdict,
        draft_time: Duration,
        pass: Pass,
    ) {
        self.passes += 1;
        self.draft_time += draft_time + pass.late;
        self.pass_time += pass.time - pass.late;
        self.hidden_time += pass.ahead - pass.late;
        bump(&mut self.lengths, verdict.path.len() - 1, |count| *count += 1);
        for (node, depth) in proposal.tree.depths().into_iter().enumerate().skip(1) {
            let one = Tally { drafted: 1, accepted: verdict.path.contains(&(node as u32)) as u64 };
            self.total.add(one);
            bump(&mut self.by_depth, depth as usize - 1, |tally| tally.add(one));
            self.source(proposal.source[node]).add(one);
        }
    }

    fn source(&mut self, source: &'static str) -> &mut Tally {
        let at = self.by_source.iter().position(|(name, _)| *name == source).unwrap_or_else(|| {
            self.by_source.push((source, Tally::default()));
            self.by_source.len() - 1
        });
        &mut self.by_source[at].1
    }

    /// Adds the rounds of other statistics, without their times and prompt tokens.
    pub fn add_rounds(&mut self, other: &Stats) {
        self.passes += other.passes;
        self.total.add(other.total);
        other
            .lengths
            .iter()
            .enumerate()
            .for_each(|(n, count)| bump(&mut self.lengths, n, |sum| *sum += count));
        other
            .by_depth
            .iter()
            .enumerate()
            .for_each(|(depth, one)| bump(&mut self.by_depth, depth, |sum| sum.add(*one)));
        other.by_source.iter().for_each(|(name, one)| self.source(name).add(*one));
    }

    /// Returns the number of tokens that the passes added.
    pub fn committed(&self) -> u64 {
        self.lengths.iter().enumerate().map(|(n, count)| (n as u64 + 1) * count).sum()
    }

    /// Returns the tokens per pass of the target; plain decoding has 1.
    pub fn accepted_length(&self) -> f64 {
        ratio(self.committed(), self.passes)
    }

    /// Returns the tokens of the history that were cached. The newest token is never cached,
    /// because a pass must score it.
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.prefilled + 1)
    }

    pub fn prefill_rate(&self) -> f64 {
        per_second(self.prefilled, self.prefill_time)
    }

    /// Returns the generated tokens per second of decoding.
    pub fn decode_rate(&self) -> f64 {
        per_second(self.tokens, self.decode_time)
    }
}

fn bump<T: Clone + Default>(list: &mut Vec<T>, at: usize, change: impl FnOnce(&mut T)) {
    if list.len() <= at {
        list.resize(at + 1, T::default());
    }
    change(&mut list[at]);
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn per_second(count: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_add_up() {
        let mut stats = Stats::default();
        let mut proposal = Proposal::root(0);
        let a = proposal.add(0, 1, 0.5, "x");
        proposal.add(0, 2, 0.2, "y");
        proposal.add(a, 3, 0.5, "y");
        let ms = Duration::from_millis;
        let pass = Pass { rows: 4, time: ms(20), ahead: ms(7), late: ms(2) };
        stats.round(&proposal, &Verdict { path: vec![0, 1, 3], next: 9 }, ms(3), pass);
        stats.round(
            &proposal,
            &Verdict { path: vec![0], next: 9 },
            ms(1),
            Pass { rows: 4, time: ms(10), ..Pass::default() },
        );
        assert_eq!([stats.draft_time, stats.hidden_time, stats.pass_time], [ms(6), ms(5), ms(28)]);
        assert_eq!(stats.total, Tally { drafted: 6, accepted: 2 });
        assert_eq!(
            stats.by_source,
            [("x", Tally { drafted: 2, accepted: 1 }), ("y", Tally { drafted: 4, accepted: 1 })]
        );
        assert_eq!(
            stats.by_depth,
            [Tally { drafted: 4, accepted: 1 }, Tally { drafted: 2, accepted: 1 }]
        );
        assert_eq!(stats.lengths, [1, 0, 1]);
        assert_eq!((stats.accepted_length(), stats.committed()), (2.0, 4));
        let mut twice = stats.clone();
        twice.add_rounds(&stats);
        assert_eq!((twice.accepted_length(), twice.lengths.clone()), (2.0, vec![2, 0, 2]));
        assert_eq!(
            (twice.by_source[1].1.drafted, twice.by_depth[0].accepted, twice.total.drafted),
            (8, 2, 12)
        );
    }
}
