//! The forms in which answers go out: one trait, a file each.

use super::ask::Served;
use super::error::ApiError;
use super::queue::{End, Figures, Piece};
use crate::cli::io::record::FinishReason;
use crate::decode::Chances;
use rand::RngCore;
use serde_json::Value;
use std::sync::Arc;

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    pub chances: Vec<Chances>,
    pub reason: FinishReason,
    pub stop_string: Option<String>,
}

/// Server-sent events, to be written.
#[derive(Debug, Default)]
pub struct Events(pub String);

impl Events {
    pub fn data(&mut self, value: &Value) {
        self.0 += &format!("data: {value}\n\n");
    }

    /// An event whose name is its `type`.
    pub fn named(&mut self, value: &Value) {
        let name = value["type"].as_str().unwrap_or("message");
        self.0 += &format!("event: {name}\ndata: {value}\n\n");
    }
}

/// How one request is answered.
pub trait Form: Send {
    /// Writes one of the answers, which are asked for in turn. All of them together are the
    /// response, and none is larger than its own text and chances need.
    fn whole(&mut self, answers: &[Answer], figures: &Figures, choice: usize) -> String;
    /// A stream begins.
    fn begin(&mut self, out: &mut Events);
    /// A choice goes on.
    fn piece(&mut self, choice: usize, piece: &Piece, out: &mut Events);
    /// A choice ends well.
    fn end(&mut self, choice: usize, reason: FinishReason, end: &End, out: &mut Events);
    /// All choices have ended.
    fn close(&mut self, figures: &Figures, out: &mut Events);
    /// The stream ends with an error.
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.openai());
    }
}

/// What all objects of an answer say.
#[derive(Clone)]
pub struct Head {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub served: Arc<Served>,
}

impl Head {
    /// `prefix` is what ids of this kind begin with.
    pub fn new(prefix: &str, model: Option<String>, served: &Arc<Served>) -> Head {
        Head {
            id: new_id(prefix),
            created: now(),
            model: model.unwrap_or_else(|| served.name.clone()),
            served: served.clone(),
        }
    }
}

/// An id that nobody guesses.
pub fn new_id(prefix: &str) -> String {
    let mut bytes = [0; 12];
    rand::rng().fill_bytes(&mut bytes);
    format!("{prefix}{}", crate::util::hex(bytes))
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
