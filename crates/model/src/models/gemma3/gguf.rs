//! Reads and writes the keys of GGUF files with the architecture `gemma3`. Some facts have no key,
//! because llama.cpp hard-codes them.

use crate::checkpoint::gguf::write::Keys;
use crate::checkpoint::gguf::{Metadata, Value as Stored};
use crate::models::gguf::{BOS, PAD, decimal, eos, whole};
use crate::models::{Config, LayerSpec, RopeSpec};
use anyhow::Result;
use gemma_base::error::Fault;
use serde_json::{Value, json};

/// Name of the architecture, and the first part of its keys.
pub const ARCHITECTURE: &str = "gemma3";

/// Every n-th layer sees all positions; llama.cpp assumes this pattern for every file.
const PATTERN: usize = 6;

/// Layer counts of Gemma 3 4B, 12B and 27B, which divide global positions by 8. Older files do not
/// say so.
const SCALED: [i64; 3] = [34, 48, 62];
/// Layer count of 27B, which uses the attention scale of `dim / n_heads`; there is no key for it.
const LAYERS_27B: i64 = 62;

/// Returns the `config.json` equivalent of a file's keys. Only checks that keys exist; shapes are
/// checked when the result is parsed.
pub fn config(metadata: &Metadata, vocab: Option<usize>, own_head: bool) -> Result<Value, String> {
    let optional = |name: &str| whole(metadata, &key(name));
    let needed = |name: &str| optional(name)?.ok_or_else(|| format!("`{}` is missing", key(name)));
    let float = |name: &str| metadata.float(&key(name));

    let (layers, dim, heads) =
        (needed("block_count")?, needed("embedding_length")?, needed("attention.head_count")?);
    let head_dim = match optional("attention.key_length")? {
        Some(n) => n,
        None => dim
            .checked_div(heads)
            .ok_or_else(|| format!("`{}` is 0", key("attention.head_count")))?,
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(n) = optional(name)?.filter(|n| *n != head_dim) {
            return Err(format!("`{}` is {n}, but heads have {head_dim}", key(name)));
        }
    }
    let query =
        if layers == LAYERS_27B { dim.checked_div(heads).unwrap_or(head_dim) } else { head_dim };
    let mut json = json!({
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "bos_token_id": metadata.int(BOS.0).unwrap_or(BOS.1.into()),
        "eos_token_id": eos(metadata),
        "pad_token_id": metadata.int(PAD.0).unwrap_or(PAD.1.into()),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": dim,
        "intermediate_size": needed("feed_forward_length")?,
        "max_position_embeddings": needed("context_length")?,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": optional("attention.head_count_kv")?.unwrap_or(heads),
        "query_pre_attn_scalar": query,
        "rms_norm_eps": decimal(float("attention.layer_norm_rms_epsilon").unwrap_or(1e-6)),
        "rope_local_base_freq": float("rope.freq_base_swa").unwrap_or(1e4),
        "rope_scaling": scaling(metadata, layers),
        "rope_theta": float("rope.freq_base").unwrap_or(1e6),
        "tie_word_embeddings": !own_head,
        "torch_dtype": "bfloat16",
    });
    if let Some(rows) = vocab {
        json["vocab_size"] = rows.into();
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        // Passed on, so that parsing rejects it with other unsupported features.
        if let Some(cap) = float(key).filter(|v| *v != 0.0) {
            json[key] = cap.into();
        }
    }
    let (window, types) = layer_types(metadata, layers.clamp(0, 1024) as usize)?;
    json["layer_types"] = types.into();
    if let Some(window) = window {
        json["sliding_window"] = window.into();
    }
    Ok(json)
}

