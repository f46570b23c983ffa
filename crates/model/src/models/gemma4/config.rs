//! `config.json` of a Gemma 4 model.
//!
//! Defaults are those of `Gemma4TextConfig` and `Gemma4UnifiedTextConfig`.

use super::{Gemma4, Gemma4Assistant};
use crate::models::reader::{Reader, check_heads, positive, size};
use crate::models::{Config, ExpertSpec, LayerSpec, RopeSpec};
use gemma_base::compute::{MAX_EXPERTS, MAX_USED};
use gemma_base::error::Fault;
use serde_json::{Value, json};

/// Reads a whole file.
pub fn config(json: &Value) -> Result<Config, Fault> {
    let reader = &Reader::new(json);
    refuse_what_is_not_computed(reader, false)?;
    read(json, reader)
}

/// Reads the `config.json` of an assistant.
pub fn assistant(json: &Value) -> Result<Config, Fault> {
    let reader = &Reader::new(json);
    if json.get("use_ordered_embeddings") == Some(&Value::Bool(true)) {
        let what = "the assistant looks its logits up by centroids, \
                    as those of Gemma 4 E2B and E4B do: `use_ordered_embeddings` is set";
        return Err(Fault::model(what).help("assistants of Gemma 4 12B and 31B run here"));
    }
    refuse_what_is_not_computed(reader, true)?;
    let mut config = read(json, reader)?;
    // An assistant computes no keys and values, and its rows are tokens only.
    config
        .layers
        .iter_mut()
        .for_each(|layer| (layer.values_are_keys, layer.whole_images) = (false, false));
    let backbone = json.get("backbone_hidden_size").filter(|v| !v.is_null());
    let backbone = size("backbone_hidden_size", backbone, 1536, 1 << 17)?;
    Ok(Config {
        architecture: &Gemma4Assistant,
        backbone: Some(backbone),
        logit_cap: None,
        ..config
    })
}

fn read(json: &Value, reader: &Reader<'_>) -> Result<Config, Fault> {
    let is_unified = ["model_type", "architectures"]
        .iter()
        .any(|key| json[key].to_string().to_lowercase().contains("unified"));
    let dim = reader.size("hidden_size", 2304, 1 << 17)?;
    let vocab = reader.size("vocab_size", 262_144, 1 << 24)?;
    let (eos, bos) = reader.ends(vocab)?;
    let cap = reader.get("final_logit_softcapping");
    let positions = if is_unified { 262_144 } else { 131_072 };
    Ok(Config {
        architecture: &Gemma4,
        layers: layers(reader, is_unified)?,
        dim,
        ffn_dim: reader.size("intermediate_size", 9216, 1 << 20)?,
        experts: experts(reader, dim)?,
        vocab,
        eps: reader.positive("rms_norm_eps", 1e-6)? as f32,
        embed_scale: (dim as f64).sqrt() as f32,
        logit_cap: cap
            .map(|cap| positive("final_logit_softcapping", Some(cap), 0.0))
            .transpose()?
            .map(|cap| cap as f32),
        max_position: reader.size("max_position_embeddings", positions, 1 << 30)?,
        backbone: None,
        eos,
        bos,
        tied: reader.tied()?,
        vocab_is_explicit: reader.get("vocab_size").is_some(),
    })
}

/// Returns the experts of a mixture model.
fn experts(reader: &Reader<'_>, dim: usize) -> Result<Option<ExpertSpec>, Fault> {
    if reader.get("enable_moe_block") != Some(&Value::Bool(true)) {
        return Ok(None);
    }
    let needed = |key: &str, max| match reader.get(key) {
        Some(_) => reader.size(key, 1, max),
        None => Err(Fault::model(format!("`{key}` is missing, but `enable_moe_block` is set"))),
    };
    let count = needed("num_experts", MAX_EXPERTS)?;
    let used = needed("top_k_experts", count.min(MAX_USED))?;
    let width = needed("moe_intermediate_size", 1 << 20)?;
    // Kernels process 32 rows of a matrix together, which must belong to one expert.
    for (key, n) in [("moe_intermediate_size", width), ("hidden_size", dim)] {
        if !n.is_multiple_of(32) {
            let what = format!("`{key}` of a mixture must be a multiple of 32, not {n}");
            return Err(Fault::model(what));
        }
    }
    let fused = reader.get("separate_experts") != Some(&Value::Bool(true));
    Ok(Some(ExpertSpec { count, used, width, fused }))
}

