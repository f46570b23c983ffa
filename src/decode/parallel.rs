//! Several texts through one target: each round scores a tree of every text in one pass.
//!
//! A pass reads the weights once, however few rows it has, so texts that share it come sooner
//! together than one after the other. What a row computes does not depend on the rows beside it:
//! each text is the one that it is alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::{Flow, Stop, room, verify};
use crate::draft::{
    DraftContext, Drafter, Outcome, Pass, Policy, Proposal, Round, Verified, forced, verified,
};
use crate::engine::{Scores, Timeline, TokenTree};
use crate::sampler::Sampler;
use crate::tensor::Token;

/// A text that has a sequence of the target.
struct Text {
    history: Vec<Token>,
    sampler: Sampler,
    /// Tokens that may still come, at least one.
    left: usize,
    proposal: Proposal,
    /// What the target said of the last round's tree, and the length of the history then.
    scored: Option<(usize, TokenTree, Scores)>,
}

/// A text and the sequence that it was given, or why there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    At(usize),
    Done(Stop),
}

/// A text that came to its end in a round. Its error is its own: the others go on.
pub struct Ended {
    pub sequence: usize,
    pub history: Vec<Token>,
    pub stop: Result<Stop>,
}

/// A target and the texts that share it.
pub struct Parallel<'a> {
    target: Timeline,
    /// By sequence, as the drafters.
    texts: Vec<Option<Text>>,
    drafters: Vec<Box<dyn Drafter>>,
    policy: Policy,
    stop_ids: &'a [Token],
    /// Looked at between prefill chunks.
    interrupt: &'a AtomicBool,
    scores: Scores,
    passes: u64,
}

impl<'a> Parallel<'a> {
    /// `drafters` has one for each of the target's sequences; `policy` says how many of
    /// their guesses a pass takes.
    pub fn new(
        target: Timeline,
        drafters: Vec<Box<dyn Drafter>>,
        policy: Policy,
        stop_ids: &'a [Token],
        interrupt: &'a AtomicBool,
    ) -> Self {
        assert_eq!(drafters.len(), target.sequences(), "a sequence has a drafter of its own");
        let texts = drafters.iter().map(|_| None).collect();
        Parallel {
            target,
            texts,
            drafters,
            policy,
            stop_ids,
            interrupt,
            scores: Scores::default(),
            passes: 0,
        }
    }

    /// Texts that are growing.
    pub fn running(&self) -> usize {
        self.texts.iter().flatten().count()
    }

    pub fn has_room(&self) -> bool {
        self.running() < self.texts.len()
    }

    pub fn target(&self) -> &Timeline {
        &self.target
    }

    /// Passes that scored anything.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The drafter of the first sequence.
    pub fn drafter(&self) -> &dyn Drafter {
        &*self.drafters[0]
    }

    /// Reads a prompt into a free sequence, that which holds most of it. Errors as for
    /// [`generate`](super::generate).
    pub fn admit(
        &mut self,
        history: Vec<Token>,
        sampler: Sampler,
        max_tokens: usize,
    ) -> Result<Admitted> {
        let free = (0..self.texts.len()).filter(|s| self.texts[*s].is_none());
        let sequence =
            free.max_by_key(|s| (self.target.common(*s, &history), std::cmp::Reverse(*s)));
        let sequence = sequence.expect("the caller has seen that there is room");
        let left = max_tokens.min(room(&self.target, &history)?);
        if left == 0 {
            return Ok(Admitted::Done(Stop::Length));
        }
        let past = &history[..history.len() - 1];
        self.target.select(sequence);
        if !self.target.sync(past, &mut |_| !self.interrupt.load(Ordering::Relaxed))? {
            return Ok(Admitted::Done(Stop::Interrupt));
        }
        self.drafters[sequence].prepare(past)?;
        self.policy.begin_text();
        let proposal = Proposal::root(history[past.len()]);
        self.texts[sequence] = Some(Text { history, sampler, left, proposal, scored: None });
        Ok(Admitted::At(sequence))
    }

    /// One pass, and what it brings: `on_token` hears of each text's tokens and may end that text.
    /// Returns the texts that came to an end; their sequences are free again. An error is one that
    /// no text would survive.
    pub fn round(&mut self, on_token: &mut dyn FnMut(usize, Token) -> Flow) -> Result<Vec<Ended>> {
        let rows = self.propose()?;
        if rows == 0 {
            return Ok(Vec::new());
        }
        let begun = Instant::now();
        let mut scores = self.score()?;
        let (mut ended, mut paths) = (Vec::new(), Vec::new());
        for sequence in 0..self.texts.len() {
            let Some(text) = &mut self.texts[sequence] else { continue };
            let scores = scores.pop().expect("each text has its scores");
            let learns = self.drafters[sequence].reads_target();
            let stop = text.take(scores, learns, self.stop_ids, &mut paths, &mut |token| {
                on_token(sequence, token)
            });
            if let Some(stop) = stop.transpose() {
                let text = self.texts[sequence].take().expect("just seen");
                ended.push(Ended { sequence, history: text.history, stop });
            }
        }
        self.passes += 1;
        let pass = Pass { rows, time: begun.elapsed(), ..Pass::default() };
        self.policy.observe(&Outcome { pass, paths: &paths });
        let growing = self
            .texts
            .iter()
            .enumerate()
            .filter_map(|(s, text)| Some((s, text.as_ref()?.history.split_last()?.1)));
        self.target.adopt_each(&growing.collect::<Vec<_>>())?;
        Ok(ended)
    }

