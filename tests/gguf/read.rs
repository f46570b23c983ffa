//! GGUF files give the same bits as the Hugging Face directories that they were made from.

use crate::common;
use crate::hostile::next_token;
use common::gguf::{self, File, Val, directory, logits};
use common::{Dims, TinyModel};
use gemma::checkpoint::gguf::types;
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::models::gguf::repairs;
use gemma::models::{ChatTemplate, Generation, Message, Special, TensorSpec, Tokenizer, Weights};
use gemma::quant::{QuantizeOptions, Recipe, quantize};
use gemma::tensor::quantize::quantize as round;
use gemma::tensor::{Format, Values};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn open(path: &Path) -> Weights {
    Weights::open(Checkpoint::open(path).unwrap()).unwrap()
}

fn written(file: &File) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    file.write(&path);
    (dir, path)
}

fn hex(text: &Value) -> Vec<u8> {
    hex::decode(text.as_str().unwrap()).unwrap()
}

#[test]
fn blocks_mean_what_llama_cpp_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf-blocks.json");
    let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (kind, number) in [
        ("Q4_0", 2),
        ("Q4_1", 3),
        ("Q5_0", 6),
        ("Q5_1", 7),
        ("Q8_0", 8),
        ("Q4_K", 12),
        ("Q5_K", 13),
        ("Q6_K", 14),
        ("Q2_K", 10),
        ("Q3_K", 11),
        ("IQ4_NL", 20),
        ("IQ4_XS", 23),
        ("IQ2_XXS", 16),
        ("IQ2_XS", 17),
        ("IQ2_S", 22),
        ("IQ3_XXS", 18),
        ("IQ3_S", 21),
    ] {
        let (mut data, mut want) = (hex(&golden[kind]["blocks"]), Vec::new());
        let code = types::code(number).unwrap();
        assert_eq!(types::name(number), Some(kind));
        want.extend(
            hex(&golden[kind]["f32"]).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)),
        );
        let n = want.len();
        // Makes a matrix of two equal rows.
        data.extend_from_within(..);
        for threads in [1, 3] {
            let native = types::matrix(code, 2, n, &data, threads).unwrap();
            assert_eq!(native.dequantize(), [&want[..], &want].concat(), "{kind}");
            assert_eq!((native.format.code, native.bytes() <= data.len()), (code, true), "{kind}");
        }
        let Values::Grid(grid) = code.spec().values else { continue };
        let points = (0..1 << grid.index_bits).flat_map(|index| grid.open(index));
        let points = points.collect::<Vec<_>>();
        // An octet may have two points. Only the first one has this index.
        let points = points.iter().step_by(grid.indices as usize);
        let bytes = points.flat_map(|four| four.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(hex::encode(Sha256::digest(bytes)), golden[kind]["grid"], "{kind}");
    }
}

#[test]
fn float_files_equal_their_directories() {
    let model = TinyModel::tiny(11);
    let dir = tempfile::tempdir().unwrap();
    for (dtype, kind) in
        [(Dtype::F32, gguf::F32), (Dtype::BF16, gguf::BF16), (Dtype::F16, gguf::F16)]
    {
        let want = open(&directory(&model, dir.path(), dtype));
        let (_dir, path) = written(&gguf::float_file(&model, kind));
        let got = open(&path);
        let (mut a, b) = (got.config().clone(), want.config());
        // The file names only the first token. Its tokenizer would name the other, but this file
        // has none.
        assert_eq!(a.eos, [1]);
        a.eos.clone_from(&b.eos);
        assert_eq!(a, *b);
        for &TensorSpec { role, layer, .. } in want.tensors() {
            assert_eq!(got.name(role, layer), want.name(role, layer));
            if !role.is_matrix() {
                assert_eq!(got.vector(role, layer).unwrap(), want.vector(role, layer).unwrap());
            }
        }
        assert_eq!(logits(&got), logits(&want), "{dtype}");
    }
}

