//! The models that a server can serve: their names, and facts from their headers.

use crate::checkpoint::GgufNames;
use crate::cli::api::ids;
use crate::cli::options::{Origin, SamplingOptions};
use crate::error::Fault;
use crate::models::Generation;
use crate::runtime::load::context;
use crate::runtime::model::others::names;
use crate::runtime::model::viewer::tower_of;
use crate::runtime::options::RunOptions;
use crate::runtime::{Listener, Model, Silence, Size};
use crate::sampler::SamplerConfig;
use crate::util::hex;
use anyhow::{Context, Result};
use std::path::Path;

/// llama.cpp's names of mixed formats, by `general.file_type`.
const MIXES: [(i64, &str); 36] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (33, "Q4_0_4_4"),
    (34, "Q4_0_4_8"),
    (35, "Q4_0_8_8"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4"),
];

/// A model that can be loaded.
pub struct CatalogEntry {
    /// Name of the model; `None` until it is loaded.
    pub name: Option<String>,
    /// Value of `--model`; `None` for the bundled model.
    pub source: Option<String>,
    /// Facts from the headers, if they were read.
    pub facts: Option<ModelFacts>,
}

/// Facts about a model, for lists of models.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Seconds since 1970, for lists of models.
    pub created: u64,
    /// Hash of samples of the files.
    pub digest: String,
    pub size: Size,
    /// Architecture in Ollama's spelling, such as `gemma3`.
    pub family: String,
    /// Name of the mix of formats, such as `Q4_K_M`.
    pub quantization: String,
    /// Context size in positions.
    pub context: usize,
    /// Ollama's words for the abilities of the model.
    pub capabilities: Vec<&'static str>,
    /// Settings that the model's authors recommend.
    pub sampling: SamplerConfig,
}

impl ModelFacts {
    /// Reads the facts from the headers of a model that is served with a context of `positions`.
    pub fn of(model: &Model, positions: usize, thinks: bool, sees: bool) -> Result<ModelFacts> {
        let config = model.config();
        let mut capabilities = vec!["completion", "tools"];
        capabilities.extend(thinks.then_some("thinking"));
        capabilities.extend(sees.then_some("vision"));
        let nothing = SamplingOptions::of_the_model();
        let generation = Generation::of(model.checkpoint())?;
        let (mut sampling, _) = nothing.resolve(|_| Origin::BuiltIn, &generation);
        sampling.seed = 0;
        Ok(ModelFacts {
            created: ids::now(),
            digest: hex(model.checkpoint().fingerprint()?),
            size: Size::of(&model.weights)?,
            family: config.architecture.name().to_lowercase().replace(' ', ""),
            quantization: mix(model)?,
            context: positions,
            capabilities,
            sampling,
        })
    }
}

/// Returns the name of a model's mix of formats: that of its GGUF file, or else the format with the
/// most bytes.
fn mix(model: &Model) -> Result<String> {
    let number = model.checkpoint().metadata().and_then(|data| data.int("general.file_type"));
    let known = MIXES.iter().find(|(known, _)| Some(*known) == number);
    if let Some((_, name)) = known {
        return Ok((*name).to_owned());
    }
    let mut bytes: Vec<(String, usize)> = Vec::new();
    for tensor in model.weights.matrices() {
        let format = model.weights.format(tensor.role, tensor.layer)?;
        let (name, size) = (format.to_string(), format.bytes(tensor.rows, tensor.cols));
        match bytes.iter_mut().find(|(known, _)| *known == name) {
            Some((_, all)) => *all += size,
            None => bytes.push((name, size)),
        }
    }
    let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
    Ok(most.map_or_else(String::new, |(name, _)| match name.contains('-') {
        // A format of this program, such as `i4-g32`.
        true => name,
        false => name.to_uppercase(),
    }))
}

/// Opens the headers of the models that `--model` names and of those in the directory.
pub fn read(
    given: &[String],
    directory: Option<&Path>,
    run: &RunOptions,
    positions: usize,
    listener: &dyn Listener,
) -> Result<Vec<CatalogEntry>> {
    let mut list = Vec::new();
    for source in given {
        list.push(open(source, run, positions, listener).with_context(|| format!("-m {source}"))?);
    }
    if let Some(directory) = directory {
        let before = list.len();
        for path in models_in(directory)? {
            let entry = open(&path, run, positions, &Silence);
            match entry {
                Ok(entry) => list.push(entry),
                Err(error) => listener.note(&format!("{path} is left out: {error:#}")),
            }
        }
        if list.len() == before {
            let what = format!("there is no model in {}", directory.display());
            let fault = Fault::model(what);
            return Err(fault.help("a model is a directory or a GGUF file in it").into());
        }
    }
    let names: Vec<Option<String>> = list.iter().map(|entry| entry.name.clone()).collect();
    for (at, entry) in list.iter_mut().enumerate() {
        if names.iter().enumerate().any(|(other, name)| other != at && *name == entry.name) {
            // Models with equal names get the names that were given on the command line.
            entry.name.clone_from(&entry.source);
        }
    }
    for (at, entry) in list.iter().enumerate() {
        if list[..at].iter().any(|other| other.name == entry.name) {
            let name = entry.name.as_deref().unwrap_or_default();
            return Err(Fault::usage(format!("the model {name} is given twice")).into());
        }
    }
    Ok(list)
}

fn open(
    source: &str,
    run: &RunOptions,
    positions: usize,
    listener: &dyn Listener,
) -> Result<CatalogEntry> {
    let model = Model::open(Some(source), listener)?;
    let config = model.config();
    if config.backbone.is_some() {
        let what = format!("{source} is an assistant, which only drafts for another model");
        return Err(Fault::model(what).help("name the model that it drafts for").into());
    }
    let thinks = config.architecture.gguf() == "gemma4";
    let sees = model.place.as_ref().and_then(|place| tower_of(&place.path).ok());
    let sees = sees.is_some_and(|tower| tower.width() == config.dim);
    let positions = context(run.context, positions, config, &Silence);
    let facts = Some(ModelFacts::of(&model, positions, thinks, sees)?);
    Ok(CatalogEntry { name: Some(model.name), source: Some(source.to_owned()), facts })
}

/// Returns the paths in a directory that may be models: subdirectories with a checkpoint, and GGUF
/// files in it or in a subdirectory.
fn models_in(directory: &Path) -> Result<Vec<String>> {
    if !directory.is_dir() {
        let what = format!("--models-dir: {} is not a directory", directory.display());
        return Err(Fault::model(what).help("name a directory that holds models").into());
    }
    let ggufs = |directory: &Path| {
        let files = names(directory).into_iter();
        let firsts = files.filter(|name| GgufNames::of_first(name).is_some());
        firsts.map(|name| directory.join(name)).collect::<Vec<_>>()
    };
    let mut paths = ggufs(directory);
    let inside = names(directory).into_iter().filter(|name| !name.starts_with('.'));
    for path in inside.map(|name| directory.join(name)).filter(|path| path.is_dir()) {
        match path.join("config.json").is_file() {
            true => paths.push(path),
            false => paths.extend(ggufs(&path)),
        }
    }
    Ok(paths.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect())
}
