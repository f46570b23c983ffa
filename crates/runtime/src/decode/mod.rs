//! The loop, verification, text that is certain, statistics.

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

/// Where generation ends by itself.
pub struct GenerationLimits<'a> {
    pub max_tokens: usize,
    /// Tokens that end the text; they are not part of it.
    pub stop_ids: &'a [Token],
    /// Looked at before each pass.
    pub interrupt: &'a AtomicBool,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The target picked this stop id.
    Token(Token),
    /// Enough tokens, or the context is full.
    Length,
    /// The receiver of the events said so.
    Receiver,
    Interrupt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Tokens of the prompt that are cached, of how many.
    Prefill(usize, usize),
    /// The text grew by this token.
    Token(Token),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Continue,
    Stop,
}

/// Grows one `history` until something stops it. For one seed the text is the same whatever the
/// drafter proposes and the policy takes of it.
///
/// The target's cache may hold anything: it is brought in line with `history` first. An empty
/// history is an error, and so is one that leaves no room in the context.
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
