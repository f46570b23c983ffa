//! Options of the messages on standard error.

use clap::{Args, ValueEnum};

/// Messages on standard error.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Terminal")]
pub struct UiOptions {
    /// Print only errors on standard error
    #[arg(short, long)]
    pub quiet: bool,
    /// Print more details; -vv prints even more
    #[arg(short, long, hide_short_help = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Show progress bars; auto shows them on a terminal, until the first token
    #[arg(
        long, hide_short_help = true, value_enum, value_name = "WHEN",
        default_value_t = OnTerminal::Auto
    )]
    pub progress: OnTerminal,
    /// Use colours; auto does on a terminal, unless NO_COLOR, CLICOLOR=0 or TERM=dumb is set
    #[arg(
        long, hide_short_help = true, value_enum, value_name = "WHEN",
        default_value_t = Colour::Auto
    )]
    pub color: Colour,
    /// Print each option's value and its source in the form of gemma.toml, and stop
    #[arg(long, hide_short_help = true)]
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
