//! `gemma completions`: a script made from the definition that parses the command line.

use super::definition;
use crate::cli::io::output::print;
use crate::cli::settings::Typed;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, ValueHint};

const EXAMPLES: &str = "\
To install:
  mkdir -p ~/.local/share/bash-completion/completions
  gemma completions bash >~/.local/share/bash-completion/completions/gemma

  mkdir -p ~/.zfunc            (and in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit)
  gemma completions zsh >~/.zfunc/_gemma

  gemma completions fish >~/.config/fish/completions/gemma.fish

  gemma completions powershell | Out-String | Invoke-Expression      (a line of $PROFILE)
A new shell then completes commands, options and their values.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Prints the script.
pub fn run(options: &CompletionsArgs, _: &Typed) -> Result<u8> {
    let mut script = Vec::new();
    let root = definition();
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let mut root = names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |command| command.mut_args(with_values))
    });
    clap_complete::generate(options.shell, &mut root, "gemma", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(0)
}

/// Words that complete an option which takes a word or a path. Shells offer files where no word
/// matches.
const VALUES: [(&str, &[&str]); 8] = [
    ("calibrate", &["builtin", "none"]),
    ("ctx_size", &["auto"]),
    ("device", &["auto", "cpu", "vulkan"]),
    ("draft", &["auto", "off", "ngram", "bundled"]),
    ("draft_device", &["auto", "cpu", "vulkan"]),
    ("draft_tree", &["auto", "chain"]),
    ("gpu_layers", &["auto", "all"]),
    ("recipe", &["seed", "int4", "9gb", "10gb", "12gb", "26b-9gb"]),
];

fn with_values(arg: Arg) -> Arg {
    match (VALUES.iter().find(|(id, _)| arg.get_id() == id), arg.get_id().as_str()) {
        (Some((_, values)), _) => arg.value_parser(PossibleValuesParser::new(*values)),
        (None, "model" | "reference" | "which" | "source") => arg.value_hint(ValueHint::AnyPath),
        _ => arg,
    }
}
