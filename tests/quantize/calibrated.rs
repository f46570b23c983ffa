//! Calibrated quantising: the solver's forward pass equals the model's, its results are better than
//! nearest codes, and threads and interruptions do not change a byte.

use crate::{common, reference};
use common::{Form, Named, TinyModel, write_model};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::eval;
use gemma::models::{Config, Role, TensorSpec, Weights};
use gemma::quant::calibrate::{CalibrationText, survey};
use gemma::quant::{Calibrated, Importance, Nearest, QuantPlan, QuantizeOptions, Recipe, run};
use gemma::tensor::encode::{CodingDevice, OnProcessor};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use reference::ReferenceEngine;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn open(dir: &Path) -> Weights {
    Weights::open(Checkpoint::open(dir).unwrap()).unwrap()
}

/// Returns made-up tokens with some structure. The vocabulary has 160.
fn text(windows: usize) -> CalibrationText {
    let run: Vec<u32> = (0..40_000u32)
        .map(|i| 3 + ((i.wrapping_mul(2_654_435_761) >> 19) ^ (i / 7)) % 150)
        .collect();
    CalibrationText::cut(&run, 2, 64, windows).unwrap()
}

/// Quantises with a text. The first run stops after `stop_after` progress calls, if given. Returns
/// the measured divergence.
fn calibrated(
    src: &Path,
    dst: &Path,
    recipe: &Recipe,
    threads: usize,
    stop_after: Option<usize>,
) -> f64 {
    let (source, options) = (open(src), QuantizeOptions { threads, ..QuantizeOptions::default() });
    let mut left = stop_after;
    loop {
        let mut solver =
            Calibrated::new(&source, text(12), threads, Arc::new(OnProcessor)).unwrap();
        let plan =
            QuantPlan::new(&source, recipe, &options, &solver, Importance::Relative(&|_, _| 1.0))
                .unwrap();
        solver.begin(&plan.layout).unwrap();
        let mut tell = |_: gemma::quant::QuantProgress<'_>| match left.as_mut() {
            Some(0) => anyhow::bail!("enough"),
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        };
        let ended = run(&source, dst, &plan, &options, &mut solver, &mut tell).is_err();
        if !ended {
            // An interruption ends the measurement, and the artifact stays complete.
            let stop = || anyhow::bail!("interrupted");
            assert!(solver.divergence(&open(dst), &mut { stop }).is_err());
            return solver.divergence(&open(dst), &mut || Ok(())).unwrap();
        }
        assert_eq!(left, Some(0));
        left = None;
    }
}

fn weights_of(dir: &Path) -> Vec<u8> {
    fs::read(dir.join("model.safetensors")).unwrap()
}

fn recipe() -> Recipe {
    let text = r#"
[formats]
"embed_tokens" = "t4-row+h128"
"layers.*.self_attn.{q,k}_proj" = "i4-g32"
"layers.*.self_attn.v_proj" = "t3-row+h128"
"layers.*.self_attn.o_proj" = "i4-row+h128"
"layers.1.mlp.*" = "as-is"
"layers.*.mlp.*" = "t2-row+h128"
"norms" = "as-is"
"#;
    Recipe::parse("test", text).unwrap()
}

fn write_model_without_experts(dir: &Path) {
    TinyModel::tiny(5).write(dir, Form::TextV4, Dtype::F32, 1);
}

