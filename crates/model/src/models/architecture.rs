//! The interface of an architecture: its configuration, and a layer as a list of steps.
//!
//! The steps are the only definition of a layer's arithmetic. [`super::forward`] lowers them to the
//! dispatches of a pass. `quant::calibrate` computes them in f32 over many windows of text.
//! [`Config::tensors`] derives the tensors and their shapes from them.

use super::config::{Config, ExpertSpec, LayerSpec};
use super::dialect::Dialect;
use super::gemma3::Gemma3;
use super::gemma4::{Gemma4, Gemma4Assistant};
use super::gguf::GgufModel;
use super::role::Role;
use crate::checkpoint::gguf::write::Keys;
use gemma_base::error::Fault;
use serde_json::Value;

/// A family of models.
pub trait Architecture: Sync {
    /// Name in messages, such as `Gemma 3`.
    fn name(&self) -> &'static str;
    /// Returns whether a `config.json` belongs to the family. It has this `model_type`, or this
    /// class name if there is no type.
    fn is_named(&self, model_type: Option<&str>, class: Option<&str>) -> bool;
    /// Reads a `config.json` of the family.
    fn config(&self, json: &Value) -> Result<Config, Fault>;
    /// Name in GGUF files, the first part of its keys.
    fn gguf(&self) -> &'static str;
    /// Returns the `config.json` equivalent of a GGUF file, or an error message.
    fn gguf_config(&self, file: &GgufModel<'_>) -> Result<Value, String>;
    /// Adds the keys of a GGUF file. Fails for a model that llama.cpp would compute differently.
    fn gguf_keys(&self, config: &Config, keys: &mut Keys) -> anyhow::Result<()>;
    /// Returns the dialect of the family.
    fn dialect(&self) -> &'static Dialect;
    /// Returns the number that a norm adds to its stored weights.
    fn norm_base(&self) -> f32;
    /// Returns the steps of a layer with this shape.
    fn layer(&self, config: &Config, spec: &LayerSpec) -> Vec<Step>;
}

/// All supported architectures, the newest last.
pub(super) const ARCHITECTURES: [&dyn Architecture; 3] = [&Gemma3, &Gemma4, &Gemma4Assistant];

impl PartialEq for dyn Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl std::fmt::Debug for dyn Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the architecture that a `config.json` names.
pub fn of_json(json: &Value) -> Result<&'static dyn Architecture, Fault> {
    let text = json.get("text_config").filter(|v| !v.is_null()).unwrap_or(json);
    let model_type = |v: &Value| v.get("model_type").and_then(Value::as_str).map(str::to_owned);
    let class = json["architectures"].get(0).and_then(Value::as_str);
    let kind = model_type(json).or_else(|| model_type(text));
    let found = ARCHITECTURES.into_iter().find(|a| a.is_named(kind.as_deref(), class));
    found.ok_or_else(|| {
        let found = kind.as_deref().or(class).unwrap_or("of no stated kind");
        Fault::model(unknown(found)).help(known())
    })
}

/// Returns the architecture that a GGUF file names.
pub fn of_gguf(name: &str) -> Option<&'static dyn Architecture> {
    // Files of assistants spell the name in two ways.
    ARCHITECTURES.into_iter().find(|a| a.gguf() == name.replace('_', "-"))
}

/// Returns whether a `model_type`, or a GGUF architecture, is supported.
pub fn is_known(name: &str) -> bool {
    ARCHITECTURES.into_iter().any(|a| a.is_named(Some(name), None) || a.gguf() == name)
}

/// Returns why a model with this name, id or type is not supported, if known.
pub fn refusal(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase().replace("gemma-", "gemma").replace('_', "-");
    let layers = "it has embeddings for each layer, which are not computed";
    let reasons = [("gemma3n", layers), ("gemma4-e2b", layers), ("gemma4-e4b", layers)];
    reasons.into_iter().find(|(part, _)| name.contains(part)).map(|(_, why)| why)
}

/// Describes an unsupported type of model.
pub fn unknown(kind: &str) -> String {
    refusal(kind)
        .map_or(format!("the model is {kind}"), |why| format!("the model is {kind}: {why}"))
}

/// Returns a sentence that lists the supported architectures.
pub fn known() -> String {
    let name = |a: &&dyn Architecture| format!("{} ({})", a.name(), a.gguf());
    let names: Vec<String> = ARCHITECTURES.iter().map(name).collect();
    format!("this program runs {}", names.join(", "))
}

