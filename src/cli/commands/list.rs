//! `gemma list`: the Gemma 3 and 4 models on this machine, described from their headers.

use crate::checkpoint::{Checkpoint, GgufNames};
use crate::cli::io::output::print;
use crate::cli::io::table::markdown;
use crate::cli::io::ui::{clean, page_columns, paragraph_in};
use crate::cli::options::RunArgs;
use crate::cli::options::UiOptions;
use crate::cli::settings::Typed;
use crate::cli::sizes::Sizes;
use crate::error::fault_of;
use crate::models::forward::assistant::fits as assistant_fits;
use crate::models::{Config, Weights, architecture};
use crate::runtime::load::{self, kv_format};
use crate::runtime::model::Size;
use crate::runtime::model::acquire::{TOKEN, is_gated};
use crate::runtime::model::find::{caches, in_cache};
use crate::runtime::model::installed::family;
use crate::runtime::model::others::{lm_studio, names, ollama, ollama_models};
use crate::runtime::model::shapes::Shape;
use crate::runtime::model::viewer::tower_of;
use crate::runtime::options::{AutoOr, RunOptions};
use crate::runtime::placement::host::Host;
use crate::runtime::placement::measure::Task;
use crate::runtime::placement::predict::Speeds;
use crate::util::units::bytes;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  gemma list
  gemma list ~/models
  gemma list --json | jq -r '.models[] | select(.fits).model'";

/// Show the Gemma 3 and 4 models on this machine: size, format, whether they fit and read images
///
/// Searches the Hugging Face cache, LM Studio's and Ollama's models and the working directory.
/// `--model` accepts each name in the list. Only headers are read. A model that cannot be used is
/// listed with the reason.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ListArgs {
    /// Directories to search, as well as downloads [default: the working directory]
    #[arg(value_name = "DIRECTORY")]
    pub directories: Vec<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// A model that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct FoundModel {
    /// Value for `--model`.
    model: String,
    path: PathBuf,
    #[serde(flatten)]
    about: Option<About>,
    /// Models in the list that it drafts for; empty unless it is an assistant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    drafts_for: Vec<String>,
    /// Reason why the model cannot be used, with a remedy; null if it can.
    error: Option<String>,
    #[serde(skip)]
    config: Option<Config>,
}

impl FoundModel {
    fn new(model: String, path: PathBuf) -> FoundModel {
        FoundModel { model, path, about: None, drafts_for: Vec::new(), error: None, config: None }
    }

    fn is_assistant(&self) -> bool {
        self.config.as_ref().is_some_and(|config| config.backbone.is_some())
    }
}

/// Sets the models that each assistant drafts for.
fn pair(found: &mut [FoundModel]) {
    let targets: Vec<(String, Config)> = found
        .iter()
        .filter(|f| !f.is_assistant())
        .filter_map(|f| Some((f.model.clone(), f.config.clone()?)))
        .collect();
    for assistant in found.iter_mut().filter(|f| f.is_assistant()) {
        let own = assistant.config.as_ref().expect("an assistant was read");
        let served = targets.iter().filter(|(_, target)| assistant_fits(own, target).is_ok());
        assistant.drafts_for = served.map(|(model, _)| model.clone()).collect();
    }
}

/// Facts about a model from its headers.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct About {
    format: &'static str,
    bits_per_weight: f64,
    /// Bytes of all files of weights.
    bytes: u64,
    fits: bool,
    /// Whether there is a tower that reads images.
    images: bool,
}

/// Context size, in tokens, that has to fit for a model to fit.
const CONTEXT: usize = 4096;

