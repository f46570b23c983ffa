//! The table of commands, and the way from a command line to the command that it names.
//!
//! Names and defaults are a contract with people's scripts. `settings` adds the environment and
//! `gemma.toml` to each option.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod devices;
pub mod doctor;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod list;
pub mod man;
pub mod plan;
pub mod quantize;
pub mod schema;
pub mod serve;
pub mod tokenize;

use crate::cli::help::VERSION;
use crate::cli::io::output::print;
use crate::cli::settings::{self, Early, Typed};
use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

/// Makes an enum of the commands from modules that have a struct of options of the command's name
/// and `run(&options, &typed)`, which returns the exit code.
macro_rules! commands {
    ($($(#[$help:meta])+ $name:ident in $module:ident;)+) => {
        #[derive(Debug, Subcommand)]
        pub enum Command {
            $($(#[$help])+ $name(Box<$module::$name>),)+
        }

        impl Command {
            fn run_command(&self, typed: &Typed) -> Result<u8> {
                match self {
                    $(Command::$name(options) => $module::run(options, typed),)+
                }
            }
        }
    };
}

commands! {
    /// Generate text from a prompt
    Generate in generate;
    /// Talk to the model at a terminal
    Chat in chat;
    /// Answer clients over HTTP, as OpenAI's and Anthropic's servers do
    Serve in serve;
    /// Make a smaller model of one: 4 bits per weight or fewer
    Quantize in quantize;
    /// Measure a model's quality: perplexity, or distance from another
    Eval in eval;
    /// Measure a model's speed, with and without drafts
    Bench in bench;
    /// Show what memory a model would take here, and how fast it would be
    Plan in plan;
    /// Show the Gemma 3 models on this machine, and whether they fit
    List in list;
    /// Show what a model consists of: its shape, tensors and formats
    Inspect in inspect;
    /// Show the tokens of a text
    Tokenize in tokenize;
    /// Show the devices of this machine, and which one would be chosen
    Devices in devices;
    /// Check this machine, and say what to type about what is wrong
    Doctor in doctor;
    /// Print the JSON Schema of generate's JSON result
    Schema in schema;
    /// Print a shell completion script
    Completions in completions;
    /// Print a man page
    Man in man;
}

/// Run Gemma 3 models faster: a small draft model guesses several tokens, and the model checks all
/// of them in one pass.
#[derive(Debug, Parser)]
#[command(name = "gemma", version = VERSION, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Returns the whole command line's definition, each option with its environment variable.
pub fn definition() -> clap::Command {
    settings::definition(&Cli::command())
}

/// Reads the command line, the environment and the configuration files.
pub fn parse(argv: &[OsString]) -> Result<(Command, Typed), Early> {
    let (matches, typed) = settings::parse(&Cli::command(), argv)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Early::Clap)?;
    Ok((cli.command, typed))
}

/// Runs a command and returns the exit code.
pub fn run(command: &Command, typed: &Typed) -> Result<u8> {
    // `generate` adds the values of the model's generation_config.json.
    if typed.print_config && !matches!(command, Command::Generate(_)) {
        print(&typed.config(&[]))?;
        return Ok(0);
    }
    command.run_command(typed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }
}
