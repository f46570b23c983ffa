//! Endpoints of llama-server: `/completion`, `/apply-template` and `/props`.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents};
use super::openai;
use super::request::{ApiPrompt, ApiRequest};
use super::served::ServedModel;
use super::tokens::{LONGEST_TEXT, spelled};
use crate::cli::io::record::FinishReason;
use crate::models::Special;
use crate::tensor::Token;
use serde_json::{Value, json};
use std::sync::Arc;

/// Reads a body of `/completion`.
///
/// Control tokens in the prompt's text are read as tokens, and a text gets a BOS.
pub fn completion(
    mut fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let head = ResponseHead::take("", &mut fields, served)?;
    let prompt = tokens_of(fields.need("prompt")?, served)?;
    fields.only("n", &[1.into()])?;
    if fields.get("grammar").is_some_and(|grammar| grammar != "") {
        let remedy = "llama-server's grammars are GBNF, so send 'json_schema' or 'regex'";
        return Err(ApiError::unsupported("grammar", remedy));
    }
    let mut request = ApiRequest::take(&mut fields)?;
    request.take_format(&mut fields)?;
    fields.finish()?;
    request.prompts = vec![ApiPrompt::Tokens(prompt)];
    Ok((request, Box::new(LlamaAnswer { head, prompt_tokens: 0, tokens: 0, ended: None })))
}

/// Returns the tokens of a prompt: a text, a list of tokens, or a list of both.
fn tokens_of(prompt: Value, served: &ServedModel) -> Result<Vec<Token>, ApiError> {
    let wrong =
        || ApiError::bad("'prompt' is a text or a list of tokens and texts").param("prompt");
    let parts = match prompt {
        Value::Array(parts) => parts,
        text => vec![text],
    };
    let bytes: usize = parts.iter().filter_map(Value::as_str).map(str::len).sum();
    if bytes > LONGEST_TEXT {
        let what = format!("the prompt is longer than {LONGEST_TEXT} bytes: shorten it");
        return Err(ApiError::new(413, what));
    }
    let (mut tokens, tokenizer) = (Vec::new(), &served.tokenizer);
    for part in &parts {
        match part {
            Value::String(text) => {
                let encoded = match tokens.is_empty() {
                    true => tokenizer
                        .encode_behind_bos(text, Special::Parse, served.config.bos)
                        .map(|(all, _)| all),
                    false => tokenizer.encode(text, Special::Parse),
                };
                tokens.extend(encoded.map_err(|error| ApiError::of(&error))?);
            }
            part => {
                let token = part.as_u64().and_then(|token| Token::try_from(token).ok());
                tokens.push(token.ok_or_else(wrong)?);
            }
        }
    }
    Ok(tokens)
}

/// Renders the messages of a body of `/v1/chat/completions` with the chat template.
///
/// Returns the text without its BOS.
pub fn apply_template(fields: Fields, served: &Arc<ServedModel>) -> Result<String, ApiError> {
    let (request, _) = openai::chat(fields, served)?;
    if request.images().next().is_some() {
        return Err(ApiError::bad("a rendered prompt cannot contain images: leave them out"));
    }
    let wrong = |error: anyhow::Error| ApiError::of(&error);
    let mut tokens = Vec::new();
    for prompt in &request.prompts {
        tokens.extend(prompt.encoded(served).map_err(wrong)?.tokens);
    }
    let after = tokens.strip_prefix(&[served.config.bos]).unwrap_or(&tokens);
    Ok(json!({"prompt": spelled(&served.tokenizer, after)}).to_string())
}

/// Describes a model and the defaults of requests. `slots` is the number of texts at once.
pub fn props(served: &ServedModel, slots: usize) -> Value {
    let ServedModel { sampling, context, name, tokenizer, config, .. } = served;
    let piece = |token: Option<&Token>| token.and_then(|token| tokenizer.piece(*token));
    json!({
        "default_generation_settings": {
            "n_ctx": context,
            "params": {
                "temperature": sampling.temperature, "top_k": sampling.top_k,
                "top_p": sampling.top_p, "min_p": sampling.min_p,
                "repeat_penalty": sampling.repeat_penalty,
                "repeat_last_n": sampling.repeat_last_n,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
            },
        },
        "total_slots": slots,
        "model_alias": name,
        "model_path": name,
        "chat_template": served.template.source(),
        "modalities": {"vision": served.viewer.is_ok(), "audio": false},
        "bos_token": piece(Some(&config.bos)),
        "eos_token": piece(config.eos.first()),
        "build_info": concat!("gemma ", env!("CARGO_PKG_VERSION")),
    })
}

/// An answer in llama-server's form.
struct LlamaAnswer {
    head: ResponseHead,
    prompt_tokens: u64,
    tokens: u64,
    ended: Option<(FinishReason, Option<String>)>,
}

impl LlamaAnswer {
    fn piece_of(&self, content: &str) -> Value {
        json!({"index": 0, "content": content, "tokens": [], "stop": false, "id_slot": 0,
            "tokens_predicted": self.tokens, "tokens_evaluated": self.prompt_tokens})
    }

    fn last(&self, content: &str, figures: &RequestFigures) -> Value {
        let (reason, word) = self.ended.clone().unwrap_or((FinishReason::Stop, None));
        let stop_type = match reason {
            FinishReason::Length => "limit",
            FinishReason::StopString => "word",
            _ => "eos",
        };
        let decode_ms = figures.decode_time.as_secs_f64() * 1e3;
        let tokens = figures.completion_tokens;
        json!({
            "index": 0, "content": content, "tokens": [], "id_slot": 0, "stop": true,
            "model": self.head.model, "tokens_predicted": tokens,
            "tokens_evaluated": figures.prompt_tokens, "tokens_cached": figures.cached_tokens,
            "truncated": false, "stop_type": stop_type,
            "stopping_word": word.unwrap_or_default(),
            "timings": {
                "prompt_n": figures.prompt_tokens - figures.cached_tokens,
                "predicted_n": tokens, "predicted_ms": decode_ms,
                "predicted_per_second":
                    if decode_ms > 0.0 { 1e3 * tokens as f64 / decode_ms } else { 0.0 },
            },
        })
    }
}

impl ApiForm for LlamaAnswer {
    fn whole(&mut self, answers: &[CollectedAnswer], figures: &RequestFigures, _: usize) -> String {
        let Some(answer) = answers.first() else { return "{}".to_owned() };
        self.ended = Some((answer.reason, answer.stop_string.clone()));
        self.last(&answer.text, figures).to_string()
    }

    fn begin(&mut self, prompt_tokens: u64, _: &mut SseEvents) {
        self.prompt_tokens = prompt_tokens;
    }

    fn piece(&mut self, _: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        self.tokens += piece.tokens;
        if !piece.text.is_empty() {
            out.data(&self.piece_of(&piece.text));
        }
    }

    fn end(&mut self, _: usize, reason: FinishReason, end: &AnswerEnd, _: &mut SseEvents) {
        self.ended = Some((reason, end.stop_string.clone()));
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        out.data(&self.last("", figures));
    }
}
