//! The endpoints: from HTTP to what is asked, and answers back.

use super::ask::{Asked, Served};
use super::error::ApiError;
use super::fields::Fields;
use super::form::{Answer, Events, Form};
use super::guard::Guard;
use super::log::Entry;
use super::options::LogFormat;
use super::queue::{EVENTS, Event, Figures, Piece, Queue};
use super::{anthropic, openai, responses};
use crate::cli::record::FinishReason;
use crate::gemma::Special;
use crate::tensor::Token;
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

/// How often a stream that has nothing to say shows that it is alive.
const ALIVE: Duration = Duration::from_secs(15);
/// Seconds after which a client that found the queue full may try again.
const RETRY: &str = "1";
/// Bodies of at most so many bytes are read whoever else sends some.
const SMALL_BODY: usize = 64_000;
/// As many of the largest bodies are read at once.
const LARGE_BODIES: usize = 4;
/// Bytes of a text that is only to be tokenised.
const LONGEST_TEXT: usize = 1 << 20;
/// Tokens that are only to be put together.
const MOST_TOKENS: usize = 1 << 18;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SEED: HeaderName = HeaderName::from_static("x-seed");

/// All that endpoints need.
pub struct App {
    pub queue: Arc<Queue>,
    /// Known once the model is loaded.
    pub served: OnceLock<Arc<Served>>,
    pub guard: Guard,
    pub log: LogFormat,
    /// Bytes of a body at most.
    pub max_body: usize,
    /// Room for large bodies, in kilobytes.
    pub bodies: Arc<Semaphore>,
    /// How long a body may take.
    pub patience: Duration,
}

/// A body that may wait for room, and what of the room it takes until it is dropped.
struct Held {
    bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

/// Room for as many of the largest bodies as are read at once.
pub fn bodies(megabytes: u16) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(usize::from(megabytes) * 1000 * LARGE_BODIES))
}

/// Says that an endpoint writes its own line of the log.
#[derive(Clone)]
struct Logged;

/// Reads a body into what is asked and how it is answered.
type Parse = fn(Fields, &Arc<Served>) -> Result<(Asked, Box<dyn Form>), ApiError>;

pub fn router(app: Arc<App>, origins: &[String]) -> Router {
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), watch))
        .with_state(app);
    if origins.is_empty() {
        return router;
    }
    let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(Any)
        .expose_headers([REQUEST_ID, SEED]);
    router.layer(cors)
}

/// Lets in who may come, and logs what endpoints do not log themselves.
async fn watch(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let shown = if path.len() > 100 { "(long)" } else { &path };
    let mut entry = Entry::new(&app.queue, app.log, method.as_str(), shown);
    let response = match app.guard.check(request.version(), request.headers(), &path) {
        Ok(()) => next.run(request).await,
        Err(error) => refusal(&error, is_anthropic(&path)),
    };
    if response.extensions().get::<Logged>().is_some() {
        entry.forget();
        return response;
    }
    entry.status = response.status().as_u16();
    entry.outcome = if response.status().is_success() { "done" } else { "refused" };
    response
}

fn is_anthropic(path: &str) -> bool {
    path.starts_with("/v1/messages")
}

/// A whole response.
fn respond(status: u16, kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn answer_json(value: &Value) -> Response {
    respond(200, "application/json", value.to_string())
}

fn refusal(error: &ApiError, anthropic: bool) -> Response {
    let body = if anthropic { error.anthropic() } else { error.openai() };
    let mut response = respond(error.status, "application/json", body.to_string());
    if matches!(error.status, 429 | 503) {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(RETRY));
    }
    response
}

fn result(result: Result<Value, ApiError>) -> Response {
    result.map_or_else(|error| refusal(&error, false), |value| answer_json(&value))
}

async fn nothing_here(request: Request) -> Response {
    let path = request.uri().path();
    let error = ApiError::new(404, format!("there is no {path} here")).code("not_found");
    refusal(&error, is_anthropic(path))
}

