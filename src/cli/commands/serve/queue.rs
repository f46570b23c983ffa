//! Queue of requests between the connection threads and the engine thread of a model, and the phase
//! of that engine.

use super::metrics::Metrics;
use super::pool::Client;
use crate::cli::api::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use crate::cli::api::error::ApiError;
use crate::runtime::answers::AnswerRequest;
use crate::util::sync::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// Interval at which an idle engine drops requests of disconnected clients.
const LOOK: Duration = Duration::from_secs(1);

/// A request for one answer of a client.
pub type ClientRequest = AnswerRequest<Delivery>;

/// Delivery of one answer to its client.
pub struct Delivery {
    pub client: Client,
    /// Index of this answer in its HTTP request.
    pub choice: usize,
    pub events: Sender<(usize, ClientEvent)>,
    /// Arrival of the HTTP request.
    pub received: Instant,
    /// Text and tokens since the last event, and the time of that event.
    pub piece: AnswerPiece,
    pub delivered: Option<Instant>,
    pub first_token: Option<Duration>,
    /// Its place among the waiting texts, while it waits.
    place: Option<QueuePlace>,
}

impl Delivery {
    pub fn new(
        client: Client,
        choice: usize,
        events: Sender<(usize, ClientEvent)>,
        received: Instant,
    ) -> Delivery {
        let (piece, delivered, first_token, place) = Default::default();
        Delivery { client, choice, events, received, piece, delivered, first_token, place }
    }
}

/// The limit of waiting texts, which the queues of all models share.
pub struct QueueLimit {
    /// Limit of waiting texts.
    most: usize,
    waiting: std::sync::Mutex<WaitingTexts>,
}

#[derive(Default)]
struct WaitingTexts {
    all: usize,
    /// Waiting texts of each client; clients without one are left out.
    by_client: HashMap<Client, usize>,
}

/// The place of a waiting text. It counts until it is dropped.
struct QueuePlace {
    limit: Arc<QueueLimit>,
    client: Client,
}

impl QueueLimit {
    pub fn new(most: usize) -> Arc<QueueLimit> {
        Arc::new(QueueLimit { most, waiting: Default::default() })
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, WaitingTexts> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `count` places for a client, or none.
    ///
    /// A client without waiting texts may take any number if at least one place is free.
    fn take(self: &Arc<Self>, client: Client, count: usize) -> Result<Vec<QueuePlace>, ApiError> {
        let mut waiting = self.waiting();
        let own = waiting.by_client.get(&client).copied().unwrap_or(0);
        let is_full = waiting.all >= self.most.max(1);
        if is_full || own > 0 && own + count > self.most.div_ceil(2) {
            let message = format!(
                "{} texts are waiting, {own} of them from this client: try again later",
                waiting.all
            );
            return Err(ApiError::new(429, message).code("queue_full"));
        }
        waiting.all += count;
        waiting.by_client.insert(client, own + count);
        Ok((0..count).map(|_| QueuePlace { limit: self.clone(), client }).collect())
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut waiting = self.limit.waiting();
        waiting.all -= 1;
        if let Some(own) = waiting.by_client.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                waiting.by_client.remove(&self.client);
            }
        }
    }
}

/// An event of an answer for its client.
pub enum ClientEvent {
    AnswerPiece(AnswerPiece),
    End(Box<AnswerEnd>),
}

/// Phase of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Loading,
    Ready,
    /// New requests are refused. Running answers are cut off at this time.
    Ending(Instant),
    /// The engine has ended.
    Ended,
}

struct QueueState {
    phase: Phase,
    waiting: VecDeque<ClientRequest>,
}

/// A bounded queue with the phase of its engine and the metrics of its model.
pub struct RequestQueue {
    state: Mutex<QueueState>,
    wake: Condvar,
    limit: Arc<QueueLimit>,
    grace: Duration,
    pub metrics: Arc<Metrics>,
}

