//! `/v1/chat/completions` and `/v1/completions` of OpenAI's API.

use super::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use super::conversation::ApiConversation;
use super::echo::{self, Echo};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{ApiForm, CollectedAnswer, ResponseHead, SseEvents};
use super::functions;
use super::log_probs::{LogProbs, TextLogProbs};
use super::request::{ApiRequest, MOST_ANSWERS};
use super::served::ServedModel;
use super::tools::{AnswerPart, CallReader};
use crate::cli::io::record::FinishReason;
use crate::decode::TokenLogProbs;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Limit of alternatives to a token.
const MOST_LOG_PROBS: usize = 20;

/// Reads a body of `/v1/chat/completions`.
pub fn chat(
    fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let mut fields = fields;
    let head = ResponseHead::take("chatcmpl-", &mut fields, served)?;
    let items: Vec<Value> = fields.need("messages")?;
    let mut request = ApiRequest::take(&mut fields)?;
    request.take_format(&mut fields)?;
    let include_usage = take_include_usage(&mut fields)?;
    request.top_log_probs = take_top_log_probs(&mut fields)?;
    let is_older = fields.get("functions").is_some();
    request.tool_options = functions::take(&mut fields)?;
    request.thinking = served.take_thinking(&mut fields)?;
    let mut conversation = ApiConversation::read("messages", &items, None)?;
    if fields.take("continue_final_message")?.unwrap_or(false) {
        fields.pass_over(&["add_generation_prompt"]);
        conversation = conversation.continued();
        if !conversation.is_begun() {
            let what = "'continue_final_message' needs a last message of the assistant";
            let what = format!("{what}: add one, or leave the field out");
            return Err(ApiError::bad(what).param("continue_final_message"));
        }
    }
    fields.finish()?;
    request.converse(conversation, served);
    let reader = served.reader(request.tool_options.as_ref());
    let choices =
        (0..request.n).map(|_| ChoiceState { reader: reader.clone(), calls: 0 }).collect();
    let wants_log_probs = request.top_log_probs.is_some();
    Ok((request, Box::new(Chat { head, choices, is_older, include_usage, wants_log_probs })))
}

/// Takes whether the client wants the token counts at the end of a stream.
fn take_include_usage(fields: &mut Fields) -> Result<bool, ApiError> {
    let options: Option<Map<String, Value>> = fields.take("stream_options")?;
    Ok(options.is_some_and(|options| options.get("include_usage") == Some(&true.into())))
}

pub fn take_top_log_probs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top: Option<usize> = fields.take("top_logprobs")?;
    match top {
        Some(top) if top > MOST_LOG_PROBS => {
            let what = format!("'top_logprobs' is from 0 to {MOST_LOG_PROBS}");
            Err(ApiError::bad(what).param("top_logprobs"))
        }
        Some(1..) if !wanted => {
            let what = "'top_logprobs' needs 'logprobs' to be true";
            Err(ApiError::bad(what).param("top_logprobs"))
        }
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Returns OpenAI's token counts.
pub fn usage(figures: &RequestFigures) -> Value {
    let RequestFigures { prompt_tokens, cached_tokens, completion_tokens, .. } = figures;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}

/// One answer of a response that is not streamed.
#[derive(Serialize)]
struct Whole<M: Serialize, L: Serialize> {
    index: usize,
    #[serde(flatten)]
    message: M,
    logprobs: Option<L>,
    finish_reason: &'static str,
}

/// Returns one answer's part of a response that is not streamed.
///
/// `object` is the response without answers.
fn part(
    object: &Value,
    (choice, choices): (usize, usize),
    answer: &impl Serialize,
    figures: &RequestFigures,
) -> String {
    let mut text = match choice {
        0 => object.to_string().strip_suffix("]}").expect("answers come last").to_owned(),
        _ => ",".to_owned(),
    };
    text += &serde_json::to_string(answer).expect("texts and numbers");
    if choice + 1 == choices {
        text += &format!("],\"usage\":{}}}", usage(figures));
    }
    text
}

/// State of one answer.
struct ChoiceState {
    reader: CallReader,
    calls: usize,
}

/// Answers of `/v1/chat/completions`.
struct Chat {
    head: ResponseHead,
    choices: Vec<ChoiceState>,
    /// Whether the client uses the older form: it sent `functions` and reads `function_call`.
    is_older: bool,
    include_usage: bool,
    wants_log_probs: bool,
}

impl Chat {
    fn object(&self, kind: &str, choices: Value) -> Value {
        let ResponseHead { id, created, model, served, .. } = &self.head;
        json!({"id": id, "object": kind, "created": created, "model": model,
            "system_fingerprint": served.fingerprint, "choices": choices})
    }

    fn chunk(&self, choices: Value, out: &mut SseEvents) {
        let mut chunk = self.object("chat.completion.chunk", choices);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        out.data(&chunk);
    }

    fn delta(&self, choice: usize, delta: Value, log_probs: Value, out: &mut SseEvents) {
        let choice = json!({"index": choice, "delta": delta, "logprobs": log_probs,
            "finish_reason": null});
        self.chunk(json!([choice]), out);
    }

    fn finish(&self, choice: usize, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Length => "length",
            _ if self.choices[choice].calls == 0 => "stop",
            _ if self.is_older => "function_call",
            _ => "tool_calls",
        }
    }
}

