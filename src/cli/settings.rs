//! From what was typed to settings: flag > environment > gemma.toml > the model's generation_config.json > built in.
//!
//! clap reads flags and environment. What both leave open is looked up in `gemma.toml` and handed to clap as if it had been
//! typed, so that every source passes the same checks.

use super::args::{Cli, Command, UiOptions};
use super::help;
use super::ui::Ui;
use crate::error::{Fault, fault_of};
use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Environment(String),
    File(PathBuf),
    /// The model's generation_config.json.
    Model,
    BuiltIn,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Flag => f.write_str("command line"),
            Source::Environment(name) => write!(f, "environment {name}"),
            Source::File(path) => write!(f, "{}", path.display()),
            Source::Model => f.write_str("the model's generation_config.json"),
            Source::BuiltIn => f.write_str("built in"),
        }
    }
}

/// A validated command line and its provenance.
pub struct Typed {
    pub command: Command,
    pub ui: Ui,
    pub print_config: bool,
    matches: ArgMatches,
    /// Options that gemma.toml gave.
    files: BTreeMap<String, PathBuf>,
}

/// Why there is nothing to run: help, version, or wrong usage.
pub enum Early {
    Clap(clap::Error),
    Fault(anyhow::Error),
}

impl Early {
    /// Prints it where it belongs and says how to exit.
    pub fn print(self) -> ExitCode {
        match self {
            Early::Clap(error) => {
                // Nowhere to report a failure to print.
                let _ = error.print();
                ExitCode::from(error.exit_code() as u8)
            }
            Early::Fault(error) => {
                Ui::plain().error(&error);
                ExitCode::from(fault_of(&error).map_or(1, |fault| fault.kind.exit_code()))
            }
        }
    }
}

/// The whole command line's definition, each option with its environment variable.
pub fn definition() -> clap::Command {
    let with_env = |arg: Arg| match arg.get_long().map(str::to_owned) {
        Some(long) if long != "help" && long != "version" => {
            let name = env_name(&long);
            // Like an unset one, an empty variable says nothing.
            if std::env::var_os(&name).is_none_or(|v| v.is_empty()) {
                return arg;
            }
            let arg = arg.env(name).hide_env(true);
            match arg.get_action() {
                ArgAction::SetTrue => arg.value_parser(clap::builder::FalseyValueParser::new()),
                _ => arg,
            }
        }
        _ => arg,
    };
    let commands: Vec<String> = Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let root = help::complete(Cli::command()).color(help_colour());
    commands.iter().fold(root, |root, name| root.mut_subcommand(name, |command| command.mut_args(with_env)))
}

/// `max-tokens` as `GEMMA_MAX_TOKENS`.
fn env_name(long: &str) -> String {
    format!("GEMMA_{}", long.replace('-', "_").to_uppercase())
}

/// clap honours CLICOLOR_FORCE, but no escape code may ever go to a non-terminal.
fn help_colour() -> clap::ColorChoice {
    use std::io::IsTerminal;
    let terminals = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if terminals { clap::ColorChoice::Auto } else { clap::ColorChoice::Never }
}

/// Reads the command line, the environment and the configuration files.
pub fn parse(argv: Vec<OsString>) -> Result<Typed, Early> {
    let matches = definition().try_get_matches_from(&argv).map_err(Early::Clap)?;
    let files = read_files(&config_paths()).map_err(Early::Fault)?;
    let (name, typed) = matches.subcommand().expect("a subcommand is required");
    let (given, origins) = from_files(name, typed, &files).map_err(Early::Fault)?;
    let matches = if given.is_empty() {
        matches
    } else {
        let at = argv.iter().position(|a| a.to_str() == Some(name)).map_or(1, |i| i + 1);
        let mut longer = argv.clone();
        longer.splice(at..at, given);
        definition().try_get_matches_from(&longer).map_err(|error| {
            let origins: BTreeSet<_> = origins.values().map(|p| p.display().to_string()).collect();
            let what = error.to_string();
            let what = what.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            let origins = origins.into_iter().collect::<Vec<_>>().join(" or ");
            Early::Fault(
                Fault::usage(format!("{what} (set in {origins})")).help("correct the file, or give the option as a flag").into(),
            )
        })?
    };
    let command = Cli::from_arg_matches(&matches).map_err(Early::Clap)?.command;
    let (_, sub) = matches.subcommand().expect("a subcommand is required");
    let (ui, print_config) = match UiOptions::from_arg_matches(sub) {
        // A command without these options says what it must in the default way.
        Ok(options) if sub.try_contains_id("quiet").is_ok() => (Ui::new(&options), options.print_config),
        _ => (Ui::plain(), false),
    };
    Ok(Typed { command, ui, print_config, matches: sub.clone(), files: origins })
}