pub fn run(options: &ListArgs, _: &Typed) -> Result<u8> {
    let caches = caches();
    let here = vec![PathBuf::from(".")];
    let directories = if options.directories.is_empty() { &here } else { &options.directories };
    let run = options.run.settled()?;
    let host = Host::here(&run);
    let mut found = Vec::new();
    for (model, path) in in_caches(&caches) {
        match path {
            Ok(path) => found.extend(files(&path).into_iter().filter_map(|file| {
                // If the repository has one model, its id names the model.
                let model = if file == path { model.clone() } else { file.display().to_string() };
                look(model, file, &host, &run, is_gemma(&path.display().to_string()))
            })),
            Err(error) => {
                let path = caches.first().cloned().unwrap_or_default();
                found.push(FoundModel { error: Some(error), ..FoundModel::new(model, path) });
            }
        }
    }
    let (lm_studio, ollama) = (lm_studio(), ollama());
    for (model, path) in ollama.iter().flat_map(|root| ollama_models(root)) {
        let wanted = is_gemma(&model);
        found.extend(look(model, path, &host, &run, wanted));
    }
    let owners = lm_studio.iter().flat_map(|root| subdirectories(root));
    for path in owners.flat_map(|owner| subdirectories(&owner)) {
        let wanted = is_gemma(&path.display().to_string());
        for file in files(&path) {
            found.extend(look(file.display().to_string(), file, &host, &run, wanted));
        }
    }
    for path in directories.iter().flat_map(|directory| candidates(directory)) {
        for file in files(&path) {
            // A file config.json alone is not a model.
            let wanted = is_gemma(&file.display().to_string()) || holds_weights(&file);
            found.extend(look(file.display().to_string(), file, &host, &run, wanted));
        }
    }
    pair(&mut found);
    let places: Vec<&PathBuf> =
        caches.iter().chain(&lm_studio).chain(&ollama).chain(directories).collect();
    if options.json {
        let json = serde_json::json!({
            "v": 1, "looked_in": places, "context": context(&run), "models": found,
        });
        print(&format!("{json:#}\n"))?;
    } else {
        let sizes = || Sizes::of(&host, &run, Speeds::new(&*load::pool(&run)?, None));
        let sizes = found.is_empty().then(sizes).transpose()?;
        print(&text(&found, &places, sizes.as_ref(), page_columns()))?;
    }
    Ok(0)
}

fn context(run: &RunOptions) -> usize {
    match run.context {
        AutoOr::N(n) => n,
        AutoOr::Auto => CONTEXT,
    }
}

/// Returns the repositories in the caches: the id and the path of the files, or the error if the
/// name is one of Gemma's.
fn in_caches(caches: &[PathBuf]) -> Vec<(String, Result<PathBuf, String>)> {
    let names = caches.iter().flat_map(|cache| names(cache));
    let ids = names.filter_map(|name| Some(name.strip_prefix("models--")?.replacen("--", "/", 1)));
    ids.filter_map(|id| match in_cache(&id, caches) {
        Ok(path) => Some((id, Ok(path))),
        Err(e) => is_gemma(&id).then(|| (id, Err(reason(&e)))),
    })
    .collect()
}

/// Returns the directories that may contain models: a directory and its subdirectories.
fn candidates(directory: &Path) -> Vec<PathBuf> {
    let inside = names(directory).into_iter().filter(|name| !name.starts_with('.')).map(|name| {
        match directory {
            here if here == Path::new(".") => PathBuf::from(name),
            _ => directory.join(name),
        }
    });
    let inside = inside.filter(|path| path.is_dir());
    std::iter::once(directory.to_owned()).chain(inside).collect()
}

/// Returns the subdirectories of a directory.
fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let inside = names(directory).into_iter().map(|name| directory.join(name));
    inside.filter(|path| path.is_dir()).collect()
}

/// Returns the models in a directory: the directory itself if it has a checkpoint or one GGUF
/// model, otherwise each GGUF file.
fn files(directory: &Path) -> Vec<PathBuf> {
    let names = names(directory);
    if names.iter().any(|n| n == "config.json" || n.ends_with(".safetensors")) {
        return vec![directory.to_owned()];
    }
    let models: Vec<&String> = names.iter().filter(|n| GgufNames::of_first(n).is_some()).collect();
    let is_snapshot = directory.parent().is_some_and(|p| p.ends_with("snapshots"));
    match models[..] {
        [_] | [] if is_snapshot => vec![directory.to_owned()],
        _ => models
            .into_iter()
            .map(|n| if directory == Path::new(".") { n.into() } else { directory.join(n) })
            .collect(),
    }
}

fn holds_weights(path: &Path) -> bool {
    path.is_file() || names(path).iter().any(|n| n.ends_with(".safetensors"))
}

/// Returns whether a name is one of Gemma 3 or 4.
fn is_gemma(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let begins = ["gemma-3-", "gemma3", "gemma_3", "gemma-4-", "gemma4", "gemma_4"];
    begins.iter().any(|begin| name.contains(begin))
}

