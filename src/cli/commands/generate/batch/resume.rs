//! `--resume OUT`: reads the answers of an earlier run from a file, and continues the file.
//!
//! The whole file is read before anything is written to it. Each line has to be an answer of a
//! batch; an end without a line break has to be the start of one. A lock keeps other runs away
//! until this process ends. Answers are appended. At the end, answers that replace a failure are
//! moved to its place, so that the order is that of the records.

use super::held::{Done, HeldAnswer};
use super::reply;
use crate::cli::io::destination::{Destination, replace};
use crate::error::Fault;
use crate::os::files::{FileId, open_regular, read_exact_at, try_lock};
use anyhow::{Context, Result};
use std::collections::{HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Limit of an answer's length in bytes: a record of the longest line, and its text escaped.
const LONGEST: u64 = 8 * crate::cli::io::text_file::MAX_BYTES as u64;
/// Limit of trailing zero bytes, which a crash of the system can leave.
const MOST_ZEROES: u64 = 1 << 20;
/// Size of a copy step in bytes.
const CHUNK: u64 = 1 << 20;

/// A file of answers that grows line by line.
pub struct Growing {
    file: File,
    /// Path of the file, after symbolic links were followed.
    path: PathBuf,
    /// Name as given by the user.
    name: String,
    /// Length of the complete lines in bytes.
    end: u64,
    /// Failures, each with the later line that replaces it.
    moved: Vec<(HeldAnswer, HeldAnswer)>,
}

impl Growing {
    /// Opens and locks the file of an earlier run, or creates it.
    ///
    /// A file that contains anything but answers is refused and stays unchanged.
    pub fn open(place: &Destination) -> Result<(Growing, Done)> {
        let name = place.path().display().to_string();
        let what = || Fault::usage(format!("--resume: cannot write {name}"));
        match std::fs::metadata(place.path()) {
            Ok(meta) if !meta.is_file() => {
                return Err(Fault::usage(format!("--resume: {name} is not a regular file")).into());
            }
            // Opening the place reports a problem with its directory.
            Err(_) => drop(place.open()?),
            Ok(_) => {}
        }
        let file = lock(place.path(), &name)?;
        let path = place.path().canonicalize().with_context(what)?;
        let mut growing = Growing { file, path, name, end: 0, moved: Vec::new() };
        let done = growing.read()?;
        let length = growing.file.metadata()?.len();
        if length > growing.end {
            growing.file.set_len(growing.end).with_context(|| {
                Fault::usage(format!("--resume: cannot write {}", growing.name))
            })?;
        }
        Ok((growing, done))
    }

    /// Reads the answers. Refuses any other content.
    fn read(&mut self) -> Result<Done> {
        let name = &self.name;
        let foreign = |what: String| {
            let fault = Fault::usage(format!("--resume: {what}; nothing was written to it"));
            fault.help(
                "name the file that the interrupted run wrote with --resume, \
                 or one that is not there yet",
            )
        };
        let mut done = Done::default();
        let mut reader = BufReader::new(&self.file);
        for number in 1.. {
            let mut line = Vec::new();
            let what = || format!("--resume: cannot read {name}");
            // Other files may have no line breaks at all, so the first read is short.
            (&mut reader).take(16).read_until(b'\n', &mut line).with_context(what)?;
            let begun = written(&line);
            let longest = if begun.is_empty() { MOST_ZEROES } else { LONGEST };
            if reply::may_begin(begun) && line.last() != Some(&b'\n') {
                (&mut reader).take(longest).read_until(b'\n', &mut line).with_context(what)?;
            }
            let reply = reply::read(&line).filter(|_| line.last() == Some(&b'\n'));
            let Some(reply) = reply else {
                let is_end = reader.fill_buf().with_context(what)?.is_empty();
                if is_end && line.last() != Some(&b'\n') && self.is_cut_off(&line) {
                    break;
                }
                return Err(foreign(format!(
                    "line {number} of {name} is not an answer of a batch"
                ))
                .into());
            };
            let held = HeldAnswer { at: self.end, len: line.len() as u64, failed: reply.failed };
            let queue = done.0.entry(reply.id.to_string()).or_default();
            // If a run was killed, its replacement of a failure is still at the end of the file.
            match queue.iter_mut().find(|earlier| earlier.failed) {
                Some(earlier) => {
                    self.moved.push((*earlier, held));
                    *earlier = held;
                }
                None => queue.push_back(held),
            }
            self.end += held.len;
        }
        Ok(done)
    }

    /// Returns whether a line without a line break is the cut-off start of an answer.
    ///
    /// After a crash of the system, bytes that were not written yet are zero.
    fn is_cut_off(&self, tail: &[u8]) -> bool {
        match written(tail) {
            [] => tail.is_empty() || self.end > 0,
            begun => reply::begins(begun),
        }
    }

    /// Appends an answer, which replaces `failure` if there was one.
    pub fn write(&mut self, line: &str, failure: Option<HeldAnswer>) -> Result<()> {
        if let Some(old) = failure
            && old.len == line.len() as u64
        {
            let mut bytes = vec![0; line.len()];
            read_exact_at(&self.file, &mut bytes, old.at)
                .with_context(|| format!("cannot read {}", self.name))?;
            if bytes == line.as_bytes() {
                return Ok(());
            }
        }
        self.file
            .write_all(line.as_bytes())
            .with_context(|| format!("cannot write to {}", self.name))?;
        let new = HeldAnswer { at: self.end, len: line.len() as u64, failed: false };
        self.moved.extend(failure.map(|old| (old, new)));
        self.end += new.len;
        Ok(())
    }

    /// Moves answers to the places of the failures before them. The file is replaced in one step.
    pub fn finish(self) -> Result<()> {
        if self.moved.is_empty() {
            return self.file.sync_all().with_context(|| format!("cannot write to {}", self.name));
        }
        let later: HashMap<u64, HeldAnswer> =
            self.moved.iter().map(|(old, new)| (old.at, *new)).collect();
        let dropped: HashSet<u64> = self.moved.iter().map(|(_, new)| new.at).collect();
        // Places that lines leave or enter. Between two of them the file stays unchanged.
        let mut edits: Vec<HeldAnswer> =
            self.moved.iter().flat_map(|(old, new)| [*old, *new]).collect();
        edits.sort_by_key(|held| held.at);
        edits.dedup_by_key(|held| held.at);
        let write = |out: &mut File| {
            let mut at = 0;
            for edit in &edits {
                copy(&self.file, at, edit.at - at, out)?;
                at = edit.at + edit.len;
                if !dropped.contains(&edit.at) {
                    let mut last = *edit;
                    while let Some(next) = later.get(&last.at) {
                        last = *next;
                    }
                    copy(&self.file, last.at, last.len, out)?;
                }
            }
            copy(&self.file, at, self.end - at, out)
        };
        replace(&self.path, write, &self.name)
    }
}

/// Returns the bytes without trailing zeros.
fn written(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)]
}

