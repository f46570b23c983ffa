//! The keys that a GGUF file has for the architecture `gemma4`. Source: ggml-org/llama.cpp,
//! conversion of `Gemma4ForConditionalGeneration` and src/models/gemma4.cpp.

use crate::checkpoint::gguf::Value as Stored;
use crate::checkpoint::gguf::write::Keys;
use crate::error::Fault;
use crate::models::gguf::{BOS, GgufModel, PAD, decimal, eos, layer_types, whole};
use crate::models::{Config, Role};
use serde_json::{Map, Value, json};

/// Name of the architecture, and the first part of its keys.
pub const ARCHITECTURE: &str = "gemma4";

/// Divisors of the frequencies of the global layers: 1 for the channels that turn.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// Least divisor of a frequency that stands for none.
const STILL: f32 = 1e29;
/// Soft-capping of a file that does not name it, as llama.cpp has it.
const LOGIT_CAP: f64 = 30.0;

/// Returns the `config.json` that a file's keys mean.
pub fn config(file: &GgufModel<'_>) -> Result<Value, String> {
    let metadata = file.metadata;
    let key = |name: &str| format!("{ARCHITECTURE}.{name}");
    let optional = |name: &str| whole(metadata, &key(name));
    let needed = |name: &str| optional(name)?.ok_or_else(|| format!("`{}` is missing", key(name)));
    let float = |name: &str| metadata.float(&key(name));

    let (layers, heads) = (needed("block_count")?, needed("attention.head_count")?);
    let layers = usize::try_from(layers).ok().filter(|n| (1..=1024).contains(n));
    let layers = layers.ok_or_else(|| format!("`{}` is not 1 to 1024", key("block_count")))?;
    let global_dim = needed("attention.key_length")?;
    let local_dim = optional("attention.key_length_swa")?.unwrap_or(global_dim);
    for (name, dim) in [
        ("attention.value_length", global_dim),
        ("attention.value_length_swa", local_dim),
        ("rope.dimension_count", global_dim),
        ("rope.dimension_count_swa", local_dim),
    ] {
        if let Some(n) = optional(name)?.filter(|n| *n != dim) {
            return Err(format!("`{}` is {n}, but heads have {dim}", key(name)));
        }
    }
    if let Some(kind) = metadata.text(&key("rope.scaling.type")).filter(|kind| *kind != "none") {
        return Err(format!("`{}` is {kind}, which is not supported", key("rope.scaling.type")));
    }
    let (window, types) = layer_types(metadata, ARCHITECTURE, layers)?;
    let kv_heads: Vec<i64> = match metadata.get(&key("attention.head_count_kv")) {
        Some(Stored::Ints(list)) if list.len() == layers => list.clone(),
        Some(Stored::Int(n)) => vec![*n; layers],
        None => vec![heads; layers],
        Some(_) => {
            return Err(format!("`{}` is of another length", key("attention.head_count_kv")));
        }
    };
    let is_global = |i: &usize| types[*i] == "full_attention";
    let own = |(i, kv): (usize, &i64)| {
        let dim = if is_global(&i) { global_dim } else { local_dim };
        (i.to_string(), json!({"head_dim": dim, "num_key_value_heads": kv}))
    };
    let own_heads: Map<String, Value> = kv_heads.iter().enumerate().map(own).collect();
    let values_are_keys = (0..layers).any(|i| is_global(&i) && !file.has(Role::V, i));
    let global_rope = json!({"rope_type": "proportional", "partial_rotary_factor": share(file)?,
        "rope_theta": float("rope.freq_base").unwrap_or(1e6)});
    let local_rope = json!({"rope_type": "default",
        "rope_theta": float("rope.freq_base_swa").unwrap_or(1e4)});
    let mut json = json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": values_are_keys,
        "bos_token_id": metadata.int(BOS.0).unwrap_or(BOS.1.into()),
        "enable_moe_block": optional("expert_count")?.unwrap_or(0) > 0,
        "eos_token_id": eos(metadata),
        "final_logit_softcapping": float("final_logit_softcapping").unwrap_or(LOGIT_CAP),
        "head_dim": local_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": needed("embedding_length")?,
        "hidden_size_per_layer_input": optional("embedding_length_per_layer_input")?.unwrap_or(0),
        "intermediate_size": needed("feed_forward_length")?,
        "layer_types": types,
        "max_position_embeddings": needed("context_length")?,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads[0],
        "num_kv_shared_layers": optional("attention.shared_kv_layers")?.unwrap_or(0),
        "pad_token_id": metadata.int(PAD.0).unwrap_or(PAD.1.into()),
        "per_layer_config": own_heads,
        "rms_norm_eps": decimal(float("attention.layer_norm_rms_epsilon").unwrap_or(1e-6)),
        "rope_parameters": {"full_attention": global_rope, "sliding_attention": local_rope},
        "tie_word_embeddings": !file.has(Role::Head, 0),
        "torch_dtype": "bfloat16",
    });
    if let Some(window) = window {
        json["sliding_window"] = window.into();
    }
    if let Some(rows) = file.vocab() {
        json["vocab_size"] = rows.into();
    }
    Ok(json)
}

/// Returns the share of the channels of a global layer's heads that turn.
fn share(file: &GgufModel<'_>) -> Result<f32, String> {
    let Some(divisors) = file.floats(ROPE_FREQS) else { return Ok(1.0) };
    let turning = divisors.iter().take_while(|d| **d == 1.0).count();
    match divisors[turning..].iter().all(|d| *d >= STILL) {
        true if turning > 0 => Ok(turning as f32 / divisors.len() as f32),
        _ => Err(format!("`{ROPE_FREQS}` scales frequencies, which is not supported")),
    }
}

/// Refuses: the file would need the tensor of the divisors, which no source has.
pub fn keys(_: &Config, _: &mut Keys) -> anyhow::Result<()> {
    Err(Fault::model("Gemma 4 models are not written as GGUF")
        .help("make a directory instead: a destination that does not end in .gguf")
        .into())
}
