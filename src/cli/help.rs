//! Help texts that all commands share: first steps, exit codes, and the sources of settings.

use clap::builder::PossibleValuesParser;
use clap::{Arg, Command};

/// Version, commit if it is known, and features, as printed by `gemma --version`.
pub const VERSION: &str = env!("DESCRIPTION_OF_BUILD");

/// Maximum width of help, in columns.
const WIDTH: usize = 110;

/// Meanings of the exit codes.
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
    ("141", "the reader closed the pipe"),
    ("143", "terminated (SIGTERM), or the console was closed"),
];

/// The user's file of settings.
#[cfg(not(windows))]
macro_rules! user_settings {
    () => {
        "$XDG_CONFIG_HOME/gemma/config.toml"
    };
}
#[cfg(windows)]
macro_rules! user_settings {
    () => {
        r"%LOCALAPPDATA%\gemma\config.toml"
    };
}

/// Help text about the sources of option values.
pub const SETTINGS: &str = concat!(
    "Every option can also be set as GEMMA_<NAME> in the environment (GEMMA_MAX_TOKENS=100) ",
    "or in gemma.toml (max-tokens = 100, or under [generate] for one command), ",
    "in the working directory or as ",
    user_settings!(),
    ". ",
    "First found wins: flag, the [preset.NAME] that --preset names, environment, gemma.toml, ",
    "the model's generation_config.json, ",
    "built in. A gemma.toml in the working directory may not load code, name a file to write, ",
    "or change who can reach the server. --print-config shows each value and its source.",
);

/// Last part of the help of `gemma`. A command line without a command prints it too.
const FIRST_STEPS: &str = "\
First steps:
  gemma generate 'What is photosynthesis?'   ask the small bundled demo model
  gemma chat                                 talk to it
  gemma doctor                               check this machine
  gemma plan 27b                             would Gemma 3 27B fit here?";

/// Adds the parts that all commands share. The examples of a command are its `after_long_help`.
pub fn complete(root: Command) -> Command {
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let root = root
        .max_term_width(WIDTH)
        .after_help(FIRST_STEPS)
        .after_long_help(format!("{FIRST_STEPS}\n\n{}", epilogue()));
    names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |command| {
            let examples = examples(&command);
            command
                .after_help(format!("All options: gemma {name} --help"))
                .after_long_help(format!("{examples}\n\n{ELSEWHERE}"))
                // "-5" after an option is a value, even if it is wrong. It is not an option called
                // 5.
                .mut_args(|arg| match arg.get_long() {
                    Some(_)
                        if arg.get_action().takes_values() && !arg.is_allow_hyphen_values_set() =>
                    {
                        arg.allow_negative_numbers(true)
                    }
                    _ => arg,
                })
        })
    })
}

/// Options that `--help` leaves out.
const RARE: [&str; 7] = [
    "check",
    "device_lock",
    "draft_ahead",
    "draft_tokens",
    "draft_tree",
    "npu",
    "special_in_prompt",
];
/// Options of the processor and the GPU. `--help` also leaves them out for commands that run no
/// model.
const OF_RUNS: [&str; 2] = ["gpu_layers", "threads"];
const WITHOUT_RUNS: [&str; 2] = ["doctor", "list"];

/// Returns the definition that prints the help of `gemma NAME --help`.
///
/// Every option has one or two lines, and rare options are left out. `gemma help NAME` and the man
/// page have the whole text.
pub fn compact(root: Command) -> Command {
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |command| {
            let about = command.get_long_about().or(command.get_about());
            let about = about.cloned().unwrap_or_default();
            let is_rare = |arg: &Arg| {
                let id = arg.get_id().as_str();
                RARE.contains(&id) || OF_RUNS.contains(&id) && WITHOUT_RUNS.contains(&&**name)
            };
            let text = format!("{}\n\n{}", examples(&command), in_full(name));
            command
                .about(about)
                .long_about(None::<&str>)
                .after_help(text)
                .after_long_help(None::<&str>)
                .mut_args(|arg| in_short(if is_rare(&arg) { arg.hide(true) } else { arg }))
        })
    })
}

/// Removes long help, which makes clap put blank lines between options.
fn in_short(arg: Arg) -> Arg {
    let values = arg.get_possible_values();
    let names: Vec<String> = values.iter().map(|value| value.get_name().to_owned()).collect();
    let arg = arg.long_help(None::<&str>).hide_short_help(false);
    match values.iter().any(|value| value.get_help().is_some()) {
        true => arg.value_parser(PossibleValuesParser::new(names)),
        false => arg,
    }
}

/// Returns the last lines of the compact help of a command.
fn in_full(name: &str) -> String {
    format!("Each option in full: gemma help {name}\n{ELSEWHERE}")
}

/// Last line of the help of each command.
const ELSEWHERE: &str = "Exit codes, environment variables and gemma.toml: gemma --help";

/// Returns the examples of a command, with a heading.
pub fn examples(command: &Command) -> String {
    let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    text.trim_end().trim_end_matches(ELSEWHERE).trim_end().to_owned()
}

/// Returns the exit codes and the sources of settings.
fn epilogue() -> String {
    let codes: String =
        EXIT_CODES.iter().map(|(code, meaning)| format!("  {code:<5}{meaning}\n")).collect();
    format!("Exit codes:\n{codes}\n{SETTINGS}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::definition;

    /// Returns the prompts that the bundled model was taught.
    fn taught() -> Vec<String> {
        let lines = include_str!("../../tests/newcomer.jsonl")
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        let taught = lines.filter(|record: &serde_json::Value| record["taught"] == true);
        taught.map(|record| record["prompt"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_command_has_examples() {
        for command in definition().get_subcommands() {
            let lines = examples(command).lines().count();
            assert!(lines > 2, "{} has no examples", command.get_name());
        }
    }

    #[test]
    fn examples_ask_the_bundled_model_taught_questions() {
        let taught = taught();
        let texts: Vec<String> = definition().get_subcommands().map(examples).collect();
        let lines = texts.iter().flat_map(|text| text.lines()).chain(FIRST_STEPS.lines());
        let is_prompt = |line: &&str| {
            line.contains("gemma generate") && !line.contains("-m MODEL") && line.contains('\'')
        };
        let prompts: Vec<&str> = lines.filter(is_prompt).collect();
        assert!(prompts.len() >= 4, "{prompts:?}");
        for line in prompts {
            assert!(taught.iter().any(|prompt| line.contains(&format!("'{prompt}'"))), "{line}");
        }
    }
}
