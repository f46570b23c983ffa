//! Counts of drafters, for statistics and for the next run.

use super::costs::Costs;

/// Measurements of drafting that the next text or run begins with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// Tokens that a draft step brings, and the rounds in which that was measured; by step.
    pub survival: Vec<(f32, f32)>,
    /// Seconds that the target waits for one draft step.
    pub level: f32,
}

/// Counts since the drafter was made.
#[derive(Clone, Debug, Default)]
pub struct DraftFigures {
    /// Rounds after work ahead, and rounds among them whose first token the draft model had read.
    pub ahead: u64,
    pub hits: u64,
    /// Passes of the draft model, and their rows, reading prompts not counted.
    pub draft_passes: u64,
    pub draft_rows: u64,
    /// Rounds with drafts, the expected number of their tokens, and the real one.
    pub rounds: u64,
    pub predicted: f64,
    pub realised: f64,
    /// Factor for the chances, 1 for full trust.
    pub trust: f32,
    /// Tokens of all rounds, and their time without drafts by the measured cost of a pass over one
    /// row.
    pub plain_tokens: u64,
    pub plain_seconds: f64,
    /// c(M), where it is known.
    pub costs: Option<Costs>,
    /// Measurements that the next run begins with.
    pub habits: Habits,
}

impl DraftFigures {
    /// Counts the tokens of a round, and the seconds that plain decoding takes for them.
    pub fn plain(&mut self, tokens: usize, seconds: f32) {
        self.plain_tokens += tokens as u64;
        self.plain_seconds += seconds as f64;
    }

    /// Counts a round with drafts: the accepted nodes that were expected, and all tokens.
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
