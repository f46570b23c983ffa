//! The command line. What was typed becomes a validated setup; results go to standard
//! output, everything else to standard error.

pub mod args;
pub mod bench;
pub mod chat;
pub mod child;
pub mod crash;
pub mod destination;
pub mod devices;
pub mod doctor;
pub mod eval;
pub mod format;
pub mod generate;
pub mod help;
pub mod hints;
pub mod input;
pub mod inspect;
pub mod list;
pub mod manual;
pub mod options;
pub mod output;
pub mod plan;
pub mod prompt;
pub mod quantize;
pub mod record;
pub mod serve;
pub mod settings;
pub mod signals;
pub mod sizes;
pub mod stats;
pub mod table;
pub mod text_file;
pub mod tokenize;
pub mod ui;

use anyhow::Result;
use args::{Cli, Command};
use clap::CommandFactory;
use settings::Typed;

/// Runs a command; the number is the exit code.
pub fn run(command: &Command, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    // `generate` knows more sources of values than the others.
    if typed.print_config && !matches!(command, Command::Generate(_)) {
        output::print(&typed.config(&[]))?;
        return Ok(0);
    }
    match command {
        Command::Generate(options) => generate::run(options, typed),
        Command::Chat(options) => chat::run(options, typed),
        Command::Serve(options) => serve::run(options, typed),
        Command::Quantize(options) => quantize::run(options, ui),
        Command::Eval(options) => eval::run(options, ui),
        Command::Bench(options) => bench::run(options, ui),
        Command::Plan(options) => plan::run(options, ui),
        Command::List(options) => list::run(options),
        Command::Inspect(options) => inspect::run(options, ui),
        Command::Tokenize(options) => tokenize::run(options, typed),
        Command::Devices(options) => devices::run(options),
        Command::Doctor(options) => doctor::run(options, ui),
        Command::Schema => {
            output::print(record::SCHEMA)?;
            Ok(0)
        }
        Command::Completions(options) => manual::completions(options, args::definition()),
        Command::Man(options) => manual::man(options, Cli::command()),
    }
}
