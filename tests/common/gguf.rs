//! A second writer of GGUF files. It shares no code with the program's own writer, and can also
//! write invalid files.

#![allow(dead_code)]

use super::{Dims, Form, TinyModel};
use gemma::checkpoint::Dtype;
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::Weights;
use gemma::tensor::Matrix;
use half::{bf16, f16};
use serde_json::Value as Json;
use std::fs;
use std::path::{Path, PathBuf};

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Val {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
    U16(u16),
    /// Number of a type, and bytes, valid or not.
    Raw(u32, Vec<u8>),
}

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

fn array(kind: u32, n: usize, bytes: Vec<u8>) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(n as u64).to_le_bytes(), &bytes].concat()
}

impl Val {
    fn bytes(&self) -> (u32, Vec<u8>) {
        match self {
            Val::U16(v) => (2, v.to_le_bytes().to_vec()),
            Val::U32(v) => (4, v.to_le_bytes().to_vec()),
            Val::F32(v) => (6, v.to_le_bytes().to_vec()),
            Val::Bool(v) => (7, vec![*v as u8]),
            Val::Str(v) => (8, string(v)),
            Val::Strs(v) => (9, array(8, v.len(), v.iter().flat_map(|s| string(s)).collect())),
            Val::F32s(v) => {
                (9, array(6, v.len(), v.iter().flat_map(|x| x.to_le_bytes()).collect()))
            }
            Val::I32s(v) => {
                (9, array(5, v.len(), v.iter().flat_map(|x| x.to_le_bytes()).collect()))
            }
            Val::Bools(v) => (9, array(7, v.len(), v.iter().map(|x| u8::from(*x)).collect())),
            Val::Raw(kind, v) => (*kind, v.clone()),
        }
    }
}

/// A tensor. Its first dimension is the innermost one, as in the file.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
}

#[derive(Clone, Debug)]
pub struct File {
    pub version: u32,
    pub alignment: usize,
    pub keys: Vec<(String, Val)>,
    pub tensors: Vec<Tensor>,
    /// Wrong offsets to write, by the tensor's index.
    pub offsets: Vec<(usize, u64)>,
}

impl Default for File {
    fn default() -> Self {
        File {
            version: 3,
            alignment: 32,
            keys: Vec::new(),
            tensors: Vec::new(),
            offsets: Vec::new(),
        }
    }
}

impl File {
    pub fn set(&mut self, key: &str, value: Val) {
        self.remove(key);
        self.keys.push((key.into(), value));
    }

    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(k, _)| k != key);
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            let (kind, bytes) = value.bytes();
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        let pad = |n: usize| n.div_ceil(self.alignment) * self.alignment;
        let mut data = Vec::new();
        for (i, t) in self.tensors.iter().enumerate() {
            let offset = self.offsets.iter().find(|o| o.0 == i).map_or(data.len() as u64, |o| o.1);
            out.extend(string(&t.name));
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            data.extend(&t.data);
            data.resize(pad(data.len()), 0);
        }
        out.resize(pad(out.len()), 0);
        out.extend(data);
        out
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}

/// Types by their number in the file.
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q4_0: u32 = 2;
pub const Q8_0: u32 = 8;
pub const BF16: u32 = 30;

/// Encodes plain floats.
pub fn floats(kind: u32, values: &[f32]) -> Vec<u8> {
    match kind {
        F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("type {other} is no float"),
    }
}

/// Encodes a matrix of this program with groups of 32, one weight after the other.
pub fn blocks(kind: u32, m: &Matrix<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    for row in 0..m.rows {
        for (group, scale) in m.row_side(row).chunks_exact(2).enumerate() {
            out.extend(scale);
            let code = |j: usize| m.code(row, 32 * group + j);
            match kind {
                Q4_0 => out
                    .extend((0..16).map(|j| (code(j) + 8) as u8 | ((code(j + 16) + 8) as u8) << 4)),
                Q8_0 => out.extend((0..32).map(|j| code(j) as i8 as u8)),
                other => panic!("type {other} is no block"),
            }
        }
    }
    out
}

