//! GGUF files with false headers, truncated files and foreign files are refused with exit code 3, a
//! reason and a remedy. The program does not crash.

use crate::common;
use common::gguf::{self, File, Tensor, Val};
use common::{Dims, TinyModel};
use gemma::checkpoint::Checkpoint;
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::error::{Kind, fault_of};
use gemma::models::Weights;
use gemma::sampler::{Sampler, SamplerConfig};
use proptest::prelude::*;
use std::fs;
use std::path::Path;

fn tiny() -> File {
    gguf::float_file(
        &TinyModel::new(Dims { vocab: 8, n_layers: 1, ..Dims::default() }, 3),
        gguf::BF16,
    )
}

fn open(path: &Path) -> anyhow::Result<Weights> {
    Weights::open(Checkpoint::open(path)?)
}

/// Returns the refusal of these bytes. It must be a model fault with a remedy.
#[track_caller]
fn refusal(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, bytes).unwrap();
    refused(open(&path))
}

#[track_caller]
fn refused<T>(result: anyhow::Result<T>) -> String {
    let error = result.err().expect("was accepted");
    let fault = fault_of(&error).unwrap_or_else(|| panic!("no fault in: {error:#}"));
    assert_eq!(fault.kind, Kind::Model, "{error:#}");
    format!(
        "{error:#} | {}",
        fault.help.clone().unwrap_or_else(|| panic!("no remedy in: {error:#}"))
    )
}

/// Changes a good file and checks that the refusal contains all of `words`.
#[track_caller]
fn harmed(harm: impl FnOnce(&mut File), words: &[&str]) {
    let mut file = tiny();
    harm(&mut file);
    let text = refusal(&file.bytes());
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}

#[test]
fn the_good_file_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("called-something-else.bin");
    tiny().write(&path);
    open(&path).unwrap();
}

#[test]
fn containers_that_lie() {
    assert!(refusal(b"").contains("empty"));
    assert!(refusal(b"GGUF").contains("truncated"));
    assert!(refusal(b"PK\x03\x04 not this").contains("does not begin"));
    harmed(|f| f.version = 1, &["version 1", "convert"]);
    harmed(|f| f.version = 3u32.swap_bytes(), &["big-endian"]);
    let mut bytes = tiny().bytes();
    bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&bytes).contains("claims 18446744073709551615 tensors"));
    let mut bytes = tiny().bytes();
    bytes[16..24].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    assert!(refusal(&bytes).contains("metadata values"));
    let huge =
        |kind: u32, n: u64| Val::Raw(9, [&kind.to_le_bytes()[..], &n.to_le_bytes()].concat());
    harmed(|f| f.keys.insert(0, ("a".into(), huge(8, 1 << 60))), &["elements of `a`"]);
    harmed(|f| f.keys.insert(0, ("a".into(), huge(12, 1 << 61))), &["elements of `a`"]);
    harmed(|f| f.keys.insert(0, ("a".into(), huge(9, 1))), &["list of lists"]);
    harmed(|f| f.keys.insert(0, ("a".into(), huge(99, 1))), &["unknown type 99"]);
    harmed(|f| f.keys.insert(0, ("a".into(), Val::Raw(13, vec![]))), &["unknown type 13"]);
    harmed(
        |f| f.keys.insert(0, ("a".into(), Val::Raw(8, u64::MAX.to_le_bytes().to_vec()))),
        &["bytes of the value of `a`"],
    );
    harmed(|f| f.keys.push(("general.architecture".into(), Val::U32(1))), &["given twice"]);
    // A sparse file that claims a header of 100 MB.
    let (dir, n) = (tempfile::tempdir().unwrap(), 100_000_000u64);
    let (path, mut file) = (dir.path().join("x.gguf"), tiny());
    file.keys.insert(0, ("a".into(), huge(0, n)));
    fs::write(&path, file.bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(2 * n).unwrap();
    assert!(refused(open(&path)).contains("longer than the limit of 100000000 bytes"));
    for wrong in [Val::U32(0), Val::U32(24), Val::Str("32".into())] {
        harmed(|f| f.set("general.alignment", wrong), &["power of two"]);
    }
}

#[test]
fn truncated_at_any_length() {
    let (file, bytes) = (tiny(), tiny().bytes());
    // After the last tensor there is only padding, which may be missing.
    let last = file.tensors.last().unwrap().data.len();
    let end = bytes.len() - (last.next_multiple_of(file.alignment) - last);
    for len in (1..end).step_by(997).chain([4, 8, 23, 24, 25, end - 1]) {
        refusal(&bytes[..len]);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, &bytes[..end]).unwrap();
    open(&path).unwrap();
}

