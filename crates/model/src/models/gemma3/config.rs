//! `config.json` of a Gemma 3 model, in every form that transformers 4 and 5 write.
//!
//! Defaults are those of `Gemma3TextConfig` (huggingface/transformers,
//! models/gemma3/configuration_gemma3.py).

use super::Gemma3;
use crate::models::reader::{Reader, check_heads, positive};
use crate::models::{Config, LayerSpec, RopeSpec};
use gemma_base::error::Fault;
use serde_json::Value;

/// Reads a whole file.
pub fn config(json: &Value) -> Result<Config, Fault> {
    let reader = &Reader::new(json);
    refuse_what_is_not_computed(reader)?;
    let layers = layers(reader)?;
    let dim = reader.size("hidden_size", 2304, 1 << 17)?;
    let vocab = reader.size("vocab_size", 262_208, 1 << 24)?;
    let (eos, bos) = reader.ends(vocab)?;
    Ok(Config {
        architecture: &Gemma3,
        layers,
        dim,
        ffn_dim: reader.size("intermediate_size", 9216, 1 << 20)?,
        experts: None,
        vocab,
        eps: reader.positive("rms_norm_eps", 1e-6)? as f32,
        embed_scale: (dim as f64).sqrt() as f32,
        logit_cap: None,
        max_position: reader.size("max_position_embeddings", 131_072, 1 << 30)?,
        backbone: None,
        eos,
        bos,
        tied: reader.tied()?,
        vocab_is_explicit: reader.get("vocab_size").is_some(),
    })
}

fn layers(reader: &Reader<'_>) -> Result<Vec<LayerSpec>, Fault> {
    let n_layers = reader.size("num_hidden_layers", 26, 1024)?;
    let n_heads = reader.size("num_attention_heads", 8, 1024)?;
    let n_kv_heads = reader.size("num_key_value_heads", 4, 1024)?;
    let head_dim = reader.size("head_dim", 256, 1024)?;
    check_heads(n_heads, n_kv_heads, head_dim)?;
    let global = global(reader, n_layers)?;
    let window = reader.window(4096, &global)?;
    let query = reader.positive("query_pre_attn_scalar", 256.0)?;
    let query_scale = (query.sqrt().recip()) as f32;
    let [rope_global, rope_local] = ropes(reader)?;
    let layer = |is_global: bool| LayerSpec {
        n_heads,
        n_kv_heads,
        head_dim,
        window: (!is_global).then_some(window),
        rope: if is_global { rope_global } else { rope_local },
        query_scale,
        values_are_keys: false,
        whole_images: true,
    };
    Ok(global.into_iter().map(layer).collect())
}

fn refuse_what_is_not_computed(reader: &Reader<'_>) -> Result<(), Fault> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = reader.get(key) {
            return Err(Fault::model(format!("`{key}` is {value}; Gemma 3 has no soft-capping"))
                .help("is this a Gemma 2 model? Only Gemma 3 is supported"));
        }
    }
    for key in ["attention_bias", "use_bidirectional_attention"] {
        if let Some(value) = reader.get(key).filter(|v| **v != Value::Bool(false)) {
            return Err(Fault::model(format!("`{key}` is {value}, which is not supported"))
                .help("only causal Gemma 3 language models run here"));
        }
    }
    if let Some(act) = reader.get("hidden_activation").filter(|v| *v != "gelu_pytorch_tanh") {
        return Err(Fault::model(format!(
            "`hidden_activation` is {act}; Gemma 3 has \"gelu_pytorch_tanh\""
        )));
    }
    Ok(())
}

/// Returns which layers are global: as in `layer_types`, else every n-th.
fn global(reader: &Reader<'_>, n_layers: usize) -> Result<Vec<bool>, Fault> {
    if let Some(types) = reader.layer_types(n_layers)? {
        return Ok(types);
    }
    let key = if reader.get("sliding_window_pattern").is_some() {
        "sliding_window_pattern"
    } else {
        "_sliding_window_pattern"
    };
    let pattern = reader.size(key, 6, 1024)?;
    Ok((1..=n_layers).map(|i| i.is_multiple_of(pattern)).collect())
}

