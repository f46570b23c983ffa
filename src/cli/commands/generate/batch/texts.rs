//! The records of a batch as texts of one scheduler: one at a time, or with `--parallel` several
//! that share the target's passes.
//!
//! An answered record makes room for the next one. Replies are written in the order of the records,
//! and equal those of each record alone. A prefix shared with the prompt before it in the same
//! place is not read again.

use super::job::RecordLine;
use super::records::{Next, Records, Replies};
use super::reply::RecordAnswer;
use super::{Batch, Prepared, failure};
use crate::cli::io::record::Usage;
use crate::cli::options::finish_prompts;
use crate::decode::{Flow, Request, Scheduler};
use crate::runtime::answers::{AnswerEvent, AnswerRequest, Answers, FinishReason, Finished};
use crate::runtime::devices::npu;
use crate::runtime::{Drafting, Started};
use crate::util::units::thousands;
use anyhow::{Error, Result};
use std::time::Duration;

/// How long an idle batch waits for a record before it looks whether it was interrupted.
const PATIENCE: Duration = Duration::from_millis(100);

/// Data of a record's reply beside its answer.
struct OpenRecord {
    /// Number of the reply.
    number: u64,
    text: String,
    reasoning: String,
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
    let mut prompts = batch.session.prompt_cache(batch.prompts.as_ref(), &target, batch.ui)?;
    let scheduler = Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, interrupt)
        .with_prompt_cache(prompts.as_mut());
    let mut answers = Answers::new(scheduler, &batch.session.tokenizer);
    answer_all(batch, &mut answers, records, replies)?;
    let passes = answers.scheduler().passes();
    let each = replies.tokens as f64 / passes.max(1) as f64;
    batch.ui.detail(1, format!("{} passes, {each:.2} tokens a pass", thousands(passes)));
    finish_prompts(&mut prompts, &mut target, interrupt, batch.ui);
    costs.keep(&drafting, batch.ui);
    npu::say(target.engine(), batch.ui);
    Ok(())
}

fn answer_all(
    batch: &Batch<'_>,
    answers: &mut Answers<'_, '_, OpenRecord>,
    records: &mut Records<'_>,
    replies: &mut Replies<'_>,
) -> Result<()> {
    let (mut is_end, mut failed) = (false, Ok(()));
    while batch.interrupt.exit_code().is_none() {
        while answers.has_room() && !is_end && batch.interrupt.exit_code().is_none() {
            // A batch that has something to do does not wait for more.
            let patience = if answers.is_empty() { PATIENCE } else { Duration::ZERO };
            match records.next(patience) {
                Ok(Next::Record(line)) => admit(batch, answers, *line, replies)?,
                Ok(Next::Passed) => replies.pass(),
                Ok(Next::Waiting) => break,
                Ok(Next::End) => is_end = true,
                // The records before the error are answered nevertheless.
                Err(error) => (is_end, failed) = (true, Err(error)),
            }
        }
        if is_end && answers.is_empty() {
            break;
        }
        let finished = answers.step(&mut |open, event| {
            match event {
                AnswerEvent::Text(text) => open.text.push_str(text),
                AnswerEvent::Thought(text) => open.reasoning.push_str(text),
                AnswerEvent::Read(_) => {}
            }
            Flow::Continue
        })?;
        finished.into_iter().try_for_each(|finished| reply(finished, replies))?;
    }
    failed
}

/// Begins a record's answer, or gives it where it is known.
fn admit(
    batch: &Batch<'_>,
    answers: &mut Answers<'_, '_, OpenRecord>,
    line: RecordLine,
    replies: &mut Replies<'_>,
) -> Result<()> {
    let prepared = match &line.job {
        Ok(job) => batch.prepare(job, line.seed(batch.config.seed)).map_err(failure),
        Err(failure) => Err(Ok(failure.clone())),
    };
    let number = replies.open(line);
    let Prepared { history, sampler, constrained, seed, stops, max_tokens } = match prepared {
        Ok(prepared) => prepared,
        Err(failure) => return replies.answer(number, Err(failure?)),
    };
    let (text, reasoning) = Default::default();
    let data = OpenRecord { number, text, reasoning, seed };
    let text = Request::new(history, sampler, max_tokens);
    let request = AnswerRequest { text, constrained, stops, shows_calls: false, data };
    match answers.admit(request) {
        Ok(_) => Ok(()),
        Err(finished) => reply(*finished, replies),
    }
}

/// Answers a record, unless an interruption came first.
fn reply(finished: Finished<OpenRecord>, replies: &mut Replies<'_>) -> Result<()> {
    let usage = Usage {
        prompt_tokens: finished.prompt_tokens,
        completion_tokens: finished.completion_tokens(),
    };
    let checked = match finished.reason {
        Ok(FinishReason::Interrupted) => return Ok(()),
        Ok(_) => finished.check().map_err(Error::from),
        Err(_) => Ok(()),
    };
    let Finished { data, rest, reason, .. } = finished;
    let OpenRecord { number, mut text, reasoning, seed } = data;
    text.push_str(&rest);
    match checked.and(reason) {
        Ok(finish_reason) => {
            let answer = RecordAnswer { text, reasoning, finish_reason, usage, seed };
            replies.answer(number, Ok(answer))
        }
        Err(error) => replies.answer(number, Err(failure(error)?)),
    }
}