/// Writes a model of eight experts; each token uses three. All matrices except the routers can be
/// solved.
fn write_mixture(dir: &Path) {
    let config = "tests/golden/gemma4-mixture/config-v4.json";
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join(config);
    let mut config: Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    for width in ["hidden_size", "intermediate_size", "moe_intermediate_size"] {
        config["text_config"][width] = json!(128);
    }
    config["text_config"]["vocab_size"] = json!(160);
    config["text_config"]["num_hidden_layers"] = json!(2);
    config["text_config"]["layer_types"] = json!(["sliding_attention", "full_attention"]);
    let weights =
        Weights::synthetic(Config::from_json(&config).unwrap(), |_| "f32".parse().unwrap(), 7);
    let tensor = |spec: &TensorSpec| -> Named {
        let TensorSpec { role, layer, .. } = *spec;
        let is_bare = role.is_of_experts()
            || matches!(role, Role::LayerScale | Role::RouterScale | Role::ExpertFactors);
        let end = if is_bare { "" } else { ".weight" };
        let values = match role.is_matrix() {
            true => weights.matrix(role, layer).unwrap().dequantize(),
            false => weights.vector(role, layer).unwrap(),
        };
        (format!("model.language_model.{}{end}", role.short_name(layer)), spec.shape(), values)
    };
    let tensors: Vec<Named> = weights.tensors().iter().map(tensor).collect();
    write_model(dir, &config, &tensors, Dtype::F32, 1);
}

#[test]
fn threads_and_interruptions_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    TinyModel::tiny(1).write(&src, Form::TextV4, Dtype::BF16, 1);
    let to = |name: &str| dir.path().join(name);
    let first = calibrated(&src, &to("one"), &recipe(), 1, None);
    let want = weights_of(&to("one"));
    for (i, (threads, stop)) in
        [(2, None), (2, Some(3)), (1, Some(9)), (2, Some(17)), (1, Some(30))]
            .into_iter()
            .enumerate()
    {
        let dst = to(&format!("again{i}"));
        let measured = calibrated(&src, &dst, &recipe(), threads, stop);
        assert!(weights_of(&dst) == want, "{threads} threads, stopped after {stop:?}");
        assert!((measured - first).abs() < 1e-9, "{measured} and {first}");
    }
}

/// The divergence that the solver predicts equals the one that the reference engine measures.
#[test]
fn the_measured_divergence_is_the_oracles() {
    for write in [write_model_without_experts, write_mixture] {
        let dir = tempfile::tempdir().unwrap();
        let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
        write(&src);
        let recipe = Recipe::inline("t3-row+h128".parse().unwrap(), "i8-row".parse().unwrap());
        let measured = calibrated(&src, &dst, &recipe, 2, None);
        let text = text(12);
        let oracle = |dir: &Path| ReferenceEngine::new(&open(dir), text.window).unwrap();
        let (mut made, mut source) = (oracle(&dst), oracle(&src));
        // The solver leaves out only the positions after BOS. Here every position counts that has a
        // successor in its window.
        let (mut sum, mut count) = (0.0, 0);
        for window in text.tokens.chunks(text.window) {
            let compared =
                eval::compare(&mut made, &mut source, window, text.window, &mut |_| {}).unwrap();
            sum += compared.kld.mean * (text.window - 1) as f64;
            count += text.window - 1;
        }
        let oracle = sum / count as f64;
        assert!((measured / oracle - 1.0).abs() < 0.05, "{measured} and {oracle}");
    }
}

#[test]
fn text_makes_better_codes() {
    for linear in ["t2-row+h128", "i2-row+h128", "i4-g32", "i2-g64"] {
        text_makes_better(write_model_without_experts, linear);
    }
}

/// Some experts are solved mostly for the inputs of other experts.
#[test]
fn text_makes_better_codes_of_experts() {
    for linear in ["t2-row+h128", "i2-g64"] {
        text_makes_better(write_mixture, linear);
    }
}

fn text_makes_better(write: fn(&Path), linear: &str) {
    let dir = tempfile::tempdir().unwrap();
    let [src, solved, nearest] = ["src", "solved", "nearest"].map(|name| dir.path().join(name));
    write(&src);
    let (source, text) = (open(&src), text(12));
    let recipe = Recipe::inline(linear.parse().unwrap(), "i8-row".parse().unwrap());
    calibrated(&src, &solved, &recipe, 2, None);
    let mut solver = Nearest::new(2);
    let options = QuantizeOptions::default();
    let plan =
        QuantPlan::new(&source, &recipe, &options, &solver, Importance::Relative(&|_, _| 1.0))
            .unwrap();
    run(&source, &nearest, &plan, &options, &mut solver, &mut |_| Ok(())).unwrap();
    let divergence = |dir: &Path| {
        let oracle = |dir: &Path| ReferenceEngine::new(&open(dir), text.window).unwrap();
        let (mut made, mut source) = (oracle(dir), oracle(&src));
        let compared =
            eval::compare(&mut made, &mut source, &text.tokens, text.window, &mut |_| {});
        compared.unwrap().kld.mean
    };
    let (solved, nearest) = (divergence(&solved), divergence(&nearest));
    assert!(solved < 0.9 * nearest, "{linear}: {solved} with text, {nearest} without");
}

