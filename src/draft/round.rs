//! Messages between the decoding loop and the policy in each round.

use std::time::Duration;

/// The round that begins.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Texts that share the pass, and the longest history among them.
    pub texts: usize,
    pub position: usize,
    /// Nodes besides the roots that a pass takes at most.
    pub most: usize,
    /// The end of one of the texts has come before, by
    /// [`Drafter::has_recent_match`](super::Drafter::has_recent_match).
    pub recent_match: bool,
}

/// Bounds of drafting in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Allowance {
    /// Nodes to ask of each text, and how deep.
    pub nodes: usize,
    pub depth: usize,
    /// One line, no branches.
    pub chain: bool,
    /// Passes of a draft model; with 0 only guesses that cost nothing are wanted.
    pub draft_steps: usize,
    /// Tokens a second that plain decoding brings; `None` asks for decisions that do not depend on
    /// the clock.
    pub rate: Option<f32>,
    /// No source is asked: only tokens that a grammar forces are wanted.
    pub only_forced: bool,
}

/// A verification pass of the target.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Rows of all trees, and of prompts that are read in the pass.
    pub rows: usize,
    /// From its beginning until its tokens were known.
    pub time: Duration,
    /// The part of it that the drafter worked ahead in.
    pub ahead: Duration,
    /// The end of that part in which the device may have been done already.
    pub late: Duration,
}

/// Outcome of a round.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    pub pass: Pass,
    /// Nodes that the target took of each text, root included, in the order of
    /// [`Policy::choose`](super::Policy::choose).
    pub paths: &'a [Vec<u32>],
}
