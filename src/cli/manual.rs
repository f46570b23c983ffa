//! `gemma completions` and `gemma man`: made from the same definition that parses the command line.

use super::output::print;
use super::settings::definition;
use crate::error::Fault;
use anyhow::Result;
use clap::Args;

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// A command, for its own page
    pub command: Option<String>,
}

pub fn completions(options: &Completions) -> Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut definition(), "gemma", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(0)
}

pub fn man(options: &Man) -> Result<u8> {
    let mut root = definition();
    root.build();
    let command = match &options.command {
        None => root,
        Some(name) => match root.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let known: Vec<_> = root.get_subcommands().map(|c| c.get_name()).filter(|n| *n != "help").collect();
                let fault = Fault::usage(format!("there is no command `{name}`"));
                return Err(fault.help(format!("one of {}", known.join(", "))).into());
            }
        },
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    print(&String::from_utf8(page)?)?;
    Ok(0)
}