#[test]
fn tensors_that_lie() {
    harmed(|f| f.offsets.push((1, 0)), &["overlaps"]);
    harmed(|f| f.offsets.push((2, 1 << 40)), &["truncated"]);
    harmed(|f| f.offsets.push((2, u64::MAX - 31)), &["impossible shape"]);
    harmed(|f| f.offsets.push((2, 33)), &["not a multiple of 32"]);
    harmed(|f| f.tensors[0].dims = vec![1 << 32, 1 << 32], &["impossible shape"]);
    harmed(|f| f.tensors[0].dims = vec![u64::MAX], &["token_embd"]);
    harmed(|f| f.tensors[0].dims = vec![128, 0], &["cannot cut"]);
    harmed(|f| f.tensors[0].dims = vec![], &["0 dimensions"]);
    harmed(|f| f.tensors[0].dims = vec![1; 5], &["5 dimensions"]);
    harmed(|f| (f.tensors[0].kind, f.tensors[0].dims) = (2, vec![100, 8]), &["Q4_0 cannot cut"]);
    harmed(|f| f.tensors[0].kind = 19, &["IQ1_S", "Q4_0, "]);
    harmed(|f| f.tensors[0].kind = 4096, &["type 4096"]);
    harmed(|f| f.tensors[1].name = "token_embd.weight".into(), &["listed twice"]);
    harmed(|f| f.tensors[2].name = "blk.0.attn_q.bias".into(), &["missing"]);
    harmed(
        |f| {
            f.tensors.push(Tensor {
                name: "blk.0.ffn_exps.weight".into(),
                dims: vec![1],
                kind: 0,
                data: vec![0; 4],
            })
        },
        &["does not belong to a Gemma 3"],
    );
    harmed(|f| f.tensors.truncate(5), &["missing"]);
    harmed(|f| f.tensors.clear(), &["no embedding table"]);
    // A norm in a block type.
    harmed(
        |f| (f.tensors[1].kind, f.tensors[1].data) = (8, vec![0; 136]),
        &["blk.0.attn_norm.weight", "Q8_0; norms are F32"],
    );
}

#[test]
fn metadata_of_other_models() {
    harmed(|f| f.set("general.architecture", Val::Str("llama".into())), &["llama", "gemma3"]);
    harmed(|f| f.set("general.architecture", Val::Str("clip".into())), &["vision tower"]);
    harmed(|f| f.remove("general.architecture"), &["no stated architecture"]);
    harmed(|f| f.remove("gemma3.block_count"), &["block_count", "missing"]);
    harmed(|f| f.set("gemma3.block_count", Val::F32(1.0)), &["not a whole number"]);
    harmed(
        |f| f.set("tokenizer.ggml.bos_token_id", Val::Raw(5, (-1i32).to_le_bytes().to_vec())),
        &["bos_token_id"],
    );
    harmed(|f| f.set("gemma3.attention.head_count", Val::U32(0)), &["num_attention_heads"]);
    harmed(|f| f.set("gemma3.embedding_length", Val::U32(64)), &["shape"]);
    harmed(|f| f.set("gemma3.block_count", Val::U32(2)), &["missing"]);
    harmed(|f| f.set("gemma3.final_logit_softcapping", Val::F32(30.0)), &["soft-capping"]);
    harmed(
        |f| f.set("gemma3.attention.sliding_window_pattern", Val::Str("6".into())),
        &["sliding_window_pattern"],
    );
}

#[test]
fn parts_that_do_not_belong_together() {
    let dir = tempfile::tempdir().unwrap();
    let part = |i: usize| dir.path().join(format!("m-{i:05}-of-00002.gguf"));
    let whole = tiny();
    let split = |i: usize, tensors: &[Tensor], count: u16| {
        let mut file =
            File { keys: whole.keys.clone(), tensors: tensors.to_vec(), ..File::default() };
        file.set("split.no", Val::U16(i as u16));
        file.set("split.count", Val::U16(count));
        file.set("split.tensors.count", Val::U32(whole.tensors.len() as u32));
        file
    };
    let (a, b) = whole.tensors.split_at(4);
    split(0, a, 2).write(&part(1));
    assert!(refused(open(&part(1))).contains("m-00002-of-00002.gguf"));
    split(0, b, 2).write(&part(2));
    assert!(refused(open(&part(1))).contains("says that it is part 1"));
    split(1, &whole.tensors[3..], 2).write(&part(2));
    assert!(refused(open(&part(1))).contains("is also in"));
    split(1, &b[1..], 2).write(&part(2));
    assert!(refused(open(&part(1))).contains("should hold"));
    split(1, b, 2).write(&part(2));
    open(&part(1)).unwrap();
    fs::remove_file(part(1)).unwrap();
    assert!(refused(open(dir.path())).contains("not the first"));
    let renamed = dir.path().join("renamed.gguf");
    split(0, a, 2).write(&renamed);
    assert!(refused(open(&renamed)).contains("one of 2 parts"));
    split(0, a, 2).write(&dir.path().join("other.gguf"));
    assert!(refused(open(dir.path())).contains("2 models"));
}

