//! Counts of drafters, for statistics and for the next run.

use super::costs::Costs;

/// Measurements that initialise drafting in the next text or run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// By draft step: mean tokens that the step adds, and the number of rounds measured.
    pub survival: Vec<(f32, f32)>,
    /// Seconds that the target waits per draft step.
    pub level: f32,
}

/// Counts since the drafter was created.
#[derive(Clone, Debug, Default)]
pub struct DraftFigures {
    /// Rounds after work ahead, and those with a first token that the draft model had already
    /// evaluated.
    pub ahead: u64,
    pub hits: u64,
    /// Passes and rows of the draft model, without reading prompts.
    pub draft_passes: u64,
    pub draft_rows: u64,
    /// Rounds with drafts, their expected tokens, and their actual tokens.
    pub rounds: u64,
    pub predicted: f64,
    pub realised: f64,
    /// Correction factor for the probabilities, 1 for full trust.
    pub trust: f32,
    /// Tokens of all rounds, and their estimated time in plain decoding, from the measured cost of
    /// one row.
    pub plain_tokens: u64,
    pub plain_seconds: f64,
    /// c(M), if known.
    pub costs: Option<Costs>,
    /// Measurements that initialise the next run.
    pub habits: Habits,
}

impl DraftFigures {
    /// Adds a round's tokens, and the seconds that plain decoding would need for them.
    pub fn plain(&mut self, tokens: usize, seconds: f32) {
        self.plain_tokens += tokens as u64;
        self.plain_seconds += seconds as f64;
    }

    /// Adds a round with drafts: the expected accepted nodes, and all tokens.
    pub fn drafted(&mut self, texts: usize, expected: f32, tokens: usize) {
        self.rounds += texts as u64;
        self.predicted += (texts as f32 + expected) as f64;
        self.realised += tokens as f64;
    }

    /// Adds another drafter's counts.
    pub fn add(&mut self, other: &DraftFigures) {
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
