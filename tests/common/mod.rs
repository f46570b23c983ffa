//! Tiny random Gemma 3 checkpoints in every published form. One seed gives the same weights in all
//! forms.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

pub mod gguf;
pub mod images;
pub mod pooled;
pub mod sighted;
pub mod trees;
pub mod twins;
pub mod vulkan;

use gemma::checkpoint::Dtype;
use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Shape of a model.
///
/// `Default` is the smallest shape with every feature: grouped heads, an odd window, local and
/// global layers.
#[derive(Clone, Debug)]
pub struct Dims {
    pub n_layers: usize,
    pub dim: usize,
    pub ffn_dim: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub window: usize,
    /// Every n-th layer is global.
    pub pattern: usize,
}

impl Default for Dims {
    fn default() -> Self {
        Dims {
            n_layers: 4,
            dim: 128,
            ffn_dim: 256,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 32,
            vocab: 160,
            window: 13,
            pattern: 3,
        }
    }
}

/// Form of a checkpoint: the names of its tensors and the spelling of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `Gemma3ForCausalLM`, transformers 4: `model.`
    TextV4,
    /// `Gemma3ForCausalLM`, transformers 5: `rope_parameters`, `layer_types`, `dtype`
    TextV5,
    /// `Gemma3ForConditionalGeneration` as on the hub: `language_model.model.`, `text_config`, a
    /// vision tower
    Multimodal,
    /// The same, saved with the names in memory: `model.language_model.`, transformers 5
    MultimodalV5,
    /// The text model alone: no prefix
    Bare,
}

impl Form {
    pub const ALL: [Form; 5] =
        [Form::TextV4, Form::TextV5, Form::Multimodal, Form::MultimodalV5, Form::Bare];

    pub fn prefix(self) -> &'static str {
        match self {
            Form::TextV4 | Form::TextV5 => "model.",
            Form::Multimodal => "language_model.model.",
            Form::MultimodalV5 => "model.language_model.",
            Form::Bare => "",
        }
    }
}

/// A tensor to write: name, shape, values.
pub type Named = (String, Vec<usize>, Vec<f32>);

/// A random model.
#[derive(Clone, Debug)]
pub struct TinyModel {
    pub dims: Dims,
    /// Names without prefix.
    pub tensors: Vec<Named>,
}

impl TinyModel {
    pub fn new(dims: Dims, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut tensors = Vec::new();
        let d = &dims;
        let (q, kv) = (d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim);
        let mut add = |name: String, shape: &[usize]| {
            let limit = if shape.len() == 1 { 0.25 } else { (3.0 / shape[1] as f32).sqrt() };
            let values = (0..shape.iter().product())
                .map(|_| exact(rng.random_range(-limit..limit)))
                .collect();
            tensors.push((name, shape.to_vec(), values));
        };
        add("embed_tokens.weight".into(), &[d.vocab, d.dim]);
        for layer in 0..d.n_layers {
            for (name, shape) in [
                ("input_layernorm", &[d.dim][..]),
                ("self_attn.q_proj", &[q, d.dim]),
                ("self_attn.k_proj", &[kv, d.dim]),
                ("self_attn.v_proj", &[kv, d.dim]),
                ("self_attn.o_proj", &[d.dim, q]),
                ("self_attn.q_norm", &[d.head_dim]),
                ("self_attn.k_norm", &[d.head_dim]),
                ("post_attention_layernorm", &[d.dim]),
                ("pre_feedforward_layernorm", &[d.dim]),
                ("mlp.gate_proj", &[d.ffn_dim, d.dim]),
                ("mlp.up_proj", &[d.ffn_dim, d.dim]),
                ("mlp.down_proj", &[d.dim, d.ffn_dim]),
                ("post_feedforward_layernorm", &[d.dim]),
            ] {
                add(format!("layers.{layer}.{name}.weight"), shape);
            }
        }
        add("norm.weight".into(), &[d.dim]);
        TinyModel { dims, tensors }
    }

    /// Returns a model of the default shape.
    pub fn tiny(seed: u64) -> Self {
        Self::new(Dims::default(), seed)
    }

