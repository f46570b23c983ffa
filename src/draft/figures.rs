//! What drafters say of their work, for statistics and for the next run.

use super::{Costs, Habits};

/// Counts since the drafter was made.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Rounds that a draft model had worked ahead for, and those of them in which it had already
    /// read the token that came.
    pub ahead: u64,
    pub hits: u64,
    /// Passes of the draft model, and their rows, reading prompts not counted.
    pub draft_passes: u64,
    pub draft_rows: u64,
    /// Rounds with drafts; tokens that they were expected to bring, and brought.
    pub rounds: u64,
    pub predicted: f64,
    pub realised: f64,
    /// How far the chances are trusted by now, 1 for fully.
    pub trust: f32,
    /// Tokens of all rounds, and what they would have taken without drafts, by the measured cost of
    /// a pass over one row.
    pub plain_tokens: u64,
    pub plain_seconds: f64,
    /// c(M), where it is known.
    pub costs: Option<Costs>,
    /// What a next run may begin with.
    pub habits: Habits,
}

impl Figures {
    /// Adds another drafter's counts.
    pub fn add(&mut self, other: &Figures) {
        self.ahead += other.ahead;
        self.hits += other.hits;
        self.draft_passes += other.draft_passes;
        self.draft_rows += other.draft_rows;
        self.rounds += other.rounds;
        self.predicted += other.predicted;
        self.realised += other.realised;
        self.plain_tokens += other.plain_tokens;
        self.plain_seconds += other.plain_seconds;
    }
}
