//! Options of the prompt.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Parts of a prompt or text. `io/input.rs` joins them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct InputOptions {
    /// The prompt, in quotes; `-` stands for standard input
    ///
    /// Files (-f, in order), piped standard input and PROMPT are joined in this order, with blank
    /// lines between them. An argument `-` puts standard input at that place instead. The final
    /// line break of a file or of standard input is dropped.
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, hide_short_help = true)]
    pub prompt: Option<String>,
    /// Put a file before the prompt (repeatable)
    ///
    /// Files are joined in the given order; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub file: Vec<PathBuf>,
}

/// How control tokens in the user's text are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecialPolicy {
    /// Ordinary characters
    Text,
    /// Control tokens
    Parse,
}