/// A device reads this tensor in pieces that equal the whole on the processor.
#[test]
fn tensors_that_are_converted_can_be_read_in_pieces() {
    let model = TinyModel::new(Dims { vocab: 700, ..Dims::default() }, 12);
    let (_dir, path) = written(&gguf::float_file(&model, gguf::F16));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let name = "token_embd.weight";
    let whole = checkpoint.matrix(name).unwrap();
    let stored = checkpoint.stored_matrix(name).unwrap();
    let codes: &[u8] = &whole.codes;
    assert!(codes.len() > 300_000, "several pieces: {}", codes.len());
    for from in [0, 2, 4098, codes.len() - 131_077] {
        let mut part = vec![0; 131_077.min(codes.len() - from)];
        stored.codes.read_at(from, &mut part).unwrap();
        assert!(part == codes[from..][..part.len()], "from byte {from}");
    }
}

#[test]
fn q4_0_and_q8_0_files_equal_artifacts_of_the_same_codes() {
    let model = TinyModel::tiny(12);
    let dir = tempfile::tempdir().unwrap();
    let source = open(&directory(&model, dir.path(), Dtype::F32));
    for (format, kind) in [(Format::I4_G32, gguf::Q4_0), (Format::I8_G32, gguf::Q8_0)] {
        let artifact = dir.path().join(format!("artifact-{format}"));
        quantize(
            &source,
            &artifact,
            &Recipe::inline(format, format),
            &QuantizeOptions::default(),
            &mut |_| Ok(()),
        )
        .unwrap();
        let file = gguf::file(&model, |i| {
            let (_, shape, values) = &model.tensors[i];
            (kind, gguf::blocks(kind, &round(format, shape[0], shape[1], values).unwrap()))
        });
        let (_dir, path) = written(&file);
        let (want, got) = (open(&artifact), open(&path));
        for &TensorSpec { role, layer, .. } in want.matrices() {
            let (a, b) = (got.matrix(role, layer).unwrap(), want.matrix(role, layer).unwrap());
            assert_eq!((a.format, a.rows, a.cols), (b.format, b.rows, b.cols));
            assert!(a.codes == b.codes && a.side == b.side, "{role:?} {layer}");
            assert_eq!(got.format(role, layer).unwrap(), a.format);
        }
        assert_eq!(logits(&got), logits(&want), "{format}");
        // The quantiser does not round the file again to its own format.
        let again = dir.path().join(format!("again-{format}"));
        quantize(
            &got,
            &again,
            &Recipe::inline(format, format),
            &QuantizeOptions::default(),
            &mut |_| Ok(()),
        )
        .unwrap();
        assert_eq!(logits(&open(&again)), logits(&want), "{format}");
        let other = Recipe::inline("i2-g32".parse().unwrap(), format);
        let refused = quantize(
            &got,
            &dir.path().join("other"),
            &other,
            &QuantizeOptions::default(),
            &mut |_| Ok(()),
        );
        assert!(refused.unwrap_err().to_string().contains("quantised already"));
    }
}

#[test]
fn parts_are_put_together() {
    let model = TinyModel::tiny(13);
    let whole = gguf::float_file(&model, gguf::BF16);
    let (_dir, path) = written(&whole);
    let want = logits(&open(&path));
    let dir = tempfile::tempdir().unwrap();
    let cut = [0, 1, 30, whole.tensors.len()];
    for part in 0..3 {
        let mut file =
            File { tensors: whole.tensors[cut[part]..cut[part + 1]].to_vec(), ..File::default() };
        if part == 0 {
            file.keys.clone_from(&whole.keys);
            file.alignment = 64;
            file.set("general.alignment", Val::U32(64));
        }
        file.set("split.no", Val::U16(part as u16));
        file.set("split.count", Val::U16(3));
        file.set("split.tensors.count", Val::U32(whole.tensors.len() as u32));
        file.write(&dir.path().join(format!("m-{:05}-of-00003.gguf", part + 1)));
    }
    // The path may be that of any part, or of the directory. The directory may also have the mmproj
    // file.
    fs::write(dir.path().join("mmproj-m.gguf"), "GGUF").unwrap();
    for path in [
        dir.path().join("m-00001-of-00003.gguf"),
        dir.path().join("m-00003-of-00003.gguf"),
        dir.path().into(),
    ] {
        assert_eq!(logits(&open(&path)), want);
    }
}

