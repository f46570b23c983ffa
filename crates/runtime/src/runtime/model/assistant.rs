//! Selects the assistant that drafts for a model: the named one, or one that is stored next to the
//! model.

use crate::runtime::Listener;
use crate::runtime::model::Model;
use crate::runtime::model::find::{ModelSource, caches, find, in_cache};
use crate::runtime::model::others::names;
use crate::runtime::options::DraftFrom;
use anyhow::{Context, Result};
use gemma_model::checkpoint::Checkpoint;
use gemma_model::models::forward::assistant::fits;
use gemma_model::models::{Config, Weights, gguf};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// Most files next to a model that are opened.
const MOST: usize = 8;

/// Returns the assistant that a draft source selects for a model, or `None`. A named assistant must
/// fit.
pub fn assistant(
    model: &Model,
    source: &DraftFrom,
    listener: &dyn Listener,
) -> Result<Option<Weights>> {
    match source {
        DraftFrom::Off | DraftFrom::Ngram | DraftFrom::Bundled => Ok(None),
        DraftFrom::Model(name) => {
            let shown = || format!("cannot draft with {name}");
            let ModelSource::Directory(path) = find(Some(name)).with_context(shown)? else {
                return Ok(None);
            };
            let Some(weights) = open(&path).with_context(shown)? else { return Ok(None) };
            fits(weights.config(), model.config()).with_context(shown)?;
            Ok(Some(weights))
        }
        DraftFrom::Auto => {
            let place = model.place.as_ref();
            for path in
                place.map_or_else(Vec::new, |place| neighbours(&place.path, place.id().as_deref()))
            {
                match open(&path) {
                    Ok(Some(weights)) if fits(weights.config(), model.config()).is_ok() => {
                        let name = weights.checkpoint().map_or("", Checkpoint::name);
                        listener.detail(1, &format!("{name} next to the model drafts for it"));
                        return Ok(Some(weights));
                    }
                    Ok(_) => {}
                    Err(why) => {
                        listener.detail(1, &format!("{} is not used: {why:#}", path.display()))
                    }
                }
            }
            Ok(None)
        }
    }
}

/// Opens a path if it holds an assistant.
fn open(path: &Path) -> Result<Option<Weights>> {
    let checkpoint = gguf::present(Checkpoint::open(path)?)?;
    let is_assistant = Config::from_json(checkpoint.config())?.backbone.is_some();
    is_assistant.then(|| Weights::open(checkpoint)).transpose()
}

/// Returns paths that may hold the assistant of a model at `path`, most likely first.
///
/// The name is the model's followed by `-assistant`; GGUF files may instead start with `mtp-`.
fn neighbours(path: &Path, id: Option<&str>) -> Vec<PathBuf> {
    let ids = id.map(assistant_ids).unwrap_or_default();
    let in_cache = ids.iter().filter_map(|id| in_cache(id, &caches()).ok());
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let (Some(directory), Some(own)) = (path.parent(), path.file_name()) else {
        return in_cache.into_iter().collect();
    };
    let own = own.to_string_lossy().to_lowercase();
    let likeness = |name: &str| {
        let name = name.to_lowercase();
        let name = name.strip_prefix("mtp-").unwrap_or(&name);
        name.chars().zip(own.chars()).take_while(|(a, b)| a == b).count()
    };
    let mut found: Vec<String> = names(directory)
        .into_iter()
        .filter(|name| {
            let name = name.to_lowercase();
            name != own && (name.contains("assistant") || name.starts_with("mtp-"))
        })
        .collect();
    found.sort_by_key(|name| Reverse(likeness(name)));
    found.truncate(MOST);
    in_cache.into_iter().chain(found.into_iter().map(|name| directory.join(name))).collect()
}

/// Returns the Hugging Face ids of a model's assistants, most likely first. The 4-bit files of a
/// model share the assistant of the weights that they were made of, or that of the model.
fn assistant_ids(id: &str) -> Vec<String> {
    let mut ids = vec![format!("{id}-assistant")];
    if let Some((model, _)) = id.split_once("-qat-q4_0") {
        let made_of = ["-qat-q4_0-unquantized-assistant", "-assistant"];
        ids.extend(made_of.map(|end| format!("{model}{end}")));
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_four_bits_share_the_assistant_of_their_model() {
        assert_eq!(assistant_ids("google/gemma-4-31B-it"), ["google/gemma-4-31B-it-assistant"]);
        let ids = assistant_ids("google/gemma-4-31B-it-qat-q4_0-gguf");
        let others = ["-qat-q4_0-unquantized-assistant", "-assistant"];
        assert_eq!(ids[1..], others.map(|end| format!("google/gemma-4-31B-it{end}")));
    }

    #[test]
    fn neighbours_come_in_the_order_of_their_likeness() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["gemma-4-12b-it-assistant", "gemma-4-31b-it", "gemma-4-31b-it-assistant"] {
            std::fs::create_dir(root.join(name)).unwrap();
        }
        let found = neighbours(&root.join("gemma-4-31b-it"), None);
        let names = ["gemma-4-31b-it-assistant", "gemma-4-12b-it-assistant"];
        assert_eq!(found, names.map(|name| root.join(name)));
        for name in ["gemma-4-31B-it-Q4_0.gguf", "mtp-gemma-4-31B-it.gguf", "mmproj.gguf"] {
            std::fs::write(root.join(name), "").unwrap();
        }
        let found = neighbours(&root.join("gemma-4-31B-it-Q4_0.gguf"), None);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found.contains(&root.join("mtp-gemma-4-31B-it.gguf")));
        assert!(neighbours(Path::new("/"), None).is_empty());
    }
}
