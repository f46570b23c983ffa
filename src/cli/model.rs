//! Which model is meant: a path, an id in the Hugging Face cache, or the bundled one. Nothing is ever downloaded.

use crate::error::Fault;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Where a model lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Bundled,
    Directory(PathBuf),
}

/// What `--model` names.
pub fn find(name: Option<&str>) -> Result<Source> {
    let Some(name) = name else { return Ok(Source::Bundled) };
    let path = Path::new(name);
    if path.exists() {
        return Ok(Source::Directory(path.to_owned()));
    }
    if !is_id(name) {
        let fault = Fault::model(format!("there is no model at {name}"));
        return Err(fault
            .help("give a model directory, a GGUF file, or an id such as google/gemma-3-1b-it from the Hugging Face cache")
            .into());
    }
    in_cache(name, &caches()).map(Source::Directory)
}

/// `owner/name`, and no path that someone mistyped.
fn is_id(name: &str) -> bool {
    let part = |p: &str| {
        !p.is_empty() && !p.starts_with('.') && p.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    matches!(name.split_once('/'), Some((owner, model)) if part(owner) && part(model))
}

/// Directories that may be the cache, by precedence: $HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub.
fn caches() -> Vec<PathBuf> {
    let dir = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || dir("XDG_CACHE_HOME").or_else(|| dir("HOME").map(|h| h.join(".cache"))).map(|c| c.join("huggingface/hub"));
    // The first that is set counts alone, as for Hugging Face's own tools.
    dir("HF_HUB_CACHE").or_else(|| dir("HF_HOME").map(|h| h.join("hub"))).or_else(home).into_iter().collect()
}

/// The snapshot that `refs/main` names.
fn in_cache(id: &str, caches: &[PathBuf]) -> Result<PathBuf> {
    let download = format!("hf download {id}");
    for cache in caches {
        let repo = cache.join(format!("models--{}", id.replace('/', "--")));
        if !repo.is_dir() {
            continue;
        }
        let unfinished = std::fs::read_dir(repo.join("blobs"))
            .is_ok_and(|mut blobs| blobs.any(|b| b.is_ok_and(|b| b.path().extension().is_some_and(|e| e == "incomplete"))));
        if unfinished {
            let fault = Fault::model(format!("the download of {id} is not complete ({})", repo.display()));
            return Err(fault.help(format!("finish it: {download}")).into());
        }
        let commit = std::fs::read_to_string(repo.join("refs/main"))
            .with_context(|| Fault::model(format!("{} names no current version", repo.display())).help(download.clone()))?;
        let snapshot = repo.join("snapshots").join(commit.trim());
        if snapshot.is_dir() {
            return Ok(snapshot);
        }
    }
    let places: Vec<_> = caches.iter().map(|c| c.display().to_string()).collect();
    let fault = Fault::model(format!("the model {id} is not in the Hugging Face cache ({})", places.join(", ")));
    Err(fault.help(format!("fetch it first: {download}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        assert!(is_id("google/gemma-3-27b-it"));
        for path in ["./x/y", "/x/y", "x", "a/b/c", "a/", "../b", "a b/c"] {
            assert!(!is_id(path), "{path}");
        }
    }

    #[test]
    fn the_cache_is_read_and_unfinished_downloads_are_refused() {
        let cache = tempfile::tempdir().unwrap();
        let caches = [cache.path().to_owned()];
        let help = |r: Result<PathBuf>| crate::error::fault_of(&r.unwrap_err()).unwrap().help.clone().unwrap();
        assert!(help(in_cache("a/b", &caches)).contains("hf download a/b"));
        let repo = cache.path().join("models--a--b");
        for dir in ["blobs", "refs", "snapshots/c0ffee"] {
            std::fs::create_dir_all(repo.join(dir)).unwrap();
        }
        std::fs::write(repo.join("refs/main"), "c0ffee\n").unwrap();
        assert_eq!(in_cache("a/b", &caches).unwrap(), repo.join("snapshots/c0ffee"));
        std::fs::write(repo.join("blobs/1234.incomplete"), "").unwrap();
        assert!(help(in_cache("a/b", &caches)).contains("finish"));
    }
}
