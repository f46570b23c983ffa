//! Where a batch comes from and goes to, and which of its records are this process's.

use crate::cli::output;
use crate::error::Fault;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `--shard i/n`: every n-th record, from the i-th on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub index: usize,
    pub of: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let parts = s.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, of)) if (1..=of).contains(&index) => Ok(Shard { index, of }),
            _ => Err("expected i/n with i from 1 to n, such as 2/3".into()),
        }
    }
}

impl Shard {
    /// Whether the record that comes `nth` (the first being 0) is one of these.
    pub fn has(self, nth: usize) -> bool {
        nth % self.of == self.index - 1
    }
}

/// Lines of a batch, blank ones left out.
pub struct Lines {
    from: Box<dyn BufRead + Send>,
    name: String,
    number: usize,
}

/// Bytes of the longest line that is looked at.
const LONGEST: usize = crate::cli::input::MAX_BYTES;

impl Lines {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path) -> Result<Lines> {
        if path == Path::new("-") {
            return Ok(Lines { from: Box::new(BufReader::new(std::io::stdin())), name: "standard input".into(), number: 0 });
        }
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| Fault::model(format!("cannot read {name}")))?;
        ensure!(!file.metadata()?.is_dir(), Fault::model(format!("{name} is a directory")));
        Ok(Lines { from: Box::new(BufReader::new(file)), name, number: 0 })
    }

    /// The next line and its number. One that is longer than anything could use is cut, so that it is no JSON.
    pub fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        loop {
            let mut line = Vec::new();
            let what = || Fault::model(format!("cannot read {}", self.name));
            let read = (&mut self.from).take(LONGEST as u64).read_until(b'\n', &mut line).with_context(what)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read == LONGEST && line.last() != Some(&b'\n') {
                self.from.skip_until(b'\n').with_context(what)?;
            }
            if self.number == 1 && line.starts_with(b"\xef\xbb\xbf") {
                line.drain(..3);
            }
            let end = line.trim_ascii_end().len();
            line.truncate(end);
            if !line.trim_ascii_start().is_empty() {
                return Ok(Some((self.number, line)));
            }
        }
    }
}

/// How many records a file has; `None` for what can be read only once.
pub fn count(path: &Path) -> Option<u64> {
    if path == Path::new("-") || !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut lines = Lines::open(path).ok()?;
    let mut n = 0;
    while lines.take().ok()?.is_some() {
        n += 1;
    }
    Some(n)
}

/// Where replies go.
pub enum Sink {
    Stdout,
    /// Appears when all is done.
    Whole(PathBuf, Vec<u8>),
    /// Grows line by line, and what it held is kept.
    Growing(File, PathBuf),
}

/// Replies that a file holds already, by id: how often.
pub type Done = HashMap<String, usize>;

impl Sink {
    pub fn open(output: Option<&Path>, resume: Option<&Path>) -> Result<(Sink, Done)> {
        match (resume, output) {
            (Some(_), Some(_)) => Err(Fault::usage("--resume OUT names the output: it goes without --output").into()),
            (Some(path), None) => resume_at(path),
            (None, Some(path)) if path != Path::new("-") => {
                // Refused now rather than after the work.
                output::Output::open(Some(path), output::Format::Jsonl, false)?;
                Ok((Sink::Whole(path.to_owned(), Vec::new()), Done::new()))
            }
            _ => Ok((Sink::Stdout, Done::new())),
        }
    }

    /// Writes a reply; it is on its way when this returns.
    pub fn write(&mut self, line: &str) -> Result<()> {
        match self {
            Sink::Stdout => output::print(line),
            Sink::Whole(_, bytes) => {
                bytes.extend_from_slice(line.as_bytes());
                Ok(())
            }
            Sink::Growing(file, path) => {
                file.write_all(line.as_bytes()).with_context(|| format!("cannot write to {}", path.display()))
            }
        }
    }

    pub fn finish(self) -> Result<()> {
        match self {
            Sink::Stdout => Ok(()),
            Sink::Whole(path, bytes) => output::replace(&path, &bytes),
            Sink::Growing(file, path) => file.sync_all().with_context(|| format!("cannot write to {}", path.display())),
        }
    }
}

/// Opens what an earlier run left, cuts off a reply that was not finished, and lists the others.
fn resume_at(path: &Path) -> Result<(Sink, Done)> {
    let shown = path.display();
    let what = || Fault::usage(format!("cannot write {shown}"));
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path).with_context(what)?;
    ensure!(file.metadata()?.is_file(), Fault::usage(format!("--resume: {shown} is no file")));
    let mut done = Done::new();
    let (mut kept, mut number) = (0u64, 0);
    let mut reader = BufReader::new(&mut file);
    loop {
        let mut line = Vec::new();
        let read = reader.read_until(b'\n', &mut line).with_context(what)?;
        if line.last() != Some(&b'\n') {
            break;
        }
        number += 1;
        let value: Option<Value> = serde_json::from_slice(&line).ok();
        let id = value.as_ref().and_then(|v| v.get("custom_id").or(v.get("id")));
        let Some(id) = id else {
            let fault = Fault::usage(format!("line {number} of {shown} is no reply of a batch"));
            return Err(fault.help("name the file that the interrupted run wrote with --resume").into());
        };
        *done.entry(id.to_string()).or_default() += 1;
        kept += read as u64;
    }
    drop(reader);
    file.set_len(kept).with_context(what)?;
    file.seek(SeekFrom::Start(kept)).with_context(what)?;
    Ok((Sink::Growing(file, path.to_owned()), done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_share_out_every_record() {
        let shards: Vec<Shard> = (1..=3).map(|i| format!("{i}/3").parse().unwrap()).collect();
        for nth in 0..10 {
            assert_eq!(shards.iter().filter(|s| s.has(nth)).count(), 1);
        }
        for bad in ["0/3", "4/3", "1", "a/b", "1/0", ""] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn lines_are_numbered_and_blank_ones_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in");
        std::fs::write(&path, "\u{feff}{}\n\n  \r\n{\"a\": 1}\r\nlast").unwrap();
        let mut lines = Lines::open(&path).unwrap();
        let mut all = Vec::new();
        while let Some((number, line)) = lines.take().unwrap() {
            all.push((number, String::from_utf8(line).unwrap()));
        }
        assert_eq!(all, [(1, "{}".into()), (4, r#"{"a": 1}"#.into()), (5, "last".into())]);
        assert_eq!(count(&path), Some(3));
    }

    #[test]
    fn an_unfinished_reply_is_cut_and_foreign_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::fs::write(&path, "{\"id\": 1}\n{\"custom_id\": \"a\", \"id\": 2}\n{\"id\": 3, \"te").unwrap();
        let (mut sink, done) = resume_at(&path).unwrap();
        assert_eq!((done.len(), done["1"], done["\"a\""]), (2, 1, 1));
        sink.write("{\"id\": 3}\n").unwrap();
        sink.finish().unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("2}\n{\"id\": 3}\n"));
        std::fs::write(&path, "my notes\n").unwrap();
        assert!(resume_at(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "my notes\n");
    }
}