/// Every matrix is disturbed once. The feed-forward matters more than the queries and keys.
#[test]
fn a_survey_finds_what_matters() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(7).write(dir.path(), Form::TextV4, Dtype::F32, 1);
    let source = open(dir.path());
    let device: Arc<dyn CodingDevice> = Arc::new(OnProcessor);
    let found = survey(&source, &device, &text(4), 1, &mut |_| Ok(())).unwrap();
    let again = survey(&source, &device, &text(4), 1, &mut |_| Ok(())).unwrap();
    assert_eq!(found, again);
    let matrices = source.matrices().count();
    assert_eq!(found.len(), matrices);
    assert!(found.iter().all(|s| s.divergence > 0.0 && s.divergence.is_finite()));
    let of =
        |role: Role| found.iter().filter(|s| s.role == role).map(|s| s.divergence).sum::<f64>();
    assert!(of(Role::Q) < of(Role::Down) + of(Role::Up) + of(Role::Gate), "{found:?}");
}

/// For small noise in a matrix, the divergence that the survey predicts equals the reference
/// engine's, in every matrix of a layer and in the table at both ends.
#[test]
fn a_survey_predicts_the_cost_of_noise() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    let model = TinyModel::tiny(9);
    model.write(&src, Form::TextV4, Dtype::F32, 1);
    let (source, text) = (open(&src), text(8));
    let device: Arc<dyn CodingDevice> = Arc::new(OnProcessor);
    let found = survey(&source, &device, &text, 1, &mut |_| Ok(())).unwrap();
    let mut exact = ReferenceEngine::new(&source, text.window).unwrap();
    let mut random = SmallRng::seed_from_u64(4);
    for name in [
        "embed_tokens",
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn.k_proj",
        "layers.1.self_attn.v_proj",
        "layers.1.self_attn.o_proj",
        "layers.1.mlp.gate_proj",
        "layers.1.mlp.up_proj",
        "layers.1.mlp.down_proj",
    ] {
        let known = found.iter().find(|s| s.role.short_name(s.layer) == name).unwrap();
        const SHARE: f32 = 0.05;
        let mut sum = 0.0;
        const DRAWS: usize = 4;
        for draw in 0..DRAWS {
            let mut noisy = model.clone();
            let tensor = noisy.tensors.iter_mut().find(|t| t.0 == format!("{name}.weight"));
            let (_, shape, values) = tensor.unwrap();
            for row in values.chunks_exact_mut(shape[1]) {
                let mean = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
                let limit = SHARE * (3.0 * mean).sqrt();
                row.iter_mut().for_each(|v| *v += random.random_range(-limit..limit));
            }
            let path = dir.path().join(format!("{name}-{draw}"));
            noisy.write(&path, Form::TextV4, Dtype::F32, 1);
            let mut made = ReferenceEngine::new(&open(&path), text.window).unwrap();
            for window in text.tokens.chunks(text.window) {
                let all = eval::compare(&mut made, &mut exact, window, text.window, &mut |_| {});
                sum += all.unwrap().kld.mean;
            }
        }
        let windows = text.tokens.len() / text.window;
        let measured = sum / (DRAWS * windows) as f64 / (SHARE * SHARE) as f64;
        let ratio = known.divergence / measured;
        assert!((0.7..1.4).contains(&ratio), "{name}: {} of {measured}", known.divergence);
    }
}
