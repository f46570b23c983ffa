//! The endpoints: HTTP requests to requests for the engine, and answers back.

mod body;
pub mod guard;
pub mod images;
pub mod listen;
mod ollama;
mod reply;
mod response;

use super::access::PageOrigin;
use super::log::LogEntry;
use super::options::LogFormat;
use super::pool::{Client, Peer, PoolShare, SharedPool};
use super::queue::{ClientEvent, Delivery, RequestQueue};
use crate::cli::api::answer::EVENTS;
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::fields::Fields;
use crate::cli::api::form::{ApiForm, Parse};
use crate::cli::api::notes::Notes;
use crate::cli::api::request::{ApiRequest, TOKENISER_MEMORY, tokeniser_memory};
use crate::cli::api::served::ServedModel;
use crate::cli::api::{anthropic, openai, responses, tokens};
use crate::grammar::{Enforcement, Grammar, GrammarSource};
use crate::os::memory::release_freed;
use crate::os::process::give_way;
use crate::tensor::Token;
use crate::util::json;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::{HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use body::{BodyLimits, ReadBody};
use guard::Guard;
use images::{ImageMemory, ImagePools};
use reply::Collected;
use response::{RefusalReason, answer_held, answer_json, refusal, respond};
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Receiver, channel};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Bytes of a body whose memory goes back to the system at once.
const LARGE: usize = 500_000;
/// Least bytes of memory for the preparation of requests, and for answers.
const MEMORY: usize = 512_000_000;
/// Requests that are prepared at once.
const PREPARING: usize = 8;
/// Grammars that are compiled at once.
const COMPILING: usize = 2;
/// Threads that prepare requests and compile grammars.
pub const WORKERS: usize = PREPARING + COMPILING;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Name of the same header in Anthropic's API.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");
const SEED: HeaderName = HeaderName::from_static("x-seed");

/// State of the endpoints.
pub struct App {
    pub queue: Arc<RequestQueue>,
    /// Set once the model is loaded.
    pub served: OnceLock<Arc<ServedModel>>,
    pub guard: Guard,
    pub log: LogFormat,
    pub notes: Arc<Notes>,
    pub bodies: BodyLimits,
    pub room: SharedLimits,
}

/// Pools of resources that requests share outside the engine.
#[derive(Clone)]
pub struct SharedLimits {
    /// Bytes of memory for the preparation of requests.
    preparing: Arc<SharedPool>,
    /// Bytes of memory for answers, from the request until they are sent.
    answers: Arc<SharedPool>,
    /// Threads that prepare requests.
    threads: Arc<SharedPool>,
    /// Threads that compile grammars.
    compilers: Arc<SharedPool>,
    images: ImagePools,
}

impl SharedLimits {
    /// Makes the limits for bodies of at most so many bytes.
    pub fn new(body: usize) -> SharedLimits {
        SharedLimits {
            preparing: SharedPool::new(MEMORY.max(4 * json::memory(body))),
            answers: SharedPool::new(MEMORY),
            threads: SharedPool::new(PREPARING),
            compilers: SharedPool::new(COMPILING),
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
    ]
}

pub fn router(app: Arc<App>, origins: &[PageOrigin]) -> Router {
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
    let router = router
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), watch))
        .with_state(app);
    if origins.is_empty() {
        return router;
    }
    let header = |origin: &PageOrigin| HeaderValue::from_str(origin.text());
    let origins = origins.iter().map(|origin| header(origin).expect("an origin is ASCII"));
    // A preflight names the headers that it allows: `*` does not cover Authorization.
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .allow_credentials(true)
        .expose_headers([REQUEST_ID, ANTHROPIC_ID, SEED]);
    router.layer(cors)
}

/// Checks permissions, and logs requests that endpoints do not log themselves.
async fn watch(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let shown = if path.len() > 100 { "(long)" } else { &path };
    let mut entry = LogEntry::new(&app.queue, app.log, method.as_str(), shown);
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

/// The router adds the header `Allow`, which is all that OPTIONS asks for.
async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    if method == Method::OPTIONS {
        return respond(204, "text/plain", "");
    }
    let other = if method == Method::POST { "GET" } else { "POST" };
    let error = ApiError::new(405, format!("{path} takes no {method}: send {other}"));
    refusal(&error, ApiFamily::of(path))
}

