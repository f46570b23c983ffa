//! `gemma man`: man pages, generated from the definition of the command line.

use super::Cli;
use crate::cli::help::{self, EXIT_CODES, SETTINGS};
use crate::cli::io::output::print;
use crate::cli::settings::Typed;
use crate::error::Fault;
use anyhow::Result;
use clap::{Args, CommandFactory};

const EXAMPLES: &str = "\
Examples:
  gemma man | man -l -
  gemma man generate | man -l -
  mkdir -p ~/.local/share/man/man1 && gemma man generate >~/.local/share/man/man1/gemma-generate.1";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ManArgs {
    /// Print the page of this command instead
    pub command: Option<String>,
}

/// Prints the page.
pub fn run(options: &ManArgs, _: &Typed) -> Result<u8> {
    let mut root = help::complete(Cli::command());
    root.build();
    let command = match &options.command {
        None => root,
        Some(name) => match root.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let known: Vec<_> =
                    root.get_subcommands().map(|c| c.get_name()).filter(|n| *n != "help").collect();
                let fault = Fault::usage(format!("there is no command `{name}`"));
                return Err(fault
                    .help(format!("commands with a page are {}", known.join(", ")))
                    .into());
            }
        },
    };
    print(&page(command)?)?;
    Ok(0)
}

/// Renders a man page: clap's parts, then examples, exit codes and sources of values.
fn page(command: clap::Command) -> Result<String> {
    let is_root = command.has_subcommands();
    let examples = (!is_root).then(|| help::examples(&command));
    let man = clap_mangen::Man::new(command)
        .source(concat!("gemma ", env!("CARGO_PKG_VERSION")))
        .manual("gemma");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if is_root {
        man.render_subcommands_section(&mut page)?;
    }
    let mut page = String::from_utf8(page)?;
    if let Some(examples) = examples {
        let lines: Vec<String> =
            examples.lines().skip(1).map(|line| roff(line.trim_start())).collect();
        page += &format!(".SH EXAMPLES\n.nf\n{}\n.fi\n", lines.join("\n"));
    }
    page += ".SH EXIT STATUS\n";
    for (code, meaning) in EXIT_CODES {
        page += &format!(".TP\n{code}\n{}\n", roff(meaning));
    }
    page += &format!(".SH ENVIRONMENT AND FILES\n{}\n", roff(SETTINGS));
    Ok(page)
}

/// Escapes text for troff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}
