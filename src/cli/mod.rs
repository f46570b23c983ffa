//! Floor 6: the command line. What was typed becomes a validated setup; results go to standard output, everything else to
//! standard error.

pub mod args;
pub mod devices;
pub mod input;
pub mod manual;
pub mod output;
pub mod record;
pub mod settings;
pub mod signals;
pub mod ui;

use anyhow::Result;
use args::Command;
use settings::Typed;

/// Runs a command; the number is the exit code.
pub fn run(typed: &Typed) -> Result<u8> {
    if typed.print_config {
        output::print(&typed.config(&[]))?;
        return Ok(0);
    }
    match &typed.command {
        Command::Devices(options) => devices::run(options),
        Command::Schema => {
            output::print(record::SCHEMA)?;
            Ok(0)
        }
        Command::Completions(options) => manual::completions(options),
        Command::Man(options) => manual::man(options),
    }
}