/// Fails for features that the supported models and their assistants do not have.
///
/// All layers of an assistant share keys and values. Per-layer embeddings would also need a value
/// for rows of images: transformers uses the row of the padding token.
fn refuse_what_is_not_computed(reader: &Reader<'_>, is_assistant: bool) -> Result<(), Fault> {
    let is_set = |key: &str| {
        reader.get(key).is_some_and(|v| *v != Value::Bool(false) && v.as_u64() != Some(0))
    };
    let edge = "Gemma 4 E2B and E4B";
    for (key, what, models) in [
        ("hidden_size_per_layer_input", "embeddings for each layer", edge),
        ("num_kv_shared_layers", "layers that share keys and values", edge),
        ("use_double_wide_mlp", "layers of double width", edge),
    ] {
        if is_set(key) && !(is_assistant && key == "num_kv_shared_layers") {
            let what = format!("the model has {what}, as {models} do: `{key}` is set");
            return Err(Fault::model(what)
                .help("these run here: Gemma 4 12B, 26B-A4B and 31B, and Gemma 3"));
        }
    }
    reader.refuse_other("attention_bias", &json!(false))?;
    reader.refuse_other("hidden_activation", &json!("gelu_pytorch_tanh"))?;
    // Text attends to earlier positions only.
    reader.refuse_other("use_bidirectional_attention", &json!("vision"))
}

fn layers(reader: &Reader<'_>, is_unified: bool) -> Result<Vec<LayerSpec>, Fault> {
    // Rows of an image see each other in layers with a window; in E2B and E4B in no layer.
    let whole_images = match reader.get("use_bidirectional_attention") {
        Some(kind) => *kind == json!("vision"),
        None => is_unified,
    };
    let n_layers = reader.size("num_hidden_layers", 30, 1024)?;
    let n_heads = reader.size("num_attention_heads", 8, 1024)?;
    let n_kv_heads = reader.size("num_key_value_heads", 4, 1024)?;
    let head_dim = reader.size("head_dim", 256, 1024)?;
    let mut global = match reader.layer_types(n_layers)? {
        Some(types) => types,
        None => (1..=n_layers).map(|i| i.is_multiple_of(6)).collect(),
    };
    // As in transformers, the last layer is always global.
    global.iter_mut().last().into_iter().for_each(|last| *last = true);
    let window = reader.window(if is_unified { 1024 } else { 512 }, &global)?;
    let values_are_keys = reader.get("attention_k_eq_v") == Some(&Value::Bool(true));
    let global_kv = match values_are_keys {
        true => reader.size("num_global_key_value_heads", n_kv_heads, 1024)?,
        false => n_kv_heads,
    };
    let global_dim = reader.size("global_head_dim", 512, 1024)?;
    let ropes = [rope(reader, "sliding_attention", 1e4)?, rope(reader, "full_attention", 1e6)?];
    let mut layers = Vec::with_capacity(n_layers);
    for (i, is_global) in global.into_iter().enumerate() {
        let (mut heads, mut dim) =
            if is_global { (global_kv, global_dim) } else { (n_kv_heads, head_dim) };
        if let Some(all) = reader.get("per_layer_config") {
            (heads, dim) = (n_kv_heads, head_dim);
            // Layer numbers in keys have leading zeros.
            let mut own = all.as_object().into_iter().flatten();
            if let Some((_, own)) = own.find(|(key, _)| key.parse() == Ok(i)) {
                (heads, dim) = own_heads(i, own, heads, dim)?;
            }
        }
        check_heads(n_heads, heads, dim)?;
        layers.push(LayerSpec {
            n_heads,
            n_kv_heads: heads,
            head_dim: dim,
            window: (!is_global).then_some(window),
            rope: ropes[is_global as usize],
            query_scale: 1.0,
            values_are_keys: values_are_keys && is_global,
            whole_images: whole_images && !is_global,
        });
    }
    Ok(layers)
}

/// Returns the key-value heads and the head dimension of layer `i` from its entry in
/// `per_layer_config`.
fn own_heads(i: usize, own: &Value, heads: usize, dim: usize) -> Result<(usize, usize), Fault> {
    let known = ["num_key_value_heads", "head_dim"];
    let keys = own.as_object().map(|own| own.keys());
    let keys =
        keys.ok_or_else(|| Fault::model(format!("`per_layer_config` of layer {i} is {own}")))?;
    if let Some(other) = keys.into_iter().find(|key| !known.contains(&key.as_str())) {
        let what = format!("`per_layer_config` of layer {i} changes `{other}`");
        return Err(Fault::model(what).help("only heads may differ between layers"));
    }
    let of = |key: &str, default| size(key, own.get(key).filter(|v| !v.is_null()), default, 1024);
    Ok((of(known[0], heads)?, of(known[1], dim)?))
}