#[test]
fn tokenizers_that_lie() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let tokens = || {
        Val::Strs(
            ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "c"].map(String::from).to_vec(),
        )
    };
    let check = |harm: &dyn Fn(&mut File), word: &str| {
        let mut file = tiny();
        file.set("tokenizer.ggml.model", Val::Str("llama".into()));
        file.set("tokenizer.ggml.tokens", tokens());
        file.set("tokenizer.ggml.scores", Val::F32s(vec![0.0; 8]));
        file.set("tokenizer.ggml.token_type", Val::I32s(vec![3, 3, 3, 2, 1, 1, 1, 1]));
        harm(&mut file);
        file.write(&path);
        let weights = open(&path).unwrap();
        let made = weights.checkpoint().unwrap().side_file("tokenizer.json");
        if word.is_empty() {
            assert!(made.unwrap().is_some());
        } else {
            let text = refused(made);
            assert!(text.contains(word), "`{word}` is missing in: {text}");
        }
    };
    check(&|_| (), "");
    check(&|f| f.set("tokenizer.ggml.model", Val::Str("gpt2".into())), "gpt2");
    for key in ["tokens", "scores", "token_type"] {
        let key = format!("tokenizer.ggml.{key}");
        check(&|f| f.remove(&key), &key);
        check(&|f| f.set(&key, Val::Str("x".into())), &key);
    }
    check(&|f| f.set("tokenizer.ggml.scores", Val::F32s(vec![0.0; 7])), "7 scores");
    check(&|f| f.set("tokenizer.ggml.scores", Val::F32s(vec![f32::NAN; 8])), "not a number");
    check(&|f| f.set("tokenizer.ggml.tokens", Val::Strs(vec!["a".into(); 8])), "twice");
    check(
        &|f| {
            f.set(
                "tokenizer.ggml.tokens",
                Val::Strs((0..8).map(|i| i.to_string().repeat(5000)).collect()),
            )
        },
        "5000 bytes",
    );
    // A few pieces. Each can be made from all shorter ones in many ways.
    check(
        &|f| {
            let pieces: Vec<String> = (1..1500).map(|n| "a".repeat(n)).collect();
            f.set("tokenizer.ggml.scores", Val::F32s(vec![0.0; pieces.len()]));
            f.set("tokenizer.ggml.token_type", Val::I32s(vec![1; pieces.len()]));
            f.set("tokenizer.ggml.tokens", Val::Strs(pieces));
        },
        "too many long pieces",
    );
    check(&|f| f.set("tokenizer.ggml.merges", Val::Strs(vec!["ab".into()])), "two pieces");
}

/// Types of blocks: number, weights, bytes, and the places of the floats.
const BLOCKS: [(u32, usize, usize, &[usize]); 17] = [
    (2, 32, 18, &[0]),
    (3, 32, 20, &[0, 2]),
    (6, 32, 22, &[0]),
    (7, 32, 24, &[0, 2]),
    (8, 32, 34, &[0]),
    (10, 256, 84, &[80, 82]),
    (11, 256, 110, &[108]),
    (12, 256, 144, &[0, 2]),
    (13, 256, 176, &[0, 2]),
    (14, 256, 210, &[208]),
    (16, 256, 66, &[0]),
    (17, 256, 74, &[0]),
    (18, 256, 98, &[0]),
    (20, 32, 18, &[0]),
    (21, 256, 110, &[0]),
    (22, 256, 82, &[0]),
    (23, 256, 136, &[0]),
];

/// Returns a model of one layer that all types of blocks can hold.
fn wide() -> TinyModel {
    let dims = Dims { n_layers: 1, dim: 256, head_dim: 64, vocab: 8, ..Dims::default() };
    TinyModel::new(dims, 4)
}

