//! The models of a server: which are loaded, which requests use them, and when they are unloaded.
//!
//! A request takes a [`ModelLease`], which starts the load of its model if necessary and waits for
//! it. Each loaded model has a thread that runs its engine ([`load`]). The main thread unloads idle
//! models ([`ServedModels::supervise`]). If another model needs a model's memory, that model takes
//! no new lease and is unloaded when its last lease ends.

pub mod catalog;
mod load;
pub mod room;

use super::log::EventLog;
use super::metrics::Metrics;
use super::queue::{QueueLimit, RequestQueue};
use crate::cli::api::error::ApiError;
use crate::cli::api::keep_alive::KeepAlive;
use crate::cli::api::served::ServedModel;
use crate::os::memory::release_freed;
use crate::runtime::devices::lock;
use anyhow::Result;
use catalog::{CatalogEntry, ModelFacts};
pub use load::{CONTEXT, ModelLoader};
use room::{ModelBudget, PlannedMemory};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Limit of names in a message.
const MOST_NAMES: usize = 20;
/// Interval at which a load that waits for memory checks again.
const LOOK: Duration = Duration::from_millis(200);
/// Longest wait of an unload for requests that still hold the tokenizer.
const DROP_WAIT: Duration = Duration::from_secs(1);

/// All models of a server.
pub struct ServedModels {
    slots: Vec<ModelSlot>,
    state: Mutex<ServerState>,
    changed: Condvar,
    pub loader: ModelLoader,
    budget: ModelBudget,
    /// Limit of waiting texts, for all models together.
    limit: Arc<QueueLimit>,
    /// Default time that models stay loaded.
    keep_alive: KeepAlive,
    events: EventLog,
    grace: Duration,
}

/// A model that can be loaded.
pub struct ModelSlot {
    /// Set when the name is known.
    name: OnceLock<String>,
    source: Option<String>,
    pub metrics: Arc<Metrics>,
}

impl ModelSlot {
    pub fn name(&self) -> &str {
        self.name.get().map_or("the model", |name| name)
    }
}

struct ServerState {
    slots: Vec<SlotState>,
    /// Whether requests are accepted.
    is_ready: bool,
    /// Time at which running answers are cut off.
    ends: Option<Instant>,
    /// An error that ends the server.
    failure: Option<anyhow::Error>,
}

#[derive(Default)]
struct SlotState {
    facts: Option<Arc<ModelFacts>>,
    active: Option<ActiveModel>,
}

/// A model that is being loaded, is loaded, or is being unloaded.
struct ActiveModel {
    load: Arc<ModelLoad>,
    loaded: Option<Arc<LoadedModel>>,
    /// Set from the end of the load until the memory is free again.
    size: Option<LoadedSize>,
    planned: PlannedMemory,
    keep_alive: KeepAlive,
    /// Time when the last lease ended.
    idle_since: Instant,
    /// Whether the model takes no new leases.
    is_leaving: bool,
    /// The load after this one, for requests that arrived while the model was leaving.
    next: Option<Arc<ModelLoad>>,
}

type LoadOutcome = Result<Arc<LoadedModel>, ApiError>;

/// One load of a model, with the requests that wait for it or use it.
struct ModelLoad {
    users: std::sync::atomic::AtomicUsize,
    outcome: watch::Sender<Option<LoadOutcome>>,
}

/// A loaded model.
pub struct LoadedModel {
    pub served: Arc<ServedModel>,
    pub queue: Arc<RequestQueue>,
    pub size: LoadedSize,
}

/// Sizes of a loaded model.
#[derive(Clone, Copy)]
pub struct LoadedSize {
    /// Bytes of all its memory.
    pub bytes: u64,
    /// Bytes of its memory on the GPU.
    pub on_gpu: u64,
    /// Context size of each text, in positions.
    pub context: usize,
}

/// A model in memory, for lists.
pub struct RunningModel {
    pub slot: usize,
    pub size: LoadedSize,
    /// Time until it is unloaded; `None` for never.
    pub left: Option<Duration>,
}

/// The use of a loaded model by a request. It keeps the model loaded.
///
/// `loaded` is dropped before the lease ends, so that the thread of the model frees its memory.
pub struct ModelLease {
    pub loaded: Arc<LoadedModel>,
    pending: PendingLease,
}

/// A lease of a model that may not be loaded yet.
struct PendingLease {
    models: Arc<ServedModels>,
    slot: usize,
    load: Arc<ModelLoad>,
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        self.models.release(self.slot, &self.load);
    }
}

impl ModelLease {
    pub fn slot(&self) -> usize {
        self.pending.slot
    }
}

