//! Tiny models that read images, with a tokenizer of single characters, and images as PNG files.

#![allow(dead_code)]

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Families with a checkpoint in `tests/golden/vision`.
pub const FAMILIES: [&str; 3] = ["gemma3", "gemma4", "gemma4-unified"];

/// Id of the token that stands for a soft token.
pub const SOFT: u32 = 252;

/// Returns the folder of a family's checkpoint.
pub fn golden(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(family)
}

/// Copies a family's checkpoint with a window of `window` positions, and adds a tokenizer.
pub fn write_model(family: &str, window: usize, dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for file in ["model.safetensors", "preprocessor_config.json"] {
        fs::copy(golden(family).join(file), dir.join(file)).unwrap();
    }
    let config = fs::read(golden(family).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["text_config"]["sliding_window"] = window.into();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer(family).to_string()).unwrap();
}

/// Returns a tokenizer of letters, and the control tokens at the ids in the family's configuration.
fn tokenizer(family: &str) -> Value {
    let control: [(usize, &str); 5] = match family {
        "gemma3" => [
            (105, "<start_of_turn>"),
            (106, "<end_of_turn>"),
            (250, "<start_of_image>"),
            (251, "<end_of_image>"),
            (252, "<image_soft_token>"),
        ],
        _ => [
            (105, "<|turn>"),
            (106, "<turn|>"),
            (250, "<|image>"),
            (251, "<image|>"),
            (252, "<|image|>"),
        ],
    };
    let first = ["<pad>", "<eos>", "<bos>", "<unk>"].map(str::to_owned);
    let letters = "▁\n".chars().chain('!'..='~').map(String::from);
    let mut pieces: Vec<String> = first.into_iter().chain(letters).collect();
    pieces.extend((pieces.len()..256).map(|i| format!("<unused{i}>")));
    control.iter().for_each(|(id, name)| pieces[*id] = (*name).to_owned());
    let added: Vec<Value> = (0..4)
        .chain(control.iter().map(|(id, _)| *id))
        .map(|id| {
            json!({"id": id, "content": pieces[id], "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let vocab: serde_json::Map<_, _> =
        pieces.iter().enumerate().map(|(i, piece)| (piece.clone(), i.into())).collect();
    json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": false,
            "fuse_unk": true, "unk_token": "<unk>"},
    })
}

/// Returns the image of `scripts/golden/vision.py`, `[height, width, 3]`.
pub fn picture([width, height]: [usize; 2], seed: usize) -> Vec<u8> {
    let value = |x: usize, y: usize, c: usize| {
        let sum = x * (7 + 5 * c) + y * (11 + 3 * seed) + ((x * y) >> (2 + c)) * (seed + 1);
        (sum + 40 * c + ((x ^ y) & 31) * 3) as u8
    };
    let rows = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    rows.flat_map(|(x, y)| (0..3).map(move |c| value(x, y, c))).collect()
}

/// Returns an uncompressed PNG file of RGB pixels.
pub fn png([width, height]: [usize; 2], rgb: &[u8]) -> Vec<u8> {
    let rows = rgb.chunks(width * 3).flat_map(|row| std::iter::once(0).chain(row.iter().copied()));
    let raw: Vec<u8> = rows.collect();
    let blocks = raw.chunks(0xffff).count();
    let mut data = vec![0x78, 0x01];
    for (i, block) in raw.chunks(0xffff).enumerate() {
        let length = block.len() as u16;
        data.push((i + 1 == blocks) as u8);
        data.extend(length.to_le_bytes());
        data.extend((!length).to_le_bytes());
        data.extend(block);
    }
    let sums = raw.iter().fold((1u32, 0u32), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % 65521;
        (a, (b + a) % 65521)
    });
    data.extend((sums.1 << 16 | sums.0).to_be_bytes());
    let mut header = Vec::new();
    [width, height].iter().for_each(|side| header.extend((*side as u32).to_be_bytes()));
    header.extend([8, 2, 0, 0, 0]);
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in [(b"IHDR", &header), (b"IDAT", &data), (b"IEND", &Vec::new())] {
        file.extend((data.len() as u32).to_be_bytes());
        let named = [&kind[..], data].concat();
        file.extend(&named);
        file.extend(crc(&named).to_be_bytes());
    }
    file
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| (c >> 1) ^ (0xedb88320 & (c & 1).wrapping_neg()))
    })
}