    /// Returns `config.json` in this form.
    pub fn config(&self, form: Form) -> Value {
        let d = &self.dims;
        let mut text = json!({
            "model_type": "gemma3_text", "hidden_size": d.dim, "intermediate_size": d.ffn_dim,
            "num_hidden_layers": d.n_layers,
            "num_attention_heads": d.n_heads, "num_key_value_heads": d.n_kv_heads,
            "head_dim": d.head_dim,
            "query_pre_attn_scalar": 21, "sliding_window": d.window, "vocab_size": d.vocab,
            "max_position_embeddings": 4096,
        });
        let v5 = matches!(form, Form::TextV5 | Form::MultimodalV5);
        let extra = if v5 {
            let kind = |i: usize| {
                if i.is_multiple_of(d.pattern) { "full_attention" } else { "sliding_attention" }
            };
            json!({
                "dtype": "bfloat16",
                "layer_types": (1..=d.n_layers).map(kind).collect::<Vec<_>>(),
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0,
                        "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            })
        } else {
            json!({"sliding_window_pattern": d.pattern, "rope_scaling": {"factor": 8.0,
                "rope_type": "linear"}})
        };
        merge(&mut text, &extra);
        match form {
            Form::TextV4 | Form::TextV5 | Form::Bare => {
                merge(
                    &mut text,
                    &json!({"architectures": ["Gemma3ForCausalLM"], "bos_token_id": 2,
                        "eos_token_id": [1, 106]}),
                );
                text
            }
            Form::Multimodal | Form::MultimodalV5 => json!({
                "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "eos_token_id": [1, 106],
                "boi_token_index": 255999, "image_token_index": 262144, "mm_tokens_per_image": 256,
                "text_config": text, "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
            }),
        }
    }

    /// Returns the tensors with the names of this form, including a vision tower if the form has
    /// one.
    pub fn named(&self, form: Form) -> Vec<Named> {
        let mut out: Vec<Named> = Vec::new();
        let vision = match form {
            Form::Multimodal => Some([
                "vision_tower.vision_model.post_layernorm.weight",
                "multi_modal_projector.mm_soft_emb_norm.weight",
            ]),
            Form::MultimodalV5 => Some([
                "model.vision_tower.post_layernorm.weight",
                "model.multi_modal_projector.mm_soft_emb_norm.weight",
            ]),
            _ => None,
        };
        out.extend(
            vision.into_iter().flatten().map(|name| (name.to_string(), vec![8], vec![0.5; 8])),
        );
        out.extend(self.tensors.iter().map(|(name, shape, values)| {
            (format!("{}{name}", form.prefix()), shape.clone(), values.clone())
        }));
        out
    }

    /// Writes a complete directory: `model.safetensors`, or several files with an index if `shards`
    /// is more than 1.
    pub fn write(&self, dir: &Path, form: Form, dtype: Dtype, shards: usize) {
        write_model(dir, &self.config(form), &self.named(form), dtype, shards);
        let generation =
            json!({"do_sample": true, "eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95});
        fs::write(dir.join("generation_config.json"), generation.to_string()).unwrap();
    }
}

/// Returns the nearest value that f32, f16 and bf16 represent exactly.
fn exact(v: f32) -> f32 {
    let v = bf16::from_f32(v).to_f32();
    if v.abs() < 1.0 / 1024.0 { 0.0 } else { v }
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().unwrap() {
        into[key] = value.clone();
    }
}

/// Writes config and weights.
pub fn write_model(dir: &Path, config: &Value, tensors: &[Named], dtype: Dtype, shards: usize) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), serde_json::to_string_pretty(config).unwrap()).unwrap();
    if shards == 1 {
        fs::write(dir.join("model.safetensors"), safetensors(tensors, dtype)).unwrap();
        return;
    }
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
        fs::write(dir.join(&file), safetensors(part, dtype)).unwrap();
        map.extend(part.iter().map(|(name, _, _)| (name.clone(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Returns the bytes of a safetensors file.
pub fn safetensors(tensors: &[Named], dtype: Dtype) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, shape, values) in tensors {
        let begin = data.len();
        for v in values {
            match dtype {
                Dtype::F32 => data.extend(v.to_le_bytes()),
                Dtype::F16 => data.extend(f16::from_f32(*v).to_le_bytes()),
                Dtype::BF16 => data.extend(bf16::from_f32(*v).to_le_bytes()),
                other => panic!("{other} is no weight dtype"),
            }
        }
        header.insert(
            name.clone(),
            json!({"dtype": dtype.to_string(), "shape": shape,
            "data_offsets": [begin, data.len()]}),
        );
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// Returns a file with this header, valid or not, and this data.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// Writes a random model of Gemma 4's shape and its assistant next to it, both from the golden
/// vectors, and a tokenizer of single characters. Returns the model's directory.
pub fn write_gemma4_pair(dir: &Path) -> PathBuf {
    write_gemma4_pair_of(dir, "gemma4-unified")
}

/// The same, with another golden model that the assistant fits.
pub fn write_gemma4_pair_of(dir: &Path, name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let (model, assistant) = (dir.join("model"), dir.join("model-assistant"));
    for (from, to) in [(name, &model), ("assistant-unified", &assistant)] {
        fs::create_dir_all(to).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(from).join(name), to.join(name)).unwrap();
        }
    }
    let text = fs::read(golden.join("gemma4/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    // Keeps the special tokens up to the end of a turn. Characters follow.
    let is_kept = |id: u64| id <= 106;
    json["added_tokens"].as_array_mut().unwrap().retain(|t| is_kept(t["id"].as_u64().unwrap()));
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| is_kept(id.as_u64().unwrap()));
    let characters = std::iter::once('\u{2581}').chain('!'..='~').chain(['\n']);
    for (i, character) in characters.enumerate() {
        vocab.insert(character.to_string(), json!(107 + i));
    }
    json["model"]["merges"] = json!([]);
    fs::write(model.join("tokenizer.json"), json.to_string()).unwrap();
    model
}
