//! Options of speculative decoding.

use crate::draft::{Mixing, TreeSize};
use crate::runtime::DraftingOptions;
use crate::runtime::options::Device;
use crate::runtime::options::{AutoOr, DraftAhead};
use anyhow::{Context, Result};
use clap::Args;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Drafting (changes the speed, never the text)")]
pub struct DraftArgs {
    /// Source of draft tokens: auto, off, ngram, or a model
    ///
    /// With auto, three sources draft: a draft model, the text after the last place where the
    /// context ended in the same tokens, and the tokens that the model ranked high after the same
    /// two tokens. The draft model of a Gemma 4 is the assistant next to it; for others it is the
    /// bundled one for the tokenizer. With ngram, only the latter two sources draft. With bundled,
    /// a bundled draft model is required. With off, there are no drafts. A model is a directory, a
    /// GGUF file or an id, as for --model; it needs the same tokenizer, or a part of it. An
    /// assistant works only with the model that it was made for.
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub draft: String,
    /// Limit of draft tokens in a row
    #[arg(long, value_name = "N|auto", default_value = "auto", hide_short_help = true)]
    pub draft_tokens: AutoOr,
    /// Shape of a draft: auto, chain (no branches), or the number of nodes of a tree
    #[arg(
        long, value_name = "auto|chain|N", default_value = "auto", value_parser = tree,
        hide_short_help = true
    )]
    pub draft_tree: TreeSize,
    /// Device of the draft model: auto, cpu, vulkan or vulkan:N
    ///
    /// auto is the processor, which is idle while a GPU verifies drafts. A draft model of more than
    /// 200 MB runs on a discrete GPU that has room for it in addition to the model. An assistant is
    /// always on the model's device.
    #[arg(long, value_name = "DEVICE", default_value = "auto", hide_short_help = true)]
    pub draft_device: String,
    /// Draft the next tokens while the model verifies the last ones: auto, on or off
    ///
    /// auto does this if the model and its draft model run on different devices and measurements
    /// show a gain.
    #[arg(
        long, value_parser = super::values::draft_ahead(), value_name = "auto|on|off",
        default_value = "auto", hide_short_help = true
    )]
    pub draft_ahead: DraftAhead,
}

impl DraftArgs {
    /// Returns the options of a session, or an error for an unknown device.
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
