//! Options around a prompt: instructions, earlier messages, the start of the answer.

use super::SpecialPolicy;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct ChatOptions {
    /// Instructions for the model (system prompt)
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Read the instructions from a file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub system_file: Option<PathBuf>,
    /// Continue a conversation that is stored as JSON
    ///
    /// The file holds an array of {"role": ..., "content": ...}. A prompt, if there is one, becomes
    /// the last message of the user.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub messages: Option<PathBuf>,
    /// Continue the text, without a chat template
    ///
    /// One BOS token goes before the text, and nothing else is added.
    #[arg(long, hide_short_help = true)]
    pub raw: bool,
    /// First words of the answer, from which the model continues; the output does not repeat them
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, hide_short_help = true)]
    pub prefill: Option<String>,
    /// Treatment of control tokens that the prompt spells, such as <end_of_turn>
    #[arg(
        long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text,
        hide_short_help = true
    )]
    pub special_in_prompt: SpecialPolicy,
}
