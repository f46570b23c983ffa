//! Parts and ends of answers, before an API form writes them.

use super::error::ApiError;
use crate::cli::io::record::FinishReason;
use crate::decode::TokenLogProbs;
use std::time::Duration;

/// Limit of events that wait for one client. A client with more unread events is disconnected.
pub const EVENTS: usize = 1024;

/// A part of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerPiece {
    pub text: String,
    /// Text of a thought, before `text`.
    pub thought: String,
    pub tokens: u64,
    pub log_probs: Vec<TokenLogProbs>,
}

/// End of an answer.
#[derive(Clone, Debug)]
pub struct AnswerEnd {
    pub reason: Result<FinishReason, ApiError>,
    pub stop_string: Option<String>,
    pub figures: RequestFigures,
}

/// Counts and times of one or more texts.
#[derive(Clone, Debug, Default)]
pub struct RequestFigures {
    pub prompt_tokens: u64,
    /// Prompt tokens that a sequence already held.
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Tokens of the answers, including the tokens that end them.
    pub picked_tokens: u64,
    pub passes: u64,
    pub decode_time: Duration,
    /// Time from the request to its first token.
    pub first_token: Option<Duration>,
}

impl RequestFigures {
    /// Adds another answer. The tokens of a prompt are counted with its first answer only.
    pub fn add(&mut self, other: &RequestFigures, is_first: bool) {
        if is_first {
            self.prompt_tokens += other.prompt_tokens;
            self.cached_tokens += other.cached_tokens;
        }
        self.completion_tokens += other.completion_tokens;
        self.picked_tokens += other.picked_tokens;
        self.passes += other.passes;
        self.decode_time = self.decode_time.max(other.decode_time);
        self.first_token = self.first_token.into_iter().chain(other.first_token).min();
    }
}
