//! The JSON result of `generate`, version 1. `result.schema.json` describes it, and a test compares
//! both.

pub use crate::runtime::answers::FinishReason;
use crate::tensor::Token;
use serde::Serialize;
use std::collections::BTreeMap;

/// Version of the record's form.
pub const VERSION: u32 = 1;

/// The JSON Schema that `gemma schema` prints.
pub const SCHEMA: &str = include_str!("result.schema.json");

#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    pub v: u32,
    /// Id of a batch record; null for a single prompt.
    pub id: Option<serde_json::Value>,
    pub text: String,
    /// Thoughts of the model, from before and within the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    pub finish_reason: FinishReason,
    pub usage: Usage,
    pub timings: Timings,
    /// Images of the prompt, if it has some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<ImagesRecord>,
    pub draft: DraftRecord,
    pub sampling: SamplingRecord,
    pub memory: MemoryRecord,
    pub device: String,
    /// Report of the NPU or of its software model; null without one.
    pub npu: Option<crate::compute::AssistReport>,
    pub model: ModelRecord,
    /// Error of a text with the finish reason `error`, or of a text that ended before its grammar
    /// was complete.
    pub error: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

/// Times in seconds, speeds in tokens per second, and cached tokens.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Timings {
    pub load_s: f64,
    pub prefill_s: f64,
    pub decode_s: f64,
    /// Time from the start of the prefill to the first token, in seconds.
    pub ttft_s: Option<f64>,
    pub prefill_tps: Option<f64>,
    pub decode_tps: Option<f64>,
    /// Prompt tokens that were in a cache.
    pub cached_tokens: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct ImagesRecord {
    pub images: usize,
    pub tokens: usize,
    /// Time for decoding and resizing, in seconds.
    pub prepare_s: f64,
    /// Time of the tower, in seconds.
    pub encode_s: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct DraftRecord {
    pub sources: Vec<DraftSource>,
    /// Proposed tokens, and accepted tokens (the next field).
    pub drafted: u64,
    pub accepted: u64,
    /// Passes of the target while decoding.
    pub passes: u64,
    /// Tokens per pass, including the target's own token.
    pub accepted_length: Option<f64>,
    /// Number of passes by accepted tokens: 0, 1, 2, ...
    pub histogram: Vec<u64>,
    /// Drafted and accepted nodes by depth in the tree: 1, 2, ...
    pub depths: Vec<DraftDepth>,
    /// Drafting time in seconds: time that the target waited, and time hidden by the target's
    /// passes.
    pub exposed_s: f64,
    pub hidden_s: f64,
    /// Rounds that the draft model drafted ahead, and rounds in which it had assumed the right
    /// token.
    pub ahead: u64,
    pub ahead_hits: u64,
    /// Tokens per pass with drafts, predicted and measured, and the current calibration factor of
    /// draft probabilities.
    pub predicted_length: Option<f64>,
    pub realised_length: Option<f64>,
    pub trust: Option<f64>,
    /// Speed without drafts in tokens per second, from the measured time of a pass over one row.
    pub plain_tps: Option<f64>,
    /// Times of passes over 1, 2, 4, ... rows at the context length of the text's end.
    pub costs: Vec<PassCost>,
    pub disabled_reason: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct DraftSource {
    pub name: String,
    pub drafted: u64,
    pub accepted: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct DraftDepth {
    pub drafted: u64,
    pub accepted: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PassCost {
    pub rows: usize,
    pub ms: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct SamplingRecord {
    pub temperature: f64,
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    pub repeat_penalty: f64,
    pub repeat_last_n: i64,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    /// Biases by token id.
    pub logit_bias: BTreeMap<Token, f64>,
    pub max_tokens: usize,
    pub seed: u64,
}

/// Sizes in bytes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MemoryRecord {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelRecord {
    pub name: String,
    /// Hash of the weights' source, if the model records it.
    pub sha256: Option<String>,
    pub bits_per_weight: Option<f64>,
}