/// The files that may hold settings, the strongest first.
fn config_paths() -> Vec<PathBuf> {
    let home = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = home("XDG_CONFIG_HOME").or_else(|| home("HOME").map(|home| home.join(".config")));
    let user = user.map(|dir| dir.join("gemma").join("config.toml"));
    [Some(PathBuf::from("gemma.toml")), user].into_iter().flatten().collect()
}

/// Reads the files that exist.
fn read_files(paths: &[PathBuf]) -> Result<Vec<(PathBuf, toml::Table)>> {
    let mut files = Vec::new();
    for path in paths {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => continue,
            Err(error) => return Err(error).context(Fault::usage(format!("cannot read {}", path.display()))),
        };
        let table = text.parse::<toml::Table>().map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            Fault::usage(format!("{}, line {line}: {}", path.display(), error.message()))
        })?;
        files.push((path.clone(), table));
    }
    Ok(files)
}

/// Options that name what to write or whether to stop: never from a file that merely lies in the working directory.
const FLAGS_ONLY: [&str; 10] =
    ["output", "report", "from", "stats-file", "print-config", "restart", "allow-requantize", "batch", "resume", "shard"];

/// What the files say about options that flags and environment left open: as arguments, and from which file.
fn from_files(
    command: &str,
    typed: &ArgMatches,
    files: &[(PathBuf, toml::Table)],
) -> Result<(Vec<OsString>, BTreeMap<String, PathBuf>)> {
    let root = definition();
    let options_of = |c: &clap::Command| -> BTreeMap<String, Arg> {
        c.get_arguments().filter_map(|a| a.get_long().map(|long| (long.to_owned(), a.clone()))).collect()
    };
    let all: BTreeMap<String, BTreeMap<String, Arg>> =
        root.get_subcommands().map(|c| (c.get_name().to_owned(), options_of(c))).collect();
    let mine = &all[command];
    let (mut given, mut origins) = (Vec::new(), BTreeMap::new());
    for (path, table) in files {
        // A command's own section is stronger than the top of the same file.
        let mut sections: Vec<(&str, &toml::Table)> = vec![("", table)];
        for (key, value) in table {
            if let toml::Value::Table(section) = value {
                let Some(options) = all.get(key) else {
                    return Err(Fault::usage(format!("{}: [{key}] is no command", path.display())).into());
                };
                for option in section.keys() {
                    check_known(path, option, options.contains_key(option))?;
                }
                if key == command {
                    sections.insert(0, (key, section));
                }
            } else {
                check_known(path, key, all.values().any(|options| options.contains_key(key)))?;
            }
        }
        for (_, section) in sections {
            for (key, value) in section {
                let Some(arg) = mine.get(key).filter(|_| !origins.contains_key(key)) else { continue };
                if value.is_table()
                    || matches!(typed.value_source(arg.get_id().as_str()), Some(s) if s != ValueSource::DefaultValue)
                {
                    continue;
                }
                if key == "draft-memory" && value.as_str().is_some_and(|place| place.contains('/')) {
                    let what = format!("{}: `{key}` can name a directory only as a flag or in the environment", path.display());
                    return Err(Fault::usage(what).into());
                }
                let arguments = as_arguments(key, arg, value)
                    .with_context(|| Fault::usage(format!("{}: `{key}` has a value of a wrong type", path.display())))?;
                given.extend(arguments);
                origins.insert(key.clone(), path.clone());
            }
        }
    }
    Ok((given, origins))
}

fn check_known(path: &Path, key: &str, known: bool) -> Result<()> {
    if FLAGS_ONLY.contains(&key) {
        return Err(Fault::usage(format!("{}: `{key}` can only be given as a flag or in the environment", path.display())).into());
    }
    if !known {
        let fault = Fault::usage(format!("{}: there is no option `{key}`", path.display()));
        return Err(fault.help("keys are the long options without dashes in front, such as max-tokens").into());
    }
    Ok(())
}

