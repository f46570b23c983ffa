//! The request that all API forms are parsed into, and its conversion to requests for the engine.

use super::answer::EVENTS;
use super::conversation::ApiConversation;
use super::error::ApiError;
use super::fields::Fields;
use super::functions::ToolOptions;
use super::sampling::SamplingFields;
use super::served::{ServedModel, Thinking};
use crate::cli::io::format::{AnswerFormat, AnswerFormatFields};
use crate::cli::io::prompt::{EncodedPrompt, PromptEncoder, PromptInput, UnseenPrompt};
use crate::decode::Request;
use crate::error::Fault;
use crate::grammar::tools::{self, Tool};
use crate::grammar::{Enforcement, Grammar, GrammarSource};
use crate::models::{Image, MessageImage, Special};
use crate::runtime::answers::{self, AnswerRequest};
use crate::runtime::constraints::Constrained;
use crate::runtime::load::check_prompt;
use crate::runtime::options::AutoOr;
use crate::tensor::Token;
use crate::util::json;
use anyhow::{Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// Memory that the tokenizer needs for each byte of a text, in bytes.
pub const TOKENISER_MEMORY: usize = 240;
/// Bytes that a chat template may add to twice the bytes of the messages.
const RENDERED: usize = 1 << 16;
/// Memory of an answer in bytes, for each of its tokens, for each token with a log-probability, and
/// for each alternative to it. The last two include their JSON.
const ANSWER: usize = 1 << 12;
const TOKEN: usize = 16;
const CHANCES: usize = 64;
const BEST: usize = 12;
const CHANCES_JSON: usize = 100;
const BEST_JSON: usize = 80;

/// Fields that limit the tokens of an answer. The first that is given counts.
const MAX_TOKENS: [&str; 5] =
    ["max_completion_tokens", "max_tokens", "n_predict", "max_new_tokens", "num_predict"];

/// Limit of answers to one request.
pub const MOST_ANSWERS: usize = 64;
/// Limit of stop strings, and of the bytes of each: every piece of text is searched for all of
/// them.
const MOST_STOPS: usize = 64;
const LONGEST_STOP: usize = 4096;

/// The text before an answer.
#[derive(Clone, Debug)]
pub enum ApiPrompt {
    /// Messages for the chat template.
    Conversation(PromptInput),
    /// A text to continue after one BOS.
    Text(String),
    /// Tokens to continue, BOS included.
    Tokens(Vec<Token>),
    /// Messages as tokens, without their decoded images.
    Unseen(UnseenPrompt),
    /// Any of the above, encoded for the model.
    Encoded(EncodedPrompt),
}

/// A parsed request.
#[derive(Clone, Debug, Default)]
pub struct ApiRequest {
    /// Each prompt gets `n` answers.
    pub prompts: Vec<ApiPrompt>,
    pub n: usize,
    pub sampling: SamplingFields,
    pub seed: Option<u64>,
    pub stops: Vec<String>,
    pub max_tokens: Option<usize>,
    pub ignore_eos: bool,
    pub format: Option<AnswerFormat>,
    pub tool_options: Option<ToolOptions>,
    /// Whether a thought comes before each answer, and the limit of its tokens.
    pub thinking: Thinking,
    /// Number of alternatives to each token in the response; `None` for no log-probabilities.
    pub top_log_probs: Option<usize>,
    /// Whether the response has log-probabilities of the prompt tokens too.
    pub scores_prompt: bool,
    pub stream: bool,
    /// Memory of the fields that the response repeats, in bytes.
    pub repeated: usize,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum StopField {
    One(String),
    More(Vec<String>),
}

/// Takes one or several stop strings, and drops empty ones.
pub fn take_stops(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let mut stops = match fields.take_as(name, "a text or a list of texts")? {
        None => Vec::new(),
        Some(StopField::One(text)) => vec![text],
        Some(StopField::More(texts)) => texts,
    };
    stops.retain(|text| !text.is_empty());
    if stops.len() > MOST_STOPS || stops.iter().any(|text| text.len() > LONGEST_STOP) {
        let what = format!("'{name}' may have {MOST_STOPS} texts of at most {LONGEST_STOP} bytes");
        return Err(ApiError::bad(what).param(name));
    }
    Ok(stops)
}

impl ApiRequest {
    /// Takes the fields that OpenAI's two forms have in common.
    pub fn take(fields: &mut Fields) -> Result<ApiRequest, ApiError> {
        let n = fields.take("n")?.unwrap_or(1);
        if !(1..=MOST_ANSWERS).contains(&n) {
            let what = format!("'n' is from 1 to {MOST_ANSWERS}");
            return Err(ApiError::bad(what).param("n"));
        }
        fields.only("best_of", &[n.into()])?;
        Ok(ApiRequest {
            n,
            sampling: SamplingFields::take(fields)?,
            seed: fields.take_seed()?,
            stops: [take_stops(fields, "stop")?, take_stops(fields, "stopping_strings")?].concat(),
            max_tokens: fields.take_limit_of(&MAX_TOKENS)?,
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            stream: fields.take("stream")?.unwrap_or(false),
            ..ApiRequest::default()
        })
    }

    /// Takes the format of the answer.
    pub fn take_format(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let outputs: Value = fields.take("structured_outputs")?.unwrap_or_default();
        let output = |name: &str| outputs.get(name).filter(|value| !value.is_null()).cloned();
        let text = |name| output(name).and_then(|value| value.as_str().map(str::to_owned));
        let given = AnswerFormatFields {
            response_format: fields.take("response_format")?,
            json_schema: fields.take("json_schema")?.or(output("json")),
            grammar: fields.take("grammar")?.or(text("grammar")).filter(|text| !text.is_empty()),
            regex: fields.take("regex")?.or(text("regex")).filter(|text| !text.is_empty()),
        };
        if !outputs.is_null() && given == AnswerFormatFields::default() {
            let remedy = "send json, regex or grammar in it";
            return Err(ApiError::unsupported("structured_outputs", remedy));
        }
        let name = given.name();
        self.format = given.one().map_err(|error| ApiError::of(&error).param(name))?;
        Ok(())
    }

    /// Sets the conversation to answer.
    ///
    /// The functions and the thinking of the request have to be set before.
    pub fn converse(&mut self, conversation: ApiConversation, served: &ServedModel) {
        self.thinking.is_on &= !conversation.is_begun();
        let functions = self.tool_options.as_ref().map_or(&[][..], |options| &options.tools);
        let marks = !served.call_marks().is_empty();
        let input = conversation.prompt(functions, marks, self.thinking.is_on);
        self.prompts = vec![ApiPrompt::Conversation(input)];
    }

    /// Replaces the prompts by their tokens, which need less memory than texts.
    ///
    /// Refuses a prompt that leaves no room for an answer.
    pub fn encode(&mut self, served: &ServedModel) -> Result<()> {
        for prompt in &mut self.prompts {
            *prompt = ApiPrompt::Encoded(prompt.encoded(served)?);
        }
        Ok(())
    }

    /// Does the same without decoding images. [`unseen`](Self::unseen) returns their files.
    pub fn tokenise(&mut self, served: &ServedModel) -> Result<()> {
        for prompt in &mut self.prompts {
            *prompt = prompt.tokenised(served)?;
        }
        Ok(())
    }

    /// Returns the files of the images that were not decoded, in the order of the prompts.
    pub fn unseen(&self) -> Vec<Arc<[u8]>> {
        let files = |prompt: &ApiPrompt| match prompt {
            ApiPrompt::Unseen(prompt) => prompt.files.clone(),
            _ => Vec::new(),
        };
        self.prompts.iter().flat_map(files).collect()
    }

    /// Puts the decoded images of those files into the prompts.
    pub fn show(&mut self, images: Vec<Arc<Image>>, served: &ServedModel) -> Result<()> {
        let mut images = images.into_iter();
        for prompt in &mut self.prompts {
            if let ApiPrompt::Unseen(unseen) = prompt {
                let own = images.by_ref().take(unseen.files.len()).collect();
                let unseen = std::mem::take(unseen);
                let seen = unseen.seen(served.viewer(), &served.tokenizer, own)?;
                *prompt = ApiPrompt::Encoded(seen);
            }
        }
        Ok(())
    }

    /// Returns the images of all prompts.
    pub fn images(&self) -> impl Iterator<Item = &MessageImage> {
        self.prompts.iter().flat_map(ApiPrompt::images)
    }

    /// Returns the memory of an encoded request in bytes: tokens, texts, and JSON values.
    pub fn kept(&self) -> usize {
        let tokens: usize = self.prompts.iter().map(ApiPrompt::kept).sum();
        let stops: usize = self.stops.iter().map(String::len).sum();
        let tools = self.tool_options.iter().flat_map(|options| &options.tools);
        let functions: usize = tools
            .map(|Tool { name, description, parameters, .. }| {
                let texts = name.len() + description.as_ref().map_or(0, String::len);
                texts + json::held(parameters)
            })
            .sum();
        let format = match &self.format {
            Some(AnswerFormat::Grammar(source)) => source.held(),
            None | Some(AnswerFormat::Text) => 0,
        };
        tokens + stops + functions + format + self.repeated
    }

    /// Compiles the grammar of the answers.
    ///
    /// If functions that are not strict make it too complex, only types, names and choices are
    /// enforced. If that fails too, the error names the function that is too complex or invalid by
    /// itself.
    pub fn compile(
        &self,
        source: GrammarSource,
        served: &ServedModel,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Grammar> {
        let get =
            |source: &GrammarSource| served.constraints.get(source, self.ignore_eos, is_wanted);
        let outcome = get(&source);
        let Some(options) = self.tool_options.as_ref().filter(|_| !self.ignore_eos) else {
            return outcome;
        };
        if outcome.is_ok() {
            return outcome;
        }
        let structure = |tools: &[Tool], answer: Option<&Value>| {
            let marks = served.call_marks();
            let level = Enforcement::Structure;
            tools::source(tools, options.calls, options.many, &marks, answer, level)
                .and_then(|source| get(&source))
        };
        let whole = structure(&options.tools, self.answer_schema()?);
        if whole.is_ok() {
            return whole;
        }
        // Checks the answer's schema by itself, to name it in the error.
        if let Some(AnswerFormat::Grammar(answer)) = &self.format {
            get(answer)?;
        }
        let mut tools = &options.tools[..];
        while tools.len() > 1 {
            let (first, second) = tools.split_at(tools.len() / 2);
            tools = match [first, second].into_iter().find(|half| structure(half, None).is_err()) {
                Some(half) => half,
                None => {
                    bail!(Fault::usage("the functions are too complex together").help("send fewer"))
                }
            };
        }
        match tools {
            [tool] => {
                let why = get(&tool.alone()?).err().map(|why| format!("{why:#}"));
                let why = why.unwrap_or_else(|| "its parameters are too complex".into());
                bail!(tool.fault(&why))
            }
            _ => whole,
        }
    }

    /// Returns the schema of answers without calls.
    fn answer_schema(&self) -> Result<Option<&Value>> {
        match &self.format {
            None | Some(AnswerFormat::Text) => Ok(None),
            Some(AnswerFormat::Grammar(GrammarSource::JsonSchema(schema))) => Ok(Some(schema)),
            Some(AnswerFormat::Grammar(_)) => bail!(
                Fault::usage("a request cannot have both functions and 'grammar'")
                    .help("leave out tools or grammar, or send tool_choice: none")
            ),
        }
    }

    /// Does all the work before the engine on the calling thread.
    ///
    /// Returns the requests and the seed of the first one.
    pub fn prepared<D>(
        &mut self,
        served: &ServedModel,
        delivery: &dyn Fn(usize) -> D,
    ) -> Result<(Vec<AnswerRequest<D>>, u64)> {
        self.encode(served)?;
        let source = self.source(served, Enforcement::Expressible)?;
        let grammar = source.map(|source| self.compile(source, served, &|| true)).transpose()?;
        self.requests(served, grammar, delivery)
    }

    /// Returns a request for each answer, in the order of the prompts, and the seed of the first
    /// one.
    ///
    /// Each further answer to a prompt has the next seed. `delivery` makes the delivery of the nth
    /// answer.
    pub fn requests<D>(
        &self,
        served: &ServedModel,
        grammar: Option<Grammar>,
        delivery: &dyn Fn(usize) -> D,
    ) -> Result<(Vec<AnswerRequest<D>>, u64)> {
        let seed = self.seed.unwrap_or_else(|| rand::random::<u32>() as u64);
        let mut requests = Vec::with_capacity(self.answers());
        for prompt in &self.prompts {
            let EncodedPrompt { tokens: history, images, .. } = prompt.encoded(served)?;
            for i in 0..self.n as u64 {
                let Thinking { is_on, budget } = self.thinking;
                let constrained =
                    Constrained::new(grammar.as_ref(), &history, &served.tokenizer, is_on, budget);
                let seed = seed.wrapping_add(i);
                let config = self.sampling.config(&served.sampling, seed);
                let (tokenizer, ends) = (&served.tokenizer, &served.stop_ids);
                let sampler =
                    answers::sampler(config, &constrained, tokenizer, ends, self.ignore_eos)?;
                // Computes the first mask here, so that the engine's thread need not wait for it.
                // An error is reported when the answer begins.
                let _ = sampler.mask(&history);
                let text = Request::new(history.clone(), sampler, self.most_tokens(served));
                let (top_log_probs, scored) = (self.top_log_probs, self.scores_prompt.then_some(0));
                let images = images.clone();
                let text = Request { images, top_log_probs, scored, ..text };
                let (stops, data) = (self.stops.clone(), delivery(requests.len()));
                let shows_calls = self.tool_options.is_some();
                requests.push(AnswerRequest { text, constrained, stops, shows_calls, data });
            }
        }
        Ok((requests, seed))
    }

    /// Returns the number of answers to all prompts.
    pub fn answers(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// Returns the token limit of an answer. The context may have room for fewer.
    fn most_tokens(&self, served: &ServedModel) -> usize {
        let most = match served.max_tokens {
            AutoOr::Auto => usize::MAX,
            AutoOr::N(n) => n,
        };
        self.max_tokens.unwrap_or(most)
    }

    /// Returns the memory in bytes that the answers may need until they are sent.
    pub fn answers_memory(&self, served: &ServedModel) -> usize {
        let tokens = self.most_tokens(served).min(served.context);
        // A stream keeps only the events that its client has not read.
        let kept = if self.stream { tokens.min(EVENTS) } else { tokens };
        let (log_probs, json) = match self.top_log_probs {
            Some(best) => (CHANCES + BEST * best, CHANCES_JSON + BEST_JSON * best),
            None => (0, TOKEN),
        };
        let history = size_of::<Token>() * served.context;
        let scored = |prompt: &ApiPrompt| match self.scores_prompt {
            true => prompt.most_tokens(served),
            false => 0,
        };
        let all: usize = self.prompts.iter().map(scored).sum::<usize>() * self.n;
        let longest = self.prompts.iter().map(scored).max().unwrap_or(0);
        self.answers() * (ANSWER + history)
            + (self.answers() * kept + all) * (TOKEN + log_probs)
            + (kept + longest) * json
    }

    /// Returns the bytes of the longest prompt.
    pub fn longest(&self) -> usize {
        self.prompts.iter().map(ApiPrompt::bytes).max().unwrap_or(0)
    }

    /// Returns the grammar of the answers. `enforcement` applies to functions that are not strict.
    pub fn source(
        &self,
        served: &ServedModel,
        enforcement: Enforcement,
    ) -> Result<Option<GrammarSource>> {
        match (&self.tool_options, &self.format) {
            (None, None | Some(AnswerFormat::Text)) => Ok(None),
            (None, Some(AnswerFormat::Grammar(source))) => Ok(Some(source.clone())),
            (Some(tool_options), _) => {
                let answer = self.answer_schema()?;
                let ToolOptions { tools, calls, many } = tool_options;
                let marks = served.call_marks();
                tools::source(tools, *calls, *many, &marks, answer, enforcement).map(Some)
            }
        }
    }
}

/// Returns the memory in bytes that the tokenizer needs for a prompt of this length.
pub fn tokeniser_memory(bytes: usize, served: &ServedModel) -> usize {
    // A text that is too long for any context is refused before it is tokenised.
    let fits = served.context.saturating_mul(served.tokenizer.longest());
    TOKENISER_MEMORY * most_rendered(bytes).min(fits)
}

/// Returns an upper bound of the memory in bytes that any model's tokenizer needs for `bytes` of
/// text.
pub fn most_tokeniser_memory(bytes: usize) -> usize {
    TOKENISER_MEMORY * most_rendered(bytes)
}

/// Returns an upper bound of a rendered conversation in bytes, for messages of this length.
fn most_rendered(bytes: usize) -> usize {
    2 * bytes + RENDERED
}

impl ApiPrompt {
    /// Returns the images of a conversation that is not tokenised yet.
    fn images(&self) -> impl Iterator<Item = &MessageImage> {
        let input = match self {
            ApiPrompt::Conversation(input) => Some(input),
            _ => None,
        };
        input.into_iter().flat_map(PromptInput::all_images)
    }

    /// Returns the memory that it needs as tokens, in bytes.
    fn kept(&self) -> usize {
        match self {
            ApiPrompt::Tokens(tokens) => size_of_val(&tokens[..]),
            ApiPrompt::Encoded(prompt) => size_of_val(&prompt.tokens[..]),
            ApiPrompt::Unseen(UnseenPrompt { tokens, files, .. }) => {
                size_of_val(&tokens[..]) + files.iter().map(|file| file.len()).sum::<usize>()
            }
            other => other.bytes(),
        }
    }

    /// Returns the length of its text in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            ApiPrompt::Conversation(input) => input.bytes(),
            ApiPrompt::Text(text) => text.len(),
            ApiPrompt::Tokens(tokens) => size_of_val(&tokens[..]) / TOKENISER_MEMORY,
            ApiPrompt::Unseen(prompt) => size_of_val(&prompt.tokens[..]) / TOKENISER_MEMORY,
            ApiPrompt::Encoded(prompt) => size_of_val(&prompt.tokens[..]) / TOKENISER_MEMORY,
        }
    }

    /// Returns an upper bound of its tokens.
    fn most_tokens(&self, served: &ServedModel) -> usize {
        let tokens = match self {
            ApiPrompt::Conversation(_) | ApiPrompt::Unseen(_) => served.context,
            ApiPrompt::Text(text) => text.len() + 1,
            ApiPrompt::Tokens(tokens) => tokens.len(),
            ApiPrompt::Encoded(prompt) => prompt.tokens.len(),
        };
        tokens.min(served.context)
    }

    /// Encodes the prompt for the model.
    ///
    /// Refuses a prompt that leaves no room for an answer. Images go through the tower, unless
    /// their soft tokens are cached.
    pub fn encoded(&self, served: &ServedModel) -> Result<EncodedPrompt> {
        match self {
            ApiPrompt::Encoded(prompt) => Ok(prompt.clone()),
            ApiPrompt::Unseen(prompt) => {
                let see = |file: &Arc<[u8]>| served.viewer().map_err(Fault::clone)?.see(file);
                let images = prompt.files.iter().map(see).collect::<Result<_>>()?;
                prompt.clone().seen(served.viewer(), &served.tokenizer, images)
            }
            ApiPrompt::Tokens(tokens) => {
                check_tokens(tokens, served)?;
                Ok(EncodedPrompt { tokens: tokens.clone(), ..EncodedPrompt::default() })
            }
            ApiPrompt::Conversation(input) => {
                encoder(served, true, input).encode(input, Special::AsText)
            }
            ApiPrompt::Text(text) => {
                let input = raw(text);
                encoder(served, false, &input).encode(&input, Special::AsText)
            }
        }
    }

    /// Returns the prompt as tokens. Images are not decoded.
    fn tokenised(&self, served: &ServedModel) -> Result<ApiPrompt> {
        match self {
            ApiPrompt::Conversation(input) if self.images().next().is_some() => {
                let unseen = encoder(served, true, input).tokenise(input, Special::AsText)?;
                Ok(ApiPrompt::Unseen(unseen))
            }
            other => Ok(ApiPrompt::Encoded(other.encoded(served)?)),
        }
    }

    /// Counts the prompt's tokens. Images are not decoded.
    pub fn count(&self, served: &ServedModel) -> Result<usize> {
        match self {
            ApiPrompt::Conversation(input) => {
                encoder(served, true, input).count(input, Special::AsText)
            }
            other => Ok(other.encoded(served)?.tokens.len()),
        }
    }
}

fn raw(text: &str) -> PromptInput {
    PromptInput { text: Some(text.to_owned()), ..PromptInput::default() }
}

/// Refuses tokens that the vocabulary does not have, and lists that leave no room for an answer.
fn check_tokens(tokens: &[Token], served: &ServedModel) -> Result<()> {
    let vocab = served.tokenizer.vocab();
    ensure!(
        !tokens.is_empty() && tokens.iter().all(|t| (*t as usize) < vocab),
        Fault::usage(format!("tokens are numbers below {vocab}"))
    );
    check_prompt(tokens.len(), false, AutoOr::N(served.context), &served.config)
}

fn encoder<'a>(served: &'a ServedModel, templated: bool, input: &PromptInput) -> PromptEncoder<'a> {
    PromptEncoder {
        template: Some(&served.template).filter(|_| templated),
        config: &served.config,
        tokenizer: &served.tokenizer,
        viewer: served.viewer.as_ref().map(|viewer| &**viewer),
        context: AutoOr::N(served.context),
        most_rendered: most_rendered(input.bytes()),
    }
}
