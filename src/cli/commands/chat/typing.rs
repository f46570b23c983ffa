//! Input at the prompt: a line, or several lines that make one message.

use super::command::{ChatLine, Rest};
use crate::cli::io::ui::Ui;
use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{
    Cmd, ConditionalEventHandler, Config, Editor, Event, EventContext, EventHandler, KeyEvent,
    RepeatCount,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How soon after a Ctrl-C at an empty prompt another one leaves.
const TWICE: Duration = Duration::from_secs(1);

pub struct LinePrompt {
    editor: Editor<(), MemHistory>,
    /// Text of the line at Ctrl-C, which the editor does not return.
    dropped: Arc<Mutex<String>>,
    /// When Ctrl-C was last pressed at an empty prompt.
    interrupted: Option<Instant>,
}

/// Notes the line that Ctrl-C is about to drop.
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
        // The editor then does what it does without this handler.
        None
    }
}

impl LinePrompt {
    pub fn new() -> Result<LinePrompt> {
        let config = Config::builder().auto_add_history(true).build();
        let mut editor =
            Editor::with_history(config, MemHistory::new()).context("preparing the terminal")?;
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
                // The window has changed its size.
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

    /// Puts a message where the arrow key up finds it.
    pub fn remember(&mut self, text: &str) {
        // An entry that the history does not take is an entry that it already has.
        let _ = self.editor.add_history_entry(text);
    }

    /// Begins a new line and keeps the dropped one in the history. Whether to leave: an empty
    /// prompt says how, and leaves at the second Ctrl-C in a row.
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
