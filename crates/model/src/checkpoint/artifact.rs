//! Quantised checkpoints in this program's own format: a Hugging Face directory with a
//! `config.json` that lists the packed matrices and their formats.
//!
//! `"quantization_config": {"quant_method": "gemma", "version": 2, "formats": {"<X.weight>":
//! "i4-row+h128", ...}}`. A listed matrix is stored as `X.weight.codes` (U8 `[rows, row_bytes]`)
//! and, for integer codes, `X.weight.scales` (F16 `[rows, groups]`). All other tensors are stored
//! as in a normal checkpoint.

use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::Format;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Version of the format. 2 added random signs before every Hadamard.
pub const VERSION: u64 = 2;

/// Name of the tensor with a packed matrix's codes.
pub fn codes_name(matrix: &str) -> String {
    format!("{matrix}.codes")
}

/// Name of the tensor with a packed matrix's scales.
pub fn scales_name(matrix: &str) -> String {
    format!("{matrix}.scales")
}

/// Returns the formats of packed matrices by name; empty for an unquantised checkpoint. `shown` is
/// the file's name in errors.
pub fn formats(config: &Value, shown: &str) -> Result<BTreeMap<String, Format>> {
    let Some(section) = config.get("quantization_config").filter(|v| !v.is_null()) else {
        return Ok(BTreeMap::new());
    };
    let bad = |what: String| {
        Fault::model(format!("{shown}: quantization_config: {what}"))
            .help("config.json is damaged: quantise the model again")
    };
    match section.get("version").and_then(Value::as_u64) {
        Some(VERSION) => {}
        Some(newer) if newer > VERSION => {
            let what = format!("version {newer} is newer than this program knows ({VERSION})");
            return Err(bad(what).help("update gemma, or quantise the model again").into());
        }
        Some(older) => {
            let what = format!(
                "version {older} is of an earlier gemma, which transformed weights in another way"
            );
            return Err(bad(what).help("quantise the model again").into());
        }
        None => return Err(bad("no version".into()).into()),
    }
    let Some(formats) = section.get("formats").and_then(Value::as_object) else {
        return Err(bad("no `formats`".into()).into());
    };
    let mut out = BTreeMap::new();
    for (name, format) in formats {
        let parsed = format.as_str().map(str::parse::<Format>);
        match parsed {
            Some(Ok(format)) => out.insert(name.clone(), format),
            Some(Err(e)) => return Err(bad(format!("`{name}`: {e:#}")).into()),
            None => return Err(bad(format!("`{name}`: {format} is not a format")).into()),
        };
    }
    Ok(out)
}

/// Returns `config` with the section that [`formats`] reads.
pub fn with_formats(config: &Value, formats: &BTreeMap<String, Format>) -> Value {
    let mut config = config.clone();
    let list: Map<String, Value> =
        formats.iter().map(|(name, f)| (name.clone(), Value::String(f.to_string()))).collect();
    if let Some(map) = config.as_object_mut() {
        map.insert(
            "quantization_config".into(),
            json!({"quant_method": "gemma", "version": VERSION, "formats": list}),
        );
    }
    config
}
