//! Memory of a process in addition to its model.

use super::measure::Task;
use crate::runtime::model::partner::SLOW_PASS;
use anyhow::Result;
use gemma_base::compute::KvFormat;
use gemma_model::models::gemma3::bundled::{self, DraftSize};
use gemma_model::models::{Config, Weights};
use serde::Serialize;

/// Bytes of a tokenizer per token of its vocabulary, measured with Gemma 3's.
const TOKEN: u64 = 420;
/// Bytes of a process without a model: relocated code, buffers, and thread stacks.
const PROGRAM: u64 = 8 << 20;
/// Bytes of the tables of model-free drafts, and of a draft model's vocabulary.
const TABLES: u64 = 16 << 20;

/// Rows of f32 logits that a pass over drafts keeps in the process.
const LOGITS: u64 = 32;
/// Tokens of Gemma 3's vocabulary, and most extra rows in its tables.
const GEMMA: usize = 262_144;
const PADDING: usize = 64;

/// Bytes of main memory that a process uses in addition to its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessMemory {
    pub tokenizer: u64,
    /// The bundled draft model for this vocabulary, with its buffers.
    pub drafts: u64,
    pub program: u64,
}

impl ProcessMemory {
    /// Estimates the memory for a model with passes of `pass` seconds.
    pub fn of(task: &Task<'_>, pass: f32) -> Result<ProcessMemory> {
        let rows = task.weights.config().vocab;
        let draft = match draft(rows, pass)? {
            Some(weights) => {
                let (kv, prefixes) = (KvFormat::Q8, 0);
                let task = Task { weights: &weights, kv, prefixes, npu: false, ..*task };
                task.measure(None, 0)?.cpu.need.total()
            }
            None => 0,
        };
        let drafts = draft + TABLES + LOGITS * 4 * rows as u64;
        Ok(ProcessMemory { tokenizer: rows as u64 * TOKEN, drafts, program: PROGRAM })
    }

    pub fn total(&self) -> u64 {
        self.tokenizer + self.drafts + self.program
    }
}

/// Returns the bundled draft model for a vocabulary of `rows` tokens.
fn draft(rows: usize, pass: f32) -> Result<Option<Weights>> {
    if !cfg!(feature = "bundled") {
        return Ok(None);
    }
    let demo = bundled::draft()?;
    if Config::from_json(demo.config())?.vocab == rows {
        return Weights::open(demo).map(Some);
    }
    if rows.abs_diff(GEMMA) > PADDING {
        return Ok(None);
    }
    let size = if pass >= SLOW_PASS { DraftSize::Medium } else { DraftSize::Small };
    Weights::open(bundled::gemma_draft(size)?).map(Some)
}
