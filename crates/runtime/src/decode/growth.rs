//! A text that the scheduler generates, and the draft request for it.

use std::time::Instant;

use anyhow::Result;
use rayon::prelude::*;

use super::{Request, TokenLogProbs};
use crate::draft::{Allowance, DraftContext, DraftRequest, Proposal, Verified};
use gemma_base::tensor::Token;
use gemma_base::util::threads;
use gemma_model::engine::{Scores, TokenTree};

/// A text that occupies a sequence of the target.
pub struct GrowingText {
    pub request: Request,
    pub admitted: Instant,
    pub stage: TextStage,
    /// Set if the text is left out of this pass because its grammar mask is not ready.
    pub rests: bool,
    pub proposal: Proposal,
    /// Tree of the last round. `scored_at` is the length of its history and the index of its root
    /// among the scored rows of the last pass.
    pub scored: TokenTree,
    pub scored_at: Option<(usize, usize)>,
    /// The part of the prompt that this pass reads.
    pub chunk: TokenTree,
    /// Length of the prefix shared with earlier texts, in whole pages; 0 after it was read.
    pub fork: usize,
    /// Log-probabilities of the tokens since the last request for them.
    pub log_probs: Vec<TokenLogProbs>,
}

/// Stage of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStage {
    Admitted,
    /// Its prompt is being prefilled.
    Reads,
    /// Its answer is being generated, since this moment.
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

    /// Returns the history without its newest token, which is the root of the next tree.
    pub fn past(&self) -> &[Token] {
        self.request.history.split_last().map_or(&[], |(_, past)| past)
    }

    /// Computes log-probabilities of prompt tokens from the scored rows of the prompt's part.
    ///
    /// The part starts at index `row` of the scores and follows `position` tokens. A token's row
    /// predicts the next token.
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

/// Returns a draft request for each generating text, with the target's scores of its last tree.
///
/// With `is_new`, a round begins, and the proposals are emptied first.
pub fn draft_requests<'t>(
    texts: &'t mut [Option<GrowingText>],
    scores: &'t Scores,
    allowed: &Allowance,
    vocab: usize,
    is_new: bool,
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
            // Each node would need its own mask.
            nodes: if sampler.is_slow() { 0 } else { allowed.nodes },
            depth: allowed.depth.min(max_tokens - 1),
            vocab,
            chain: allowed.chain,
            draft_steps: allowed.draft_steps,
            rate: allowed.rate,
            verified: scored_at.filter(|_| is_new).map(|(position, first)| Verified {
                position,
                tree: scored,
                scores,
                first,
            }),
        };
        if is_new {
            proposal.reset(ctx.root());
        }
        DraftRequest { text: sequence, ctx, out: proposal }
    };
    growing.map(request).collect()
}
