//! What clients' threads and the engine's thread share: requests that wait, and how far the server
//! is.

use super::error::ApiError;
use super::metrics::Metrics;
use super::shares::Client;
use crate::cli::io::record::FinishReason;
use crate::decode::Chances;
use crate::runtime::constraints::Constrained;
use crate::sampler::Sampler;
use crate::tensor::Token;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// Events that may wait for one client. Who lets more come together does not read, and is cut off.
pub const EVENTS: usize = 1024;
/// How often an idle engine looks whether clients that wait have gone.
const LOOK: Duration = Duration::from_secs(1);

/// A text to be grown for a client.
pub struct Job {
    pub history: Vec<Token>,
    pub sampler: Sampler,
    pub constrained: Constrained,
    pub stops: Vec<String>,
    pub max_tokens: usize,
    pub chances: Option<usize>,
    /// Which of the request's answers it is.
    pub choice: usize,
    pub client: Client,
    pub events: Sender<(usize, Event)>,
    pub asked: Instant,
}

/// What becomes of a text.
pub enum Event {
    Piece(Piece),
    End(Box<End>),
}

/// What one pass brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    pub text: String,
    pub tokens: u64,
    pub chances: Vec<Chances>,
}

/// How a text ended.
#[derive(Clone, Debug)]
pub struct End {
    pub reason: Result<FinishReason, ApiError>,
    pub stop_string: Option<String>,
    pub figures: Figures,
}

/// Counts and times of one or more texts.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub prompt_tokens: u64,
    /// Of the prompt, those that a sequence held already.
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub passes: u64,
    pub decode_time: Duration,
    /// From the request to its first token.
    pub first_token: Option<Duration>,
}

impl Figures {
    /// Takes in another answer to the same prompt.
    pub fn add(&mut self, other: &Figures) {
        self.prompt_tokens = self.prompt_tokens.max(other.prompt_tokens);
        self.cached_tokens = self.cached_tokens.max(other.cached_tokens);
        self.completion_tokens += other.completion_tokens;
        self.passes += other.passes;
        self.decode_time = self.decode_time.max(other.decode_time);
        self.first_token = self.first_token.into_iter().chain(other.first_token).min();
    }
}

/// How far the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Loading,
    Ready,
    /// No new requests; what runs is cut then.
    Ending(Instant),
    /// The engine has ended.
    Ended,
}

struct State {
    phase: Phase,
    waiting: VecDeque<Job>,
}

/// The one place where both sides meet.
pub struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    /// Texts that may wait.
    most: usize,
    grace: Duration,
    pub metrics: Metrics,
}

impl Queue {
    pub fn new(most: usize, grace: Duration) -> Queue {
        let state = State { phase: Phase::Loading, waiting: VecDeque::new() };
        let metrics = Metrics::default();
        Queue { state: Mutex::new(state), wake: Condvar::new(), most, grace, metrics }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes all jobs of a request, or none of them.
    pub fn add(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let mut state = self.lock();
        self.open(&state)?;
        state.waiting.retain(|job| !job.events.is_closed());
        // A client that has no text in the queue may send a request of any number of answers, as
        // long as the queue is not full.
        let client = jobs.first().map(|job| job.client);
        let own = state.waiting.iter().filter(|job| Some(job.client) == client).count();
        let is_full = state.waiting.len() >= self.most.max(1);
        if is_full || own > 0 && own + jobs.len() > self.most.div_ceil(2) {
            let message = format!(
                "{} texts wait already, {own} of them from this client: try again later",
                state.waiting.len()
            );
            return Err(ApiError::new(429, message).code("queue_full"));
        }
        state.waiting.extend(jobs);
        self.metrics.waiting.set(state.waiting.len() as u64);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    fn open(&self, state: &State) -> Result<(), ApiError> {
        match state.phase {
            Phase::Ready => Ok(()),
            Phase::Loading => Err(ApiError::new(503, "the model is being loaded").code("loading")),
            Phase::Ending(_) | Phase::Ended => Err(ApiError::ending()),
        }
    }

    /// An error while nothing can be asked.
    pub fn is_open(&self) -> Result<(), ApiError> {
        self.open(&self.lock())
    }

    /// The model is loaded.
    pub fn ready(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Loading {
            state.phase = Phase::Ready;
        }
    }

    /// From here on there are no new requests.
    pub fn end_soon(&self) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Loading | Phase::Ready) {
            state.phase = Phase::Ending(Instant::now() + self.grace);
        }
        drop(state);
        self.wake.notify_all();
    }

    /// Whether what still runs is to be cut.
    pub fn is_over(&self) -> bool {
        matches!(self.lock().phase, Phase::Ending(until) if Instant::now() >= until)
    }

    /// Returns the client whose turn it is and that waits: the one for which `running` is least,
    /// of such the one that waits longest.
    pub fn next(&self, running: impl Fn(Client) -> usize) -> Option<Client> {
        let mut state = self.lock();
        state.waiting.retain(|job| !job.events.is_closed());
        state.waiting.iter().min_by_key(|job| running(job.client)).map(|job| job.client)
    }

    /// The next job whose client is still there, by [`next`](Self::next); without `wait` only one
    /// that is there already. `None` with `wait` says that there will be none.
    pub fn take(&self, wait: bool, running: impl Fn(Client) -> usize) -> Option<Job> {
        let mut state = self.lock();
        loop {
            state.waiting.retain(|job| !job.events.is_closed());
            let turns = state.waiting.iter().enumerate();
            let at = turns.min_by_key(|(_, job)| running(job.client)).map(|(at, _)| at);
            let job = at.and_then(|at| state.waiting.remove(at));
            self.metrics.waiting.set(state.waiting.len() as u64);
            let is_ending = matches!(state.phase, Phase::Ending(_) | Phase::Ended);
            if job.is_some() || !wait || is_ending {
                return job;
            }
            state = self.wake.wait_timeout(state, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// The engine answers nobody any more: who waits is told so.
    pub fn end(&self, why: &ApiError) {
        let mut state = self.lock();
        state.phase = Phase::Ended;
        for job in std::mem::take(&mut state.waiting) {
            job.end(why.clone());
        }
    }
}

impl Job {
    /// Ends a text that never began.
    pub fn end(self, why: ApiError) {
        let prompt_tokens = self.history.len() as u64;
        let figures = Figures { prompt_tokens, ..Figures::default() };
        let end = End { reason: Err(why), stop_string: None, figures };
        // A client that is gone, or reads nothing, needs no word.
        let _ = self.events.try_send((self.choice, Event::End(Box::new(end))));
    }
}
