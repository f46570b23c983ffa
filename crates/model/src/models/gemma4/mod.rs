//! Gemma 4, the dense models and the mixture of experts: configuration, layer, GGUF files.
//!
//! Differences from Gemma 3: Norms multiply by their stored weights. Values are normalised. Global
//! layers have wider heads, with only some of their channels rotated. Their values are the keys
//! before rotation and norm. The residual stream is scaled after each layer. Logits have a soft
//! cap. Source: huggingface/transformers 5.24, models/gemma4 and models/gemma4_unified, which share
//! this layer.

mod assistant;
mod config;
mod gguf;

pub use assistant::Gemma4Assistant;

use super::architecture::{Architecture, KeyNorms, Step};
use super::config::{Config, LayerSpec};
use super::dialect::{Dialect, ThoughtMarks};
use super::gguf::GgufModel;
use super::role::Role;
use crate::checkpoint::gguf::write::Keys;
use gemma_base::error::Fault;
use serde_json::Value;

pub struct Gemma4;

/// Turns, thoughts and calls have their own control tokens.
pub const DIALECT: Dialect = Dialect {
    turn: "<|turn>",
    template: include_str!("template.jinja"),
    thought: Some(ThoughtMarks { wish: "<|think|>", begin: "<|channel>", end: "<channel|>" }),
    calls: Some(["<|tool_call>", "<tool_call|>", "<|\"|>"]),
    gguf: "gemma4",
    has_merges: true,
};

impl Architecture for Gemma4 {
    fn name(&self) -> &'static str {
        "Gemma 4"
    }

    fn is_named(&self, model_type: Option<&str>, class: Option<&str>) -> bool {
        match model_type {
            Some(kind) => {
                matches!(kind, "gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text")
            }
            None => class.is_some_and(|c| {
                ["Gemma4For", "Gemma4UnifiedFor"].iter().any(|n| c.starts_with(n))
            }),
        }
    }

    fn config(&self, json: &Value) -> Result<Config, Fault> {
        config::config(json)
    }

    fn gguf(&self) -> &'static str {
        "gemma4"
    }

    fn gguf_config(&self, file: &GgufModel<'_>) -> Result<Value, String> {
        gguf::config(file)
    }

    fn gguf_keys(&self, config: &Config, keys: &mut Keys) -> anyhow::Result<()> {
        gguf::keys(config, keys)
    }

    fn dialect(&self) -> &'static Dialect {
        &DIALECT
    }

    fn norm_base(&self) -> f32 {
        0.0
    }

    fn layer(&self, config: &Config, spec: &LayerSpec) -> Vec<Step> {
        let kv = spec.kv_width();
        let values = if spec.values_are_keys { Role::K } else { Role::V };
        let keys = KeyNorms { k_norm: Role::KNorm, v_norm: true };
        layer(config, spec, vec![(Role::K, kv), (values, kv)], Some(keys))
    }
}

/// Returns the steps of a layer. `made` are the matrices that compute its keys and values.
fn layer(
    config: &Config,
    spec: &LayerSpec,
    made: Vec<(Role, usize)>,
    keys: Option<KeyNorms>,
) -> Vec<Step> {
    let queries = vec![(Role::Q, spec.query_width())];
    let mut steps = vec![
        Step::Norm(Role::InputNorm),
        Step::Linear("qkv", [queries, made].concat()),
        Step::Attend { q_norm: Role::QNorm, keys },
        Step::Linear("o", vec![(Role::O, config.dim)]),
        Step::Add { norm: Role::PostAttnNorm, scale: None },
        Step::Norm(Role::PreFfnNorm),
        Step::GateUp { gate: Role::Gate, up: Role::Up, rows: config.ffn_dim },
        Step::Linear("down", vec![(Role::Down, config.dim)]),
    ];
    steps.extend(config.experts.map(Step::Mixture));
    steps.push(Step::Add { norm: Role::PostFfnNorm, scale: Some(Role::LayerScale) });
    steps
}
