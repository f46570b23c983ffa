//! Messages between the decoding loop and the policy in each round.

use std::time::Duration;

/// Description of a round at its start.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Number of texts that share the pass, and the longest history among them.
    pub texts: usize,
    pub position: usize,
    /// Upper bound of the nodes in the pass, without the roots.
    pub most: usize,
    /// Whether the ending of a text occurred earlier, see
    /// [`Drafter::has_recent_match`](super::Drafter::has_recent_match).
    pub recent_match: bool,
}

/// Limits of drafting in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Allowance {
    /// Most nodes and depth per text.
    pub nodes: usize,
    pub depth: usize,
    /// Whether trees must be chains.
    pub chain: bool,
    /// Most draft model passes. With 0, only free sources are used.
    pub draft_steps: usize,
    /// Plain decoding rate in tokens per second. `None` makes decisions independent of the clock.
    pub rate: Option<f32>,
    /// Whether only tokens forced by a grammar are proposed.
    pub only_forced: bool,
}

/// Measurements of a verification pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Rows of all trees, and of prompts that are read in the pass.
    pub rows: usize,
    /// Time from the start of the pass until its tokens were known.
    pub time: Duration,
    /// Part of the time in which the drafter worked ahead.
    pub ahead: Duration,
    /// Last part of `ahead`, in which the device may already have been idle.
    pub late: Duration,
}

/// Outcome of a round.
#[derive(Clone, Copy, Debug)]
pub struct RoundOutcome<'a> {
    pub pass: Pass,
    /// Accepted nodes of each text, including the root, in the order of
    /// [`Policy::choose`](super::Policy::choose).
    pub paths: &'a [Vec<u32>],
}