impl ApiForm for Chat {
    fn whole(
        &mut self,
        answers: &[CollectedAnswer],
        figures: &RequestFigures,
        choice: usize,
    ) -> String {
        let answer = &answers[choice];
        let (mut content, mut calls) = (String::new(), Vec::<Value>::new());
        let reader = &mut self.choices[choice].reader;
        for part in reader.push(&answer.text).into_iter().chain(reader.finish()) {
            match part {
                AnswerPart::Text(text) => content += &text,
                AnswerPart::Call(name) => calls.push(json!({"id": self.head.ids.make("call_"),
                    "type": "function", "function": {"name": name, "arguments": ""}})),
                AnswerPart::Arguments(text) => {
                    let call = calls.last_mut().expect("arguments follow their call");
                    let arguments = &mut call["function"]["arguments"];
                    *arguments = (arguments.as_str().unwrap_or_default().to_owned() + &text).into();
                }
            }
        }
        self.choices[choice].calls = calls.len();
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !calls.is_empty() {
            match self.is_older {
                true => message["function_call"] = calls[0]["function"].take(),
                false => message["tool_calls"] = calls.into(),
            }
            if message["content"] == "" {
                message["content"] = Value::Null;
            }
        }
        if !answer.thought.is_empty() {
            message["reasoning_content"] = answer.thought.clone().into();
        }
        let log_probs = LogProbs { served: &self.head.served, log_probs: &answer.log_probs };
        let whole = Whole {
            index: choice,
            message: json!({"message": message}),
            logprobs: self.wants_log_probs.then_some(log_probs),
            finish_reason: self.finish(choice, answer.reason),
        };
        let object = self.object("chat.completion", json!([]));
        part(&object, (choice, answers.len()), &whole, figures)
    }

    fn begin(&mut self, _: u64, out: &mut SseEvents) {
        for choice in 0..self.choices.len() {
            let delta = json!({"role": "assistant", "content": "", "refusal": null});
            self.delta(choice, delta, Value::Null, out);
        }
    }

    fn piece(&mut self, choice: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        let mut log_probs = match self.wants_log_probs && !piece.log_probs.is_empty() {
            true => json!(LogProbs { served: &self.head.served, log_probs: &piece.log_probs }),
            false => Value::Null,
        };
        if !piece.thought.is_empty() {
            let delta = json!({"reasoning_content": piece.thought});
            self.delta(choice, delta, log_probs.take(), out);
        }
        let parts = self.choices[choice].reader.push(&piece.text);
        if parts.is_empty() && !log_probs.is_null() {
            self.delta(choice, json!({}), log_probs.take(), out);
        }
        for part in parts {
            let own = &mut self.choices[choice];
            let delta = match part {
                AnswerPart::Text(text) => json!({"content": text}),
                AnswerPart::Call(name) if self.is_older => {
                    own.calls += 1;
                    json!({"function_call": {"name": name, "arguments": ""}})
                }
                AnswerPart::Arguments(text) if self.is_older => {
                    json!({"function_call": {"arguments": text}})
                }
                AnswerPart::Call(name) => {
                    own.calls += 1;
                    let id = self.head.ids.make("call_");
                    json!({"tool_calls": [{"index": own.calls - 1, "id": id,
                        "type": "function", "function": {"name": name, "arguments": ""}}]})
                }
                AnswerPart::Arguments(text) => json!({"tool_calls": [{"index": own.calls - 1,
                    "function": {"arguments": text}}]}),
            };
            self.delta(choice, delta, log_probs.take(), out);
        }
    }

    fn end(&mut self, choice: usize, reason: FinishReason, _: &AnswerEnd, out: &mut SseEvents) {
        if let Some(AnswerPart::Text(text)) = self.choices[choice].reader.finish() {
            self.delta(choice, json!({"content": text}), Value::Null, out);
        }
        let finish = self.finish(choice, reason);
        let choice = json!({"index": choice, "delta": {}, "logprobs": null,
            "finish_reason": finish});
        self.chunk(json!([choice]), out);
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        if self.include_usage {
            let mut chunk = self.object("chat.completion.chunk", json!([]));
            chunk["usage"] = usage(figures);
            out.data(&chunk);
        }
        out.0 += "data: [DONE]\n\n";
    }
}

