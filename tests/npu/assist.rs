//! Models on an executor with an NPU, modelled in software: exact rows, one text with any drafts,
//! faults, and the command line.

use crate::{common, invariance, shell};
use common::trees::{VOCAB, bits, check_tree, one_by_one, prefill, tokens};
use common::vulkan::device;
use common::{Dims as TinyDims, Form, TinyModel};
use gemma::checkpoint::Dtype;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Config, Weights};
use gemma::npu::OffloadExecutor;
use gemma::npu::attention::{Dims, FlashPartial};
use gemma::npu::host::{FaultKind, HostModelAccel, HostModelOptions, NpuFault, OpenHandles};
use gemma::npu::session::NpuSession;
use gemma::runtime::placement::measure::Task;
use gemma::sampler::SamplerConfig;
use gemma::testing::NPU_FAULT;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use shell::{BINARY, command, gemma_in, wait};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Returns a configuration in which every n-th layer is global. It has four queries for two kv
/// heads of a size that the kernel supports.
fn config_of(n_layers: usize, pattern: usize) -> Config {
    let json = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": n_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": VOCAB,
        "query_pre_attn_scalar": 128, "sliding_window": 40, "sliding_window_pattern": pattern,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 4096,
    });
    Config::from_json(&json).unwrap()
}

fn weights_of(config: Config) -> Weights {
    Weights::synthetic(config, |_| "f32".parse().unwrap(), 5)
}

/// Returns weights of two layers. The second one is global.
fn weights() -> Weights {
    weights_of(config_of(2, 2))
}

fn dims() -> Dims {
    gemma::runtime::devices::npu::dims(&config_of(2, 2)).unwrap()
}

fn cpu(threads: usize, check: bool) -> Box<CpuExecutor> {
    Box::new(CpuExecutor::new(CpuOptions { threads, isa: None, check }).unwrap())
}

const CONTEXT: usize = 1200;

fn plain(kv: KvFormat) -> PlannedEngine {
    PlannedEngine::new(&weights(), cpu(2, false), EngineOptions { context: CONTEXT, kv }).unwrap()
}

/// Returns an engine with the NPU's model and the processor, and the number of its open handles.
fn assisted(
    kv: KvFormat,
    share: usize,
    options: HostModelOptions,
    exec: Box<dyn Executor>,
) -> (PlannedEngine, Arc<OpenHandles>) {
    assisted_with(&weights(), kv, share, options, exec)
}

fn assisted_with(
    weights: &Weights,
    kv: KvFormat,
    share: usize,
    options: HostModelOptions,
    exec: Box<dyn Executor>,
) -> (PlannedEngine, Arc<OpenHandles>) {
    let accel = HostModelAccel::new(options);
    let open = accel.open_handles();
    let session =
        NpuSession::open(Box::new(accel), &HostModelAccel::xclbin(dims().shape().unwrap()))
            .unwrap();
    let npu = FlashPartial::new(session, dims()).unwrap();
    let exec = OffloadExecutor::new(exec, npu, dims(), share);
    (
        PlannedEngine::new(weights, Box::new(exec), EngineOptions { context: CONTEXT, kv })
            .unwrap(),
        open,
    )
}

/// Rows use the NPU from position 384 on: 256 for a page, and 128 for the largest pass after it.
#[test]
fn trees_equal_one_by_one_decoding_beside_the_npu() {
    let mut rng = SmallRng::seed_from_u64(1);
    let text = tokens(&mut rng, 1100);
    for (kv, share) in [(KvFormat::F32, 256), (KvFormat::F16, 256), (KvFormat::Q8, 128)] {
        let late = HostModelOptions { late: true, ..HostModelOptions::default() };
        let (mut a, _) = assisted(kv, share, HostModelOptions::default(), cpu(2, false));
        let (mut b, _) = assisted(kv, share, late, cpu(1, false));
        for n in [100, 256, 360, 383, 384, 512, 630, 900] {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, &format!("{kv:?}, share {share}"));
        }
        let report = a.report().executor.unwrap().assist.unwrap();
        assert!(
            report.row_pages > 0 && report.given_up.is_none() && report.checks > 0,
            "{report:?}"
        );
    }
}

