//! Log-probabilities of tokens as JSON, in the form of each endpoint.

use super::served::ServedModel;
use crate::decode::TokenLogProbs;
use crate::tensor::Token;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Log-probabilities in the form of `/v1/chat/completions`.
///
/// They are serialised directly, since a tree of JSON values would need twenty times the memory.
pub struct LogProbs<'a> {
    pub served: &'a ServedModel,
    pub log_probs: &'a [TokenLogProbs],
}

/// A token as text and bytes, with its log-probability.
#[derive(Serialize)]
struct Chance {
    token: String,
    logprob: Option<f64>,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Chance>>,
}

impl Chance {
    fn new(served: &ServedModel, token: Token, logprob: Option<f32>) -> Chance {
        let bytes = served.tokenizer.token_bytes(token);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Chance { token, logprob: logprob.map(f64::from), bytes, top_logprobs: None }
    }
}

/// The list without the object around it, as in `/api/chat`.
pub struct LogProbList<'a>(pub &'a LogProbs<'a>);

impl Serialize for LogProbList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let LogProbs { served, log_probs } = self.0;
        serializer.collect_seq(log_probs.iter().map(|own| {
            let best = own.best.iter();
            let best = best.map(|(token, logprob)| Chance::new(served, *token, Some(*logprob)));
            let top_logprobs = Some(best.collect());
            let own = Chance::new(served, own.token, own.log_prob);
            Chance { top_logprobs, ..own }
        }))
    }
}

impl Serialize for LogProbs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("LogProbs", 2)?;
        object.serialize_field("content", &LogProbList(self))?;
        object.serialize_field("refusal", &())?;
        object.end()
    }
}

/// Log-probabilities in the form of `/v1/completions`.
pub struct TextLogProbs<'a> {
    pub served: &'a ServedModel,
    pub log_probs: &'a [TokenLogProbs],
    /// Characters of the answer that come before these tokens.
    pub offset: usize,
    /// Whether the tokens begin with a prompt. The first token of a prompt gets nulls.
    pub has_prompt: bool,
}

impl TextLogProbs<'_> {
    fn text(&self, token: Token) -> String {
        String::from_utf8_lossy(&self.served.tokenizer.token_bytes(token)).into_owned()
    }

    /// Returns the number of characters of each token.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.log_probs.iter().map(|own| self.text(own.token).chars().count())
    }
}

/// Serialises the items of an iterator as a list.
struct List<F>(F);

impl<F: Fn() -> I, I: Iterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

impl Serialize for TextLogProbs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let log_probs = || self.log_probs.iter();
        let known = || {
            let is_known = |i| i > 0 || !self.has_prompt;
            log_probs().enumerate().map(move |(i, own)| (own, own.log_prob.filter(|_| is_known(i))))
        };
        let best = |(own, log_prob): (&TokenLogProbs, Option<f32>)| {
            let mut best = serde_json::Map::new();
            for (token, log_prob) in &own.best {
                // If several tokens have the same text, the likeliest one counts.
                best.entry(self.text(*token)).or_insert_with(|| Value::from(*log_prob));
            }
            log_prob.map(|_| best)
        };
        let offsets = || {
            self.lengths().scan(self.offset, |at, length| {
                *at += length;
                Some(*at - length)
            })
        };
        let mut object = serializer.serialize_struct("LogProbs", 4)?;
        object.serialize_field("tokens", &List(|| log_probs().map(|c| self.text(c.token))))?;
        object.serialize_field(
            "token_logprobs",
            &List(|| known().map(|(_, log_prob)| log_prob.map(f64::from))),
        )?;
        object.serialize_field("top_logprobs", &List(|| known().map(best)))?;
        object.serialize_field("text_offset", &List(offsets))?;
        object.end()
    }
}
