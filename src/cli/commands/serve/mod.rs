//! `gemma serve`: serves models to many clients. Each text equals that of `gemma generate`.
//!
//! Connection threads ([`http`]) parse bodies ([`api`](crate::cli::api)) and put requests into the
//! bounded queue of a model ([`queue`]). The thread of the model owns its weights and the scheduler
//! ([`engine`]). It has no HTTP code and does not wait for clients. One
//! [`Request`](crate::decode::Request) passes from the parsed body to the scheduler. [`models`]
//! loads and unloads models.

mod access;
mod engine;
mod http;
mod log;
mod metrics;
mod models;
mod options;
mod pool;
mod queue;
#[cfg(feature = "testing")]
pub mod testing;

pub use options::ServeArgs;

use crate::cli::api::keep_alive::KeepAlive;
use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::Ui;
use crate::cli::settings::Typed;
use crate::error::{Fault, Kind, no_thread};
use crate::os::memory::return_freed;
use crate::os::process::raise_open_files;
use crate::os::signals::survive_closed_connections;
use crate::runtime::devices::npu;
use crate::runtime::options::DraftFrom;
use crate::util::threads;
use access::ListenHost;
use anyhow::{Context, Result};
use http::guard::Guard;
use http::listen::{self, ConnectionRules, Listeners, ServerStage};
use http::{App, Routers};
use log::EventLog;
use models::catalog::{self, CatalogEntry};
use models::{CONTEXT, ModelLoader, ModelPolicy, RunningModel, ServedModels};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Threads that serve connections. All others are for the model.
const THREADS: usize = 2;
/// Default time that one of several models stays loaded after its last answer.
const KEEP_ALIVE: KeepAlive = KeepAlive::For(Duration::from_secs(300));

pub fn run(options: &ServeArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let (edge, load) = (&options.edge, &options.load);
    let keys = edge.keys()?;
    if options.models.run.npu.is_asked() && (load.parallel > 1 || options.models.is_several()) {
        return Err(npu::for_one_text());
    }
    let models = Arc::new(served_models(options, ui)?);
    let (most, patience) =
        (usize::from(edge.max_body) * 1_000_000, Duration::from_secs(edge.client_timeout.into()));
    let room = http::SharedLimits::new(most);
    let app = Arc::new(App {
        models: models.clone(),
        metrics: Arc::default(),
        guard: Guard::new(keys, edge.cors_origin.clone()),
        log: edge.log,
        notes: Arc::new(log::notes(edge.log)),
        bodies: room.bodies(most, patience),
        room,
    });
    survive_closed_connections();
    return_freed();
    // Each connection needs a descriptor.
    raise_open_files();
    let server = Server::start(&edge.host, edge.port, &app)?;

    let is_several = options.models.is_several();
    if !is_several {
        models.preload(0).map_err(|error| Fault::new(Kind::Failure, error.message))?;
    }
    let mut interrupt = None;
    let result = models.supervise(!is_several, &mut |running| {
        let (ending, stage) = (models.clone(), server.stage.clone());
        let close = move || {
            ending.end_soon();
            let _ = stage.send(ServerStage::Closing);
        };
        interrupt = Some(Interrupt::watch_saying(close)?.0);
        models.open();
        ui.line(&greeting(&models, running, &server.url, load.parallel));
        Ok(())
    });
    models.end_soon();
    server.end();
    result?;
    Ok(interrupt.and_then(|interrupt| interrupt.exit_code()).unwrap_or(0))
}

/// Returns the line that says where the server answers.
fn greeting(models: &ServedModels, running: &[RunningModel], url: &str, parallel: u16) -> String {
    match running.first() {
        Some(RunningModel { slot, size, .. }) => format!(
            "{} answers at {url} ({parallel} at once, {} positions each)",
            models.slots()[*slot].name(),
            size.context
        ),
        None => {
            let count = match models.slots().len() {
                1 => "a server of 1 model".to_owned(),
                n => format!("a server of {n} models"),
            };
            format!("{count} answers at {url} ({parallel} at once of each)")
        }
    }
}

/// Collects the models that the options name.
fn served_models(options: &ServeArgs, ui: &Ui) -> Result<ServedModels> {
    let ServeArgs { edge, load, models: given, sight, .. } = options;
    let (run, drafting) = (given.run.settled()?, options.draft.settled()?);
    let entries = match given.is_several() {
        false => {
            let source = given.model.first().cloned();
            vec![CatalogEntry { name: None, source, facts: None }]
        }
        true => {
            if let DraftFrom::Model(name) = &drafting.source {
                let what = format!("--draft {name} is a draft model for one model only");
                let help = "leave it out: each model finds the drafts that fit it";
                return Err(Fault::usage(what).help(help).into());
            }
            if sight.mmproj.is_some() {
                let fault = Fault::usage("--mmproj names the tower of one model only");
                return Err(fault.help("put each mmproj file next to its model").into());
            }
            catalog::read(&given.model, given.models_dir.as_deref(), &run, CONTEXT, ui)?
        }
    };
    let default = if given.is_several() { KEEP_ALIVE } else { KeepAlive::Forever };
    let policy = ModelPolicy {
        keep_alive: given.keep_alive.unwrap_or(default),
        memory: given.models_memory,
        max_queue: load.max_queue.into(),
        grace: Duration::from_secs(edge.grace.into()),
    };
    let loader = ModelLoader {
        load: load.clone(),
        run,
        drafting,
        prompts: options.cache.settled()?,
        sight: sight.clone(),
        ui: Ui::new(&options.ui),
    };
    Ok(ServedModels::new(entries, policy, loader, EventLog(edge.log)))
}

/// The threads that serve connections.
struct Server {
    runtime: tokio::runtime::Runtime,
    url: String,
    stage: watch::Sender<ServerStage>,
    connections: tokio::task::JoinHandle<()>,
}

impl Server {
    fn start(host: &ListenHost, port: u16, app: &Arc<App>) -> Result<Server> {
        // Tokio panics if it gets no thread. One more thread is for requests that are slow to
        // prepare.
        threads::check(THREADS + 1).with_context(no_thread)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(http::WORKERS)
            .thread_name("http")
            .enable_all()
            .build()
            .context("starting the threads for connections")?;
        let listen = async { Listeners::bind(host, port) };
        let listeners = runtime.block_on(listen).with_context(|| match host {
            ListenHost::Unix(_) => Fault::new(Kind::Failure, format!("cannot listen on {host}"))
                .help("choose another path, in a directory that exists"),
            _ => Fault::new(Kind::Failure, format!("cannot listen on {host}:{port}"))
                .help("choose another --port, or --port 0 for a free one"),
        })?;
        let url = listeners.url.clone();
        let (stage, told) = watch::channel(ServerStage::Open);
        let (patience, metrics) = (app.bodies.patience, app.metrics.clone());
        let rules = ConnectionRules { routers: Routers::new(app), patience, metrics };
        let connections = runtime.spawn(listen::serve(listeners, rules, told));
        Ok(Server { runtime, url, stage, connections })
    }

    /// Lets connections end, and closes those that do not.
    fn end(self) {
        let _ = self.stage.send(ServerStage::Over);
        let _ = self.runtime.block_on(self.connections);
        self.runtime.shutdown_background();
    }
}
