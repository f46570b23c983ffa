//! `gemma.toml`: the files that are read, and the options that each of them may set.
//!
//! A file in the working directory may not load code, write a file, open the server to others or
//! disable a safeguard. A person who clones a repository and runs `gemma` in it has not read the
//! `gemma.toml` that it contains. [`refusal`] decides by the type of an option's value and by its
//! heading in the help, so that new options are refused without being listed.

use super::exclusive;
use crate::cli::io::destination::Destination;
use crate::cli::io::ui::nearest;
use crate::error::Fault;
use crate::runtime::devices::lock::DeviceLock;
use crate::util::files::open_regular;
use crate::util::xdg;
use anyhow::{Context, Result};
use clap::{Arg, ArgAction, ArgMatches};
use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use toml::de::DeTable;

/// Limit of a file in bytes.
const LONGEST: u64 = 1 << 20;

/// Options that are about a single run: its input, and whether it stops or starts again. No file
/// may set them.
pub const ONE_RUN: [&str; 12] = [
    "print-config",
    "restart",
    "allow-requantize",
    "batch",
    "resume",
    "shard",
    "preset",
    "continue",
    "history",
    "list",
    "export",
    "delete",
];

/// A file of settings.
pub struct SettingsFile {
    path: PathBuf,
    text: String,
    table: toml::Table,
    /// Whether this is the user's own file, rather than one in the working directory.
    is_users_own: bool,
}

/// Options by each of their names, without leading dashes.
pub type Options = BTreeMap<String, Arg>;

/// The options of a command.
pub fn options_of(command: &clap::Command) -> Options {
    let mut options = Options::new();
    for arg in command.get_arguments() {
        let names = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
        options.extend(names.map(|name| (name.to_owned(), arg.clone())));
    }
    options
}

/// The table of presets, [preset.NAME].
const PRESETS: &str = "preset";

/// Heading of the options about kept conversations.
const TALKS: &str = "Talks";

/// Heading of the options that decide who can reach the server and what protects it.
const EDGE: &str = "Server";

/// Returns the reason why a file in the working directory may not set this option; `None` if it
/// may.
pub fn refusal(arg: &Arg) -> Option<&'static str> {
    let kind = arg.get_value_parser().type_id();
    if arg.get_help_heading() == Some(EDGE) {
        return Some("would decide here who reaches the server, or what guards it");
    }
    if arg.get_help_heading() == Some(TALKS) {
        return Some("would decide here whether your conversations are kept");
    }
    if kind == TypeId::of::<DeviceLock>() {
        return Some("would decide here whether a run keeps off a device in use");
    }
    (kind == TypeId::of::<Destination>()).then_some("would write a file here")
}

/// Returns the path of the user's own file.
fn users_own() -> Option<PathBuf> {
    xdg::config().map(|config| config.join("config.toml"))
}

/// Reads the files that exist, in order of precedence.
pub fn read() -> Result<Vec<SettingsFile>> {
    let paths = [(Some(PathBuf::from("gemma.toml")), false), (users_own(), true)];
    let mut files = Vec::new();
    for (path, is_users_own) in paths.into_iter().filter_map(|(path, own)| Some((path?, own))) {
        if let Some(text) = read_text(&path)? {
            let table = text.parse::<toml::Table>().map_err(|error| {
                let line = error.span().map_or(1, |span| line_at(&text, span.start));
                Fault::usage(format!("{}, line {line}: {}", path.display(), error.message()))
            })?;
            files.push(SettingsFile { path, text, table, is_users_own });
        }
    }
    Ok(files)
}

/// Reads a file; `None` if it does not exist, or if this user may not see whether it does.
fn read_text(path: &Path) -> Result<Option<String>> {
    let shown = path.display();
    let what = || Fault::usage(format!("cannot read {shown}"));
    let absent = [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];
    let mut text = String::new();
    let file = match open_regular(path) {
        // It is an error if the file exists but is not readable.
        Err(error) if absent.contains(&error.kind()) && !path.exists() => return Ok(None),
        file => file.with_context(what)?,
    };
    file.take(LONGEST + 1).read_to_string(&mut text).with_context(what)?;
    if text.len() as u64 > LONGEST {
        return Err(Fault::usage(format!("{shown} is longer than {} MiB", LONGEST >> 20)).into());
    }
    Ok(Some(text))
}

