//! Prepares HTTP requests: parses them and puts them into the queue of their model.

use super::super::models::ModelLease;
use super::super::pool::{Client, Peer, PoolShare, SharedPool};
use super::super::queue::{ClientEvent, Delivery};
use super::body::ReadBody;
use super::images::{self, ImageMemory};
use super::worker::in_worker;
use super::{App, LARGE, SharedLimits};
use crate::cli::api::answer::EVENTS;
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::fields::Fields;
use crate::cli::api::form::{ApiForm, Parse};
use crate::cli::api::keep_alive::KeepAlive;
use crate::cli::api::ollama;
use crate::cli::api::request::{ApiRequest, most_tokeniser_memory, tokeniser_memory};
use crate::cli::api::served::ServedModel;
use crate::grammar::{Enforcement, Grammar, GrammarSource};
use crate::os::memory::release_freed;
use crate::util::json;
use axum::extract::Request;
use axum::http::Uri;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{Receiver, channel};

/// Computes the memory in bytes that work on a body needs, given its length and the model.
///
/// Before the model is known, it returns the maximum over all models.
pub type WorkMemory = fn(usize, Option<&ServedModel>) -> usize;

/// The fields of a body, and the request's share of the memory.
pub struct ReadFields {
    pub fields: Fields,
    memory: PoolShare,
    client: Client,
    /// The lease of the only model, if the server has one.
    lease: Option<ModelLease>,
    /// Length of the body, and memory of its JSON, in bytes.
    length: usize,
    tree: usize,
}

impl App {
    /// Returns the client of a request.
    pub fn client(&self, request: &Request) -> Client {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |peer| peer.0);
        self.guard.client(request.headers(), peer)
    }

    /// Reads and parses a request's body. Parsing runs on a worker thread.
    pub async fn read(&self, request: Request, needs: WorkMemory) -> Result<ReadFields, ApiError> {
        self.models.is_open()?;
        let client = self.client(&request);
        // If the server has one model, it is known before the body.
        let single = self.models.is_single().then(|| self.models.lease_loaded(0));
        let lease = single.flatten();
        let served = lease.as_ref().map(|lease| lease.loaded.served.clone());
        let needs = |length: usize| needs(length, served.as_deref());
        let ReadBody { bytes, mut memory, needed } =
            self.bodies.read(request, client, &needs).await?;
        let (thread, notes) = (self.room.threads.take(client, 1).await, self.notes.clone());
        // The work owns the memory, because it continues if the client disconnects.
        let work = move || {
            // The share was for the JSON that needs the most memory at this length. Now the need is
            // known.
            let (length, tree) = (bytes.len(), json::memory_of(&bytes));
            memory.shrink(tree.max(needed));
            let fields = Fields::parse(&bytes, &notes)?;
            Ok(ReadFields { fields, memory, client, lease, length, tree })
        };
        in_worker(thread, work).await
    }

    /// Returns a lease of the model that the fields name. Waits until it is loaded.
    async fn lease(&self, read: &mut ReadFields) -> Result<ModelLease, ApiError> {
        if let Some(lease) = read.lease.take() {
            return Ok(lease);
        }
        let name = read.fields.get("model").and_then(|name| name.as_str());
        let slot = self.models.choose(name)?;
        if let Some(lease) = self.models.lease_loaded(slot) {
            return Ok(lease);
        }
        let _place = self.room.loading.try_take(read.client, 1).ok_or_else(|| {
            let what = "too many requests of this client are waiting for models: try again later";
            ApiError::new(429, what).code("queue_full")
        })?;
        self.models.lease(slot).await
    }

    /// Runs `work` on a worker thread, with the fields of a request and the model that they name.
    ///
    /// Returns the result, the request's share of the memory, and the lease of the model.
    pub async fn work<T: Send + 'static>(
        &self,
        mut read: ReadFields,
        needs: WorkMemory,
        work: impl FnOnce(Fields, &Arc<ServedModel>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, PoolShare, ModelLease), ApiError> {
        let lease = self.lease(&mut read).await?;
        let ReadFields { fields, mut memory, client, length, tree, .. } = read;
        let served = lease.loaded.served.clone();
        let thread = self.room.threads.take(client, 1).await;
        let work = move || {
            let needed = json::COPIES * length + needs(length, Some(&served));
            memory.shrink(tree.max(needed));
            let result = work(fields, &served);
            if length > LARGE {
                // Otherwise the allocator would keep the freed JSON values for this thread.
                release_freed();
            }
            result.map(|result| (result, memory))
        };
        in_worker(thread, work).await.map(|(result, memory)| (result, memory, lease))
    }

    /// Returns a lease of the model that the query's `model` names. Waits until it is loaded.
    pub async fn lease_of_query(&self, uri: &Uri) -> Result<ModelLease, ApiError> {
        self.models.is_open()?;
        let query = uri.query().unwrap_or_default();
        let fields = query.split('&').filter_map(|field| field.split_once('='));
        let name = fields.filter(|(key, _)| *key == "model").map(|(_, name)| decoded(name)).next();
        self.models.lease(self.models.choose(name.as_deref())?).await
    }

    /// Reads a body and runs `work` on it.
    pub async fn prepare<T: Send + 'static>(
        &self,
        request: Request,
        needs: WorkMemory,
        work: impl FnOnce(Fields, &Arc<ServedModel>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, PoolShare, ModelLease), ApiError> {
        let read = self.read(request, needs).await?;
        self.work(read, needs, work).await
    }
}