/// Opens a model. Returns `None` for another family. A file that cannot be opened is listed only if
/// it is `wanted`.
fn look(
    model: String,
    path: PathBuf,
    host: &Host<'_>,
    run: &RunOptions,
    wanted: bool,
) -> Option<FoundModel> {
    if family(&path).is_some_and(|family| !architecture::is_known(&family)) {
        return None;
    }
    let about = Checkpoint::open(&path).and_then(|checkpoint| {
        let is_gguf = checkpoint.metadata().is_some();
        let bytes = checkpoint.file_bytes();
        let is_ours = checkpoint.config().get("quantization_config").is_some();
        let weights = Weights::open(checkpoint)?;
        let size = Size::of(&weights)?;
        let is_assistant = weights.config().backbone.is_some();
        let task = Task {
            weights: &weights,
            context: context(run),
            kv: kv_format(&weights, run.kv)?,
            sequences: 1,
            prefixes: 0,
            npu: false,
        };
        let about = About {
            format: if is_gguf {
                "GGUF"
            } else if is_ours {
                "quantised"
            } else {
                "checkpoint"
            },
            bits_per_weight: size.bits_per_weight(),
            bytes,
            fits: !is_assistant && host.fitting(&task).is_some(),
            images: tower_of(&path).is_ok_and(|tower| tower.width() == weights.config().dim),
        };
        Ok((about, weights.config().clone()))
    });
    let found = FoundModel::new(model, path);
    match about {
        Ok((about, config)) => {
            Some(FoundModel { about: Some(about), config: Some(config), ..found })
        }
        Err(_) if !wanted => None,
        Err(e) => Some(FoundModel { error: Some(reason(&e)), ..found }),
    }
}

/// Formats an error on one line, with its remedy.
fn reason(error: &anyhow::Error) -> String {
    let help = fault_of(error).and_then(|fault| fault.help.as_deref());
    help.map_or_else(|| format!("{error:#}"), |help| format!("{error:#}: {help}"))
}

fn text(
    found: &[FoundModel],
    places: &[&PathBuf],
    sizes: Option<&Sizes>,
    columns: usize,
) -> String {
    let say = |text: &str| paragraph_in("", 0, &clean(text), columns);
    if found.is_empty() {
        let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        let shape = sizes.and_then(Sizes::best).map_or(Shape::B1, |row| row.shape);
        let (name, page) = (shape.name(), shape.page(shape.smallest()).unwrap_or_default());
        let larger = sizes.and_then(Sizes::larger).map_or(String::new(), |text| say(&text) + "\n");
        let doubt = sizes.and_then(Sizes::doubt).map_or(String::new(), |text| say(text) + "\n");
        return say(&format!(
            "There is no Gemma here (looked in {}). To get one that fits:",
            places.join(", ")
        )) + &format!(
            "{}\n  gemma pull {name}\n  gemma chat -m {name}\n\n{larger}{doubt}",
            match is_gated(&page) {
                true => format!(
                    "\n  {TOKEN}\n  # and accept the licence once, at https://huggingface.co/{page}"
                ),
                false => String::new(),
            },
        ) + &say("gemma plan lists the other sizes that fit here, and their speeds.");
    }
    let mut table =
        vec![["model", "format", "bits", "size", "fits", "images"].map(str::to_owned).to_vec()];
    for (one, about) in found.iter().filter_map(|f| Some((f, f.about.as_ref()?))) {
        let bits = format!("{:.1}", about.bits_per_weight);
        let fits = match one.is_assistant() {
            true => "drafts",
            false if about.fits => "yes",
            false => "no",
        };
        let images = if about.images { "yes" } else { "no" };
        table.push(
            [&*clean(&one.model), about.format, &bits, &bytes(about.bytes), fits, images]
                .map(str::to_owned)
                .to_vec(),
        );
    }
    let mut out = if table.len() > 1 { markdown(&table) } else { String::new() };
    for assistant in found.iter().filter(|f| f.is_assistant()) {
        let served = match &assistant.drafts_for[..] {
            [] => "no model here".to_owned(),
            models => models.join(" and "),
        };
        out += &format!("\n{}", say(&format!("{} drafts for {served}.", assistant.model)));
    }
    for (i, (model, error)) in
        found.iter().filter_map(|f| Some((&f.model, f.error.as_ref()?))).enumerate()
    {
        if i == 0 {
            out += &format!("{}Cannot be used:\n", if out.is_empty() { "" } else { "\n" });
        }
        out += &paragraph_in("  ", 4, &clean(&format!("{model}: {error}")), columns);
    }
    if table.len() > 1 {
        out += &format!(
            "\n{}",
            say("To talk to a model: gemma chat -m MODEL. Details of one: gemma plan MODEL.")
        );
    }
    out
}
