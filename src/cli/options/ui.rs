//! What is said on standard error, and how.

use clap::{Args, ValueEnum};

/// What is said on standard error.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Terminal")]
pub struct UiOptions {
    /// Print nothing on standard error but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Print more details; -vv prints more still
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Show progress bars; auto does on a terminal, until the first token
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = OnTerminal::Auto)]
    pub progress: OnTerminal,
    /// Use colours; auto does on a terminal, unless NO_COLOR, CLICOLOR=0 or TERM=dumb says
    /// otherwise
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Colour::Auto)]
    pub color: Colour,
    /// Print each option's value and where it came from, in the form of gemma.toml, and stop
    #[arg(long)]
    pub print_config: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnTerminal {
    Auto,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Colour {
    Auto,
    Always,
    Never,
}