    /// Makes a tree for every text, and of all of them as many nodes as pay; returns the rows.
    fn propose(&mut self) -> Result<usize> {
        let (texts, vocab) = (self.running(), self.target.engine().vocab());
        let position =
            self.texts.iter().flatten().map(|text| text.history.len()).max().unwrap_or(0);
        let most = self.target.engine().max_rows().saturating_sub(texts);
        let begun = Instant::now();
        let mut recent_match = false;
        for (text, drafter) in self.texts.iter().zip(&mut self.drafters) {
            recent_match |=
                text.as_ref().is_some_and(|text| drafter.has_recent_match(&text.history));
        }
        let allowed = self.policy.allow(&Round { texts, position, most, recent_match });
        let texts = self
            .texts
            .iter_mut()
            .zip(&mut self.drafters)
            .filter_map(|(text, drafter)| Some((text.as_mut()?, drafter)));
        for (text, drafter) in texts {
            let ctx = DraftContext {
                history: &text.history,
                sampler: &text.sampler,
                nodes: allowed.nodes,
                depth: allowed.depth.min(text.left - 1),
                vocab,
                chain: allowed.chain,
                draft_steps: allowed.draft_steps,
                rate: allowed.rate,
                verified: text.scored.as_ref().map(|(position, tree, scores)| Verified {
                    position: *position,
                    tree,
                    scores,
                }),
            };
            text.proposal.reset(ctx.root());
            if allowed.only_forced {
                forced::chain(&ctx, &mut text.proposal);
            } else {
                drafter.propose(&ctx, &mut text.proposal)?;
            }
            text.proposal.limit(&ctx);
        }
        let mut proposals: Vec<&mut Proposal> =
            self.texts.iter_mut().flatten().map(|text| &mut text.proposal).collect();
        self.policy.choose(&mut proposals, begun.elapsed(), 0);
        Ok(proposals.iter().map(|p| p.len()).sum())
    }

    /// Scores all trees. The scores of the last text come first.
    fn score(&mut self) -> Result<Vec<Scores>> {
        let mut wanted = Some((1, usize::MAX));
        for (text, drafter) in
            self.texts.iter().zip(&self.drafters).filter_map(|(text, d)| Some((text.as_ref()?, d)))
        {
            // A list that is long enough to pick from may still be too short to learn from.
            let listed = if drafter.reads_target() { verified::BEST } else { 1 };
            wanted = wanted
                .zip(text.sampler.decisive())
                .map(|(all, own)| (all.0.max(own.0).max(listed), all.1.min(own.1)));
        }
        let trees = self
            .texts
            .iter()
            .enumerate()
            .filter_map(|(s, text)| Some((s, &text.as_ref()?.proposal.tree)));
        let trees: Vec<_> = trees.collect();
        self.target.engine_mut().want(wanted);
        self.target.forward_each(&trees, &mut self.scores)?;
        Ok(trees.iter().rev().map(|(_, tree)| self.scores.split_last(tree.len())).collect())
    }
}

impl Text {
    /// Grows by what the pass brings, and adds the accepted nodes to `paths`. Returns what ends it.
    fn take(
        &mut self,
        scores: Scores,
        learns: bool,
        stop_ids: &[Token],
        paths: &mut Vec<Vec<u32>>,
        on_token: &mut dyn FnMut(Token) -> Flow,
    ) -> Result<Option<Stop>> {
        let verdict = verify(&self.proposal.tree, &scores, &self.sampler, &self.history);
        paths.push(verdict.as_ref().map_or(vec![0], |verdict| verdict.path.clone()));
        let verdict = verdict?;
        if learns {
            self.scored = Some((self.history.len(), self.proposal.tree.clone(), scores));
        }
        for token in verdict.tokens(&self.proposal.tree) {
            if stop_ids.contains(&token) {
                return Ok(Some(Stop::Token(token)));
            }
            self.history.push(token);
            self.left -= 1;
            if on_token(token) == Flow::Stop {
                return Ok(Some(Stop::Receiver));
            }
            if self.left == 0 {
                return Ok(Some(Stop::Length));
            }
        }
        Ok(None)
    }
}