/// A sequence that begins with a kept prefix has pages that it never committed. They are sent to
/// the NPU before it attends them.
#[test]
fn a_prefix_is_sealed_before_the_npu_attends_it() {
    let mut rng = SmallRng::seed_from_u64(8);
    let (text, tree) = (tokens(&mut rng, 1000), TokenTree::chain(&[3, 1, 4]));
    let (mut engine, _) = assisted(KvFormat::F16, 256, HostModelOptions::default(), cpu(2, false));
    let mut scores = Scores::default();
    prefill(&mut engine, &text, &mut rng);
    engine.forward(&tree, Rows::All, &mut scores).unwrap();
    let want = bits(&scores.logits);
    let prefix = engine.retain(0, 768).unwrap();
    engine.truncate(0, 0).unwrap();
    prefill(&mut engine, &tokens(&mut rng, 400), &mut rng);
    engine.resume(0, &prefix, 768).unwrap();
    prefill(&mut engine, &text[768..], &mut rng);
    engine.forward(&tree, Rows::All, &mut scores).unwrap();
    assert_eq!(bits(&scores.logits), want);
    let report = engine.report().executor.unwrap().assist.unwrap();
    assert!(report.row_pages > 0 && report.given_up.is_none(), "{report:?}");
}

/// The same with a GPU. Its passes have more rows, so it attends more of the newest pages itself.
/// All layers are global: then only one attention kernel is needed, and a driver on the processor
/// compiles kernels for wide heads slowly.
#[test]
fn trees_equal_one_by_one_decoding_beside_gpu_and_npu() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    let text = tokens(&mut rng, 1100);
    let weights = weights_of(config_of(1, 1));
    for kv in [KvFormat::F16, KvFormat::Q8] {
        let late = HostModelOptions { late: true, ..HostModelOptions::default() };
        let (mut a, _) =
            assisted_with(&weights, kv, 256, HostModelOptions::default(), Box::new(open()));
        let (mut b, _) = assisted_with(&weights, kv, 256, late, Box::new(open()));
        check_tree(&mut a, &mut b, &text[..1060], &mut rng, &format!("{kv:?}"));
        let report = a.report().executor.unwrap().assist.unwrap();
        assert!(report.row_pages > 0 && report.given_up.is_none(), "{report:?}");
        // The GPU works up to the first global layer.
        let tree = TokenTree::chain(&[5, 6, 7]);
        let inputs = [Input::new(0, &tree, Rows::All)];
        let (mut want, mut got) = (Scores::default(), Scores::default());
        a.run(&inputs, Output::Logits, &mut want).unwrap();
        assert!(a.begin(&inputs, Output::Logits).unwrap());
        a.finish(&mut got).unwrap();
        assert_eq!(bits(&got.logits), bits(&want.logits));
        // The NPU rounds differently, so its result is only close to that of the CPU alone.
        let mut alone =
            PlannedEngine::new(&weights, cpu(2, false), EngineOptions { context: CONTEXT, kv })
                .unwrap();
        prefill(&mut alone, &text[..1060], &mut rng);
        let (x, y) = (one_by_one(&mut a, &[3]), one_by_one(&mut alone, &[3]));
        let far = x
            .iter()
            .zip(&y)
            .map(|(x, y)| (f32::from_bits(*x) - f32::from_bits(*y)).abs())
            .fold(0.0, f32::max);
        let most = y.iter().map(|y| f32::from_bits(*y).abs()).fold(0.0, f32::max);
        assert!(far < 0.01 * most, "{kv:?}: {far} of {most}");
    }
}

/// With the NPU, results differ from those of the processor alone, but only by rounding. The
/// processor's part equals its twins.
#[test]
fn the_npu_changes_little_and_something() {
    let mut rng = SmallRng::seed_from_u64(2);
    let text = tokens(&mut rng, 900);
    let (mut a, _) = assisted(KvFormat::F32, 256, HostModelOptions::default(), cpu(2, true));
    let mut b = plain(KvFormat::F32);
    for n in [380, 900] {
        for e in [&mut a, &mut b] {
            e.truncate(0, 0).unwrap();
            prefill(e, &text[..n], &mut rng);
        }
        let (x, y) = (one_by_one(&mut a, &[3]), one_by_one(&mut b, &[3]));
        if n < 384 {
            assert_eq!(x, y, "no page is taken yet, and no bit changes");
            continue;
        }
        assert_ne!(x, y);
        let far = x
            .iter()
            .zip(&y)
            .map(|(x, y)| (f32::from_bits(*x) - f32::from_bits(*y)).abs())
            .fold(0.0, f32::max);
        let most = y.iter().map(|y| f32::from_bits(*y).abs()).fold(0.0, f32::max);
        assert!(far < 0.01 * most, "{far} of {most}");
    }
    let report = a.report().executor.unwrap().assist.unwrap();
    // 900 positions: three pages sealed, twice because the timeline started again.
    assert_eq!((report.pages_sealed, report.silicon), (1 + 3, false));
}

