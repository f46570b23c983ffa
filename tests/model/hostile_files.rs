//! Files with false headers, truncated files and files of other tools are refused with exit code 3,
//! a reason that names the place, and a remedy. The program does not crash.

use crate::common;
use common::{Form, TinyModel, safetensors, with_header, write_model};
use gemma::checkpoint::{Checkpoint, Dtype, shards};
use gemma::error::{Fault, Kind, fault_of};
use gemma::models::Weights;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn open(dir: &Path) -> anyhow::Result<Weights> {
    Weights::open(Checkpoint::open(dir)?)
}

/// Writes a good model into a new directory.
fn model(form: Form, shards: usize) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    TinyModel::tiny(3).write(&path, form, Dtype::BF16, shards);
    (dir, path)
}

/// Returns the text of the refusal, which must be a model fault with a remedy.
#[track_caller]
fn refusal<T>(result: anyhow::Result<T>) -> String {
    let error = result.err().expect("was accepted");
    let fault: &Fault = fault_of(&error).unwrap_or_else(|| panic!("no fault in: {error:#}"));
    assert_eq!(fault.kind, Kind::Model, "{error:#}");
    let help = fault.help.clone().unwrap_or_else(|| panic!("no remedy in: {error:#}"));
    format!("{error:#} | {help}")
}

