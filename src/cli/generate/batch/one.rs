//! A batch answered record by record. Records share the target's cache: what a prompt has in common
//! with the one before it is not read again.

use super::job::{Failure, Job};
use super::records::{Next, Records, Replies};
use super::reply::Answer;
use super::{Batch, Prepared, failure, finish_reason};
use crate::cli::record::Usage;
use crate::decode::text::TextStream;
use crate::decode::{self, Event, Flow, Limits, Stats};
use crate::engine::Timeline;
use crate::runtime::Started;
use crate::runtime::drafting::Drafting;
use anyhow::Result;
use std::time::Duration;

pub fn run(
    batch: &Batch<'_>,
    started: Started<Drafting>,
    records: &mut Records<'_>,
    replies: &mut Replies<'_>,
) -> Result<()> {
    let Started { target, drafts: drafting, costs, .. } = started;
    let mut one = One { batch, target, drafting };
    loop {
        let line = match records.next(Duration::MAX)? {
            Next::Record(line) => line,
            Next::Passed => {
                replies.pass();
                continue;
            }
            Next::Waiting | Next::End => break,
        };
        let answer = match &line.job {
            Ok(job) => one.answer(job, line.seed(batch.config.seed))?,
            Err(failure) => Some(Err(failure.clone())),
        };
        // What an interruption cut short is not an answer; --resume will ask again.
        let Some(answer) = answer else { break };
        let number = replies.open(*line);
        replies.answer(number, answer)?;
        if batch.interrupt.exit_code().is_some() {
            break;
        }
    }
    costs.keep(&mut one.drafting, batch.ui);
    crate::runtime::npu::say(one.target.engine().assist().as_ref(), batch.ui);
    Ok(())
}

struct One<'a> {
    batch: &'a Batch<'a>,
    target: Timeline,
    drafting: Drafting,
}

impl One<'_> {
    /// Answers one record; `None` if an interruption came first. What no other record would survive
    /// is an error.
    fn answer(&mut self, job: &Job, seed: u64) -> Result<Option<Result<Answer, Failure>>> {
        match self.generate(job, seed) {
            Ok(answer) => Ok(answer.map(Ok)),
            Err(e) => Ok(Some(Err(failure(e)?))),
        }
    }

    fn generate(&mut self, job: &Job, seed: u64) -> Result<Option<Answer>> {
        let batch = self.batch;
        let Prepared { mut history, sampler, constrained, seed, stops, max_tokens } =
            batch.prepare(job, seed)?;
        let prompt_tokens = history.len();
        let limits = Limits {
            max_tokens,
            stop_ids: &batch.session.stop_ids,
            interrupt: batch.interrupt.flag(),
        };
        let mut stream = TextStream::new(&batch.session.tokenizer, &stops);
        let (mut text, mut stats) = (String::new(), Stats::default());
        let on_event = &mut |event| {
            if let Event::Token(token) = event {
                text.push_str(stream.push(token));
                if stream.is_stopped() {
                    return Flow::Stop;
                }
            }
            Flow::Continue
        };
        let Drafting { drafter, policy, .. } = &mut self.drafting;
        let stop = decode::generate(
            &mut self.target,
            drafter.as_mut(),
            policy,
            &sampler,
            &mut history,
            &limits,
            &mut stats,
            on_event,
        )?;
        text.push_str(stream.finish());
        let completion_tokens = history.len() - prompt_tokens;
        let Some(finish_reason) = finish_reason(stop, stream.is_stopped()) else { return Ok(None) };
        constrained.check(&history, completion_tokens, stream.is_stopped())?;
        Ok(Some(Answer {
            text,
            finish_reason,
            usage: Usage { prompt_tokens, completion_tokens },
            seed,
        }))
    }
}
