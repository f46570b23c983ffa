//! Standard output or a file: the generated text as it comes, or a JSON result. Nothing else is ever written there.

use super::record::Record;
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// What the output looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The text and nothing else, as it is generated
    Text,
    /// One JSON object at the end (see `gemma schema`)
    Json,
    /// The same on one line
    Jsonl,
    /// A JSON line per piece of text, then the result
    StreamJson,
}

/// Where it goes.
enum Place {
    Stdout {
        terminal: bool,
    },
    /// A device or pipe named by path: written as it comes.
    Direct(File, PathBuf),
    /// Kept in memory; the file appears complete or not at all.
    Atomic(Vec<u8>, PathBuf),
}

/// An open output.
pub struct Output {
    place: Place,
    format: Format,
    newline: bool,
    text: String,
}

impl Output {
    /// Opens `path`, or standard output for `None` or `-`. Fails now rather than after a long generation.
    pub fn open(path: Option<&Path>, format: Format, newline: bool) -> Result<Self> {
        let place = match path {
            None => Place::Stdout { terminal: std::io::stdout().is_terminal() },
            Some(path) if path == Path::new("-") => Place::Stdout { terminal: std::io::stdout().is_terminal() },
            Some(path) => open_file(path)?,
        };
        Ok(Output { place, format, newline, text: String::new() })
    }

    /// True if the text appears on a terminal while it is generated.
    pub fn streams_to_terminal(&self) -> bool {
        matches!(self.place, Place::Stdout { terminal: true }) && matches!(self.format, Format::Text | Format::StreamJson)
    }

    /// The text so far.
    pub fn so_far(&self) -> &str {
        &self.text
    }

    /// Appends generated text: whole characters, flushed at once.
    pub fn text(&mut self, piece: &str) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.text.push_str(piece);
        match self.format {
            Format::Text => self.place.write(piece.as_bytes()),
            Format::StreamJson => self.line(&serde_json::json!({"type": "text", "text": piece})),
            Format::Json | Format::Jsonl => Ok(()),
        }
    }

    /// Ends the output with the result, or the final line break.
    pub fn finish(mut self, record: &Record) -> Result<()> {
        match self.format {
            Format::Text => {
                let terminal = matches!(self.place, Place::Stdout { terminal: true });
                if (self.newline || terminal) && !self.text.ends_with('\n') {
                    self.place.write(b"\n")?;
                }
            }
            Format::Json => {
                let mut json = serde_json::to_string_pretty(record)?;
                json.push('\n');
                self.place.write(json.as_bytes())?;
            }
            Format::Jsonl => self.line(record)?,
            Format::StreamJson => {
                #[derive(serde::Serialize)]
                struct Result<'a> {
                    r#type: &'static str,
                    #[serde(flatten)]
                    record: &'a Record,
                }
                self.line(&Result { r#type: "result", record })?;
            }
        }
        match self.place {
            Place::Atomic(bytes, path) => replace(&path, &bytes),
            _ => Ok(()),
        }
    }

    fn line(&mut self, value: &impl serde::Serialize) -> Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        self.place.write(line.as_bytes())
    }
}

impl Place {
    /// Writes and flushes. A closed pipe ends the process (SIGPIPE) before this returns.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Place::Stdout { .. } => {
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(bytes).and_then(|()| stdout.flush()).context("cannot write to standard output")
            }
            Place::Direct(file, path) => file.write_all(bytes).with_context(|| format!("cannot write to {}", path.display())),
            Place::Atomic(buffer, _) => {
                buffer.extend_from_slice(bytes);
                Ok(())
            }
        }
    }
}

/// Writes a whole text to standard output and flushes: for commands that answer once.
pub fn print(text: &str) -> Result<()> {
    Place::Stdout { terminal: false }.write(text.as_bytes())
}

fn open_file(path: &Path) -> Result<Place> {
    let what = || crate::error::Fault::usage(format!("cannot write {}", path.display()));
    // Through a symbolic link the target is replaced, not the link.
    let path = &std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Err(anyhow::Error::from(what()).context(format!("{} is a directory", path.display()))),
        Ok(meta) if !meta.is_file() => {
            let file = File::options().write(true).open(path).with_context(what)?;
            Ok(Place::Direct(file, path.to_owned()))
        }
        _ => {
            // Tells now whether the directory can be written, and leaves nothing behind whatever ends the process.
            tempfile::tempfile_in(parent(path)).with_context(what)?;
            Ok(Place::Atomic(Vec::new(), path.to_owned()))
        }
    }
}

/// Puts a complete file in the place of `path` in one step.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let what = || format!("cannot write {}", path.display());
    let mut builder = tempfile::Builder::new();
    builder.prefix(".gemma-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).map_or(0o666, |meta| meta.permissions().mode() & 0o777);
        builder.permissions(std::fs::Permissions::from_mode(mode));
    }
    let mut file = builder.tempfile_in(parent(path)).with_context(what)?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).with_context(what)?;
    file.persist(path).with_context(what)?;
    Ok(())
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_only_when_finished() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.txt");
        std::fs::write(&path, "old").unwrap();
        let mut output = Output::open(Some(&path), Format::Text, true).unwrap();
        output.text("new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        output.finish(&Record::default()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        let mut dropped = Output::open(Some(&path), Format::Text, false).unwrap();
        dropped.text("never").unwrap();
        drop(dropped);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_refused_at_once() {
        assert!(Output::open(Some(Path::new("/nonexistent/x")), Format::Text, false).is_err());
        assert!(Output::open(Some(Path::new("/")), Format::Text, false).is_err());
    }
}
