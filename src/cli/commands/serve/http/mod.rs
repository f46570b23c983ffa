//! The endpoints: convert HTTP requests to requests for the engine, and answers to responses.

mod body;
pub mod guard;
pub mod images;
pub mod listen;
mod ollama;
mod prepare;
mod reply;
mod response;
mod worker;

use super::log::LogEntry;
use super::metrics::{Label, Metrics, ServerMetrics};
use super::models::catalog::ModelFacts;
use super::models::{ModelLease, ModelSlot, ServedModels};
use super::options::LogFormat;
use super::pool::{PoolShare, SharedPool};
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::form::Parse;
use crate::cli::api::notes::Notes;
use crate::cli::api::request::TOKENISER_MEMORY;
use crate::cli::api::served::ServedModel;
use crate::cli::api::{anthropic, llama, openai, responses, tokens};
use crate::tensor::Token;
use crate::util::json;
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::header::{HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use body::BodyLimits;
use guard::Guard;
use images::ImagePools;
use prepare::{BegunRequest, StartedRequest, begin, check_memory, prompt_memory};
use reply::Collected;
use response::{RefusalReason, answer_held, answer_json, refusal, respond};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Size of a body, in bytes, from which its memory is returned to the system at once.
const LARGE: usize = 500_000;
/// Minimum of the memory for preparing requests, and of that for answers, in bytes.
const MEMORY: usize = 512_000_000;
/// Limit of requests that are prepared at once.
const PREPARING: usize = 8;
/// Limit of grammars that are compiled at once.
const COMPILING: usize = 2;
/// Limit of requests that wait for their model to be loaded.
const LOADING: usize = 256;
/// Threads that prepare requests and compile grammars.
pub const WORKERS: usize = PREPARING + COMPILING;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Name of this header in Anthropic's API.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");
const SEED: HeaderName = HeaderName::from_static("x-seed");

/// State of the endpoints.
pub struct App {
    pub models: Arc<ServedModels>,
    pub metrics: Arc<ServerMetrics>,
    pub guard: Guard,
    pub log: LogFormat,
    pub notes: Arc<Notes>,
    pub bodies: BodyLimits,
    pub room: SharedLimits,
}

/// Pools of resources that requests share outside the engine.
#[derive(Clone)]
pub struct SharedLimits {
    /// Memory for preparing requests, in bytes.
    preparing: Arc<SharedPool>,
    /// Memory for answers, in bytes, from the request until they are sent.
    answers: Arc<SharedPool>,
    /// Threads that prepare requests.
    threads: Arc<SharedPool>,
    /// Threads that compile grammars.
    compilers: Arc<SharedPool>,
    /// Requests that wait for their model to be loaded.
    loading: Arc<SharedPool>,
    images: ImagePools,
}

impl SharedLimits {
    /// Makes the limits for bodies of at most `body` bytes.
    pub fn new(body: usize) -> SharedLimits {
        SharedLimits {
            preparing: SharedPool::new(MEMORY.max(4 * json::memory(body))),
            answers: SharedPool::new(MEMORY),
            threads: SharedPool::new(PREPARING),
            compilers: SharedPool::new(COMPILING),
            loading: SharedPool::new(LOADING),
            images: ImagePools::default(),
        }
    }

    /// Returns the limits of bodies.
    pub fn bodies(&self, most: usize, patience: Duration) -> BodyLimits {
        BodyLimits { most, patience, memory: self.preparing.clone() }
    }
}

/// Extension of a request. An endpoint sets it if it logs the request itself.
#[derive(Clone, Default)]
struct LogClaim(Arc<AtomicBool>);

/// Returns the endpoints by their paths below `/v1`, which clients may leave out.
fn endpoints() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    vec![
        ("/health", get(health)),
        ("/metrics", get(metrics)),
        ("/version", get(version)),
        ("/models", get(models)),
        ("/models/{*name}", get(model)),
        ("/tokenize", post(tokenize)),
        ("/detokenize", post(detokenize)),
        ("/tokenizer_info", get(tokenizer_info)),
        ("/chat/completions", post(chat)),
        ("/completions", post(completions)),
        ("/responses", post(responses)),
        ("/messages", post(messages)),
        ("/messages/count_tokens", post(count_tokens)),
        ("/embeddings", post(embeddings)),
        ("/completion", post(completion)),
        ("/apply-template", post(apply_template)),
        ("/props", get(props)),
        ("/infill", post(infill)),
        ("/slots", get(slots)),
        ("/slots/{id}", post(slots)),
    ]
}

/// The endpoints, without and with the headers for pages of other origins.
#[derive(Clone)]
pub struct Routers {
    app: Arc<App>,
    own: Router,
    pages: Router,
}

impl Routers {
    pub fn new(app: &Arc<App>) -> Routers {
        let own = router(app.clone());
        // A preflight response lists the allowed headers, because `*` does not include
        // Authorization.
        let cors = CorsLayer::new()
            .allow_origin(AllowOrigin::mirror_request())
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .allow_credentials(true)
            .expose_headers([REQUEST_ID, ANTHROPIC_ID, SEED]);
        Routers { app: app.clone(), pages: own.clone().layer(cors), own }
    }