/// A timeline that is truncated and continues differently drops the pages that were sealed in
/// between.
#[test]
fn pages_follow_an_edited_history() {
    let mut rng = SmallRng::seed_from_u64(3);
    let (first, second) = (tokens(&mut rng, 800), tokens(&mut rng, 800));
    let (mut a, _) = assisted(KvFormat::F16, 256, HostModelOptions::default(), cpu(1, false));
    let (mut b, _) = assisted(KvFormat::F16, 256, HostModelOptions::default(), cpu(2, false));
    prefill(&mut a, &first, &mut rng);
    a.truncate(0, 700).unwrap();
    prefill(&mut a, &second[..90], &mut rng);
    prefill(&mut b, &first[..700], &mut rng);
    prefill(&mut b, &second[..90], &mut rng);
    assert_eq!(one_by_one(&mut a, &[1, 2, 3]), one_by_one(&mut b, &[1, 2, 3]));
    let sealed = a.report().executor.unwrap().assist.unwrap().pages_sealed;
    assert_eq!(sealed, 3 + 1, "the third page was sealed again");
}

#[test]
fn one_text_whatever_drafts_beside_the_npu() {
    let prompt: Vec<u32> = tokens(&mut SmallRng::seed_from_u64(4), 470);
    let engine = || -> Box<dyn Engine> {
        Box::new(assisted(KvFormat::F16, 256, HostModelOptions::default(), cpu(2, false)).0)
    };
    let draft = || -> Box<dyn Engine> { Box::new(plain(KvFormat::F16)) };
    for temperature in [0.0, 1.0] {
        let config = SamplerConfig { temperature, top_k: 20, seed: 6, ..SamplerConfig::default() };
        let case = invariance::Case { max_tokens: 24, ..invariance::Case::new(&prompt, config) };
        let (text, _) = invariance::check(&engine, &draft, &case);
        assert_eq!(text.heard.len(), 24);
    }
}

/// After an error of the first command, the numbers are those of a run without an NPU. After a
/// later error, the run continues to its end.
#[test]
fn every_fault_is_survived() {
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, 640);
    let logits = |e: &mut PlannedEngine| -> Vec<u32> {
        let mut scores = Scores::default();
        for chunk in text.chunks(64) {
            e.forward(&TokenTree::chain(chunk), Rows::All, &mut scores).unwrap();
            e.commit(&[(0, &(0..chunk.len() as u32).collect::<Vec<_>>())]).unwrap();
        }
        bits(&scores.logits)
    };
    let want = logits(&mut plain(KvFormat::F32));
    let (mut whole, _) = assisted(KvFormat::F32, 256, HostModelOptions::default(), cpu(2, false));
    let with_npu = logits(&mut whole);
    let jobs = whole.report().executor.unwrap().assist.unwrap().jobs;
    assert!(with_npu != want && jobs > 8, "{jobs} jobs");
    for (name, kind) in FaultKind::ALL {
        for late in [false, true] {
            for from in [0, 5, jobs] {
                let options = HostModelOptions {
                    fault: Some(NpuFault { kind, from }),
                    late,
                    ..Default::default()
                };
                let (mut e, open) = assisted(KvFormat::F32, 256, options, cpu(2, false));
                assert!(open.total() > 3);
                let got = logits(&mut e);
                let report = e.report().executor.unwrap().assist.unwrap();
                let what = format!("{name}@{from}, late {late}");
                if from == jobs {
                    assert!(report.given_up.is_none() && got == with_npu, "{what}: {report:?}");
                    continue;
                }
                // A result that is wrong but plausible is found by the next job that is computed
                // twice, the first of 256.
                let unseen = kind == FaultKind::Wrong && from > 0;
                assert_eq!(report.given_up.is_none(), unseen, "{what}: {report:?}");
                if from == 0 {
                    assert!(got == want, "{what}: the numbers are not those of a run without NPU");
                }
                assert!(got.iter().all(|v| f32::from_bits(*v).is_finite()), "{what}");
                if report.given_up.is_some() {
                    assert_eq!(open.total(), 0, "{what}: a handle is left");
                }
                drop(e);
                assert_eq!(open.total(), 0, "{what}: a handle is left at the end");
            }
        }
    }
}

