//! Finds a model by name: a path, an id in the Hugging Face cache, a model of Ollama, or the
//! bundled one. Only `gemma pull` downloads.

use crate::runtime::model::acquire::{
    ResolvedName, TOKEN, expanded, how_to_get, is_id, no_such_path, pages, translate,
};
use crate::runtime::model::others;
use crate::runtime::model::shapes::Shape;
use crate::runtime::model::variants::{tagged, variants};
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::os::places;
use gemma_base::util::files::read_regular_text;
use gemma_base::util::shell::quoted;
use std::path::{Path, PathBuf};

/// Location of a model.
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
        // A path in an existing directory is a typing error rather than an id.
        let is_path = || name.split_once('/').is_some_and(|(first, _)| Path::new(first).is_dir());
        return match found {
            Err(_) if is_path() => Err(no_such_path(path).into()),
            found => found.map(ModelSource::Directory),
        };
    }
    let by_tag = name.split_once(':').filter(|(id, tag)| is_id(id) && !tag.is_empty());
    let found = by_tag.map(|(id, tag)| in_cache_by_tag(id, tag, &caches()));
    if let Some(Ok(path)) = found {
        return Ok(ModelSource::Directory(path));
    }
    if let Some(path) = others::ollama().and_then(|root| others::ollama_model(&root, name)) {
        return Ok(ModelSource::Directory(path));
    }
    if let Some(path) = of_google(name)? {
        return Ok(ModelSource::Directory(path));
    }
    Err(found.and_then(Result::err).unwrap_or_else(|| explain(name).into()))
}

/// Returns the model of a size, or of one of Google's pages without owner. Returns `None` for
/// another name, and for a page that was not downloaded. A size that is not on disk is an error.
fn of_google(name: &str) -> Result<Option<PathBuf>> {
    let (caches, pages, sized) = (caches(), pages(name), Shape::sized(name));
    let mut unusable = None;
    for page in &pages {
        match in_cache(page, &caches) {
            Ok(path) => return Ok(Some(path)),
            Err(error) if caches.iter().any(|cache| cache.join(folder_of(page)).is_dir()) => {
                unusable.get_or_insert(error);
            }
            Err(_) => {}
        }
    }
    let Some(shape) = sized else { return unusable.map_or(Ok(None), Err) };
    let in_ollama = || others::ollama_model(&others::ollama()?, &shape.in_ollama());
    match (in_ollama(), unusable) {
        (Some(path), _) => Ok(Some(path)),
        (None, Some(error)) => Err(error),
        (None, None) => {
            let fault = Fault::model(format!("{} is not on this machine", shape.title()));
            Err(fault.help(how_to_get(&pages[0])).into())
        }
    }
}

/// Returns the error for a name that is neither a path nor an id.
fn explain(name: &str) -> Fault {
    let home = places::home();
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
        (Err(_), None) => fault.help(format!("did you mean -m {id}? If so, {}", how_to_get(&id))),
        (_, Some(tag)) => match in_cache_by_tag(&id, &tag, &caches()) {
            Ok(_) => fault.help(format!("did you mean -m {id}:{tag}?")),
            Err(_) => fault.help(format!(
                "did you mean -m {id}:{tag}? If so, download it first:\n  gemma pull {id}:{tag}"
            )),
        },
    }
}

/// Returns the path in an environment variable, if it is not empty.
fn path_in(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Returns the directory of Hugging Face's tools: $HF_HOME, or ~/.cache/huggingface.
pub fn hugging_face_home() -> Option<PathBuf> {
    path_in("HF_HOME").or_else(|| {
        path_in("XDG_CACHE_HOME")
            .or_else(|| places::home().map(|home| home.join(".cache")))
            .map(|cache| cache.join("huggingface"))
    })
}

/// Returns the possible cache directories by precedence: $HF_HUB_CACHE, $HF_HOME/hub,
/// ~/.cache/huggingface/hub.
pub fn caches() -> Vec<PathBuf> {
    // Only the first one that is set is used, as in Hugging Face's own tools.
    path_in("HF_HUB_CACHE")
        .or_else(|| hugging_face_home().map(|home| home.join("hub")))
        .into_iter()
        .collect()
}

/// Returns the name of a repository's folder in the cache.
pub fn folder_of(id: &str) -> String {
    format!("models--{}", id.replace('/', "--"))
}

/// Returns the first file of the GGUF model with this tag, in the snapshot of `refs/main`.
fn in_cache_by_tag(id: &str, tag: &str, caches: &[PathBuf]) -> Result<PathBuf> {
    for cache in caches {
        let repo = cache.join(folder_of(id));
        let Ok(commit) = read_regular_text(&repo.join("refs/main"), 4096) else { continue };
        let snapshot = repo.join("snapshots").join(commit.trim());
        let names = names_below(&snapshot);
        let all = variants(names.iter().map(String::as_str));
        // Parts are linked only when all are complete, so the first part implies the others.
        match tagged(&all, tag)[..] {
            [] => {}
            [model] => return Ok(snapshot.join(model.names.first())),
            ref several => {
                let list: String =
                    several.iter().map(|v| format!("\n  -m {id}:{}", v.names.first())).collect();
                let what = format!("{id} has several files called {tag}");
                return Err(Fault::model(what).help(format!("name one of them:{list}")).into());
            }
        }
    }
    let what = format!("{id}:{tag} is not in the Hugging Face cache ({})", shown(caches));
    Err(Fault::model(what).help(format!("download it first:\n  gemma pull {id}:{tag}")).into())
}

/// Returns the names of the files in a directory and its subdirectories, without dangling links.
pub fn names_below(directory: &Path) -> Vec<String> {
    let inside = |name: String| {
        let path = directory.join(&name);
        match path.is_dir() {
            true => {
                others::names(&path).into_iter().map(|below| format!("{name}/{below}")).collect()
            }
            false => vec![name],
        }
    };
    let names = others::names(directory).into_iter().flat_map(inside);
    names.filter(|name| directory.join(name).is_file()).collect()
}

fn shown(caches: &[PathBuf]) -> String {
    caches.iter().map(|c| c.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns the snapshot that `refs/main` names.
pub fn in_cache(id: &str, caches: &[PathBuf]) -> Result<PathBuf> {
    let download = format!("gemma pull {id}");
    for cache in caches {
        let repo = cache.join(folder_of(id));
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
    let fault = Fault::model(format!(
        "the model {id} is not in the Hugging Face cache ({})",
        shown(caches)
    ));
    Err(fault.help(how_to_get(id)).into())
}

/// Returns whether a snapshot has the files that every model has.
fn holds_a_model(snapshot: &Path) -> bool {
    let mut names =
        std::fs::read_dir(snapshot).into_iter().flatten().flatten().map(|e| e.file_name());
    names.any(|name| {
        let name = name.to_string_lossy();
        name == "config.json" || name.ends_with(".gguf") || name.ends_with(".safetensors")
    })
}

/// Returns the error for a snapshot without weights, as left by a download without permission.
fn without_weights(id: &str, snapshot: &Path) -> Fault {
    let what = format!("the download of {id} holds no files of a model ({})", snapshot.display());
    Fault::model(what).help(format!(
        "the model may be gated: accept its licence at https://huggingface.co/{id}, then\n  \
            {TOKEN}\n  gemma pull {id}"
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
            gemma_base::error::fault_of(&r.unwrap_err()).unwrap().help.clone().unwrap()
        };
        assert!(help(in_cache("a/b", &caches)).contains("gemma pull a/b"));
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
