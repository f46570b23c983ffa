//! Commands that are typed at the prompt.

use crate::os::places::home;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatLine {
    Nothing,
    Message(String),
    Help,
    Reset,
    Undo,
    Retry,
    /// New instructions; `None` prints the current ones.
    System(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    /// An image for the next message.
    Image(PathBuf),
    /// A text file for the next message.
    File(PathBuf),
    Stats,
    Quit,
    /// Explanation of a line that looks like a command but is not one.
    Wrong(String),
}

/// The text of `/help`.
pub const HELP: &str = concat!(
    "  /help           this list\n",
    "  /retry          answer the last message again, with another seed\n",
    "  /undo           forget the last message and its answer\n",
    "  /system [TEXT]  show or replace the instructions; /system - removes them\n",
    "  /save FILE      write the conversation as JSON, also for generate --messages;\n",
    "                  a FILE.md gets Markdown\n",
    "  /load FILE      continue a conversation that was saved\n",
    "  /file FILE      put a text file before the next message\n",
    "  /image FILE     show a picture with the next message; a path alone does so too\n",
    "  /reset, /clear  forget the conversation (the instructions stay)\n",
    "  /stats          figures of the last answer\n",
    "  /quit           leave; so do /bye, /exit, Ctrl-D, and Ctrl-C twice\n",
    "Ctrl-C stops an answer and keeps the text so far; at the prompt it drops the\n",
    "line, which the up arrow key brings back. A line that ends with \\ continues on\n",
    "the next one, and \"\"\" begins and ends a message of several lines.\n",
    "// begins a message that starts with a slash.\n",
    "Tab completes commands and the names of files.\n",
    "What you type is written to a file only by /save, --keep-talks, --continue and\n",
    "--history.",
);

/// The commands, for completion.
pub const COMMANDS: [&str; 14] = [
    "/bye", "/clear", "/exit", "/file", "/help", "/image", "/load", "/quit", "/reset", "/retry",
    "/save", "/stats", "/system", "/undo",
];

/// Commands that take a file name.
pub const OF_FILES: [&str; 4] = ["/file ", "/image ", "/load ", "/save "];

/// Mark at the begin and end of a message of several lines.
const BLOCK: &str = "\"\"\"";

/// The part that a message still needs before it can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    None,
    /// Another line, after a backslash.
    Line,
    /// The end of a block.
    Block,
}

impl Rest {
    /// Returns what the text typed so far still needs.
    pub fn of(text: &str) -> Rest {
        match text.trim_start().strip_prefix(BLOCK) {
            Some(block) if block.trim_end().ends_with(BLOCK) => Rest::None,
            Some(_) => Rest::Block,
            None if text.ends_with('\\') => Rest::Line,
            None => Rest::None,
        }
    }
}

/// Removes the quotes or backslashes that completion and terminals put around a file name.
///
/// `~/` becomes the home directory.
fn dropped(text: &str) -> PathBuf {
    if Path::new(text).exists() {
        return text.into();
    }
    let path = unquoted(text);
    match path.strip_prefix("~/").zip(home()) {
        Some((rest, home)) => home.join(rest),
        None => path.into(),
    }
}

fn unquoted(text: &str) -> String {
    let quoted = ['\'', '"'].into_iter().find_map(|quote| {
        text.strip_prefix(quote)?.strip_suffix(quote).filter(|inner| !inner.contains(quote))
    });
    match quoted {
        Some(path) => path.to_owned(),
        None if cfg!(windows) => text.to_owned(),
        None => {
            let mut chars = text.chars();
            // A backslash at the end is kept.
            std::iter::from_fn(|| match chars.next()? {
                '\\' => chars.next().or(Some('\\')),
                c => Some(c),
            })
            .collect()
        }
    }
}

/// Returns the path of an image if the whole line is one, because a file was dropped on the
/// terminal.
fn picture(line: &str) -> Option<PathBuf> {
    let path = dropped(line);
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    let is_picture = matches!(&*ending, "jpg" | "jpeg" | "png" | "webp");
    (is_picture && path.is_file()).then_some(path)
}

