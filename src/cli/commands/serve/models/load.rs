//! The thread of a model: opens it, waits for memory, loads it, and runs its engine until it is
//! unloaded.

use super::catalog::ModelFacts;
use super::room::pin;
use super::{LoadedModel, LoadedSize, ModelLoad, ServedModels};
use crate::cli::api::error::ApiError;
use crate::cli::api::served::{ServedModel, ServedOptions, Thinking};
use crate::cli::commands::serve::engine::AnswerEngine;
use crate::cli::commands::serve::http::images::LIMITS;
use crate::cli::commands::serve::options::LoadOptions;
use crate::cli::commands::serve::queue::RequestQueue;
use crate::cli::io::ui::Ui;
use crate::cli::options::{SightArgs, Think};
use crate::decode::PageDirectory;
use crate::error::{Fault, Kind, no_thread};
use crate::runtime::constraints::Constraints;
use crate::runtime::options::{DraftingOptions, ModelOptions, RunOptions};
use crate::runtime::{Room, Session, SightOptions, Started};
use anyhow::Result;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Stack size of a model's thread in bytes, the same as the main thread's.
const STACK: usize = 8 << 20;

/// Default context size in positions.
pub const CONTEXT: usize = 8192;

/// Options for loading models.
pub struct ModelLoader {
    pub load: LoadOptions,
    pub run: RunOptions,
    pub drafting: DraftingOptions,
    pub prompts: Option<PageDirectory>,
    pub sight: SightArgs,
    pub ui: Ui,
}

/// Starts the thread of a model.
pub fn start(
    models: &Arc<ServedModels>,
    slot: usize,
    load: Arc<ModelLoad>,
) -> Result<(), ApiError> {
    let models = models.clone();
    let work = move || {
        let mut next = Some(load);
        while let Some(load) = next {
            let run = AssertUnwindSafe(|| run(&models, slot, &load));
            let result = catch_unwind(run).unwrap_or_else(|_| {
                Err(Fault::new(Kind::Failure, "a fault of the program ended the model").into())
            });
            next = models.unloaded(slot, result);
        }
    };
    let builder = std::thread::Builder::new().name("model".into()).stack_size(STACK);
    let started = builder.spawn(work).map_err(anyhow::Error::from);
    started.map(drop).map_err(|error| {
        ApiError::new(503, format!("{:#}", error.context(no_thread()))).code("loading")
    })
}

/// Loads a model once and answers its requests.
fn run(models: &Arc<ServedModels>, slot: usize, load: &Arc<ModelLoad>) -> Result<()> {
    let (loader, own) = (&models.loader, &models.slots[slot]);
    let (ui, prompts) = (&loader.ui, loader.prompts.as_ref());
    let is_single = models.is_single();
    if !is_single {
        models.events.say(&format!("{} is being loaded", own.name()));
    }
    let options = ModelOptions { model: own.source.clone(), run: loader.run.clone() };
    let session = Session::open(&options, &loader.drafting.source, ui)?;
    let sight = loader.sight.settled(prompts);
    let mut session = session.seeing(&SightOptions { limits: LIMITS, ..sight });
    loader.sight.check(&session)?;
    let context = session.context(CONTEXT, ui);
    let (sequences, prefixes) = (loader.load.parallel.into(), loader.load.cache_ram);
    let room = Room { context, sequences, prefixes };
    if !is_single {
        let (placement, planned) = models.budget.place(&session, room, ui)?;
        models.take_room(slot, load, planned)?;
        pin(&mut session.run, &placement);
    }
    let queue = RequestQueue::new(models.limit.clone(), own.metrics.clone(), models.grace);
    let queue = Arc::new(queue);
    let (drafting, mut failed) = (&loader.drafting, None);
    let engine = AnswerEngine { session: &session, drafting, room, prompts, queue: &queue, ui };
    let mut is_loaded = false;
    let result = engine.run(&mut |started| {
        if is_loaded {
            return;
        }
        is_loaded = true;
        // The first image then finds the tower on its GPU.
        if let Ok(viewer) = session.viewer() {
            viewer.load();
            viewer.take_notes().iter().for_each(|note| ui.note(note));
        }
        match described(models, slot, &session, started, context) {
            Ok((served, facts)) => {
                let memory = started.target.engine().report().memory;
                let loaded = LoadedModel {
                    served: Arc::new(served),
                    queue: queue.clone(),
                    size: LoadedSize {
                        bytes: memory.weights + memory.kv + memory.activations,
                        on_gpu: started.on_gpu,
                        context,
                    },
                };
                if !is_single {
                    let seconds = started.load_seconds;
                    models.events.say(&format!("{} is loaded in {seconds:.2} s", own.name()));
                }
                models.loaded(slot, Arc::new(loaded), facts);
            }
            Err(error) => {
                failed = Some(error);
                queue.end_soon();
            }
        }
    });
    result?;
    failed.map_or(Ok(()), Err)
}

/// Collects the facts of a loaded model that connection threads need.
fn described(
    models: &ServedModels,
    slot: usize,
    session: &Session,
    started: &Started,
    context: usize,
) -> Result<(ServedModel, ModelFacts)> {
    let (loader, tokenizer) = (&models.loader, &session.tokenizer);
    let has_thoughts = tokenizer.channel().is_some();
    let facts = ModelFacts::of(&session.model, context, has_thoughts, session.viewer.is_ok())?;
    let parallel = loader.load.parallel.into();
    let constraints = Constraints::new(tokenizer, &session.stop_ids, parallel);
    let think = &loader.load.think;
    let options = ServedOptions {
        context,
        created: facts.created,
        sampling: facts.sampling.clone(),
        constraints: constraints.into(),
        max_tokens: loader.load.max_tokens,
        // If there are several models, the option applies to those that can think.
        thinking: Thinking {
            is_on: match models.is_single() {
                true => think.settled(tokenizer)?,
                false => think.think == Think::On && has_thoughts,
            },
            budget: think.think_budget,
        },
        template: loader.load.template.clone(),
    };
    let device = &started.target.engine().report().device;
    let mut served = ServedModel::new(session, device, options, &loader.ui)?;
    if !models.is_single() {
        served.name = models.slots[slot].name().to_owned();
    }
    Ok((served, facts))
}
