//! Gemma 4's weights in GGUF files: in the form of llama.cpp's converter and of the quantiser, and
//! damaged. The models are those of `scripts/golden/model.py`.

use crate::common::gguf::{self, BF16, F32, File, Tensor, Val, floats, logits};
use gemma::checkpoint::Checkpoint;
use gemma::error::{Kind, fault_of};
use gemma::models::{Role, TensorSpec, Weights};
use gemma::quant::{QuantizeOptions, Recipe, quantize};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const CASES: [&str; 3] = ["gemma4-wide", "gemma4-unified", "gemma4-mixture"];

pub fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

fn config(case: &str, file: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(case).join(file)).unwrap()).unwrap()
}

pub fn open(path: &Path) -> Weights {
    Weights::open(Checkpoint::open(path).unwrap()).unwrap()
}

/// Returns the keys in the form of llama.cpp's converter.
fn keys(config: &Value) -> Vec<(String, Val)> {
    let n = |key: &str| config[key].as_u64().unwrap() as u32;
    let local: Vec<bool> = config["layer_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind == "sliding_attention")
        .collect();
    let heads = |local: &bool| match local {
        true => n("num_key_value_heads") as i32,
        false => n("num_global_key_value_heads") as i32,
    };
    let (global_dim, dim) = (Val::U32(n("global_head_dim")), Val::U32(n("head_dim")));
    let mut keys = vec![
        ("general.architecture".to_owned(), Val::Str("gemma4".into())),
        ("tokenizer.ggml.model".into(), Val::Str("no_vocab".into())),
        ("tokenizer.ggml.eot_token_id".into(), Val::U32(106)),
    ];
    keys.extend(
        [
            ("block_count", Val::U32(n("num_hidden_layers"))),
            ("context_length", Val::U32(n("max_position_embeddings"))),
            ("embedding_length", Val::U32(n("hidden_size"))),
            ("feed_forward_length", Val::U32(n("intermediate_size"))),
            ("attention.head_count", Val::U32(n("num_attention_heads"))),
            ("attention.head_count_kv", Val::I32s(local.iter().map(heads).collect())),
            ("attention.key_length", global_dim.clone()),
            ("attention.value_length", global_dim.clone()),
            ("attention.key_length_swa", dim.clone()),
            ("attention.value_length_swa", dim.clone()),
            ("attention.sliding_window", Val::U32(n("sliding_window"))),
            ("attention.sliding_window_pattern", Val::Bools(local)),
            ("attention.shared_kv_layers", Val::U32(0)),
            ("attention.layer_norm_rms_epsilon", Val::F32(1e-6)),
            ("embedding_length_per_layer_input", Val::U32(0)),
            ("final_logit_softcapping", Val::F32(30.0)),
            ("rope.freq_base", Val::F32(1e6)),
            ("rope.freq_base_swa", Val::F32(1e4)),
            ("rope.dimension_count", global_dim),
            ("rope.dimension_count_swa", dim),
        ]
        .map(|(key, value)| (format!("gemma4.{key}"), value)),
    );
    if config["enable_moe_block"] == true {
        for (key, name) in [
            ("expert_count", "num_experts"),
            ("expert_used_count", "top_k_experts"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ] {
            keys.push((format!("gemma4.{key}"), Val::U32(n(name))));
        }
    }
    keys
}

/// Returns a golden model in that form: matrices in bf16, vectors in f32, norms unchanged.
fn file(case: &str) -> File {
    let config = &config(case, "config-v4.json")["text_config"];
    let mut file = File { keys: keys(config), ..File::default() };
    let pairs = config["global_head_dim"].as_u64().unwrap() as usize / 2;
    let mut divisors = vec![1e30; pairs];
    divisors[..pairs / 4].fill(1.0);
    let mut push = |name: &str, shape: &[usize], kind, values: &[f32]| {
        let dims = shape.iter().rev().map(|n| *n as u64).collect();
        file.tensors.push(Tensor { name: name.into(), dims, kind, data: floats(kind, values) });
    };
    push("rope_freqs.weight", &[pairs], F32, &divisors);
    for (name, tensor) in Checkpoint::open(&golden(case)).unwrap().tensors() {
        let name = gguf::name_of(name.strip_prefix("model.language_model.").unwrap());
        let is_float = tensor.shape.len() == 1 || name.contains("ffn_gate_inp");
        let kind = if is_float { F32 } else { BF16 };
        push(&name, tensor.shape, kind, &tensor.to_f32().unwrap());
    }
    file
}

/// Asserts that two models have the same weights. `whole_images` is not compared: GGUF does not say
/// whether rows of an image see each other, which differs only for models with embeddings for each
/// layer.
pub fn assert_same_weights(a: &Weights, b: &Weights) {
    let [a_config, b_config] = [a, b].map(|weights| {
        let mut config = weights.config().clone();
        config.layers.iter_mut().for_each(|layer| layer.whole_images = false);
        config
    });
    assert_eq!(a_config, b_config);
    assert_eq!(a.tensors(), b.tensors());
    for &TensorSpec { role, layer, .. } in a.tensors() {
        let [a, b] = [a, b].map(|weights| match role.is_matrix() {
            true => weights.matrix(role, layer).unwrap().dequantize(),
            false => weights.vector(role, layer).unwrap(),
        });
        assert!(a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits())), "{role:?}");
    }
}

