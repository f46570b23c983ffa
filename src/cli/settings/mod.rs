//! Settings of a command line, by precedence: flag, preset, environment, gemma.toml, the model's
//! generation_config.json, built in.
//!
//! clap reads flags and environment. Values from `gemma.toml` are passed to clap like typed ones,
//! so that every source passes the same checks. A value is dropped if a source of higher precedence
//! sets the option, or one that excludes it ([`exclusive`]).

mod environment;
mod exclusive;
mod files;

use crate::cli::help;
use crate::cli::io::ui::{Ui, clean};
use crate::cli::options::{Origin, UiOptions};
use crate::error::{Fault, fault_of};
use anyhow::Result;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, FromArgMatches};
use files::{Gathered, SettingsFile};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::num::{ParseFloatError, ParseIntError};
use std::path::PathBuf;
use std::process::ExitCode;

/// Options by long name, each with the file that set it.
type Origins = BTreeMap<String, PathBuf>;

/// A validated command line, with the source of each value.
pub struct Typed {
    pub ui: Ui,
    pub print_config: bool,
    /// Definition of the command that was typed, without environment variables.
    command: clap::Command,
    matches: ArgMatches,
    /// Options that gemma.toml set.
    files: Origins,
}

/// Reason why no command runs: help, version, or wrong usage.
pub enum Early {
    Clap(clap::Error),
    Fault(anyhow::Error),
}

impl Early {
    /// Prints the message to standard output or standard error. Returns the exit code.
    pub fn print(self) -> ExitCode {
        match self {
            Early::Clap(error) if error.use_stderr() || std::io::stdout().is_terminal() => {
                let plain = error.render().to_string();
                // The message quotes the command line, which may contain escape codes.
                if clean(&plain) != plain {
                    eprint!("{}", clean(&plain));
                } else {
                    // An error of a closed terminal cannot be reported.
                    let _ = error.print();
                }
                ExitCode::from(error.exit_code() as u8)
            }
            // Help is output like any other: a failure to write it is an error.
            Early::Clap(help) => match crate::cli::io::output::print(&help.render().to_string()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => Early::Fault(error).print(),
            },
            Early::Fault(error) => {
                Ui::plain().error(&error);
                ExitCode::from(fault_of(&error).map_or(1, |fault| fault.kind.exit_code()))
            }
        }
    }
}

/// Returns the definition of the command line with an environment variable for each option.
pub fn definition(root: &clap::Command) -> clap::Command {
    definition_with(root, environment::set)
}

/// Returns the definition.
///
/// `variable` returns the environment variable of an option, if one sets it.
fn definition_with(
    root: &clap::Command,
    variable: impl Fn(&Arg) -> Option<String>,
) -> clap::Command {
    let with_env = |arg: Arg| match arg.get_long() {
        Some(long) if long != "help" && long != "version" => {
            let Some(name) = variable(&arg) else { return arg };
            let arg = arg.env(name).hide_env(true);
            match arg.get_action() {
                ArgAction::SetTrue => arg.value_parser(clap::builder::FalseyValueParser::new()),
                _ => arg,
            }
        }
        _ => arg,
    };
    let commands: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let root = help::complete(root.clone()).color(help_colour());
    commands
        .iter()
        .fold(root, |root, name| root.mut_subcommand(name, |command| command.mut_args(&with_env)))
}

/// clap obeys CLICOLOR_FORCE, but escape codes must never go to anything but a terminal.
fn help_colour() -> clap::ColorChoice {
    let terminals = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if terminals { clap::ColorChoice::Auto } else { clap::ColorChoice::Never }
}

/// Puts arguments after the name of the command.
fn with_arguments(argv: &[OsString], command: &str, given: Vec<OsString>) -> Vec<OsString> {
    let at = argv.iter().position(|a| a.to_str() == Some(command)).map_or(1, |i| i + 1);
    let mut longer = argv.to_vec();
    longer.splice(at..at, given);
    longer
}

/// Adds the options of the preset that the command line or the environment names.
///
/// Typed options win. Returns the new command line, and the file of each added option.
fn with_preset(
    cli: &clap::Command,
    argv: &[OsString],
    files: &[SettingsFile],
    options: &BTreeMap<String, files::Options>,
) -> Result<(Vec<OsString>, Origins)> {
    let unchanged = || Ok((argv.to_vec(), BTreeMap::new()));
    let plain = definition_with(cli, |_| None);
    let matches = plain.clone().ignore_errors(true).try_get_matches_from(argv);
    let Some((name, typed)) = matches.as_ref().ok().and_then(ArgMatches::subcommand) else {
        return unchanged();
    };
    let command = plain.find_subcommand(name).expect("the command that was typed");
    let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some("preset")) else {
        return unchanged();
    };
    let from_environment = || environment::set(arg).and_then(|name| std::env::var(name).ok());
    let Some(preset) = typed.get_one::<String>("preset").cloned().or_else(from_environment) else {
        return unchanged();
    };
    let mut gathered = Gathered::new(command, typed);
    gathered.add_preset(&preset, files, options)?;
    let longer = with_arguments(argv, name, gathered.given);
    // A wrong value in the preset is not reported as a mistake of the command line.
    if let (Ok(_), Err(error)) =
        (plain.clone().try_get_matches_from(argv), plain.clone().try_get_matches_from(&longer))
    {
        return Err(wrong_value(&error, &gathered.origins).into());
    }
    Ok((longer, gathered.origins))
}

