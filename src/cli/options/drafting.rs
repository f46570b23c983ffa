//! Where guesses come from.

use crate::draft::{Mixing, TreeSize};
use crate::runtime::DraftingOptions;
use crate::runtime::options::Device;
use crate::runtime::options::{AutoOr, DraftAhead};
use anyhow::{Context, Result};
use clap::Args;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Drafting (changes the speed, never the text)")]
pub struct DraftArgs {
    /// Source of guesses: auto, off, ngram, or a model
    ///
    /// auto is the bundled draft model that shares the model's tokenizer (the demo's or Gemma 3's),
    /// mixed with what followed the last time the text ended like this, and with what the model
    /// found likely the last time after the same tokens. ngram is the latter
    /// two alone, bundled refuses to run without a bundled draft model, and off decodes without
    /// drafts. A model is a directory, a GGUF file or an id as for --model; it needs the same
    /// tokenizer, or a part of it.
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub draft: String,
    /// How many tokens ahead to guess at most
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub draft_tokens: AutoOr,
    /// Shape of the guesses: auto, chain (one line), or the number of nodes of a tree
    #[arg(long, value_name = "auto|chain|N", default_value = "auto", value_parser = tree)]
    pub draft_tree: TreeSize,
    /// Where the draft model runs: auto, cpu, vulkan or vulkan:N
    ///
    /// auto is the processor, which is free while a GPU checks guesses; a draft model of more than
    /// 200 MB goes to a discrete GPU that has room for all of it beside the model.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub draft_device: String,
    /// Guess further while the model's device checks the last guesses: auto, on or off
    ///
    /// auto does so where the model and its draft model run on devices of their own, for as long as
    /// that is measured to pay.
    #[arg(long, value_enum, value_name = "auto|on|off", default_value_t = DraftAhead::Auto)]
    pub draft_ahead: DraftAhead,
}

impl DraftArgs {
    /// The options of a session. A device that nobody knows is refused.
    pub fn settled(&self) -> Result<DraftingOptions> {
        Ok(DraftingOptions {
            source: self.draft.as_str().into(),
            tokens: self.draft_tokens,
            tree: self.draft_tree,
            device: self.draft_device.parse::<Device>().context("--draft-device")?,
            ahead: self.draft_ahead,
            mixing: Mixing::default(),
        })
    }
}

fn tree(text: &str) -> Result<TreeSize, String> {
    text.parse().map_err(|_| "expected auto, chain, or a number above 0".into())
}