impl ModelLoad {
    fn new() -> Arc<ModelLoad> {
        Arc::new(ModelLoad { users: Default::default(), outcome: watch::Sender::new(None) })
    }

    /// Returns the number of leases. They change only under the lock of the state.
    fn users(&self) -> usize {
        self.users.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn count(&self, change: isize) {
        self.users.fetch_add(change as usize, std::sync::atomic::Ordering::Relaxed);
    }
}

impl ActiveModel {
    fn new(load: Arc<ModelLoad>, keep_alive: KeepAlive) -> ActiveModel {
        ActiveModel {
            load,
            loaded: None,
            size: None,
            planned: PlannedMemory::default(),
            keep_alive,
            idle_since: Instant::now(),
            is_leaving: false,
            next: None,
        }
    }

    /// Returns the time when the model should be unloaded; `None` if it is busy or stays loaded.
    fn expires(&self) -> Option<Instant> {
        let KeepAlive::For(time) = self.keep_alive else { return None };
        let is_idle = self.loaded.is_some() && !self.is_leaving && self.load.users() == 0;
        is_idle.then(|| self.idle_since + time)
    }

    /// Takes no new leases from now on. The engine ends after the last lease.
    fn leave(&mut self) {
        self.is_leaving = true;
        if let Some(loaded) = self.loaded.as_ref().filter(|_| self.load.users() == 0) {
            loaded.queue.end_soon();
        }
    }
}

/// Rules for loading and unloading models.
pub struct ModelPolicy {
    pub keep_alive: KeepAlive,
    /// Memory for models in bytes; by default the free memory.
    pub memory: Option<u64>,
    pub max_queue: usize,
    pub grace: Duration,
}

impl ServedModels {
    pub fn new(
        entries: Vec<CatalogEntry>,
        policy: ModelPolicy,
        loader: ModelLoader,
        events: EventLog,
    ) -> ServedModels {
        let (mut slots, mut states) = (Vec::new(), Vec::new());
        for CatalogEntry { name, source, facts } in entries {
            let name = name.map_or_else(OnceLock::new, OnceLock::from);
            slots.push(ModelSlot { name, source, metrics: Arc::default() });
            states.push(SlotState { facts: facts.map(Arc::new), active: None });
        }
        let state = ServerState { slots: states, is_ready: false, ends: None, failure: None };
        ServedModels {
            slots,
            state: Mutex::new(state),
            changed: Condvar::new(),
            loader,
            budget: ModelBudget::new(policy.memory),
            limit: QueueLimit::new(policy.max_queue),
            keep_alive: policy.keep_alive,
            events,
            grace: policy.grace,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn slots(&self) -> &[ModelSlot] {
        &self.slots
    }

    /// Returns whether the server has one model, which answers to any name.
    pub fn is_single(&self) -> bool {
        self.slots.len() == 1
    }

    /// Returns an error while requests are refused.
    pub fn is_open(&self) -> Result<(), ApiError> {
        let state = self.lock();
        match (state.ends, state.is_ready) {
            (Some(_), _) => Err(ApiError::ending()),
            (None, false) => Err(ApiError::new(503, "the model is being loaded").code("loading")),
            (None, true) => Ok(()),
        }
    }

    /// Returns the model that a request names. If there is only one, any name is accepted.
    pub fn choose(&self, name: Option<&str>) -> Result<usize, ApiError> {
        if self.is_single() {
            return Ok(0);
        }
        let names: Vec<&str> = self.slots.iter().take(MOST_NAMES).map(|slot| slot.name()).collect();
        let more = if self.slots.len() > MOST_NAMES { ", ..." } else { "" };
        let names = names.join(", ") + more;
        let Some(name) = name else {
            let what =
                format!("'model' is missing, and this server has several: send one of {names}");
            return Err(ApiError::bad(what).param("model"));
        };
        let short = name.strip_suffix(":latest").unwrap_or(name);
        let is_called = |slot: &ModelSlot| {
            let file = slot.name().strip_suffix(".gguf").unwrap_or(slot.name());
            [slot.name(), file].iter().any(|own| own.eq_ignore_ascii_case(short))
                || slot.source.as_deref().is_some_and(|source| source == name || source == short)
        };
        let exact = self.slots.iter().position(|slot| slot.name() == name);
        exact.or_else(|| self.slots.iter().position(is_called)).ok_or_else(|| {
            let what = format!("there is no model {name:?} here: send one of {names}");
            ApiError::new(404, what).param("model").code("model_not_found")
        })
    }

    /// Returns the known facts of a model without loading it.
    pub fn facts(&self, slot: usize) -> Option<Arc<ModelFacts>> {
        self.lock().slots[slot].facts.clone()
    }

    /// Returns the models in memory.
    pub fn running(&self) -> Vec<RunningModel> {
        let state = self.lock();
        let slots = state.slots.iter().enumerate();
        let running = slots.filter_map(|(slot, state)| {
            let active = state.active.as_ref()?;
            let size = active.size?;
            let left = match active.keep_alive {
                KeepAlive::Forever => None,
                KeepAlive::For(time) if active.load.users() > 0 => Some(time),
                KeepAlive::For(time) => Some(time.saturating_sub(active.idle_since.elapsed())),
            };
            Some(RunningModel { slot, size, left })
        });
        running.collect()
    }

    /// Returns a lease of a model, if it is loaded and takes new requests.
    pub fn lease_loaded(self: &Arc<Self>, slot: usize) -> Option<ModelLease> {
        let state = self.lock();
        let active = state.slots[slot].active.as_ref().filter(|active| !active.is_leaving)?;
        let loaded = active.loaded.clone()?;
        active.load.count(1);
        let pending = PendingLease { models: self.clone(), slot, load: active.load.clone() };
        Some(ModelLease { loaded, pending })
    }

    /// Loads a model if necessary, and waits for it.
    pub async fn lease(self: &Arc<Self>, slot: usize) -> Result<ModelLease, ApiError> {
        let pending = self.join(slot)?;
        let mut news = pending.load.outcome.subscribe();
        let outcome = match news.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            Err(_) => None,
        };
        let loaded = outcome.unwrap_or_else(|| Err(ApiError::ending()))?;
        Ok(ModelLease { loaded, pending })
    }

    /// Loads a model without waiting for it.
    pub fn preload(self: &Arc<Self>, slot: usize) -> Result<(), ApiError> {
        self.join(slot).map(drop)
    }

    /// Adds a user to the load of a model. Starts the load if there is none.
    fn join(self: &Arc<Self>, slot: usize) -> Result<PendingLease, ApiError> {
        let mut state = self.lock();
        if state.ends.is_some() {
            return Err(ApiError::ending());
        }
        let (load, is_new) = match &mut state.slots[slot].active {
            Some(active) if active.is_leaving => {
                (active.next.get_or_insert_with(ModelLoad::new).clone(), false)
            }
            Some(active) => (active.load.clone(), false),
            none => {
                let load = ModelLoad::new();
                *none = Some(ActiveModel::new(load.clone(), self.keep_alive));
                (load, true)
            }
        };
        load.count(1);
        let pending = PendingLease { models: self.clone(), slot, load: load.clone() };
        drop(state);
        if is_new && let Err(error) = load::start(self, slot, load) {
            self.lock().slots[slot].active = None;
            return Err(error);
        }
        Ok(pending)
    }

    /// Ends a lease.
    fn release(&self, slot: usize, load: &Arc<ModelLoad>) {
        let mut state = self.lock();
        load.count(-1);
        let active = state.slots[slot].active.as_mut();
        let Some(active) = active.filter(|active| Arc::ptr_eq(&active.load, load)) else { return };
        if load.users() == 0 {
            active.idle_since = Instant::now();
            if active.is_leaving {
                active.leave();
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Sets the time that a model stays loaded after its last answer.
    ///
    /// It applies until the next load.
    pub fn keep(&self, slot: usize, keep_alive: KeepAlive) {
        if let Some(active) = &mut self.lock().slots[slot].active {
            active.keep_alive = keep_alive;
        }
        self.changed.notify_all();
    }

    /// Records that a model is loaded, unless the server is ending.
    fn loaded(&self, slot: usize, loaded: Arc<LoadedModel>, facts: ModelFacts) {
        let mut state = self.lock();
        let is_ending = state.ends.is_some();
        let own = &mut state.slots[slot];
        let _ = self.slots[slot].name.set(loaded.served.name.clone());
        let created = own.facts.as_ref().map_or(facts.created, |known| known.created);
        own.facts = Some(Arc::new(ModelFacts { created, ..facts }));
        let Some(active) = &mut own.active else { return };
        loaded.queue.ready();
        active.loaded = Some(loaded.clone());
        active.size = Some(loaded.size);
        active.idle_since = Instant::now();
        if is_ending {
            loaded.queue.end_soon();
        }
        self.slots[slot].metrics.loaded.set(1);
        self.slots[slot].metrics.loads.add(1);
        let _ = active.load.outcome.send_replace(Some(Ok(loaded)));
        drop(state);
        self.changed.notify_all();
    }

    /// Records that a model is unloaded or could not be loaded.
    ///
    /// Its memory is free by then. Returns the next load of the model, if requests wait for one.
    fn unloaded(&self, slot: usize, result: Result<()>) -> Option<Arc<ModelLoad>> {
        let loaded = {
            let mut state = self.lock();
            let active = state.slots[slot].active.as_mut()?;
            active.is_leaving = true;
            let loaded = active.loaded.take();
            // The outcome refers to the loaded model too.
            let outcome = match (&result, &loaded) {
                (Err(error), _) => Some(Err(ApiError { status: 503, ..ApiError::of(error) })),
                (Ok(()), Some(_)) => Some(Err(ApiError::ending())),
                (Ok(()), None) => None,
            };
            if outcome.is_some() {
                active.load.outcome.send_replace(outcome);
            }
            loaded
        };
        let was_loaded = loaded.is_some();
        if let Some(served) = loaded.map(|loaded| Arc::downgrade(&loaded.served)) {
            // A request may hold it for a moment after its lease has ended.
            let begun = Instant::now();
            while served.strong_count() > 0 && begun.elapsed() < DROP_WAIT {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        release_freed();
        let own = &self.slots[slot];
        let mut state = self.lock();
        let active = state.slots[slot].active.take()?;
        if let Err(error) = result {
            let name = own.name();
            // The only model of a server ends it, if it fails at the start or while it is loaded.
            if self.is_single() && (!state.is_ready || was_loaded) {
                state.failure.get_or_insert(error);
            } else if was_loaded {
                self.events.say(&format!("{name} has ended: {error:#}"));
            } else {
                self.events.say(&format!("{name} cannot be loaded: {error:#}"));
            }
        }
        let next = active.next.filter(|next| next.users() > 0 && state.ends.is_none());
        if let Some(next) = &next {
            let again = ActiveModel::new(next.clone(), self.keep_alive);
            state.slots[slot].active = Some(again);
        }
        if state.slots.iter().all(|slot| slot.active.is_none()) {
            // Another process may use the GPU while no model is loaded.
            lock::release();
        }
        drop(state);
        if was_loaded {
            let Metrics { loaded, running, waiting, .. } = &*own.metrics;
            [loaded, running, waiting].iter().for_each(|gauge| gauge.set(0));
            self.events.say(&format!("{} is unloaded", own.name()));
        }
        self.changed.notify_all();
        next
    }

    /// Refuses new requests from now on. Loaded models end after their answers.
    pub fn end_soon(&self) {
        let mut state = self.lock();
        state.ends.get_or_insert_with(|| Instant::now() + self.grace);
        for active in state.slots.iter_mut().filter_map(|slot| slot.active.as_mut()) {
            match &active.loaded {
                Some(loaded) => loaded.queue.end_soon(),
                None => {
                    let _ = active.load.outcome.send_replace(Some(Err(ApiError::ending())));
                }
            }
            active.next = None;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Accepts requests from now on.
    pub fn open(&self) {
        self.lock().is_ready = true;
    }

    /// Unloads idle models until the server ends.
    ///
    /// Calls `ready`, which calls [`open`](Self::open), when requests can be answered: after the
    /// only model is loaded, or at once if there are several.
    pub fn supervise(
        self: &Arc<Self>,
        waits: bool,
        ready: &mut dyn FnMut(&[RunningModel]) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock();
        loop {
            if let Some(error) = state.failure.take() {
                return Err(error);
            }
            let is_loaded = |slot: &SlotState| {
                slot.active.as_ref().is_some_and(|active| active.loaded.is_some())
            };
            if !state.is_ready && state.ends.is_none() && (!waits || is_loaded(&state.slots[0])) {
                drop(state);
                ready(&self.running())?;
                state = self.lock();
                continue;
            }
            if let Some(end) = state.ends {
                // A load cannot be interrupted.
                let late = Instant::now() >= end;
                let is_done = |slot: &SlotState| {
                    slot.active.as_ref().is_none_or(|active| late && active.loaded.is_none())
                };
                if state.slots.iter().all(is_done) {
                    return Ok(());
                }
            }
            let now = Instant::now();
            let mut next = state.ends.map(|_| now + LOOK);
            for (slot, own) in self.slots.iter().zip(&mut state.slots) {
                let Some(active) = &mut own.active else { continue };
                match active.expires() {
                    Some(end) if end <= now => {
                        let why = match active.keep_alive.is_none() {
                            true => "no client uses it".to_owned(),
                            false => format!("it was idle for {}", active.keep_alive),
                        };
                        self.events.say(&format!("{} is being unloaded: {why}", slot.name()));
                        active.leave();
                    }
                    Some(end) => next = Some(next.map_or(end, |next| next.min(end))),
                    None => {}
                }
            }
            let wait = next.map_or(Duration::from_secs(3600), |next| next - now);
            let waited = self.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
