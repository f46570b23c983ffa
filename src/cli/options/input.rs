//! Where a prompt comes from.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Where a prompt or text comes from; joined by `input.rs`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct InputOptions {
    /// The prompt, in quotes; `-` stands for standard input
    ///
    /// Files (-f, in order), then piped standard input, then PROMPT are joined by blank lines. An
    /// argument `-` puts standard input exactly there. One final line break of a file or of
    /// standard input is dropped.
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Put a file in front of the prompt (repeatable)
    ///
    /// Files are joined in the order in which they are given; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub file: Vec<PathBuf>,
}

/// What becomes of a model's control tokens in the user's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecialPolicy {
    /// They are characters like any others
    Text,
    /// They are control tokens
    Parse,
}
