//! Containers of weights and the files beside them.

use super::{Cursor, DIRECTORY, file};
use gemma::checkpoint::{Checkpoint, gguf};
use gemma::models::{Config, Generation, Tokenizer, Weights};
use gemma::util::json;
use serde_json::{Value, json};

const CONFIG: &str = r#"{"model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 32, "eos_token_id": 1}"#;

/// A directory of two files in memory, until `look` is done with it.
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
        // SAFETY: freed below, when nothing has the checkpoint any more.
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

/// Uses whatever a checkpoint offers.
fn use_all(checkpoint: Checkpoint) {
    for stored in checkpoint.stored() {
        let _ = checkpoint.tensor(&stored.name).map(|view| view.to_f32().is_ok());
        let _ = checkpoint.matrix(&stored.name).map(|matrix| matrix.bytes());
        let _ = checkpoint.stored_matrix(&stored.name).map(|stored| stored.format);
    }
    let _ = Generation::of(&checkpoint);
    let _ = Weights::open(checkpoint);
}

const DTYPES: [&str; 7] = ["F32", "BF16", "F16", "U8", "I8", "F64", "F8_E4M3"];

/// A header that is well formed and may lie, with some data behind it.
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

/// The bytes of a file as they are, or behind an even first byte a header made up of them.
pub fn safetensors(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else { return };
    let names = ["model.embed_tokens.weight", "model.norm.weight", "a"];
    let weights = if how % 2 == 0 { made_up(&mut Cursor(rest), &names) } else { rest.to_vec() };
    with_directory(CONFIG.as_bytes(), &weights, &[], use_all);
}

/// A quantised model whose formats and tensors need not fit each other.
pub fn artifact(data: &[u8]) {
    const UP: &str = "model.layers.0.mlp.up_proj.weight";
    const FORMATS: [&str; 8] =
        ["i4-g32", "i8-row", "i3-row", "t2-row+h128", "t3-row+h128", "t4-row", "i4-row", "x"];
    let mut cursor = Cursor(data);
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

pub fn config(data: &[u8]) {
    if let Ok(value) = json::parse(data) {
        let _ = Config::from_json(&value);
    }
    with_directory(data, &2u64.to_le_bytes(), &[], use_all);
}

pub fn generation(data: &[u8]) {
    let weights = [&2u64.to_le_bytes(), &b"{}"[..]].concat();
    let files = [("generation_config.json", data), ("tokenizer_config.json", data)];
    with_directory(CONFIG.as_bytes(), &weights, &files, |checkpoint| {
        let _ = Generation::of(&checkpoint);
        let _ = gemma::models::ChatTemplate::from_checkpoint(&checkpoint, false);
    });
}

/// Keys that this program reads.
const KEYS: [&str; 16] = [
    "general.architecture",
    "general.alignment",
    "gemma3.block_count",
    "gemma3.embedding_length",
    "gemma3.feed_forward_length",
    "gemma3.attention.head_count",
    "gemma3.attention.head_count_kv",
    "gemma3.attention.key_length",
    "gemma3.attention.sliding_window",
    "gemma3.context_length",
    "gemma3.rope.freq_base",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
];

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn value(cursor: &mut Cursor<'_>, out: &mut Vec<u8>, kind: u32, deep: u8) {
    match kind {
        0 | 1 | 7 => out.push(cursor.byte()),
        2 | 3 => out.extend((cursor.number() as u16).to_le_bytes()),
        4..=6 => out.extend((cursor.number() as u32).to_le_bytes()),
        8 => {
            let words = ["gemma3", "llama", "a", "ab", "▁", "<bos>", "a b", "", "<0x41>"];
            text(out, cursor.one_of(&words));
        }
        9 if deep < 3 => {
            let (inner, count) = (u32::from(cursor.byte() % 14), u64::from(cursor.byte() % 9));
            let said = if cursor.byte() == 7 { cursor.number() } else { count };
            out.extend(inner.to_le_bytes());
            out.extend(said.to_le_bytes());
            (0..count).for_each(|_| value(cursor, out, inner, deep + 1));
        }
        _ => out.extend(cursor.number().to_le_bytes()),
    }
}

/// A GGUF file that is well formed and may lie.
fn made_up_gguf(cursor: &mut Cursor<'_>, part: Option<(u32, u32)>) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    let (keys, tensors) = (u64::from(cursor.byte() % 20), u64::from(cursor.byte() % 5));
    let lie = if cursor.byte() == 9 { cursor.number() } else { 0 };
    out.extend((2 + u32::from(cursor.byte() % 2)).to_le_bytes());
    out.extend(tensors.wrapping_add(lie).to_le_bytes());
    let more = if part.is_some() { 2 } else { 0 };
    out.extend((keys + more).to_le_bytes());
    if let Some((number, count)) = part {
        for (key, value) in [("split.no", number), ("split.count", count)] {
            text(&mut out, key);
            out.extend(4u32.to_le_bytes());
            out.extend(value.to_le_bytes());
        }
    }
    for _ in 0..keys {
        text(&mut out, cursor.one_of(&KEYS));
        let kind = u32::from(cursor.byte() % 14);
        out.extend(kind.to_le_bytes());
        value(cursor, &mut out, kind, 0);
    }
    let names =
        ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"];
    for _ in 0..tensors {
        text(&mut out, cursor.one_of(&names));
        let dimensions = u32::from(cursor.byte() % 5);
        out.extend(dimensions.to_le_bytes());
        (0..dimensions).for_each(|_| out.extend(cursor.number().to_le_bytes()));
        out.extend(u32::from(cursor.byte() % 42).to_le_bytes());
        out.extend(cursor.number().to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32) + usize::from(cursor.byte()) * 64, 0x55);
    out
}

fn open(path: &std::path::Path) {
    if let Ok(checkpoint) = Checkpoint::open(path) {
        use_all(checkpoint);
    }
    let presented = Checkpoint::open(path).and_then(gemma::models::gguf::present);
    if let Ok(checkpoint) = presented {
        if let Ok(Some(bytes)) = checkpoint.side_file("tokenizer.json") {
            let _ = Tokenizer::from_bytes(&bytes)
                .map(|t| t.encode("ab a", gemma::models::Special::Parse).is_ok());
        }
        use_all(checkpoint);
    }
}

pub fn gguf(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else { return };
    let bytes = if how % 2 == 0 { made_up_gguf(&mut Cursor(rest), None) } else { rest.to_vec() };
    let _ = gguf::container::parse("x", &bytes);
    open(&file("x.gguf", &bytes));
}

pub fn gguf_split(data: &[u8]) {
    let mut cursor = Cursor(data);
    let directory = DIRECTORY.join("split");
    std::fs::create_dir_all(&directory).expect("room in /dev/shm");
    for number in 0..2u32 {
        let said = if cursor.byte() == 3 { u32::from(cursor.byte()) } else { number };
        let bytes = made_up_gguf(&mut cursor, Some((said, 2)));
        file(&format!("split/x-{:05}-of-00002.gguf", number + 1), &bytes);
    }
    open(&directory);
}
