//! The published shapes of Gemma 3 and Gemma 4, for random weights.

use anyhow::Result;
use gemma_base::tensor::Format;
use gemma_model::models::{Config, Role, Weights};
use gemma_quant::prior;
use gemma_quant::{Importance, Nearest, QuantPlan, QuantizeOptions, Recipe, TargetFormat};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Formats of random weights.
#[derive(Clone, Debug, Default)]
pub struct MadeUpFormats {
    /// Format of the linear layers.
    pub weights: Option<Format>,
    /// Format of the embedding table and the output head.
    pub embedding: Option<Format>,
    /// `q4_0`, `bf16`, or a recipe of `gemma quantize`, instead of the two formats above.
    pub recipe: Option<String>,
}

impl MadeUpFormats {
    /// Returns the formats of a recipe.
    pub fn of_recipe(name: &str) -> MadeUpFormats {
        MadeUpFormats { recipe: Some(name.to_owned()), ..MadeUpFormats::default() }
    }

    /// Returns whether any of these options was given.
    pub fn is_asked(&self) -> bool {
        self.recipe.is_some() || self.weights.is_some() || self.embedding.is_some()
    }

    /// Creates random weights in these formats. A recipe with choices is resolved like `gemma
    /// quantize` without calibration text, for a checkpoint of this shape without tokenizer files.
    pub fn weights(&self, config: Config) -> Result<Weights> {
        let (linear, table) = match self.recipe.as_deref() {
            Some("q4_0") => (Format::I4_G32, table_of_google(&config)),
            Some("bf16") => (Format::BF16, Format::BF16),
            Some(name) => return settled(config, &Recipe::load(name)?),
            None => (
                self.weights.unwrap_or(Format::I4_ROW_H),
                self.embedding.unwrap_or(Format::I8_ROW_H),
            ),
        };
        let format = |role| match role {
            Role::Embed | Role::Head => table,
            Role::Router => Format::F32,
            _ => linear,
        };
        Ok(Weights::synthetic(config, format, SEED))
    }
}

/// Returns the format of the embedding table in Google's 4-bit file.
fn table_of_google(config: &Config) -> Format {
    match config.architecture.gguf() {
        "gemma4" => "q6_k".parse().expect("it is a format"),
        _ => Format::BF16,
    }
}

/// Creates weights in the formats that a recipe of `gemma quantize` chooses.
pub fn settled(config: Config, recipe: &Recipe) -> Result<Weights> {
    let n_layers = config.layers.len();
    let source = Weights::synthetic(config.clone(), |_| Format::BF16, SEED);
    let importance = |role, layer| prior(role, layer, n_layers);
    let (solver, options) = (Nearest::new(1), QuantizeOptions::default());
    let plan =
        QuantPlan::new(&source, recipe, &options, &solver, Importance::Relative(&importance))?;
    let format = |target| match target {
        TargetFormat::Format(format) => format,
        TargetFormat::AsIs(_) => Format::BF16,
    };
    let found: HashMap<(Role, usize), Format> =
        plan.layout.entries.iter().map(|e| ((e.role, e.layer), format(e.target))).collect();
    // A checkpoint of this shape has no separate head: the embedding table is used.
    let role = |role| if role == Role::Head { Role::Embed } else { role };
    Ok(Weights::synthetic_by_layer(config, move |r, layer| found[&(role(r), layer)], SEED))
}

/// Seed of random weights.
const SEED: u64 = 1;

/// Sizes of Gemma 3, and of Gemma 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Dense31,
    Mixture26,
    Dense12,
    B27,
    B12,
    B4,
    B1,
    M270,
}

impl Shape {
    /// Returns random weights of this shape, generated on demand.
    pub fn weights(self, formats: &MadeUpFormats) -> Result<Weights> {
        formats.weights(Config::from_json(&self.config())?)
    }

    /// Returns random weights of this shape's assistant; `None` if there is none. They are in 4
    /// bits, including the table, unless the model is in bf16.
    pub fn assistant(self, formats: &MadeUpFormats) -> Result<Option<Weights>> {
        if self.family() != 4 {
            return Ok(None);
        }
        let bf16 = formats.recipe.as_deref() == Some("bf16");
        let format = Some(if bf16 { Format::BF16 } else { Format::I4_G32 });
        let formats = MadeUpFormats { weights: format, embedding: format, recipe: None };
        let config = Config::from_json(&assistant(&self.config()))?;
        formats.weights(config).map(Some)
    }

