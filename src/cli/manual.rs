//! `gemma completions` and `gemma man`: made from the same definition that parses the command line.

use super::help;
use super::output::print;
use crate::cli::help::{EXIT_CODES, SETTINGS};
use crate::error::Fault;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, ValueHint};

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

/// Prints a completion script of the command line that `root` defines.
pub fn completions(options: &Completions, root: clap::Command) -> Result<u8> {
    let mut script = Vec::new();
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let mut root = names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |command| command.mut_args(with_values))
    });
    clap_complete::generate(options.shell, &mut root, "gemma", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(0)
}

/// What an option that takes a word or a path is completed with; shells offer files where none of
/// the words fits.
const VALUES: [(&str, &[&str]); 8] = [
    ("calibrate", &["builtin", "none"]),
    ("ctx_size", &["auto"]),
    ("device", &["auto", "cpu", "vulkan"]),
    ("draft", &["auto", "off", "ngram", "bundled"]),
    ("draft_device", &["auto", "cpu", "vulkan"]),
    ("draft_tree", &["auto", "chain"]),
    ("gpu_layers", &["auto", "all"]),
    ("recipe", &["seed", "int4", "9gb", "10gb", "12gb"]),
];

fn with_values(arg: Arg) -> Arg {
    match (VALUES.iter().find(|(id, _)| arg.get_id() == id), arg.get_id().as_str()) {
        (Some((_, values)), _) => arg.value_parser(PossibleValuesParser::new(*values)),
        (None, "model" | "reference" | "which" | "source") => arg.value_hint(ValueHint::AnyPath),
        _ => arg,
    }
}

/// Prints a page of the command line that `root` defines.
pub fn man(options: &Man, root: clap::Command) -> Result<u8> {
    let mut root = help::complete(root);
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

/// One man page: what clap knows, then examples, exit codes and sources of settings.
fn page(command: clap::Command) -> Result<String> {
    let examples = help::examples(command.get_name());
    let is_root = command.has_subcommands();
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

/// Text that troff prints as it is.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}
