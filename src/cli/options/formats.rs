//! Formats of made-up weights.

use crate::runtime::model::shapes::MadeUpFormats;
use crate::tensor::Format;
use clap::Args;

#[derive(Clone, Debug, Default, Args)]
pub struct FormatArgs {
    /// Weight format of the made-up linear layers [default: i4-row+h128]
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub format_weights: Option<Format>,
    /// Weight format of the made-up embedding table and output head [default: i8-row]
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub format_embedding: Option<Format>,
    /// Formats of q4_0, bf16 or a recipe of gemma quantize
    ///
    /// q4_0 is what Google's 4-bit GGUF files have, bf16 Google's original checkpoints; the recipes
    /// are seed, int4, 9gb, 10gb, 12gb, or a file. This goes instead of the two options above.
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
