//! Gemma 3: its configuration, its layer, its GGUF files, and the bundled models.

pub mod bundled;
mod config;
mod gguf;

use super::architecture::{Architecture, KeyNorms, Step};
use super::config::{Config, LayerSpec};
use super::dialect::Dialect;
use super::gguf::GgufModel;
use super::role::Role;
use crate::checkpoint::gguf::write::Keys;
use gemma_base::error::Fault;
use serde_json::Value;

pub struct Gemma3;

/// Turns with their own control tokens. Models do not think, and calls are lines of JSON.
pub const DIALECT: Dialect = Dialect {
    turn: "<start_of_turn>",
    template: TEMPLATE,
    thought: None,
    calls: None,
    gguf: "llama",
    has_merges: false,
};

/// Template of a model without one in its files.
const TEMPLATE: &str = "\
{%- macro shown(content) -%}
  {%- if content is string -%}
    {{ content | trim }}
  {%- else -%}
    {%- for part in content -%}
      {{ '<start_of_image>' if part.type == 'image' else (part.text | trim) }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set first = namespace(text='') -%}
{%- set said = messages -%}
{%- if messages[0].role == 'system' -%}
  {%- set first.text = messages[0].content ~ '\\n\\n' -%}
  {%- set said = messages[1:] -%}
{%- endif -%}
{%- for m in said -%}
  {%- if (loop.index0 % 2 == 0) != (m.role == 'user') -%}
    {{ raise_exception('roles must alternate user, assistant, user, ...') }}
  {%- endif -%}
  {{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' -}}
  {{ (first.text if loop.first else '') ~ shown(m.content) ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<start_of_turn>model\\n' }}
{%- endif -%}";

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

    fn dialect(&self) -> &'static Dialect {
        &DIALECT
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
