//! Offline conversion: a checkpoint of floats to a packed artifact that looks like a Hugging Face
//! directory.
//!
//! A [`Recipe`] says which format each tensor gets; applied to a model's headers it is a [`Plan`],
//! exact to the byte; a [`Solver`] finds the codes. One pass over the tensors in the order of the
//! forward pass; what is finished is journalled, so that a run that was ended goes on where it was.
//! The destination appears complete or not at all.

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
pub use convert::{Progress, Unfinished, check_source, estimate, quantize, run, unfinished};
pub use layout::{Class, Entry, Layout, Part, Target};
pub use plan::{Importance, Plan, Report, TensorReport, prior};
pub use recipe::{Aim, Recipe};
pub use solver::{Nearest, Solver};
pub use verify::{Verified, verify};

/// How a conversion is run. Nothing here changes a byte of the weights; `shard_bytes` says how they
/// are cut into files.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub threads: usize,
    /// Largest file of tensors, headers not counted; a single tensor is never cut.
    pub shard_bytes: u64,
    /// Memory to stay under, in bytes.
    pub memory: Option<u64>,
    /// Throw away what an unfinished run of the same destination left, rather than go on from
    /// there.
    pub restart: bool,
    /// Round weights that are already quantised once more.
    pub requantize: bool,
    /// Write one GGUF file rather than a directory.
    pub gguf: bool,
    /// Read everything back and compare all decoders before the destination appears.
    pub verify: bool,
}

impl Default for Options {
    /// All cores; 4 GB, which copies, mounts and hubs all take.
    fn default() -> Self {
        Options {
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

/// Files that travel with a model, copied where the source has them.
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

/// JSON for people, with a line's end.
fn pretty(value: &impl serde::Serialize) -> anyhow::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}
