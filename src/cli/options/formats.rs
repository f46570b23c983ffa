//! Formats of synthetic weights.

use crate::runtime::model::shapes::MadeUpFormats;
use crate::tensor::Format;
use clap::Args;

#[derive(Clone, Debug, Default, Args)]
pub struct FormatArgs {
    /// Format of the synthetic linear layers [default: i4-row+h128]
    #[arg(long, value_name = "FORMAT", value_parser = format, hide_short_help = true)]
    pub format_weights: Option<Format>,
    /// Format of the synthetic embedding table and output head [default: i8-row+h128]
    #[arg(long, value_name = "FORMAT", value_parser = format, hide_short_help = true)]
    pub format_embedding: Option<Format>,
    /// Formats of all weights: q4_0, bf16 or a recipe of gemma quantize
    ///
    /// q4_0 is the format of Google's 4-bit GGUF files, bf16 that of Google's original checkpoints.
    /// The recipes are seed, int4, 9gb, 10gb, 12gb, 26b-9gb, or a file. This replaces
    /// --format-weights and --format-embedding.
    #[arg(long, value_name = "RECIPE", conflicts_with_all = ["format_weights", "format_embedding"])]
    pub recipe: Option<String>,
}

impl FormatArgs {
    pub fn settled(&self) -> MadeUpFormats {
        MadeUpFormats {
            weights: self.format_weights,
            embedding: self.format_embedding,
            recipe: self.recipe.clone(),
        }
    }
}

fn format(text: &str) -> Result<Format, String> {
    text.parse().map_err(|e: anyhow::Error| e.to_string())
}