/// Returns a tensor's name in a GGUF file. `name` is the Hugging Face name after `model.`.
pub fn name_of(name: &str) -> String {
    let inner = |n: &str| {
        [
            ("input_layernorm", "attn_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("layer_scalar", "layer_output_scale"),
            ("router.proj", "ffn_gate_inp"),
            ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
            ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
            ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
            ("experts.gate_up_proj", "ffn_gate_up_exps"),
            ("experts.down_proj", "ffn_down_exps"),
        ]
        .into_iter()
        .find(|(hf, _)| *hf == n)
        .unwrap()
        .1
    };
    match name.trim_end_matches(".weight") {
        "embed_tokens" => "token_embd.weight".into(),
        "norm" => "output_norm.weight".into(),
        "lm_head" => "output.weight".into(),
        layer => {
            let (number, rest) = layer.strip_prefix("layers.").unwrap().split_once('.').unwrap();
            match rest {
                "router.scale" => return format!("blk.{number}.ffn_gate_inp.scale"),
                "router.per_expert_scale" => return format!("blk.{number}.ffn_down_exps.scale"),
                _ => {}
            }
            format!("blk.{number}.{}.weight", inner(rest))
        }
    }
}

/// Returns the keys of a model of this shape, without its tokenizer.
pub fn keys(d: &Dims) -> Vec<(String, Val)> {
    let mut keys = vec![("general.architecture".to_string(), Val::Str("gemma3".into()))];
    for (key, n) in [
        ("context_length", 4096),
        ("embedding_length", d.dim),
        ("block_count", d.n_layers),
        ("feed_forward_length", d.ffn_dim),
        ("attention.head_count", d.n_heads),
        ("attention.head_count_kv", d.n_kv_heads),
        ("attention.key_length", d.head_dim),
        ("attention.value_length", d.head_dim),
        ("attention.sliding_window", d.window),
        ("attention.sliding_window_pattern", d.pattern),
    ] {
        keys.push((format!("gemma3.{key}"), Val::U32(n as u32)));
    }
    keys.push(("gemma3.attention.layer_norm_rms_epsilon".into(), Val::F32(1e-6)));
    keys.push(("gemma3.rope.freq_base".into(), Val::F32(1e6)));
    keys.push(("gemma3.rope.scaling.type".into(), Val::Str("linear".into())));
    keys.push(("gemma3.rope.scaling.factor".into(), Val::F32(8.0)));
    keys
}

/// Returns the keys of a tokenizer with `vocab` pieces, as converters make them from
/// `tokenizer.json`.
pub fn tokenizer_keys(json: &Json, vocab: usize) -> Vec<(String, Val)> {
    let (mut tokens, mut scores, mut types) =
        (vec![String::new(); vocab], vec![-1e6f32; vocab], vec![5; vocab]);
    for (piece, id) in json["model"]["vocab"].as_object().unwrap() {
        let id = id.as_u64().unwrap() as usize;
        let byte = piece.len() == 6 && piece.starts_with("<0x") && piece.ends_with('>');
        (tokens[id], types[id]) = (piece.clone(), if byte { 6 } else { 1 });
    }
    let id_of = |piece: &str| json["model"]["vocab"][piece].as_u64().unwrap() as usize;
    for added in json["added_tokens"].as_array().unwrap() {
        let (id, content) =
            (added["id"].as_u64().unwrap() as usize, added["content"].as_str().unwrap());
        let special = added["special"] == true || content.starts_with("<unused");
        tokens[id] = if special { content.into() } else { content.replace('▁', " ") };
        types[id] = if content == "<unk>" {
            2
        } else if special {
            3
        } else {
            4
        };
        scores[id] = -1000.0;
    }
    let mut rank = 0.0;
    for merge in json["model"]["merges"].as_array().unwrap() {
        let id = id_of(&format!("{}{}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
        if scores[id] == -1e6 {
            scores[id] = rank;
            rank -= 1.0;
        }
    }
    for (id, token) in tokens.iter_mut().enumerate().filter(|(_, t)| t.is_empty()) {
        (*token, scores[id]) = (format!("[PAD{id}]"), -10000.0);
    }
    let id = |key: &str, n| (format!("tokenizer.ggml.{key}_token_id"), Val::U32(n));
    vec![
        ("tokenizer.ggml.model".into(), Val::Str("llama".into())),
        ("tokenizer.ggml.pre".into(), Val::Str("default".into())),
        ("tokenizer.ggml.tokens".into(), Val::Strs(tokens)),
        ("tokenizer.ggml.scores".into(), Val::F32s(scores)),
        ("tokenizer.ggml.token_type".into(), Val::I32s(types)),
        id("bos", 2),
        id("eos", 1),
        id("unknown", 3),
        id("padding", 0),
        ("tokenizer.ggml.add_bos_token".into(), Val::Bool(true)),
    ]
}

/// Returns a complete model.
///
/// `matrix` gives the type and bytes of a matrix by its index in the model's list of tensors.
pub fn file(model: &TinyModel, matrix: impl Fn(usize) -> (u32, Vec<u8>)) -> File {
    let mut file = File { keys: keys(&model.dims), ..File::default() };
    for (i, (name, shape, values)) in model.tensors.iter().enumerate() {
        let (kind, data) = match shape.len() {
            1 => (F32, floats(F32, &values.iter().map(|v| v + 1.0).collect::<Vec<_>>())),
            _ => matrix(i),
        };
        let dims = shape.iter().rev().map(|n| *n as u64).collect();
        file.tensors.push(Tensor { name: name_of(name), dims, kind, data });
    }
    file
}

/// Returns a complete model of plain floats.
pub fn float_file(model: &TinyModel, kind: u32) -> File {
    file(model, |i| (kind, floats(kind, &model.tensors[i].2)))
}

/// Returns the logits of a fixed text as bits.
pub fn logits(weights: &Weights) -> Vec<u32> {
    let executor = CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    let options = EngineOptions { context: 64, kv: KvFormat::F32 };
    let mut engine = PlannedEngine::new(weights, Box::new(executor), options).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| 2 + i * 53 % 150).collect();
    let mut scores = Scores::default();
    engine.forward(&TokenTree::chain(&ids), Rows::All, &mut scores).unwrap();
    assert!(scores.logits.iter().any(|v| *v != 0.0));
    scores.logits.iter().map(|v| v.to_bits()).collect()
}

/// Writes a model as a directory. Its attention scale is the one that GGUF implies.
pub fn directory(model: &TinyModel, dir: &Path, dtype: Dtype) -> PathBuf {
    let path = dir.join(dtype.to_string());
    model.write(&path, Form::TextV4, dtype, 1);
    let file = path.join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["query_pre_attn_scalar"] = model.dims.head_dim.into();
    fs::write(file, config.to_string()).unwrap();
    path
}
