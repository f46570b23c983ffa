//! The interface of drafters.
//!
//! A drafter is called once per round. It infers the outcome of its last proposal from the history,
//! and receives the target's scores in [`Verified`]. Its state is a function of the history.

use std::time::Duration;

use anyhow::Result;

use super::figures::DraftFigures;
use super::proposal::Proposal;
use super::verified::Verified;
use gemma_base::tensor::Token;
use gemma_model::engine::Assistant;
use gemma_model::sampler::Sampler;

/// One text, and the limits of its proposal.
#[derive(Clone, Copy)]
pub struct DraftContext<'a> {
    /// All tokens so far, at least one. The last one is the root of the tree.
    pub history: &'a [Token],
    pub sampler: &'a Sampler,
    /// The most nodes to propose, without the root.
    pub nodes: usize,
    /// The most depth. Deeper nodes would exceed the end of the text.
    pub depth: usize,
    /// First id that is unknown to the target.
    pub vocab: usize,
    /// Propose a chain without branches.
    pub chain: bool,
    /// The most draft model passes before the target's pass. With 0, only free sources are used.
    pub draft_steps: usize,
    /// Plain decoding rate in tokens per second, for drafters that weigh their own time. `None`
    /// makes decisions independent of the clock.
    pub rate: Option<f32>,
    /// The target's scores of the last round's tree, if [`Drafter::reads_target`] returns true.
    pub verified: Option<Verified<'a>>,
}

impl DraftContext<'_> {
    /// Returns the newest token.
    pub fn root(&self) -> Token {
        *self.history.last().expect("a history has at least one token")
    }
}

/// A request to draft for one text.
pub struct DraftRequest<'a> {
    /// Index of the text: its sequence of the target.
    pub text: usize,
    pub ctx: DraftContext<'a>,
    /// Result. Initially it holds only the root.
    pub out: &'a mut Proposal,
}

impl DraftRequest<'_> {
    /// Returns whether the proposal must stay empty.
    pub fn is_idle(&self) -> bool {
        self.ctx.nodes == 0 || self.ctx.depth == 0
    }
}

/// Creates draft proposals for all generating texts.
pub trait Drafter {
    /// Adds candidates for each of these texts. Returns the number of draft model passes. A drafter
    /// may use the target's assistant, if there is one.
    fn propose(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        assistant: Option<&mut dyn Assistant>,
    ) -> Result<usize>;
    /// Extends these proposals ahead of time, while the target's device scores them and `more`
    /// returns true. The contexts are those of the proposals. This only affects cost and quality of
    /// the next proposals.
    fn draft_ahead(
        &mut self,
        _requests: &[DraftRequest<'_>],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads part of a text's prompt while the target's device runs and `more` returns true.
    fn read_ahead(
        &mut self,
        _text: usize,
        _history: &[Token],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads a new text's prompt before the first proposal: as much of its end as takes about
    /// `most`.
    fn prepare(&mut self, _text: usize, _history: &[Token], _most: Duration) -> Result<()> {
        Ok(())
    }
    /// Returns whether the drafter uses [`DraftContext::verified`].
    fn reads_target(&self) -> bool {
        false
    }
    /// Returns whether the text's ending occurred earlier in the text. The check is cheap and can
    /// trigger drafting in rounds that would not draft.
    fn has_recent_match(&mut self, _text: usize, _history: &[Token]) -> bool {
        false
    }
    /// Adds its counts so far to `out`.
    fn figures(&self, _out: &mut DraftFigures) {}
    /// Returns why nothing is being proposed, if so.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Proposes nothing, for plain decoding.
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