async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    refusal(&ApiError::new(405, format!("{path} takes no {method}")), is_anthropic(path))
}

async fn page() -> Response {
    let mut response = respond(200, "text/html; charset=utf-8", include_str!("page.html"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
        connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let name = HeaderName::from_static("content-security-policy");
    response.headers_mut().insert(name, HeaderValue::from_static(policy));
    response
}

async fn health(State(app): State<Arc<App>>) -> Response {
    result(app.queue.is_open().map(|()| json!({"status": "ok"})))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    respond(200, "text/plain; version=0.0.4", app.queue.metrics.text())
}

async fn version() -> Response {
    answer_json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

impl App {
    /// The model; an error as long as it is being loaded.
    fn served(&self) -> Result<&Arc<Served>, ApiError> {
        self.queue.is_open()?;
        self.served.get().ok_or_else(|| ApiError::new(503, "the model is being loaded"))
    }

    /// The body of a request.
    async fn body(&self, request: Request) -> Result<Held, ApiError> {
        let length = request.headers().get("content-length");
        let length: Option<usize> = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let too_large = || {
            let most = self.max_body / 1_000_000;
            ApiError::new(413, format!("the body is larger than {most} MB (--max-body)"))
        };
        let length = length.unwrap_or(self.max_body);
        if length > self.max_body {
            return Err(too_large());
        }
        let read = async {
            let room = match length > SMALL_BODY {
                true => {
                    let kilobytes = length.div_ceil(1000) as u32;
                    self.bodies.clone().acquire_many_owned(kilobytes).await.ok()
                }
                false => None,
            };
            let bytes = to_bytes(request.into_body(), self.max_body).await?;
            Ok::<_, axum::Error>(Held { bytes, _room: room })
        };
        match tokio::time::timeout(self.patience, read).await {
            Ok(Ok(held)) => Ok(held),
            Ok(Err(error)) if is_limit(&error) => Err(too_large()),
            Ok(Err(error)) => Err(ApiError::bad(format!("the body cannot be read: {error}"))),
            Err(_) => Err(ApiError::new(408, "the body took too long (--client-timeout)")),
        }
    }
}

fn is_limit(error: &axum::Error) -> bool {
    use std::error::Error;
    error.source().is_some_and(|source| source.is::<http_body_util::LengthLimitError>())
}

fn about(served: &Served) -> Value {
    json!({"id": served.name, "object": "model", "created": served.created, "owned_by": "gemma",
        "max_model_len": served.context})
}

async fn models(State(app): State<Arc<App>>) -> Response {
    result(app.served().map(|served| json!({"object": "list", "data": [about(served)]})))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    let found = app.served().and_then(|served| {
        served.check_name(&name)?;
        Ok(about(served))
    });
    result(found)
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let served = app.served()?.clone();
        let mut fields = Fields::parse(&app.body(request).await?.bytes)?;
        fields.pass_over(&["model"]);
        let content: Option<String> = fields.take("content")?;
        let text = match content {
            Some(content) => content,
            None => fields.need("text")?,
        };
        let special = match fields.take("add_special")?.unwrap_or(false) {
            true => Special::Parse,
            false => Special::AsText,
        };
        fields.finish()?;
        if text.len() > LONGEST_TEXT {
            let what = format!("the text is longer than {LONGEST_TEXT} bytes");
            return Err(ApiError::new(413, what));
        }
        let tokens = apart(move || served.tokenizer.encode(&text, special)).await?;
        Ok(json!({"count": tokens.len(), "tokens": tokens}))
    };
    result(answer.await)
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let served = app.served()?.clone();
        let mut fields = Fields::parse(&app.body(request).await?.bytes)?;
        fields.pass_over(&["model"]);
        let tokens: Vec<Token> = fields.need("tokens")?;
        fields.finish()?;
        if tokens.len() > MOST_TOKENS {
            return Err(ApiError::new(413, format!("there are more than {MOST_TOKENS} tokens")));
        }
        let text = apart(move || Ok(served.tokenizer.decode(&tokens))).await?;
        Ok(json!({"content": text, "text": text}))
    };
    result(answer.await)
}

/// Does what takes the processor a while beside the threads that serve connections.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|error| ApiError::of(&error)),
        Err(_) => Err(ApiError::new(500, "the request could not be handled")),
    }
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

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let served = app.served()?.clone();
        let fields = Fields::parse(&app.body(request).await?.bytes)?;
        let prompt = anthropic::count_body(fields, &served)?;
        let tokens = apart(move || Ok(prompt.tokens(&served)?.len())).await?;
        Ok(json!({"input_tokens": tokens}))
    };
    answer.await.map_or_else(|error: ApiError| refusal(&error, true), |value| answer_json(&value))
}