    /// If both families have a size, the size alone means Gemma 3.
    pub const ALL: [Shape; 8] = [
        Shape::B27,
        Shape::B12,
        Shape::B4,
        Shape::B1,
        Shape::M270,
        Shape::Dense31,
        Shape::Mixture26,
        Shape::Dense12,
    ];

    /// Returns the size in a name, and the recipe of the files that the name means.
    ///
    /// A size alone (`27b`, `gemma-3-27b`, Ollama's `gemma4:31b`) means Google's smallest file.
    /// Another name (`google/gemma-3-27b-it`, `google/gemma-3-27b-it-qat-q4_0-gguf`) means the
    /// files on the page of that name.
    pub fn named(name: &str) -> Option<(Shape, &'static str)> {
        let (shape, kind) = parts(name)?;
        let recipe = match &*kind {
            "" => shape.smallest(),
            "qat" | "it-qat" | "it-qat-q4_0-gguf" | "pt-qat-q4_0-gguf" => "q4_0",
            "it" | "pt" | "it-qat-q4_0-unquantized" | "pt-qat-q4_0-unquantized" => "bf16",
            _ => return None,
        };
        Some((shape, recipe))
    }

    /// Returns the size of a name that has only a size: `27b`, `gemma-3-27b`, `gemma3:27b`,
    /// `gemma3`.
    pub fn sized(name: &str) -> Option<Shape> {
        parts(name).filter(|(_, kind)| kind.is_empty() && !name.contains('/')).map(|(s, _)| s)
    }

    /// Returns the recipe of the smallest file that Google publishes.
    pub fn smallest(self) -> &'static str {
        if self.page("q4_0").is_some() { "q4_0" } else { "bf16" }
    }

    /// Returns the page of the chat model in the formats of a recipe; `None` if Google publishes
    /// none.
    pub fn page(self, recipe: &str) -> Option<String> {
        let size = match self.family() {
            4 => self.size().to_uppercase(),
            _ => self.size().to_owned(),
        };
        let name = format!("google/gemma-{}-{size}-it", self.family());
        match recipe {
            "bf16" => Some(name),
            "q4_0" if self != Shape::M270 => Some(format!("{name}-qat-q4_0-gguf")),
            _ => None,
        }
    }

    /// Returns the name that `gemma pull` accepts for the page in the formats of a recipe.
    pub fn pulled_as(self, recipe: &str) -> String {
        let page = self.page(recipe).filter(|_| recipe != self.smallest());
        page.unwrap_or_else(|| self.name().to_owned())
    }

    /// Returns the version of Gemma.
    pub fn family(self) -> usize {
        if matches!(self, Shape::Dense31 | Shape::Mixture26 | Shape::Dense12) { 4 } else { 3 }
    }

    pub fn name(self) -> &'static str {
        match self {
            Shape::Dense31 => "gemma4-31b",
            Shape::Mixture26 => "gemma4-26b-a4b",
            Shape::Dense12 => "gemma4-12b",
            _ => self.size(),
        }
    }

    /// Returns the name for use in a sentence.
    pub fn title(self) -> String {
        format!("Gemma {} {}", self.family(), self.size())
    }

    /// Returns Ollama's name of the size.
    pub fn in_ollama(self) -> String {
        format!("gemma{}:{}", self.family(), self.size().trim_end_matches(ACTIVE))
    }

    /// Returns the size as written in names.
    pub fn size(self) -> &'static str {
        match self {
            Shape::Dense31 => "31b",
            Shape::Mixture26 => "26b-a4b",
            Shape::Dense12 => "12b",
            Shape::B27 => "27b",
            Shape::B12 => "12b",
            Shape::B4 => "4b",
            Shape::B1 => "1b",
            Shape::M270 => "270m",
        }
    }

    /// Returns the `config.json` with the shape; sizes are those on the models' pages.
    pub fn config(self) -> Value {
        match self {
            // dim, layers, heads, kv heads, global kv heads, ffn
            Shape::Dense31 => gemma4([5376, 60, 32, 16, 4, 21504]),
            Shape::Mixture26 => {
                let mut json = gemma4([2816, 30, 16, 8, 2, 2112]);
                json["enable_moe_block"] = true.into();
                json["num_experts"] = 128.into();
                json["top_k_experts"] = 8.into();
                json["moe_intermediate_size"] = 704.into();
                json
            }
            Shape::Dense12 => gemma4([3840, 48, 16, 8, 1, 15360]),
            _ => self.gemma3(),
        }
    }

    fn gemma3(self) -> Value {
        // dim, layers, heads, kv heads, head dim, ffn, window, query scalar, vocabulary, global
        // RoPE factor
        let [dim, layers, heads, kv_heads, head_dim, ffn, window, scalar, vocab, factor] =
            match self {
                Shape::B27 => [5376, 62, 32, 16, 128, 21504, 1024, 168, 262_208, 8],
                Shape::B12 => [3840, 48, 16, 8, 256, 15360, 1024, 256, 262_208, 8],
                Shape::B4 => [2560, 34, 8, 4, 256, 10240, 1024, 256, 262_208, 8],
                Shape::B1 => [1152, 26, 4, 1, 256, 6912, 512, 256, 262_144, 1],
                _ => [640, 18, 4, 1, 256, 2048, 512, 256, 262_144, 1],
            };
        let scaling = if factor == 1 {
            Value::Null
        } else {
            json!({"rope_type": "linear", "factor": factor as f64})
        };
        json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn,
            "sliding_window": window, "sliding_window_pattern": 6, "query_pre_attn_scalar": scalar,
            "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": scaling,
            "max_position_embeddings": if factor == 1 { 32768 } else { 131_072 },
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
            "tie_word_embeddings": true
        })
    }
}