/// Writes a tiny checkpoint with a tokenizer of letters, which are one token each. Returns a prompt
/// of `letters` letters.
fn checkpoint(dir: &Path, letters: usize) -> String {
    let tiny = TinyDims {
        n_layers: 2,
        dim: 128,
        ffn_dim: 128,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 128,
        vocab: 110,
        window: 40,
        pattern: 2,
    };
    TinyModel::new(tiny, 3).write(&dir.join("tiny"), Form::TextV4, Dtype::F32, 1);
    let mut pieces: Vec<String> =
        ["<pad>", "<eos>", "<bos>", "<unk>", "▁"].map(String::from).to_vec();
    pieces.extend(('a'..='z').map(String::from));
    pieces.extend((pieces.len()..105).map(|i| format!("<unused{i}>")));
    pieces.extend(["<start_of_turn>", "<end_of_turn>", "<x>", "<y>", "<z>"].map(String::from));
    let vocab: serde_json::Map<_, _> =
        pieces.iter().enumerate().map(|(i, p)| (p.clone(), i.into())).collect();
    let added = [0, 1, 2, 3, 105, 106].map(|i: usize| {
        json!({"id": i, "content": pieces[i],
        "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false})
    });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "byte_fallback": false, "fuse_unk": true,
            "unk_token": "<unk>", "merges": []},
    });
    fs::write(dir.join("tiny/tokenizer.json"), tokenizer.to_string()).unwrap();
    let words = ["sealed", "pages", "travel", "to", "the", "array", "and", "partials", "return"];
    let mut text = String::new();
    let mut i = 0usize;
    while text.len() < letters {
        i = i.wrapping_mul(31).wrapping_add(17) % 1009;
        text += words[i % words.len()];
        text.push(' ');
    }
    text.truncate(letters);
    fs::write(dir.join("prompt.txt"), &text).unwrap();
    text
}

/// Returns the text of a run, its figures and its notes.
fn generate(dir: &Path, more: &[&str]) -> (String, Value, Vec<String>) {
    generate_with(dir, more, "")
}

/// The same on an NPU with a fault, if any.
fn generate_with(dir: &Path, more: &[&str], fault: &str) -> (String, Value, Vec<String>) {
    let args = [
        "generate",
        "-m",
        "tiny",
        "-f",
        "prompt.txt",
        "--raw",
        "-n",
        "24",
        "--ignore-eos",
        "--seed",
        "3",
        "--stats",
        "json",
    ];
    let mut command = command(BINARY, dir);
    command.args(args).args(more);
    if !fault.is_empty() {
        command.env(NPU_FAULT, fault);
    }
    let run = wait(command, b"").ok();
    let (json, notes): (Vec<&str>, Vec<&str>) = run.err.lines().partition(|l| l.starts_with('{'));
    (
        run.text().to_owned(),
        serde_json::from_str(json[0]).unwrap(),
        notes.into_iter().map(String::from).collect(),
    )
}