/// Answers one request, in a stream or whole.
async fn answer(app: Arc<App>, request: Request, parse: Parse) -> Response {
    let path = request.uri().path().to_owned();
    let mut entry = Entry::new(&app.queue, app.log, request.method().as_str(), &path);
    let (id, mut seed) = (entry.id.clone(), None);
    let begun = begin(&app, request, parse).await;
    let mut response = match begun {
        Ok(begun) => {
            seed = Some(begun.seed);
            let Begun { asked, form, events, .. } = begun;
            let collected = Collected::new(asked.prompts.len() * asked.n);
            match asked.stream {
                true => stream(Stream { form, events, collected, entry, at: At::Begin }),
                false => whole(form, events, collected, &mut entry, is_anthropic(&path)).await,
            }
        }
        Err(error) => {
            (entry.status, entry.outcome) = (error.status, "refused");
            refusal(&error, is_anthropic(&path))
        }
    };
    response.extensions_mut().insert(Logged);
    let header = |text: String| HeaderValue::from_str(&text).ok();
    let headers = response.headers_mut();
    headers.extend(header(id).map(|id| (Some(REQUEST_ID), id)));
    headers.extend(seed.and_then(|s| header(s.to_string())).map(|seed| (Some(SEED), seed)));
    response
}

/// A request whose texts wait for the engine.
struct Begun {
    asked: Asked,
    form: Box<dyn Form>,
    events: Receiver<(usize, Event)>,
    seed: u64,
}

async fn begin(app: &App, request: Request, parse: Parse) -> Result<Begun, ApiError> {
    let asked_at = Instant::now();
    let served = app.served()?.clone();
    let body = app.body(request).await?;
    let (send, events) = channel(EVENTS);
    let read = move || {
        let parsed = Fields::parse(&body.bytes).and_then(|fields| parse(fields, &served));
        let (asked, form) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return Ok(Err(error)),
        };
        let (jobs, seed) = asked.jobs(&served, &send, asked_at)?;
        Ok(Ok((asked, form, jobs, seed)))
    };
    let (asked, form, jobs, seed) = apart(read).await??;
    app.queue.add(jobs)?;
    Ok(Begun { asked, form, events, seed })
}

/// Answers as far as they have come.
struct Collected {
    answers: Vec<Answer>,
    open: usize,
    figures: Figures,
}

impl Collected {
    fn new(choices: usize) -> Collected {
        let answer = || Answer {
            text: String::new(),
            chances: Vec::new(),
            reason: FinishReason::Stop,
            stop_string: None,
        };
        let answers = (0..choices).map(|_| answer()).collect();
        Collected { answers, open: choices, figures: Figures::default() }
    }
}

/// Tells the log what there is to say of answers that ended well.
fn ended_well(entry: &mut Entry, collected: &Collected) {
    entry.status = 200;
    entry.outcome = collected.answers.first().map_or("done", |answer| answer.reason.name());
}