/// Suffix of a mixture's name: the number of weights that a token reads.
const ACTIVE: &str = "-a4b";

/// Splits a name into its size and the words after it, in lower case.
fn parts(name: &str) -> Option<(Shape, String)> {
    let name = name.to_ascii_lowercase();
    let model = name.split_once('/').map_or(&name[..], |(_, model)| model);
    if matches!(model, "gemma3" | "gemma3:latest") {
        // Ollama's name without a size means the 4B model.
        return Some((Shape::B4, String::new()));
    }
    let of_family = |family: usize| {
        let mut starts =
            [format!("gemma-{family}-"), format!("gemma{family}:"), format!("gemma{family}-")]
                .into_iter();
        starts.find_map(|start| Some((Some(family), model.strip_prefix(&start)?)))
    };
    let alone = (model.len() == name.len()).then_some((None, model));
    let (family, rest) = of_family(3).or_else(|| of_family(4)).or(alone)?;
    let end = rest.find(ACTIVE).map_or(rest.find('-'), |at| Some(at + ACTIVE.len()));
    let (size, kind) = rest.split_at(end.unwrap_or(rest.len()));
    let is_it = |shape: &Shape| {
        let own = shape.size();
        (own == size || own.strip_suffix(ACTIVE) == Some(size))
            && family.is_none_or(|f| f == shape.family())
    };
    let shape = Shape::ALL.into_iter().find(is_it)?;
    Some((shape, kind.strip_prefix('-').unwrap_or(kind).to_owned()))
}

fn gemma4([dim, layers, heads, kv_heads, global_kv_heads, ffn]: [usize; 6]) -> Value {
    json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": global_kv_heads, "attention_k_eq_v": true,
        "intermediate_size": ffn, "sliding_window": 1024, "vocab_size": 262_144,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 262_144,
    })
}

