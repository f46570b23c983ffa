//! Text files that are part of a message.

use crate::cli::io::text_file::read;
use crate::error::{Fault, Kind};
use crate::util::files::open_regular;
use crate::util::units::{bytes, thousands};
use anyhow::{Context, Result};
use std::io::Read;
use std::path::Path;

/// A text file for the next message.
pub struct AttachedFile {
    /// File name without its directory.
    pub name: String,
    text: String,
}

impl AttachedFile {
    /// Reads a text file of at most `most` bytes.
    pub fn read(path: &Path, most: usize) -> Result<AttachedFile> {
        let shown = path.display().to_string();
        let file = open_regular(path).with_context(|| {
            let fault = Fault::model(format!("cannot read {shown}"));
            fault.help("check the path: Tab completes file names")
        })?;
        let size = file.metadata().map_or(0, |meta| meta.len());
        if size > most as u64 {
            let fault = Fault::new(
                Kind::Context,
                format!("{shown} has {}, more than the context holds", bytes(size)),
            );
            return Err(fault.help(SHORTER).into());
        }
        // If the file grows while it is read, the new part is cut off.
        let text = read(&mut file.take(most as u64), &shown)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(AttachedFile { name, text })
    }
}

const SHORTER: &str = "give a part of it, or start gemma chat with a larger --ctx-size";

/// Makes the error of a file with too many tokens to leave room for an answer.
pub fn too_long(name: &str, tokens: usize, context: usize) -> Fault {
    let (have, most) = (thousands(tokens as u64), thousands(context as u64));
    let what =
        format!("with {name} the message has {have} tokens; the context has room for {most}");
    Fault::new(Kind::Context, what).help(SHORTER)
}

/// Returns a message with its files before it, each with its name and in a fence of backticks.
pub fn message(files: &[AttachedFile], text: &str) -> String {
    let block = |file: &AttachedFile| {
        let runs = file.text.split(|c| c != '`').map(str::len);
        let fence = "`".repeat(runs.max().unwrap_or(0).max(2) + 1);
        format!("{}:\n{fence}\n{}\n{fence}\n\n", file.name, file.text)
    };
    files.iter().map(block).collect::<String>() + text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_its_files_and_no_fence_ends_early() {
        let file = |name: &str, text: &str| AttachedFile { name: name.into(), text: text.into() };
        assert_eq!(message(&[], "Hi"), "Hi");
        let files = [file("a.txt", "one\ntwo"), file("b.md", "```\ncode\n```")];
        let want = "a.txt:\n```\none\ntwo\n```\n\n\
                    b.md:\n````\n```\ncode\n```\n````\n\nWhat is this?";
        assert_eq!(message(&files, "What is this?"), want);
    }

    #[test]
    fn what_is_no_short_text_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my notes.txt");
        std::fs::write(&path, "some text\n").unwrap();
        let file = AttachedFile::read(&path, 10).unwrap();
        assert_eq!((&*file.name, &*file.text), ("my notes.txt", "some text"));
        let refused = |path: &Path, most: usize, words: &str| {
            let error = AttachedFile::read(path, most).err().unwrap();
            assert!(format!("{error:#}").contains(words), "{error:#}");
        };
        refused(&path, 9, "more than the context holds");
        std::fs::write(&path, b"\x7fELF\0\0\xff").unwrap();
        refused(&path, 100, "is a binary file, not text");
        refused(dir.path(), 100, "cannot read");
        refused(&dir.path().join("absent"), 100, "cannot read");
    }
}
