//! One answer, from what was asked to why it ended: the same for a prompt, a record of a batch and
//! a client of the server, so that the same question has the same answer.

use crate::cli::record::FinishReason;
use crate::decode::Stop;
use crate::decode::text::TextStream;
use crate::error::Fault;
use crate::gemma::Tokenizer;
use crate::runtime::constraints::Constrained;
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use anyhow::Result;

/// The sampler of an answer. `ends` are the tokens that end one, or nothing does where it is to go
/// on for as long as it may.
pub fn sampler(
    config: SamplerConfig,
    constrained: &Constrained,
    tokenizer: &Tokenizer,
    ends: &[Token],
    ignore_eos: bool,
) -> Result<Sampler> {
    let sampler = constrained.sampler(Sampler::new(config)?.usable(tokenizer.vocab()));
    Ok(if ignore_eos { sampler.ban(ends.iter().copied()) } else { sampler })
}

/// An answer that grows.
pub struct Growing<'a> {
    stream: TextStream<'a>,
    constrained: Constrained,
    pub prompt_tokens: usize,
}

impl<'a> Growing<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        stops: &[String],
        constrained: Constrained,
        prompt_tokens: usize,
    ) -> Growing<'a> {
        Growing { stream: TextStream::new(tokenizer, stops), constrained, prompt_tokens }
    }

    /// The text that this token makes certain.
    pub fn push(&mut self, token: Token) -> &str {
        self.stream.push(token)
    }

    /// The stop string that has come.
    pub fn stop_string(&self) -> Option<&str> {
        self.stream.stop_string()
    }

    /// Whether a stop string has come.
    pub fn is_stopped(&self) -> bool {
        self.stream.is_stopped()
    }

    /// The text that is certain once no token follows.
    pub fn finish(&mut self) -> &str {
        self.stream.finish()
    }

    /// Tokens of the answer.
    pub fn completion_tokens(&self, history: &[Token]) -> usize {
        history.len() - self.prompt_tokens
    }

    /// Why the finished answer ended; `None` if an interruption came first.
    pub fn reason(&self, stop: Stop) -> Option<FinishReason> {
        match stop {
            _ if self.is_stopped() => Some(FinishReason::StopString),
            Stop::Token(_) => Some(FinishReason::Stop),
            Stop::Length => Some(FinishReason::Length),
            Stop::Interrupt | Stop::Receiver => None,
        }
    }

    /// Why a finished answer is less than its grammar asks for.
    pub fn check(&self, history: &[Token]) -> Result<(), Fault> {
        self.constrained.check(history, self.completion_tokens(history), self.is_stopped())
    }
}
