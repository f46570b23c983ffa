//! Lookup of a model by name: a path, an id in the Hugging Face cache, or the bundled one. Nothing
//! is ever downloaded.

use crate::error::Fault;
use crate::runtime::model::acquire::{
    ResolvedName, expanded, how_to_get, is_id, no_such_path, translate,
};
use crate::util::files::read_regular_text;
use crate::util::shell::quoted;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Where a model lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    Bundled,
    Directory(PathBuf),
}

/// Finds the model that `--model` names.
pub fn find(name: Option<&str>) -> Result<ModelSource> {
    let Some(name) = name else { return Ok(ModelSource::Bundled) };
    let path = Path::new(name);
    if path.exists() {
        return Ok(ModelSource::Directory(path.to_owned()));
    }
    if is_id(name) {
        let found = in_cache(name, &caches());
        // A path into a directory that exists is mistyped, and not an id that was never downloaded.
        let is_path = || name.split_once('/').is_some_and(|(first, _)| Path::new(first).is_dir());
        return match found {
            Err(_) if is_path() => Err(no_such_path(path).into()),
            found => found.map(ModelSource::Directory),
        };
    }
    Err(explain(name).into())
}

/// Returns the error for a name that is neither a path nor an id.
fn explain(name: &str) -> Fault {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    if let Some(path) = expanded(name, home.as_deref()) {
        let meant = quoted(&path.display().to_string());
        let what = format!(
            "there is no model at {name}: \
                a shell replaces ~ by the home directory only outside quotes"
        );
        return Fault::model(what).help(format!("did you mean -m {meant}?"));
    }
    let Some(ResolvedName { id, tag }) = translate(name) else {
        return no_such_path(Path::new(name));
    };
    let fault = Fault::model(format!("there is no model at {name}"));
    match (in_cache(&id, &caches()), tag) {
        (Ok(_), None) => fault.help(format!("did you mean -m {id}?")),
        (Ok(snapshot), Some(tag)) => {
            let files =
                std::fs::read_dir(&snapshot).into_iter().flatten().flatten().map(|e| e.path());
            let tag = tag.to_ascii_lowercase();
            let of_tag = |p: &PathBuf| {
                p.file_name()
                    .is_some_and(|n| n.to_string_lossy().to_ascii_lowercase().contains(&tag))
            };
            let file =
                files.into_iter().find(|p| of_tag(p) && p.extension().is_some_and(|e| e == "gguf"));
            let meant = file.map_or(id, |file| quoted(&file.display().to_string()));
            fault.help(format!("did you mean -m {meant}?"))
        }
        (Err(_), None) => fault.help(format!("did you mean -m {id}? If so, {}", how_to_get(&id))),
        (Err(_), Some(tag)) => fault.help(format!(
            "did you mean -m {id}? If so, download the file of that quantisation first:\n  \
             pip install -U huggingface_hub\n  hf download {id} --include '*{tag}*'"
        )),
    }
}

/// Returns the directories that may be the cache, by precedence: $HF_HUB_CACHE, $HF_HOME/hub,
/// ~/.cache/huggingface/hub.
pub fn caches() -> Vec<PathBuf> {
    let dir = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || {
        dir("XDG_CACHE_HOME")
            .or_else(|| dir("HOME").map(|h| h.join(".cache")))
            .map(|c| c.join("huggingface/hub"))
    };
    // The first that is set counts alone, as for Hugging Face's own tools.
    dir("HF_HUB_CACHE")
        .or_else(|| dir("HF_HOME").map(|h| h.join("hub")))
        .or_else(home)
        .into_iter()
        .collect()
}

/// Returns the snapshot that `refs/main` names.
pub fn in_cache(id: &str, caches: &[PathBuf]) -> Result<PathBuf> {
    let download = format!("hf download {id}");
    for cache in caches {
        let repo = cache.join(format!("models--{}", id.replace('/', "--")));
        if !repo.is_dir() {
            continue;
        }
        let unfinished = std::fs::read_dir(repo.join("blobs")).is_ok_and(|mut blobs| {
            blobs.any(|b| b.is_ok_and(|b| b.path().extension().is_some_and(|e| e == "incomplete")))
        });
        if unfinished {
            let fault =
                Fault::model(format!("the download of {id} is not complete ({})", repo.display()));
            return Err(fault.help(format!("finish it: {download}")).into());
        }
        let commit = read_regular_text(&repo.join("refs/main"), 4096).with_context(|| {
            Fault::model(format!(
                "{} has no current version: refs/main cannot be read",
                repo.display()
            ))
            .help(format!("fetch it again: {download}"))
        })?;
        let snapshot = repo.join("snapshots").join(commit.trim());
        if snapshot.is_dir() {
            return if holds_a_model(&snapshot) {
                Ok(snapshot)
            } else {
                Err(without_weights(id, &snapshot).into())
            };
        }
    }
    let places: Vec<_> = caches.iter().map(|c| c.display().to_string()).collect();
    let fault = Fault::model(format!(
        "the model {id} is not in the Hugging Face cache ({})",
        places.join(", ")
    ));
    Err(fault.help(how_to_get(id)).into())
}

/// Returns whether a snapshot has what every model has.
fn holds_a_model(snapshot: &Path) -> bool {
    let mut names =
        std::fs::read_dir(snapshot).into_iter().flatten().flatten().map(|e| e.file_name());
    names.any(|name| {
        let name = name.to_string_lossy();
        name == "config.json" || name.ends_with(".gguf") || name.ends_with(".safetensors")
    })
}

/// Returns the error for a snapshot without weights, which a download without permission leaves.
fn without_weights(id: &str, snapshot: &Path) -> Fault {
    let what = format!("the download of {id} holds no files of a model ({})", snapshot.display());
    Fault::model(what).help(format!(
        "the model may be gated: accept its licence at https://huggingface.co/{id}, then\n  \
            hf auth login\n  hf download {id}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_read_and_unfinished_downloads_are_refused() {
        let cache = tempfile::tempdir().unwrap();
        let caches = [cache.path().to_owned()];
        let help = |r: Result<PathBuf>| {
            crate::error::fault_of(&r.unwrap_err()).unwrap().help.clone().unwrap()
        };
        assert!(help(in_cache("a/b", &caches)).contains("hf download a/b"));
        let repo = cache.path().join("models--a--b");
        for dir in ["blobs", "refs", "snapshots/c0ffee"] {
            std::fs::create_dir_all(repo.join(dir)).unwrap();
        }
        assert!(help(in_cache("a/b", &caches)).contains("fetch it again"));
        std::fs::write(repo.join("refs/main"), "c0ffee\n").unwrap();
        assert!(help(in_cache("a/b", &caches)).contains("gated"));
        std::fs::write(repo.join("snapshots/c0ffee/config.json"), "{}").unwrap();
        assert_eq!(in_cache("a/b", &caches).unwrap(), repo.join("snapshots/c0ffee"));
        std::fs::write(repo.join("blobs/1234.incomplete"), "").unwrap();
        assert!(help(in_cache("a/b", &caches)).contains("finish"));
    }
}
