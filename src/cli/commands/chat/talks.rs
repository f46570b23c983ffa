//! Talks: conversations that are kept after the program ends.
//!
//! A conversation is kept only if the user asks for it, by `--keep-talks`, `--continue` or
//! `--history`. Its file has the messages in the form of `/save`, is replaced in one step, and is
//! readable by this user only. A change of the file by another program is never overwritten.

use super::options::TalkOptions;
use crate::cli::io::destination::Destination;
use crate::cli::io::output::print;
use crate::cli::io::prompt::read_messages;
use crate::cli::io::text_file::MAX_BYTES;
use crate::cli::io::ui::Ui;
use crate::error::Fault;
use crate::models::Message;
use crate::util::files::{read_regular_text, write_whole};
use crate::util::xdg;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A talk in the user's data directory.
struct Talk {
    id: String,
    path: PathBuf,
    changed: SystemTime,
}

/// The file that a conversation is kept in.
#[derive(Default)]
pub struct Keeper {
    /// The file; `None` until the first answer of a new talk.
    path: Option<PathBuf>,
    /// The text that this program last read from the file or wrote to it.
    last: Option<String>,
    /// The conversation that was last written, or that could not be written.
    done: Option<String>,
    /// Whether this is the user's `--history` file, which is not one of the talks.
    is_users: bool,
}

/// Returns the directory of the talks.
fn directory() -> Result<PathBuf> {
    let home = xdg::data().map(|data| data.join("talks"));
    let fault = || Fault::usage("there is no place for talks: HOME is not set");
    home.with_context(fault)
}

/// Explains how to keep talks.
pub fn how_to_keep() -> String {
    let file = xdg::config().map_or("config.toml".into(), |config| config.join("config.toml"));
    format!(
        "conversations are kept on this machine only if you ask for it: --keep-talks keeps one, \
         keep-talks = true under [chat] in {} keeps each, and --continue goes on with the last",
        file.display()
    )
}

/// Lists the talks, last changed first.
fn all() -> Result<Vec<Talk>> {
    let mut talks = Vec::new();
    for entry in std::fs::read_dir(directory()?).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(id) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"))
        else {
            continue;
        };
        let Ok(changed) = entry.metadata().and_then(|meta| meta.modified()) else { continue };
        talks.push(Talk { id: id.to_owned(), path, changed });
    }
    talks.sort_by(|a, b| (b.changed, &b.id).cmp(&(a.changed, &a.id)));
    Ok(talks)
}

/// Returns the talk with an id. An empty id is the last talk.
fn find(id: &str) -> Result<Talk> {
    let mut talks = all()?;
    if talks.is_empty() {
        return Err(Fault::usage("there is no talk").help(how_to_keep()).into());
    }
    let at = if id.is_empty() { Some(0) } else { talks.iter().position(|talk| talk.id == id) };
    let fault = || Fault::usage(format!("there is no talk {id:?}"));
    let at = at.with_context(|| fault().help("gemma chat --list shows the talks"))?;
    Ok(talks.swap_remove(at))
}

