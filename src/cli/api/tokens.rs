//! Bodies of `/tokenize` and `/detokenize`, in the forms of llama.cpp and vLLM, and their answers.

use super::error::ApiError;
use super::fields::{Fields, missing};
use super::served::ServedModel;
use crate::models::{Special, Tokenizer};
use crate::tensor::Token;
use serde_json::{Value, json};

/// Limit of a text for `/tokenize`, in bytes.
pub const LONGEST_TEXT: usize = 1 << 20;
/// Limit of tokens for `/detokenize`.
const MOST_TOKENS: usize = 1 << 18;

/// Splits a text into tokens.
pub fn tokenize(mut fields: Fields, served: &ServedModel) -> Result<String, ApiError> {
    fields.pass_over(&["model"]);
    let mut text: Option<String> = None;
    for name in ["text", "prompt", "content"] {
        text = fields.take(name)?.or(text);
    }
    let text = text.ok_or_else(|| missing("content"))?;
    // llama.cpp's and vLLM's servers parse control tokens in a text by default.
    let special = match fields.take("parse_special")?.unwrap_or(true) {
        true => Special::Parse,
        false => Special::AsText,
    };
    let [add_special, add_special_tokens] =
        [fields.take("add_special")?, fields.take("add_special_tokens")?];
    let has_bos = add_special.or(add_special_tokens).unwrap_or(false);
    let with_pieces = fields.take("with_pieces")?.unwrap_or(false);
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
    let count = tokens.len();
    if !with_pieces {
        return Ok(json!({"count": count, "tokens": tokens}).to_string());
    }
    // A piece that is not valid UTF-8 is a list of bytes.
    let piece = |token: &Token| {
        let mut bytes = served.tokenizer.token_bytes(*token);
        if bytes.is_empty() {
            // A control token is shown by its name, as in llama.cpp's server.
            bytes = served.tokenizer.piece(*token).unwrap_or_default().into_bytes();
        }
        let piece = String::from_utf8(bytes).map_or_else(|e| json!(e.as_bytes()), Value::from);
        json!({"id": token, "piece": piece})
    };
    let tokens: Vec<Value> = tokens.iter().map(piece).collect();
    Ok(json!({"count": count, "tokens": tokens}).to_string())
}

/// Converts tokens to text. Control tokens are written as their names in the vocabulary.
pub fn spelled(tokenizer: &Tokenizer, tokens: &[Token]) -> String {
    let bytes = |token: &Token| {
        let bytes = tokenizer.token_bytes(*token);
        match bytes.is_empty() {
            true => tokenizer.piece(*token).unwrap_or_default().into_bytes(),
            false => bytes,
        }
    };
    let bytes: Vec<u8> = tokens.iter().flat_map(bytes).collect();
    String::from_utf8_lossy(&bytes).into_owned()
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