fn assert_same(a: &Weights, b: &Weights) {
    assert_same_weights(a, b);
    assert_eq!(logits(a), logits(b));
}

/// Divides the gate and up matrices of experts into two tensors, as older converters did.
fn part_experts(file: &mut File) {
    let is_fused = |t: &Tensor| t.name.contains("ffn_gate_up_exps");
    let fused: Vec<Tensor> = file.tensors.iter().filter(|t| is_fused(t)).cloned().collect();
    file.tensors.retain(|t| !is_fused(t));
    for tensor in fused {
        let [cols, rows, experts] = tensor.dims[..] else { panic!("{:?}", tensor.dims) };
        let half = tensor.data.len() / experts as usize / 2;
        for (i, name) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
            let data = tensor.data.chunks_exact(half).skip(i).step_by(2).flatten().copied();
            file.tensors.push(Tensor {
                name: tensor.name.replace("ffn_gate_up_exps", name),
                dims: vec![cols, rows / 2, experts],
                kind: tensor.kind,
                data: data.collect(),
            });
        }
    }
}

#[test]
fn experts_in_two_tensors_compute_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (hf, mut file) = (open(&golden("gemma4-mixture")), file("gemma4-mixture"));
    part_experts(&mut file);
    file.write(&dir.path().join("parted.gguf"));
    let parted = open(&dir.path().join("parted.gguf"));
    assert!(!parted.config().experts.unwrap().fused && hf.config().experts.unwrap().fused);
    assert_eq!(logits(&hf), logits(&parted));
}

/// Returns the name, shape and bytes of all tensors of a file, sorted.
pub fn stored(path: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let raw = |(name, t): (&str, gemma::checkpoint::TensorView<'_>)| {
        (name.to_owned(), t.shape.to_vec(), t.data.to_vec())
    };
    let mut tensors: Vec<_> = checkpoint.tensors().map(raw).collect();
    tensors.sort();
    tensors
}

#[test]
fn a_converted_file_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for case in CASES {
        // On Windows, a mapped file cannot be written again.
        let path = |name: &str| dir.path().join(format!("{}-{name}.gguf", case.replace('/', "-")));
        let hf = open(&golden(case));
        let mut file = file(case);
        file.write(&path("plain"));
        assert_same(&hf, &open(&path("plain")));
        // A file may also store the values' matrix, which then equals that of the keys.
        for layer in hf.config().global_layers() {
            let keys = format!("blk.{layer}.attn_k.weight");
            let keys = file.tensors.iter().find(|t| t.name == keys).unwrap();
            let name = format!("blk.{layer}.attn_v.weight");
            let values = Tensor { name, ..keys.clone() };
            file.tensors.push(values);
        }
        file.write(&path("own"));
        let own = open(&path("own"));
        assert!(own.config().layers.iter().all(|layer| !layer.values_are_keys));
        assert_eq!(logits(&hf), logits(&own));
        file.set("gemma4.final_logit_softcapping", Val::F32(0.0));
        file.write(&path("uncapped"));
        assert_eq!(open(&path("uncapped")).config().logit_cap, None);
    }
}

