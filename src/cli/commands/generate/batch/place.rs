//! Input and output of a batch, and the shard of this process.

use super::held::{Done, HeldAnswer};
use super::resume::Growing;
use crate::cli::io::destination::{Destination, Writer};
use crate::error::Fault;
use crate::os::files::FileId;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::str::FromStr;

/// `--shard i/n`: every n-th record, starting with the i-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub index: usize,
    pub count: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let parts = s.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, count)) if (1..=count).contains(&index) => Ok(Shard { index, count }),
            _ => Err("expected i/n with i from 1 to n, such as 2/3".into()),
        }
    }
}

impl Shard {
    /// Returns whether the shard contains the record with index `nth`, which starts at 0.
    pub fn has(self, nth: usize) -> bool {
        nth % self.count == self.index - 1
    }
}

/// Lines of a batch, without blank lines.
pub struct RecordLines {
    from: Box<dyn BufRead + Send>,
    name: String,
    number: usize,
}

/// Limit of a line in bytes. The rest of a longer line is dropped.
const LONGEST: usize = crate::cli::io::text_file::MAX_BYTES;

impl RecordLines {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path) -> Result<RecordLines> {
        if path == Path::new("-") {
            return Ok(RecordLines {
                from: Box::new(BufReader::new(std::io::stdin())),
                name: "standard input".into(),
                number: 0,
            });
        }
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| Fault::model(format!("cannot read {name}")))?;
        ensure!(!file.metadata()?.is_dir(), Fault::model(format!("{name} is a directory")));
        Ok(RecordLines { from: Box::new(BufReader::new(file)), name, number: 0 })
    }

    /// Reads the next line and its number.
    ///
    /// A line over the limit is cut, so that it is not valid JSON.
    pub fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        loop {
            let mut line = Vec::new();
            let what = || Fault::model(format!("cannot read {}", self.name));
            let read = (&mut self.from)
                .take(LONGEST as u64)
                .read_until(b'\n', &mut line)
                .with_context(what)?;
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

/// Counts the records of a file; `None` if the input can be read only once.
pub fn count(path: &Path) -> Option<u64> {
    if path == Path::new("-") || !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut lines = RecordLines::open(path).ok()?;
    let mut n = 0;
    while lines.take().ok()?.is_some() {
        n += 1;
    }
    Some(n)
}

/// Output of a batch.
pub enum Sink {
    /// Written directly, or a file that appears when it is complete.
    New(Writer),
    /// A file that grows line by line and keeps its earlier lines.
    Growing(Growing),
}

impl Sink {
    /// Writes a reply, which replaces `failure` if there was one.
    ///
    /// The reply has been passed to the system when this returns.
    pub fn write(&mut self, line: &str, failure: Option<HeldAnswer>) -> Result<()> {
        match self {
            Sink::New(writer) => writer.write(line.as_bytes()),
            Sink::Growing(file) => file.write(line, failure),
        }
    }

    /// Returns whether this is a file that appears when it is complete.
    pub fn appears_whole(&self) -> bool {
        matches!(self, Sink::New(writer) if writer.appears_whole())
    }

    pub fn finish(self) -> Result<()> {
        match self {
            Sink::New(writer) => writer.finish(),
            Sink::Growing(file) => file.finish(),
        }
    }
}

/// Output of a batch that is checked to be writable but not opened yet.
pub enum ReplyPlace<'a> {
    New(Writer),
    Resume(&'a Destination),
}

impl ReplyPlace<'_> {
    /// Returns the place that `--output` or `--resume` names.
    ///
    /// Refuses the file of the batch's own records.
    pub fn of<'a>(
        output: Option<&'a Destination>,
        resume: Option<&'a Destination>,
        from: &Path,
    ) -> Result<ReplyPlace<'a>> {
        let input = if from == Path::new("-") { FileId::of_stdin() } else { FileId::of_path(from) };
        let (place, id) = match resume {
            Some(out) => (ReplyPlace::Resume(out), FileId::of_path(out.path()).ok().flatten()),
            None => {
                let writer = output.map_or_else(Writer::stdout, Destination::open)?;
                let id = writer.id();
                (ReplyPlace::New(writer), id)
            }
        };
        if id.is_some() && id == input.ok().flatten() {
            let name = if from == Path::new("-") {
                "standard input".into()
            } else {
                from.display().to_string()
            };
            let fault =
                Fault::usage(format!("the answers would be written into the batch itself, {name}"));
            return Err(fault
                .help("name another file for the answers: --batch prompts.jsonl -o answers.jsonl")
                .into());
        }
        Ok(place)
    }

    /// Opens the output, and reads the answers in it.
    pub fn open(self) -> Result<(Sink, Done)> {
        match self {
            ReplyPlace::New(writer) => Ok((Sink::New(writer), Done::default())),
            ReplyPlace::Resume(out) => {
                let (file, done) = Growing::open(out)?;
                Ok((Sink::Growing(file), done))
            }
        }
    }
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
        let mut lines = RecordLines::open(&path).unwrap();
        let mut all = Vec::new();
        while let Some((number, line)) = lines.take().unwrap() {
            all.push((number, String::from_utf8(line).unwrap()));
        }
        assert_eq!(all, [(1, "{}".into()), (4, r#"{"a": 1}"#.into()), (5, "last".into())]);
        assert_eq!(count(&path), Some(3));
    }
}
