//! Compares this program with Hugging Face transformers (`scripts/golden/model.py`) token by token,
//! past windows, pages and rings. The files are those that transformers saved, in both spellings of
//! the configuration.

use crate::{common, reference};
use common::trees::reshape_global_layers;
use gemma::checkpoint::Checkpoint;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Config, Weights};
use gemma::tensor::Format;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use reference::ReferenceEngine;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const CASES: [&str; 6] =
    ["text", "multimodal", "untied", "gemma4-wide", "gemma4-unified", "gemma4-mixture"];

/// Limit in nats of a likelihood's difference from the golden one. All computation is in f32, so
/// only the order of sums differs. The reference engine differs by 2e-5, and the planned engine by
/// as much while its kernels keep activations in f32.
const ORACLE: f64 = 1e-4;
const PLANNED: f64 = 1e-3;

#[derive(Deserialize)]
struct Golden {
    ids: Vec<u32>,
    nll: Vec<f64>, // [ids - 1]
    /// The likelihoods with keys and values rounded to f16.
    nll_f16_cache: Vec<f64>,
    top1: Vec<u32>, // [ids]
    least_margin: f32,
    rows: BTreeMap<usize, Vec<f32>>, // position -> [vocab]
    greedy: Option<Greedy>,
}

/// A continuation at temperature 0.
#[derive(Deserialize)]
struct Greedy {
    prompt: usize, // tokens of `Golden::ids` before it
    ids: Vec<u32>,
}

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

fn golden(case: &str) -> Golden {
    serde_json::from_slice(&fs::read(folder(case).join("golden.json")).unwrap()).unwrap()
}

fn config(case: &str, file: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(case).join(file)).unwrap()).unwrap()
}

