//! Offline conversion: a checkpoint of floats to a packed artifact that looks like a Hugging Face directory.
//!
//! One pass over the tensors, a chunk of rows at a time; the destination appears complete or not at all.

mod layout;
mod pipeline;
mod staging;

pub use layout::{Entry, Layout, Part};
pub use pipeline::quantize;

use crate::gemma::Role;
use crate::tensor::Format;
use serde::Serialize;

/// Which format each matrix gets; norms stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub linear: Format,
    pub embedding: Format,
}

impl Recipe {
    /// The format of a role's matrix; `None` for norms.
    pub fn format(&self, role: Role) -> Option<Format> {
        match role {
            Role::Embed | Role::Head => Some(self.embedding),
            _ if role.is_matrix() => Some(self.linear),
            _ => None,
        }
    }
}

/// How to go about it; nothing here changes a byte of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub threads: usize,
    /// Largest file of tensors, headers not counted; a single tensor is never cut.
    pub shard_bytes: u64,
}

impl Default for Options {
    /// All cores; 4 GB, which copies, mounts and hubs all take.
    fn default() -> Self {
        Options { threads: std::thread::available_parallelism().map_or(1, |n| n.get()), shard_bytes: 4_000_000_000 }
    }
}

/// What became of one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    pub name: String,
    pub format: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
    pub bits_per_weight: f64,
    /// sqrt(sum of squared errors / sum of squares); 0 for what is copied.
    pub relative_error: f64,
    /// Of the bytes written: codes, then scales.
    pub sha256: String,
}

/// What a run did; written as `quant-report.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub version: String,
    /// Of the source's tensors in the order of the forward pass, as stored there: the same however it is sharded.
    pub source_sha256: String,
    pub linear: String,
    pub embedding: String,
    pub parameters: u64,
    /// Of all tensors, without headers and side files.
    pub bytes: u64,
    pub bits_per_weight: f64,
    pub tensors: Vec<TensorReport>,
}

/// Told after each chunk of rows.
#[derive(Clone, Debug)]
pub struct Progress<'a> {
    pub tensor: &'a str,
    pub done: u64,
    /// Weights in all.
    pub total: u64,
}
