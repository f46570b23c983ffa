//! Texts on their way into the scheduler and out of it.

use std::sync::Arc;

use anyhow::{Error, Result};

use super::{Stats, StopReason, TokenLogProbs};
use gemma_base::tensor::Token;
use gemma_model::models::Image;
use gemma_model::sampler::Sampler;

/// A text to be grown. A text that ends or pauses is given back as the request that continues it.
#[derive(Debug)]
pub struct Request {
    /// The prompt and the generated tokens.
    pub history: Vec<Token>,
    /// The images that the history names. Their soft tokens are kept as long as the request is.
    pub images: Vec<Arc<Image>>,
    pub sampler: Sampler,
    /// The most tokens that may still come. The context may hold fewer.
    pub max_tokens: usize,
    pub stats: Stats,
    /// The number of likeliest tokens beside each token's own log-probability; `None` for no
    /// log-probabilities.
    pub top_log_probs: Option<usize>,
    /// The number of tokens of the history that have log-probabilities already, where the prompt is
    /// to have them too; `None` leaves out the prompt. With a prompt, the token that ends the text
    /// also has them.
    pub scored: Option<usize>,
}

impl Request {
    /// Makes a request of an answer to `history`, with empty statistics and without
    /// log-probabilities.
    pub fn new(history: Vec<Token>, sampler: Sampler, max_tokens: usize) -> Request {
        let sampler = sampler.answering(history.len());
        let (images, stats) = (Vec::new(), Stats::default());
        let (top_log_probs, scored) = (None, None);
        Request { history, images, sampler, max_tokens, stats, top_log_probs, scored }
    }

    /// Returns whether tokens of the prompt lack the log-probabilities that they are to have.
    pub fn lacks_scores(&self) -> bool {
        self.scored.is_some_and(|scored| scored < self.history.len())
    }
}

/// A request that was not admitted.
#[derive(Debug)]
pub struct Refused {
    pub request: Request,
    pub error: Error,
}

/// A text that has ended. An error is the text's own: other texts continue.
pub struct Ended {
    pub sequence: usize,
    pub text: Request,
    pub stop: Result<StopReason>,
    /// Log-probabilities of the tokens since the last call for them.
    pub log_probs: Vec<TokenLogProbs>,
}
