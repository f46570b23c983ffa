//! The assistant of Gemma 4 in GGUF files of both schemas, and in files of the quantiser. The
//! models are those of `scripts/golden/assistant.py`.

use super::gemma4_weights::{assert_same_weights, golden, open, stored};
use crate::common::gguf::{self, BF16, F32, File, Tensor, Val, floats};
use gemma::checkpoint::Checkpoint;
use gemma::models::Weights;
use gemma::quant::{QuantizeOptions, Recipe, quantize};
use serde_json::Value;
use std::fs;

const CASES: [&str; 3] = ["assistant-wide", "assistant-unified", "assistant-long"];

/// Returns a file in the form of llama.cpp's converter, or of the converter before it.
fn file(case: &str, is_old: bool) -> File {
    let json: Value =
        serde_json::from_slice(&fs::read(golden(case).join("config.json")).unwrap()).unwrap();
    let text = &json["text_config"];
    let n = |key: &str| Val::U32(text[key].as_u64().unwrap() as u32);
    let kinds = text["layer_types"].as_array().unwrap();
    let local: Vec<bool> = kinds.iter().map(|kind| kind == "sliding_attention").collect();
    let hf = open(&golden(case));
    let layers = &hf.config().layers;
    let kv_heads = layers.iter().map(|layer| layer.n_kv_heads as i32).collect();
    let [global, own] = [true, false].map(|is_global| {
        let layer = layers.iter().find(|layer| layer.is_global() == is_global).unwrap();
        layer.head_dim
    });
    let width = json["backbone_hidden_size"].as_u64().unwrap() as u32;
    let (name, backbone) = match is_old {
        true => ("gemma4_assistant", "n_embd_backbone"),
        false => ("gemma4-assistant", "embedding_length_out"),
    };
    let mut keys = vec![
        ("general.architecture".to_owned(), Val::Str(name.into())),
        ("tokenizer.ggml.model".into(), Val::Str("no_vocab".into())),
        ("tokenizer.ggml.eot_token_id".into(), Val::U32(106)),
    ];
    keys.extend(
        [
            (backbone, Val::U32(width)),
            ("block_count", n("num_hidden_layers")),
            ("nextn_predict_layers", n("num_hidden_layers")),
            ("context_length", n("max_position_embeddings")),
            ("embedding_length", n("hidden_size")),
            ("feed_forward_length", n("intermediate_size")),
            ("attention.head_count", n("num_attention_heads")),
            ("attention.head_count_kv", Val::I32s(kv_heads)),
            ("attention.key_length", Val::U32(global as u32)),
            ("attention.value_length", Val::U32(global as u32)),
            ("attention.key_length_swa", Val::U32(own as u32)),
            ("attention.value_length_swa", Val::U32(own as u32)),
            ("attention.sliding_window", n("sliding_window")),
            ("attention.sliding_window_pattern", Val::Bools(local)),
            ("attention.shared_kv_layers", n("num_hidden_layers")),
            ("attention.layer_norm_rms_epsilon", Val::F32(1e-6)),
            ("rope.freq_base", Val::F32(1e6)),
            ("rope.freq_base_swa", Val::F32(1e4)),
        ]
        .map(|(key, value)| (format!("{name}.{key}"), value)),
    );
    let mut file = File { keys, ..File::default() };
    let mut divisors = vec![1e30; global / 2];
    divisors[..global / 8].fill(1.0);
    let mut push = |name: &str, shape: &[usize], kind, values: &[f32]| {
        let dims = shape.iter().rev().map(|n| *n as u64).collect();
        file.tensors.push(Tensor { name: name.into(), dims, kind, data: floats(kind, values) });
    };
    push("rope_freqs.weight", &[global / 2], F32, &divisors);
    let projections = if is_old { "mtp" } else { "nextn" };
    for (name, tensor) in Checkpoint::open(&golden(case)).unwrap().tensors() {
        let name = match name.strip_prefix("model.") {
            Some(name) => gguf::name_of(name),
            None => format!("{projections}.{name}"),
        };
        let kind = if tensor.shape.len() == 1 { F32 } else { BF16 };
        push(&name, tensor.shape, kind, &tensor.to_f32().unwrap());
    }
    file
}

#[test]
fn files_of_both_schemas_are_the_same_assistant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    for case in CASES {
        for is_old in [false, true] {
            file(case, is_old).write(&path);
            assert_same_weights(&open(&golden(case)), &open(&path));
        }
    }
}

#[test]
fn the_assistants_of_the_edge_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    for (is_old, name) in [(true, "mtp.centroids.weight"), (false, "masked_embd_centroids.weight")]
    {
        let mut file = file(CASES[0], is_old);
        let data = floats(F32, &[0.0; 32]);
        file.tensors.push(Tensor { name: name.into(), dims: vec![16, 2], kind: F32, data });
        file.write(&path);
        let error = Weights::open(Checkpoint::open(&path).unwrap()).unwrap_err();
        assert!(error.to_string().contains("E2B"), "{error:#}");
    }
}

#[test]
fn the_quantiser_writes_the_file_of_the_converter() {
    let dir = tempfile::tempdir().unwrap();
    for case in CASES {
        let source = dir.path().join(case);
        fs::create_dir(&source).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(golden(case).join(name), source.join(name)).unwrap();
        }
        fs::copy(golden("gemma4/tokenizer.json"), source.join("tokenizer.json")).unwrap();
        let hf = open(&source);
        let convert = |name: &str, format: &str, gguf: bool| {
            let to = dir.path().join(format!("{case}-{name}"));
            let recipe = Recipe::inline(format.parse().unwrap(), format.parse().unwrap());
            let options = QuantizeOptions { gguf, threads: 2, ..QuantizeOptions::default() };
            quantize(&hf, &to, &recipe, &options, &mut |_| Ok(())).unwrap();
            to
        };
        let converted = dir.path().join("converted.gguf");
        file(case, false).write(&converted);
        assert!(stored(&converted) == stored(&convert("written.gguf", "bf16", true)));
        // A format of whole matrices with a multiple of 16 columns.
        let artifact = open(&convert("artifact", "i8-row", false));
        assert_eq!(artifact.config(), hf.config());
    }
}
