//! One seed gives one text on every system: `tests/golden/systems.json` has texts of the demo, of
//! random checkpoints of every kind and of every weight format. CI compares them on Linux on x86-64
//! and ARM64, and on Windows. `GEMMA_WRITE_GOLDEN=1` writes the file again.

use std::collections::BTreeMap;
use std::path::Path;

use gemma::checkpoint::Checkpoint;
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{PlannedEngine, Timeline};
use gemma::models::gemma3::bundled;
use gemma::models::{Config, Role, Weights};
use gemma::sampler::SamplerConfig;
use gemma::tensor::{Format, Token};

use crate::invariance::{Case, run};

/// Texts of one model: three seeds at temperature 0, then at 1.
type Texts = Vec<Vec<Token>>;

fn texts(weights: &Weights, kv: KvFormat) -> Texts {
    let exec = CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    let options = EngineOptions { context: 128, kv };
    let engine = PlannedEngine::new(weights, Box::new(exec), options).unwrap();
    let mut timeline = Timeline::new(Box::new(engine));
    let draws = [0.0, 1.0].into_iter().flat_map(|t| [1, 2, 3].map(|seed| (t, seed)));
    draws
        .map(|(temperature, seed)| {
            let config = SamplerConfig { temperature, seed, ..SamplerConfig::default() };
            // One setting uses sums of exponentials for its probabilities.
            let top_p = if seed == 3 { 0.9 } else { 1.0 };
            let case = Case {
                max_tokens: 24,
                ..Case::new(&[2, 17, 5, 40, 9, 33], SamplerConfig { top_p, ..config })
            };
            run(&mut timeline, &mut gemma::draft::NoDraft, &case).0.heard
        })
        .collect()
}

fn random(format: Format) -> Weights {
    let config = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
        "query_pre_attn_scalar": 64, "sliding_window": 40, "sliding_window_pattern": 2,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 1024,
    });
    let table: Format = "i8-row".parse().unwrap();
    let format = move |role| if role == Role::Embed { table } else { format };
    Weights::synthetic(Config::from_json(&config).unwrap(), format, 21)
}

#[test]
fn the_texts_are_those_of_every_system() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut found = BTreeMap::new();
    let demo = Weights::open(bundled::target().unwrap()).unwrap();
    found.insert("demo".to_owned(), texts(&demo, KvFormat::F16));
    for kind in ["text", "multimodal", "untied", "gemma4-unified", "gemma4-wide", "gemma4-mixture"]
    {
        let weights = Weights::open(Checkpoint::open(&golden.join(kind)).unwrap()).unwrap();
        for kv in [KvFormat::F16, KvFormat::Q8] {
            found.insert(format!("{kind}, {kv:?}"), texts(&weights, kv));
        }
    }
    for format in Format::all() {
        found.insert(format.to_string(), texts(&random(format), KvFormat::F16));
    }
    let file = golden.join("systems.json");
    if std::env::var_os("GEMMA_WRITE_GOLDEN").is_some() {
        let lines: Vec<String> = found
            .iter()
            .map(|(name, texts)| format!("{name:?}: {}", serde_json::to_string(texts).unwrap()))
            .collect();
        std::fs::write(&file, format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
    }
    let want: BTreeMap<String, Texts> =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, texts) in &found {
        assert_eq!(texts, &want[name], "{name}");
        // Seeds matter only at temperature 1.
        assert!(texts[0] == texts[1] && texts[3] != texts[4], "{name}");
    }
}
