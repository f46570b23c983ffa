//! What can be typed: the clap types shared by the commands, and the texts around them.
//!
//! Names and defaults are a contract with people's scripts; `settings.rs` adds the environment and `gemma.toml` to each option.

use clap::{Parser, Subcommand};

/// What the exit code says.
pub const EXIT_CODES: [(&str, &str); 12] = [
    ("0", "done"),
    ("1", "a failure at run time"),
    ("2", "wrong usage of the command line"),
    ("3", "a model, weight format, tokenizer or input file is missing or invalid"),
    ("4", "the device is absent or was lost"),
    ("5", "the model does not fit in memory"),
    ("6", "some records of a batch failed (with --strict)"),
    ("7", "the prompt exceeds the context"),
    ("8", "the text ended before its grammar was complete"),
    ("130", "interrupted (Ctrl-C)"),
    ("141", "the reader closed the pipe (SIGPIPE)"),
    ("143", "terminated (SIGTERM)"),
];

/// Where values come from.
pub const SETTINGS: &str = "\
Every option can also be set as GEMMA_<NAME> in the environment (GEMMA_MAX_TOKENS=100) or in gemma.toml (max-tokens = 100, or under \
[generate] for one command), in the working directory or as $XDG_CONFIG_HOME/gemma/config.toml. First found wins: flag, environment, \
gemma.toml, the model's generation_config.json, built in. Nothing in a gemma.toml of the working directory may load code or name a \
file to write. --print-config shows each value and where it came from.";

/// Run Gemma 3 models faster: a small draft model guesses several tokens, and the model checks all of them in one pass.
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

impl Command {
    /// As typed.
    pub fn name(&self) -> &'static str {
        match self {
            Command::Generate(_) => "generate",
            Command::Chat(_) => "chat",
            Command::Quantize(_) => "quantize",
            Command::Eval(_) => "eval",
            Command::Bench(_) => "bench",
            Command::Plan(_) => "plan",
            Command::List(_) => "list",
            Command::Inspect(_) => "inspect",
            Command::Tokenize(_) => "tokenize",
            Command::Devices(_) => "devices",
            Command::Doctor(_) => "doctor",
            Command::Schema => "schema",
            Command::Completions(_) => "completions",
            Command::Man(_) => "man",
        }
    }
}
