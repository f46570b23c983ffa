//! Prompts of `/v1/completions`, and the part of them that answers repeat.

use super::error::ApiError;
use super::fields::{Fields, missing};
use super::request::ApiPrompt;
use super::served::ServedModel;
use crate::tensor::Token;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Token>),
    Lists(Vec<Vec<Token>>),
}

/// Takes the texts or token lists to continue after one BOS.
///
/// The flag of each is true if the server added its BOS.
pub fn take_prompts(
    fields: &mut Fields,
    served: &ServedModel,
) -> Result<Vec<(ApiPrompt, bool)>, ApiError> {
    let bos = served.config.bos;
    let spelled = served.tokenizer.piece(bos).unwrap_or_default();
    let text = |text: String| {
        let adds_bos = spelled.is_empty() || !text.starts_with(&spelled);
        (ApiPrompt::Text(text), adds_bos)
    };
    let tokens = |mut tokens: Vec<Token>| {
        let adds_bos = tokens.first().is_some_and(|first| *first != bos);
        if adds_bos {
            tokens.insert(0, bos);
        }
        (ApiPrompt::Tokens(tokens), adds_bos)
    };
    let forms = "a text, a list of texts, a list of tokens or a list of such lists";
    let prompts: Vec<_> = match fields.take_as("prompt", forms)?.ok_or_else(|| missing("prompt"))? {
        Prompts::Text(one) => vec![text(one)],
        Prompts::Texts(texts) => texts.into_iter().map(text).collect(),
        Prompts::Tokens(list) => vec![tokens(list)],
        Prompts::Lists(lists) => lists.into_iter().map(tokens).collect(),
    };
    match prompts.is_empty() {
        true => Err(ApiError::bad("'prompt' is an empty list: send a text").param("prompt")),
        false => Ok(prompts),
    }
}

/// The prompt at the start of an answer.
#[derive(Clone, Default)]
pub struct Echo {
    pub text: Arc<str>,
    /// Number of leading tokens that the client did not send: a BOS, if the prompt is scored. Their
    /// log-probabilities are left out.
    pub hidden: usize,
}

impl Echo {
    /// Makes the repeated part of a prompt.
    ///
    /// `scores` means that the answer has the prompt's log-probabilities.
    pub fn new(prompt: &(ApiPrompt, bool), scores: bool, served: &ServedModel) -> Echo {
        let (prompt, adds_bos) = prompt;
        let text = match prompt {
            ApiPrompt::Text(text) => text.as_str().into(),
            ApiPrompt::Tokens(tokens) => served.tokenizer.decode(tokens).into(),
            ApiPrompt::Conversation(_) | ApiPrompt::Unseen(_) | ApiPrompt::Encoded(_) => {
                Arc::default()
            }
        };
        Echo { text, hidden: (scores && *adds_bos).into() }
    }
}