/// Reads a body of `/v1/completions`.
pub fn completions(
    fields: Fields,
    served: &Arc<ServedModel>,
) -> Result<(ApiRequest, Box<dyn ApiForm>), ApiError> {
    let mut fields = fields;
    let head = ResponseHead::take("cmpl-", &mut fields, served)?;
    let mut request = ApiRequest::take(&mut fields)?;
    request.take_format(&mut fields)?;
    let prompts = echo::take_prompts(&mut fields, served)?;
    let include_usage = take_include_usage(&mut fields)?;
    let top: Option<usize> = fields.take("logprobs")?;
    if top.is_some_and(|top| top > MOST_LOG_PROBS) {
        let what = format!("'logprobs' is from 0 to {MOST_LOG_PROBS}");
        return Err(ApiError::bad(what).param("logprobs"));
    }
    request.top_log_probs = top;
    let echo = fields.take("echo")?.unwrap_or(false);
    request.scores_prompt = echo && top.is_some();
    if request.scores_prompt && request.stream {
        let what = "'logprobs' of a prompt, which 'echo' asks for, are not streamed: \
            leave out 'stream', 'echo' or 'logprobs'";
        return Err(ApiError::bad(what).param("stream").code("unsupported_parameter"));
    }
    fields.finish()?;
    // Each prompt gets `n` answers.
    let answers = prompts.len().saturating_mul(request.n);
    if answers > MOST_ANSWERS {
        let what = format!("{answers} answers to one request: the limit is {MOST_ANSWERS}");
        return Err(ApiError::bad(what).param("prompt"));
    }
    let echo = |prompt| match echo {
        true => Echo::new(prompt, request.scores_prompt, served),
        false => Echo::default(),
    };
    let each = |prompt| std::iter::repeat_n(echo(prompt), request.n);
    let echoes = prompts.iter().flat_map(each).collect();
    request.prompts = prompts.into_iter().map(|(prompt, _)| prompt).collect();
    let (offsets, wants_log_probs) = (vec![0; answers], top.is_some());
    let has_prompt = request.scores_prompt;
    let form = TextAnswers { head, echoes, include_usage, wants_log_probs, has_prompt, offsets };
    Ok((request, Box::new(form)))
}

/// Answers of `/v1/completions`.
struct TextAnswers {
    head: ResponseHead,
    /// The prompts that the answers repeat.
    echoes: Vec<Echo>,
    include_usage: bool,
    wants_log_probs: bool,
    /// Whether the log-probabilities begin with those of the prompt.
    has_prompt: bool,
    /// Characters of each answer up to its last sent log-probability.
    offsets: Vec<usize>,
}

impl TextAnswers {
    fn object(&self, choices: Value) -> Value {
        let ResponseHead { id, created, model, served, .. } = &self.head;
        json!({"id": id, "object": "text_completion", "created": created, "model": model,
            "system_fingerprint": served.fingerprint, "choices": choices})
    }

    fn chunk(&self, choice: Value, out: &mut SseEvents) {
        let mut chunk = self.object(json!([choice]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        out.data(&chunk);
    }

    fn log_probs<'a>(
        &'a mut self,
        choice: usize,
        log_probs: &'a [TokenLogProbs],
    ) -> Option<TextLogProbs<'a>> {
        let (served, offset) = (&*self.head.served, self.offsets[choice]);
        let log_probs = log_probs.get(self.echoes[choice].hidden..).unwrap_or_default();
        let log_probs = TextLogProbs { served, log_probs, offset, has_prompt: self.has_prompt };
        if !self.wants_log_probs {
            return None;
        }
        self.offsets[choice] += log_probs.lengths().sum::<usize>();
        Some(log_probs)
    }
}

/// Returns OpenAI's word for a finish reason.
fn finish(reason: FinishReason) -> &'static str {
    if reason == FinishReason::Length { "length" } else { "stop" }
}

impl ApiForm for TextAnswers {
    fn whole(
        &mut self,
        answers: &[CollectedAnswer],
        figures: &RequestFigures,
        choice: usize,
    ) -> String {
        let answer = &answers[choice];
        let text = format!("{}{}", self.echoes[choice].text, answer.text);
        let object = self.object(json!([]));
        let whole = Whole {
            index: choice,
            message: json!({"text": text}),
            logprobs: self.log_probs(choice, &answer.log_probs),
            finish_reason: finish(answer.reason),
        };
        part(&object, (choice, answers.len()), &whole, figures)
    }

    fn begin(&mut self, _: u64, out: &mut SseEvents) {
        for (index, Echo { text, .. }) in self.echoes.iter().enumerate() {
            if text.is_empty() {
                continue;
            }
            let choice =
                json!({"index": index, "text": &**text, "logprobs": null, "finish_reason": null});
            self.chunk(choice, out);
        }
    }

    fn piece(&mut self, choice: usize, piece: &AnswerPiece, out: &mut SseEvents) {
        let log_probs = json!(self.log_probs(choice, &piece.log_probs));
        if piece.text.is_empty() && piece.log_probs.is_empty() {
            return;
        }
        let choice = json!({"index": choice, "text": piece.text, "logprobs": log_probs,
            "finish_reason": null});
        self.chunk(choice, out);
    }

    fn end(&mut self, choice: usize, reason: FinishReason, _: &AnswerEnd, out: &mut SseEvents) {
        let choice = json!({"index": choice, "text": "", "logprobs": null,
            "finish_reason": finish(reason)});
        self.chunk(choice, out);
    }

    fn close(&mut self, figures: &RequestFigures, out: &mut SseEvents) {
        if self.include_usage {
            let mut chunk = self.object(json!([]));
            chunk["usage"] = usage(figures);
            out.data(&chunk);
        }
        out.0 += "data: [DONE]\n\n";
    }
}