/// Returns the case's weights under another configuration.
fn weights(case: &str, config: &Value) -> Weights {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(folder(case).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    Weights::open(Checkpoint::open(dir.path()).unwrap()).unwrap()
}

/// Returns scores of all positions, in passes of `chunk` rows.
fn run(engine: &mut dyn Engine, ids: &[u32], chunk: usize) -> Scores {
    let mut all = Scores { vocab: engine.info().vocab, logits: Vec::new(), ..Scores::default() };
    let mut scores = Scores::default();
    for tokens in ids.chunks(chunk.min(engine.info().max_rows)) {
        engine.forward(&TokenTree::chain(tokens), Rows::All, &mut scores).unwrap();
        engine.commit(&[(0, &(0..tokens.len() as u32).collect::<Vec<_>>())]).unwrap();
        all.logits.extend_from_slice(&scores.logits);
    }
    all
}

fn nll(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    max + logits.iter().map(|v| (*v as f64 - max).exp()).sum::<f64>().ln()
        - logits[token as usize] as f64
}

/// Returns the largest difference of any token's likelihood, in nats.
fn worst_nll(scores: &Scores, golden: &Golden) -> f64 {
    assert!(scores.logits.iter().all(|v| v.is_finite()));
    let differences = golden
        .nll
        .iter()
        .enumerate()
        .map(|(i, want)| (nll(scores.row(i), golden.ids[i + 1]) - want).abs());
    differences.fold(0.0, f64::max)
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Checks likelihoods within `nats`, complete rows of logits within twice that, and the likeliest
/// tokens.
fn check(what: &str, scores: &Scores, golden: &Golden, nats: f64) {
    assert_eq!(scores.rows(), golden.ids.len(), "{what}");
    let worst = worst_nll(scores, golden);
    println!("{what}: worst NLL difference {worst:.2e}");
    assert!(worst < nats, "{what}: NLL differs by {worst}");
    for (at, want) in &golden.rows {
        let differs = largest_difference(scores.row(*at), want);
        assert!(differs < 2.0 * nats as f32, "{what}: logits at {at} differ by {differs}");
    }
    assert!(golden.least_margin > 0.0);
    for (i, want) in golden.top1.iter().enumerate() {
        let row = scores.row(i);
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // If two tokens are almost equally likely, either may be first.
        assert!(
            best - row[*want as usize] < 2.0 * nats as f32,
            "{what}: another token is likeliest at {i}"
        );
        if f64::from(golden.least_margin) > 4.0 * nats {
            assert_eq!(
                row.iter().position(|v| *v == best),
                Some(*want as usize),
                "{what}: top-1 at {i}"
            );
        }
    }
}

fn planned_with(weights: &Weights, context: usize, kv: KvFormat, threads: usize) -> PlannedEngine {
    let exec = CpuExecutor::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
    planned_on(Box::new(exec), weights, context, kv)
}

fn planned_on(
    exec: Box<dyn Executor>,
    weights: &Weights,
    context: usize,
    kv: KvFormat,
) -> PlannedEngine {
    PlannedEngine::new(weights, exec, EngineOptions { context, kv }).unwrap()
}

fn planned(weights: &Weights, context: usize) -> PlannedEngine {
    planned_with(weights, context, KvFormat::F32, 2)
}

#[test]
fn the_oracle_agrees_with_transformers_in_both_spellings_of_the_configuration() {
    for case in CASES {
        let golden = golden(case);
        for (file, chunk) in [("config.json", 256), ("config-v4.json", 97)] {
            let weights = weights(case, &config(case, file));
            let mut engine = ReferenceEngine::new(&weights, golden.ids.len()).unwrap();
            check(
                &format!("oracle, {case}, {file}"),
                &run(&mut engine, &golden.ids, chunk),
                &golden,
                ORACLE,
            );
        }
    }
}

#[test]
fn the_planned_engine_agrees_with_transformers() {
    for case in CASES {
        let golden = golden(case);
        let weights = weights(case, &config(case, "config.json"));
        for chunk in [256, 7] {
            let mut engine = planned(&weights, golden.ids.len());
            check(
                &format!("planned, {case}, chunks of {chunk}"),
                &run(&mut engine, &golden.ids, chunk),
                &golden,
                PLANNED,
            );
        }
    }
}

/// Weights are f32 here, as in the files, and a device computes with those too.
#[test]
fn a_device_agrees_with_transformers() {
    let Some(open) = common::vulkan::device() else { return };
    for case in CASES {
        let golden = golden(case);
        let weights = weights(case, &config(case, "config.json"));
        for chunk in [256, 7] {
            let mut engine =
                planned_on(Box::new(open()), &weights, golden.ids.len(), KvFormat::F32);
            check(
                &format!("device, {case}, chunks of {chunk}"),
                &run(&mut engine, &golden.ids, chunk),
                &golden,
                PLANNED,
            );
        }
    }
}

/// The best logit of each step is at least 0.02 above the second, so the texts are equal.
#[test]
fn greedy_texts_are_those_of_transformers() {
    let device = common::vulkan::device();
    for case in ["gemma4-wide", "gemma4-unified", "gemma4-mixture"] {
        let golden = golden(case);
        let greedy = golden.greedy.unwrap();
        let prompt = &golden.ids[..greedy.prompt];
        let weights = weights(case, &config(case, "config.json"));
        let context = prompt.len() + greedy.ids.len();
        let mut engines = vec![planned(&weights, context)];
        if let Some(open) = &device {
            engines.push(planned_on(Box::new(open()), &weights, context, KvFormat::F32));
        }
        for engine in &mut engines {
            let mut scores = run(engine, prompt, prompt.len());
            let mut text = Vec::new();
            loop {
                let best = scores.row(scores.rows() - 1).iter().enumerate();
                text.push(best.max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32);
                if text.len() == greedy.ids.len() {
                    break;
                }
                scores = run(engine, &text[text.len() - 1..], 1);
            }
            assert_eq!(text, greedy.ids, "{case}, {}", engine.report().device);
        }
    }
}

/// Rounding the cache changes likelihoods by far more than the tolerance above, so the golden cache
/// is rounded too. The remaining differences come from f32 noise of one part in ten million, by
/// which some values round the other way.
#[test]
fn an_f16_cache_is_transformers_with_rounded_keys_and_values() {
    for case in CASES {
        let golden = golden(case);
        let weights = weights(case, &config(case, "config.json"));
        let [scores, again] = [1, 2].map(|threads| {
            let mut engine = planned_with(&weights, golden.ids.len(), KvFormat::F16, threads);
            run(&mut engine, &golden.ids, 128)
        });
        assert_eq!(scores.logits, again.logits, "{case}: the number of threads shows");
        let got: Vec<f64> =
            (0..golden.nll.len()).map(|i| nll(scores.row(i), golden.ids[i + 1])).collect();
        let differences = |a: &[f64], b: &[f64]| {
            let mut all: Vec<f64> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
            all.sort_by(f64::total_cmp);
            (all[all.len() / 2], all[all.len() - 1])
        };
        let (median, worst) = differences(&got, &golden.nll_f16_cache);
        let (moved, moved_most) = differences(&golden.nll, &golden.nll_f16_cache);
        println!(
            "f16 cache, {case}: NLL differs by {median:.1e}, at most {worst:.1e}; \
                rounding moved {moved:.1e}, at most {moved_most:.1e}"
        );
        assert!(
            median < moved / 2.0 && worst < moved_most / 2.0,
            "{case}: NLL differs by {median:.1e}, at most {worst:.1e}"
        );
    }
}

/// Both engines do the same random operations: trees scored in one pass or two, random paths
/// committed, and sometimes a truncation.
#[test]
fn both_engines_live_through_the_same_trees() {
    let golden = golden("multimodal");
    let weights = weights("multimodal", &config("multimodal", "config.json"));
    let vocab = weights.config().vocab as u32;
    let mut engines: [Box<dyn Engine>; 2] =
        [Box::new(planned(&weights, 600)), Box::new(ReferenceEngine::new(&weights, 600).unwrap())];
    engines.iter_mut().for_each(|engine| drop(run(engine.as_mut(), &golden.ids[..30], 64)));
    let mut rng = SmallRng::seed_from_u64(1);
    let (mut worst, mut steps_back) = (0f32, 0);
    // From inside the first window of 40 to beyond the first page of 256.
    while engines[0].position(0) < 300 {
        let (first, more) = (rng.random_range(1..40), rng.random_range(0..10));
        let mut tree = TokenTree::root(rng.random_range(0..vocab));
        for i in 1..first + more {
            let parent = if rng.random_bool(0.7) { i - 1 } else { rng.random_range(0..i) };
            tree.push(parent, rng.random_range(0..vocab));
        }
        let start = TokenTree {
            tokens: tree.tokens[..first as usize].to_vec(),
            parent: tree.parent[..first as usize].to_vec(),
        };
        let mut path = vec![rng.random_range(0..first + more)];
        while let Some(parent) = tree.parent[path[0] as usize] {
            path.insert(0, parent);
        }
        let back = if rng.random_bool(0.2) { rng.random_range(1..30) } else { 0 };
        steps_back += usize::from(back > 0);
        let [a, b] = engines.each_mut().map(|engine| {
            let mut scores = [Scores::default(), Scores::default()];
            engine.forward(&start, Rows::All, &mut scores[0]).unwrap();
            if more > 0 {
                engine
                    .run(
                        &[Input::new(0, &tree, Rows::All).after(first as usize)],
                        Output::Logits,
                        &mut scores[1],
                    )
                    .unwrap();
            }
            assert_eq!(scores.each_ref().map(Scores::rows), [first as usize, more as usize]);
            engine.commit(&[(0, &path)]).unwrap();
            engine.truncate(0, engine.position(0) - back).unwrap();
            (scores.map(|s| s.logits).concat(), engine.position(0))
        });
        assert_eq!(a.1, b.1);
        worst = worst.max(largest_difference(&a.0, &b.0));
    }
    println!("trees: largest difference of a logit {worst:.1e}, {steps_back} steps back");
    assert!(steps_back > 0 && worst < 1e-3, "logits differ by {worst}");
}

#[test]
fn layers_of_different_shapes_score_alike_in_both_engines() {
    let plain = Config::from_json(&config(CASES[0], "config.json")).unwrap();
    let weights = Weights::synthetic(reshape_global_layers(plain), |_| Format::F32, 3);
    let ids = golden(CASES[0]).ids;
    let mut oracle = ReferenceEngine::new(&weights, ids.len()).unwrap();
    let want = run(&mut oracle, &ids, 97);
    let got = run(&mut planned(&weights, ids.len()), &ids, 256);
    let differs = largest_difference(&got.logits, &want.logits);
    assert!(!weights.config().global_layers().is_empty() && differs < 1e-3, "by {differs}");
}

#[test]
fn a_tree_scores_alike_in_both_engines() {
    let mut rng = SmallRng::seed_from_u64(5);
    for case in CASES {
        let golden = golden(case);
        let weights = weights(case, &config(case, "config.json"));
        let (mut oracle, mut planned) =
            (ReferenceEngine::new(&weights, 400).unwrap(), planned(&weights, 400));
        let prefix = &golden.ids[..golden.ids.len().min(310)];
        run(&mut oracle, prefix, 64);
        run(&mut planned, prefix, 64);
        let mut tree = TokenTree::root(rng.random_range(0..200));
        for _ in 0..20 {
            tree.push(rng.random_range(0..tree.len() as u32), rng.random_range(0..200));
        }
        let (mut a, mut b) = (Scores::default(), Scores::default());
        for engine in [&mut oracle as &mut dyn Engine, &mut planned] {
            let is_oracle = engine.report().device.starts_with("reference");
            let scores = if is_oracle { &mut a } else { &mut b };
            engine.run(&[Input::new(0, &tree, Rows::All)], Output::Hidden, scores).unwrap();
        }
        assert_eq!(a.rows(), 21);
        assert!(largest_difference(&a.logits, &b.logits) < 1e-3, "{case}: trees differ");
        assert_eq!(a.hidden.len(), b.hidden.len());
        assert!(!a.hidden.is_empty());
        assert!(largest_difference(&a.hidden, &b.hidden) < 1e-3, "{case}: hidden states differ");
        // The deepest path is committed in both engines, and the next token follows it.
        let depths = tree.depths();
        let mut node = (0..21u32).max_by_key(|n| depths[*n as usize]);
        let mut path = Vec::new();
        while let Some(n) = node {
            path.insert(0, n);
            node = tree.parent[n as usize];
        }
        for (engine, scores) in [(&mut oracle as &mut dyn Engine, &mut a), (&mut planned, &mut b)] {
            engine.commit(&[(0, &path)]).unwrap();
            engine.forward(&TokenTree::root(9), Rows::Last, scores).unwrap();
        }
        assert!(
            largest_difference(&a.logits, &b.logits) < 1e-3,
            "{case}: the token after the tree differs"
        );
    }
}

/// Each wrong reading of a configuration changes likelihoods far beyond the tolerances above, so
/// the golden vectors would reveal it.
#[test]
fn the_vectors_notice_a_model_that_is_slightly_wrong() {
    let golden = golden("text");
    let right = config("text", "config-v4.json");
    let wrong: [(&str, Value); 8] = [
        ("query_pre_attn_scalar", 32.into()),
        ("sliding_window", 299.into()),
        ("sliding_window", 301.into()),
        ("sliding_window_pattern", 7.into()),
        ("rope_scaling", Value::Null),
        ("rope_theta", 1e5.into()),
        ("rope_local_base_freq", 1.1e4.into()),
        ("rms_norm_eps", 1e-2.into()),
    ];
    for (key, value) in wrong {
        let mut config = right.clone();
        config[key] = value;
        let weights = weights("text", &config);
        let mut engine = ReferenceEngine::new(&weights, golden.ids.len()).unwrap();
        let worst = worst_nll(&run(&mut engine, &golden.ids, 256), &golden);
        assert!(worst > 1e-2, "a wrong `{key}` moves no likelihood by more than {worst}");
    }
}

#[test]
fn the_vectors_of_gemma_4_notice_it_too() {
    let golden = golden("gemma4-wide");
    let right = config("gemma4-wide", "config-v4.json");
    let rope = |global: Value| {
        serde_json::json!({"full_attention": global, "sliding_attention":
        {"rope_type": "default", "rope_theta": 1e4}})
    };
    let wrong: [(&str, Value); 5] = [
        ("final_logit_softcapping", 29.0.into()),
        ("final_logit_softcapping", Value::Null),
        ("sliding_window", 39.into()),
        ("rope_parameters", rope(serde_json::json!({"rope_type": "default", "rope_theta": 1e6}))),
        (
            "rope_parameters",
            rope(serde_json::json!({"rope_type": "proportional", "rope_theta": 1e6,
                "partial_rotary_factor": 0.5})),
        ),
    ];
    for (key, value) in wrong {
        let mut config = right.clone();
        config["text_config"][key] = value;
        let mut engine =
            ReferenceEngine::new(&weights("gemma4-wide", &config), golden.ids.len()).unwrap();
        let worst = worst_nll(&run(&mut engine, &golden.ids, 256), &golden);
        assert!(worst > 5e-3, "a wrong `{key}` moves no likelihood by more than {worst}");
    }
}
