//! Bodies of `/tokenize` and `/detokenize`, in the forms of llama.cpp and vLLM, and their answers.

use super::error::ApiError;
use super::fields::{Fields, missing};
use super::request::ServedModel;
use crate::models::Special;
use crate::tensor::Token;
use serde_json::json;

/// Most bytes of a text for `/tokenize`.
pub const LONGEST_TEXT: usize = 1 << 20;
/// Most tokens for `/detokenize`.
const MOST_TOKENS: usize = 1 << 18;

/// Splits a text into tokens.
pub fn tokenize(mut fields: Fields, served: &ServedModel) -> Result<String, ApiError> {
    fields.pass_over(&["model"]);
    // In vLLM's form, with `prompt`, a text spells control tokens.
    let parses = fields.get("prompt").is_some();
    let mut text: Option<String> = None;
    for name in ["text", "prompt", "content"] {
        text = fields.take(name)?.or(text);
    }
    let text = text.ok_or_else(|| missing("content"))?;
    let special = match fields.take("add_special")?.unwrap_or(parses) {
        true => Special::Parse,
        false => Special::AsText,
    };
    let has_bos = fields.take("add_special_tokens")?.unwrap_or(false);
    fields.finish()?;
    if text.len() > LONGEST_TEXT {
        let what = format!("the text is longer than {LONGEST_TEXT} bytes: shorten it");
        return Err(ApiError::new(413, what));
    }
    let tokens = match has_bos {
        true => {
            let bos = served.config.bos;
            served.tokenizer.encode_behind_bos(&text, special, bos).map(|(all, _)| all)
        }
        false => served.tokenizer.encode(&text, special),
    };
    let tokens = tokens.map_err(|error| ApiError::of(&error))?;
    Ok(json!({"count": tokens.len(), "tokens": tokens}).to_string())
}

/// Joins tokens to a text.
pub fn detokenize(mut fields: Fields, served: &ServedModel) -> Result<String, ApiError> {
    fields.pass_over(&["model"]);
    let tokens: Vec<Token> = fields.need("tokens")?;
    fields.finish()?;
    if tokens.len() > MOST_TOKENS {
        let what = format!("there are more than {MOST_TOKENS} tokens: send fewer");
        return Err(ApiError::new(413, what));
    }
    let text = served.tokenizer.decode(&tokens);
    Ok(json!({"content": text, "prompt": text, "text": text}).to_string())
}