fn line_at(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

impl SettingsFile {
    fn shown(&self) -> impl std::fmt::Display + '_ {
        self.path.display()
    }

    /// Returns the file and line of a key, for messages.
    ///
    /// `sections` are the tables around the key, outermost first.
    fn place(&self, sections: &[&str], key: &str) -> String {
        let line = || {
            let whole = DeTable::parse(&self.text).ok()?;
            let mut table = whole.get_ref();
            for section in sections {
                let (_, value) = table.iter().find(|(name, _)| name.get_ref() == section)?;
                table = value.get_ref().as_table()?;
            }
            let (name, _) = table.iter().find(|(name, _)| name.get_ref() == key)?;
            Some(line_at(&self.text, name.span().start))
        };
        match line() {
            Some(line) => format!("{}, line {line}", self.path.display()),
            None => self.path.display().to_string(),
        }
    }

    /// Returns the presets: the sections of [`PRESETS`] by their names.
    fn presets(&self) -> impl Iterator<Item = (&str, &toml::Table)> {
        let presets = self.table.get(PRESETS).and_then(toml::Value::as_table);
        let tables = presets.into_iter().flatten();
        tables.filter_map(|(name, value)| Some((name.as_str(), value.as_table()?)))
    }

    /// Refuses keys that are not options of their section, or that this file may not set.
    ///
    /// `command` is the command that was typed.
    fn check_all(&self, command: &str, all: &BTreeMap<String, Options>) -> Result<()> {
        let mine = &all[command];
        let anyones =
            |key: &str| mine.get(key).or_else(|| all.values().find_map(|options| options.get(key)));
        let every: Vec<&str> = all.values().flat_map(|o| o.keys()).map(String::as_str).collect();
        for (key, value) in &self.table {
            let toml::Value::Table(section) = value else {
                self.check(&[], key, anyones(key), &every)?;
                continue;
            };
            if key == PRESETS {
                for (name, value) in section {
                    let what =
                        || format!("{}: `{name}` is not a section", self.place(&[key], name));
                    let help = || format!("a preset is a section [{PRESETS}.{name}] of options");
                    let preset = value.as_table();
                    let preset = preset.with_context(|| Fault::usage(what()).help(help()))?;
                    for option in preset.keys() {
                        self.check(&[key, name], option, anyones(option), &every)?;
                    }
                }
                continue;
            }
            let Some(options) = all.get(key) else {
                let fault =
                    Fault::usage(format!("{}: [{key}] is not a command", self.place(&[], key)));
                let meant = nearest(key, all.keys().map(String::as_str));
                return Err(match meant {
                    Some(meant) => fault.help(format!("did you mean [{meant}]?")).into(),
                    None => fault.into(),
                });
            };
            let own: Vec<&str> = options.keys().map(String::as_str).collect();
            for option in section.keys() {
                self.check(&[key], option, options.get(option), &own)?;
            }
        }
        Ok(())
    }

    /// Refuses an option that this file may not set.
    fn check(
        &self,
        sections: &[&str],
        key: &str,
        option: Option<&Arg>,
        all: &[&str],
    ) -> Result<()> {
        let place = || self.place(sections, key);
        let Some(option) = option else {
            let fault = Fault::usage(format!("{}: there is no option `{key}`", place()));
            let help = match nearest(&key.replace('_', "-"), all.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => {
                    "keys are the long options without dashes in front, such as max-tokens".into()
                }
            };
            return Err(fault.help(help).into());
        };
        if ONE_RUN.contains(&key) {
            let what =
                format!("{}: `{key}` can only be given as a flag or in the environment", place());
            return Err(Fault::usage(what).into());
        }
        if let Some(why) = refusal(option).filter(|_| !self.is_users_own) {
            let what = format!("{}: `{key}` {why}", place());
            let own = users_own()
                .map(|path| format!(", or set it in {}", path.display()))
                .unwrap_or_default();
            let flag = format!("give --{key} as a flag or in the environment{own}");
            let help = format!("a file in the working directory must not do that: {flag}");
            return Err(Fault::usage(what).help(help).into());
        }
        Ok(())
    }
}

