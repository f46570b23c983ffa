//! Reads and writes the keys of GGUF files with the architectures `gemma4` and `gemma4-assistant`.
//! Source: ggml-org/llama.cpp, conversion of `Gemma4ForConditionalGeneration`,
//! src/models/gemma4.cpp and src/models/gemma4-assistant.cpp.

use crate::checkpoint::gguf::write::Keys;
use crate::checkpoint::gguf::{Metadata, Value as Stored};
use crate::models::gguf::{BOS, GgufModel, PAD, decimal, eos, whole};
use crate::models::{Config, LayerSpec, Role};
use gemma_base::error::Fault;
use serde_json::{Map, Value, json};

/// Divisors of the global layers' frequencies: 1 for rotated channels.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// Divisor for channels that are not rotated, as llama.cpp's converter writes it.
const STILL: f32 = 1e30;
/// Smallest divisor that is read as "not rotated".
const LEAST_STILL: f32 = 1e29;
/// llama.cpp's soft cap for a file that does not specify it.
const LOGIT_CAP: f64 = 30.0;
/// llama.cpp's rotation base for a file that does not specify it.
const THETA: f64 = 1e4;

/// Tensors that the assistant of an edge model uses to look up logits, in both naming schemes.
const CENTROIDS: [&str; 2] = ["masked_embd_centroids.weight", "mtp.centroids.weight"];

/// Reads the keys of a file and checks their types.
struct Gemma4Keys<'a> {
    metadata: &'a Metadata,
    /// Name of the architecture, the first part of its keys.
    architecture: &'a str,
}

impl Gemma4Keys<'_> {
    /// Returns the full name of a key.
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn optional(&self, name: &str) -> Result<Option<i64>, String> {
        whole(self.metadata, &self.key(name))
    }

    fn needed(&self, name: &str) -> Result<i64, String> {
        self.optional(name)?.ok_or_else(|| format!("`{}` is missing", self.key(name)))
    }

    fn float(&self, name: &str, default: f64) -> Result<f64, String> {
        let key = self.key(name);
        let value = match self.metadata.get(&key) {
            None => Some(default),
            Some(_) => self.metadata.float(&key),
        };
        value.filter(|v| v.is_finite()).ok_or_else(|| format!("`{key}` is not a number"))
    }

    /// Returns one number per layer. A single number applies to all layers.
    fn list(&self, name: &str, layers: usize) -> Result<Vec<i64>, String> {
        match self.metadata.get(&self.key(name)) {
            Some(Stored::Ints(list)) if list.len() == layers => Ok(list.clone()),
            Some(Stored::Int(n)) => Ok(vec![*n; layers]),
            None => Err(format!("`{}` is missing", self.key(name))),
            Some(_) => Err(format!("`{}` does not list {layers} whole numbers", self.key(name))),
        }
    }

    /// Returns the head dimensions of the global and of the local layers.
    fn head_dims(&self) -> Result<(i64, i64), String> {
        let global = self.needed("attention.key_length")?;
        let local = self.optional("attention.key_length_swa")?.unwrap_or(global);
        for (name, dim) in [
            ("attention.value_length", global),
            ("attention.value_length_swa", local),
            ("rope.dimension_count", global),
            ("rope.dimension_count_swa", local),
        ] {
            if let Some(n) = self.optional(name)?.filter(|n| *n != dim) {
                return Err(format!("`{}` is {n}, but heads have {dim}", self.key(name)));
            }
        }
        Ok((global, local))
    }

    fn refuse_scaled_rotation(&self) -> Result<(), String> {
        let kind = self.key("rope.scaling.type");
        if let Some(value) = self.metadata.text(&kind).filter(|value| *value != "none") {
            return Err(format!("`{kind}` is {value}, which is not supported"));
        }
        for name in ["rope.scaling.factor", "rope.scale_linear"] {
            let factor = self.float(name, 1.0)?;
            // Files use 0 for no factor.
            if factor != 0.0 && factor != 1.0 {
                return Err(format!("`{}` is {factor}, which is not supported", self.key(name)));
            }
        }
        Ok(())
    }
}

