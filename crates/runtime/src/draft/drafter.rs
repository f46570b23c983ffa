//! The interface of drafters.
//!
//! A drafter is asked once a round. It reads the outcome of its last proposal off the history, and
//! the target's scores off [`Verified`]. Its state derives from the history.

use std::time::Duration;

use anyhow::Result;

use super::figures::DraftFigures;
use super::proposal::Proposal;
use super::verified::Verified;
use gemma_base::tensor::Token;
use gemma_model::engine::Assistant;
use gemma_model::sampler::Sampler;

/// One text, and the bounds of its proposal.
#[derive(Clone, Copy)]
pub struct DraftContext<'a> {
    /// All tokens so far, at least one; the last one is the root of the tree.
    pub history: &'a [Token],
    pub sampler: &'a Sampler,
    /// The most nodes to propose, the root not counted.
    pub nodes: usize,
    /// The longest path. Deeper nodes would pass the end of the text.
    pub depth: usize,
    /// Ids from here on are unknown to the target.
    pub vocab: usize,
    /// Propose one line, no branches.
    pub chain: bool,
    /// The most passes of a draft model before the target's. With 0 only free sources are asked.
    pub draft_steps: usize,
    /// Tokens a second that plain decoding brings, for drafters that weigh their own time; `None`
    /// requests for decisions that do not depend on the clock.
    pub rate: Option<f32>,
    /// The target's scores of the last round's tree, where [`Drafter::reads_target`] requests for
    /// them.
    pub verified: Option<Verified<'a>>,
}

impl DraftContext<'_> {
    /// Returns the newest token.
    pub fn root(&self) -> Token {
        *self.history.last().expect("a history has at least one token")
    }
}

/// A request for the proposal of one text.
pub struct DraftRequest<'a> {
    /// The text's place among those that are drafted for: its sequence of the target.
    pub text: usize,
    pub ctx: DraftContext<'a>,
    /// Holds only the root before candidates are added.
    pub out: &'a mut Proposal,
}

impl DraftRequest<'_> {
    /// Returns whether the proposal must stay empty.
    pub fn is_idle(&self) -> bool {
        self.ctx.nodes == 0 || self.ctx.depth == 0
    }
}

/// A maker of proposals for all texts that grow.
pub trait Drafter {
    /// Adds candidates for each of these texts. Returns the number of draft model passes. A drafter
    /// may use the target's assistant, if it has one.
    fn propose(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        assistant: Option<&mut dyn Assistant>,
    ) -> Result<usize>;
    /// Drafts ahead, below these proposals, while the target's device scores them and `more`
    /// returns true. The contexts are those of the proposals. Only the cost and quality of the next
    /// proposals depend on it.
    fn meanwhile(
        &mut self,
        _requests: &[DraftRequest<'_>],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads a part of a text's prompt while the target's device works and `more` returns true.
    fn read_ahead(
        &mut self,
        _text: usize,
        _history: &[Token],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads a new text's prompt ahead of the first proposal, as much of its end as takes about
    /// `most`.
    fn prepare(&mut self, _text: usize, _history: &[Token], _most: Duration) -> Result<()> {
        Ok(())
    }
    /// Returns whether [`DraftContext::verified`] is of use.
    fn reads_target(&self) -> bool {
        false
    }
    /// Returns whether the text's ending, of some length, occurred before. The check is cheap and
    /// serves rounds that would not ask.
    fn has_recent_match(&mut self, _text: usize, _history: &[Token]) -> bool {
        false
    }
    /// Adds its counts so far.
    fn figures(&self, _out: &mut DraftFigures) {}
    /// Returns why nothing is being proposed, if so.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Proposes nothing: plain decoding.
pub struct NoDraft;

impl Drafter for NoDraft {
    fn propose(
        &mut self,
        _: &mut [DraftRequest<'_>],
        _: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        Ok(0)
    }
}
