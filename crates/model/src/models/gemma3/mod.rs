//! Gemma 3: its configuration, its layer, its GGUF files, and the draft models that this program
//! brings along.

pub mod bundled;
mod config;
mod gguf;

use super::architecture::{Architecture, KeyNorms, Step};
use super::config::{Config, LayerSpec};
use super::gguf::GgufModel;
use super::role::Role;
use crate::checkpoint::gguf::write::Keys;
use gemma_base::error::Fault;
use serde_json::Value;

pub struct Gemma3;

impl Architecture for Gemma3 {
    fn name(&self) -> &'static str {
        "Gemma 3"
    }

    fn is_named(&self, model_type: Option<&str>, class: Option<&str>) -> bool {
        match model_type {
            Some(kind) => matches!(kind, "gemma3" | "gemma3_text"),
            None => class.is_some_and(|class| class.starts_with("Gemma3For")),
        }
    }

    fn config(&self, json: &Value) -> Result<Config, Fault> {
        config::config(json)
    }

    fn gguf(&self) -> &'static str {
        gguf::ARCHITECTURE
    }

    fn gguf_config(&self, file: &GgufModel<'_>) -> Result<Value, String> {
        gguf::config(file.metadata, file.vocab(), file.has(Role::Head, 0))
    }

    fn gguf_keys(&self, config: &Config, keys: &mut Keys) -> anyhow::Result<()> {
        gguf::keys(config, keys)
    }

    fn norm_base(&self) -> f32 {
        1.0
    }

    fn layer(&self, config: &Config, spec: &LayerSpec) -> Vec<Step> {
        let (q, kv) = (spec.query_width(), spec.kv_width());
        vec![
            Step::Norm(Role::InputNorm),
            Step::Linear("qkv", vec![(Role::Q, q), (Role::K, kv), (Role::V, kv)]),
            Step::Attend {
                q_norm: Role::QNorm,
                keys: Some(KeyNorms { k_norm: Role::KNorm, v_norm: false }),
            },
            Step::Linear("o", vec![(Role::O, config.dim)]),
            Step::Add { norm: Role::PostAttnNorm, scale: None },
            Step::Norm(Role::PreFfnNorm),
            Step::GateUp { gate: Role::Gate, up: Role::Up, rows: config.ffn_dim },
            Step::Linear("down", vec![(Role::Down, config.dim)]),
            Step::Add { norm: Role::PostFfnNorm, scale: None },
        ]
    }
}
