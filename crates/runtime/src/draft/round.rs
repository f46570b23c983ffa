//! Messages between the decoding loop and the policy in each round.

use std::time::Duration;

/// The round that begins.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Texts that share the pass, and the longest history among them.
    pub texts: usize,
    pub position: usize,
    /// Upper bound of the nodes of a pass besides the roots.
    pub most: usize,
    /// The ending of a text occurred before, by
    /// [`Drafter::has_recent_match`](super::Drafter::has_recent_match).
    pub recent_match: bool,
}

/// Bounds of drafting in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Allowance {
    /// Nodes and depth for each text.
    pub nodes: usize,
    pub depth: usize,
    /// One line, no branches.
    pub chain: bool,
    /// Passes of a draft model. With 0 only free sources are asked.
    pub draft_steps: usize,
    /// Tokens a second of plain decoding. `None` asks for decisions that do not depend on the
    /// clock.
    pub rate: Option<f32>,
    /// Only tokens that a grammar forces are proposed.
    pub only_forced: bool,
}

/// A verification pass of the target.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Rows of all trees, and of prompts that are read in the pass.
    pub rows: usize,
    /// Time from the beginning of the pass until its tokens were known.
    pub time: Duration,
    /// Part of the time in which the drafter worked ahead.
    pub ahead: Duration,
    /// End of that part, in which the device may have been done already.
    pub late: Duration,
}

/// Outcome of a round.
#[derive(Clone, Copy, Debug)]
pub struct RoundOutcome<'a> {
    pub pass: Pass,
    /// Nodes of each text that the target accepted, root included, in the order of
    /// [`Policy::choose`](super::Policy::choose).
    pub paths: &'a [Vec<u32>],
}