#[test]
fn a_long_context_on_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), 3100);
    let (text, figures, notes) = generate(dir.path(), &["--npu", "model", "--draft", "off"]);
    let (npu, used) = (&figures["npu"], &figures["usage"]);
    let prompt = used["prompt_tokens"].as_u64().unwrap();
    assert!(prompt > 3000 && notes.is_empty(), "{prompt} tokens, {notes:?}");
    // Every row, of the prompt and of the text, attended every page that ends 128 positions before
    // it through the NPU.
    let rows = prompt + used["completion_tokens"].as_u64().unwrap() - 1;
    let want: u64 = (0..rows).map(|p| p.saturating_sub(128) / 256).sum();
    assert_eq!(npu["row_pages"], want, "{npu}");
    assert_eq!(
        (&npu["pages_sealed"], &npu["silicon"], &npu["given_up"]),
        (&json!(prompt / 256), &json!(false), &Value::Null)
    );
    assert!(npu["checks"].as_u64().unwrap() > 0 && npu["jobs"].as_u64().unwrap() > 100, "{npu}");
    let (drafted, other, _) = generate(
        dir.path(),
        &["--npu", "model", "--draft", "ngram", "--draft-tree", "chain", "--draft-tokens", "6"],
    );
    assert_eq!(drafted, text, "one text whatever drafts");
    assert!(
        other["draft"]["drafted"].as_u64().unwrap() > 0
            && other["npu"]["row_pages"].as_u64().unwrap() >= want,
        "{other}"
    );

    let nll = |mode: &str| {
        let args = ["eval", "-m", "tiny", "prompt.txt", "--json", "-q", "--npu", mode];
        gemma_in(dir.path(), &args, b"").ok().json()["mean_nll"].as_f64().unwrap()
    };
    let (with, without) = (nll("model"), nll("off"));
    assert!(with != without && (with - without).abs() < 2e-3, "{with} {without}");
}

#[test]
fn a_plan_counts_what_the_npu_takes() {
    let weights = weights();
    let task = Task {
        weights: &weights,
        context: CONTEXT,
        kv: KvFormat::F16,
        sequences: 1,
        prefixes: 0,
        npu: true,
    };
    let planned = task.measure(None, 0).unwrap();
    let without = Task { npu: false, ..task }.measure(None, 0).unwrap();
    let (engine, _) = assisted(KvFormat::F16, 256, HostModelOptions::default(), cpu(1, false));
    let taken = engine.report().memory;
    assert_eq!((planned.cpu.need.weights, planned.cpu.need.kv), (taken.weights, taken.kv));
    assert_eq!(planned.cpu.need.activations + planned.npu, taken.activations);
    // One global layer: five pages of two heads, keys and values in bf16.
    assert!(planned.npu > 5 * 256 * 2 * 2 * 128 * 2 && without.npu == 0, "{planned:?}");
    assert!(
        planned.cpu.need.activations > without.cpu.need.activations,
        "the partials of the rest"
    );
}

#[test]
fn faults_are_one_line_and_the_text_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), 600);
    let (text, figures, _) = generate(dir.path(), &["--npu", "off", "--draft", "off"]);
    assert_eq!(figures["npu"], Value::Null);
    for (name, _) in FaultKind::ALL {
        // A fault in the self-test, which has four commands, and one in the first command after it.
        for (at, word) in [(0, "running without the NPU"), (4, "the NPU was given up")] {
            let fault = format!("{name}@{at}");
            let (got, figures, notes) =
                generate_with(dir.path(), &["--npu", "model", "--draft", "off"], &fault);
            assert_eq!(got, text, "{fault}");
            assert!(notes.len() == 1 && notes[0].contains(word), "{fault}: {notes:?}");
            assert_eq!(figures["npu"]["given_up"].is_string(), at == 4, "{fault}: {figures}");
        }
    }
    // This machine has no supported NPU: one note if it was requested, none otherwise.
    let (got, figures, notes) = generate(dir.path(), &["--draft", "off"]);
    assert!(got == text && figures["npu"].is_null() && notes.is_empty(), "{notes:?}");
    let (got, _, notes) = generate(dir.path(), &["--npu", "force", "--draft", "off"]);
    assert!(
        got == text && notes.len() == 1 && notes[0].contains("running without the NPU"),
        "{notes:?}"
    );
    let bad = ["generate", "-m", "tiny", "x", "--npu", "on"];
    gemma_in(dir.path(), &bad, b"").fails(2, &["auto, off, force or model"]);
}

#[test]
fn devices_say_what_there_is_of_an_npu() {
    let dir = tempfile::tempdir().unwrap();
    let text = gemma_in(dir.path(), &["devices"], b"").ok();
    assert!(text.text().lines().any(|l| l.starts_with("npu  ")), "{}", text.text());
    let json = gemma_in(dir.path(), &["devices", "--json"], b"").ok().json();
    assert!(json["npu"].is_array(), "{json}");
}
