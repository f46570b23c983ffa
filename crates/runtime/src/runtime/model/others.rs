//! Models that other programs have downloaded: LM Studio's files and Ollama's blobs.

use gemma_base::os::places::home;
use gemma_base::util::files::read_regular;
use gemma_base::util::json;
use std::path::{Path, PathBuf};

/// Most bytes of a manifest; Ollama's have about 1 kB.
const LARGEST: u64 = 1 << 20;

/// The registry and the owner that Ollama omits from names.
const REGISTRY: &str = "registry.ollama.ai";
const LIBRARY: &str = "library";

/// Returns LM Studio's existing directories. Models are in `OWNER/NAME/` inside.
pub fn lm_studio() -> Vec<PathBuf> {
    let places = [".lmstudio/models", ".cache/lm-studio/models"];
    let at = |home: PathBuf| places.map(|place| home.join(place)).into_iter();
    home().into_iter().flat_map(at).filter(|path| path.is_dir()).collect()
}

/// Returns Ollama's directory, if it exists: $OLLAMA_MODELS, or ~/.ollama/models.
pub fn ollama() -> Option<PathBuf> {
    let set = std::env::var_os("OLLAMA_MODELS").filter(|path| !path.is_empty());
    let path = set.map(PathBuf::from).or_else(|| home().map(|h| h.join(".ollama/models")));
    path.filter(|path| path.join("manifests").is_dir())
}

/// Returns the models in Ollama's directory: their names and GGUF files.
pub fn ollama_models(root: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for registry in names(&root.join("manifests")) {
        for owner in names(&root.join("manifests").join(&registry)) {
            let directory = root.join("manifests").join(&registry).join(&owner);
            for model in names(&directory) {
                for tag in names(&directory.join(&model)) {
                    let name = match (&*registry, &*owner) {
                        (REGISTRY, LIBRARY) => format!("{model}:{tag}"),
                        (REGISTRY, _) => format!("{owner}/{model}:{tag}"),
                        _ => format!("{registry}/{owner}/{model}:{tag}"),
                    };
                    let blob = ollama_blob(root, &directory.join(&model).join(&tag));
                    found.extend(blob.map(|blob| (name, blob)));
                }
            }
        }
    }
    found
}

/// Returns the GGUF file of the model with this Ollama name, such as `gemma3:4b`.
pub fn ollama_model(root: &Path, name: &str) -> Option<PathBuf> {
    let (name, tag) = match name.rsplit_once(':') {
        Some((name, tag)) => (name, tag),
        None => (name, "latest"),
    };
    let parts: Vec<&str> = name.split('/').collect();
    let path = match parts[..] {
        [model] => [REGISTRY, LIBRARY, model, tag],
        [owner, model] => [REGISTRY, owner, model, tag],
        [registry, owner, model] => [registry, owner, model, tag],
        _ => return None,
    };
    let is_plain = |part: &&str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    if !path.iter().all(is_plain) {
        return None;
    }
    ollama_blob(root, &path.iter().fold(root.join("manifests"), |at, part| at.join(part)))
}

/// Returns the model file that a manifest names, if it exists.
fn ollama_blob(root: &Path, manifest: &Path) -> Option<PathBuf> {
    let manifest = json::parse(&read_regular(manifest, LARGEST).ok()?).ok()?;
    let layers = manifest.get("layers")?.as_array()?;
    let is_model = |layer: &&serde_json::Value| {
        layer["mediaType"].as_str() == Some("application/vnd.ollama.image.model")
    };
    let digest = layers.iter().find(is_model)?["digest"].as_str()?.strip_prefix("sha256:")?;
    let is_hex = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
    let blob = root.join("blobs").join(format!("sha256-{digest}"));
    (is_hex && blob.is_file()).then_some(blob)
}

/// Returns the sorted names in a directory; empty if it cannot be read.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_ollama_is_found_by_the_name_that_is_listed() {
        let root = tempfile::tempdir().unwrap();
        let digest = "ab".repeat(32);
        let blob = root.path().join("blobs").join(format!("sha256-{digest}"));
        std::fs::create_dir(root.path().join("blobs")).unwrap();
        std::fs::write(&blob, "GGUF").unwrap();
        let manifest = |path: &str, digest: &str| {
            let path = root.path().join("manifests").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let layers = serde_json::json!([
                {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
                {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
            ]);
            std::fs::write(path, serde_json::json!({"layers": layers}).to_string()).unwrap();
        };
        let whole = format!("sha256:{digest}");
        manifest("registry.ollama.ai/library/gemma3/4b", &whole);
        manifest("registry.ollama.ai/library/gemma3/latest", &whole);
        manifest("registry.ollama.ai/me/mine/1", &whole);
        manifest("hf.co/a/b-GGUF/Q4_0", &whole);
        manifest("registry.ollama.ai/library/gone/1", &format!("sha256:{}", "cd".repeat(32)));
        manifest("registry.ollama.ai/library/evil/1", "sha256:../../../etc/passwd");
        let found = ollama_models(root.path());
        let listed: Vec<&str> = found.iter().map(|(name, _)| &**name).collect();
        assert_eq!(listed, ["hf.co/a/b-GGUF:Q4_0", "gemma3:4b", "gemma3:latest", "me/mine:1"]);
        for (name, path) in &found {
            assert_eq!((ollama_model(root.path(), name).as_ref(), path), (Some(path), &blob));
        }
        assert_eq!(ollama_model(root.path(), "gemma3"), Some(blob));
        for name in ["gone:1", "evil:1", "../x:1", "a/b/c/d:1", "gemma3:", "gemma3:../4b"] {
            assert_eq!(ollama_model(root.path(), name), None, "{name}");
        }
    }
}
