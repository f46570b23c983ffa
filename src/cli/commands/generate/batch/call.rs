//! Lines of OpenAI's batches. Their bodies are parsed and answered by the server's code.

use super::{Batch, ends_batch};
use crate::cli::api::answer::RequestFigures;
use crate::cli::api::error::ApiError;
use crate::cli::api::fields::Fields;
use crate::cli::api::form::{ApiForm, CollectedAnswer, CollectedAnswers, Parse};
use crate::cli::api::ids::Ids;
use crate::cli::api::request::ApiPrompt;
use crate::cli::api::{openai, responses};
use crate::cli::io::format::AnswerFormat;
use crate::runtime::answers::AnswerRequest;
use anyhow::Result;
use serde_json::Value;

/// A body and its parser.
#[derive(Clone, Debug)]
pub struct BatchCall {
    parse: Parse,
    body: Value,
}

/// A call and the requests for its answers, or the refusal of the call.
type PreparedCall<D> = Result<(OpenCall, Vec<AnswerRequest<D>>), ApiError>;

/// Returns the parser for a path. An address may come before the path.
fn parser(url: &str) -> Option<Parse> {
    // Clients of the server may also leave out `/v1`.
    let parsers: [(&str, Parse); 3] = [
        ("/chat/completions", openai::chat),
        ("/completions", openai::completions),
        ("/responses", responses::body),
    ];
    let ends = |(path, parse): (&str, Parse)| url.ends_with(path).then_some(parse);
    parsers.into_iter().find_map(ends)
}

impl BatchCall {
    /// Takes the call from a line.
    pub fn read(line: &mut Value) -> Result<BatchCall, ApiError> {
        let url = line.get("url").and_then(Value::as_str).unwrap_or("/v1/chat/completions");
        let parse = parser(url).ok_or_else(|| {
            let what = "send lines for /v1/chat/completions, /v1/completions or /v1/responses";
            ApiError::new(404, format!("there is no {url} here: {what}")).code("not_found")
        })?;
        match line.get_mut("body").map(Value::take) {
            Some(body) => Ok(BatchCall { parse, body }),
            None => Err(ApiError::bad("the line has no body: send one").param("body")),
        }
    }

    /// Prepares the answers, each with its data.
    ///
    /// A body without a seed gets `seed`, and `id` determines the ids in the response. An error in
    /// the outer result ends the batch.
    pub fn prepare<D>(
        self,
        batch: &Batch<'_>,
        id: &Value,
        seed: u64,
        data: &dyn Fn(usize) -> D,
    ) -> Result<PreparedCall<D>> {
        let (served, (notes, told)) = (batch.served()?, &batch.notes);
        let fields = Fields::of(self.body, notes, Ids::of(id.to_string()));
        let parsed = fields.and_then(|fields| (self.parse)(fields, served));
        told.try_iter().for_each(|note| batch.ui.note(note));
        let (mut request, form) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return Ok(Err(error)),
        };
        // Options of the batch are the defaults for fields that the body leaves out.
        let sampling = &batch.options.sampling;
        request.seed.get_or_insert(seed);
        request.ignore_eos |= sampling.ignore_eos;
        if request.stops.is_empty() {
            request.stops.clone_from(&sampling.stop);
        }
        if request.format.is_none() {
            request.format = batch.source.clone().map(AnswerFormat::Grammar);
        }
        for prompt in &mut request.prompts {
            if let ApiPrompt::Conversation(input) = prompt {
                batch.complete(input);
            }
        }
        match request.prepared(served, data) {
            Ok((requests, _)) => {
                Ok(Ok((OpenCall { form, collected: CollectedAnswers::new(&request) }, requests)))
            }
            Err(error) => refused(error).map(Err),
        }
    }
}

/// Converts an error to the response to a call. Returns errors that end the batch.
pub fn refused(error: anyhow::Error) -> Result<ApiError> {
    if ends_batch(&error) { Err(error) } else { Ok(ApiError::of(&error)) }
}

/// A call with answers that have not ended.
pub struct OpenCall {
    form: Box<dyn ApiForm>,
    collected: CollectedAnswers,
}

/// The response to a call.
#[derive(Clone, Debug)]
pub struct CallAnswer {
    /// A JSON object.
    pub body: String,
    /// Number of tokens of all answers.
    pub tokens: u64,
}

impl OpenCall {
    /// Adds an answer that ended.
    ///
    /// Cache counts and times are left out, because they differ from run to run.
    pub fn take(
        &mut self,
        choice: usize,
        answer: CollectedAnswer,
        prompt_tokens: u64,
        completion_tokens: u64,
    ) {
        let figures =
            RequestFigures { prompt_tokens, completion_tokens, ..RequestFigures::default() };
        self.collected.answers[choice] = answer;
        self.collected.count(choice, &figures);
    }

    /// Returns the response after all answers have ended.
    pub fn answer(&mut self) -> Option<CallAnswer> {
        let CollectedAnswers { answers, figures, open: 0, .. } = &self.collected else {
            return None;
        };
        let part = |choice| self.form.whole(answers, figures, choice);
        let body = (0..answers.len()).map(part).collect();
        Some(CallAnswer { body, tokens: figures.completion_tokens })
    }
}
