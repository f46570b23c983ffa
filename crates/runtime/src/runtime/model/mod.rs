//! A model's files, opened and checked.

pub mod acquire;
pub mod assistant;
pub mod find;
pub mod installed;
pub mod others;
pub mod partner;
pub mod shapes;
pub mod variants;
pub mod viewer;

use crate::runtime::Listener;
use crate::runtime::model::find::{ModelSource, find};
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_base::util::units::thousands;
use gemma_model::checkpoint::Checkpoint;
use gemma_model::models::gguf::repairs;
use gemma_model::models::{Config, Role, Tokenizer, Weights};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Instant;

/// An opened and checked model. Nothing is loaded yet.
pub struct Model {
    pub weights: Weights,
    pub name: String,
    /// `None` for the bundled model.
    pub place: Option<ModelPlace>,
}

/// Location where a model was found.
pub struct ModelPlace {
    pub path: PathBuf,
}

impl ModelPlace {
    /// Returns its id on the hub, if it is in the cache.
    fn id(&self) -> Option<String> {
        let folder = |part: &OsStr| Some(part.to_str()?.strip_prefix("models--")?.to_owned());
        self.path.iter().find_map(folder).map(|name| name.replacen("--", "/", 1))
    }
}

impl Model {
    /// Opens the model with this name, or the bundled demo model. `listener` receives notes.
    pub fn open(name: Option<&str>, listener: &dyn Listener) -> Result<Model> {
        let (checkpoint, place) = match find(name)? {
            ModelSource::Bundled => {
                listener.note(
                    "no --model is given: the small bundled demo model answers, \
                    which knows little and is not Gemma",
                );
                (gemma_model::models::gemma3::bundled::target()?, None)
            }
            ModelSource::Directory(path) => (
                Checkpoint::open(&path)
                    .with_context(|| format!("cannot open the model {}", path.display()))?,
                Some(ModelPlace { path }),
            ),
        };
        let model = Model {
            name: checkpoint.name().to_owned(),
            weights: Weights::open(checkpoint)?,
            place,
        };
        for note in model.weights.notes() {
            listener.note(note);
        }
        if let Some(repaired) = model.checkpoint().metadata().and_then(repairs) {
            listener.detail(1, &repaired);
        }
        Ok(model)
    }

    pub fn config(&self) -> &Config {
        self.weights.config()
    }

    pub fn checkpoint(&self) -> &Checkpoint {
        self.weights.checkpoint().expect("an opened model has files")
    }

    /// Returns the model's tokenizer. Fails if it has none.
    pub fn tokenizer(&self, listener: &dyn Listener) -> Result<Tokenizer> {
        let start = Instant::now();
        let tokenizer = tokenizer_of(self.checkpoint())?;
        tokenizer.notes().iter().for_each(|note| listener.detail(1, note));
        listener.detail(
            2,
            &format!(
                "tokenizer: {} tokens, read in {:.2} s",
                thousands(tokenizer.vocab() as u64),
                start.elapsed().as_secs_f64()
            ),
        );
        Ok(tokenizer)
    }
}

/// Returns the tokenizer of a model. Fails if it has none.
pub fn tokenizer_of(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    own_tokenizer(checkpoint)?.ok_or_else(|| no_tokenizer(checkpoint).into())
}

/// Returns the tokenizer of a model; `None` if it has none.
pub fn own_tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let Some(file) = checkpoint.side_file("tokenizer.json")? else { return Ok(None) };
    let shown = checkpoint.display("tokenizer.json");
    gemma_model::checkpoint::check_bytes(&shown, &file)?;
    let named = tokens_with_roles(checkpoint)?;
    Tokenizer::with_roles(&file, &named).map(Some).with_context(|| format!("reading {shown}"))
}

/// Returns the tokens that begin, end or pad texts according to the configuration files.
fn tokens_with_roles(checkpoint: &Checkpoint) -> Result<Vec<Token>> {
    let mut named = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let Some(json) = checkpoint.side_json(file)? else { continue };
        for fields in [&json, &json["text_config"]] {
            for role in ["bos_token_id", "eos_token_id", "pad_token_id"] {
                let ids = &fields[role];
                let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
                let ids = ids.iter().filter_map(Value::as_u64);
                named.extend(ids.filter_map(|id| Token::try_from(id).ok()));
            }
        }
    }
    Ok(named)
}

/// Returns the error for a model without a tokenizer.
pub fn no_tokenizer(checkpoint: &Checkpoint) -> Fault {
    if checkpoint.metadata().is_some() {
        return Fault::model(format!("{} holds no tokenizer", checkpoint.name()))
            .help("use a complete GGUF file, or give token ids where a command takes them");
    }
    Fault::model(format!("{} is missing", checkpoint.display("tokenizer.json")))
        .help("copy tokenizer.json from the model's page into the directory")
}

/// Returns the name of a tensor's format, as in its file if possible, such as `q8_0`.
pub fn format_name(weights: &Weights, role: Role, layer: usize) -> Result<String> {
    let stored = weights.checkpoint().and_then(|c| c.lookup(&weights.name(role, layer)));
    Ok(match stored {
        Some(stored) => stored.file_type.unwrap_or_else(|| stored.kind.to_string()),
        None => weights.format(role, layer)?.to_string(),
    })
}

/// Stored bytes and parameter count of a model's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    pub parameters: u64,
}

impl Size {
    pub fn of(weights: &Weights) -> Result<Size> {
        let mut size = Size::default();
        for tensor in weights.matrices() {
            let format = weights.format(tensor.role, tensor.layer)?;
            size.bytes += format.bytes(tensor.rows, tensor.cols) as u64;
            size.parameters += tensor.size() as u64;
        }
        Ok(size)
    }

    pub fn bits_per_weight(self) -> f64 {
        if self.parameters == 0 { 0.0 } else { 8.0 * self.bytes as f64 / self.parameters as f64 }
    }
}
