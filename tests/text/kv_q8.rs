//! `--kv q8` for users: about half the bytes of f16, one text with any drafts, and nearly the
//! likelihoods of f16.

use crate::{common, shell};
use common::{trees, vulkan};
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Isa};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, PlannedEngine, Rows, Scores};
use gemma::models::{Config, Weights};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use shell::{BINARY, Run, command, wait};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Returns a configuration of a local and a global layer, with heads of this size.
fn configuration(head_dim: usize) -> anyhow::Result<Config> {
    let json = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": head_dim,
        "vocab_size": trees::VOCAB,
        "query_pre_attn_scalar": head_dim, "sliding_window": 100, "sliding_window_pattern": 2,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 4096,
    });
    Config::from_json(&json)
}

fn weights(head_dim: usize) -> Weights {
    let format = "bf16".parse().unwrap();
    Weights::synthetic(configuration(head_dim).unwrap(), move |_| format, 5)
}

/// Few and many groups, 16 and 32 channels wide, and every width of the loops over keys and values.
#[test]
fn kernels_equal_their_twins_for_every_head_size() {
    for head_dim in [16, 48, 64, 128, 256, 320] {
        for isa in Isa::all_supported() {
            let exec =
                CpuExecutor::new(CpuOptions { threads: 2, isa: Some(isa), check: true }).unwrap();
            let options = EngineOptions { context: 400, kv: KvFormat::Q8 };
            let mut engine =
                PlannedEngine::new(&weights(head_dim), Box::new(exec), options).unwrap();
            let mut rng = SmallRng::seed_from_u64(head_dim as u64);
            let text = trees::tokens(&mut rng, 300);
            trees::prefill(&mut engine, &text, &mut rng);
            let mut scores = Scores::default();
            for rows in [1, 2, 3, 9] {
                engine
                    .forward(&trees::random_tree(&mut rng, rows), Rows::All, &mut scores)
                    .unwrap();
            }
            assert!(scores.logits.iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn heads_that_no_group_divides_are_refused() {
    for head_dim in [8, 24, 72] {
        let error = configuration(head_dim).err().unwrap();
        assert_eq!(gemma::error::fault_of(&error).unwrap().kind.exit_code(), 3);
        assert!(error.to_string().contains(&format!("not {head_dim}")), "{error:#}");
    }
}

/// Runs the bundled model on this device, which may be a driver on the CPU. All runs share a home
/// directory, so that a driver is tried only once.
fn run(device: &str, args: &[&str], input: &[u8]) -> Run {
    static HOME: LazyLock<PathBuf> = LazyLock::new(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kv_q8");
        fs::create_dir_all(&dir).unwrap();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/quant/calibration.txt");
        let text = fs::read_to_string(path).unwrap();
        for characters in [400, 40000] {
            let part: String = text.chars().take(characters).collect();
            fs::write(dir.join(characters.to_string()), part).unwrap();
        }
        dir
    });
    let mut command = command(BINARY, &HOME);
    for name in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"] {
        command.envs(std::env::var_os(name).map(|v| (name, v)));
    }
    command.env(gemma::vulkan::ALLOW_CPU_DRIVER, "1").args(args).args(["-d", device, "-q"]);
    wait(command, input).ok()
}

fn devices() -> Vec<&'static str> {
    if vulkan::device().is_some() { vec!["cpu", "vulkan"] } else { vec!["cpu"] }
}

/// Returns whether a token takes half a second, on a driver on the CPU or an emulated processor.
fn is_slow(device: &str) -> bool {
    device != "cpu" || shell::emulator().is_some()
}

#[test]
fn one_text_whatever_drafts() {
    for device in devices() {
        let tokens = if is_slow(device) { 10 } else { 24 };
        let record = |temperature: u32| {
            let prompt = "What is a prime number?";
            json!({"id": temperature, "prompt": prompt, "temperature": temperature, "seed": 3,
                "max_tokens": tokens})
            .to_string()
        };
        let records = [record(0), record(1)].join("\n");
        let texts = |draft: &[&str]| {
            let args = ["generate", "--batch", "-", "--kv", "q8"];
            run(device, &[&args, draft].concat(), records.as_bytes()).out
        };
        let plain = texts(&["--draft", "off"]);
        assert!(plain.len() > 200, "{device}: {}", String::from_utf8_lossy(&plain));
        for draft in [
            &["--draft", "ngram"][..],
            &["--draft", "bundled"],
            &["--draft", "auto", "--draft-tree", "12"],
        ] {
            assert_eq!(texts(draft), plain, "{device}, {draft:?}");
        }
    }
}

/// The bound is a few standard errors of the difference. f16 differs from f32 by as much, because
/// an activation that is rounded the other way changes single tokens a lot. `--nocapture` prints
/// the values.
#[test]
fn likelihoods_are_nearly_those_of_f16() {
    for device in devices() {
        // Few tokens get a wider bound. A wrong kernel is off by whole units.
        let (characters, bound) = if is_slow(device) { ("400", 0.06) } else { ("40000", 0.003) };
        let eval = |kv| {
            let args = ["eval", characters, "-c", "128", "--kv", kv, "--json"];
            run(device, &args, b"").json()
        };
        let (half, q8) = (eval("f16"), eval("q8"));
        assert_ne!(half["nll"], q8["nll"], "{device}: --kv changed nothing");
        let mean = |j: &Value| j["mean_nll"].as_f64().unwrap();
        let tokens = half["nll"].as_array().unwrap().len();
        println!(
            "{device}: mean NLL of {tokens} tokens {:.5} with f16, {:.5} with q8",
            mean(&half),
            mean(&q8)
        );
        assert!(
            (mean(&half) - mean(&q8)).abs() < bound,
            "{device}: {} and {}",
            mean(&half),
            mean(&q8)
        );
    }
}

#[test]
fn bytes_are_17_of_32() {
    for device in devices() {
        let kv = |kv| {
            let args = [
                "generate", "Hello", "--kv", kv, "-n", "1", "-c", "600", "--draft", "off",
                "--format", "json",
            ];
            run(device, &args, b"").json()["memory"]["kv"].as_u64().unwrap()
        };
        let half = kv("f16");
        assert_eq!(kv("q8") * 32, half * 17, "{device}");
        if device == "cpu" {
            assert_eq!(half * 2, kv("f32"));
        }
    }
}