impl RequestQueue {
    pub fn new(limit: Arc<QueueLimit>, metrics: Arc<Metrics>, grace: Duration) -> RequestQueue {
        let state = QueueState { phase: Phase::Loading, waiting: VecDeque::new() };
        RequestQueue { state: Mutex::new(state), wake: Condvar::new(), limit, grace, metrics }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds all answers of an HTTP request, or none.
    pub fn add(&self, mut requests: Vec<ClientRequest>) -> Result<(), ApiError> {
        let mut state = self.lock();
        self.open(&state)?;
        state.waiting.retain(|request| !request.data.events.is_closed());
        if let Some(client) = requests.first().map(|request| request.data.client) {
            let places = self.limit.take(client, requests.len())?;
            for (request, place) in requests.iter_mut().zip(places) {
                request.data.place = Some(place);
            }
        }
        state.waiting.extend(requests);
        self.metrics.waiting.set(state.waiting.len() as u64);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    fn open(&self, state: &QueueState) -> Result<(), ApiError> {
        match state.phase {
            Phase::Ready => Ok(()),
            Phase::Loading => Err(ApiError::new(503, "the model is being loaded").code("loading")),
            Phase::Ending(_) | Phase::Ended => Err(ApiError::ending()),
        }
    }

    /// Records that the model is loaded.
    pub fn ready(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Loading {
            state.phase = Phase::Ready;
        }
    }

    /// Refuses new requests from now on.
    pub fn end_soon(&self) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Loading | Phase::Ready) {
            state.phase = Phase::Ending(Instant::now() + self.grace);
        }
        drop(state);
        self.wake.notify_all();
    }

    /// Returns whether running answers have to be cut off now.
    pub fn is_over(&self) -> bool {
        matches!(self.lock().phase, Phase::Ending(until) if Instant::now() >= until)
    }

    /// Returns the waiting client that is next: the one with the fewest `running` answers.
    ///
    /// Among equals it is the client that has waited longest.
    pub fn next(&self, running: impl Fn(Client) -> usize) -> Option<Client> {
        let mut state = self.lock();
        state.waiting.retain(|request| !request.data.events.is_closed());
        state
            .waiting
            .iter()
            .min_by_key(|request| running(request.data.client))
            .map(|request| request.data.client)
    }

    /// Takes the next request in the order of [`next`](Self::next).
    ///
    /// With `wait` it waits for one, and `None` means that no more requests will come.
    pub fn take(&self, wait: bool, running: impl Fn(Client) -> usize) -> Option<ClientRequest> {
        let mut state = self.lock();
        loop {
            state.waiting.retain(|request| !request.data.events.is_closed());
            let turns = state.waiting.iter().enumerate();
            let at =
                turns.min_by_key(|(_, request)| running(request.data.client)).map(|(at, _)| at);
            let mut request = at.and_then(|at| state.waiting.remove(at));
            if let Some(request) = &mut request {
                request.data.place = None;
            }
            self.metrics.waiting.set(state.waiting.len() as u64);
            let is_ending = matches!(state.phase, Phase::Ending(_) | Phase::Ended);
            if request.is_some() || !wait || is_ending {
                return request;
            }
            state = self.wake.wait_timeout(state, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Records that the engine has ended. All waiting requests fail with `error`.
    pub fn end(&self, error: &ApiError) {
        let mut state = self.lock();
        state.phase = Phase::Ended;
        for request in std::mem::take(&mut state.waiting) {
            refuse(request, error.clone());
        }
    }
}

/// Ends an answer that never started.
fn refuse(request: ClientRequest, error: ApiError) {
    let prompt_tokens = request.text.history.len() as u64;
    let figures = RequestFigures { prompt_tokens, ..RequestFigures::default() };
    let end = AnswerEnd { reason: Err(error), stop_string: None, figures };
    let Delivery { choice, events, .. } = request.data;
    // A client that disconnected or does not read gets no event.
    let _ = events.try_send((choice, ClientEvent::End(Box::new(end))));
}
