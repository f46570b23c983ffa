//! Input at the prompt: messages of one or several lines, and commands.

use super::command::{COMMANDS, ChatLine, OF_FILES, Rest};
use crate::cli::io::ui::Ui;
use anyhow::{Context, Result};
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::Validator;
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Editor, Event, EventContext,
    EventHandler, Helper, KeyEvent, RepeatCount,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Two Ctrl-C at an empty prompt within this time leave the chat.
const TWICE: Duration = Duration::from_secs(1);

pub struct LinePrompt {
    editor: Editor<Completion, MemHistory>,
    /// Text of the line when Ctrl-C was pressed. The editor does not return it.
    dropped: Arc<Mutex<String>>,
    /// Time of the last Ctrl-C at an empty prompt.
    interrupted: Option<Instant>,
}

/// Completion of commands, and of file names after commands that take one.
struct Completion(FilenameCompleter);

impl Helper for Completion {}
impl Highlighter for Completion {}
impl Validator for Completion {}

impl Hinter for Completion {
    type Hint = String;
}

impl Completer for Completion {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        self.candidates(line, at)
    }
}

impl Completion {
    /// Returns the candidates at `at`, and where they begin. In a message, Tab inserts a tab.
    fn candidates(&self, line: &str, at: usize) -> rustyline::Result<(usize, Vec<Pair>)> {
        let pair = |text: &str| Pair { display: text.into(), replacement: text.into() };
        let begun = &line[..at];
        if !begun.starts_with('/') {
            return Ok((at, vec![pair("\t")]));
        }
        if OF_FILES.iter().any(|command| begun.starts_with(command)) {
            return self.0.complete_path(line, at);
        }
        let commands = COMMANDS.iter().filter(|command| command.starts_with(begun));
        Ok((0, commands.map(|command| pair(command)).collect()))
    }
}

/// Stores the line that Ctrl-C is about to drop.
struct Noting(Arc<Mutex<String>>);

impl ConditionalEventHandler for Noting {
    fn handle(
        &self,
        _: &Event,
        _: RepeatCount,
        _: bool,
        context: &EventContext<'_>,
    ) -> Option<Cmd> {
        if let Ok(mut dropped) = self.0.lock() {
            context.line().clone_into(&mut dropped);
        }
        // The editor then does its default action.
        None
    }
}

impl LinePrompt {
    pub fn new() -> Result<LinePrompt> {
        let completion = CompletionType::List;
        let config = Config::builder().auto_add_history(true).completion_type(completion).build();
        let mut editor =
            Editor::with_history(config, MemHistory::new()).context("preparing the terminal")?;
        editor.set_helper(Some(Completion(FilenameCompleter::new())));
        let dropped = Arc::new(Mutex::new(String::new()));
        editor.bind_sequence(
            KeyEvent::ctrl('C'),
            EventHandler::Conditional(Box::new(Noting(dropped.clone()))),
        );
        Ok(LinePrompt { editor, dropped, interrupted: None })
    }

    /// Reads a message or a command; `None` to leave.
    pub fn read(&mut self, ui: &Ui) -> Result<Option<ChatLine>> {
        let mut text = String::new();
        loop {
            match self.editor.readline(if text.is_empty() { "> " } else { ". " }) {
                Ok(part) => text.push_str(&part),
                Err(ReadlineError::Eof) if text.is_empty() => return Ok(None),
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => {
                    if self.drop_line(std::mem::take(&mut text), ui) {
                        return Ok(None);
                    }
                    continue;
                }
                // The size of the window has changed.
                Err(ReadlineError::Signal(_)) => continue,
                Err(e) => return Err(e).context("reading from the terminal"),
            }
            self.interrupted = None;
            match Rest::of(&text) {
                Rest::None => return Ok(Some(ChatLine::parse(&text))),
                Rest::Line => {
                    text.pop();
                    text.push('\n');
                }
                Rest::Block => text.push('\n'),
            }
        }
    }

    /// Adds a message to the history of the up arrow key.
    pub fn remember(&mut self, text: &str) {
        // The history refuses only entries that it already has.
        let _ = self.editor.add_history_entry(text);
    }

    /// Starts a new line and keeps the dropped one in the history.
    ///
    /// Returns whether to leave: an empty prompt prints how to leave, and a second Ctrl-C in a row
    /// leaves.
    fn drop_line(&mut self, begun: String, ui: &Ui) -> bool {
        let line = self
            .dropped
            .lock()
            .map(|mut dropped| std::mem::take(&mut *dropped))
            .unwrap_or_default();
        if !line.trim().is_empty() {
            self.remember(&line);
        }
        if !line.is_empty() || !begun.is_empty() {
            self.interrupted = None;
            return false;
        }
        if self.interrupted.is_some_and(|at| at.elapsed() < TWICE) {
            return true;
        }
        ui.line("(Ctrl-D or /quit leaves; Ctrl-C again leaves too)");
        self.interrupted = Some(Instant::now());
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_files_are_completed_and_a_message_has_tabs() {
        let completion = Completion(FilenameCompleter::new());
        let complete = |line: &str| {
            let (at, pairs) = completion.candidates(line, line.len()).unwrap();
            (at, pairs.into_iter().map(|pair| pair.replacement).collect::<Vec<_>>())
        };
        assert_eq!(complete("/re"), (0, vec!["/reset".into(), "/retry".into()]));
        assert_eq!(complete("/stats "), (0, vec![]));
        assert_eq!(complete("let x ="), (7, vec!["\t".into()]));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("my notes.txt"), "").unwrap();
        let line = format!("/file {}/my", dir.path().display());
        let (_, found) = complete(&line);
        let is_it = |path: &String| path.ends_with("notes.txt");
        assert!(found.len() == 1 && found.iter().all(is_it), "{found:?}");
    }
}