/// Returns the `config.json` equivalent of a file's keys.
pub fn config(file: &GgufModel<'_>) -> Result<Value, String> {
    let metadata = file.metadata;
    let reader = &reader(file);
    let key = |name: &str| reader.key(name);
    reader.refuse_scaled_rotation()?;
    let (layers, heads) = (reader.needed("block_count")?, reader.needed("attention.head_count")?);
    let layers = usize::try_from(layers).ok().filter(|n| (1..=1024).contains(n));
    let layers = layers.ok_or_else(|| format!("`{}` is not 1 to 1024", key("block_count")))?;
    let (global_dim, local_dim) = reader.head_dims()?;
    let kv_heads = match metadata.get(&key("attention.head_count_kv")) {
        None => vec![heads; layers],
        Some(_) => reader.list("attention.head_count_kv", layers)?,
    };
    let ffn = reader.list("feed_forward_length", layers)?;
    let is_local = reader.list("attention.sliding_window_pattern", layers)?;
    let is_global: Vec<bool> = is_local.into_iter().map(|local| local == 0).collect();
    if is_global.last() == Some(&false) {
        return Err("the last layer has a window, which is not supported".into());
    }
    let kind = |global: &bool| if *global { "full_attention" } else { "sliding_attention" };
    let own = |(i, kv): (usize, &i64)| {
        let dim = if is_global[i] { global_dim } else { local_dim };
        (i.to_string(), json!({"head_dim": dim, "num_key_value_heads": kv}))
    };
    let own_heads: Map<String, Value> = kv_heads.iter().enumerate().map(own).collect();
    let shared = reader.optional("attention.shared_kv_layers")?.unwrap_or(0);
    let per_layer = reader.optional("embedding_length_per_layer_input")?.unwrap_or(0);
    let experts = reader.optional("expert_count")?.unwrap_or(0);
    let cap = reader.float("final_logit_softcapping", LOGIT_CAP)?;
    let global_rope = json!({"rope_type": "proportional",
        "partial_rotary_factor": share(file, global_dim)?,
        "rope_theta": reader.float("rope.freq_base", THETA)?});
    let local_rope =
        json!({"rope_type": "default", "rope_theta": reader.float("rope.freq_base_swa", THETA)?});
    let mut json = json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        // The file does not say. Only models with per-layer embeddings differ.
        "use_bidirectional_attention": if per_layer == 0 { json!("vision") } else { Value::Null },
        "attention_k_eq_v": shared == 0 && values_are_keys(file, &is_global)?,
        "bos_token_id": metadata.int(BOS.0).unwrap_or(BOS.1.into()),
        "enable_moe_block": experts != 0,
        "num_experts": (experts != 0).then_some(experts),
        "top_k_experts": reader.optional("expert_used_count")?,
        // A key of this program: Hugging Face's files always have fused experts.
        "separate_experts": experts != 0 && file.has(Role::ExpertGate, 0),
        "moe_intermediate_size": reader.optional("expert_feed_forward_length")?,
        "eos_token_id": eos(metadata),
        "final_logit_softcapping": (cap != 0.0).then_some(cap),
        "head_dim": local_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": reader.needed("embedding_length")?,
        "hidden_size_per_layer_input": per_layer,
        "intermediate_size": ffn[0],
        "layer_types": is_global.iter().map(kind).collect::<Vec<_>>(),
        "max_position_embeddings": reader.needed("context_length")?,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads[0],
        "num_kv_shared_layers": shared,
        "pad_token_id": metadata.int(PAD.0).unwrap_or(PAD.1.into()),
        "per_layer_config": own_heads,
        "rms_norm_eps": decimal(reader.float("attention.layer_norm_rms_epsilon", 1e-6)?),
        "rope_parameters": {"full_attention": global_rope, "sliding_attention": local_rope},
        "sliding_window": reader.needed("attention.sliding_window")?,
        "tie_word_embeddings": !file.has(Role::Head, 0),
        "torch_dtype": "bfloat16",
        "use_double_wide_mlp": ffn.iter().any(|n| *n != ffn[0]),
    });
    if let Some(rows) = file.vocab() {
        json["vocab_size"] = rows.into();
    }
    Ok(json)
}

fn reader<'a>(file: &GgufModel<'a>) -> Gemma4Keys<'a> {
    let architecture = file.metadata.text("general.architecture").unwrap_or_default();
    Gemma4Keys { metadata: file.metadata, architecture }
}

/// Returns the `config.json` equivalent of the keys of an assistant's file.
pub fn assistant_config(file: &GgufModel<'_>) -> Result<Value, String> {
    let mut text = config(file)?;
    let reader = reader(file);
    if text["num_kv_shared_layers"].as_i64() == Some(0) {
        text["num_kv_shared_layers"] = text["num_hidden_layers"].clone();
    }
    let backbone = match reader.optional("n_embd_backbone")? {
        Some(n) => n,
        None => reader.needed("embedding_length_out")?,
    };
    Ok(json!({
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": CENTROIDS.iter().any(|name| file.has_tensor(name)),
        "text_config": text,
    }))
}

/// Returns whether the global layers have no value matrix.
fn values_are_keys(file: &GgufModel<'_>, is_global: &[bool]) -> Result<bool, String> {
    let global = || (0..is_global.len()).filter(|i| is_global[*i]);
    match global().filter(|i| file.has(Role::V, *i)).count() {
        0 => Ok(true),
        n if n == global().count() => Ok(false),
        _ => Err("some of the layers without a window have `attn_v`, and others do not".into()),
    }
}

