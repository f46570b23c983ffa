//! The options of `gemma chat`.

use crate::cli::io::destination::Destination;
use crate::cli::options::{
    DraftArgs, ModelArgs, PresetOption, PromptCacheArgs, SamplingOptions, SightArgs, TemplateArgs,
    ThinkOptions, UiOptions,
};
use clap::{Args, ValueHint};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  gemma chat
  gemma chat -m google/gemma-3-27b-it-qat-q4_0-gguf
  gemma chat -m MODEL --system 'Answer in one sentence.' --temp 0.7
  gemma chat -m MODEL --keep-talks    and later: gemma chat -m MODEL --continue";

/// Talk to the model at a terminal; it remembers earlier messages
///
/// Type a message, or /help for the commands. Ctrl-C stops an answer and keeps the conversation; at
/// the prompt it drops the line. Ctrl-D or /quit leaves. A conversation is written to a file only
/// if you ask for it, with /save, --keep-talks, --continue or --history.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ChatArgs {
    /// The first message; the conversation continues after its answer
    #[arg(value_name = "MESSAGE")]
    pub words: Vec<String>,
    /// Instructions for the model (system prompt)
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Read the instructions from a file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub system_file: Option<PathBuf>,
    #[command(flatten)]
    pub think: ThinkOptions,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub talks: TalkOptions,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub preset: PresetOption,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Options about kept conversations. A `gemma.toml` in the working directory may not set them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Talks")]
pub struct TalkOptions {
    /// Continue the last kept conversation, or the one with this id
    ///
    /// New messages are added to it. --list prints the ids.
    #[arg(
        long = "continue", value_name = "ID", num_args = 0..=1, require_equals = true,
        default_missing_value = "", conflicts_with = "history"
    )]
    pub resume: Option<String>,
    /// Keep the conversation, so that --continue can continue it
    ///
    /// After each answer, the messages are written to a file in ~/.local/share/gemma/talks (on
    /// Windows %LOCALAPPDATA%\gemma\data\talks) that only you may read.
    #[arg(long)]
    pub keep_talks: bool,
    /// Keep the conversation in a file, and continue the one that is in it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub history: Option<Destination>,
    /// List the kept conversations: id, messages, first words
    #[arg(long, conflicts_with_all = ["resume", "history", "export", "delete"])]
    pub list: bool,
    /// Print a kept conversation as Markdown
    #[arg(
        long, value_name = "ID", hide_short_help = true,
        conflicts_with_all = ["resume", "history", "delete"]
    )]
    pub export: Option<String>,
    /// Delete a kept conversation
    #[arg(
        long, value_name = "ID", hide_short_help = true, conflicts_with_all = ["resume", "history"]
    )]
    pub delete: Option<String>,
    /// Print --list as one JSON object, and --export as a list of messages
    #[arg(long, hide_short_help = true)]
    pub json: bool,
}
