//! Floor 4: guessing what the target will pick. A guess can make the text come sooner; it cannot
//! change it.
//!
//! A drafter is asked once a round. What became of its last guess it reads off the history; what
//! the target thought of it, off [`Verified`]. Adding a source of guesses: a feature in [`mix`],
//! filled in [`source`]; its state derives from `history`.

pub mod automaton;
pub mod builder;
pub mod costs;
pub mod figures;
pub mod forced;
pub mod lm;
pub mod mix;
pub mod options;
pub mod policy;
pub mod prior;
pub mod proposal;
pub mod round;
pub mod source;
pub mod table;
pub mod verified;

use anyhow::Result;

pub use builder::{Mixing, TreeBuilder};
pub use costs::{CostCurve, Costs};
pub use figures::{Figures, Habits};
pub use lm::Lm;
pub use options::{Ahead, DraftOptions, TreeSize};
pub use policy::Policy;
pub use proposal::Proposal;
pub use round::{Allowance, Outcome, Pass, Round};
pub use table::Table;
pub use verified::Verified;

use crate::sampler::Sampler;
use crate::tensor::Token;

/// What a drafter may know and how much it may propose.
#[derive(Clone, Copy)]
pub struct DraftContext<'a> {
    /// All tokens so far, at least one; the last one is the root of the tree.
    pub history: &'a [Token],
    pub sampler: &'a Sampler,
    /// The most nodes to propose, the root not counted.
    pub nodes: usize,
    /// The longest path of use: deeper nodes would pass the end of the text.
    pub depth: usize,
    /// Ids from here on are unknown to the target.
    pub vocab: usize,
    /// Propose one line, no branches.
    pub chain: bool,
    /// The most passes of a draft model before the target's; with 0 only guesses that cost nothing
    /// are wanted.
    pub draft_steps: usize,
    /// Tokens a second that plain decoding brings, for drafters that weigh their own time; `None`
    /// asks for decisions that do not depend on the clock.
    pub rate: Option<f32>,
    /// What the target said of the last round's tree, where [`Drafter::reads_target`] asks for it.
    pub verified: Option<Verified<'a>>,
}

impl DraftContext<'_> {
    /// The newest token.
    pub fn root(&self) -> Token {
        *self.history.last().expect("a history has at least one token")
    }
}

/// One text's part of a round of drafting.
pub struct Ask<'a> {
    /// The text's place among those that are drafted for: its sequence of the target.
    pub text: usize,
    pub ctx: DraftContext<'a>,
    /// Holds the root alone before guesses are added.
    pub out: &'a mut Proposal,
}

impl Ask<'_> {
    /// Whether no guess is of use.
    pub fn is_idle(&self) -> bool {
        self.ctx.nodes == 0 || self.ctx.depth == 0
    }
}

/// A source of guesses for all texts that grow.
pub trait Drafter {
    /// Adds guesses for each of these texts. Returns how many passes of a draft model that took.
    fn propose(&mut self, asks: &mut [Ask<'_>]) -> Result<usize>;
    /// Works ahead on what may follow these proposals, which the target's device scores at this
    /// moment, for as long as `more` says so. The contexts are those that they were made for.
    /// Nothing depends on it but how much the next proposals cost and offer.
    fn meanwhile(&mut self, _asks: &[Ask<'_>], _more: &mut dyn FnMut() -> bool) -> Result<()> {
        Ok(())
    }
    /// Reads what it can of a text's prompt while the target's device does, for as long as `more`
    /// says so.
    fn read_ahead(
        &mut self,
        _text: usize,
        _history: &[Token],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Another text takes this place: reads the rest of its prompt ahead of the first proposal.
    fn prepare(&mut self, _text: usize, _history: &[Token]) -> Result<()> {
        Ok(())
    }
    /// Whether [`DraftContext::verified`] is of use.
    fn reads_target(&self) -> bool {
        false
    }
    /// Whether a text's end has come before, at some length: a look that costs next to nothing, for
    /// rounds that would not ask.
    fn has_recent_match(&mut self, _text: usize, _history: &[Token]) -> bool {
        false
    }
    /// Adds up what there is to say of its work so far.
    fn figures(&self, _out: &mut Figures) {}
    /// Why nothing is being proposed, if so.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Proposes nothing: plain decoding.
pub struct NoDraft;

impl Drafter for NoDraft {
    fn propose(&mut self, _: &mut [Ask<'_>]) -> Result<usize> {
        Ok(0)
    }
}
