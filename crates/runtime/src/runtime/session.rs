//! A session: a model's files, from which a target and its drafter are loaded.

use crate::decode::{PageDirectory, PromptCache};
use crate::runtime::Listener;
use crate::runtime::drafting::calibration::Calibration;
use crate::runtime::drafting::costs::Passes;
use crate::runtime::drafting::{self, DraftTarget, Drafting};
use crate::runtime::load::{self, Loaded, Room};
use crate::runtime::model::Model;
use crate::runtime::model::assistant;
use crate::runtime::model::viewer::{self, SightOptions, Viewer};
use crate::runtime::options::{
    Device, DraftFrom, DraftingOptions, GpuLayers, ModelOptions, RunOptions,
};
use anyhow::Result;
use gemma_base::compute::cpu::Pool;
use gemma_base::error::Fault;
use gemma_base::os::files::Stamp;
use gemma_base::os::machine;
use gemma_base::tensor::Token;
use gemma_model::engine::Timeline;
use gemma_model::models::{Config, Generation, Tokenizer};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// A model opened for text generation. Nothing of it is loaded yet.
pub struct Session {
    pub model: Model,
    pub tokenizer: Arc<Tokenizer>,
    /// Settings recommended by the model's authors.
    pub generation: Generation,
    /// Tokens that end an answer.
    pub stop_ids: Vec<Token>,
    pub run: RunOptions,
    /// Image support, or the reason why there is none.
    pub viewer: Result<Arc<Viewer>, Fault>,
}

/// A loaded target and its drafter.
pub struct Started {
    pub target: Timeline,
    pub load_seconds: f64,
    /// Bytes of the model on a GPU.
    pub on_gpu: u64,
    pub drafts: Drafting,
    pub costs: Calibration,
}

impl Session {
    /// Opens the model's files and checks them.
    pub fn open(
        options: &ModelOptions,
        drafts: &DraftFrom,
        listener: &dyn Listener,
    ) -> Result<Session> {
        let model = Model::open(options.model.as_deref(), listener)?;
        let tokenizer = model.tokenizer(listener)?;
        Session::of(model, tokenizer, options.run.clone(), drafts, listener)
    }

    /// Creates a session from an opened model, possibly with another model's tokenizer.
    pub fn of(
        mut model: Model,
        tokenizer: Tokenizer,
        run: RunOptions,
        drafts: &DraftFrom,
        listener: &dyn Listener,
    ) -> Result<Session> {
        let assistant = assistant::assistant(&model, drafts, listener)?;
        model.weights = model.weights.assisted_by(assistant);
        let generation = Generation::of(model.checkpoint())?;
        let stop_ids = generation.stop_ids(model.config());
        let viewer = Err(Fault::model("no images are read here"));
        Ok(Session { model, tokenizer: Arc::new(tokenizer), generation, stop_ids, run, viewer })
    }

    /// Enables images in texts, if the model has a tower. Passes then have room for an image.
    pub fn seeing(mut self, options: &SightOptions) -> Session {
        match Viewer::open(&self.model, options, load::threads(&self.run)) {
            Ok(viewer) => {
                let device = match self.run.gpu_layers {
                    GpuLayers::N(0) => Device::Cpu,
                    _ => self.run.device,
                };
                let viewer = viewer.on(device, self.run.lock);
                self.model.weights = self.model.weights.seeing(viewer.images().clone());
                self.viewer = Ok(Arc::new(viewer));
            }
            Err(why) => self.viewer = Err(viewer::fault(&why)),
        }
        self
    }

    /// Returns the image support, or the reason why there is none.
    pub fn viewer(&self) -> Result<&Viewer, &Fault> {
        self.viewer.as_ref().map(|viewer| &**viewer)
    }

    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Returns the number of positions: the requested number, or enough for `needed` tokens.
    pub fn context(&self, needed: usize, listener: &dyn Listener) -> usize {
        load::context(self.run.context, needed, self.config(), listener)
    }

    /// Loads the model at the best place where it fits.
    pub fn load(&self, room: Room, listener: &dyn Listener) -> Result<Loaded> {
        let pool = load::pool(&self.run)?;
        load::load(&self.model.weights, &self.model.name, &self.run, room, &pool, listener)
    }

    /// Returns the loaded model as a target to draft for.
    pub fn target<'a>(
        &'a self,
        room: Room,
        passes: &'a Passes,
        pool: &'a Arc<Pool>,
    ) -> DraftTarget<'a> {
        let Session { model, tokenizer, run, .. } = self;
        DraftTarget { tokenizer, model, run, room, passes, pool }
    }

    /// Returns the prompt cache of a loaded target in a directory. With an NPU there is none,
    /// because measured times decide which pages the NPU computes.
    pub fn prompt_cache(
        &self,
        directory: Option<&PageDirectory>,
        target: &Timeline,
        listener: &dyn Listener,
    ) -> Result<Option<PromptCache>> {
        let (Some(directory), Some(report)) = (directory, target.engine().report().executor) else {
            return Ok(None);
        };
        if report.assist.is_some() {
            listener.note("prompts are not kept on disk while the NPU computes attention");
            return Ok(None);
        }
        // Everything that affects a bit of a key or value. Samples of the weights and the stamps of
        // their files identify the weights; a digest of the source identifies the program.
        let checkpoint = self.model.checkpoint();
        let stamps = checkpoint.stamps()?.into_iter().map(Stamp::on_any_device);
        let kv = load::kv_format(&self.model.weights, self.run.kv)?;
        let mut hash = Sha256::new();
        hash.update(checkpoint.fingerprint()?);
        hash.update(serde_json::to_vec(&stamps.collect::<Vec<_>>())?);
        hash.update(format!("{kv:?} {} {:?}", report.identity, machine::processor_name()));
        hash.update(env!("SOURCE_DIGEST"));
        Ok(Some(PromptCache::new(directory.clone(), hash.finalize().into())))
    }

    /// Loads the model and its drafter, for one text or for several that share passes.
    pub fn start(
        &self,
        room: Room,
        options: &DraftingOptions,
        listener: &dyn Listener,
    ) -> Result<Started> {
        let mut loaded = self.load(room, listener)?;
        let costs = Calibration::of(&self.model, self.run.kv, options, &mut loaded, listener)?;
        let target = self.target(room, &costs.passes, &loaded.pool);
        let drafts = drafting::build(options, &target, listener)?;
        Ok(Started {
            target: Timeline::new(loaded.engine),
            load_seconds: loaded.seconds,
            on_gpu: loaded.on_gpu,
            drafts,
            costs,
        })
    }
}