/// One key of a file as arguments: `--key=value`, repeated for an array; a bare `--key` for a switch that is on.
fn as_arguments(key: &str, arg: &Arg, value: &toml::Value) -> Option<Vec<OsString>> {
    let scalar = |v: &toml::Value| match v {
        toml::Value::String(s) => Some(s.clone()),
        toml::Value::Integer(n) => Some(n.to_string()),
        toml::Value::Float(x) => Some(x.to_string()),
        _ => None,
    };
    let one = |v: &toml::Value| scalar(v).map(|v| OsString::from(format!("--{key}={v}")));
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, toml::Value::Boolean(on)) => Some(if *on { vec![format!("--{key}").into()] } else { Vec::new() }),
        (ArgAction::Count, toml::Value::Integer(n)) => Some(vec![format!("--{key}").into(); (*n).clamp(0, 9) as usize]),
        (ArgAction::SetTrue | ArgAction::Count, _) => None,
        (ArgAction::Append, toml::Value::Array(values)) => values.iter().map(one).collect(),
        (_, value) => one(value).map(|v| vec![v]),
    }
}

impl Typed {
    /// Where the value of an option (its long name) came from.
    pub fn source(&self, long: &str) -> Source {
        if let Some(path) = self.files.get(long) {
            return Source::File(path.clone());
        }
        match self.matches.value_source(&long.replace('-', "_")) {
            Some(ValueSource::CommandLine) => Source::Flag,
            Some(ValueSource::EnvVariable) => Source::Environment(env_name(long)),
            _ => Source::BuiltIn,
        }
    }

    /// Every option of the command as gemma.toml, with its source; `resolved` names values found elsewhere.
    pub fn config(&self, resolved: &[(&str, String, Source)]) -> String {
        let root = definition();
        let name = root.get_subcommands().find(|c| self.is(c.get_name())).expect("the command that was typed");
        let mut lines = Vec::new();
        for arg in name.get_arguments() {
            let Some(long) = arg.get_long().filter(|l| !matches!(*l, "help" | "version" | "print-config")) else { continue };
            let found = resolved.iter().find(|(name, ..)| *name == long);
            let (value, source) = match found {
                Some((_, value, source)) => (Some(quoted(value)), source.clone()),
                None => (self.value(arg), self.source(long)),
            };
            // What gemma.toml may not hold, or nobody has set, is a comment.
            lines.push(match value {
                Some(value) if FLAGS_ONLY.contains(&long) => (format!("# {long} = {value}"), source),
                Some(value) => (format!("{long} = {value}"), source),
                None => (format!("# {long} is not set"), Source::BuiltIn),
            });
        }
        let width = lines.iter().map(|(text, _)| text.chars().count()).filter(|w| *w <= 40).max().unwrap_or(0);
        lines.iter().map(|(text, source)| format!("{text:width$}  # {source}\n")).collect()
    }

    fn is(&self, name: &str) -> bool {
        self.command.name() == name
    }

    /// The value of an option as TOML.
    fn value(&self, arg: &Arg) -> Option<String> {
        let id = arg.get_id().as_str();
        match arg.get_action() {
            ArgAction::SetTrue => Some(self.matches.get_flag(id).to_string()),
            ArgAction::Count => Some(self.matches.get_count(id).to_string()),
            action => {
                let values: Vec<String> = self.matches.get_raw(id)?.map(|v| quoted(&v.to_string_lossy())).collect();
                if matches!(action, ArgAction::Append) {
                    Some(format!("[{}]", values.join(", ")))
                } else {
                    values.first().cloned()
                }
            }
        }
    }
}

/// Numbers and booleans bare, everything else as a TOML string.
fn quoted(value: &str) -> String {
    match value.parse::<toml::Value>() {
        Ok(toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_)) => value.to_owned(),
        _ => toml::Value::String(value.to_owned()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn values_are_quoted_only_where_needed() {
        assert_eq!(quoted("4"), "4");
        assert_eq!(quoted("0.5"), "0.5");
        assert_eq!(quoted("a \"b\""), toml::Value::String("a \"b\"".into()).to_string());
        assert_eq!(env_name("max-tokens"), "GEMMA_MAX_TOKENS");
    }
}
