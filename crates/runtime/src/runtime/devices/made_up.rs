//! A small random model for trials of a driver or device.

use anyhow::Result;
use gemma_base::tensor::{Format, Token};
use gemma_model::engine::{Engine, EngineExt, Rows, Scores, TokenTree};
use gemma_model::models::{Config, Role, Weights};
use serde_json::json;

/// Positions of the small model's context.
pub const CONTEXT: usize = 256;

/// Returns a random model of two layers, one of them global.
pub fn model() -> Result<Weights> {
    let config = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "sliding_window_pattern": 2, "sliding_window": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "query_pre_attn_scalar": 64, "vocab_size": 512, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "max_position_embeddings": 512,
    });
    let linear: Format = "i4-g32".parse()?;
    let format =
        |role| if matches!(role, Role::Embed | Role::Head) { Format::I8_ROW } else { linear };
    Ok(Weights::synthetic(Config::from_json(&config)?, format, 1))
}

/// Runs passes with one row and with several rows.
pub fn run_passes(engine: &mut dyn Engine) -> Result<()> {
    let mut scores = Scores::default();
    for rows in [1u32, 9] {
        let tokens: Vec<Token> = (0..rows).map(|i| 7 * i + 3).collect();
        engine.forward(&TokenTree::chain(&tokens), Rows::All, &mut scores)?;
        engine.commit(&[(0, &(0..rows).collect::<Vec<u32>>())])?;
    }
    Ok(())
}
