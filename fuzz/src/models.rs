//! Containers of weights and their side files.

use super::made_up::{Cursor, edited, raw_or};
use super::texts::TOKENIZER;
use gemma::checkpoint::Checkpoint;
use gemma::models::{ChatTemplate, Config, Generation, ReducedVocabulary, Weights};
use gemma::util::json;
use serde_json::{Value, json};
use std::sync::LazyLock;

const CONFIG: &str = r#"{"model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 32, "eos_token_id": 1}"#;

/// Calls `look` with a checkpoint in memory: `config`, `weights` and the files `more`.
fn with_directory(
    config: &[u8],
    weights: &[u8],
    more: &[(&'static str, &[u8])],
    look: fn(Checkpoint),
) {
    let mut held = Vec::new();
    let mut hold = |bytes: &[u8]| -> &'static [u8] {
        let bytes = Box::into_raw(bytes.to_vec().into_boxed_slice());
        held.push(bytes);
        // SAFETY: freed below, after the checkpoint was dropped.
        unsafe { &*bytes }
    };
    let mut files = vec![("config.json", hold(config)), ("model.safetensors", hold(weights))];
    files.extend(more.iter().map(|(name, bytes)| (*name, hold(bytes))));
    if let Ok(checkpoint) = Checkpoint::from_memory("fuzzed", files) {
        look(checkpoint);
    }
    for bytes in held {
        // SAFETY: made by `into_raw` above, and no longer used.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

/// Reads all tensors and side files of a checkpoint.
pub fn use_all(checkpoint: Checkpoint) {
    for stored in checkpoint.stored() {
        let _ = checkpoint.tensor(&stored.name).map(|view| view.to_f32().is_ok());
        let _ = checkpoint.matrix(&stored.name).map(|matrix| matrix.bytes());
        let _ = checkpoint.stored_matrix(&stored.name).map(|stored| stored.format);
    }
    let _ = Generation::of(&checkpoint);
    let _ = Weights::open(checkpoint);
}

const DTYPES: [&str; 7] = ["F32", "BF16", "F16", "U8", "I8", "F64", "F8_E4M3"];

/// Returns a file with a header that is well formed but may contain false values, and some data.
fn made_up(cursor: &mut Cursor<'_>, names: &[&str]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for _ in 0..cursor.byte() % 5 {
        let dtype = cursor.one_of(&DTYPES);
        let shape: Vec<u64> = (0..cursor.byte() % 4).map(|_| cursor.number()).collect();
        let size = match dtype {
            "F32" => 4,
            "F64" => 8,
            "BF16" | "F16" => 2,
            _ => 1,
        };
        let true_end = shape.iter().fold(size, |n: u64, d| n.wrapping_mul(*d)).wrapping_add(end);
        let offsets = match cursor.byte() % 4 {
            0 => [cursor.number(), cursor.number()],
            _ => [end, true_end],
        };
        end = offsets[1];
        let name = cursor.one_of(names);
        header
            .insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
    }
    let header = Value::Object(header).to_string();
    let data = vec![cursor.byte(); (end % 70_000) as usize + usize::from(cursor.byte() % 2)];
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

pub fn safetensors(data: &[u8]) {
    let names = ["model.embed_tokens.weight", "model.norm.weight", "a"];
    let weights = raw_or(data, |cursor| made_up(cursor, &names));
    with_directory(CONFIG.as_bytes(), &weights, &[], use_all);
}

/// Opens a quantised model. Its formats and tensors need not match each other.
pub fn artifact(data: &[u8]) {
    const UP: &str = "model.layers.0.mlp.up_proj.weight";
    const FORMATS: [&str; 8] =
        ["i4-g32", "i8-row", "i3-row", "t2-row+h128", "t3-row+h128", "t4-row", "i4-row", "x"];
    let mut cursor = Cursor::new(data);
    let mut config: Value = serde_json::from_str(CONFIG).expect("a constant");
    config["quantization_config"] = json!({
        "quant_method": "gemma", "version": cursor.byte() % 4,
        "formats": {UP: cursor.one_of(&FORMATS), "model.norm.weight": cursor.one_of(&FORMATS)},
    });
    let names = [
        &format!("{UP}.codes"),
        &format!("{UP}.scales"),
        UP,
        "model.norm.weight.codes",
        "model.norm.weight",
    ];
    let weights = made_up(&mut cursor, &names);
    with_directory(config.to_string().as_bytes(), &weights, &[], use_all);
}

/// Fields of `config.json`.
const FIELDS: &str = "
    model_type text_config architectures num_hidden_layers hidden_size intermediate_size
    num_attention_heads num_key_value_heads head_dim vocab_size eos_token_id bos_token_id
    sliding_window sliding_window_pattern _sliding_window_pattern layer_types rope_parameters
    rope_scaling rope_theta rope_local_base_freq query_pre_attn_scalar rms_norm_eps
    final_logit_softcapping quantization_config enable_moe_block num_experts top_k_experts
    moe_intermediate_size";

/// Published configurations: the newer form, the older one, Gemma 4's and that of its mixture of
/// experts.
static CONFIGS: LazyLock<[Value; 4]> = LazyLock::new(|| {
    let text = json!({
        "model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": 99, "eos_token_id": [1, 5], "sliding_window": 16,
        "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    });
    let mut old = json!({
        "model_type": "gemma3", "text_config": text,
        "quantization_config": {
            "quant_method": "gemma", "version": 2, "formats": {"a": "i4-g32"},
        },
    });
    let part = old["text_config"].as_object_mut().expect("it is one");
    part.retain(|name, _| !["layer_types", "rope_parameters"].contains(&name.as_str()));
    part.extend([
        ("rope_theta".into(), json!(1e6)),
        ("rope_local_base_freq".into(), json!(1e4)),
        ("rope_scaling".into(), json!({"rope_type": "linear", "factor": 8.0})),
        ("sliding_window_pattern".into(), json!(2)),
    ]);
    let gemma4: Value = serde_json::from_str(include_str!("gemma4.json")).expect("it is JSON");
    let mut mixture = gemma4.clone();
    mixture["text_config"].as_object_mut().expect("it is one").extend([
        ("enable_moe_block".into(), json!(true)),
        ("num_experts".into(), json!(8)),
        ("top_k_experts".into(), json!(3)),
        ("moe_intermediate_size".into(), json!(32)),
    ]);
    [text, old, gemma4, mixture]
});

pub fn config(data: &[u8]) {
    let bytes = raw_or(data, |cursor| {
        let base = &CONFIGS[cursor.index(CONFIGS.len())];
        edited(cursor, base, FIELDS)
    });
    if let Ok(value) = json::parse(&bytes) {
        let _ = Config::from_json(&value);
    }
    with_directory(&bytes, &2u64.to_le_bytes(), &[], use_all);
}

/// The files with sampling options and with the chat template.
pub fn generation(data: &[u8]) {
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        json!({
            "temperature": 0.7, "top_k": 64, "top_p": 0.95, "min_p": 0.0,
            "repetition_penalty": 1.1, "eos_token_id": [1, 5], "do_sample": true,
            "bos_token": {"content": "<bos>"}, "eos_token": "<eos>",
            "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
        })
    });
    let bytes = raw_or(data, |cursor| edited(cursor, &BASE, "content template name top_k"));
    let weights = [&2u64.to_le_bytes(), &b"{}"[..]].concat();
    let files = [("generation_config.json", &bytes[..]), ("tokenizer_config.json", &bytes)];
    with_directory(CONFIG.as_bytes(), &weights, &files, |checkpoint| {
        let _ = Generation::of(&checkpoint);
        let _ = ChatTemplate::from_checkpoint(&checkpoint, &gemma::models::gemma3::DIALECT);
    });
}

/// The vocabulary of a draft model.
pub fn vocabulary(data: &[u8]) {
    const ROWS: usize = 8;
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        json!({
            "tokenizer": {"first": 6, "end": 300, "sha256": "", "control": {"<bos>": 2}},
            "parts": 4, "steps": [2, 1, 3, 60, 1, 1, 7, 200],
        })
    });
    let bytes = raw_or(data, |cursor| edited(cursor, &BASE, "<eos> first parts"));
    let Ok(vocabulary) = ReducedVocabulary::parse(&bytes, ROWS) else { return };
    let _ = vocabulary.mismatch(&TOKENIZER);
    // The digest refuses a vocabulary of another tokenizer before this point.
    let map = vocabulary.spelling(&TOKENIZER);
    for token in 0..map.vocab() as u32 {
        let back = map.row(token).map(|row| map.token(row));
        assert!(back.is_none_or(|back| back == token), "a row stands for one token");
        let mut rows = Vec::new();
        map.spell(token, &mut rows);
        assert!((1..=map.most_parts()).contains(&rows.len()));
        assert!(rows.iter().all(|row| (*row as usize) < map.rows()));
    }
}
