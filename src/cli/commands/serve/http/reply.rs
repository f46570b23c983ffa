//! Sends answers to a client, streamed or not.

use super::super::log::LogEntry;
use super::super::models::ModelLease;
use super::super::pool::PoolShare;
use super::super::queue::ClientEvent;
use super::response::{answer_held, refusal, respond};
use crate::cli::api::answer::AnswerPiece;
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::form::{ApiForm, CollectedAnswers, SseEvents};
use crate::cli::api::request::ApiRequest;
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, HeaderName, HeaderValue};
use axum::response::Response;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// Interval of keep-alive comments in a stream without events.
const ALIVE: Duration = Duration::from_secs(15);

/// The answers so far, and the memory of the request and of its answers.
pub struct Collected {
    so_far: CollectedAnswers,
    _memory: Vec<PoolShare>,
    /// Keeps the model loaded until the answers have ended.
    lease: Option<ModelLease>,
}

impl Collected {
    pub fn new(request: &ApiRequest, memory: Vec<PoolShare>, lease: ModelLease) -> Collected {
        let so_far = CollectedAnswers::new(request);
        Collected { so_far, _memory: memory, lease: Some(lease) }
    }
}

/// Sets the outcome of successful answers in the log entry.
fn ended_well(entry: &mut LogEntry, collected: &CollectedAnswers) {
    entry.status = 200;
    entry.outcome = collected.answers.first().map_or("done", |answer| answer.reason.name());
}

/// Waits for all answers and sends them as one response.
pub async fn whole(
    mut form: Box<dyn ApiForm>,
    mut events: Receiver<(usize, ClientEvent)>,
    mut collected: Collected,
    entry: &mut LogEntry,
    family: ApiFamily,
) -> Response {
    let so_far = &mut collected.so_far;
    while so_far.open > 0 {
        let failed = match events.recv().await {
            Some((choice, ClientEvent::AnswerPiece(piece))) => {
                let AnswerPiece { text, thought, log_probs, .. } = piece;
                let answer = &mut so_far.answers[choice];
                answer.text += &text;
                answer.thought += &thought;
                answer.log_probs.extend(log_probs);
                continue;
            }
            Some((choice, ClientEvent::End(end))) => {
                so_far.count(choice, &end.figures);
                entry.figures = so_far.figures.clone();
                let answer = &mut so_far.answers[choice];
                answer.stop_string = end.stop_string;
                match end.reason {
                    Ok(reason) => {
                        answer.reason = reason;
                        continue;
                    }
                    Err(error) => error,
                }
            }
            None => lost(),
        };
        entry.fails(&failed);
        return refusal(&failed, family);
    }
    ended_well(entry, so_far);
    collected.lease = None;
    if so_far.answers.len() <= 1 {
        let text = form.whole(&so_far.answers, &so_far.figures, 0);
        return answer_held(text, collected);
    }
    // All answers in one text could need more memory than was reserved, so they are sent one by
    // one.
    type PendingAnswers = (Box<dyn ApiForm>, Collected, usize);
    let next = |(mut form, mut collected, choice): PendingAnswers| async move {
        let CollectedAnswers { answers, figures, .. } = &mut collected.so_far;
        if choice == answers.len() {
            return None;
        }
        let part = form.whole(answers, figures, choice);
        answers[choice].log_probs = Vec::new();
        Some((Ok::<_, Infallible>(part), (form, collected, choice + 1)))
    };
    let parts = futures_util::stream::unfold((form, collected, 0), next);
    respond(200, "application/json", Body::from_stream(parts))
}

/// Makes the error of a client that did not read: the engine dropped its answer.
fn lost() -> ApiError {
    ApiError::new(500, "the answer was cut off: it was not read as fast as it came")
}

/// A streamed answer.
pub struct AnswerStream {
    form: Box<dyn ApiForm>,
    prompt_tokens: u64,
    events: Receiver<(usize, ClientEvent)>,
    collected: Collected,
    entry: LogEntry,
    family: ApiFamily,
    stage: StreamStage,
}

#[derive(PartialEq)]
enum StreamStage {
    Begin,
    Running,
    End,
}

/// Sends the answers as a stream of events.
pub fn stream(
    form: Box<dyn ApiForm>,
    prompt_tokens: u64,
    events: Receiver<(usize, ClientEvent)>,
    collected: Collected,
    entry: LogEntry,
    family: ApiFamily,
) -> Response {
    let stage = StreamStage::Begin;
    let stream = AnswerStream { form, prompt_tokens, events, collected, entry, family, stage };
    let events = futures_util::stream::unfold(stream, |mut stream| async {
        let text = stream.next().await?;
        Some((Ok::<_, Infallible>(text), stream))
    });
    let kind = match family {
        ApiFamily::Ollama => "application/x-ndjson",
        _ => "text/event-stream",
    };
    let mut response = respond(200, kind, Body::from_stream(events));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // This header makes nginx forward events at once.
    let name = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(name, HeaderValue::from_static("no"));
    response
}

impl AnswerStream {
    /// Waits for the next text to send.
    async fn next(&mut self) -> Option<String> {
        let mut out = SseEvents::default();
        match self.stage {
            StreamStage::Begin => {
                self.stage = StreamStage::Running;
                self.form.begin(self.prompt_tokens, &mut out);
                // Some forms send nothing at the start.
                if !out.0.is_empty() {
                    return Some(out.0);
                }
            }
            StreamStage::Running => {}
            StreamStage::End => return None,
        }
        while out.0.is_empty() && self.stage == StreamStage::Running {
            match tokio::time::timeout(ALIVE, self.events.recv()).await {
                Ok(event) => self.take(event, &mut out),
                // Ollama's JSON lines cannot contain comments.
                Err(_) if self.family == ApiFamily::Ollama => {}
                Err(_) => out.0 += ": waiting\n\n",
            }
        }
        // Sends all events that are ready together.
        while self.stage == StreamStage::Running {
            match self.events.try_recv() {
                Ok(event) => self.take(Some(event), &mut out),
                Err(_) => break,
            }
        }
        Some(out.0)
    }

    fn take(&mut self, event: Option<(usize, ClientEvent)>, out: &mut SseEvents) {
        let failed = match event {
            Some((choice, ClientEvent::AnswerPiece(piece))) => {
                self.entry.figures.completion_tokens += piece.tokens;
                self.form.piece(choice, &piece, out);
                return;
            }
            Some((choice, ClientEvent::End(end))) => {
                let so_far = &mut self.collected.so_far;
                so_far.count(choice, &end.figures);
                match end.reason {
                    Ok(reason) => {
                        so_far.answers[choice].reason = reason;
                        self.form.end(choice, reason, &end, out);
                        if so_far.open > 0 {
                            return;
                        }
                        ended_well(&mut self.entry, so_far);
                        self.form.close(&so_far.figures, out);
                        None
                    }
                    Err(error) => Some(error),
                }
            }
            None => Some(lost()),
        };
        if let Some(error) = failed {
            self.entry.fails(&error);
            self.form.fail(&error, out);
        }
        self.entry.figures = self.collected.so_far.figures.clone();
        self.collected.lease = None;
        self.stage = StreamStage::End;
    }
}
