//! Forms of answers: a trait, and a file for each implementation.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::error::ApiError;
use super::fields::Fields;
use super::ids::Ids;
use super::request::ApiRequest;
use super::served::ServedModel;
use crate::cli::io::record::FinishReason;
use crate::decode::TokenLogProbs;
use serde_json::Value;
use std::sync::Arc;

/// A whole answer.
#[derive(Debug)]
pub struct CollectedAnswer {
    pub text: String,
    pub thought: String,
    pub log_probs: Vec<TokenLogProbs>,
    pub reason: FinishReason,
    pub stop_string: Option<String>,
}

/// State of the answers to one request.
#[derive(Debug)]
pub struct CollectedAnswers {
    pub answers: Vec<CollectedAnswer>,
    pub figures: RequestFigures,
    /// Number of answers to each prompt.
    n: usize,
    /// Answers that have not ended.
    pub open: usize,
}

impl CollectedAnswers {
    pub fn new(request: &ApiRequest) -> CollectedAnswers {
        let answer = || CollectedAnswer {
            text: String::new(),
            thought: String::new(),
            log_probs: Vec::new(),
            reason: FinishReason::Stop,
            stop_string: None,
        };
        let (n, open, figures) = (request.n, request.answers(), RequestFigures::default());
        CollectedAnswers { answers: (0..open).map(|_| answer()).collect(), figures, n, open }
    }

    /// Counts an answer that ended.
    pub fn count(&mut self, choice: usize, figures: &RequestFigures) {
        self.open -= 1;
        self.figures.add(figures, choice.is_multiple_of(self.n));
    }
}

/// Server-sent events that are not written yet.
#[derive(Debug, Default)]
pub struct SseEvents(pub String);

impl SseEvents {
    pub fn data(&mut self, value: &Value) {
        self.0 += &format!("data: {value}\n\n");
    }

    /// Writes an event. Its name is the `type` of `value`.
    pub fn named(&mut self, value: &Value) {
        let name = value["type"].as_str().unwrap_or("message");
        self.0 += &format!("event: {name}\ndata: {value}\n\n");
    }
}

/// Parses a body into a request and the form of its answers.
pub type Parse = fn(Fields, &Arc<ServedModel>) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError>;

/// How one request is answered.
pub trait ApiForm: Send {
    /// Writes the answer with this index.
    ///
    /// Answers are requested in order, and their texts together are the response. No text is larger
    /// than its answer's text and log-probabilities need.
    fn whole(
        &mut self,
        answers: &[CollectedAnswer],
        figures: &RequestFigures,
        choice: usize,
    ) -> String;
    /// Begins a stream for a prompt of `prompt_tokens` tokens.
    fn begin(&mut self, prompt_tokens: u64, out: &mut SseEvents);
    /// Writes a piece of an answer.
    fn piece(&mut self, choice: usize, piece: &AnswerPiece, out: &mut SseEvents);
    /// Ends an answer without an error.
    fn end(&mut self, choice: usize, reason: FinishReason, end: &AnswerEnd, out: &mut SseEvents);
    /// Ends the stream after all answers have ended.
    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents);
    /// Ends the stream with an error.
    fn fail(&mut self, error: &ApiError, out: &mut SseEvents) {
        out.data(&error.openai());
    }
}

/// Fields that all objects of a response have in common.
#[derive(Clone)]
pub struct ResponseHead {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub served: Arc<ServedModel>,
    pub ids: Ids,
}

impl ResponseHead {
    /// Makes the head of a response, with an id that begins with `prefix`.
    ///
    /// Takes the model's name from the fields.
    pub fn take(
        prefix: &str,
        fields: &mut Fields,
        served: &Arc<ServedModel>,
    ) -> Result<ResponseHead, ApiError> {
        let (name, mut ids) = (served.take_name(fields)?, fields.ids.clone());
        Ok(ResponseHead {
            id: ids.make(prefix),
            created: ids.time(),
            model: name.unwrap_or_else(|| served.name.clone()),
            served: served.clone(),
            ids,
        })
    }
}
