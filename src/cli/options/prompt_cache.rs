//! Options of the prompt cache on disk.

use super::memory;
use crate::cli::io::destination::Destination;
use crate::cli::io::ui::Ui;
use crate::decode::{PageDirectory, PromptCache};
use crate::engine::Timeline;
use anyhow::Result;
use clap::Args;
use std::sync::atomic::AtomicBool;

/// The prompt cache on disk.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompt cache")]
pub struct PromptCacheArgs {
    /// Keep prompts in a directory, so that later runs need not read them again
    ///
    /// A prompt that begins like an earlier one, such as another question about the same report, is
    /// read only from the place where they differ, in whole pages of 256 tokens. The text is byte
    /// for byte the same. Anyone who can read the files can compute the prompts: the directory is
    /// for this user alone, and without this option nothing is stored.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub cache_dir: Option<Destination>,
    /// Size limit of that directory; the least recently used prompts are removed
    #[arg(
        long, value_name = "SIZE", default_value = "4GB", value_parser = memory,
        hide_short_help = true
    )]
    pub cache_size: u64,
}

impl PromptCacheArgs {
    /// Opens the directory, if one is named.
    pub fn settled(&self) -> Result<Option<PageDirectory>> {
        let directory = self.cache_dir.as_ref();
        directory.map(|dir| PageDirectory::open(dir.path(), self.cache_size)).transpose()
    }
}

/// Writes the rest of the prompts, unless it is interrupted.
///
/// A failure is printed as a note only, because the text is complete.
pub fn finish_prompts(
    prompts: &mut Option<PromptCache>,
    target: &mut Timeline,
    interrupt: &AtomicBool,
    ui: &Ui,
) {
    let Some(prompts) = prompts else { return };
    if let Err(error) = prompts.finish(target, interrupt) {
        ui.note(format!("the prompt is not kept: {error:#}"));
    }
    prompts.take_note().iter().for_each(|note| ui.note(note));
}
