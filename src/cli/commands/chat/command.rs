//! What a line typed at the prompt asks for.

use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Nothing,
    Message(String),
    Help,
    Reset,
    Undo,
    Retry,
    /// Instructions from here on; `None` asks for those in force.
    System(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    Quit,
    /// The line looks like a command and is not one: what to say of it.
    Wrong(String),
}

/// What `/help` says.
pub const HELP: &str = concat!(
    "  /help           this list\n",
    "  /retry          answer the last message again, with another seed\n",
    "  /undo           forget the last message and its answer\n",
    "  /system [TEXT]  show or replace the instructions; /system - removes them\n",
    "  /save FILE      write the conversation as JSON, also for generate --messages\n",
    "  /load FILE      go on with a conversation that was saved\n",
    "  /reset, /clear  forget the conversation (the instructions stay)\n",
    "  /stats          figures of the last answer\n",
    "  /quit           leave; so do /bye, /exit, Ctrl-D, and Ctrl-C twice\n",
    "Ctrl-C stops an answer and keeps what there is of it; at the prompt it drops the\n",
    "line, which the arrow key up brings back. A line that ends with \\ goes on in the\n",
    "next one, and \"\"\" begins a message of several lines that another \"\"\" ends.\n",
    "// begins a message that begins with a slash.\n",
    "What you type is kept in memory only: there is no history file.",
);

/// Begins and ends a message of several lines.
const BLOCK: &str = "\"\"\"";

/// What of a message is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    None,
    /// Another line, behind a backslash.
    Line,
    /// The end of a block.
    Block,
}

impl Rest {
    /// Looks at all that was typed of a message so far.
    pub fn of(text: &str) -> Rest {
        match text.trim_start().strip_prefix(BLOCK) {
            Some(block) if block.trim_end().ends_with(BLOCK) => Rest::None,
            Some(_) => Rest::Block,
            None if text.ends_with('\\') => Rest::Line,
            None => Rest::None,
        }
    }
}

impl Line {
    pub fn parse(line: &str) -> Line {
        let line = line.trim();
        let block = line.strip_prefix(BLOCK).and_then(|rest| rest.strip_suffix(BLOCK));
        let message = |text: &str| match text.trim() {
            "" => Line::Nothing,
            text => Line::Message(text.to_owned()),
        };
        let Some(command) = line.strip_prefix('/') else { return message(block.unwrap_or(line)) };
        if command.starts_with('/') {
            return message(command);
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("help" | "?", "") => Line::Help,
            ("reset" | "clear", "") => Line::Reset,
            ("undo", "") => Line::Undo,
            ("retry", "") => Line::Retry,
            ("system", "") => Line::System(None),
            ("system", text) => Line::System(Some(text.to_owned())),
            ("stats", "") => Line::Stats,
            ("quit" | "exit" | "bye", "") => Line::Quit,
            ("save" | "load", "") => {
                Line::Wrong(format!("/{name} needs a file: /{name} talk.json"))
            }
            ("save", file) => Line::Save(file.into()),
            ("load", file) => Line::Load(file.into()),
            (
                "help" | "?" | "reset" | "clear" | "undo" | "retry" | "stats" | "quit" | "exit"
                | "bye",
                _,
            ) => Line::Wrong(format!("/{name} takes no arguments")),
            _ => Line::Wrong(format!(
                "there is no command /{name}: /help lists the commands, // begins a message with a \
                    slash"
            )),
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
            (
                "\"\"\"\n/help\n\nis a command\n\"\"\"",
                Line::Message("/help\n\nis a command".into()),
            ),
            ("\"\"\"\"\"\"", Line::Nothing),
            ("/help", Line::Help),
            ("/reset ", Line::Reset),
            ("/clear", Line::Reset),
            ("/undo", Line::Undo),
            ("/retry", Line::Retry),
            ("/system", Line::System(None)),
            ("/system Be brief.", Line::System(Some("Be brief.".into()))),
            ("/save my talk.json", Line::Save("my talk.json".into())),
            ("/load my talk.json", Line::Load("my talk.json".into())),
            ("/stats", Line::Stats),
            ("/quit", Line::Quit),
            ("/bye", Line::Quit),
        ] {
            assert_eq!(Line::parse(line), want);
        }
        for wrong in ["/save", "/load", "/reset now", "/model x", "/"] {
            assert!(matches!(Line::parse(wrong), Line::Wrong(_)), "{wrong}");
        }
    }

    #[test]
    fn a_message_ends_where_nothing_says_that_it_goes_on() {
        for (text, rest) in [
            ("one line", Rest::None),
            ("one line\\", Rest::Line),
            ("\"\"\"", Rest::Block),
            ("\"\"\"begins\nwith a backslash\\", Rest::Block),
            ("\"\"\"begins\nand ends\"\"\"", Rest::None),
            ("\"\"\"one line\"\"\" ", Rest::None),
            ("\"\"\"\"\"\"", Rest::None),
            ("says \"\"\" within", Rest::None),
        ] {
            assert_eq!(Rest::of(text), rest, "{text}");
        }
    }

    #[test]
    fn the_help_is_indented_fits_a_terminal_and_names_every_command() {
        assert!(HELP.starts_with("  /help"), "{HELP}");
        assert!(HELP.lines().all(|line| line.chars().count() <= 80), "{HELP}");
        for word in
            HELP.split([' ', ',', ';']).filter(|word| word.starts_with('/') && word.len() > 2)
        {
            assert!(
                !matches!(Line::parse(&format!("{word} \
                    x")), Line::Wrong(what) if what.contains("no \
                    command")),
                "{word}"
            );
        }
    }
}