/// Returns the error of a wrong value in a file.
fn wrong_value(error: &clap::Error, origins: &Origins) -> Fault {
    let origins: BTreeSet<_> = origins.values().map(|p| p.display().to_string()).collect();
    let what = head(error).lines().next().unwrap_or_default().to_owned();
    let origins = origins.into_iter().collect::<Vec<_>>().join(" or ");
    Fault::usage(format!("{what} (set in {origins})"))
        .help("correct the file, or give the option as a flag")
}

/// Reads the command line that `cli` defines, the environment and the configuration files.
pub fn parse(cli: &clap::Command, argv: &[OsString]) -> Result<(ArgMatches, Typed), Early> {
    let commands = help::complete(cli.clone());
    let options = commands
        .get_subcommands()
        .map(|c| (c.get_name().to_owned(), files::options_of(c)))
        .collect();
    let files = files::read();
    // Help and mistakes of the command line are reported before mistakes in a file.
    let read = files.as_ref().map_or(&[][..], |files| files);
    let (argv, mut origins) = with_preset(cli, argv, read, &options).map_err(Early::Fault)?;
    let argv = &argv[..];
    let excluded = exclusive::excluded_by_flags(definition_with(cli, |_| None), argv);
    let root = definition_with(cli, |arg| {
        let is_used = !excluded.contains(arg.get_id().as_str()) && !environment::is_off(arg);
        environment::set(arg).filter(|_| is_used)
    });
    let matches = root.clone().try_get_matches_from(argv).map_err(|error| {
        if error.kind() == ErrorKind::DisplayHelp && argv.iter().any(|word| word == "--help") {
            let compact = help::compact(root.clone()).try_get_matches_from(argv);
            return Early::Clap(compact.err().unwrap_or(error));
        }
        name_variable(cli, error, argv)
    })?;
    let files = files.map_err(Early::Fault)?;
    let (name, typed) = matches.subcommand().expect("a subcommand is required");
    let command = root.find_subcommand(name).expect("the command that was typed");
    let off = command.get_arguments().filter(|arg| environment::is_off(arg));
    let off: Vec<&str> = off.map(|arg| arg.get_id().as_str()).collect();
    let mut gathered = Gathered::new(command, typed);
    gathered.add_files(&off, &files, &options).map_err(Early::Fault)?;
    let Gathered { given, origins: of_files, .. } = gathered;
    let matches = if given.is_empty() {
        matches
    } else {
        let longer = with_arguments(argv, name, given);
        root.try_get_matches_from(&longer)
            .map_err(|error| Early::Fault(wrong_value(&error, &of_files).into()))?
    };
    origins.extend(of_files);
    let (name, sub) = matches.subcommand().expect("a subcommand is required");
    let plain = definition_with(cli, |_| None);
    let command = plain.find_subcommand(name).expect("the command that was typed").clone();
    // A command without these options has the default settings for messages.
    let terminal = sub.ids().any(|id| id == "quiet").then(|| UiOptions::from_arg_matches(sub));
    let (ui, print_config) = match terminal.transpose().map_err(Early::Clap)? {
        Some(options) => (Ui::new(&options), options.print_config),
        None => (Ui::plain(), false),
    };
    environment::unknown(&options).iter().for_each(|what| ui.note(what));
    let typed = Typed { ui, print_config, command, matches: sub.clone(), files: origins };
    Ok((matches, typed))
}

/// Returns the message of an error without its usage lines.
///
/// They would name options that the environment set.
fn head(error: &clap::Error) -> String {
    plain_number(error).unwrap_or_else(|| message(error))
}