    /// Returns the endpoints for a request with these headers.
    pub fn choose(&self, headers: &HeaderMap) -> &Router {
        if self.app.guard.is_allowed_page(headers) { &self.pages } else { &self.own }
    }
}

fn router(app: Arc<App>) -> Router {
    let mut router = Router::new().route("/", get(page));
    for (path, endpoint) in endpoints() {
        for base in ["", "/v1"] {
            router = router.route(&format!("{base}{path}"), endpoint.clone());
            if !path.ends_with('}') {
                router = router.route(&format!("{base}{path}/"), endpoint.clone());
            }
        }
    }
    for (path, endpoint) in ollama::endpoints() {
        router = router.route(path, endpoint);
    }
    router
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), watch))
        .with_state(app)
}

/// Checks permissions, and logs requests that their endpoint does not log.
async fn watch(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let shown = if path.len() > 100 { "(long)" } else { &path };
    let mut entry = LogEntry::new(&app.metrics, app.log, method.as_str(), shown);
    let claim = LogClaim::default();
    entry.is_told = claim.0.clone();
    let mut response = match app.guard.check(request.version(), request.headers(), &path) {
        Ok(()) => {
            request.extensions_mut().insert(claim);
            next.run(request).await
        }
        Err(error) => refusal(&error, ApiFamily::of(&path)),
    };
    entry.status = response.status().as_u16();
    entry.outcome = if response.status().is_success() { "done" } else { "refused" };
    entry.reason = response.extensions().get::<RefusalReason>().map(|reason| reason.0.clone());
    if !response.headers().contains_key(REQUEST_ID) {
        identify(&mut response, &entry.id, ApiFamily::of(&path));
    }
    response
}

/// Writes the id of a request into the headers of its response.
fn identify(response: &mut Response, id: &str, family: ApiFamily) {
    let Ok(id) = HeaderValue::from_str(id) else { return };
    if family == ApiFamily::Anthropic {
        response.headers_mut().insert(ANTHROPIC_ID, id.clone());
    }
    response.headers_mut().insert(REQUEST_ID, id);
}

fn result(result: Result<String, ApiError>, family: ApiFamily) -> Response {
    result.map_or_else(|error| refusal(&error, family), answer_json)
}

async fn nothing_here(request: Request) -> Response {
    let path = request.uri().path();
    let what = "ask /v1/chat/completions, /v1/completions, /v1/responses or /v1/messages";
    let error = ApiError::new(404, format!("there is no {path} here: {what}")).code("not_found");
    refusal(&error, ApiFamily::of(path))
}

/// The router adds the header `Allow`, which a client asks for with OPTIONS.
async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    if method == Method::OPTIONS {
        return respond(204, "text/plain", "");
    }
    let other = if method == Method::POST { "GET" } else { "POST" };
    let error = ApiError::new(405, format!("{path} does not support {method}: send {other}"));
    refusal(&error, ApiFamily::of(path))
}

/// Refuses embeddings with a status that clients do not retry.
async fn embeddings() -> Response {
    let what = "this server has no embeddings: use another one, with a model made for them";
    refusal(&ApiError::new(404, what).code("unsupported"), ApiFamily::OpenAi)
}