/// Opens or creates the file, and locks it for this process.
fn lock(path: &Path, name: &str) -> Result<File> {
    let what = || Fault::usage(format!("--resume: cannot write {name}"));
    loop {
        let mut options = File::options();
        options.read(true).append(true).create(true);
        let file = open_regular(&mut options, path).with_context(what)?;
        match try_lock(&file) {
            Err(TryLockError::WouldBlock) => {
                let fault = Fault::usage(format!("--resume: another run is writing {name}"));
                return Err(fault
                    .help("wait until it has ended, or give each run a file of its own")
                    .into());
            }
            // A file system without locks is accepted.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        // Another run may have replaced the file after it was opened here.
        match FileId::of_path(path) {
            Ok(id) if id != FileId::of_file(&file)? => {}
            _ => return Ok(file),
        }
    }
}

/// Copies a part of a file to the end of another one.
fn copy(from: &File, mut at: u64, mut len: u64, to: &mut File) -> std::io::Result<()> {
    let mut bytes = vec![0; len.min(CHUNK) as usize];
    while len > 0 {
        let part = &mut bytes[..len.min(CHUNK) as usize];
        read_exact_at(from, part, at)?;
        to.write_all(part)?;
        at += part.len() as u64;
        len -= part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn reply(id: &str, text: &str, failed: bool) -> String {
        let error = if failed { r#"{"code":3,"message":"m","help":null}"# } else { "null" };
        let usage = r#"{"prompt_tokens":1,"completion_tokens":1}"#;
        let figures = format!(r#""usage":{usage},"seed":1,"error":{error}"#);
        let answer = format!(r#""id":"{id}","text":"{text}","finish_reason":"stop""#);
        format!("{{\"v\":1,{answer},{figures}}}\n")
    }

    fn open(path: &Path) -> Result<(Growing, Done)> {
        Growing::open(&Destination::from(path))
    }

    #[test]
    fn an_answer_takes_the_place_of_the_failure_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let (a, b, c) =
            (reply("a", "one", false), reply("b", "", true), reply("c", "three", false));
        fs::write(&path, format!("{a}{b}{c}{}", &b[..20])).unwrap();
        let (mut file, mut done) = open(&path).unwrap();
        assert!(!done.take(&"a".into()).unwrap().failed);
        let failure = done.take(&"b".into()).unwrap();
        assert!(
            failure.failed && done.take(&"b".into()).is_none() && done.take(&"d".into()).is_none()
        );
        // A second failure of the same record changes nothing.
        file.write(&b, Some(failure)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{a}{b}{c}"));
        let (mended, d) = (reply("b", "two, at last", false), reply("d", "four", false));
        file.write(&mended, Some(failure)).unwrap();
        file.write(&d, None).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            format!("{a}{b}{c}{mended}{d}"),
            "a killed run loses nothing"
        );
        file.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{a}{mended}{c}{d}"));

        // The next run moves the answers of a killed run into order.
        let worse = reply("b", "", true).replace("\"m\"", "\"another\"");
        fs::write(&path, format!("{a}{b}{c}{worse}{mended}{d}")).unwrap();
        let (file, mut done) = open(&path).unwrap();
        assert!(!done.take(&"b".into()).unwrap().failed && done.take(&"b".into()).is_none());
        file.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{a}{mended}{c}{d}"));
    }

    #[test]
    fn one_run_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let (first, _) = open(&path).unwrap();
        assert!(open(&path).err().unwrap().to_string().contains("another run"));
        first.finish().unwrap();
        open(&path).unwrap();
    }

    #[test]
    fn a_foreign_file_keeps_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let mine = reply("a", "one", false);
        for foreign in [
            "my precious notes",
            "my notes\n",
            "{\"id\": 7, \"prompt\": \"Hi\"}",
            "{\"id\":7,\"prompt\":\"Hi\"}\n",
            "{\"id\":\"7\",\"prompt\":\"Hi\"}",
            "\0\0\0\0",
            "[1]",
            "\n",
            &format!("{mine}notes"),
            &format!("{mine}\n"),
            &format!("{}x", mine.trim_end()),
        ] {
            fs::write(&path, foreign).unwrap();
            let error = open(&path).err().unwrap_or_else(|| panic!("{foreign:?} was taken"));
            assert!(error.to_string().contains("not an answer"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        }
        // A crash of the system leaves zeros after the answers.
        for torn in ["\0\0\0", "{\"v\":1,\"id\":\"b\",\"te\0\0", &mine[..mine.len() - 1]] {
            fs::write(&path, format!("{mine}{torn}")).unwrap();
            drop(open(&path).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), mine);
        }
    }
}