/// Refuses, with a status at which clients do not try again.
async fn embeddings() -> Response {
    let what = "this server gives no embeddings: use another one, with a model made for them";
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
    result(app.queue.is_open().map(|()| json!({"status": "ok"}).to_string()), ApiFamily::OpenAi)
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    respond(200, "text/plain; version=0.0.4", app.queue.metrics.text())
}

async fn version() -> Response {
    answer_json(json!({"version": env!("CARGO_PKG_VERSION")}).to_string())
}

impl App {
    /// Returns the model, or an error while it is being loaded.
    fn served(&self) -> Result<&Arc<ServedModel>, ApiError> {
        self.queue.is_open()?;
        self.served.get().ok_or_else(|| ApiError::new(503, "the model is being loaded"))
    }

    /// Returns the client of a request.
    fn client(&self, request: &Request) -> Client {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |peer| peer.0);
        self.guard.client(request.headers(), peer)
    }

    /// Reads a request's body and runs `work` on its fields in a worker thread. `needs` returns the
    /// bytes of memory for the work after parsing, given the length of the body. Returns the result
    /// and the request's share of the memory.
    async fn prepare<T: Send + 'static>(
        &self,
        request: Request,
        needs: impl Fn(usize) -> usize,
        work: impl FnOnce(Fields) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, PoolShare), ApiError> {
        let client = self.client(&request);
        let ReadBody { bytes, mut memory, needed } =
            self.bodies.read(request, client, &needs).await?;
        let (thread, notes) = (self.room.threads.take(client, 1).await, self.notes.clone());
        // The memory belongs to the work, which goes on if the client goes away.
        let work = move || {
            let is_large = bytes.len() > LARGE;
            // The share was for the densest text of this length.
            memory.shrink(json::memory_of(&bytes).max(needed));
            let fields = Fields::parse(&bytes, &notes);
            drop(bytes);
            let result = fields.and_then(work);
            if is_large {
                // The allocator would keep the freed values of a tree for this thread.
                release_freed();
            }
            result.map(|result| (result, memory))
        };
        in_worker(thread, work).await
    }
}

fn about(served: &ServedModel) -> Value {
    json!({"id": served.name, "object": "model", "created": served.created, "owned_by": "gemma",
        "max_model_len": served.context})
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let list = |served| json!({"object": "list", "data": [about(served)]}).to_string();
    result(app.served().map(|served| list(served)), ApiFamily::OpenAi)
}

/// Describes the model under any name: any name is answered.
async fn model(State(app): State<Arc<App>>) -> Response {
    result(app.served().map(|served| about(served).to_string()), ApiFamily::OpenAi)
}

/// Sends an answer, which keeps its part of the memory until it is sent.
fn held(result: Result<(String, PoolShare), ApiError>, family: ApiFamily) -> Response {
    match result {
        Ok((text, mut memory)) => {
            memory.shrink(text.len());
            answer_held(text, memory)
        }
        Err(error) => refusal(&error, family),
    }
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let served = app.served()?.clone();
        let work = move |fields| tokens::tokenize(fields, &served);
        let memory = |bytes: usize| TOKENISER_MEMORY * bytes.min(tokens::LONGEST_TEXT);
        app.prepare(request, memory, work).await
    };
    held(answer.await, ApiFamily::OpenAi)
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let served = app.served()?.clone();
        let work = move |fields| tokens::detokenize(fields, &served);
        app.prepare(request, |_| 0, work).await
    };
    held(answer.await, ApiFamily::OpenAi)
}

/// Names the control tokens that lm-evaluation-harness asks for, in vLLM's form.
async fn tokenizer_info(State(app): State<Arc<App>>) -> Response {
    let info = |served: &Arc<ServedModel>| {
        let name = |token: Option<&Token>| token.and_then(|token| served.tokenizer.piece(*token));
        let (bos, eos) = (Some(&served.config.bos), served.config.eos.first());
        json!({"bos_token": name(bos), "eos_token": name(eos), "model_max_length": served.context})
    };
    result(app.served().map(|served| info(served).to_string()), ApiFamily::OpenAi)
}

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let (served, most) = (app.served()?.clone(), app.room.preparing.most());
        let work = move |fields| {
            let prompt = anthropic::count_body(fields, &served)?;
            check_memory(prompt.bytes(), &served, most)?;
            let tokens = prompt.count(&served).map_err(|error| ApiError::of(&error))?;
            Ok(json!({"input_tokens": tokens}).to_string())
        };
        let model = app.served()?.clone();
        let memory = |bytes: usize| tokeniser_memory(bytes, &model);
        app.prepare(request, memory, work).await
    };
    held(answer.await, ApiFamily::Anthropic)
}