/// Breaks a good model and checks that the refusal contains all of `words`.
#[track_caller]
fn refused(form: Form, shards: usize, harm: impl FnOnce(&Path), words: &[&str]) {
    let (_dir, path) = model(form, shards);
    open(&path).unwrap();
    harm(&path);
    let text = refusal(open(&path));
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn config(edit: impl FnOnce(&mut Value)) -> impl FnOnce(&Path) {
    |dir| edit_json(&dir.join("config.json"), edit)
}

const FILE: &str = "model.safetensors";

#[test]
fn things_that_are_no_model_directory() {
    let (_dir, path) = model(Form::TextV4, 1);
    assert!(refusal(open(&path.join("nowhere"))).contains("nowhere"));
    assert!(refusal(open(&path.join(FILE))).contains("directory"));
    assert!(refusal(open(&path.join("config.json"))).contains("one file of a model"));
    let gguf = path.join("x.gguf");
    fs::write(&gguf, b"GGUF").unwrap();
    assert!(refusal(open(&gguf)).contains("truncated"));
    for (file, word) in [
        ("x.gguf", "GGUF"),
        ("pytorch_model.bin", "safe_serialization"),
        ("x.sbs", "gemma.cpp"),
        ("config.json", "gemma pull"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file), "{}").unwrap();
        assert!(refusal(open(dir.path())).contains(word), "{file}");
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(refusal(open(empty.path())).contains("no config.json"));
}

#[test]
fn missing_and_broken_side_files() {
    let remove = |name: &'static str| move |dir: &Path| fs::remove_file(dir.join(name)).unwrap();
    refused(Form::TextV4, 1, remove("config.json"), &["no config.json"]);
    refused(Form::TextV4, 1, remove(FILE), &["gemma pull"]);
    refused(
        Form::TextV4,
        2,
        remove("model-00002-of-00002.safetensors"),
        &["model-00002-of-00002", "missing"],
    );
    refused(Form::TextV4, 2, remove(shards::INDEX), &["model.safetensors.index.json"]);
    refused(
        Form::TextV4,
        1,
        |d| fs::write(d.join("config.json"), "{\"model_type\": ").unwrap(),
        &["config.json", "JSON"],
    );
    refused(
        Form::TextV4,
        1,
        |d| fs::write(d.join("config.json"), "[]").unwrap(),
        &["config.json", "object"],
    );
    refused(
        Form::TextV4,
        1,
        |d| fs::write(d.join("adapter_config.json"), "{}").unwrap(),
        &["PEFT", "merge_and_unload"],
    );
    refused(Form::TextV4, 1, |d| fs::write(d.join(FILE), "").unwrap(), &[FILE, "empty"]);
    let pipe = |d: &Path| {
        fs::remove_file(d.join(FILE)).unwrap();
        fs::create_dir(d.join(FILE)).unwrap();
    };
    refused(Form::TextV4, 1, pipe, &[FILE]);
}

#[test]
fn truncated_weights_of_any_length() {
    let (_dir, path) = model(Form::TextV4, 1);
    let whole = fs::read(path.join(FILE)).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for len in [1, 7, 8, 9, header - 1, header, header + 1, whole.len() / 2, whole.len() - 1] {
        fs::write(path.join(FILE), &whole[..len]).unwrap();
        let text = refusal(open(&path));
        assert!(text.contains(FILE), "{len}: {text}");
    }
    fs::write(path.join(FILE), [&whole[..], &[0]].concat()).unwrap();
    assert!(refusal(open(&path)).contains("not fully covered"));
}

#[test]
fn index_and_shards_that_disagree() {
    let index = |edit: fn(&mut Value)| move |dir: &Path| edit_json(&dir.join(shards::INDEX), edit);
    const NORM: &str = "model.norm.weight";
    for escape in
        ["../model-00001-of-00002.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""]
    {
        let harm = |dir: &Path| {
            edit_json(&dir.join(shards::INDEX), |v| v["weight_map"][NORM] = json!(escape))
        };
        refused(Form::TextV4, 2, harm, &[NORM, "outside the directory"]);
    }
    refused(Form::TextV4, 2, index(|v| v["weight_map"][NORM] = json!(7)), &[NORM]);
    refused(
        Form::TextV4,
        2,
        index(|v| v["weight_map"][NORM] = json!("model-00001-of-00002.safetensors")),
        &[NORM, "should be in"],
    );
    refused(
        Form::TextV4,
        2,
        index(|v| v["weight_map"]["model.extra"] = json!("model-00001-of-00002.safetensors")),
        &["model.extra"],
    );
    let forget = |v: &mut Value| drop(v["weight_map"].as_object_mut().unwrap().remove(NORM));
    refused(Form::TextV4, 2, index(forget), &[NORM, "does not list"]);
    refused(Form::TextV4, 2, index(|v| v["weight_map"] = json!({})), &["weight_map"]);
    let twice = |dir: &Path| {
        fs::copy(
            dir.join("model-00001-of-00002.safetensors"),
            dir.join("model-00002-of-00002.safetensors"),
        )
        .unwrap();
    };
    refused(Form::TextV4, 2, twice, &["is also in"]);
}

#[test]
fn tensors_that_do_not_make_a_gemma_3() {
    let rewrite = |edit: fn(&mut Vec<common::Named>)| {
        move |dir: &Path| {
            let model = TinyModel::tiny(3);
            let mut tensors = model.named(Form::TextV4);
            edit(&mut tensors);
            write_model(dir, &model.config(Form::TextV4), &tensors, Dtype::F32, 1);
        }
    };
    let q = "model.layers.1.self_attn.q_proj.weight";
    refused(
        Form::TextV4,
        1,
        rewrite(|t| t.retain(|t| !t.0.ends_with("layers.1.self_attn.q_proj.weight"))),
        &[q, "1 of 54"],
    );
    refused(
        Form::TextV4,
        1,
        rewrite(|t| t.retain(|t| !t.0.contains(".mlp."))),
        &["12 of 54", "..."],
    );
    refused(
        Form::TextV4,
        1,
        rewrite(|t| t.retain(|t| !t.0.contains("embed_tokens"))),
        &["no embedding table"],
    );
    let transpose = |t: &mut Vec<common::Named>| {
        t.iter_mut().filter(|t| t.0.contains("down_proj")).for_each(|t| t.1.reverse())
    };
    refused(Form::TextV4, 1, rewrite(transpose), &["down_proj", "[256, 128]", "[128, 256]"]);
    refused(Form::TextV4, 1, rewrite(|t| t[0].1 = vec![128, 160]), &["embed_tokens", "[160, 128]"]);
    let add = |name: &'static str| {
        move |t: &mut Vec<common::Named>| t.push((name.into(), vec![2], vec![0.0; 2]))
    };
    for name in [
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "something.weight",
    ] {
        let harm = |dir: &Path| {
            let model = TinyModel::tiny(3);
            let mut tensors = model.named(Form::TextV4);
            add(name)(&mut tensors);
            write_model(dir, &model.config(Form::TextV4), &tensors, Dtype::F32, 1);
        };
        refused(Form::TextV4, 1, harm, &[name, "does not belong to"]);
    }
    let peft = |t: &mut Vec<common::Named>| {
        t.iter_mut().for_each(|t| t.0 = format!("base_model.model.{}", t.0))
    };
    refused(Form::TextV4, 1, rewrite(peft), &["base_model.model.", "merge_and_unload"]);
    let two = |t: &mut Vec<common::Named>| {
        t.push(("language_model.model.embed_tokens.weight".into(), vec![1, 1], vec![0.0]))
    };
    refused(Form::TextV4, 1, rewrite(two), &["more than one language model"]);
    let head = |t: &mut Vec<common::Named>| {
        t.push(("lm_head.weight".into(), vec![160, 128], vec![0.5; 160 * 128]))
    };
    refused(Form::TextV4, 1, rewrite(head), &["lm_head.weight", "tie_word_embeddings"]);
    let dtype = |dir: &Path| {
        let mut bytes = fs::read(dir.join(FILE)).unwrap();
        let at = bytes.windows(6).position(|w| w == b"\"BF16\"").unwrap();
        bytes[at..at + 6].copy_from_slice(b"\"I16\" ");
        fs::write(dir.join(FILE), bytes).unwrap();
    };
    refused(Form::TextV4, 1, dtype, &["I16", "BF16, F16 or F32"]);
}

#[test]
fn norms_that_are_not_finite_are_refused_when_read() {
    let (_dir, path) = model(Form::TextV4, 1);
    let model = TinyModel::tiny(3);
    let mut tensors = model.named(Form::TextV4);
    tensors.last_mut().unwrap().2[5] = f32::NAN;
    write_model(&path, &model.config(Form::TextV4), &tensors, Dtype::BF16, 1);
    let weights = open(&path).unwrap();
    assert!(
        refusal(weights.vector(gemma::models::Role::FinalNorm, 0)).contains("model.norm.weight")
    );
}

#[test]
fn configurations_that_are_not_computed() {
    let text = Form::TextV4;
    for (key, value, word) in [
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_key_value_heads", json!(3), "evenly"),
        ("head_dim", json!(33), "multiple of 16"),
        ("head_dim", json!(56), "multiple of 16"),
        ("head_dim", json!(-2), "whole number"),
        ("hidden_size", json!(1u64 << 40), "hidden_size"),
        ("hidden_size", json!("big"), "hidden_size"),
        ("num_hidden_layers", json!(0), "num_hidden_layers"),
        ("num_hidden_layers", json!(5), "missing"),
        ("num_hidden_layers", json!(3), "does not belong to"),
        ("vocab_size", json!(100_000_000u64), "vocab_size"),
        ("vocab_size", json!(161), "embed_tokens"),
        ("sliding_window", json!(0), "sliding_window"),
        ("sliding_window", json!(null), "sliding_window"),
        ("sliding_window_pattern", json!(0), "sliding_window_pattern"),
        ("query_pre_attn_scalar", json!(0), "query_pre_attn_scalar"),
        ("rms_norm_eps", json!(-1e-6), "rms_norm_eps"),
        ("rope_theta", json!(1e60), "rope_theta"),
        ("attn_logit_softcapping", json!(50.0), "soft-capping"),
        ("final_logit_softcapping", json!(30.0), "soft-capping"),
        ("attention_bias", json!(true), "attention_bias"),
        ("use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        ("hidden_activation", json!("silu"), "gelu_pytorch_tanh"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ("rope_scaling", json!({"rope_type": "linear"}), "linear"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0.0}), "factor"),
        ("rope_scaling", json!({"factor": 8.0}), "factor"),
        ("rope_scaling", json!("linear"), "linear"),
        ("rope_parameters", json!({"rope_type": "linear", "factor": 8.0}), "full_attention"),
        ("layer_types", json!(["full_attention"]), "layer_types"),
        (
            "layer_types",
            json!(["full_attention", "full_attention", "full_attention", "chunked_attention"]),
            "chunked_attention",
        ),
        ("eos_token_id", json!("</s>"), "eos_token_id"),
        ("eos_token_id", json!([1, 160]), "outside the vocabulary"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
        ("model_type", json!("gemma2"), "gemma2"),
        ("model_type", json!("gemma3n"), "gemma3n"),
        ("quantization_config", json!({"quant_method": "awq"}), "awq"),
        ("quantization", json!({"bits": 4}), "MLX"),
    ] {
        refused(text, 1, config(|c| c[key] = value), &[word]);
    }
    let both = |c: &mut Value| {
        for key in ["model_type", "architectures"] {
            c.as_object_mut().unwrap().remove(key);
        }
    };
    refused(text, 1, config(both), &["no stated kind"]);
    refused(
        Form::Multimodal,
        1,
        config(|c| c["text_config"]["attn_logit_softcapping"] = json!(50.0)),
        &["soft-capping"],
    );
}

#[test]
fn artifacts_that_lie_about_their_formats() {
    let formats = |formats: Value| {
        config(move |c| {
            c["quantization_config"] =
                json!({"quant_method": "gemma", "version": 2, "formats": formats})
        })
    };
    const UP: &str = "model.layers.0.mlp.up_proj.weight";
    refused(Form::TextV4, 1, formats(json!({UP: "i4-row"})), &[UP, "lacks"]);
    refused(Form::TextV4, 1, formats(json!({UP: "i5-row"})), &[UP, "unknown weight format"]);
    refused(Form::TextV4, 1, formats(json!({UP: 4})), &[UP]);
    refused(Form::TextV4, 1, formats(json!(null)), &["formats"]);
    refused(
        Form::TextV4,
        1,
        config(|c| c["quantization_config"] = json!({"quant_method": "gemma", "version": 3})),
        &["newer"],
    );
    refused(
        Form::TextV4,
        1,
        config(|c| c["quantization_config"] = json!({"quant_method": "gemma"})),
        &["version"],
    );
}

/// Returns header and data of a small valid file.
fn good_file() -> Vec<u8> {
    let tensors =
        [("a".to_string(), vec![2, 3], vec![1.0; 6]), ("b".to_string(), vec![4], vec![2.0; 4])];
    safetensors(&tensors, Dtype::BF16)
}

/// Writes the bytes as a checkpoint's file, and uses it if it opens.
fn use_file(bytes: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), r#"{"model_type": "gemma3_text"}"#).unwrap();
    fs::write(dir.path().join(FILE), bytes).unwrap();
    if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
        for stored in checkpoint.stored() {
            let view = checkpoint.tensor(&stored.name).unwrap();
            let _ = (view.to_f32(), checkpoint.matrix(&stored.name));
        }
        let _ = Weights::open(checkpoint);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn changed_bytes_never_crash(changes in prop::collection::vec((0usize..200, any::<u8>()), 1..6),
        cut in 0usize..400) {
        let mut bytes = good_file();
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(cut);
        use_file(&bytes);
    }

    #[test]
    fn made_up_headers_never_crash(
        shape in prop::collection::vec(prop_oneof![0u64..5, Just(u64::MAX), Just(1 << 32),
            Just(1 << 63)], 0..4),
        offsets in prop::array::uniform2(prop_oneof![0u64..64, Just(u64::MAX), Just(u64::MAX - 7)]),
        dtype in prop_oneof![Just("F32"), Just("BF16"), Just("U8"), Just("F64"), Just("")],
        data in 0usize..64,
    ) {
        let header = json!({"t": {"dtype": dtype, "shape": shape,
            "data_offsets": offsets}}).to_string();
        use_file(&with_header(&header, &vec![0; data]));
    }

    #[test]
    fn made_up_values_never_crash(key in prop_oneof![
            Just("hidden_size"), Just("num_attention_heads"), Just("head_dim"),
            Just("rope_parameters"), Just("rope_scaling"),
            Just("layer_types"), Just("eos_token_id"), Just("sliding_window"), Just("vocab_size"),
            Just("text_config"),
        ], value in prop_oneof![
            any::<i64>().prop_map(|v| json!(v)), any::<f64>().prop_map(|v| json!(v)),
            ".*".prop_map(|v| json!(v)),
            prop::collection::vec(any::<u32>(), 0..4).prop_map(|v| json!(v)),
            Just(json!({"full_attention": 7})), Just(json!({})),
            Just(json!(true)),
        ]) {
        let mut config = TinyModel::tiny(3).config(Form::TextV5);
        config[key] = value;
        let _ = gemma::models::Config::from_json(&config);
    }
}
