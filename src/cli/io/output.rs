//! The output of `generate`: the text while it is generated, or a JSON result, on standard output
//! or in a file.

use crate::cli::io::destination::{Destination, Writer};
use crate::cli::io::record::Record;
use crate::cli::io::ui::clean;
use crate::cli::io::wrap::{Wrap, columns};
use anyhow::Result;
use clap::ValueEnum;

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// The text and nothing else, as it is generated
    Text,
    /// One JSON object at the end (see `gemma schema`)
    Json,
    /// The same on one line
    Jsonl,
    /// A JSON line per piece of text, then the result
    StreamJson,
}

/// An open output.
pub struct TextOutput {
    place: Writer,
    format: OutputFormat,
    newline: bool,
    /// Wraps lines on a terminal.
    wrap: Option<Wrap>,
    text: String,
    thoughts: String,
}

impl TextOutput {
    /// Opens the output; `None` is standard output. Errors are reported now, not after a long
    /// generation.
    ///
    /// `newline` ends a text with a line break. On a terminal it always gets one.
    pub fn open(place: Option<&Destination>, format: OutputFormat, newline: bool) -> Result<Self> {
        let place = place.map_or_else(Writer::stdout, Destination::open)?;
        let (text, thoughts) = Default::default();
        let is_shown = format == OutputFormat::Text && place.is_terminal();
        let wrap = is_shown.then(|| Wrap::new(columns()));
        Ok(TextOutput { place, format, newline: newline || is_shown, wrap, text, thoughts })
    }

    /// Returns whether the format is plain text.
    pub fn is_text(&self) -> bool {
        self.format == OutputFormat::Text
    }

    /// Returns whether this is a regular file, which appears when it is complete.
    pub fn appears_whole(&self) -> bool {
        self.place.appears_whole()
    }

    /// The text so far.
    pub fn so_far(&self) -> &str {
        &self.text
    }

    /// Returns the thoughts so far, if there are any.
    pub fn thoughts(&self) -> Option<String> {
        Some(self.thoughts.clone()).filter(|text| !text.is_empty())
    }

    /// Appends to the thoughts, which are not part of the text.
    pub fn thought(&mut self, piece: &str) -> Result<()> {
        self.thoughts.push_str(piece);
        if piece.is_empty() || self.format != OutputFormat::StreamJson {
            return Ok(());
        }
        self.line(&serde_json::json!({"type": "reasoning", "text": piece}))
    }

    /// Appends generated text, which consists of whole characters. Flushes it at once.
    pub fn text(&mut self, piece: &str) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.text.push_str(piece);
        match self.format {
            OutputFormat::Text => match &mut self.wrap {
                None => self.place.write_text(piece),
                Some(wrap) => {
                    wrap.resize(columns());
                    self.place.write_text(&wrap.push(&clean(piece)))
                }
            },
            OutputFormat::StreamJson => {
                self.line(&serde_json::json!({"type": "text", "text": piece}))
            }
            OutputFormat::Json | OutputFormat::Jsonl => Ok(()),
        }
    }

    /// Ends the output: writes the result, or the final line break.
    pub fn finish(mut self, record: &Record) -> Result<()> {
        match self.format {
            OutputFormat::Text => {
                if let Some(wrap) = &mut self.wrap {
                    self.place.write_text(&wrap.finish())?;
                }
                if self.newline && !self.text.ends_with('\n') {
                    self.place.write(b"\n")?;
                }
            }
            OutputFormat::Json => {
                let mut json = serde_json::to_string_pretty(record)?;
                json.push('\n');
                self.place.write_text(&json)?;
            }
            OutputFormat::Jsonl => self.line(record)?,
            OutputFormat::StreamJson => {
                #[derive(serde::Serialize)]
                struct Result<'a> {
                    r#type: &'static str,
                    #[serde(flatten)]
                    record: &'a Record,
                }
                self.line(&Result { r#type: "result", record })?;
            }
        }
        self.place.finish()
    }

    fn line(&mut self, value: &impl serde::Serialize) -> Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        self.place.write_text(&line)
    }
}

/// Prints a complete text to standard output and flushes it.
pub fn print(text: &str) -> Result<()> {
    Writer::stdout()?.write_text(text)
}

/// Prints a text that contains colours. The caller cleans parts from other sources.
pub fn print_painted(text: &str) -> Result<()> {
    Writer::stdout()?.write(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_only_when_finished() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.txt");
        std::fs::write(&path, "old").unwrap();
        let place = Destination::from(&*path);
        let mut output = TextOutput::open(Some(&place), OutputFormat::Text, true).unwrap();
        output.text("new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        output.finish(&Record::default()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        let mut dropped = TextOutput::open(Some(&place), OutputFormat::Text, false).unwrap();
        dropped.text("never").unwrap();
        drop(dropped);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }
}