/// Writes a golden model with a tokenizer, which the quantiser needs.
fn source(case: &str, dir: &Path) -> PathBuf {
    let path = dir.join(case);
    fs::create_dir(&path).unwrap();
    let mut config = config(case, "config.json");
    // A GGUF file with this tokenizer has these end tokens.
    config["text_config"]["eos_token_id"] = json!([1, 50, 106]);
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    fs::copy(golden(case).join("model.safetensors"), path.join("model.safetensors")).unwrap();
    fs::copy(golden("gemma4/tokenizer.json"), path.join("tokenizer.json")).unwrap();
    path
}

fn recipe(format: &str) -> Recipe {
    Recipe::inline(format.parse().unwrap(), format.parse().unwrap())
}

fn convert(from: &Weights, to: &Path, format: &str, gguf: bool) -> anyhow::Result<()> {
    let options = QuantizeOptions { gguf, threads: 2, ..QuantizeOptions::default() };
    quantize(from, to, &recipe(format), &options, &mut |_| Ok(())).map(|_| ())
}

#[test]
fn the_quantiser_writes_the_file_of_the_converter() {
    let dir = tempfile::tempdir().unwrap();
    for case in CASES {
        let hf = open(&source(case, dir.path()));
        let path = |name: &str| dir.path().join(format!("{case}-{name}"));
        file(case).write(&path("converted.gguf"));
        convert(&hf, &path("written.gguf"), "bf16", true).unwrap();
        assert!(stored(&path("converted.gguf")) == stored(&path("written.gguf")));
        assert_same(&hf, &open(&path("written.gguf")));
        // Complete models in Q4_0, as Google publishes them.
        convert(&hf, &path("artifact"), "i4-g32", false).unwrap();
        convert(&hf, &path("q4_0.gguf"), "i4-g32", true).unwrap();
        assert_same(&open(&path("artifact")), &open(&path("q4_0.gguf")));
        // An interrupted run continues, although one tensor of the file is not in the source.
        let options = QuantizeOptions { gguf: true, threads: 2, ..QuantizeOptions::default() };
        let mut left = 9;
        let ended = quantize(&hf, &path("cut.gguf"), &recipe("i4-g32"), &options, &mut |p| {
            left -= usize::from(p.error.is_some());
            anyhow::ensure!(left > 0, "enough");
            Ok(())
        });
        assert!(ended.is_err());
        convert(&hf, &path("cut.gguf"), "i4-g32", true).unwrap();
        assert!(fs::read(path("cut.gguf")).unwrap() == fs::read(path("q4_0.gguf")).unwrap());
    }
}

#[test]
fn a_rotation_that_no_file_can_say_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = source(CASES[0], dir.path());
    for (kind, key, value) in [
        ("full_attention", "factor", json!(8.0)),
        ("sliding_attention", "rope_type", json!("proportional")),
    ] {
        let mut config = config(CASES[0], "config.json");
        let ropes = &mut config["text_config"]["rope_parameters"];
        ropes["sliding_attention"]["partial_rotary_factor"] = json!(0.5);
        ropes[kind][key] = value;
        fs::write(path.join("config.json"), config.to_string()).unwrap();
        let error = convert(&open(&path), &dir.path().join("x.gguf"), "bf16", true).unwrap_err();
        assert!(format!("{error:#}").contains("rotate otherwise"), "{error:#}");
    }
}

/// Opens a file. It must succeed, or be refused with exit code 3, a reason and a remedy.
#[track_caller]
fn opened(bytes: &[u8], path: &Path) -> Result<Weights, String> {
    fs::write(path, bytes).unwrap();
    Checkpoint::open(path).and_then(Weights::open).map_err(|error| {
        let fault = fault_of(&error).unwrap_or_else(|| panic!("no fault in: {error:#}"));
        assert_eq!(fault.kind, Kind::Model, "{error:#}");
        format!("{error:#} | {}", fault.help.as_ref().expect("no remedy"))
    })
}