async fn whole(
    mut form: Box<dyn Form>,
    mut events: Receiver<(usize, Event)>,
    mut collected: Collected,
    entry: &mut Entry,
    anthropic: bool,
) -> Response {
    while collected.open > 0 {
        let failed = match events.recv().await {
            Some((choice, Event::Piece(Piece { text, chances, .. }))) => {
                let answer = &mut collected.answers[choice];
                answer.text += &text;
                answer.chances.extend(chances);
                continue;
            }
            Some((choice, Event::End(end))) => {
                collected.open -= 1;
                collected.figures.add(&end.figures);
                entry.figures = collected.figures.clone();
                let answer = &mut collected.answers[choice];
                answer.stop_string = end.stop_string;
                match end.reason {
                    Ok(reason) => {
                        answer.reason = reason;
                        continue;
                    }
                    Err(error) => error,
                }
            }
            None => lost(),
        };
        (entry.status, entry.outcome) = (failed.status, "error");
        return refusal(&failed, anthropic);
    }
    ended_well(entry, &collected);
    answer_json(&form.whole(&collected.answers, &collected.figures))
}

/// The engine let go of a text without a word: its client did not read.
fn lost() -> ApiError {
    ApiError::new(500, "the answer was cut off: it was not read as fast as it came")
}

/// An answer in a stream.
struct Stream {
    form: Box<dyn Form>,
    events: Receiver<(usize, Event)>,
    collected: Collected,
    entry: Entry,
    at: At,
}

#[derive(PartialEq)]
enum At {
    Begin,
    Goes,
    End,
}

fn stream(stream: Stream) -> Response {
    let events = futures_util::stream::unfold(stream, |mut stream| async {
        let text = stream.next().await?;
        Some((Ok::<_, std::convert::Infallible>(text), stream))
    });
    let mut response = respond(200, "text/event-stream", Body::from_stream(events));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx passes events on at once where it reads this.
    let name = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(name, HeaderValue::from_static("no"));
    response
}

impl Stream {
    /// What is to be sent next.
    async fn next(&mut self) -> Option<String> {
        let mut out = Events::default();
        match self.at {
            At::Begin => {
                self.at = At::Goes;
                self.form.begin(&mut out);
                // There is nothing to send of some forms' beginnings.
                if !out.0.is_empty() {
                    return Some(out.0);
                }
            }
            At::Goes => {}
            At::End => return None,
        }
        while out.0.is_empty() && self.at == At::Goes {
            match tokio::time::timeout(ALIVE, self.events.recv()).await {
                Ok(event) => self.take(event, &mut out),
                Err(_) => out.0 += ": waiting\n\n",
            }
        }
        // What came meanwhile goes with it.
        while self.at == At::Goes {
            match self.events.try_recv() {
                Ok(event) => self.take(Some(event), &mut out),
                Err(_) => break,
            }
        }
        Some(out.0)
    }

    fn take(&mut self, event: Option<(usize, Event)>, out: &mut Events) {
        let failed = match event {
            Some((choice, Event::Piece(piece))) => {
                self.entry.figures.completion_tokens += piece.tokens;
                self.form.piece(choice, &piece, out);
                return;
            }
            Some((choice, Event::End(end))) => {
                self.collected.open -= 1;
                self.collected.figures.add(&end.figures);
                match end.reason {
                    Ok(reason) => {
                        self.collected.answers[choice].reason = reason;
                        self.form.end(choice, reason, &end, out);
                        if self.collected.open > 0 {
                            return;
                        }
                        ended_well(&mut self.entry, &self.collected);
                        self.form.close(&self.collected.figures, out);
                        None
                    }
                    Err(error) => Some(error),
                }
            }
            None => Some(lost()),
        };
        if let Some(error) = failed {
            (self.entry.status, self.entry.outcome) = (error.status, "error");
            self.form.fail(&error, out);
        }
        self.entry.figures = self.collected.figures.clone();
        self.at = At::End;
    }
}
