//! Options of images.

use crate::decode::PageDirectory;
use crate::error::Kind;
use crate::runtime::{Session, SightOptions};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// Images of a prompt.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Input")]
pub struct ImageOptions {
    /// Show the model an image: JPEG, PNG or WebP (repeatable)
    ///
    /// Images come before the prompt, in the given order. If the prompt contains `<image>` once per
    /// image, the images go there instead. `-` is standard input.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
}

/// The tower of a model, and the sizes of images.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model and device")]
pub struct SightArgs {
    /// File or directory with the vision tower, which reads images
    ///
    /// The default is the model's own directory, or the mmproj GGUF file next to the model.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub mmproj: Option<PathBuf>,
    /// Limit of tokens of an image: 70, 140, 280, 560 or 1120 (Gemma 4)
    ///
    /// Small text, as in screenshots, needs 560 or more. The default is that of the model's files,
    /// mostly 280. Images of Gemma 3 have 256 tokens.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub image_tokens: Option<usize>,
}

impl SightArgs {
    /// Refuses a tower that is named and cannot be opened, and a number of tokens that the tower
    /// does not support. A model without a tower continues with texts only.
    pub fn check(&self, session: &Session) -> Result<()> {
        match session.viewer() {
            Err(why) if self.mmproj.is_some() || why.kind == Kind::Usage => Err(why.clone().into()),
            _ => Ok(()),
        }
    }

    /// Returns the options of a session. It keeps soft tokens in `directory`, if one is given.
    pub fn settled(&self, directory: Option<&PageDirectory>) -> SightOptions {
        let (mmproj, tokens) = (self.mmproj.clone(), self.image_tokens);
        SightOptions { mmproj, tokens, directory: directory.cloned(), ..SightOptions::default() }
    }
}