impl ChatLine {
    pub fn parse(line: &str) -> ChatLine {
        let line = line.trim();
        if let Some(path) = picture(line) {
            return ChatLine::Image(path);
        }
        let block = line.strip_prefix(BLOCK).and_then(|rest| rest.strip_suffix(BLOCK));
        let message = |text: &str| match text.trim() {
            "" => ChatLine::Nothing,
            text => ChatLine::Message(text.to_owned()),
        };
        let Some(command) = line.strip_prefix('/') else { return message(block.unwrap_or(line)) };
        if command.starts_with('/') {
            return message(command);
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("help" | "?", "") => ChatLine::Help,
            ("reset" | "clear", "") => ChatLine::Reset,
            ("undo", "") => ChatLine::Undo,
            ("retry", "") => ChatLine::Retry,
            ("system", "") => ChatLine::System(None),
            ("system", text) => ChatLine::System(Some(text.to_owned())),
            ("stats", "") => ChatLine::Stats,
            ("quit" | "exit" | "bye", "") => ChatLine::Quit,
            ("save" | "load", "") => {
                ChatLine::Wrong(format!("/{name} needs a file: /{name} talk.json"))
            }
            ("file", "") => ChatLine::Wrong("/file needs a file: /file notes.txt".into()),
            ("file", file) => match picture(file) {
                Some(path) => ChatLine::Image(path),
                None => ChatLine::File(dropped(file)),
            },
            ("image", "") => ChatLine::Wrong("/image needs a file: /image cat.jpg".into()),
            ("image", file) => ChatLine::Image(dropped(file)),
            ("save", file) => ChatLine::Save(dropped(file)),
            ("load", file) => ChatLine::Load(dropped(file)),
            (
                "help" | "?" | "reset" | "clear" | "undo" | "retry" | "stats" | "quit" | "exit"
                | "bye",
                _,
            ) => ChatLine::Wrong(format!("/{name} takes no arguments")),
            _ => ChatLine::Wrong(format!(
                "there is no command /{name}: /help lists the commands, \
                 // begins a message with a slash"
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
            ("  ", ChatLine::Nothing),
            (" hello /help ", ChatLine::Message("hello /help".into())),
            ("//etc is a directory", ChatLine::Message("/etc is a directory".into())),
            (
                "\"\"\"\n/help\n\nis a command\n\"\"\"",
                ChatLine::Message("/help\n\nis a command".into()),
            ),
            ("\"\"\"\"\"\"", ChatLine::Nothing),
            ("/help", ChatLine::Help),
            ("/reset ", ChatLine::Reset),
            ("/clear", ChatLine::Reset),
            ("/undo", ChatLine::Undo),
            ("/retry", ChatLine::Retry),
            ("/system", ChatLine::System(None)),
            ("/system Be brief.", ChatLine::System(Some("Be brief.".into()))),
            ("/save my talk.json", ChatLine::Save("my talk.json".into())),
            ("/load my talk.json", ChatLine::Load("my talk.json".into())),
            ("/image my cat.jpg", ChatLine::Image("my cat.jpg".into())),
            ("/image 'my cat.jpg'", ChatLine::Image("my cat.jpg".into())),
            ("/file my notes.txt", ChatLine::File("my notes.txt".into())),
            ("/file 'my notes (1).txt'", ChatLine::File("my notes (1).txt".into())),
            ("cat.jpg", ChatLine::Message("cat.jpg".into())),
            ("/stats", ChatLine::Stats),
            ("/quit", ChatLine::Quit),
            ("/bye", ChatLine::Quit),
        ] {
            assert_eq!(ChatLine::parse(line), want);
        }
        // Completion and dropped files escape special characters with backslashes.
        if cfg!(unix) {
            let names = [("my\\ notes\\ \\(1\\).txt", "my notes (1).txt"), ("a\\", "a\\")];
            for (typed, name) in names {
                let line = ChatLine::parse(&format!("/file {typed}"));
                assert_eq!(line, ChatLine::File(name.into()));
            }
        }
        for wrong in ["/save", "/load", "/file", "/image", "/reset now", "/model x", "/"] {
            assert!(matches!(ChatLine::parse(wrong), ChatLine::Wrong(_)), "{wrong}");
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
        for word in COMMANDS {
            assert!(HELP.contains(word), "{word}");
        }
        for word in
            HELP.split([' ', ',', ';']).filter(|word| word.starts_with('/') && word.len() > 2)
        {
            let line = ChatLine::parse(&format!("{word} x"));
            assert!(
                !matches!(line, ChatLine::Wrong(what) if what.contains("no command")),
                "{word}"
            );
        }
    }
}