/// Returns the window, and the kind of each layer.
fn layer_types(
    metadata: &Metadata,
    layers: usize,
) -> Result<(Option<i64>, Vec<&'static str>), String> {
    let window = whole(metadata, &key("attention.sliding_window"))?;
    let kind = |is_local| if is_local { "sliding_attention" } else { "full_attention" };
    let pattern = key("attention.sliding_window_pattern");
    let every = |n: i64| (1..=layers as i64).map(|i| kind(n < 1 || i % n != 0)).collect();
    let types = match (window.filter(|w| *w != 0), metadata.get(&pattern)) {
        (None, _) => return Ok((None, vec![kind(false); layers])),
        (_, None) => every(6),
        (_, Some(Stored::Int(n))) => every(*n),
        (_, Some(Stored::Ints(local))) => local.iter().map(|local| kind(*local != 0)).collect(),
        _ => return Err(format!("`{pattern}` is neither a number nor a list")),
    };
    Ok((window, types))
}

/// Returns the full name of a key.
fn key(name: &str) -> String {
    format!("{ARCHITECTURE}.{name}")
}

/// Adds the keys of the architecture. Fails for a model that llama.cpp would compute differently.
pub fn keys(c: &Config, keys: &mut Keys) -> Result<()> {
    let (local, global) = layers(c)?;
    for (name, n) in [
        ("context_length", c.max_position),
        ("embedding_length", c.dim),
        ("block_count", c.layers.len()),
        ("feed_forward_length", c.ffn_dim),
        ("attention.head_count", local.n_heads),
        ("attention.head_count_kv", local.n_kv_heads),
        ("attention.key_length", local.head_dim),
        ("attention.value_length", local.head_dim),
        ("attention.sliding_window", local.window.unwrap_or(0)),
        ("vocab_size", c.vocab),
    ] {
        keys.u32(&key(name), u32::try_from(n)?);
    }
    keys.f32(&key("attention.layer_norm_rms_epsilon"), c.eps);
    keys.f32(&key("rope.freq_base"), global.theta);
    keys.f32(&key("rope.freq_base_swa"), local.rope.theta);
    // Always written, because readers guess a factor if the key is missing.
    if global.factor == 1.0 {
        keys.text(&key("rope.scaling.type"), "none");
    } else {
        keys.text(&key("rope.scaling.type"), "linear");
        keys.f32(&key("rope.scaling.factor"), global.factor);
    }
    Ok(())
}

/// Returns the shape of local layers and the rotation of global ones. Fails for a model that GGUF
/// cannot describe.
fn layers(c: &Config) -> Result<(LayerSpec, RopeSpec)> {
    let first = c.layers[0];
    let is_27b = c.layers.len() == LAYERS_27B as usize;
    let scale = if is_27b { c.dim / first.n_heads } else { first.head_dim };
    let expected = (scale as f64).sqrt().recip() as f32;
    let is_placed = |i: usize| c.layers[i].is_global() == (i + 1).is_multiple_of(PATTERN);
    // Without a global layer, the file holds llama.cpp's default.
    let rope = RopeSpec { theta: 1e6, factor: 1.0, share: 1.0 };
    let global = c.layers.iter().find(|layer| layer.is_global()).map_or(rope, |layer| layer.rope);
    let shape = |layer: &LayerSpec| LayerSpec { window: first.window, rope, ..*layer };
    let what = if first.query_scale != expected {
        format!("its attention scale is {}, where llama.cpp computes {expected}", first.query_scale)
    } else if !(0..c.layers.len()).all(is_placed) {
        format!("its global layers are not every {PATTERN}th")
    } else if first.rope != (RopeSpec { theta: 1e4, ..rope }) || global.share != 1.0 {
        "its local layers rotate otherwise than Gemma 3's".into()
    } else if c.layers.iter().any(|layer| shape(layer) != shape(&first)) {
        "its layers differ in their heads".into()
    } else {
        return Ok((first, global));
    };
    Err(Fault::model(format!("the model cannot be written as GGUF: {what}"))
        .help("make a directory instead: a destination that does not end in .gguf")
        .into())
}

