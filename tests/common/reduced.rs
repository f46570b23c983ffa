//! A tokenizer of 320 pieces, and the vocabulary of a draft model that has rows for some of them.

#![allow(dead_code)]

use gemma::models::{ReducedVocabulary, Tokenizer, VocabMap};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Pieces of text are `FIRST..END`. Bytes come before them.
pub const FIRST: usize = 262;
pub const END: usize = 320;
const CONTROL: [&str; 6] = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"];

/// Returns the tokenizer: single letters, then words of two or three letters.
///
/// `other` swaps two words.
pub fn tokenizer(other: bool) -> Tokenizer {
    let mut pieces: Vec<String> = CONTROL.map(str::to_owned).to_vec();
    pieces.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    pieces.extend(["▁", "a", "b", "c", "d"].map(str::to_owned));
    let mut merges = Vec::new();
    'all: for left in ["a", "b", "c", "d", "ab", "cd", "▁", "ac", "bd"] {
        for right in ["a", "b", "c", "d", "ab", "cd"] {
            let piece = format!("{left}{right}");
            if pieces.len() == END {
                break 'all;
            }
            if !pieces.contains(&piece) {
                merges.push(json!([left, right]));
                pieces.push(piece);
            }
        }
    }
    while pieces.len() < END {
        pieces.push(format!("é{}", pieces.len()));
    }
    if other {
        pieces.swap(END - 1, END - 2);
    }
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(i, p)| (p.clone(), i.into())).collect();
    let added: Vec<Value> = CONTROL
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

/// Returns the tokens of the draft: control tokens, bytes, and every third piece of text.
pub fn tokens() -> Vec<u32> {
    (0..END as u32).filter(|t| (*t as usize) < FIRST + 5 || t % 3 == 0).collect()
}

/// Returns the vocabulary file of the draft model.
pub fn file(tokenizer: &Tokenizer) -> Value {
    let mut hash = Sha256::new();
    for token in FIRST..END {
        let bytes = tokenizer.token_bytes(token as u32);
        hash.update((bytes.len() as u32).to_le_bytes());
        hash.update(&bytes);
    }
    let sha256: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    let tokens = tokens();
    let steps: Vec<u32> =
        std::iter::once(tokens[0]).chain(tokens.windows(2).map(|w| w[1] - w[0])).collect();
    json!({"tokenizer": {"first": FIRST, "end": END, "sha256": sha256, "control": {"<bos>": 2}},
        "parts": 2, "steps": steps})
}

pub fn vocabulary(tokenizer: &Tokenizer) -> ReducedVocabulary {
    ReducedVocabulary::parse(file(tokenizer).to_string().as_bytes(), tokens().len()).unwrap()
}

pub fn spelling() -> VocabMap {
    let tokenizer = tokenizer(false);
    vocabulary(&tokenizer).spelling(&tokenizer)
}