/// Picks the token after a short text. Every kernel is compared with its twin.
pub fn next_token(weights: &Weights) -> anyhow::Result<u32> {
    let executor = CpuExecutor::new(CpuOptions { check: true, ..CpuOptions::default() })?;
    let options = EngineOptions { context: 64, kv: KvFormat::F16 };
    let mut engine = PlannedEngine::new(weights, Box::new(executor), options)?;
    let mut scores = Scores::default();
    engine.forward(&TokenTree::chain(&[2, 5, 3]), Rows::Last, &mut scores)?;
    let greedy = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
    scores.pick(0, &Sampler::new(greedy)?.usable(8), 3, &[2, 5, 3])
}

/// A float of a block that is not finite or is too large is refused: before a pass, and when the
/// matrix is read as a whole. Tests each float of each block type, in all matrices in turn.
#[test]
fn block_scales_that_no_model_has() {
    let (model, dir) = (wide(), tempfile::tempdir().unwrap());
    let path = dir.path().join("x.gguf");
    let matrices: Vec<usize> =
        (0..model.tensors.len()).filter(|i| model.tensors[*i].1.len() == 2).collect();
    for (n, (kind, weights, bytes, places)) in BLOCKS.into_iter().enumerate() {
        let blank = gguf::file(&model, |i| {
            let blocks = model.tensors[i].1.iter().product::<usize>() / weights;
            (kind, vec![0; blocks * bytes])
        });
        blank.write(&path);
        next_token(&open(&path).unwrap()).unwrap();
        for (i, place) in places.iter().enumerate() {
            for (j, bad) in [0x7e00u16, 0xfc00, 0x7c00, 0x7bff, 0xe401].into_iter().enumerate() {
                let tensor = matrices[(n + i + j) % matrices.len()];
                let (name, row) = (model.tensors[tensor].0.as_str(), model.tensors[tensor].1[1]);
                let mut file = blank.clone();
                // The last block of the fifth row.
                let at = (5 * row / weights - 1) * bytes + place;
                file.tensors[tensor].data[at..at + 2].copy_from_slice(&bad.to_le_bytes());
                file.write(&path);
                let loaded = open(&path).unwrap();
                let block = format!("in row 4, block {}", row / weights - 1);
                let whole = refused(loaded.checkpoint().unwrap().matrix(&format!("model.{name}")));
                for text in [refused(next_token(&loaded)), whole] {
                    for word in [name, &block, "fetch it again"] {
                        assert!(text.contains(word), "type {kind}: `{word}` is missing: {text}");
                    }
                }
            }
        }
    }
}

/// NaN, infinity and sums that overflow, in plain floats of each matrix and each norm. Only a gate
/// may have any finite value: far below 0 it is closed.
#[test]
fn floats_that_overflow_in_a_pass() {
    let (model, dir) = (wide(), tempfile::tempdir().unwrap());
    let path = dir.path().join("x.gguf");
    let good = gguf::float_file(&model, gguf::F32);
    good.write(&path);
    next_token(&open(&path).unwrap()).unwrap();
    for tensor in 0..good.tensors.len() {
        let name = &good.tensors[tensor].name;
        let finite = if name == "blk.0.ffn_gate.weight" { 0 } else { 2 };
        for bad in
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38].into_iter().take(3 + finite)
        {
            let mut file = good.clone();
            // In an embedding table, the row of the prompt's last token.
            let at = if name == "token_embd.weight" { 4 * (3 * 256 + 17) } else { 0 };
            file.tensors[tensor].data[at..at + 4].copy_from_slice(&bad.to_le_bytes());
            file.write(&path);
            let Err(error) = next_token(&open(&path).unwrap()) else {
                panic!("{name} with {bad} gave a token")
            };
            let text = format!("{error:#}");
            // A norm is refused before the pass. For the others, kernels and twins agree.
            let is_right = text.contains("which no model does") || text.contains("logit");
            assert!(is_right, "{name} with {bad}: {text}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn changed_bytes_never_crash(changes in prop::collection::vec((0usize..2500, any::<u8>()),
        1..6), cut in 0usize..90_000) {
        let mut bytes = tiny().bytes();
        for (at, value) in changes {
            bytes[at] = value;
        }
        bytes.truncate(cut.max(10_000));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        fs::write(&path, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(&path) {
            for stored in checkpoint.stored() {
                let _ = checkpoint.matrix(&stored.name);
            }
            let _ = Weights::open(checkpoint);
        }
    }
}
