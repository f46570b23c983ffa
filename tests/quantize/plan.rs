//! Plans: the dry run of a 27B checkpoint that consists of headers only, and sizes that are reached
//! exactly.

use crate::{common, shell};
use common::{Form, TinyModel};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::error::{Kind, fault_of};
use gemma::models::Weights;
use gemma::quant::prior;
use gemma::quant::recipe::BUILT_IN;
use gemma::quant::{Aim, Importance, Nearest, QuantPlan, QuantizeOptions, Recipe, quantize};
use serde_json::{Map, json};
use shell::gemma_in;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Writes Gemma 3 27B as on the hub, 12 shards, with headers and lengths but holes for data.
fn sparse_27b(dir: &Path) {
    const SHARDS: usize = 12;
    fs::create_dir_all(dir).unwrap();
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
            "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0,
                "rope_type": "linear"},
            "sliding_window": 1024, "model_type": "gemma3_text",
        },
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), " ".repeat(33_384_568)).unwrap();
    let mut tensors: Vec<(String, Vec<u64>)> =
        vec![("embed_tokens".into(), vec![262_208, 5376]), ("norm".into(), vec![5376])];
    for layer in 0..62 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![4096, 5376]),
            ("self_attn.k_proj", vec![2048, 5376]),
            ("self_attn.v_proj", vec![2048, 5376]),
            ("self_attn.o_proj", vec![5376, 4096]),
            ("mlp.gate_proj", vec![21_504, 5376]),
            ("mlp.up_proj", vec![21_504, 5376]),
            ("mlp.down_proj", vec![5376, 21_504]),
            ("self_attn.q_norm", vec![128]),
            ("self_attn.k_norm", vec![128]),
            ("input_layernorm", vec![5376]),
            ("post_attention_layernorm", vec![5376]),
            ("pre_feedforward_layernorm", vec![5376]),
            ("post_feedforward_layernorm", vec![5376]),
        ] {
            tensors.push((format!("layers.{layer}.{name}"), shape));
        }
    }
    let mut map = Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(SHARDS)).enumerate() {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", i + 1);
        let (mut header, mut at) = (Map::new(), 0);
        for (name, shape) in part {
            let (name, bytes) =
                (format!("language_model.model.{name}.weight"), 2 * shape.iter().product::<u64>());
            header.insert(
                name.clone(),
                json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes]}),
            );
            map.insert(name, json!(file));
            at += bytes;
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut out = File::create(dir.join(&file)).unwrap();
        out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        out.write_all(&header).unwrap();
        out.set_len(8 + header.len() as u64 + at).unwrap();
    }
    let index = json!({"metadata": {"total_size": 54_018_692_608u64}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn open(dir: &Path) -> Weights {
    Weights::open(Checkpoint::open(dir).unwrap()).unwrap()
}

fn plan(source: &Weights, recipe: &Recipe) -> anyhow::Result<QuantPlan> {
    let layers = source.config().layers.len();
    QuantPlan::new(
        source,
        recipe,
        &QuantizeOptions::default(),
        &Nearest::new(1),
        Importance::Relative(&|role, layer| prior(role, layer, layers)),
    )
}

/// A row of a dry run: the label of a class, bytes of codes, bytes of scales.
type Class = (&'static str, u64, u64);

/// Rows x columns x bits / 8 and 2 bytes per scale, computed here from the shapes.
const INT4: [Class; 9] = [
    ("embed_tokens", 262_208 * 5376, 262_208 * 168 * 2),
    ("q_proj", 62 * 4096 * 5376 / 2, 62 * 4096 * 168 * 2),
    ("k_proj", 62 * 2048 * 5376 / 2, 62 * 2048 * 168 * 2),
    ("v_proj", 62 * 2048 * 5376 / 2, 62 * 2048 * 168 * 2),
    ("o_proj", 62 * 5376 * 4096 / 2, 62 * 5376 * 128 * 2),
    ("gate_proj", 62 * 21_504 * 5376 / 2, 62 * 21_504 * 168 * 2),
    ("up_proj", 62 * 21_504 * 5376 / 2, 62 * 21_504 * 168 * 2),
    ("down_proj", 62 * 5376 * 21_504 / 2, 62 * 5376 * 672 * 2),
    ("norms", 1_354_496 * 2, 0),
];

/// As designed: 10.63 GB of codes, 11.01 GB with scales.
const SEED: [Class; 9] = [
    ("embed_tokens", 262_208 * 5376, 262_208 * 4),
    ("q_proj", 62 * 4096 * 5376 / 2, 62 * 4096 * 42 * 2),
    ("k_proj", 62 * 2048 * 5376 / 2, 62 * 2048 * 42 * 2),
    ("v_proj", 62 * 2048 * 5376 / 2, 62 * 2048 * 42 * 2),
    ("o_proj", 62 * 5376 * 4096 / 2, 62 * 5376 * 2),
    ("gate_proj", 62 * 21_504 * 5376 / 4, 62 * 21_504 * 42 * 2),
    ("up_proj", 62 * 21_504 * 5376 / 4, 62 * 21_504 * 42 * 2),
    ("down_proj", 62 * 5376 * 21_504 / 2, 62 * 5376 * 168 * 2),
    ("norms", 1_354_496, 2 * (62 * 6 + 1)),
];

#[test]
fn a_dry_run_of_27b_needs_headers_only_and_is_exact() {
    let dir = tempfile::tempdir().unwrap();
    sparse_27b(&dir.path().join("27b"));
    for (recipe, classes, sums) in [
        ("int4", INT4, "14.2 GB; with scales 15.9 GB"),
        ("seed", SEED, "10.6 GB; with scales 11.0 GB"),
    ] {
        let said =
            gemma_in(dir.path(), &["quantize", "27b", "out", "--recipe", recipe, "--dry-run"], b"")
                .ok();
        assert!(!dir.path().join("out").exists());
        let text = said.text();
        for (class, codes, scales) in classes {
            let row = text
                .lines()
                .find(|l| l.starts_with(&format!("| {class} ")))
                .unwrap_or_else(|| panic!("no {class} in {text}"));
            let cells: Vec<String> = row.split('|').map(|c| c.trim().replace(',', "")).collect();
            assert_eq!(
                cells[4..7],
                [codes.to_string(), scales.to_string(), (codes + scales).to_string()],
                "{recipe} {class}"
            );
        }
        assert!(text.contains(sums), "{text}");
        assert!(
            text.contains("\ntime          about ")
                && text.contains(" threads, from a small sample"),
            "{text}"
        );
        assert!(text.contains(" times that of int4, which is like Q4_0"), "{text}");
    }
}

#[test]
fn named_sizes_are_reached_from_below() {
    let dir = tempfile::tempdir().unwrap();
    sparse_27b(dir.path());
    let source = open(dir.path());
    let mut last = f64::INFINITY;
    for (name, size) in [("9gb", 9e9), ("10gb", 10e9), ("12gb", 12e9)] {
        let plan = plan(&source, &Recipe::load(name).unwrap()).unwrap();
        let share = plan.total_bytes as f64 / size;
        assert!(share <= 1.0 && share > 0.9995, "{name}: {}", plan.total_bytes);
        let error = plan.error;
        assert!(error > 0.003 && error < 0.09 && error < last, "{name}: {error} after {last}");
        last = error;
    }
    let sized =
        |size: u64| plan(&source, &Recipe::load("10gb").unwrap().with_target(size).unwrap());
    assert!(sized(8_123_456_789).unwrap().total_bytes <= 8_123_456_789);
    let fault = fault_of(&sized(5_000_000_000).unwrap_err()).unwrap().clone();
    assert_eq!(fault.kind, Kind::Usage);
    // The smallest size that the error names can be reached.
    let help = fault.help.unwrap();
    let smallest: u64 =
        help.split("--target-size ").nth(1).unwrap().split("kB").next().unwrap().parse().unwrap();
    assert!(
        sized(smallest * 1000).is_ok() && sized(smallest * 1000 - 1_000_000).is_err(),
        "{help}"
    );
    // Bits per weight count the weights only; the tokenizer's file is added.
    let bits =
        plan(&source, &Recipe::load("10gb").unwrap().with_target(Aim::BitsPerWeight(3.0)).unwrap())
            .unwrap();
    let got = 8.0 * bits.layout.bytes() as f64 / bits.layout.parameters() as f64;
    assert!(got <= 3.0 && got > 2.995, "{got}");
    // A size above that of the best formats is not an error.
    assert!(sized(60_000_000_000).unwrap().total_bytes < 30_000_000_000);
}

/// The planned files equal the written files, for every recipe.
#[test]
fn every_recipe_writes_what_it_predicts() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    TinyModel::tiny(3).write(&src, Form::Multimodal, Dtype::BF16, 2);
    fs::write(src.join("tokenizer_config.json"), "{}").unwrap();
    let source = open(&src);
    for (name, _) in BUILT_IN {
        let mut recipe = Recipe::load(name).unwrap();
        if recipe.is_for_mixtures() {
            let refusal = format!("{:#}", plan(&source, &recipe).err().unwrap());
            assert!(refusal.contains("is for mixtures of experts"), "{refusal}");
            continue;
        }
        if recipe.target().is_some() {
            recipe = recipe.with_target(300_000).unwrap();
        }
        let plan = plan(&source, &recipe).unwrap();
        let dst = dir.path().join(name);
        let options = QuantizeOptions { verify: true, ..QuantizeOptions::default() };
        quantize(&source, &dst, &recipe, &options, &mut |_| Ok(())).unwrap();
        let bytes: u64 =
            fs::read_dir(&dst).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(bytes, plan.total_bytes, "{name}");
        assert!(plan.target.is_none_or(|t| bytes <= t && bytes > t * 9 / 10), "{name}: {bytes}");
        open(&dst);
    }
}

#[test]
fn a_recipe_of_ones_own_is_followed_and_its_faults_are_told_with_their_line() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(4).write(&dir.path().join("src"), Form::TextV4, Dtype::BF16, 1);
    let run = |text: &str, more: &[&str]| {
        fs::write(dir.path().join("my.toml"), text).unwrap();
        gemma_in(
            dir.path(),
            &[&["quantize", "src", "dst", "--recipe", "my.toml"], more].concat(),
            b"",
        )
    };
    let good = "[formats]\n'layers.{0,3}.mlp.*' = 'i8-row'\n\
        'layers.*.self_attn.o_proj' = 'bf16'\n\
        linears = 'i4-g32'\nembed_tokens = 'i8-row'\nnorms = 'as-is'\n";
    run(good, &[]).ok();
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join("dst/quant-report.json")).unwrap())
            .unwrap();
    let format = |name: &str| {
        let tensors = report["tensors"].as_array().unwrap();
        tensors.iter().find(|t| t["name"] == format!("model.{name}.weight")).unwrap()["format"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        [format("layers.3.mlp.up_proj"), format("layers.1.mlp.up_proj")],
        ["i8-row", "i4-g32"]
    );
    assert_eq!([format("layers.2.self_attn.o_proj"), format("norm")], ["bf16", "bf16"]);
    assert_eq!(report["recipe"], "my.toml");

    fs::remove_dir_all(dir.path().join("dst")).unwrap();
    run(&format!("{good}'layers.4.**' = 'bf16'\n"), &[])
        .fails(3, &["my.toml, line 7", "layers.4.**", "help: "]);
    run(&good.replace("i4-g32", "i4-g48"), &[]).fails(3, &["line 4", "i4-g48"]);
    run(good, &["--target-size", "1MB"]).fails(2, &["has only one size", "help: "]);
    let open = good.replace("'i4-g32'", "['i4-g32', 'i8-row']");
    let sized = format!("target-size = '1MB'\n{open}");
    run(&sized, &[]).ok();
    fs::remove_dir_all(dir.path().join("dst")).unwrap();
    run(good, &["--linear", "bf16"]).fails(2, &["--linear"]);
    run(&good.replace("norms = 'as-is'", "norms = 'i4-g32'"), &[]).fails(3, &["norm", "help: "]);
    gemma_in(dir.path(), &["quantize", "src", "dst", "--recipe", "no-such"], b"")
        .fails(3, &["no-such", "int4"]);
    gemma_in(dir.path(), &["quantize", "src", "dst", "--target-size", "1kB"], b"")
        .fails(2, &["smallest", "help: "]);
    run(good, &["--mem-limit", "1MB"]).fails(5, &["memory", "--mem-limit"]);
    assert!(!dir.path().join("dst").exists());
}
