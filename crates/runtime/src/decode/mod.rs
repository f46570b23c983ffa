//! The decoding loop: scheduling, verification, output of final text, statistics.

mod growth;
pub mod log_probs;
mod prefixes;
pub mod prompt_cache;
mod reading;
mod request;
mod reuse;
pub mod scheduler;
pub mod stats;
pub mod text;
pub mod verify;

use std::sync::atomic::AtomicBool;

use anyhow::Result;

pub use log_probs::TokenLogProbs;
pub use prompt_cache::{PageDirectory, PromptCache};
pub use request::{Ended, Refused, Request};
pub use scheduler::Scheduler;
pub use stats::{Stats, Tally};
pub use verify::{Verdict, verify};

use crate::draft::{Drafter, Policy};
use gemma_base::tensor::Token;
use gemma_model::engine::Timeline;
use gemma_model::sampler::Sampler;

/// Conditions that end generation.
pub struct GenerationLimits<'a> {
    pub max_tokens: usize,
    /// Tokens that end the text; they are not part of it.
    pub stop_ids: &'a [Token],
    /// Checked before each pass.
    pub interrupt: &'a AtomicBool,
}

/// Reason for the end of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The target picked this stop token.
    Token(Token),
    /// `max_tokens` was reached, or the context is full.
    Length,
    /// The event receiver asked to stop.
    Receiver,
    Interrupt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Number of cached tokens of the prompt, and its length.
    Prefill(usize, usize),
    /// This token was added to the text.
    Token(Token),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Continue,
    Stop,
}

/// Generates one text until a stop condition.
///
/// For a given seed, the text does not depend on drafter and policy. The target's cache is first
/// synchronised with `history`. Fails for an empty history, and for one that fills the context.
pub fn generate(
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    policy: &mut Policy,
    sampler: &Sampler,
    history: &mut Vec<Token>,
    limits: &GenerationLimits<'_>,
    stats: &mut Stats,
    on_event: &mut dyn FnMut(Event) -> Flow,
) -> Result<StopReason> {
    scheduler::room(target, history)?;
    let mut scheduler = Scheduler::new(target, drafter, policy, limits.stop_ids, limits.interrupt);
    let request = Request::new(std::mem::take(history), sampler.clone(), limits.max_tokens);
    let admitted = scheduler.admit(Request { stats: std::mem::take(stats), ..request });
    let sequence = admitted.map_err(|refused| refused.error)?;
    loop {
        let ended = match scheduler.step(&mut |_, event| on_event(event)) {
            Ok(mut ended) => ended.pop(),
            Err(error) => scheduler.cancel(sequence).map(|text| Ended { stop: Err(error), ..text }),
        };
        if let Some(ended) = ended {
            (*history, *stats) = (ended.text.history, ended.text.stats);
            return ended.stop;
        }
    }
}
