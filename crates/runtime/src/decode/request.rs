//! Requests to the scheduler, and their results.

use std::sync::Arc;

use anyhow::{Error, Result};

use super::{Stats, StopReason, TokenLogProbs};
use gemma_base::tensor::Token;
use gemma_model::models::Image;
use gemma_model::sampler::Sampler;

/// A generation request. A text that ends or pauses is returned as the request that continues it.
#[derive(Debug)]
pub struct Request {
    /// The prompt and the generated tokens.
    pub history: Vec<Token>,
    /// The images in the history. Their soft tokens are kept while the request exists.
    pub images: Vec<Arc<Image>>,
    pub sampler: Sampler,
    /// The most tokens to generate. The context may have less room.
    pub max_tokens: usize,
    pub stats: Stats,
    /// Number of most likely tokens to report with each token's log-probability; `None` for no
    /// log-probabilities.
    pub top_log_probs: Option<usize>,
    /// Number of history tokens that already have log-probabilities, if the prompt needs them too;
    /// `None` leaves out the prompt. With a prompt, the token that ends the text also has them.
    pub scored: Option<usize>,
}

impl Request {
    /// Creates a request for an answer to `history`, with empty statistics and without
    /// log-probabilities.
    pub fn new(history: Vec<Token>, sampler: Sampler, max_tokens: usize) -> Request {
        let sampler = sampler.answering(history.len());
        let (images, stats) = (Vec::new(), Stats::default());
        let (top_log_probs, scored) = (None, None);
        Request { history, images, sampler, max_tokens, stats, top_log_probs, scored }
    }

    /// Returns whether tokens of the prompt still need log-probabilities.
    pub fn lacks_scores(&self) -> bool {
        self.scored.is_some_and(|scored| scored < self.history.len())
    }
}

/// A request that was rejected.
#[derive(Debug)]
pub struct Refused {
    pub request: Request,
    pub error: Error,
}

/// A text that has ended. An error affects only this text.
pub struct Ended {
    pub sequence: usize,
    pub text: Request,
    pub stop: Result<StopReason>,
    /// Log-probabilities of the tokens since the last request for them.
    pub log_probs: Vec<TokenLogProbs>,
}
