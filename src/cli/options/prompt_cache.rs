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
    /// Keep read prompts in a directory; later runs do not read them again
    ///
    /// A prompt that begins like an earlier one, such as another question about the same report, is
    /// read from where they part, in whole pages of 256 tokens. The text is byte for byte the same.
    /// The files reveal the prompts to whoever can read them: the directory is for this user alone,
    /// and without this option nothing is kept.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub cache_dir: Option<Destination>,
    /// Largest size of that directory; prompts that were of use longest ago are removed
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

/// Writes what is left of the prompts, unless it is interrupted. A failure is a note: the text is
/// there.
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