/// Returns the value of `rope_scaling`.
fn scaling(metadata: &Metadata, layers: i64) -> Value {
    let factor = metadata.float(&key("rope.scaling.factor"));
    let factor = factor.or(metadata.float(&key("rope.scale_linear")));
    match (metadata.text(&key("rope.scaling.type")), factor) {
        (Some("none"), _) => Value::Null,
        (None, None) if SCALED.contains(&layers) => json!({"factor": 8.0, "rope_type": "linear"}),
        (None, None) => Value::Null,
        (kind, factor) => json!({"factor": factor, "rope_type": kind.unwrap_or("linear")}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(layers: i64, dim: i64, heads: i64, key_length: i64) -> Metadata {
        let mut m = Metadata::default();
        for (key, value) in [
            ("block_count", layers),
            ("embedding_length", dim),
            ("attention.head_count", heads),
            ("attention.head_count_kv", heads / 2),
            ("attention.key_length", key_length),
            ("feed_forward_length", 4 * dim),
            ("context_length", 131_072),
            ("attention.sliding_window", 1024),
        ] {
            m.insert(format!("{ARCHITECTURE}.{key}"), Stored::Int(value));
        }
        m.insert("gemma3.attention.layer_norm_rms_epsilon".into(), Stored::Float(1e-6f32.into()));
        m
    }

    fn read(m: &Metadata) -> Config {
        Config::from_json(&config(m, Some(262_144), false).unwrap()).unwrap()
    }

    #[test]
    fn what_27b_files_leave_out_is_known() {
        let c = read(&keys(62, 5376, 32, 128));
        let (local, global) = (c.layers[0], c.layers[5]);
        assert_eq!((local.query_scale, c.eps), ((1.0 / 168f64.sqrt()) as f32, 1e-6));
        assert_eq!((global.rope.factor, global.rope.theta, local.rope.theta), (8.0, 1e6, 1e4));
        assert_eq!(c.global_layers(), [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
        assert_eq!((local.head_dim, c.eos.as_slice(), c.bos, c.tied), (128, &[1][..], 2, true));
        let c = read(&keys(34, 2560, 8, 256));
        assert_eq!((c.layers[5].query_scale, c.layers[5].rope.factor), (1.0 / 16.0, 8.0));
        let c = read(&keys(26, 1152, 4, 256));
        assert_eq!(
            (c.layers[5].query_scale, c.layers[5].rope.factor, c.layers[0].rope.factor),
            (1.0 / 16.0, 1.0, 1.0)
        );
    }

    #[test]
    fn what_a_file_says_goes_first() {
        let mut m = keys(34, 2560, 8, 256);
        m.insert("gemma3.rope.scaling.type".into(), Stored::Text("linear".into()));
        m.insert("gemma3.rope.scaling.factor".into(), Stored::Float(2.0));
        m.insert("gemma3.rope.freq_base_swa".into(), Stored::Float(5e3));
        m.insert("gemma3.attention.sliding_window_pattern".into(), Stored::Int(2));
        let c = read(&m);
        assert_eq!((c.layers[1].rope.factor, c.layers[0].rope.theta), (2.0, 5e3));
        assert_eq!(c.global_layers().len(), 17);
        let mut m = keys(2, 64, 2, 32);
        m.insert("gemma3.attention.sliding_window_pattern".into(), Stored::Ints(vec![0, 1]));
        assert_eq!(read(&m).global_layers(), [0]);
    }

    #[test]
    fn what_is_not_computed_is_refused() {
        let refusal = |key: &str, value: Stored| {
            let mut m = keys(2, 64, 2, 32);
            m.insert(format!("{ARCHITECTURE}.{key}"), value);
            match config(&m, None, false) {
                Err(what) => what,
                Ok(json) => Config::from_json(&json).unwrap_err().to_string(),
            }
        };
        assert!(refusal("final_logit_softcapping", Stored::Float(30.0)).contains("soft-capping"));
        assert!(refusal("rope.scaling.type", Stored::Text("yarn".into())).contains("yarn"));
        assert!(refusal("attention.value_length", Stored::Int(64)).contains("value_length"));
        assert!(refusal("rope.dimension_count", Stored::Int(16)).contains("dimension_count"));
        assert!(config(&Metadata::default(), None, false).unwrap_err().contains("block_count"));
        let mut m = Metadata::default();
        m.insert("gemma3.block_count".into(), Stored::Ints(vec![1]));
        assert!(config(&m, None, false).unwrap_err().contains("whole number"));
    }
}
