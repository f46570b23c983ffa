//! Lists the models in the Hugging Face cache and of Ollama, by names that `--model` accepts.

use crate::runtime::model::find::{caches, in_cache, names_below};
use crate::runtime::model::others::{names, ollama, ollama_models};
use crate::runtime::model::variants::{tag_of, variants};
use gemma_base::util::files::read_regular;
use gemma_base::util::json;
use gemma_model::checkpoint::Checkpoint;
use gemma_model::models::architecture;
use std::path::Path;

/// Most bytes of a config.json to read.
const LARGEST: u64 = 1 << 20;

/// Returns the names, without models of other families and unfinished downloads.
pub fn installed() -> Vec<String> {
    let caches = caches();
    let folders = caches.iter().flat_map(|cache| names(cache));
    let ids = folders.filter_map(|folder| {
        let name = folder.strip_prefix("models--")?;
        Some(name.replacen("--", "/", 1))
    });
    let of_cache = ids.filter_map(|id| Some((in_cache(&id, &caches).ok()?, id)));
    let of_cache = of_cache.flat_map(|(snapshot, id)| tagged_names(&snapshot, &id));
    let of_ollama = ollama().into_iter().flat_map(|root| ollama_models(&root));
    let of_ollama = of_ollama.filter(|(_, path)| runs(path)).map(|(name, _)| name);
    of_cache.chain(of_ollama).collect()
}

/// Returns the id of a page with one model, or the id with each GGUF model's tag.
fn tagged_names(snapshot: &Path, id: &str) -> Vec<String> {
    let files = names_below(snapshot);
    let all = variants(files.iter().map(String::as_str));
    match all.len() {
        0 | 1 => runs(snapshot).then(|| id.to_owned()).into_iter().collect(),
        _ => {
            let known = all.iter().filter(|v| runs(&snapshot.join(v.names.first())));
            known.map(|v| format!("{id}:{}", tag_of(&all, v))).collect()
        }
    }
}

fn runs(path: &Path) -> bool {
    family(path).is_some_and(|family| architecture::is_known(&family))
}

/// Returns the family according to the model's own files.
pub fn family(path: &Path) -> Option<String> {
    if let Ok(text) = read_regular(&path.join("config.json"), LARGEST) {
        let config = json::parse(&text).ok()?;
        return Some(config.get("model_type")?.as_str()?.to_owned());
    }
    let checkpoint = Checkpoint::open(path).ok()?;
    Some(checkpoint.metadata()?.text("general.architecture")?.to_owned())
}