/// Returns the `config.json` of a Gemma 4 model's assistant, with the shape.
fn assistant(target: &Value) -> Value {
    let mut text = target.clone();
    text["enable_moe_block"] = false.into();
    for (key, value) in [
        ("hidden_size", json!(1024)),
        ("intermediate_size", json!(8192)),
        ("num_attention_heads", json!(16)),
        ("num_hidden_layers", json!(4)),
        ("num_kv_shared_layers", json!(4)),
        (
            "layer_types",
            json!([
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention"
            ]),
        ),
    ] {
        text[key] = value;
    }
    json!({"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"], "use_ordered_embeddings": false,
        "text_config": text})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_known_by_the_names_that_people_use() {
        for (name, size, recipe) in [
            ("27b", "27b", "q4_0"),
            ("31b", "gemma4-31b", "q4_0"),
            ("gemma4-12b", "gemma4-12b", "q4_0"),
            ("gemma4:31b", "gemma4-31b", "q4_0"),
            ("google/gemma-4-31B-it", "gemma4-31b", "bf16"),
            ("google/gemma-4-12B-it-qat-q4_0-gguf", "gemma4-12b", "q4_0"),
            ("12B", "12b", "q4_0"),
            ("gemma-3-1b", "1b", "q4_0"),
            ("gemma3:4b", "4b", "q4_0"),
            ("26b-a4b", "gemma4-26b-a4b", "q4_0"),
            ("26b", "gemma4-26b-a4b", "q4_0"),
            ("gemma4:26b", "gemma4-26b-a4b", "q4_0"),
            ("gemma3", "4b", "q4_0"),
            ("gemma3:27b-it-qat", "27b", "q4_0"),
            ("270m", "270m", "bf16"),
            ("gemma4:26b-a4b", "gemma4-26b-a4b", "q4_0"),
            ("google/gemma-4-26B-A4B-it", "gemma4-26b-a4b", "bf16"),
            ("google/gemma-4-26B-A4B-it-qat-q4_0-gguf", "gemma4-26b-a4b", "q4_0"),
            ("google/gemma-3-27b-it", "27b", "bf16"),
            ("google/gemma-3-270m-it", "270m", "bf16"),
            ("google/gemma-3-27b-it-qat-q4_0-gguf", "27b", "q4_0"),
            ("google/gemma-3-12b-it-qat-q4_0-unquantized", "12b", "bf16"),
        ] {
            let (shape, found) = Shape::named(name).unwrap();
            assert_eq!((shape.name(), found), (size, recipe), "{name}");
        }
        for name in [
            "",
            "28b",
            "gemma-3n-E4B-it",
            "gemma-2-27b-it",
            "google/gemma-3-27b-it-Q4_K_M",
            "model.gguf",
            "27",
            "models/27b",
            "gemma4-27b",
            "gemma-4-E4B-it",
        ] {
            assert_eq!(Shape::named(name), None, "{name}");
        }
        for name in ["27b", "gemma3:27b", "gemma-3-27b", "Gemma3:27B"] {
            assert_eq!(Shape::sized(name), Some(Shape::B27), "{name}");
        }
        for name in ["google/gemma-3-27b", "gemma-3-27b-it", "gemma3:27b-it-qat"] {
            assert_eq!(Shape::sized(name), None, "{name}");
        }
        assert_eq!(Shape::Mixture26.in_ollama(), "gemma4:26b");
        // The name of each page is recognised.
        for shape in Shape::ALL {
            for recipe in ["bf16", "q4_0"] {
                assert!(
                    shape
                        .page(recipe)
                        .is_none_or(|page| Shape::named(&page) == Some((shape, recipe)))
                );
            }
        }
    }

    /// Size in GB of Google's files, without the 15 MB of the tokenizer in a GGUF file.
    #[test]
    fn published_files_have_the_published_sizes() {
        for (shape, recipe, gb) in [
            (Shape::B27, "q4_0", 17.2),
            (Shape::B27, "bf16", 54.0),
            (Shape::Dense31, "q4_0", 17.636),
            (Shape::Dense31, "bf16", 61.4),
            (Shape::Dense12, "q4_0", 6.961),
            (Shape::Dense12, "bf16", 23.8),
        ] {
            let weights = shape.weights(&MadeUpFormats::of_recipe(recipe)).unwrap();
            let bytes = crate::runtime::model::Size::of(&weights).unwrap().bytes;
            assert!((bytes as f64 / 1e9 - gb).abs() < 0.05, "{shape:?} {recipe}: {bytes}");
        }
    }

    /// Millions of parameters, counted in the published checkpoints (text model, tied head).
    #[test]
    fn shapes_have_the_published_sizes() {
        for (shape, millions) in [
            (Shape::Dense31, 30_697),
            (Shape::Mixture26, 25_233),
            (Shape::Dense12, 11_907),
            (Shape::B27, 27_009),
            (Shape::B12, 11_766),
            (Shape::B4, 3_880),
            (Shape::B1, 999),
            (Shape::M270, 268),
        ] {
            let c = Config::from_json(&shape.config()).unwrap();
            let total: usize = c.tensors(false).iter().map(|tensor| tensor.size()).sum();
            assert_eq!(total / 1_000_000, millions, "{}", shape.name());
        }
        let bf16 = MadeUpFormats::of_recipe("bf16");
        let assistant = Shape::Dense31.assistant(&bf16).unwrap().unwrap();
        let size = crate::runtime::model::Size::of(&assistant).unwrap();
        assert_eq!(size.parameters / 1_000_000, 427);
        assert!(Shape::B27.assistant(&bf16).unwrap().is_none());
    }
}
