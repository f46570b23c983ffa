//! A text of the scheduler, and the request to the drafter for it.

use std::time::Instant;

use anyhow::Result;
use rayon::prelude::*;

use super::{Request, TokenLogProbs};
use crate::draft::{Allowance, DraftContext, DraftRequest, Proposal, Verified};
use gemma_base::tensor::Token;
use gemma_base::util::threads;
use gemma_model::engine::{Scores, TokenTree};

/// A text that has a sequence of the target.
pub struct GrowingText {
    pub request: Request,
    pub admitted: Instant,
    pub stage: TextStage,
    /// It grows, but is not part of this pass: its grammar's mask is not computed yet.
    pub rests: bool,
    pub proposal: Proposal,
    /// The tree of the last round, the length of its history, and the row of its root among the
    /// scores of the last pass.
    pub scored: TokenTree,
    pub scored_at: Option<(usize, usize)>,
    /// The end of the prompt's part that the pass reads.
    pub chunk: TokenTree,
    /// Length of the prefix that the prompt shares with earlier texts, in whole pages; 0 once it is
    /// read.
    pub fork: usize,
    /// Log-probabilities of the tokens since the last call for them.
    pub log_probs: Vec<TokenLogProbs>,
}

/// Progress of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStage {
    Admitted,
    /// Its prompt is being read.
    Reads,
    /// It grows since this moment.
    Grows(Instant),
}

impl GrowingText {
    pub fn grows(&self) -> bool {
        matches!(self.stage, TextStage::Grows(_))
    }

    pub fn takes_part(&self) -> bool {
        self.grows() && !self.rests
    }

    pub fn is_read(&self) -> bool {
        self.stage == TextStage::Reads
    }

    /// Returns all but the newest token, which is the root of the next tree.
    pub fn past(&self) -> &[Token] {
        self.request.history.split_last().map_or(&[], |(_, past)| past)
    }

    /// Takes log-probabilities of the prompt from the rows of its part, which begin with `row` and
    /// stand behind `position` tokens. The row of a token has those of the next one.
    pub fn take_prompt_scores(
        &mut self,
        scores: &Scores,
        row: usize,
        position: usize,
    ) -> Result<()> {
        let Request { history, top_log_probs, scored, .. } = &mut self.request;
        let (Some(scored), Some(n)) = (scored, *top_log_probs) else { return Ok(()) };
        let entry = |at| TokenLogProbs::new(scores.row(row + at - position - 1), history[at], n);
        let new = (position + 1).max(*scored)..position + 1 + self.chunk.len();
        threads::prepare_common_pool();
        let new: Vec<TokenLogProbs> = new.into_par_iter().map(entry).collect::<Result<_>>()?;
        *scored += new.len();
        self.log_probs.extend(new);
        Ok(())
    }
}

/// Returns a request to the drafter for each text that grows, with the target's scores of its last
/// tree. `anew` empties the proposals.
pub fn draft_requests<'t>(
    texts: &'t mut [Option<GrowingText>],
    scores: &'t Scores,
    allowed: &Allowance,
    vocab: usize,
    anew: bool,
) -> Vec<DraftRequest<'t>> {
    let texts = texts.iter_mut().enumerate();
    let growing =
        texts.filter_map(|(s, text)| Some((s, text.as_mut().filter(|t| t.takes_part())?)));
    let request = |(sequence, text): (usize, &'t mut GrowingText)| {
        let GrowingText { request, proposal, scored, scored_at, .. } = text;
        request.sampler.settle(&request.history);
        let Request { history, sampler, max_tokens, .. } = &*request;
        let ctx = DraftContext {
            history,
            sampler,
            // Each node needs a mask of its own.
            nodes: if sampler.is_slow() { 0 } else { allowed.nodes },
            depth: allowed.depth.min(max_tokens - 1),
            vocab,
            chain: allowed.chain,
            draft_steps: allowed.draft_steps,
            rate: allowed.rate,
            verified: scored_at.filter(|_| anew).map(|(position, first)| Verified {
                position,
                tree: scored,
                scores,
                first,
            }),
        };
        if anew {
            proposal.reset(ctx.root());
        }
        DraftRequest { text: sequence, ctx, out: proposal }
    };
    growing.map(request).collect()
}
