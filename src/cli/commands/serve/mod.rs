//! `gemma serve`: one model, many clients, and for each the text that `gemma generate` gives.
//!
//! Connection threads ([`http`]) parse bodies ([`api`](crate::cli::api)) and put requests into a
//! bounded queue ([`queue`]). The main thread owns the model and the scheduler ([`engine`]). It
//! knows nothing of HTTP and waits for no client. One [`Request`](crate::decode::Request) goes from
//! the parsed body to the scheduler.

mod access;
mod engine;
mod http;
mod log;
mod metrics;
mod options;
mod pool;
mod queue;
#[cfg(feature = "testing")]
pub mod testing;

pub use options::ServeArgs;

use crate::cli::api::ids;
use crate::cli::api::served::{ServedModel, ServedOptions};
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::Ui;
use crate::cli::options::{Origin, SamplingOptions};
use crate::cli::settings::Typed;
use crate::error::{Fault, Kind, no_thread};
use crate::os::memory::return_freed;
use crate::os::process::raise_open_files;
use crate::os::signals::survive_closed_connections;
use crate::runtime::constraints::Constraints;
use crate::runtime::devices::npu;
use crate::runtime::{Room, Session, SightOptions, Started};
use crate::util::threads;
use access::PageOrigin;
use anyhow::{Context, Result};
use engine::AnswerEngine;
use http::App;
use http::guard::Guard;
use http::listen::{self, ServerStage};
use queue::RequestQueue;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::watch;

/// Positions of each text by default.
const CONTEXT: usize = 8192;
/// Threads that serve connections. The model has all others.
const THREADS: usize = 2;

pub fn run(options: &ServeArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let (edge, load) = (&options.edge, &options.load);
    let keys = edge.keys()?;
    if options.model.run.npu.is_asked() && load.parallel > 1 {
        return Err(npu::for_one_text());
    }
    let (model, drafting) = (options.model.settled()?, options.draft.settled()?);
    let prompts = options.cache.settled()?;
    let queue =
        Arc::new(RequestQueue::new(load.max_queue.into(), Duration::from_secs(edge.grace.into())));
    let (most, patience) =
        (usize::from(edge.max_body) * 1_000_000, Duration::from_secs(edge.client_timeout.into()));
    let room = http::SharedLimits::new(most);
    let app = Arc::new(App {
        queue: queue.clone(),
        served: OnceLock::new(),
        guard: Guard::new(keys, edge.cors_origin.clone()),
        log: edge.log,
        notes: Arc::new(log::notes(edge.log)),
        bodies: room.bodies(most, patience),
        room,
    });
    survive_closed_connections();
    return_freed();
    // Each connection takes a descriptor.
    raise_open_files();
    let address = SocketAddr::new(edge.host, edge.port);
    let server = Server::start(address, &app, &edge.cors_origin)?;

    let session = Session::open(&model, &drafting.source, ui)?;
    let sight = options.sight.settled(prompts.as_ref());
    let session = session.seeing(&SightOptions { limits: http::images::LIMITS, ..sight });
    options.sight.check(&session)?;
    let context = session.context(CONTEXT, ui);
    let room = Room { context, sequences: load.parallel.into(), prefixes: load.cache_ram };
    let (session, drafting, prompts) = (&session, &drafting, prompts.as_ref());
    let engine = AnswerEngine { session, drafting, room, prompts, queue: &queue, ui };
    let mut interrupt = None;
    let mut failed = None;
    let result = engine.run(&mut |started| {
        if app.served.get().is_some() {
            return;
        }
        // The first image finds the tower on its GPU.
        if let Ok(viewer) = session.viewer() {
            viewer.load();
            viewer.take_notes().iter().for_each(|note| ui.note(note));
        }
        let ready = served(options, session, started, context, ui).and_then(|served| {
            let (queue, stage) = (queue.clone(), server.stage.clone());
            let close = move || {
                queue.end_soon();
                let _ = stage.send(ServerStage::Closing);
            };
            interrupt = Some(Interrupt::watch_saying(close)?.0);
            Ok(served)
        });
        match ready {
            Ok(served) => {
                let _ = app.served.set(Arc::new(served));
                queue.ready();
                ui.line(&format!(
                    "{} answers at http://{} ({} at once, {context} positions each)",
                    session.model.name, server.address, load.parallel
                ));
            }
            Err(error) => {
                failed = Some(error);
                queue.end_soon();
            }
        }
    });
    server.end();
    result?;
    match failed {
        Some(error) => Err(error),
        None => Ok(interrupt.and_then(|interrupt| interrupt.exit_code()).unwrap_or(0)),
    }
}

/// Collects the facts of the model that connection threads need.
fn served(
    options: &ServeArgs,
    session: &Session,
    started: &Started,
    context: usize,
    ui: &Ui,
) -> Result<ServedModel> {
    let nothing = SamplingOptions::of_the_model();
    let (mut sampling, _) = nothing.resolve(|_| Origin::BuiltIn, &session.generation);
    sampling.seed = 0;
    let (tokenizer, load) = (&session.tokenizer, &options.load);
    let constraints = Constraints::new(tokenizer, &session.stop_ids, load.parallel.into());
    let options = ServedOptions {
        context,
        created: ids::now(),
        sampling,
        constraints: constraints.into(),
        max_tokens: load.max_tokens,
        thinks: load.think.settled(tokenizer)?,
    };
    ServedModel::new(session, &started.target.engine().report().device, options, ui)
}

/// The threads that serve connections.
struct Server {
    runtime: tokio::runtime::Runtime,
    address: SocketAddr,
    stage: watch::Sender<ServerStage>,
    connections: tokio::task::JoinHandle<()>,
}

impl Server {
    fn start(address: SocketAddr, app: &Arc<App>, origins: &[PageOrigin]) -> Result<Server> {
        // Tokio panics if it gets no thread. One more is for requests that take long to prepare.
        threads::check(THREADS + 1).with_context(no_thread)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(http::WORKERS)
            .thread_name("http")
            .enable_all()
            .build()
            .context("starting the threads for connections")?;
        let listen = async { listen::bind(address) };
        let listener = runtime.block_on(listen).with_context(|| {
            Fault::new(Kind::Failure, format!("cannot listen on {address}"))
                .help("another --port, or --port 0 for a free one")
        })?;
        let address = listener.local_addr().context("asking for the own address")?;
        let (stage, told) = watch::channel(ServerStage::Open);
        let router = http::router(app.clone(), origins);
        let serve = listen::serve(listener, router, app.bodies.patience, app.queue.clone(), told);
        let connections = runtime.spawn(serve);
        Ok(Server { runtime, address, stage, connections })
    }

    /// Lets connections end, and closes the rest.
    fn end(self) {
        let _ = self.stage.send(ServerStage::Over);
        let _ = self.runtime.block_on(self.connections);
        self.runtime.shutdown_background();
    }
}