#[test]
fn an_own_head_and_fewer_rows_than_the_hub_has() {
    let mut model = TinyModel::new(Dims { vocab: 130, ..Dims::default() }, 14);
    let head = (0..130 * 128).map(|i| (i % 9) as f32 - 4.0).collect();
    model.tensors.push(("lm_head.weight".into(), vec![130, 128], head));
    let (_dir, path) = written(&gguf::float_file(&model, gguf::F32));
    let weights = open(&path);
    assert!(weights.has_own_head());
    assert_eq!(weights.config().vocab, 130);
}

/// Returns the bundled tokenizer and its file.
fn bundled() -> (Value, Tokenizer) {
    let bytes =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target/tokenizer.json"))
            .unwrap();
    (serde_json::from_slice(&bytes).unwrap(), Tokenizer::from_bytes(&bytes).unwrap())
}

/// Returns a tiny model with this tokenizer.
fn with_tokenizer(json: &Value, vocab: usize) -> File {
    let mut file = gguf::float_file(
        &TinyModel::new(Dims { vocab, n_layers: 1, ..Dims::default() }, 15),
        gguf::BF16,
    );
    file.keys.extend(gguf::tokenizer_keys(json, vocab));
    file
}

fn tokenizer(weights: &Weights) -> Tokenizer {
    Tokenizer::from_bytes(
        &weights.checkpoint().unwrap().side_file("tokenizer.json").unwrap().unwrap(),
    )
    .unwrap()
}

const TEXTS: [&str; 6] = [
    "The quick brown fox — naïve, 12345 times — said: \"hello\"!\n\n\
     \tfn main() {\n        println!(\"{}\", x);\n    }\n",
    "   leading,  double,                    many spaces",
    "😀 日本語 \u{0} \u{7f} żółć",
    "",
    "a<end_of_turn>b <unused5><start_of_turn>",
    "Counting: one, two, three; perhaps unbelievably internationalisation.",
];

#[test]
fn the_tokenizer_in_the_file_gives_the_same_ids() {
    let (json, want) = bundled();
    let mut file = with_tokenizer(&json, 16_500);
    file.set(
        "tokenizer.chat_template",
        Val::Str("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}".into()),
    );
    file.set("general.sampling.top_k", Val::Raw(5, 64i32.to_le_bytes().to_vec()));
    file.set("general.sampling.top_p", Val::F32(0.95));
    let (_dir, path) = written(&file);
    let weights = open(&path);
    let got = tokenizer(&weights);
    for text in TEXTS {
        for special in [Special::AsText, Special::Parse] {
            assert_eq!(
                got.encode(text, special).unwrap(),
                want.encode(text, special).unwrap(),
                "{text:?}"
            );
        }
    }
    for id in 0..16_384 {
        assert_eq!(
            (got.token_bytes(id), got.is_control(id)),
            (want.token_bytes(id), want.is_control(id)),
            "{id}"
        );
    }
    assert!(weights.notes().is_empty() && got.notes().is_empty());
    assert_eq!(weights.config().eos, [1, 106]);
    let checkpoint = weights.checkpoint().unwrap();
    let generation = Generation::of(checkpoint).unwrap();
    assert_eq!(
        (generation.eos, generation.top_k, generation.top_p),
        (vec![1, 106], Some(64), Some(0.95))
    );
    let message = [Message::new("user", "hi")];
    assert_eq!(
        ChatTemplate::from_checkpoint(checkpoint, &gemma::models::gemma3::DIALECT)
            .unwrap()
            .render(&message, true)
            .unwrap(),
        "<bos>[hi]"
    );
}

