//! The published shapes of Gemma 3, for weights made up on the spot.

use crate::gemma::{Config, Role, Weights};
use crate::quant::allocate::prior;
use crate::quant::{Importance, Nearest, Options, Plan, Recipe, Target};
use crate::tensor::Format;
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Formats of made-up weights.
#[derive(Clone, Debug, Args)]
pub struct Formats {
    /// Weight format of the made-up linear layers
    #[arg(long, value_name = "FORMAT", default_value = "i4-row+h128", value_parser = format)]
    pub format_weights: Format,
    /// Weight format of the made-up embedding table and output head
    #[arg(long, value_name = "FORMAT", default_value = "i8-row", value_parser = format)]
    pub format_embedding: Format,
    /// Formats of the made-up weights as in this recipe of `gemma quantize` (seed, int4, 9gb, 10gb, 12gb or a file), instead of the two above
    #[arg(long, value_name = "RECIPE", conflicts_with_all = ["format_weights", "format_embedding"])]
    pub recipe: Option<String>,
}

impl Formats {
    /// Made-up weights of these formats. A recipe that leaves a choice is settled as `gemma quantize` would without text, for a
    /// checkpoint of this shape without its tokenizer's files.
    pub fn weights(&self, config: Config) -> Result<Weights> {
        let Some(name) = &self.recipe else {
            let table = |role| matches!(role, Role::Embed | Role::Head);
            let format = |role| if table(role) { self.format_embedding } else { self.format_weights };
            return Ok(Weights::synthetic(config, format, SEED));
        };
        let n_layers = config.n_layers;
        let source = Weights::synthetic(config.clone(), |_| Format::BF16, SEED);
        let importance = |role, layer| prior(role, layer, n_layers);
        let (solver, options) = (Nearest { threads: 1 }, Options::default());
        let plan = Plan::new(&source, &Recipe::load(name)?, &options, &solver, Importance::Relative(&importance))?;
        let format = |target| match target {
            Target::Format(format) => format,
            Target::AsIs(_) => Format::BF16,
        };
        let found: HashMap<(Role, usize), Format> =
            plan.layout.entries.iter().map(|e| ((e.role, e.layer), format(e.target))).collect();
        // A checkpoint of this shape has no head of its own: it is the table.
        let role = |role| if role == Role::Head { Role::Embed } else { role };
        Ok(Weights::synthetic_by_layer(config, move |r, layer| found[&(role(r), layer)], SEED))
    }
}

/// Of made-up weights.
const SEED: u64 = 1;

fn format(text: &str) -> Result<Format, String> {
    text.parse().map_err(|e: anyhow::Error| e.to_string())
}

/// Which Gemma 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    #[value(name = "27b")]
    B27,
    #[value(name = "12b")]
    B12,
    #[value(name = "4b")]
    B4,
    #[value(name = "1b")]
    B1,
    #[value(name = "270m")]
    M270,
}

impl Shape {
    /// Weights of this shape, made up as they are asked for.
    pub fn weights(self, formats: &Formats) -> Result<Weights> {
        formats.weights(Config::from_json(&self.config())?)
    }

    pub fn name(self) -> &'static str {
        match self {
            Shape::B27 => "27b",
            Shape::B12 => "12b",
            Shape::B4 => "4b",
            Shape::B1 => "1b",
            Shape::M270 => "270m",
        }
    }

    /// Its `config.json`, as far as the shape goes; sizes as on the models' pages.
    pub fn config(self) -> Value {
        // dim, layers, heads, kv heads, head dim, ffn, window, query scalar, vocabulary, global RoPE factor
        let [dim, layers, heads, kv_heads, head_dim, ffn, window, scalar, vocab, factor] = match self {
            Shape::B27 => [5376, 62, 32, 16, 128, 21504, 1024, 168, 262_208, 8],
            Shape::B12 => [3840, 48, 16, 8, 256, 15360, 1024, 256, 262_208, 8],
            Shape::B4 => [2560, 34, 8, 4, 256, 10240, 1024, 256, 262_208, 8],
            Shape::B1 => [1152, 26, 4, 1, 256, 6912, 512, 256, 262_144, 1],
            Shape::M270 => [640, 18, 4, 1, 256, 2048, 512, 256, 262_144, 1],
        };
        let scaling = if factor == 1 { Value::Null } else { json!({"rope_type": "linear", "factor": factor as f64}) };
        json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "intermediate_size": ffn, "sliding_window": window, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": scalar, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": scaling, "max_position_embeddings": if factor == 1 { 32768 } else { 131_072 },
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false, "tie_word_embeddings": true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as counted from the published checkpoints (text model, tied head), in millions.
    #[test]
    fn shapes_have_the_published_sizes() {
        for (shape, millions) in
            [(Shape::B27, 27_009), (Shape::B12, 11_766), (Shape::B4, 3_880), (Shape::B1, 999), (Shape::M270, 268)]
        {
            let c = Config::from_json(&shape.config()).unwrap();
            let attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads);
            let norms = c.n_layers * (4 * c.dim + 2 * c.head_dim) + c.dim;
            let total = c.vocab * c.dim + c.n_layers * (attention + 3 * c.dim * c.ffn_dim) + norms;
            assert_eq!(total / 1_000_000, millions, "{}", shape.name());
        }
    }
}