/// One step of a layer.
///
/// It reads the values of the previous step, f32 `[rows, width]` each, and returns values for the
/// next step. The residual stream, f32 `[rows, dim]`, is separate.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Returns RMSNorm of the residual stream.
    Norm(Role),
    /// Returns the products of one value with several matrices, each with its number of rows. A
    /// matrix may occur twice.
    Linear(&'static str, Vec<(Role, usize)>),
    /// Returns attention of queries, keys and values. Each head of queries and keys is normalised,
    /// then rotated. Without keys, queries attend to those of another model.
    Attend { q_norm: Role, keys: Option<KeyNorms> },
    /// Returns `gelu_tanh(z gate^T) * (z up^T)` of one value z.
    GateUp { gate: Role, up: Role, rows: usize },
    /// Returns the sum of [`Role::PostSharedNorm`] of one value and [`Role::PostExpertNorm`] of the
    /// experts' output.
    ///
    /// The router scores RMSNorm of the residual stream without weights, times
    /// [`Role::RouterScale`] and `dim^-0.5`. Experts read [`Role::PreExpertNorm`] of the stream.
    Mixture(ExpertSpec),
    /// Adds RMSNorm of one value to the residual stream, then multiplies the stream by `scale`, a
    /// tensor with one element.
    Add { norm: Role, scale: Option<Role> },
}

/// Norms of the keys and values of an attention step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyNorms {
    pub k_norm: Role,
    /// Whether each head of values is normalised, without weights.
    pub v_norm: bool,
}

impl Step {
    /// Returns the matrices that read the step's input, each once.
    pub fn matrices(&self) -> Vec<(Role, usize)> {
        match self {
            Step::Linear(_, matrices) => {
                let mut matrices = matrices.clone();
                matrices.dedup();
                matrices
            }
            Step::GateUp { gate, up, rows } => vec![(*gate, *rows), (*up, *rows)],
            _ => Vec::new(),
        }
    }
}

/// A tensor of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub role: Role,
    /// Layer index; 0 for a tensor outside the layers.
    pub layer: usize,
    /// 1 for a vector.
    pub rows: usize,
    pub cols: usize,
    /// Number of equally sized matrices stacked vertically; 1 for a single one.
    pub stack: usize,
}

impl TensorSpec {
    /// Returns whether it is a matrix or table, as opposed to a vector.
    pub fn is_matrix(&self) -> bool {
        self.role.is_matrix()
    }

    /// Returns its shape in unquantised files.
    pub fn shape(&self) -> Vec<usize> {
        let TensorSpec { role, rows, cols, stack, .. } = *self;
        match () {
            _ if role.is_of_experts() => vec![stack, rows / stack, cols],
            _ if role.is_matrix() => vec![rows, cols],
            _ => vec![cols],
        }
    }

    /// Returns the number of its weights.
    pub fn size(&self) -> usize {
        self.rows * self.cols
    }
}

/// Appends the tensors of a layer in the order of its steps.
pub fn tensors(config: &Config, spec: &LayerSpec, layer: usize, out: &mut Vec<TensorSpec>) {
    let mut width = config.dim; // width of the step's first input
    for step in config.architecture.layer(config, spec) {
        let mut stacked = |role, stack, rows, cols| {
            out.push(TensorSpec { role, layer, rows: stack * rows, cols, stack });
        };
        let mut push = |role, rows, cols| stacked(role, 1, rows, cols);
        step.matrices().into_iter().for_each(|(role, rows)| push(role, rows, width));
        width = match step {
            Step::Norm(role) => {
                push(role, 1, config.dim);
                config.dim
            }
            Step::Linear(_, matrices) => matrices[0].1,
            Step::Attend { q_norm, keys } => {
                let norms = [q_norm].into_iter().chain(keys.map(|keys| keys.k_norm));
                norms.for_each(|role| push(role, 1, spec.head_dim));
                spec.query_width()
            }
            Step::GateUp { rows, .. } => rows,
            Step::Mixture(ExpertSpec { count, width, fused, .. }) => {
                push(Role::PostSharedNorm, 1, config.dim);
                push(Role::RouterScale, 1, config.dim);
                push(Role::Router, count, config.dim);
                push(Role::ExpertFactors, 1, count);
                push(Role::PreExpertNorm, 1, config.dim);
                match fused {
                    true => stacked(Role::ExpertGateUp, count, 2 * width, config.dim),
                    false => [Role::ExpertGate, Role::ExpertUp]
                        .into_iter()
                        .for_each(|role| stacked(role, count, width, config.dim)),
                }
                stacked(Role::ExpertDown, count, config.dim, width);
                stacked(Role::PostExpertNorm, 1, 1, config.dim);
                config.dim
            }
            Step::Add { norm, scale } => {
                push(norm, 1, config.dim);
                scale.into_iter().for_each(|role| push(role, 1, 1));
                config.dim
            }
        };
    }
}
