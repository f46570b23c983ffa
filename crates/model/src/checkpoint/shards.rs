//! Finds the weight files of a checkpoint: `model.safetensors`, or the shards that
//! `model.safetensors.index.json` lists.

use super::store::Store;
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::util::files::is_portable_name;
use serde_json::Value;
use std::collections::BTreeMap;

pub const SINGLE: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";

/// Weight files and, for a sharded model, the index from tensors to files.
#[derive(Debug, Default)]
pub struct Shards {
    /// Sorted and unique.
    pub files: Vec<String>,
    pub weight_map: Option<BTreeMap<String, String>>,
}

/// Finds the weight files and checks that all exist. `shown` is the checkpoint's name in errors.
pub fn find(store: &Store, shown: &str) -> Result<Shards> {
    // transformers prefers the single file if both exist.
    if store.contains(SINGLE) {
        return Ok(Shards { files: vec![SINGLE.into()], weight_map: None });
    }
    let Some(index) = store.json(INDEX)? else {
        let found =
            store.list()?.into_iter().find(|f| f.ends_with(".safetensors")).unwrap_or_default();
        return Err(Fault::model(format!(
            "{shown}: there is neither {SINGLE} nor {INDEX}, only {found:?}"
        ))
        .help("the download is incomplete: `gemma pull` with this model's id completes it")
        .into());
    };
    let bad = |what: String| {
        Fault::model(format!("{}: {what}", store.display(INDEX))).help("fetch the index again")
    };
    let Some(map) = index.get("weight_map").and_then(Value::as_object).filter(|m| !m.is_empty())
    else {
        return Err(bad("no `weight_map`".into()).into());
    };
    let mut weight_map = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else {
            return Err(bad(format!("tensor `{tensor}` is mapped to {file}, not to a file")).into());
        };
        if !is_portable_name(file) {
            return Err(bad(format!(
                "tensor `{tensor}` is mapped to {file:?}, which may lie outside the directory"
            ))
            .into());
        }
        weight_map.insert(tensor.clone(), file.to_string());
    }
    let mut files: Vec<String> = weight_map.values().cloned().collect();
    files.sort();
    files.dedup();
    let missing: Vec<&String> = files.iter().filter(|f| !store.contains(f)).collect();
    if let Some(first) = missing.first() {
        let what = format!(
            "{} is missing; {} of {} shards are not there",
            store.display(first),
            missing.len(),
            files.len()
        );
        return Err(Fault::model(what)
            .help("the download is incomplete: `gemma pull` with this model's id completes it")
            .into());
    }
    Ok(Shards { files, weight_map: Some(weight_map) })
}
