//! Guessing what the target will pick. A guess can make the text come sooner; it cannot
//! change it.
//!
//! A drafter is asked once a round. It reads the outcome of its last guess off the history, and the
//! target's scores off [`Verified`]. A new source of guesses is a feature in [`mix`], filled in
//! [`source`]; its state derives from `history`.

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

/// Knowledge of a drafter about one text, and bounds of its proposal.
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
    /// The target's scores of the last round's tree, where [`Drafter::reads_target`] asks for them.
    pub verified: Option<Verified<'a>>,
}

impl DraftContext<'_> {
    /// Returns the newest token.
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
    /// Returns whether no guess is of use.
    pub fn is_idle(&self) -> bool {
        self.ctx.nodes == 0 || self.ctx.depth == 0
    }
}

/// A source of guesses for all texts that grow.
pub trait Drafter {
    /// Adds guesses for each of these texts. Returns how many passes of a draft model that took.
    fn propose(&mut self, asks: &mut [Ask<'_>]) -> Result<usize>;
    /// Drafts ahead, below these proposals, while the target's device scores them, for as long as
    /// `more` returns true. The contexts are those of the proposals. It changes only the cost and
    /// quality of the next proposals.
    fn meanwhile(&mut self, _asks: &[Ask<'_>], _more: &mut dyn FnMut() -> bool) -> Result<()> {
        Ok(())
    }
    /// Reads a part of a text's prompt while the target's device works, for as long as `more`
    /// returns true.
    fn read_ahead(
        &mut self,
        _text: usize,
        _history: &[Token],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads the rest of a new text's prompt ahead of the first proposal.
    fn prepare(&mut self, _text: usize, _history: &[Token]) -> Result<()> {
        Ok(())
    }
    /// Returns whether [`DraftContext::verified`] is of use.
    fn reads_target(&self) -> bool {
        false
    }
    /// Returns whether a text's end has occurred before, at some length. The check costs next to
    /// nothing; it serves rounds that would not ask.
    fn has_recent_match(&mut self, _text: usize, _history: &[Token]) -> bool {
        false
    }
    /// Adds its counts so far.
    fn figures(&self, _out: &mut Figures) {}
    /// Returns why nothing is being proposed, if so.
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
