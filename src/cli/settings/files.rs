//! `gemma.toml`: which files there are, and what each of them may say.
//!
//! The rule: a file in the working directory may not load code, write a file, open the server to
//! others or take a guard rail away. A person who clones a repository and runs `gemma` in it has
//! not read the `gemma.toml` that came along. [`refusal`] tells by the type of an option's value
//! and by its heading in the help, so that a new option is kept out by being declared.

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
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use toml::de::DeTable;

/// Bytes of the longest file that is read.
const LONGEST: u64 = 1 << 20;

/// Options that say what one run works on, and whether it stops or starts again. No file sets them.
pub const ONE_RUN: [&str; 6] =
    ["print-config", "restart", "allow-requantize", "batch", "resume", "shard"];

/// A file of settings.
pub struct SettingsFile {
    path: PathBuf,
    text: String,
    table: toml::Table,
    /// Whether the user put it where settings belong; the other one merely lies in the working
    /// directory.
    is_users_own: bool,
}

/// Options by each of their names, without dashes in front.
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

/// Heading of the options that say who reaches the server, and what guards it.
const EDGE: &str = "Server";

/// Why a file in the working directory must not give this option; `None` where it may.
pub fn refusal(arg: &Arg) -> Option<&'static str> {
    let kind = arg.get_value_parser().type_id();
    if arg.get_help_heading() == Some(EDGE) {
        return Some("would decide here who reaches the server, or what guards it");
    }
    if kind == TypeId::of::<DeviceLock>() {
        return Some("would decide here whether a run keeps off a device in use");
    }
    (kind == TypeId::of::<Destination>()).then_some("would write a file here")
}

/// The user's own file.
fn users_own() -> Option<PathBuf> {
    xdg::config().map(|config| config.join("config.toml"))
}

/// Reads the files that exist, the strongest first.
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

/// The text of a file; `None` where there is none, or where this user may not look whether there
/// is.
fn read_text(path: &Path) -> Result<Option<String>> {
    let shown = path.display();
    let what = || Fault::usage(format!("cannot read {shown}"));
    let absent = [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];
    let mut text = String::new();
    let file = match open_regular(path) {
        // A file that exists and may not be read is an error.
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

    /// The file and the line of a key, for messages.
    fn place(&self, section: &str, key: &str) -> String {
        let line = || {
            let whole = DeTable::parse(&self.text).ok()?;
            let mut table = whole.get_ref();
            if !section.is_empty() {
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

    /// Refuses an option that this file may not set.
    fn check(&self, section: &str, key: &str, option: Option<&Arg>, all: &[&str]) -> Result<()> {
        let place = || self.place(section, key);
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

/// Returns the files' values of options that no stronger source gives or excludes, as arguments,
/// and the file of each. `off` are the ids of switches that the environment turns off.
pub fn arguments(
    command: &clap::Command,
    typed: &ArgMatches,
    off: &[&str],
    files: &[SettingsFile],
    all: &BTreeMap<String, Options>,
) -> Result<(Vec<OsString>, BTreeMap<String, PathBuf>)> {
    let mine = &all[command.get_name()];
    let (mut stronger, mut in_effect) = (exclusive::given(typed), exclusive::in_effect(typed));
    stronger.extend(off.iter().map(|id| (*id).to_owned()));
    let names =
        |options: &'_ Options| options.keys().map(|name| name.to_owned()).collect::<Vec<String>>();
    let everyones: Vec<String> = all.values().flat_map(names).collect();
    let (mut given, mut origins) = (Vec::new(), BTreeMap::new());
    for file in files {
        // A command's own section is stronger than the top of the same file.
        let mut sections: Vec<&toml::Table> = vec![&file.table];
        for (key, value) in &file.table {
            if let toml::Value::Table(section) = value {
                let Some(options) = all.get(key) else {
                    let fault =
                        Fault::usage(format!("{}: [{key}] is not a command", file.place("", key)));
                    let meant = nearest(key, all.keys().map(String::as_str));
                    return Err(match meant {
                        Some(meant) => fault.help(format!("did you mean [{meant}]?")).into(),
                        None => fault.into(),
                    });
                };
                let own: Vec<&str> = options.keys().map(String::as_str).collect();
                for option in section.keys() {
                    file.check(key, option, options.get(option), &own)?;
                }
                if key == command.get_name() {
                    sections.insert(0, section);
                }
            } else {
                let option =
                    mine.get(key).or_else(|| all.values().find_map(|options| options.get(key)));
                let every: Vec<&str> = everyones.iter().map(String::as_str).collect();
                file.check("", key, option, &every)?;
            }
        }
        for section in sections {
            let excluded = exclusive::excluded(command, &in_effect);
            let (mut more, mut more_in_effect) = (Vec::new(), Vec::new());
            let mut own: BTreeMap<&str, &str> = BTreeMap::new();
            for (key, value) in section.iter().filter(|(_, value)| !value.is_table()) {
                let Some(arg) = mine.get(key) else { continue };
                let (id, long) = (arg.get_id().as_str(), arg.get_long().expect("it has a name"));
                if let Some(other) = own.insert(id, key) {
                    let what = format!("{}: `{other}` and `{key}` are one option", file.shown());
                    return Err(Fault::usage(what).help("leave one of them out").into());
                }
                if stronger.contains(id) || excluded.contains(id) {
                    continue;
                }
                let what = || format!("{}: `{key}` has a value of a wrong type", file.shown());
                let own = as_arguments(long, arg, value);
                let own = own.with_context(|| Fault::usage(what()))?;
                more.push(id.to_owned());
                if !own.is_empty() {
                    more_in_effect.push(id.to_owned());
                    given.extend(own);
                }
                origins.insert(long.to_owned(), file.path.clone());
            }
            stronger.extend(more);
            in_effect.extend(more_in_effect);
        }
    }
    Ok((given, origins))
}

/// One key of a file as arguments: `--key=value`, repeated for an array; a bare `--key` for a
/// switch that is on.
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

    /// Options that take a path or any text: what is read, never written, and not loaded as code.
    /// An option that is new to this list is either such a one or has to be a [`Destination`].
    const READ: [&str; 27] = [
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

    /// A new option of the server's edge is kept out without being named here; the others are
    /// listed, so that one that moves is noticed.
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
        assert_eq!(file.place("", "temp"), "gemma.toml, line 1");
        assert_eq!(file.place("generate", "max-tokens"), "gemma.toml, line 5");
    }
}