/// Returns the share of channels that are rotated in the heads of global layers.
fn share(file: &GgufModel<'_>, head_dim: i64) -> Result<f32, String> {
    let divisors = file.floats(ROPE_FREQS);
    let divisors = divisors.ok_or_else(|| format!("`{ROPE_FREQS}` is missing, or in blocks"))?;
    if usize::try_from(head_dim / 2) != Ok(divisors.len()) {
        let n = divisors.len();
        return Err(format!("`{ROPE_FREQS}` has {n} numbers, but heads have {head_dim}"));
    }
    let turning = divisors.iter().take_while(|d| **d == 1.0).count();
    match divisors[turning..].iter().all(|d| *d >= LEAST_STILL) {
        true if turning > 0 => Ok(turning as f32 / divisors.len() as f32),
        _ => Err(format!("`{ROPE_FREQS}` scales frequencies, which is not supported")),
    }
}

/// Adds the keys of the architecture, and the divisors of the global layers' frequencies. Fails for
/// a model that llama.cpp would compute differently.
pub fn keys(c: &Config, keys: &mut Keys) -> anyhow::Result<()> {
    let key = |name: &str| format!("{}.{name}", c.architecture.gguf());
    let (local, global) = layers(c)?;
    for (name, n) in [
        ("context_length", c.max_position),
        ("embedding_length", c.dim),
        ("embedding_length_per_layer_input", 0),
        ("block_count", c.layers.len()),
        ("feed_forward_length", c.ffn_dim),
        ("attention.head_count", global.n_heads),
        ("attention.key_length", global.head_dim),
        ("attention.key_length_swa", local.head_dim),
        ("attention.value_length", global.head_dim),
        ("attention.value_length_swa", local.head_dim),
        ("attention.shared_kv_layers", if c.backbone.is_some() { c.layers.len() } else { 0 }),
        // Unused if there is no sliding-window layer.
        ("attention.sliding_window", local.window.unwrap_or(1)),
        ("rope.dimension_count", global.head_dim),
        ("rope.dimension_count_swa", local.head_dim),
        ("vocab_size", c.vocab),
    ] {
        keys.u32(&key(name), u32::try_from(n)?);
    }
    let kv_heads: Vec<i32> = c.layers.iter().map(|layer| layer.n_kv_heads as i32).collect();
    keys.i32s(&key("attention.head_count_kv"), &kv_heads);
    let is_local: Vec<bool> = c.layers.iter().map(|layer| !layer.is_global()).collect();
    keys.bools(&key("attention.sliding_window_pattern"), &is_local);
    if let Some(experts) = c.experts {
        for (name, n) in [
            ("expert_count", experts.count),
            ("expert_used_count", experts.used),
            ("expert_feed_forward_length", experts.width),
        ] {
            keys.u32(&key(name), u32::try_from(n)?);
        }
    }
    keys.f32(&key("attention.layer_norm_rms_epsilon"), c.eps);
    keys.f32(&key("final_logit_softcapping"), c.logit_cap.unwrap_or(0.0));
    if let Some(backbone) = c.backbone {
        keys.u32(&key("embedding_length_out"), u32::try_from(backbone)?);
        keys.u32(&key("nextn_predict_layers"), u32::try_from(c.layers.len())?);
    }
    keys.f32(&key("rope.freq_base"), global.rope.theta);
    keys.f32(&key("rope.freq_base_swa"), local.rope.theta);
    let mut divisors = vec![STILL; global.head_dim / 2];
    divisors[..global.rope.turning(global.head_dim)].fill(1.0);
    keys.vector(ROPE_FREQS, divisors);
    Ok(())
}

/// Returns the shapes of the local and of the global layers. Fails for a model that GGUF cannot
/// describe.
fn layers(c: &Config) -> anyhow::Result<(LayerSpec, LayerSpec)> {
    let global = c.layers[c.layers.len() - 1];
    let local = *c.layers.iter().find(|layer| !layer.is_global()).unwrap_or(&global);
    let differs = |layer: &LayerSpec| {
        let shape = if layer.is_global() { global } else { local };
        LayerSpec { n_kv_heads: shape.n_kv_heads, ..*layer } != shape
    };
    let turns = |LayerSpec { rope, head_dim, .. }: &LayerSpec, is_global| {
        rope.factor == 1.0
            && if is_global { rope.turning(*head_dim) > 0 } else { rope.share == 1.0 }
    };
    let what = if c.layers.iter().any(differs) || local.n_heads != global.n_heads {
        "its layers differ in their heads"
    } else if !c.layers.iter().all(|layer| turns(layer, layer.is_global())) {
        "its layers rotate otherwise than Gemma 4's"
    } else {
        return Ok((local, global));
    };
    Err(Fault::model(format!("the model cannot be written as GGUF: {what}"))
        .help("make a directory instead: a destination that does not end in .gguf")
        .into())
}
