//! What is said beside the prompt.

use super::SpecialPolicy;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct ChatOptions {
    /// Instructions for the model, put before the prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// The instructions, from a file
    #[arg(long, value_name = "FILE")]
    pub system_file: Option<PathBuf>,
    /// A conversation as JSON, before the prompt
    ///
    /// The file holds an array of {"role": ..., "content": ...}; the prompt, if any, is added as
    /// the last turn of the user.
    #[arg(long, value_name = "FILE")]
    pub messages: Option<PathBuf>,
    /// Continue the text as it is, without a chat template
    ///
    /// The text is put behind one BOS token, and nothing else is added.
    #[arg(long)]
    pub raw: bool,
    /// How the answer begins; the model continues from there (not repeated in the output)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prefill: Option<String>,
    /// What to do with control tokens that the prompt spells, such as <end_of_turn>
    #[arg(long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text)]
    pub special_in_prompt: SpecialPolicy,
}