/// Returns the rotation of the layers of this kind.
fn rope(reader: &Reader<'_>, kind: &str, theta: f64) -> Result<RopeSpec, Fault> {
    let is_global = kind == "full_attention";
    let Some(all) = reader.get("rope_parameters") else {
        let share = if is_global { 0.25 } else { 1.0 };
        return Ok(RopeSpec { theta: theta as f32, factor: 1.0, share });
    };
    let section = all.get(kind).filter(|v| v.is_object());
    let section =
        section.ok_or_else(|| Fault::model(format!("`rope_parameters` does not name {kind}")))?;
    let number = |key: &str, default| positive(key, section.get(key), default).map(|v| v as f32);
    let theta = number("rope_theta", theta)?;
    match section.get("rope_type").and_then(Value::as_str) {
        Some("default") => Ok(RopeSpec { theta, factor: 1.0, share: 1.0 }),
        Some("proportional") => Ok(RopeSpec {
            theta,
            factor: number("factor", 1.0)?,
            share: number("partial_rotary_factor", 1.0)?.min(1.0),
        }),
        _ => Err(Fault::model(format!("RoPE as in {section} is not supported"))
            .help("Gemma 4 uses `default` and `proportional`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 31B model's shape in a multimodal file.
    fn shape_31b() -> Value {
        json!({"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {"model_type": "gemma4_text", "hidden_size": 5376,
                "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
                "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
                "num_global_key_value_heads": 4, "attention_k_eq_v": true, "sliding_window": 1024,
                "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
                "max_position_embeddings": 262_144, "enable_moe_block": false,
                "use_bidirectional_attention": "vision"}})
    }

    #[test]
    fn the_31b_shape_is_read_in_both_spellings() {
        let c = Config::from_json(&shape_31b()).unwrap();
        assert_eq!((c.layers.len(), c.vocab, c.logit_cap), (60, 262_144, Some(30.0)));
        assert_eq!(c.global_layers(), [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
        let local = LayerSpec {
            n_heads: 32,
            n_kv_heads: 16,
            head_dim: 256,
            window: Some(1024),
            rope: RopeSpec { theta: 1e4, factor: 1.0, share: 1.0 },
            query_scale: 1.0,
            values_are_keys: false,
            whole_images: true,
        };
        let global = LayerSpec {
            n_kv_heads: 4,
            head_dim: 512,
            window: None,
            rope: RopeSpec { theta: 1e6, factor: 1.0, share: 0.25 },
            values_are_keys: true,
            whole_images: false,
            ..local
        };
        assert_eq!(c.layers[4..6], [local, global]);
        let mut new = shape_31b();
        let text = new["text_config"].as_object_mut().unwrap();
        text.remove("global_head_dim");
        text.remove("num_global_key_value_heads");
        let own = json!({"head_dim": 512, "num_key_value_heads": 4});
        let all = (5..60).step_by(6).map(|i| (i.to_string(), own.clone()));
        text.insert("per_layer_config".into(), Value::Object(all.collect()));
        assert_eq!(Config::from_json(&new).unwrap(), c);
    }

    #[test]
    fn other_models_of_the_family_are_refused_by_name() {
        for (key, value, name) in [
            ("hidden_size_per_layer_input", json!(256), "E2B"),
            ("num_kv_shared_layers", json!(18), "E4B"),
            ("use_bidirectional_attention", json!("all"), "all"),
        ] {
            let mut json = shape_31b();
            json["text_config"][key] = value;
            let error = Config::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(key), "{error}");
        }
    }

    #[test]
    fn experts_are_read_and_checked() {
        let mut json = shape_31b();
        let text = json["text_config"].as_object_mut().unwrap();
        for (key, value) in [
            ("enable_moe_block", json!(true)),
            ("num_experts", json!(128)),
            ("top_k_experts", json!(8)),
            ("moe_intermediate_size", json!(704)),
        ] {
            text.insert(key.into(), value);
        }
        let spec = ExpertSpec { count: 128, used: 8, width: 704, fused: true };
        assert_eq!(Config::from_json(&json).unwrap().experts, Some(spec));
        for (key, value) in [
            ("num_experts", Value::Null),
            ("num_experts", json!(4)),
            ("top_k_experts", json!(0)),
            ("top_k_experts", json!(64)),
            ("moe_intermediate_size", json!(48)),
            ("hidden_size", json!(48)),
        ] {
            let mut json = json.clone();
            json["text_config"][key] = value;
            let error = Config::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(if key == "num_experts" { "experts" } else { key }), "{error}");
        }
    }
}