async fn page() -> Response {
    let mut response = respond(200, "text/html; charset=utf-8", include_str!("page.html"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
        img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
        frame-ancestors 'none'";
    let name = HeaderName::from_static("content-security-policy");
    response.headers_mut().insert(name, HeaderValue::from_static(policy));
    response
}

async fn health(State(app): State<Arc<App>>) -> Response {
    result(app.models.is_open().map(|()| json!({"status": "ok"}).to_string()), ApiFamily::OpenAi)
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let label = |slot: &ModelSlot| match app.models.is_single() {
        true => Label::none(),
        false => Label::of(slot.name()),
    };
    let models: Vec<(Label, &Metrics)> =
        app.models.slots().iter().map(|slot| (label(slot), &*slot.metrics)).collect();
    respond(200, "text/plain; version=0.0.4", app.metrics.text(&models))
}

async fn version() -> Response {
    answer_json(json!({"version": env!("CARGO_PKG_VERSION")}).to_string())
}

impl App {
    /// Returns a JSON object about a model, which need not be loaded.
    fn about(&self, slot: usize, describe: impl Fn(&str, &ModelFacts) -> Value) -> Value {
        let facts = self.models.facts(slot);
        facts.map_or(Value::Null, |facts| describe(self.models.slots()[slot].name(), &facts))
    }
}

fn about(name: &str, facts: &ModelFacts) -> Value {
    json!({"id": name, "object": "model", "created": facts.created, "owned_by": "gemma",
        "max_model_len": facts.context})
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let list = |()| {
        let slots = 0..app.models.slots().len();
        let data: Vec<Value> = slots.map(|slot| app.about(slot, about)).collect();
        json!({"object": "list", "data": data}).to_string()
    };
    result(app.models.is_open().map(list), ApiFamily::OpenAi)
}

/// Describes a model. If the server has one model, any name is accepted.
async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    let slot = app.models.is_open().and_then(|()| app.models.choose(Some(&name)));
    result(slot.map(|slot| app.about(slot, about).to_string()), ApiFamily::OpenAi)
}

/// Sends an answer. Its share of the memory is kept until it is sent.
fn held(result: Result<(String, PoolShare, ModelLease), ApiError>, family: ApiFamily) -> Response {
    match result {
        Ok((text, mut memory, _)) => {
            memory.shrink(text.len());
            answer_held(text, memory)
        }
        Err(error) => refusal(&error, family),
    }
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let memory =
        |bytes: usize, _: Option<&ServedModel>| TOKENISER_MEMORY * bytes.min(tokens::LONGEST_TEXT);
    let work = |fields, served: &Arc<ServedModel>| tokens::tokenize(fields, served);
    held(app.prepare(request, memory, work).await, ApiFamily::OpenAi)
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let work = |fields, served: &Arc<ServedModel>| tokens::detokenize(fields, served);
    held(app.prepare(request, |_, _| 0, work).await, ApiFamily::OpenAi)
}

/// Returns the names of the control tokens that lm-evaluation-harness needs, in vLLM's form.
async fn tokenizer_info(State(app): State<Arc<App>>, uri: Uri) -> Response {
    let info = |served: &ServedModel| {
        let name = |token: Option<&Token>| token.and_then(|token| served.tokenizer.piece(*token));
        let (bos, eos) = (Some(&served.config.bos), served.config.eos.first());
        json!({"bos_token": name(bos), "eos_token": name(eos), "model_max_length": served.context})
    };
    let lease = app.lease_of_query(&uri).await;
    result(lease.map(|lease| info(&lease.loaded.served).to_string()), ApiFamily::OpenAi)
}

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let most = app.room.preparing.most();
    let work = move |fields, served: &Arc<ServedModel>| {
        let prompt = anthropic::count_body(fields, served)?;
        check_memory(prompt.bytes(), served, most)?;
        let tokens = prompt.count(served).map_err(|error| ApiError::of(&error))?;
        Ok(json!({"input_tokens": tokens}).to_string())
    };
    held(app.prepare(request, prompt_memory, work).await, ApiFamily::Anthropic)
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, openai::chat).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, openai::completions).await
}

async fn responses(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, responses::body).await
}

async fn messages(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, anthropic::messages_body).await
}

/// Answers a request in llama-server's own form.
async fn completion(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, llama::completion).await
}

async fn apply_template(State(app): State<Arc<App>>, request: Request) -> Response {
    let work = |fields, served: &Arc<ServedModel>| llama::apply_template(fields, served);
    held(app.prepare(request, prompt_memory, work).await, ApiFamily::OpenAi)
}

async fn props(State(app): State<Arc<App>>, uri: Uri) -> Response {
    let slots = app.models.loader.load.parallel.into();
    let lease = app.lease_of_query(&uri).await;
    let props = |lease: ModelLease| llama::props(&lease.loaded.served, slots).to_string();
    result(lease.map(props), ApiFamily::OpenAi)
}

/// Refuses as llama-server does for models that cannot fill text in.
async fn infill() -> Response {
    let what = "there is no /infill here, since Gemma 3 and 4 have no tokens for filling text in: \
        ask /completion, which continues a text";
    refusal(&ApiError::new(501, what).code("not_supported"), ApiFamily::OpenAi)
}

/// Refuses as llama-server does without slots: a text has no place of its own here.
async fn slots() -> Response {
    let what = "there is no /slots, because the server finds cached prompts itself: \
        leave out the slot; /metrics has the figures";
    refusal(&ApiError::new(501, what).code("not_supported"), ApiFamily::OpenAi)
}

/// Answers a request, streamed or not.
async fn answer(app: Arc<App>, request: Request, parse: Parse) -> Response {
    let path = request.uri().path().to_owned();
    let family = ApiFamily::of(&path);
    if let Some(claim) = request.extensions().get::<LogClaim>() {
        claim.0.store(true, Ordering::Relaxed);
    }
    let mut entry = LogEntry::new(&app.metrics, app.log, request.method().as_str(), &path);
    let (id, mut seed) = (entry.id.clone(), None);
    let begun = begin(&app, request, parse).await;
    let mut response = match begun {
        Ok(BegunRequest::Told(text)) => {
            (entry.status, entry.outcome) = (200, "done");
            answer_json(text)
        }
        Ok(BegunRequest::Started(started)) => {
            let StartedRequest { parsed, form, events, memory, lease, seed: own, prompt_tokens } =
                *started;
            seed = Some(own);
            let collected = Collected::new(&parsed, memory, lease);
            match parsed.stream {
                true => reply::stream(form, prompt_tokens, events, collected, entry, family),
                false => reply::whole(form, events, collected, &mut entry, family).await,
            }
        }
        Err(error) => {
            entry.fails(&error);
            entry.outcome = "refused";
            refusal(&error, family)
        }
    };
    identify(&mut response, &id, family);
    response.headers_mut().extend(seed.map(|seed| (SEED, HeaderValue::from(seed))));
    response
}
