//! The records that are this process's to answer, and their replies in the same order.

use super::job::{Failure, Line};
use super::place::{Done, Lines, Shard, Sink};
use super::reply::{self, Answer};
use anyhow::Result;
use indicatif::ProgressBar;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Lines that are read ahead of who answers them.
const AHEAD: usize = 64;

enum From {
    Here(Lines),
    /// Another thread reads: who writes the records may want answers before there are more of them.
    Thread(Receiver<Result<(usize, Vec<u8>)>>),
}

/// Records to be answered.
pub struct Records {
    from: From,
    shard: Option<Shard>,
    /// Answered by an earlier run.
    done: Done,
    nth: usize,
}

/// What there is to do.
pub enum Next {
    Record(Box<Line>),
    /// A record of others, or one that is answered.
    Passed,
    /// Nothing has come so far.
    Waiting,
    End,
}

impl Records {
    /// `ahead`: whether [`next`](Self::next) can say that it would have to wait.
    pub fn new(lines: Lines, shard: Option<Shard>, done: Done, ahead: bool) -> Records {
        let from = if ahead { From::Thread(read_ahead(lines)) } else { From::Here(lines) };
        Records { from, shard, done, nth: 0 }
    }

    /// The next record, waiting so long for it where another thread reads.
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
        let line = Line::parse(&bytes, number);
        if let Some(left) = self.done.get_mut(&line.id.to_string()).filter(|n| **n > 0) {
            *left -= 1;
            return Ok(Next::Passed);
        }
        Ok(Next::Record(Box::new(line)))
    }
}

/// A thread that reads lines until nobody wants more. One that waits for input does not keep the process from its end.
fn read_ahead(mut lines: Lines) -> Receiver<Result<(usize, Vec<u8>)>> {
    let (send, receive) = sync_channel(AHEAD);
    std::thread::spawn(move || {
        while let Some(line) = lines.take().transpose() {
            let failed = line.is_err();
            if send.send(line).is_err() || failed {
                break;
            }
        }
    });
    receive
}

/// Replies on their way: each is written once those before it are.
pub struct Replies<'a> {
    pub sink: Sink,
    model: &'a str,
    bar: ProgressBar,
    /// Records that were taken and whose replies are not written, oldest first.
    open: VecDeque<(Line, Option<Result<Answer, Failure>>)>,
    /// Replies written.
    pub answered: u64,
    pub failed: u64,
    /// Tokens of those replies.
    pub tokens: u64,
}

impl<'a> Replies<'a> {
    pub fn new(sink: Sink, model: &'a str, bar: ProgressBar) -> Replies<'a> {
        Replies { sink, model, bar, open: VecDeque::new(), answered: 0, failed: 0, tokens: 0 }
    }

    /// A record that nobody has to answer here.
    pub fn pass(&self) {
        self.bar.inc(1);
    }

    /// Takes a record and gives the number that its answer goes by.
    pub fn open(&mut self, line: Line) -> u64 {
        self.open.push_back((line, None));
        self.answered + self.open.len() as u64 - 1
    }

    /// Answers a record, and writes what can be written.
    pub fn answer(&mut self, number: u64, answer: Result<Answer, Failure>) -> Result<()> {
        self.open[(number - self.answered) as usize].1 = Some(answer);
        while let Some((line, Some(answer))) = self.open.front() {
            self.failed += answer.is_err() as u64;
            self.tokens += answer.as_ref().map_or(0, |a| a.usage.completion_tokens as u64);
            self.sink.write(&reply::line(line, self.model, answer))?;
            self.open.pop_front();
            self.answered += 1;
            self.bar.inc(1);
        }
        Ok(())
    }

    /// What was answered behind a record that was not is not written: a run that goes on from here asks again.
    pub fn end(self) -> Replies<'a> {
        self.bar.finish_and_clear();
        self
    }
}
