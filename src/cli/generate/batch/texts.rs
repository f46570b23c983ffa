//! The records of a batch as texts of one scheduler: one at a time, or with `--parallel` several
//! that share the target's passes.
//!
//! A record that is answered makes place for the next one. Replies are written in the order of the
//! records all the same, and say what they say alone. What a prompt has in common with one before
//! it in the same place is not read again.

use super::job::Line;
use super::records::{Next, Records, Replies};
use super::reply::Answer;
use super::{Batch, Prepared, failure};
use crate::cli::answer::Growing;
use crate::cli::record::Usage;
use crate::decode::{Ended, Event, Flow, Request, Scheduler, Stats, Stop};
use crate::runtime::{Drafting, Started, npu};
use crate::tensor::Token;
use crate::util::units::thousands;
use anyhow::Result;
use std::time::Duration;

/// How long an idle batch waits for a record before it looks whether it was interrupted.
const PATIENCE: Duration = Duration::from_millis(100);

/// A record in a sequence of the target.
struct Seat<'a> {
    /// Of its reply.
    number: u64,
    growing: Growing<'a>,
    text: String,
    seed: u64,
}

pub fn run(
    batch: &Batch<'_>,
    started: Started,
    records: &mut Records<'_>,
    replies: &mut Replies<'_>,
) -> Result<()> {
    let Started { mut target, drafts: mut drafting, costs, .. } = started;
    let Drafting { drafter, policy, .. } = &mut drafting;
    let (stop_ids, interrupt) = (&batch.session.stop_ids, batch.interrupt.flag());
    let texts = Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, interrupt);
    let seats = (0..batch.options.batch.parallel).map(|_| None).collect();
    let mut hall = Hall { batch, seats, texts };
    hall.answer_all(records, replies)?;
    let passes = hall.texts.passes();
    let each = replies.tokens as f64 / passes.max(1) as f64;
    batch.ui.detail(1, format!("{} passes, {each:.2} tokens a pass", thousands(passes)));
    costs.keep(&drafting, batch.ui);
    npu::say(target.engine(), batch.ui);
    Ok(())
}

struct Hall<'a> {
    batch: &'a Batch<'a>,
    /// By sequence.
    seats: Vec<Option<Seat<'a>>>,
    texts: Scheduler<'a>,
}

impl Hall<'_> {
    fn answer_all(&mut self, records: &mut Records<'_>, replies: &mut Replies<'_>) -> Result<()> {
        let (mut is_end, mut failed) = (false, Ok(()));
        while self.batch.interrupt.exit_code().is_none() {
            while self.texts.has_room() && !is_end && self.batch.interrupt.exit_code().is_none() {
                // Who has something to do does not wait for more.
                let patience = if self.texts.running() > 0 { Duration::ZERO } else { PATIENCE };
                match records.next(patience) {
                    Ok(Next::Record(line)) => self.admit(*line, replies)?,
                    Ok(Next::Passed) => replies.pass(),
                    Ok(Next::Waiting) => break,
                    Ok(Next::End) => is_end = true,
                    // Those before it are answered nevertheless.
                    Err(error) => (is_end, failed) = (true, Err(error)),
                }
            }
            if is_end && self.texts.running() == 0 {
                break;
            }
            self.step(replies)?;
        }
        failed
    }

    /// Gives a record a seat, or its answer where that is known.
    fn admit(&mut self, line: Line, replies: &mut Replies<'_>) -> Result<()> {
        let prepared = match &line.job {
            Ok(job) => self.batch.prepare(job, line.seed(self.batch.config.seed)).map_err(failure),
            Err(failure) => Err(Ok(failure.clone())),
        };
        let number = replies.open(line);
        let Prepared { history, sampler, constrained, seed, stops, max_tokens } = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => return replies.answer(number, Err(failure?)),
        };
        let tokenizer = &self.batch.session.tokenizer;
        let growing = Growing::new(tokenizer, &stops, constrained, history.len());
        let prompt = history.clone();
        let seat = Seat { number, growing, text: String::new(), seed };
        let stats = Stats::default();
        let request = Request { history, sampler, max_tokens, stats, chances: None };
        match self.texts.admit(request) {
            Ok(sequence) => {
                self.seats[sequence] = Some(seat);
                Ok(())
            }
            Err(error) => seat.end(&prompt, Err(error), replies),
        }
    }

    /// One pass.
    fn step(&mut self, replies: &mut Replies<'_>) -> Result<()> {
        let seats = &mut self.seats;
        let ended = self.texts.step(&mut |sequence, event| {
            let Event::Token(token) = event else { return Flow::Continue };
            let seat = seats[sequence].as_mut().expect("a text has a seat");
            seat.text.push_str(seat.growing.push(token));
            if seat.growing.is_stopped() { Flow::Stop } else { Flow::Continue }
        })?;
        for Ended { sequence, history, stop, .. } in ended {
            let seat = self.seats[sequence].take().expect("a text has a seat");
            seat.end(&history, stop, replies)?;
        }
        Ok(())
    }
}

impl Seat<'_> {
    /// Answers the record, unless an interruption came first.
    fn end(
        mut self,
        history: &[Token],
        stop: Result<Stop>,
        replies: &mut Replies<'_>,
    ) -> Result<()> {
        self.text.push_str(self.growing.finish());
        let completion_tokens = self.growing.completion_tokens(history);
        let usage = Usage { prompt_tokens: self.growing.prompt_tokens, completion_tokens };
        let reason = stop.map(|stop| self.growing.reason(stop)).and_then(|reason| {
            if reason.is_some() {
                self.growing.check(history)?;
            }
            Ok(reason)
        });
        match reason {
            Ok(None) => Ok(()),
            Ok(Some(finish_reason)) => replies.answer(
                self.number,
                Ok(Answer { text: self.text, finish_reason, usage, seed: self.seed }),
            ),
            Err(error) => replies.answer(self.number, Err(failure(error)?)),
        }
    }
}
