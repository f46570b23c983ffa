//! The assistant of a Gemma 4 model: a draft model without keys and values of its own.
//!
//! Its layers attend to those of the target's last layer of the same kind. Its input is the
//! target's embedding of a token, concatenated with a state: the target's final-norm hidden state
//! before that token, or the assistant's own last state. Source: huggingface/transformers 5.24,
//! models/gemma4_assistant and models/gemma4_unified_assistant.

use super::{DIALECT, config, gguf, layer};
use crate::checkpoint::gguf::write::Keys;
use crate::models::architecture::{Architecture, Step};
use crate::models::config::{Config, LayerSpec};
use crate::models::dialect::Dialect;
use crate::models::gguf::GgufModel;
use gemma_base::error::Fault;
use serde_json::Value;

pub struct Gemma4Assistant;

impl Architecture for Gemma4Assistant {
    fn name(&self) -> &'static str {
        "Gemma 4 assistant"
    }

    fn is_named(&self, model_type: Option<&str>, class: Option<&str>) -> bool {
        match model_type {
            Some(kind) => matches!(kind, "gemma4_assistant" | "gemma4_unified_assistant"),
            None => class.is_some_and(|c| {
                ["Gemma4AssistantFor", "Gemma4UnifiedAssistantFor"].iter().any(|n| c.starts_with(n))
            }),
        }
    }

    fn config(&self, json: &Value) -> Result<Config, Fault> {
        config::assistant(json)
    }

    fn gguf(&self) -> &'static str {
        "gemma4-assistant"
    }

    fn gguf_config(&self, file: &GgufModel<'_>) -> Result<Value, String> {
        gguf::assistant_config(file)
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
        layer(config, spec, Vec::new(), None)
    }
}
