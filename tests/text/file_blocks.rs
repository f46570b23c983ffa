//! Models in the block types of GGUF files: trees, threads, instruction sets and drafts do not
//! change a bit.

use crate::common::trees::{VOCAB, check_tree, tokens};
use crate::common::twins;
use crate::invariance::{Case, check};
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Isa};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, PlannedEngine};
use gemma::models::{Config, Role, Weights};
use gemma::sampler::SamplerConfig;
use gemma::tensor::block::BLOCKS;
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Returns random weights with linear layers of one block type. Every width is one or two
/// super-blocks.
fn weights(block: &str) -> Weights {
    let config = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
        "query_pre_attn_scalar": 64, "sliding_window": 40, "sliding_window_pattern": 2,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 1024,
    });
    let (linear, table) = (twins::format(block), twins::format("q6_k"));
    let format = move |role| if role == Role::Embed { table } else { linear };
    Weights::synthetic(Config::from_json(&config).unwrap(), format, 21)
}

fn engine(weights: &Weights, options: CpuOptions) -> PlannedEngine {
    let exec = Box::new(CpuExecutor::new(options).unwrap());
    PlannedEngine::new(weights, exec, EngineOptions { context: 400, kv: KvFormat::F16 }).unwrap()
}

#[test]
fn trees_threads_and_drafts_change_no_bit_of_any_block() {
    let mut rng = SmallRng::seed_from_u64(5);
    let text = tokens(&mut rng, 300);
    let blocks = BLOCKS.iter().filter(|b| b.code.is_stored() && b.code.is_integer());
    let blocks: Vec<&str> = blocks.map(|block| block.name).collect();
    assert!(["q4_k", "q6_k", "iq4_xs", "iq2_xxs"].iter().all(|name| blocks.contains(name)));
    for block in blocks {
        let weights = weights(block);
        let options = |threads| CpuOptions { threads, ..CpuOptions::default() };
        let mut a = engine(&weights, options(2));
        let mut b = engine(&weights, CpuOptions { isa: Some(Isa::Scalar), ..options(1) });
        for n in [0, 41, 257] {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, block);
        }
        for temperature in [0.0, 1.0] {
            let config = SamplerConfig { temperature, seed: 3, ..SamplerConfig::default() };
            let case = Case { max_tokens: 24, ..Case::new(&text[..8], config) };
            let made = || -> Box<dyn Engine> { Box::new(engine(&weights, options(2))) };
            check(&made, &made, &case);
        }
    }
}
