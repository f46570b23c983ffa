//! `gemma completions`: shell completion scripts, generated from the definition of the command
//! line.

use super::definition;
use crate::cli::io::output::print;
use crate::cli::settings::Typed;
use crate::runtime::model::installed::installed;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, ValueHint};
use clap_complete::Shell;

const EXAMPLES: &str = "\
To install:
  mkdir -p ~/.local/share/bash-completion/completions
  gemma completions bash >~/.local/share/bash-completion/completions/gemma

  mkdir -p ~/.zfunc            (and in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit)
  gemma completions zsh >~/.zfunc/_gemma

  gemma completions fish >~/.config/fish/completions/gemma.fish

  gemma completions powershell | Out-String | Invoke-Expression      (a line of $PROFILE)
A new shell then completes commands, options and their values, and in bash, zsh and fish the names
of models on this machine.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell to print a script for
    #[arg(value_enum, required_unless_present = "models")]
    pub shell: Option<Shell>,
    /// Print the names of the models on this machine, for the scripts
    #[arg(long, hide = true, conflicts_with = "shell")]
    pub models: bool,
}

/// Prints the script.
pub fn run(options: &CompletionsArgs, _: &Typed) -> Result<u8> {
    let Some(shell) = options.shell else {
        let names = installed().into_iter().filter(|name| !name.contains(char::is_whitespace));
        print(&names.map(|name| format!("{name}\n")).collect::<String>())?;
        return Ok(0);
    };
    let mut script = Vec::new();
    let root = definition();
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let mut root = names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |command| command.mut_args(|arg| with_values(arg, shell)))
    });
    clap_complete::generate(shell, &mut root, "gemma", &mut script);
    print(&with_models(String::from_utf8(script)?, shell))?;
    Ok(0)
}

/// Placeholder for the names of models in a generated script.
const MODELS: &str = "GEMMA-MODELS";

/// Replaces [`MODELS`] by a call of this program that prints the names.
fn with_models(script: String, shell: Shell) -> String {
    const CALL: &str = "$(gemma completions --models 2>/dev/null)";
    match shell {
        Shell::Bash => script.replace(MODELS, CALL),
        Shell::Zsh => {
            let names = format!("{{compadd -- ${{(f)\"{CALL}\"}}; _files}}");
            script.replace(&format!("({MODELS})"), &names)
        }
        Shell::Fish => {
            let names = format!("-F -a \"{}\"", &CALL[1..]);
            script.replace(&format!("-f -a \"{MODELS}\\t''\""), &names)
        }
        _ => script,
    }
}

/// Completions for options that take a word or a path. Shells offer files if no word matches.
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

fn with_values(arg: Arg, shell: Shell) -> Arg {
    match (VALUES.iter().find(|(id, _)| arg.get_id() == id), arg.get_id().as_str()) {
        (Some((_, values)), _) => arg.value_parser(PossibleValuesParser::new(*values)),
        (None, "model" | "reference" | "which" | "source") => match shell {
            Shell::Bash | Shell::Zsh | Shell::Fish => {
                arg.value_parser(PossibleValuesParser::new([MODELS]))
            }
            _ => arg.value_hint(ValueHint::AnyPath),
        },
        _ => arg,
    }
}
