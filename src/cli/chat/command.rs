//! What a line typed at the prompt asks for.

use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Nothing,
    Message(String),
    Help,
    Reset,
    Save(PathBuf),
    Stats,
    Quit,
    /// Looks like a command and is none: what to say of it.
    Wrong(String),
}

/// What `/help` says.
pub const HELP: &str = "\
  /help        this list
  /reset       forget the conversation (the system prompt stays)
  /save FILE   write the conversation as JSON, for generate --messages
  /stats       figures of the last answer
  /quit        leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C during an answer stops it and keeps the conversation. A line that ends
with \\ goes on in the next one. // begins a message that begins with a slash.";

impl Line {
    pub fn parse(line: &str) -> Line {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { Line::Nothing } else { Line::Message(line.to_owned()) };
        };
        if command.starts_with('/') {
            return Line::Message(command.to_owned());
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("help" | "?", "") => Line::Help,
            ("reset", "") => Line::Reset,
            ("stats", "") => Line::Stats,
            ("quit" | "exit" | "bye", "") => Line::Quit,
            ("save", "") => Line::Wrong("/save takes a file: /save talk.json".into()),
            ("save", file) => Line::Save(file.into()),
            ("help" | "?" | "reset" | "stats" | "quit" | "exit" | "bye", _) => Line::Wrong(format!("/{name} takes nothing more")),
            _ => Line::Wrong(format!("there is no /{name}: /help lists the commands, // begins a message with a slash")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, want) in [
            ("  ", Line::Nothing),
            (" hello /help ", Line::Message("hello /help".into())),
            ("//etc is a directory", Line::Message("/etc is a directory".into())),
            ("/help", Line::Help),
            ("/reset ", Line::Reset),
            ("/save my talk.json", Line::Save("my talk.json".into())),
            ("/stats", Line::Stats),
            ("/quit", Line::Quit),
        ] {
            assert_eq!(Line::parse(line), want);
        }
        for wrong in ["/save", "/reset now", "/model x", "/"] {
            assert!(matches!(Line::parse(wrong), Line::Wrong(_)), "{wrong}");
        }
    }
}