fn message(error: &clap::Error) -> String {
    let text = error.to_string();
    text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// Returns a plainer message for an error about a number. clap quotes Rust's parsers.
pub fn plain_number(error: &clap::Error) -> Option<String> {
    let source = error.source()?;
    let why = source.to_string();
    let expected = if source.is::<ParseIntError>() {
        "expected a whole number".to_owned()
    } else if source.is::<ParseFloatError>() {
        "expected a number".to_owned()
    } else {
        let (least, most) = why.split_once(" is not in ")?.1.split_once("..=")?;
        format!("expected a whole number from {least} to {most}")
    };
    Some(message(error).replace(&why, &expected))
}

/// Names the variable in an error that comes from the environment, because the user did not type
/// the option that clap complains about.
fn name_variable(cli: &clap::Command, error: clap::Error, argv: &[OsString]) -> Early {
    let what = head(&error);
    let root = definition_with(cli, |_| None);
    let without = root.clone().try_get_matches_from(argv);
    if !error.use_stderr() || without.is_err_and(|other| head(&other) == what) {
        return Early::Clap(error);
    }
    let words = what.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    let named: BTreeSet<&str> = words.filter_map(|word| word.strip_prefix("--")).collect();
    let of_option = |arg: &Arg| {
        arg.get_long().filter(|long| named.contains(long)).and_then(|_| environment::set(arg))
    };
    let variables: BTreeSet<String> =
        root.get_subcommands().flat_map(|c| c.get_arguments()).filter_map(of_option).collect();
    if variables.is_empty() {
        return Early::Clap(error);
    }
    let variables = variables.into_iter().collect::<Vec<_>>().join(" and ");
    let fault = Fault::usage(format!("{what} (from the environment: {variables})"));
    Early::Fault(
        fault
            .help(format!("correct it, or leave it out: unset {}", variables.replace(" and ", " ")))
            .into(),
    )
}

impl Typed {
    /// Returns the source of an option's value. `long` is its long name.
    pub fn source(&self, long: &str) -> Origin {
        if let Some(path) = self.files.get(long) {
            return Origin::File(path.clone());
        }
        match self.matches.value_source(&long.replace('-', "_")) {
            Some(ValueSource::CommandLine) => Origin::Flag,
            Some(ValueSource::EnvVariable) => {
                let arg = self.command.get_arguments().find(|arg| arg.get_long() == Some(long));
                Origin::Environment(
                    arg.and_then(environment::set).unwrap_or_else(|| environment::name(long)),
                )
            }
            _ => Origin::BuiltIn,
        }
    }

    /// Returns every option of the command as gemma.toml, with its source.
    ///
    /// `resolved` has the values that come from elsewhere.
    pub fn config(&self, resolved: &[(&str, String, Origin)]) -> String {
        let mut lines = Vec::new();
        for arg in self.command.get_arguments() {
            let Some(long) =
                arg.get_long().filter(|l| !matches!(*l, "help" | "version" | "print-config"))
            else {
                continue;
            };
            // Hidden options are shown only if they are set.
            if arg.is_hide_set() && self.source(long) == Origin::BuiltIn {
                continue;
            }
            // A key must not be visible on the screen or in a report.
            if arg.is_hide_env_values_set() && self.source(long) != Origin::BuiltIn {
                lines.push((format!("# {long} is set, and not shown"), self.source(long)));
                continue;
            }
            let found = resolved.iter().find(|(name, ..)| *name == long);
            let (value, source) = match found {
                Some((_, value, source)) => (Some(quoted(value)), source.clone()),
                None => (self.value(arg), self.source(long)),
            };
            // Values that gemma.toml may not contain, values of the model, and unset ones become
            // comments.
            let is_models = found.is_some() && matches!(source, Origin::Model | Origin::BuiltIn);
            let is_kept_out =
                is_models || files::ONE_RUN.contains(&long) || files::refusal(arg).is_some();
            lines.push(match value {
                Some(value) if is_kept_out => (format!("# {long} = {value}"), source),
                Some(value) => (format!("{long} = {value}"), source),
                None => (format!("# {long} is not set"), Origin::BuiltIn),
            });
        }
        let width = lines
            .iter()
            .map(|(text, _)| text.chars().count())
            .filter(|w| *w <= 40)
            .max()
            .unwrap_or(0);
        lines.iter().map(|(text, source)| format!("{text:width$}  # {source}\n")).collect()
    }

    /// Returns the value of an option as TOML.
    fn value(&self, arg: &Arg) -> Option<String> {
        let id = arg.get_id().as_str();
        match arg.get_action() {
            ArgAction::SetTrue => Some(self.matches.get_flag(id).to_string()),
            ArgAction::Count => Some(self.matches.get_count(id).to_string()),
            action => {
                let values: Vec<String> =
                    self.matches.get_raw(id)?.map(|v| quoted(&v.to_string_lossy())).collect();
                if matches!(action, ArgAction::Append) {
                    Some(format!("[{}]", values.join(", ")))
                } else {
                    values.first().cloned()
                }
            }
        }
    }
}

/// Formats a value: numbers and booleans unquoted, everything else as a TOML string.
fn quoted(value: &str) -> String {
    match value.parse::<toml::Value>() {
        Ok(toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_)) => {
            value.to_owned()
        }
        _ => toml::Value::String(value.to_owned()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_only_where_needed() {
        assert_eq!(quoted("4"), "4");
        assert_eq!(quoted("0.5"), "0.5");
        assert_eq!(quoted("a \"b\""), toml::Value::String("a \"b\"".into()).to_string());
        assert_eq!(environment::name("max-tokens"), "GEMMA_MAX_TOKENS");
    }
}