/// Decodes a value of a query string.
fn decoded(text: &str) -> String {
    let (bytes, mut out, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let code = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        let code = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        out.push(code.unwrap_or(if bytes[at] == b'+' { b' ' } else { bytes[at] }));
        at += if code.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Returns the memory in bytes that the prompt of a body needs.
pub fn prompt_memory(length: usize, served: Option<&ServedModel>) -> usize {
    match served {
        Some(served) => tokeniser_memory(length, served),
        None => most_tokeniser_memory(length),
    }
}

/// The start of a response.
pub enum BegunRequest {
    Started(Box<StartedRequest>),
    /// The complete response to a request that needs no model.
    Told(String),
}

/// A request with answers in the queue.
pub struct StartedRequest {
    pub parsed: Arc<ApiRequest>,
    pub form: Box<dyn ApiForm>,
    pub events: Receiver<(usize, ClientEvent)>,
    /// Memory of the request and of its answers.
    pub memory: Vec<PoolShare>,
    /// Keeps the model loaded until the answers have ended.
    pub lease: ModelLease,
    pub seed: u64,
    /// Number of tokens of the longest prompt.
    pub prompt_tokens: u64,
}

/// A request with prompts that are tokens, without images.
struct EncodedRequest {
    parsed: ApiRequest,
    form: Box<dyn ApiForm>,
    /// Memory of the answers.
    answers: PoolShare,
    /// Memory for the images, if there are some.
    images: Option<ImageMemory>,
    grammar: NeededGrammar,
    /// Memory that the parsed request keeps, in bytes.
    kept: usize,
}

/// Work that the grammar of a request still needs.
enum NeededGrammar {
    Nothing,
    Known(Grammar),
    Compiled(GrammarSource),
}

/// Reads a request and puts its answers into the queue.
///
/// The request has one share of the memory. The share shrinks when the prompts are tokens, and
/// lasts until the last event.
pub async fn begin(app: &App, request: Request, parse: Parse) -> Result<BegunRequest, ApiError> {
    let received = Instant::now();
    let is_ollamas = ApiFamily::of(request.uri().path()) == ApiFamily::Ollama;
    let mut read = app.read(request, prompt_memory).await?;
    let client = read.client;
    let keep_alive = match is_ollamas {
        true => KeepAlive::take(&mut read.fields)?,
        false => None,
    };
    if keep_alive.is_some_and(KeepAlive::is_none) && ollama::asks_nothing(&read.fields) {
        let name = read.fields.get("model").and_then(|name| name.as_str());
        let slot = app.models.choose(name)?;
        app.models.keep(slot, KeepAlive::For(Default::default()));
        let name = name.unwrap_or(app.models.slots()[slot].name()).to_owned();
        return Ok(BegunRequest::Told(ollama::unloaded(&name, &read.fields)));
    }
    let encode = {
        let room = app.room.clone();
        move |fields, served: &Arc<ServedModel>| {
            encoded(parse(fields, served)?, served, client, &room)
        }
    };
    let (encoded, mut memory, lease) = app.work(read, prompt_memory, encode).await?;
    if let Some(keep_alive) = keep_alive {
        app.models.keep(lease.slot(), keep_alive);
    }
    let served = lease.loaded.served.clone();
    let EncodedRequest { mut parsed, form, answers, images, grammar, kept } = encoded;
    memory.shrink(kept);
    let mut shares = vec![answers];
    if let Some(needed) = images {
        let share;
        (parsed, memory, share) =
            images::seen(app, &lease.loaded, parsed, memory, needed, client).await?;
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
    lease.loaded.queue.add(requests)?;
    shares.push(memory);
    let memory = shares;
    let started = StartedRequest { parsed, form, events, memory, lease, seed, prompt_tokens };
    Ok(BegunRequest::Started(Box::new(started)))
}

/// Converts the prompts of a parsed request to tokens, measures its images, and looks for its
/// grammar among the compiled ones.
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
            // Counts the source, and its copy for the compiler.
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

/// Refuses a prompt if the tokenizer would need more memory than a client's share.
pub fn check_memory(bytes: usize, served: &ServedModel, most: usize) -> Result<(), ApiError> {
    if tokeniser_memory(bytes, served) <= most {
        return Ok(());
    }
    let what = format!("a prompt of {bytes} bytes is too long for this server");
    Err(ApiError::new(413, what).code("context_length_exceeded"))
}

/// Takes the memory that the answers may need.
fn answers_room(
    answers: &Arc<SharedPool>,
    served: &ServedModel,
    parsed: &ApiRequest,
    client: Client,
) -> Result<PoolShare, ApiError> {
    let (needed, most) = (parsed.answers_memory(served), answers.most());
    if needed > most {
        let what = format!(
            "the answers could need {} MB of memory, and a client gets {} MB: \
            ask for fewer answers ('n'), a smaller 'max_tokens' or fewer 'top_logprobs'",
            needed / 1_000_000,
            most / 1_000_000
        );
        return Err(ApiError::bad(what).param("max_tokens"));
    }
    answers.try_take(client, needed).ok_or_else(|| {
        let what = "the answers of this client use all of its memory: try again later";
        ApiError::new(429, what).code("memory_full")
    })
}

/// A request with a grammar to compile, and its share of the memory.
struct GrammarJob {
    source: GrammarSource,
    parsed: Arc<ApiRequest>,
    memory: PoolShare,
}

/// Compiles the grammar of a request on a worker thread.
///
/// The compilation stops after the client has disconnected, and holds the memory until then.
async fn compiled(
    app: &App,
    served: &Arc<ServedModel>,
    job: GrammarJob,
    client: Client,
) -> Result<(Grammar, PoolShare), ApiError> {
    let compiler = app.room.compilers.take(client, 1).await;
    // The future drops this when its client disconnects.
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