/// Collects values from files as arguments, each with its file.
///
/// Values are checked against those of sources with higher precedence.
pub struct Gathered<'a> {
    command: &'a clap::Command,
    /// Ids of the options that a source with higher precedence sets.
    stronger: BTreeSet<String>,
    /// Ids among `stronger` of options that can exclude others.
    in_effect: BTreeSet<String>,
    pub given: Vec<OsString>,
    pub origins: BTreeMap<String, PathBuf>,
}

impl<'a> Gathered<'a> {
    /// Starts with the options in `typed`.
    pub fn new(command: &'a clap::Command, typed: &ArgMatches) -> Gathered<'a> {
        let (stronger, in_effect) = (exclusive::given(typed), exclusive::in_effect(typed));
        let (given, origins) = Default::default();
        Gathered { command, stronger, in_effect, given, origins }
    }

    /// Adds the values of a section, except those that a source with higher precedence sets or
    /// excludes.
    fn add(&mut self, file: &SettingsFile, section: &toml::Table, mine: &Options) -> Result<()> {
        let excluded = exclusive::excluded(self.command, &self.in_effect);
        let (mut more, mut more_in_effect) = (Vec::new(), Vec::new());
        let mut own: BTreeMap<&str, &str> = BTreeMap::new();
        for (key, value) in section.iter().filter(|(_, value)| !value.is_table()) {
            let Some(arg) = mine.get(key) else { continue };
            let (id, long) = (arg.get_id().as_str(), arg.get_long().expect("it has a name"));
            if let Some(other) = own.insert(id, key) {
                let what = format!("{}: `{other}` and `{key}` are one option", file.shown());
                return Err(Fault::usage(what).help("leave one of them out").into());
            }
            if self.stronger.contains(id) || excluded.contains(id) {
                continue;
            }
            let what = || format!("{}: `{key}` has a value of a wrong type", file.shown());
            let own = as_arguments(long, arg, value);
            let own = own.with_context(|| Fault::usage(what()))?;
            more.push(id.to_owned());
            if !own.is_empty() {
                more_in_effect.push(id.to_owned());
                self.given.extend(own);
            }
            self.origins.insert(long.to_owned(), file.path.clone());
        }
        self.stronger.extend(more);
        self.in_effect.extend(more_in_effect);
        Ok(())
    }

    /// Adds the values of a preset.
    pub fn add_preset(
        &mut self,
        name: &str,
        files: &[SettingsFile],
        all: &BTreeMap<String, Options>,
    ) -> Result<()> {
        let mut names = BTreeSet::new();
        for file in files {
            file.check_all(self.command.get_name(), all)?;
            for (preset, section) in file.presets() {
                names.insert(preset);
                if preset == name {
                    self.add(file, section, &all[self.command.get_name()])?;
                }
            }
        }
        if names.contains(name) {
            return Ok(());
        }
        let names: Vec<&str> = names.into_iter().collect();
        let help = match names.len() {
            0 => format!("there are none: a section [preset.{name}] in gemma.toml makes one"),
            _ => format!("presets: {}", names.join(", ")),
        };
        Err(Fault::usage(format!("there is no preset `{name}`")).help(help).into())
    }

    /// Adds the values of the files. `off` are the ids of switches that the environment turns off.
    pub fn add_files(
        &mut self,
        off: &[&str],
        files: &[SettingsFile],
        all: &BTreeMap<String, Options>,
    ) -> Result<()> {
        self.stronger.extend(off.iter().map(|id| (*id).to_owned()));
        let name = self.command.get_name();
        for file in files {
            file.check_all(name, all)?;
            // A command's own section takes precedence over the top of the same file.
            let own = file.table.get(name).and_then(toml::Value::as_table);
            for section in own.into_iter().chain([&file.table]) {
                self.add(file, section, &all[name])?;
            }
        }
        Ok(())
    }
}

/// Converts a key to arguments: `--key=value`, repeated for an array, or `--key` for a switch that
/// is on.
fn as_arguments(key: &str, arg: &Arg, value: &toml::Value) -> Option<Vec<OsString>> {
    let scalar = |v: &toml::Value| match v {
        toml::Value::String(s) => Some(s.clone()),
        toml::Value::Integer(n) => Some(n.to_string()),
        toml::Value::Float(x) => Some(x.to_string()),
        _ => None,
    };
    let one = |v: &toml::Value| scalar(v).map(|v| OsString::from(format!("--{key}={v}")));
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, toml::Value::Boolean(on)) => {
            Some(if *on { vec![format!("--{key}").into()] } else { Vec::new() })
        }
        (ArgAction::Count, toml::Value::Integer(n)) => {
            Some(vec![format!("--{key}").into(); (*n).clamp(0, 9) as usize])
        }
        (ArgAction::SetTrue | ArgAction::Count, _) => None,
        (ArgAction::Append, toml::Value::Array(values)) => values.iter().map(one).collect(),
        (_, value) => one(value).map(|v| vec![v]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::definition;

    /// Options that take a path or a text that is read only: it is not written, and not loaded as
    /// code. A new option must be added here, or its type must be [`Destination`].
    const READ: [&str; 32] = [
        "continue",
        "delete",
        "export",
        "preset",
        "calibrate",
        "compare",
        "device",
        "api-key",
        "api-key-file",
        "draft",
        "draft-device",
        "file",
        "grammar",
        "ids",
        "json-schema",
        "batch",
        "messages",
        "model",
        "prefill",
        "prompt",
        "prompts",
        "recipe",
        "reference",
        "regex",
        "stop",
        "system",
        "system-file",
        "tokenizer",
        "image",
        "mmproj",
        "models-dir",
        "chat-template",
    ];

    #[test]
    fn an_option_that_writes_has_the_type_that_says_so() {
        let root = definition();
        let mut writing = Vec::new();
        for arg in root.get_subcommands().flat_map(|c| c.get_arguments()) {
            let (Some(long), kind) = (arg.get_long(), arg.get_value_parser().type_id()) else {
                continue;
            };
            if kind == TypeId::of::<Destination>() {
                writing.push(long);
            } else if kind == TypeId::of::<PathBuf>() || kind == TypeId::of::<String>() {
                assert!(READ.contains(&long), "--{long} takes a path or a text: is it written?");
            }
        }
        for long in ["output", "stats-file", "resume"] {
            assert!(writing.contains(&long), "--{long}");
        }
    }

    #[test]
    fn options_that_write_are_refused() {
        let root = definition();
        let options = options_of(root.find_subcommand("generate").unwrap());
        for (name, writes) in
            [("npu", false), ("output", true), ("model", false), ("temperature", false)]
        {
            assert_eq!(refusal(&options[name]).is_some(), writes, "{name}");
        }
    }

    /// New options of the server's edge are refused without being listed.
    ///
    /// The others are listed, so that a change of their heading is noticed.
    #[test]
    fn what_guards_the_server_is_not_for_the_working_directory() {
        let root = definition();
        let options = options_of(root.find_subcommand("serve").unwrap());
        let mut allowed = Vec::new();
        for (name, arg) in &options {
            if refusal(arg).is_none() {
                allowed.push(name.as_str());
            }
        }
        for name in [
            "host",
            "port",
            "api-key",
            "api-key-file",
            "cors-origin",
            "max-body",
            "client-timeout",
            "grace",
            "log",
            "device-lock",
        ] {
            assert!(options.contains_key(name) && !allowed.contains(&name), "--{name}");
        }
        for name in ["parallel", "cache-ram", "max-queue", "max-tokens", "device", "model"] {
            assert!(allowed.contains(&name), "--{name}");
        }
    }

    #[test]
    fn keys_have_lines() {
        let text = "temp = 1\n\n[generate]\n# a comment\nmax-tokens = 4\n".to_owned();
        let table = text.parse().unwrap();
        let file = SettingsFile { path: "gemma.toml".into(), text, table, is_users_own: false };
        assert_eq!(file.place(&[], "temp"), "gemma.toml, line 1");
        assert_eq!(file.place(&["generate"], "max-tokens"), "gemma.toml, line 5");
    }
}