/// Pieces in which the order of merges matters: pairs of equal score, added runs of spaces, a pair
/// that only the longer half decides.
#[test]
fn merges_follow_the_scores() {
    let pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "a",
        "b",
        "c",
        "▁",
        "ab",
        "bc",
        "abc",
        "▁▁",
        "▁▁▁",
        "▁a",
        "<0x64>",
        "<unused0>",
    ];
    let mut file = gguf::float_file(
        &TinyModel::new(Dims { vocab: 16, n_layers: 1, ..Dims::default() }, 15),
        gguf::BF16,
    );
    let scores = [
        0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -1000.0, -1000.0, -2.0, 0.0,
        -1000.0,
    ];
    let types = [3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 4, 4, 1, 6, 3];
    let spaced = pieces.map(|p| if p.starts_with("▁▁") { p.replace('▁', " ") } else { p.into() });
    file.set("tokenizer.ggml.model", Val::Str("llama".into()));
    file.set("tokenizer.ggml.tokens", Val::Strs(spaced.to_vec()));
    file.set("tokenizer.ggml.scores", Val::F32s(scores.to_vec()));
    file.set("tokenizer.ggml.token_type", Val::I32s(types.to_vec()));
    let (_dir, path) = written(&file);
    let weights = open(&path);
    let json: Value = serde_json::from_slice(
        &weights.checkpoint().unwrap().side_file("tokenizer.json").unwrap().unwrap(),
    )
    .unwrap();
    let merges: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()))
        .collect();
    assert_eq!(merges, ["▁▁ ▁", "▁ ▁▁", "▁ ▁", "b c", "a b", "▁ a", "ab c", "a bc"]);
    let t = tokenizer(&weights);
    assert_eq!(t.encode("abc   a", Special::AsText).unwrap(), [10, 12, 4]);
    // An added token that its own file does not mark as special.
    assert_eq!(t.encode("<unused0>d", Special::AsText).unwrap(), [15, 14]);
    assert!(!t.is_control(15) && t.is_control(2));
}

#[test]
fn wrong_types_of_control_tokens_are_repaired() {
    let (json, want) = bundled();
    let mut file = with_tokenizer(&json, 16_384);
    for (key, value) in &mut file.keys {
        if let ("tokenizer.ggml.token_type", Val::I32s(types)) = (key.as_str(), value) {
            (types[105], types[106]) = (1, 4);
        }
    }
    let (_dir, path) = written(&file);
    let weights = open(&path);
    let said = repairs(weights.checkpoint().unwrap().metadata().unwrap()).unwrap();
    assert!(said.contains("<start_of_turn>, <end_of_turn> as ordinary text"), "{said}");
    assert!(weights.notes().is_empty(), "nothing for the user to do");
    let got = tokenizer(&weights);
    assert!(got.is_control(105) && got.is_control(106) && got.notes().is_empty());
    for special in [Special::AsText, Special::Parse] {
        assert_eq!(got.encode(TEXTS[4], special).unwrap(), want.encode(TEXTS[4], special).unwrap());
    }
}

/// Gates of -25, for which gelu returns -1e-37: groups too small for a scale. The text equals that
/// of bf16 in all formats, and kernels equal their twins.
#[test]
fn closed_gates_add_nothing() {
    let dims = Dims { n_layers: 2, dim: 256, head_dim: 64, vocab: 128, ..Dims::default() };
    let mut model = TinyModel::new(dims, 9);
    for (name, shape, values) in &mut model.tensors {
        let is_norm = shape.len() == 1;
        if is_norm || name.contains("o_proj") || name.contains("gate_proj") {
            values.fill(0.0);
        }
        // All tokens have the same large column, which a norm scales to about 6.3.
        let first = match name.as_str() {
            "embed_tokens.weight" => {
                values.iter_mut().for_each(|v| *v = if *v > 0.0 { 0.75 } else { -0.75 });
                5.0
            }
            gate if gate.contains("gate_proj") => -4.0,
            _ => continue,
        };
        values.iter_mut().step_by(256).for_each(|v| *v = first);
    }
    let dir = tempfile::tempdir().unwrap();
    let source = open(&directory(&model, dir.path(), Dtype::BF16));
    let want = next_token(&source).unwrap();
    assert_eq!(want, 3, "the last token again");
    for spelled in
        ["i8-row", "i8-g32", "i8a-row", "i4-row", "i4-g32", "i2-g32", "t3-row", "i4-g128+h128"]
    {
        let (to, format) = (dir.path().join(spelled), spelled.parse().unwrap());
        let recipe = Recipe::inline(format, Format::I8_G32);
        quantize(&source, &to, &recipe, &QuantizeOptions::default(), &mut |_| Ok(())).unwrap();
        assert_eq!(next_token(&open(&to)).unwrap(), want, "{spelled}");
    }
}
