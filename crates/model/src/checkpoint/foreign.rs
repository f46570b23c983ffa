//! Rejects directories and files that look like a model but cannot be read, each with a remedy.

use super::store::Store;
use anyhow::Result;
use gemma_base::error::Fault;
use serde_json::Value;
use std::path::Path;

/// Fails for anything that is not a directory. GGUF files were handled before.
pub fn check_path(path: &Path) -> Result<()> {
    let shown = path.display();
    let meta = std::fs::metadata(path)
        .map_err(|e| Fault::model(format!("{shown}: {e}")).help("check the path of the model"))?;
    if meta.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let fault = match extension {
        "safetensors" => Fault::model(format!("{shown}: a single weight file is not a model")),
        "json" | "model" => Fault::model(format!("{shown} is one file of a model")),
        _ => Fault::model(format!("{shown} is not a model directory and not a GGUF file")),
    };
    Err(match parent.join("config.json").is_file() {
        true => {
            fault.help(format!("give its directory, which holds config.json: {}", parent.display()))
        }
        false => {
            fault.help("give the directory that holds config.json, the weights and tokenizer.json")
        }
    }
    .into())
}

/// Fails for files in the place of weights or a tokenizer: a Git LFS pointer, or a web page saved
/// under that name.
pub fn check_bytes(file: &str, bytes: &[u8]) -> Result<(), Fault> {
    let start = &bytes[..bytes.len().min(512)];
    if start.starts_with(b"version https://git-lfs.github.com/") {
        return Err(Fault::model(format!(
            "{file} is a Git LFS pointer: the file itself was not fetched"
        ))
        .help("in the directory of the clone: git lfs install && git lfs pull"));
    }
    let text = String::from_utf8_lossy(start)
        .trim_start_matches('\u{feff}')
        .trim_start()
        .to_ascii_lowercase();
    if ["<!doctype html", "<html", "<head", "<?xml"].iter().any(|tag| text.starts_with(tag)) {
        return Err(Fault::model(format!("{file} is a web page that was saved under this name"))
            .help(
                "download the file itself: `gemma pull ID`, \
                or a link with /resolve/main/ in it instead of /blob/main/",
            ));
    }
    Ok(())
}

/// Fails for directories of other kinds, recognised by their files.
pub fn check_files(store: &Store, shown: &str) -> Result<()> {
    let files = store.list()?;
    let has = |name: &str| files.iter().any(|f| f == name);
    let ends = |ending: &str| files.iter().any(|f| f.ends_with(ending));
    if has("adapter_config.json") {
        let what = format!("{shown} is a PEFT adapter (adapter_config.json), not a whole model");
        let help = "merge it into its base model first: \
            peft's `merge_and_unload()`, then `save_pretrained`";
        return Err(Fault::model(what).help(help).into());
    }
    if ends(".safetensors") {
        return Ok(());
    }
    if ends(".gguf") {
        return Err(Fault::model(format!(
            "{shown} holds parts of a GGUF model, but not the first, or only its vision tower"
        ))
        .help("fetch the file of the language model too")
        .into());
    }
    if ends(".bin") || ends(".pt") || ends(".pth") {
        return Err(Fault::model(format!("{shown} holds PyTorch pickles, which are never loaded"))
            .help("save the model again with `safe_serialization=True`")
            .into());
    }
    if ends(".sbs") {
        return Err(Fault::model(format!("{shown} holds a model for gemma.cpp"))
            .help("use the model directory from Hugging Face, or its GGUF file")
            .into());
    }
    if !has("config.json") {
        let what = format!("{shown}: there is no config.json and no safetensors file here");
        return Err(Fault::model(what)
            .help(
                "give a model directory from Hugging Face, a directory that gemma quantize made, \
                or a GGUF file",
            )
            .into());
    }
    Err(Fault::model(format!("{shown}: there are no weights: no model.safetensors and no shards"))
        .help("the download is incomplete: `gemma pull` with this model's id completes it")
        .into())
}

/// Fails for weights that another tool has quantised.
pub fn check_config(config: &Value, shown: &str) -> Result<()> {
    if let Some(tool) = other_quantiser(config) {
        return Err(Fault::model(format!("{shown}: the weights were already quantised by {tool}"))
            .help("use the original bf16 directory, and quantise it with `gemma quantize`")
            .into());
    }
    Ok(())
}

/// Returns the tool that quantised this model, unless it is this program.
fn other_quantiser(config: &Value) -> Option<String> {
    let places = [Some(config), config.get("text_config")];
    for place in places.into_iter().flatten() {
        for key in ["quantization_config", "compression_config"] {
            let Some(section) = place.get(key).filter(|v| !v.is_null()) else { continue };
            let method = section.get("quant_method").and_then(Value::as_str);
            match method {
                Some("gemma") => {}
                Some(method) => return Some(method.to_string()),
                None if ["load_in_4bit", "load_in_8bit", "_load_in_4bit"]
                    .iter()
                    .any(|k| section.get(k).is_some()) =>
                {
                    return Some("bitsandbytes".into());
                }
                None if section.get("group_size").is_some() && section.get("bits").is_some() => {
                    return Some("MLX or GPTQ".into());
                }
                None => return Some(format!("an unknown tool (`{key}` without quant_method)")),
            }
        }
        if place.get("quantization").is_some_and(|v| !v.is_null()) {
            return Some("MLX".into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn other_quantisers_are_recognised() {
        for (config, want) in [
            (
                json!({"quantization_config":
                    {"quant_method": "bitsandbytes", "load_in_4bit": true}}),
                "bitsandbytes",
            ),
            (json!({"quantization_config": {"load_in_8bit": true}}), "bitsandbytes"),
            (
                json!({"quantization_config": {"quant_method": "compressed-tensors"}}),
                "compressed-tensors",
            ),
            (
                json!({"compression_config": {"quant_method": "compressed-tensors"}}),
                "compressed-tensors",
            ),
            (json!({"text_config": {"quantization_config": {"quant_method": "gptq"}}}), "gptq"),
            (json!({"quantization_config": {"quant_method": "awq"}}), "awq"),
            (json!({"quantization": {"group_size": 64, "bits": 4}}), "MLX"),
            (json!({"quantization_config": {"group_size": 64, "bits": 4}}), "MLX"),
            (json!({"quantization_config": {}}), "unknown tool"),
        ] {
            let error = check_config(&config, "m").unwrap_err().to_string();
            assert!(error.contains(want), "{error} lacks {want}");
        }
        for config in [
            json!({}),
            json!({"quantization_config": null}),
            json!({"quantization_config": {"quant_method": "gemma", "version": 1}}),
        ] {
            check_config(&config, "m").unwrap();
        }
    }
}
