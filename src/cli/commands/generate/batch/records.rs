//! The records that this process answers, and their replies in the same order.

use super::held::Done;
use super::job;
use super::job::{Asked, Failure, RecordLine};
use super::place::{RecordLines, Shard, Sink};
use super::reply::{self, Reply};
use crate::cli::io::ui::Ui;
use crate::error::{Fault, no_thread};
use anyhow::{Context, Result};
use indicatif::ProgressBar;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Limit of lines that are read ahead.
const AHEAD: usize = 64;

/// A line and its number, or the error of reading it.
type Numbered = Result<(usize, Vec<u8>)>;

enum From {
    Here(RecordLines),
    /// Read by a thread: the writer of the records may wait for answers before it writes more.
    Thread(Receiver<Numbered>),
}

/// Limit of unknown fields that are reported.
const NAMED: usize = 8;

/// Records to answer.
pub struct Records<'a> {
    from: From,
    shard: Option<Shard>,
    /// Answers of an earlier run.
    done: Done,
    nth: usize,
    /// Number of records with a kept answer.
    pub kept: u64,
    ids: IdLines,
    /// Unknown fields that were reported.
    unknown: HashSet<String>,
    /// Whether a record with an unknown field fails.
    strict: bool,
    ui: &'a Ui,
}

/// The line of each id, by the id's hash.
#[derive(Default)]
struct IdLines {
    hasher: RandomState,
    lines: HashMap<u64, usize>,
}

impl IdLines {
    /// Remembers a record. Returns the number of an earlier line with the same id.
    fn insert(&mut self, line: &RecordLine) -> Option<usize> {
        let hash = self.hasher.hash_one(line.id.to_string());
        self.lines.insert(hash, line.number)
    }
}

/// The next step of a batch.
pub enum Next {
    Record(Box<(RecordLine, Asked)>),
    /// A record of another shard, or one that is already answered.
    Passed,
    /// No record has arrived yet.
    Waiting,
    End,
}

impl<'a> Records<'a> {
    /// Makes the reader of records.
    ///
    /// With `ahead`, a thread reads, and [`next`](Self::next) can return [`Next::Waiting`]. With
    /// `strict`, unknown fields are failures.
    pub fn new(
        lines: RecordLines,
        shard: Option<Shard>,
        done: Done,
        ahead: bool,
        strict: bool,
        ui: &'a Ui,
    ) -> Result<Records<'a>> {
        let from = if ahead { From::Thread(read_ahead(lines)?) } else { From::Here(lines) };
        let (ids, unknown) = (IdLines::default(), HashSet::new());
        Ok(Records { from, shard, done, nth: 0, kept: 0, ids, unknown, strict, ui })
    }

    /// Returns the next record. Waits at most `patience` for a record from another thread.
    pub fn next(&mut self, patience: Duration) -> Result<Next> {
        let line = match &mut self.from {
            From::Here(lines) => lines.take()?,
            From::Thread(lines) => match lines.recv_timeout(patience) {
                Ok(line) => Some(line?),
                Err(RecvTimeoutError::Timeout) => return Ok(Next::Waiting),
                Err(RecvTimeoutError::Disconnected) => None,
            },
        };
        let Some((number, bytes)) = line else { return Ok(Next::End) };
        let mine = self.shard.is_none_or(|shard| shard.has(self.nth));
        self.nth += 1;
        if !mine {
            return Ok(Next::Passed);
        }
        let (mut line, mut asked) = RecordLine::parse(&bytes, number);
        if let Some(other) = self.ids.insert(&line) {
            let twice = format!("lines {other} and {number} have the same id, {}", line.id);
            self.ui.once(
                "ids",
                format!(
                    "{twice}: they get the same seed, and --resume cannot tell their answers apart"
                ),
            );
        }
        line.failure = match self.done.take(&line.id) {
            Some(held) if !held.failed => {
                self.kept += 1;
                return Ok(Next::Passed);
            }
            held => held,
        };
        if let Some(failure) = self.look_at_unknown(&line) {
            asked = Asked::Ours(Err(failure));
        }
        Ok(Next::Record(Box::new((line, asked))))
    }

    /// Reports unknown fields, which are probably misspelt: once for each name, or as the record's
    /// failure.
    fn look_at_unknown(&mut self, line: &RecordLine) -> Option<Failure> {
        for name in &line.unknown {
            let what = format!("unknown field {}", serde_json::Value::from(name.as_str()));
            let meant = job::meant(name).map(|meant| format!("did you mean \"{meant}\"?"));
            if self.strict {
                let fault = Fault::model(format!("the record has an {what}"));
                let help = meant.unwrap_or_else(|| "without --strict it is ignored".into());
                return Some(Failure::of(&fault.help(help).into()));
            }
            if self.unknown.len() < NAMED && self.unknown.insert(name.clone()) {
                let meant = meant.map(|meant| format!("; {meant}")).unwrap_or_default();
                self.ui.note(format!("line {}: the {what} is ignored{meant}", line.number));
            }
        }
        None
    }
}

/// Starts a thread that reads lines until the receiver is dropped.
///
/// A thread that waits for input does not keep the process from ending.
fn read_ahead(mut lines: RecordLines) -> Result<Receiver<Numbered>> {
    let (send, receive) = sync_channel(AHEAD);
    let read = move || {
        while let Some(line) = lines.take().transpose() {
            let failed = line.is_err();
            if send.send(line).is_err() || failed {
                break;
            }
        }
    };
    std::thread::Builder::new().spawn(read).with_context(no_thread)?;
    Ok(receive)
}

/// Replies in the order of the records. Each is written after all earlier ones.
pub struct Replies {
    pub sink: Sink,
    bar: ProgressBar,
    /// Records without a written reply, oldest first.
    open: VecDeque<(RecordLine, Option<Reply>)>,
    /// Number of replies written.
    pub answered: u64,
    pub failed: u64,
    /// Number of tokens of those replies.
    pub tokens: u64,
}

impl Replies {
    pub fn new(sink: Sink, bar: ProgressBar) -> Replies {
        Replies { sink, bar, open: VecDeque::new(), answered: 0, failed: 0, tokens: 0 }
    }

    /// Counts a record that needs no answer.
    pub fn pass(&self) {
        self.bar.inc(1);
    }

    /// Adds a record. Returns the number that identifies its answer.
    pub fn open(&mut self, line: RecordLine) -> u64 {
        self.open.push_back((line, None));
        self.answered + self.open.len() as u64 - 1
    }

    /// Sets the answer to a record. Writes all replies that are next in order.
    pub fn answer(&mut self, number: u64, answer: Reply) -> Result<()> {
        self.open[(number - self.answered) as usize].1 = Some(answer);
        while let Some((line, Some(answer))) = self.open.front() {
            self.failed += answer.is_failure() as u64;
            self.tokens += answer.tokens();
            self.sink.write(&reply::line(&line.id, answer), line.failure)?;
            self.open.pop_front();
            self.answered += 1;
            self.bar.inc(1);
        }
        Ok(())
    }

    /// Ends the output.
    ///
    /// Answers after an unanswered record are not written; a resumed run generates them again.
    pub fn end(self) -> Replies {
        self.bar.finish_and_clear();
        self
    }
}
