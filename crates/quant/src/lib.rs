//! Offline conversion of a checkpoint of floats to a packed artifact, which has the layout of a
//! Hugging Face directory.
//!
//! A [`Recipe`] has the format of each tensor. A [`QuantPlan`] applies it to the headers of a model
//! and predicts all sizes to the byte. A [`Solver`] computes the codes. [`run`] converts the
//! tensors in the order of the forward pass. It records each finished tensor in a journal, from
//! which an interrupted run resumes. The destination appears complete or not at all.
//!
//! Start reading in `convert/mod.rs`.

pub mod calibrate;
mod calibrated;
mod convert;
mod layout;
mod ldlq;
mod plan;
pub mod recipe;
mod solver;
mod verify;

pub use calibrated::Calibrated;
pub use convert::{QuantProgress, Unfinished, check_source, estimate, quantize, run, unfinished};
pub use layout::{ArtifactLayout, Class, StoredTensor, TargetFormat, TensorPlan};
pub use plan::{Importance, QuantPlan, QuantReport, TensorReport, prior};
pub use recipe::{Aim, Recipe};
pub use solver::{Nearest, Solver};
pub use verify::{Verification, verify};

/// Options of a conversion. They do not change the weights. `shard_bytes` sets the size of files.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions {
    pub threads: usize,
    /// Limit for the tensors of one file, in bytes without its header. A single tensor is never
    /// split.
    pub shard_bytes: u64,
    /// Limit of memory in bytes.
    pub memory: Option<u64>,
    /// Discards an unfinished run of the same destination instead of resuming it.
    pub restart: bool,
    /// Allows weights that are quantised already to be rounded again.
    pub requantize: bool,
    /// Writes one GGUF file instead of a directory.
    pub gguf: bool,
    /// Reads everything back and compares all decoders before the destination appears.
    pub verify: bool,
}

impl Default for QuantizeOptions {
    /// Returns options for all cores and files of 4 GB, which all file systems and hubs accept.
    fn default() -> Self {
        QuantizeOptions {
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            shard_bytes: 4_000_000_000,
            memory: None,
            restart: false,
            requantize: false,
            gguf: false,
            verify: false,
        }
    }
}

/// Files in the directory of the weights that are copied if the source has them.
const SIDE_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "draft_vocabulary.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Returns indented JSON with a final newline.
fn pretty(value: &impl serde::Serialize) -> anyhow::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}
