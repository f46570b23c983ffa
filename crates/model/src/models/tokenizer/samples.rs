//! Tokenizers for tests.

use super::Tokenizer;

/// A byte-fallback BPE of single letters, with `\n`, spaces and Gemma's control tokens.
pub fn letters() -> Tokenizer {
    letters_and(&[])
}

/// Like [`letters`], with control tokens of Gemma 4.
pub fn thinking_letters() -> Tokenizer {
    let calls = ["<|tool_call>", "<tool_call|>", "<|\"|>"];
    letters_and(
        &[&["<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"], &calls[..]].concat(),
    )
}

fn letters_and(control: &[&str]) -> Tokenizer {
    let mut pieces = vec![
        "<pad>".to_string(),
        "<eos>".into(),
        "<bos>".into(),
        "<unk>".into(),
        "<start_of_turn>".into(),
        "<end_of_turn>".into(),
    ];
    pieces.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    pieces.extend("▁\n".chars().chain(' '..='~').filter(|c| *c != ' ').map(String::from));
    pieces.push("▁a".into());
    pieces.extend(control.iter().map(|name| name.to_string()));
    let vocab: serde_json::Map<_, _> =
        pieces.iter().enumerate().map(|(i, p)| (p.clone(), i.into())).collect();
    let added: Vec<_> = (0..6)
        .map(|i| {
            serde_json::json!({"id": i, "content": pieces[i], "special": i < 4,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "byte_fallback": true,
            "fuse_unk": true, "unk_token": "<unk>"},
    });
    Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap()
}