/// Returns the rotation of global layers, then that of sliding-window layers.
fn ropes(reader: &Reader<'_>) -> Result<[RopeSpec; 2], Fault> {
    let new = reader.get("rope_parameters");
    let kinds = ["full_attention", "sliding_attention"];
    if let Some(new) = new
        && !kinds.iter().any(|kind| new.get(kind).is_some())
    {
        return Err(Fault::model(
            "`rope_parameters` names neither full_attention nor sliding_attention",
        ));
    }
    let section = |kind: &str| new.and_then(|n| n.get(kind)).filter(|v| !v.is_null());
    let full = section(kinds[0]);
    // The older key overrides the newer one. It scales only the global layers.
    let scaling = reader.get("rope_scaling").or(full);
    let theta = |section: Option<&Value>, old: &str, default: f64| {
        positive(old, section.and_then(|s| s.get("rope_theta")).or(reader.get(old)), default)
            .map(|v| v as f32)
    };
    let sliding = section(kinds[1]);
    let rope = |theta, factor| RopeSpec { theta, factor, share: 1.0 };
    Ok([
        rope(theta(full, "rope_theta", 1e6)?, factor(scaling)?),
        rope(theta(sliding, "rope_local_base_freq", 1e4)?, factor(sliding)?),
    ])
}

/// Returns the divisor of positions.
fn factor(section: Option<&Value>) -> Result<f32, Fault> {
    let Some(section) = section else { return Ok(1.0) };
    let kind = section.get("rope_type").or_else(|| section.get("type")).unwrap_or(&Value::Null);
    let scale = section.get("factor").filter(|v| !v.is_null());
    match (kind, scale) {
        (Value::Null, None) if section.is_object() => Ok(1.0),
        (Value::String(kind), _) if kind == "default" => Ok(1.0),
        (Value::String(kind), Some(scale)) if kind == "linear" => match scale.as_f64() {
            Some(f) if (1.0..=1024.0).contains(&f) => Ok(f as f32),
            _ => Err(Fault::model(format!(
                "linear RoPE needs a factor from 1 to 1024, \
                not {scale}"
            ))),
        },
        _ => Err(Fault::model(format!("RoPE as in {section} is not supported")).help(
            "Gemma 3 uses `default` and `linear` (with a factor); \
                remove a scaling that was added for longer contexts",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The 27B file from the hub: sparse, since most values are class defaults.
    fn hub_27b() -> Value {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "eos_token_id": [1, 106],
            "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
                "mm_tokens_per_image": 256,
            "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152,
                "num_hidden_layers": 27},
            "text_config": {
                "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
                    "num_hidden_layers": 62,
                "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
                    "model_type": "gemma3_text",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
        })
    }

    #[test]
    fn the_hubs_27b_is_filled_up_with_the_class_defaults() {
        let c = Config::from_json(&hub_27b()).unwrap();
        assert_eq!(
            (c.layers.len(), c.dim, c.ffn_dim, c.vocab, c.vocab_is_explicit, c.max_position),
            (62, 5376, 21504, 262_208, false, 131_072)
        );
        assert_eq!(c.global_layers(), [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
        let local = LayerSpec {
            n_heads: 32,
            n_kv_heads: 16,
            head_dim: 128,
            window: Some(1024),
            rope: RopeSpec { theta: 1e4, factor: 1.0, share: 1.0 },
            query_scale: (1.0 / 168f64.sqrt()) as f32,
            values_are_keys: false,
            whole_images: true,
        };
        let rope = RopeSpec { theta: 1e6, factor: 8.0, share: 1.0 };
        assert_eq!(c.layers[4..6], [local, LayerSpec { window: None, rope, ..local }]);
        assert_eq!(c.eps, 1e-6);
        assert_eq!((c.eos.as_slice(), c.bos, c.tied), (&[1, 106][..], 2, true));
    }

    #[test]
    fn the_hubs_4b_omits_even_its_heads() {
        let c = Config::from_json(&json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "eos_token_id": [1, 106],
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
                "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        }))
        .unwrap();
        let first = c.layers[0];
        assert_eq!((first.n_heads, first.n_kv_heads, first.head_dim), (8, 4, 256));
        assert_eq!(first.query_scale, 1.0 / 16.0);
    }

    #[test]
    fn both_transformers_say_the_same_27b() {
        let mut new = hub_27b();
        let text = new["text_config"].as_object_mut().unwrap();
        text.remove("rope_scaling");
        let kind =
            |i: usize| if i.is_multiple_of(6) { "full_attention" } else { "sliding_attention" };
        text.insert("layer_types".into(), (1..=62).map(kind).collect());
        text.insert("_sliding_window_pattern".into(), json!(2)); // layer_types has precedence
        text.insert(
            "rope_parameters".into(),
            json!({"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        );
        text.insert("tie_word_embeddings".into(), json!(true));
        assert_eq!(Config::from_json(&new).unwrap(), Config::from_json(&hub_27b()).unwrap());
    }
}
