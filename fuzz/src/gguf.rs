//! GGUF files that are made up of keys, values and tensors.

use super::made_up::{Cursor, raw_or};
use super::models::use_all;
use super::{DIRECTORY, file};
use gemma::checkpoint::{Checkpoint, gguf};
use gemma::models::{Special, Tokenizer};

/// Words that a made-up file consists of.
pub struct Words {
    pub keys: &'static [&'static str],
    pub texts: &'static [&'static str],
    /// Names of tensors.
    pub tensors: &'static [&'static str],
}

/// Words of a model.
const MODEL: Words = Words {
    keys: &KEYS,
    texts: &["gemma3", "gemma4", "llama", "a", "ab", "▁", "<bos>", "a b", "", "<0x41>"],
    tensors: &[
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_q.weight",
        "blk.0.ffn_up.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_up_exps.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_down_exps.weight",
    ],
};

/// Keys that this program reads.
const KEYS: [&str; 20] = [
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
    "gemma4.block_count",
    "gemma4.expert_count",
    "gemma4.expert_used_count",
    "gemma4.expert_feed_forward_length",
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

fn value(cursor: &mut Cursor<'_>, words: &Words, out: &mut Vec<u8>, kind: u32, deep: u8) {
    match kind {
        0 | 1 | 7 => out.push(cursor.byte()),
        2 | 3 => out.extend((cursor.number() as u16).to_le_bytes()),
        4..=6 => out.extend((cursor.number() as u32).to_le_bytes()),
        8 => text(out, cursor.one_of(words.texts)),
        9 if deep < 3 => {
            let (inner, count) = (u32::from(cursor.byte() % 14), u64::from(cursor.byte() % 9));
            let said = if cursor.byte() == 7 { cursor.number() } else { count };
            out.extend(inner.to_le_bytes());
            out.extend(said.to_le_bytes());
            (0..count).for_each(|_| value(cursor, words, out, inner, deep + 1));
        }
        _ => out.extend(cursor.number().to_le_bytes()),
    }
}

/// Returns a GGUF file that is well formed but may contain false values.
pub fn made_up_gguf(cursor: &mut Cursor<'_>, words: &Words, part: Option<(u32, u32)>) -> Vec<u8> {
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
        text(&mut out, cursor.one_of(words.keys));
        let kind = u32::from(cursor.byte() % 14);
        out.extend(kind.to_le_bytes());
        value(cursor, words, &mut out, kind, 0);
    }
    for _ in 0..tensors {
        text(&mut out, cursor.one_of(words.tensors));
        let dimensions = u32::from(cursor.byte() % 5);
        out.extend(dimensions.to_le_bytes());
        (0..dimensions).for_each(|_| out.extend(cursor.number().to_le_bytes()));
        out.extend(u32::from(cursor.byte() % 42).to_le_bytes());
        out.extend(cursor.number().to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32) + usize::from(cursor.byte()) * 64, 0x55);
    out
}

/// Opens a model as a file, and as the directory that its name suggests.
fn open(path: &std::path::Path) {
    if let Ok(checkpoint) = Checkpoint::open(path) {
        use_all(checkpoint);
    }
    let presented = Checkpoint::open(path).and_then(gemma::models::gguf::present);
    if let Ok(checkpoint) = presented {
        if let Ok(Some(bytes)) = checkpoint.side_file("tokenizer.json") {
            let _ = Tokenizer::from_bytes(&bytes).map(|t| t.encode("ab a", Special::Parse).is_ok());
        }
        use_all(checkpoint);
    }
}

pub fn whole(data: &[u8]) {
    let bytes = raw_or(data, |cursor| made_up_gguf(cursor, &MODEL, None));
    let _ = gguf::container::parse("x", &bytes);
    open(&file("x.gguf", &bytes));
}

/// Opens two files of one split model.
pub fn split(data: &[u8]) {
    let mut cursor = Cursor::new(data);
    let directory = DIRECTORY.join("split");
    std::fs::create_dir_all(&directory).expect("the directory has room");
    for number in 0..2u32 {
        let said = if cursor.byte() == 3 { u32::from(cursor.byte()) } else { number };
        let bytes = made_up_gguf(&mut cursor, &MODEL, Some((said, 2)));
        file(&format!("split/x-{:05}-of-00002.gguf", number + 1), &bytes);
    }
    open(&directory);
}