#[test]
fn other_models_and_damage_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = file(CASES[1]);
    let refused = |harm: &dyn Fn(&mut File), word: &str| {
        let mut file = good.clone();
        harm(&mut file);
        let text = opened(&file.bytes(), &dir.path().join("x.gguf")).expect_err(word);
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    };
    let sets = |key: &str, value: Val, word: &str| {
        refused(&|f| f.set(&format!("gemma4.{key}"), value.clone()), word);
    };
    sets("expert_count", Val::U32(128), "top_k_experts");
    sets("embedding_length_per_layer_input", Val::U32(256), "E2B");
    sets("attention.shared_kv_layers", Val::U32(3), "E4B");
    sets("feed_forward_length", Val::I32s([[64; 6], [128; 6]].concat()), "double width");
    sets("rope.scaling.type", Val::Str("yarn".into()), "yarn");
    sets("rope.scaling.factor", Val::F32(8.0), "rope.scaling.factor");
    sets("rope.freq_base", Val::Str("1e6".into()), "not a number");
    sets("final_logit_softcapping", Val::F32(f32::NAN), "not a number");
    sets("attention.value_length", Val::U32(32), "value_length");
    sets("rope.dimension_count_swa", Val::U32(16), "dimension_count_swa");
    sets("attention.head_count_kv", Val::I32s(vec![3; 11]), "list 12");
    sets("attention.sliding_window_pattern", Val::Bools(vec![true; 3]), "list 12");
    sets("attention.sliding_window_pattern", Val::Bools(vec![true; 12]), "last layer");
    sets("attention.sliding_window_pattern", Val::Bools(vec![false; 12]), "attn_v");
    sets("block_count", Val::U32(u32::MAX), "1 to 1024");
    for key in ["attention.sliding_window", "attention.sliding_window_pattern"] {
        refused(&|f| f.remove(&format!("gemma4.{key}")), key);
    }
    let tensor = |f: &File, name: &str| f.tensors.iter().position(|t| t.name == name).unwrap();
    for (values, word) in [
        (vec![2.0; 32], "scales frequencies"),
        ([[1.0; 16], [1e9; 16]].concat(), "scales frequencies"),
        ([[1.0; 16], [f32::NAN; 16]].concat(), "scales frequencies"),
        (vec![1e30; 32], "scales frequencies"),
        (vec![1.0; 16], "16 numbers"),
    ] {
        let freqs = |f: &mut File| {
            f.tensors[0].dims = vec![values.len() as u64];
            f.tensors[0].data = floats(F32, &values);
        };
        refused(&freqs, word);
    }
    refused(&|f| drop(f.tensors.remove(0)), "`rope_freqs.weight` is missing");
    let harm = |f: &mut File| {
        let values = tensor(f, "blk.0.attn_v.weight");
        f.tensors.remove(values);
    };
    refused(&harm, "v_proj.weight");
    let harm = |f: &mut File| {
        let mut values = f.tensors[tensor(f, "blk.5.attn_k.weight")].clone();
        values.name = "blk.5.attn_v.weight".into();
        f.tensors.push(values);
    };
    refused(&harm, "some of the layers");
}

#[test]
fn no_key_of_any_value_crashes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let good = file(CASES[1]);
    let wrong = [
        Val::Str("x".into()),
        Val::Bool(true),
        Val::U32(0),
        Val::U32(u32::MAX),
        Val::Raw(10, u64::MAX.to_le_bytes().to_vec()),
        Val::Raw(11, i64::MIN.to_le_bytes().to_vec()),
        Val::F32(f32::NAN),
        Val::F32(1e38),
        Val::I32s(vec![]),
        Val::I32s(vec![-1; 12]),
        Val::I32s(vec![i32::MAX; 12]),
        Val::Strs(vec!["x".into(); 12]),
    ];
    for (key, _) in &good.keys {
        for value in &wrong {
            let mut file = good.clone();
            file.set(key, value.clone());
            let _ = opened(&file.bytes(), &path);
        }
        let mut file = good.clone();
        file.remove(key);
        let _ = opened(&file.bytes(), &path);
    }
    let mut random = SmallRng::seed_from_u64(4);
    let bytes = good.bytes();
    for _ in 0..256 {
        let mut bytes = bytes.clone();
        for _ in 0..random.random_range(1..6) {
            bytes[random.random_range(0..12_000)] = random.random();
        }
        if let Ok(weights) = opened(&bytes, &path) {
            let _ = weights.vector(Role::LayerScale, 0);
        }
    }
}