/// Runs `work` in a worker thread of low priority. `held` is its share of a pool.
async fn in_worker<T: Send + 'static>(
    held: PoolShare,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let work = move || {
        // Otherwise each wait of the engine's thread for a processor takes as long as the time
        // slices of all workers.
        give_way();
        let result = work();
        drop(held);
        result
    };
    let failed = |_| Err(ApiError::new(500, "the request could not be handled"));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(failed)
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

/// Answers one request, as a stream or whole.
async fn answer(app: Arc<App>, request: Request, parse: Parse) -> Response {
    let path = request.uri().path().to_owned();
    let family = ApiFamily::of(&path);
    if let Some(claim) = request.extensions().get::<LogClaim>() {
        claim.0.store(true, Ordering::Relaxed);
    }
    let mut entry = LogEntry::new(&app.queue, app.log, request.method().as_str(), &path);
    let (id, mut seed) = (entry.id.clone(), None);
    let begun = begin(&app, request, parse).await;
    let mut response = match begun {
        Ok(StartedRequest { parsed, form, events, memory, seed: own, prompt_tokens }) => {
            seed = Some(own);
            let collected = Collected::new(&parsed, memory);
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

/// A request whose answers are in the queue.
struct StartedRequest {
    parsed: Arc<ApiRequest>,
    form: Box<dyn ApiForm>,
    events: Receiver<(usize, ClientEvent)>,
    /// Memory of the request and of its answers.
    memory: Vec<PoolShare>,
    seed: u64,
    /// Tokens of the longest prompt.
    prompt_tokens: u64,
}

/// A request whose prompts are tokens, without images.
struct EncodedRequest {
    parsed: ApiRequest,
    form: Box<dyn ApiForm>,
    /// Memory of the answers.
    answers: PoolShare,
    /// Memory for the images, if there are some.
    images: Option<ImageMemory>,
    grammar: NeededGrammar,
    /// Bytes that the parsed request keeps.
    kept: usize,
}

/// The work that the grammar of a request needs.
enum NeededGrammar {
    Nothing,
    Known(Grammar),
    Compiled(GrammarSource),
}

/// Reads a request and puts its answers into the queue. The request has one share of the memory,
/// which shrinks to what is kept once the prompts are tokens, and lasts to the last event.
async fn begin(app: &App, request: Request, parse: Parse) -> Result<StartedRequest, ApiError> {
    let received = Instant::now();
    let served = app.served()?.clone();
    let client = app.client(&request);
    let encode = {
        let (served, room) = (served.clone(), app.room.clone());
        move |fields| encoded(parse(fields, &served)?, &served, client, &room)
    };
    let needs = |bytes: usize| tokeniser_memory(bytes, &served);
    let (encoded, mut memory) = app.prepare(request, needs, encode).await?;
    let EncodedRequest { mut parsed, form, answers, images, grammar, kept } = encoded;
    memory.shrink(kept);
    let mut shares = vec![answers];
    if let Some(needed) = images {
        let share;
        (parsed, memory, share) =
            images::seen(app, &served, parsed, memory, needed, client).await?;
        shares.push(share);
    }
    let parsed = Arc::new(parsed);
    let (grammar, memory) = match grammar {
        NeededGrammar::Nothing => (None, memory),
        NeededGrammar::Known(grammar) => (Some(grammar), memory),
        NeededGrammar::Compiled(source) => {
            let job = GrammarJob { source, parsed: parsed.clone(), memory };
            let (grammar, memory) = compiled(app, &served, job, client).await?;
            (Some(grammar), memory)
        }
    };
    let (send, events) = channel(EVENTS);
    let thread = app.room.threads.take(client, 1).await;
    let make = {
        let parsed = parsed.clone();
        move || {
            let delivery = |choice| Delivery::new(client, choice, send.clone(), received);
            let made = parsed.requests(&served, grammar, &delivery);
            made.map(|made| (made, memory)).map_err(|error| ApiError::of(&error))
        }
    };
    let ((requests, seed), memory) = in_worker(thread, make).await?;
    let lengths = requests.iter().map(|request| request.text.history.len());
    let prompt_tokens = lengths.max().unwrap_or(0) as u64;
    app.queue.add(requests)?;
    shares.push(memory);
    Ok(StartedRequest { parsed, form, events, memory: shares, seed, prompt_tokens })
}

/// Turns the prompts of a parsed request into tokens, measures its images, and looks for its
/// grammar among the known ones.
fn encoded(
    (mut parsed, form): (ApiRequest, Box<dyn ApiForm>),
    served: &ServedModel,
    client: Client,
    room: &SharedLimits,
) -> Result<EncodedRequest, ApiError> {
    let wrong = |error: anyhow::Error| ApiError::of(&error);
    let answers = answers_room(&room.answers, served, &parsed, client)?;
    check_memory(parsed.longest(), served, room.preparing.most())?;
    let images = ImageMemory::of(&parsed, served, &room.images)?;
    parsed.tokenise(served).map_err(wrong)?;
    let source = parsed.source(served, Enforcement::Expressible).map_err(wrong)?;
    let mut kept = parsed.kept();
    let grammar = match source {
        None => NeededGrammar::Nothing,
        Some(source) => {
            // The source, and its copy for the compiler.
            source.check_size().map_err(wrong)?;
            kept += 2 * source.held();
            match served.constraints.recall(&source) {
                Some(Ok(grammar)) if !parsed.ignore_eos => NeededGrammar::Known(grammar),
                _ => NeededGrammar::Compiled(source),
            }
        }
    };
    Ok(EncodedRequest { parsed, form, answers, images, grammar, kept })
}

/// Refuses a prompt that the tokenizer has no memory for.
fn check_memory(bytes: usize, served: &ServedModel, most: usize) -> Result<(), ApiError> {
    if tokeniser_memory(bytes, served) <= most {
        return Ok(());
    }
    let what = format!("a prompt of {bytes} bytes is too long for this server");
    Err(ApiError::new(413, what).code("context_length_exceeded"))
}

/// Takes the memory of the answers at their largest.
fn answers_room(
    answers: &Arc<SharedPool>,
    served: &ServedModel,
    parsed: &ApiRequest,
    client: Client,
) -> Result<PoolShare, ApiError> {
    let (needed, most) = (parsed.answers_memory(served), answers.most());
    if needed > most {
        let what = format!(
            "the answers could take {} MB of memory, and a client has {} MB: \
            ask for fewer answers ('n'), a smaller 'max_tokens' or fewer 'top_logprobs'",
            needed / 1_000_000,
            most / 1_000_000
        );
        return Err(ApiError::bad(what).param("max_tokens"));
    }
    answers.try_take(client, needed).ok_or_else(|| {
        let what = "answers of this client fill its share of the memory: try again later";
        ApiError::new(429, what).code("memory_full")
    })
}

/// A request whose grammar has to be compiled, with its share of the memory.
struct GrammarJob {
    source: GrammarSource,
    parsed: Arc<ApiRequest>,
    memory: PoolShare,
}

/// Compiles the grammar of a request in a worker thread. The compilation ends once the client is
/// gone, and holds the memory until then.
async fn compiled(
    app: &App,
    served: &Arc<ServedModel>,
    job: GrammarJob,
    client: Client,
) -> Result<(Grammar, PoolShare), ApiError> {
    let compiler = app.room.compilers.take(client, 1).await;
    // The future drops this when its client goes away.
    let here = Arc::new(());
    let (there, served) = (Arc::downgrade(&here), served.clone());
    let compile = move || {
        let GrammarJob { source, parsed, memory } = job;
        let is_wanted = || there.strong_count() > 0;
        let grammar = parsed.compile(source, &served, &is_wanted);
        grammar.map(|grammar| (grammar, memory)).map_err(|error| ApiError::of(&error))
    };
    let grammar = in_worker(compiler, compile).await;
    drop(here);
    grammar
}