/// Lists, prints or deletes talks if the options ask for it. Returns `false` if they do not.
pub fn obey(options: &TalkOptions, ui: &Ui) -> Result<bool> {
    if options.list {
        list(options.json, ui)?;
    } else if let Some(id) = &options.export {
        let talk = find(id)?;
        print(&match options.json {
            true => read_regular_text(&talk.path, MAX_BYTES as u64)?,
            false => markdown(&read_messages(&talk.path)?),
        })?;
    } else if let Some(id) = &options.delete {
        // An empty id would name the last talk.
        ensure!(!id.is_empty(), Fault::usage("--delete needs the id of a talk"));
        let talk = find(id)?;
        std::fs::remove_file(&talk.path)
            .with_context(|| format!("cannot delete {}", talk.path.display()))?;
        ui.line(&format!("(deleted {})", talk.id));
    } else if options.json {
        return Err(Fault::usage("--json prints --list or --export, and neither is given").into());
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn list(as_json: bool, ui: &Ui) -> Result<()> {
    let (mut lines, mut items) = (String::new(), Vec::new());
    for Talk { id, path, .. } in all()? {
        let messages = match read_messages(&path) {
            Ok(messages) => messages,
            Err(error) => {
                ui.error(&error);
                continue;
            }
        };
        let mut asked = messages.iter().filter(|message| message.role == "user");
        let first = asked.next().map_or("", |message| &message.content);
        let count = asked.count() + !first.is_empty() as usize;
        let text = super::shortened(&first.split_whitespace().collect::<Vec<_>>().join(" "));
        lines += &format!("{id:<17} {count:>4}  {text}\n");
        items.push(json!({"id": id, "messages": count, "first": first, "file": path}));
    }
    if as_json {
        return print(&(json!({"talks": items}).to_string() + "\n"));
    }
    if items.is_empty() {
        ui.note(format!("there are no talks: {}", how_to_keep()));
    }
    print(&lines)
}

/// Formats a conversation as Markdown, without the bytes of its images.
pub fn markdown(messages: &[Message]) -> String {
    let section = |message: &Message| {
        let role = match &*message.role {
            "system" => "System",
            "user" => "User",
            _ => "Assistant",
        };
        let images = "(an image)\n\n".repeat(message.images.len());
        format!("## {role}\n\n{images}{}\n", message.content.trim())
    };
    messages.iter().map(section).collect::<Vec<_>>().join("\n")
}

impl Keeper {
    /// Opens the file that the options name, with its messages; `None` if nothing is to be kept.
    pub fn open(options: &TalkOptions) -> Result<(Option<Keeper>, Vec<Message>)> {
        let (path, is_users) = match (&options.history, &options.resume) {
            (Some(file), _) if !file.path().exists() => {
                // Reports now whether the file can be written.
                file.open()?;
                let path = Some(file.path().to_owned());
                let new = Keeper { path, is_users: true, ..Keeper::default() };
                return Ok((Some(new), Vec::new()));
            }
            (Some(file), _) => (file.path().to_owned(), true),
            (None, Some(id)) => (find(id)?.path, false),
            (None, None) => {
                let new = options.keep_talks.then(Keeper::default);
                return Ok((new, Vec::new()));
            }
        };
        let text = read_regular_text(&path, MAX_BYTES as u64)
            .with_context(|| Fault::model(format!("cannot read {}", path.display())))?;
        // Other fields of an object would be lost.
        ensure!(
            !text.trim_start().starts_with('{'),
            Fault::model(format!("{} is not a list of messages", path.display()))
                .help("/load in a chat reads it, and does not write it")
        );
        let is_empty = matches!(text.trim(), "" | "[]");
        let messages = if is_empty { Vec::new() } else { read_messages(&path)? };
        let (path, last) = (Some(path), Some(text));
        Ok((Some(Keeper { path, last, is_users, ..Keeper::default() }), messages))
    }

    /// Returns where the conversation is kept.
    pub fn place(&self) -> String {
        match &self.path {
            Some(path) if self.is_users => format!("in {}", path.display()),
            Some(_) => format!("as talk {}", self.id()),
            None => "as a talk".to_owned(),
        }
    }

    fn id(&self) -> String {
        let stem = self.path.as_deref().and_then(Path::file_stem).unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    /// Ends the current talk.
    ///
    /// The messages after it become a new one. Returns the `--history` file, if the new messages
    /// will replace its content.
    pub fn begin_new(&mut self) -> Option<&Path> {
        if !self.is_users {
            *self = Keeper::default();
        }
        self.path.as_deref()
    }

    /// Records that the file already has this conversation.
    pub fn has(&mut self, text: String) {
        self.done = Some(text);
    }

    /// Writes the conversation, a JSON list of messages, if it has changed.
    pub fn keep(&mut self, text: String) -> Result<()> {
        if self.done.replace(text.clone()).as_ref() == Some(&text) {
            return Ok(());
        }
        let path = match &self.path {
            Some(path) => path.clone(),
            None => new_path(&directory()?)?,
        };
        let now = path.exists().then(|| read_regular_text(&path, MAX_BYTES as u64)).transpose();
        if now.with_context(|| format!("cannot read {}", path.display()))? != self.last {
            let fault = Fault::usage(format!(
                "{} was changed by another program, and is left unchanged",
                path.display()
            ));
            if self.is_users {
                return Err(fault.help("/save FILE writes this conversation to another").into());
            }
            self.begin_new();
            self.keep(text)?;
            let help = format!("this conversation is now talk {}", self.id());
            return Err(fault.help(help).into());
        }
        if self.is_users && path.exists() {
            Destination::from(&*path).write(text.as_bytes())?;
        } else {
            write_whole(&path, text.as_bytes())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        (self.path, self.last) = (Some(path), Some(text));
        Ok(())
    }

    /// Deletes the talk after all its messages were removed.
    ///
    /// A `--history` file becomes an empty list.
    pub fn forget(&mut self) -> Result<()> {
        match &self.path {
            Some(_) if self.is_users => self.keep("[]\n".into()),
            Some(path) => {
                std::fs::remove_file(path)
                    .with_context(|| format!("cannot delete {}", path.display()))?;
                self.begin_new();
                Ok(())
            }
            None => Ok(()),
        }
    }
}

/// Returns the path of a new talk. Its id is the current time.
fn new_path(directory: &Path) -> Result<PathBuf> {
    let id = jiff::Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
    let names = (1..1000).map(|n| match n {
        1 => format!("{id}.json"),
        n => format!("{id}-{n}.json"),
    });
    let mut paths = names.map(|name| directory.join(name)).filter(|path| !path.exists());
    paths.next().context("there is no free name for a talk")
}
