//! The table of commands. Parses a command line and runs its command.
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
pub mod ps;
pub mod pull;
pub mod quantize;
pub mod schema;
pub mod serve;
pub mod stop;
pub mod tokenize;

use crate::cli::help::VERSION;
use crate::cli::io::output::print;
use crate::cli::settings::{self, Early, Typed};
use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

/// Makes the enum of commands. Each module has a struct of options and `run(&options, &typed)`,
/// which returns the exit code.
macro_rules! commands {
    ($($(#[$help:meta])+ $name:ident = $module:ident::$options:ident;)+) => {
        #[derive(Debug, Subcommand)]
        pub enum CliCommand {
            $($(#[$help])+ $name(Box<$module::$options>),)+
        }

        impl CliCommand {
            fn run_with(&self, typed: &Typed) -> Result<u8> {
                match self {
                    $(CliCommand::$name(options) => $module::run(options, typed),)+
                }
            }
        }
    };
}

commands! {
    /// Generate text from a prompt
    Generate = generate::GenerateArgs;
    /// Talk to the model at a terminal
    Chat = chat::ChatArgs;
    /// Answer clients over HTTP, as OpenAI's and Anthropic's servers do
    Serve = serve::ServeArgs;
    /// Show the models that a running server has loaded
    Ps = ps::PsArgs;
    /// Have a running server unload a model
    Stop = stop::StopArgs;
    /// Quantise a model: make a smaller copy with 4 bits per weight or fewer
    Quantize = quantize::QuantizeArgs;
    /// Measure a model's quality: perplexity, or distance from another
    Eval = eval::EvalArgs;
    /// Measure a model's speed, with and without drafts
    Bench = bench::BenchArgs;
    /// Show whether a model fits into memory here, and how fast it would be
    Plan = plan::PlanArgs;
    /// Download a model from Hugging Face
    Pull = pull::PullArgs;
    /// Show the Gemma 3 and 4 models on this machine, and whether they fit
    List = list::ListArgs;
    /// Show the shape, tensors and formats of a model
    Inspect = inspect::InspectArgs;
    /// Show the tokens of a text
    Tokenize = tokenize::TokenizeArgs;
    /// Show the devices of this machine, and which one would be chosen
    Devices = devices::DevicesArgs;
    /// Check this machine, and print commands that solve its problems
    Doctor = doctor::DoctorArgs;
    /// Print the JSON Schema of generate's JSON result
    Schema = schema::SchemaArgs;
    /// Print a shell completion script
    Completions = completions::CompletionsArgs;
    /// Print a man page
    Man = man::ManArgs;
}

/// Run Gemma 3 and 4 faster: a small draft model proposes several tokens, and the model verifies
/// all of them in one pass.
#[derive(Debug, Parser)]
#[command(
    name = "gemma", version = VERSION, subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: CliCommand,
}

/// Returns the definition of the command line, each option with its environment variable.
pub fn definition() -> clap::Command {
    settings::definition(&Cli::command())
}

/// Reads the command line, the environment and the configuration files.
pub fn parse(argv: &[OsString]) -> Result<(CliCommand, Typed), Early> {
    let (matches, typed) = settings::parse(&Cli::command(), argv)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Early::Clap)?;
    Ok((cli.command, typed))
}

/// Runs a command and returns the exit code.
pub fn run(command: &CliCommand, typed: &Typed) -> Result<u8> {
    // `generate` prints its settings later, with the values of the model's generation_config.json.
    if typed.print_config && !matches!(command, CliCommand::Generate(_)) {
        print(&typed.config(&[]))?;
        return Ok(0);
    }
    command.run_with(typed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }
}
