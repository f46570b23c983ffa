//! What can be typed: the commands.
//!
//! Names and defaults are a contract with people's scripts; `settings.rs` adds the environment and
//! `gemma.toml` to each option.

use super::settings::{self, Early, Typed};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

/// Run Gemma 3 models faster: a small draft model guesses several tokens, and the model checks all
/// of them in one pass.
#[derive(Debug, Parser)]
#[command(name = "gemma", version = super::help::VERSION, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text from a prompt
    Generate(Box<super::generate::Generate>),
    /// Talk to the model at a terminal
    Chat(Box<super::chat::Chat>),
    /// Answer clients over HTTP, as OpenAI's and Anthropic's servers do
    Serve(Box<super::serve::Serve>),
    /// Make a smaller model of one: 4 bits per weight or fewer
    Quantize(super::quantize::Quantize),
    /// Measure a model's quality: perplexity, or distance from another
    Eval(super::eval::Eval),
    /// Measure a model's speed, with and without drafts
    Bench(Box<super::bench::Bench>),
    /// Show what memory a model would take here, and how fast it would be
    Plan(Box<super::plan::Plan>),
    /// Show the Gemma 3 models on this machine, and whether they fit
    List(Box<super::list::List>),
    /// Show what a model consists of: its shape, tensors and formats
    Inspect(super::inspect::Inspect),
    /// Show the tokens of a text
    Tokenize(super::tokenize::Tokenize),
    /// Show the devices of this machine, and which one would be chosen
    Devices(super::devices::Devices),
    /// Check this machine, and say what to type about what is wrong
    Doctor(Box<super::doctor::Doctor>),
    /// Print the JSON Schema of generate's JSON result
    Schema,
    /// Print a shell completion script
    Completions(super::manual::Completions),
    /// Print a man page
    Man(super::manual::Man),
}

/// The whole command line's definition, each option with its environment variable.
pub fn definition() -> clap::Command {
    settings::definition(&Cli::command())
}

/// Reads the command line, the environment and the configuration files.
pub fn parse(argv: &[OsString]) -> Result<(Command, Typed), Early> {
    let (matches, typed) = settings::parse(&Cli::command(), argv)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Early::Clap)?;
    Ok((cli.command, typed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }
}
