//! Generates the records of a batch in one scheduler: one at a time, or with `--parallel` several
//! that share the target's passes.
//!
//! After a record is answered, the next one starts. Replies are written in the order of the
//! records, and equal those of each record alone. A prefix that the previous prompt of a slot has
//! in common with the next one is not read again.

use super::call::{CallAnswer, OpenCall, refused};
use super::job::{Asked, Failure, RecordLine};
use super::records::{Next, Records, Replies};
use super::reply::{RecordAnswer, Reply};
use super::{Batch, failure};
use crate::cli::api::error::ApiError;
use crate::cli::api::form::CollectedAnswer;
use crate::cli::io::record::Usage;
use crate::cli::options::finish_prompts;
use crate::decode::{Flow, Scheduler};
use crate::runtime::answers::{AnswerEvent, AnswerRequest, Answers, FinishReason, Finished};
use crate::runtime::devices::npu;
use crate::runtime::{Drafting, Started};
use crate::util::units::thousands;
use anyhow::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Time that an idle batch waits for a record before it checks for an interruption.
const PATIENCE: Duration = Duration::from_millis(100);

/// Data of an unfinished answer.
struct OpenAnswer {
    /// Number of the reply that the answer belongs to.
    number: u64,
    part: ReplyPart,
    text: String,
    reasoning: String,
}

/// An answer's part of a reply.
enum ReplyPart {
    /// The reply to a record, with the seed of its text.
    Record(u64),
    /// One of the answers to a line of OpenAI's form.
    Choice(usize),
}

impl OpenAnswer {
    fn new(number: u64, part: ReplyPart) -> OpenAnswer {
        OpenAnswer { number, part, text: String::new(), reasoning: String::new() }
    }
}

pub fn run(
    batch: &Batch<'_>,
    started: Started,
    records: &mut Records<'_>,
    replies: &mut Replies,
) -> Result<()> {
    let Started { mut target, drafts: mut drafting, costs, .. } = started;
    let Drafting { drafter, policy, .. } = &mut drafting;
    let (stop_ids, interrupt) = (&batch.session.stop_ids, batch.interrupt.flag());
    let mut prompts = batch.session.prompt_cache(batch.prompts.as_ref(), &target, batch.ui)?;
    let scheduler = Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, interrupt)
        .with_prompt_cache(prompts.as_mut());
    let mut answers = Answers::new(scheduler, &batch.session.tokenizer);
    let (waiting, calls) = Default::default();
    Texts { batch, answers: &mut answers, waiting, calls, replies }.answer_all(records)?;
    let passes = answers.scheduler().passes();
    let each = replies.tokens as f64 / passes.max(1) as f64;
    batch.ui.detail(1, format!("{} passes, {each:.2} tokens a pass", thousands(passes)));
    finish_prompts(&mut prompts, &mut target, interrupt, batch.ui);
    costs.keep(&drafting, batch.ui);
    npu::say(target.engine(), batch.ui);
    Ok(())
}

/// The answers of a batch.
struct Texts<'t, 'a, 'b> {
    batch: &'b Batch<'b>,
    answers: &'t mut Answers<'a, 'b, OpenAnswer>,
    /// Requests for further answers to lines that were read.
    waiting: VecDeque<AnswerRequest<OpenAnswer>>,
    /// Calls of OpenAI's form with unfinished answers, by the number of their reply.
    calls: HashMap<u64, OpenCall>,
    replies: &'t mut Replies,
}

impl Texts<'_, '_, '_> {
    fn answer_all(&mut self, records: &mut Records<'_>) -> Result<()> {
        let (mut is_end, mut failed) = (false, Ok(()));
        let interrupt = self.batch.interrupt;
        while interrupt.exit_code().is_none() {
            while self.answers.has_room() && interrupt.exit_code().is_none() {
                if let Some(request) = self.waiting.pop_front() {
                    self.admit(request)?;
                    continue;
                }
                if is_end {
                    break;
                }
                // A batch with unfinished answers does not wait for more records.
                let patience = if self.answers.is_empty() { PATIENCE } else { Duration::ZERO };
                match records.next(patience) {
                    Ok(Next::Record(record)) => self.open(*record)?,
                    Ok(Next::Passed) => self.replies.pass(),
                    Ok(Next::Waiting) => break,
                    Ok(Next::End) => is_end = true,
                    // The records before the error are still answered.
                    Err(error) => (is_end, failed) = (true, Err(error)),
                }
            }
            if is_end && self.answers.is_empty() && self.waiting.is_empty() {
                break;
            }
            let finished = self.answers.step(&mut |open, event| {
                match event {
                    AnswerEvent::Text(text) => open.text.push_str(text),
                    AnswerEvent::Thought(text) => open.reasoning.push_str(text),
                    AnswerEvent::Read(_) => {}
                }
                Flow::Continue
            })?;
            finished.into_iter().try_for_each(|finished| self.reply(finished))?;
        }
        failed
    }

    /// Starts the answers to a line, or replies at once if the answer is known.
    fn open(&mut self, (line, asked): (RecordLine, Asked)) -> Result<()> {
        let (id, seed) = (line.id.clone(), line.seed(self.batch.config.seed));
        let number = self.replies.open(line);
        match asked {
            Asked::Ours(job) => {
                let data = |seed| OpenAnswer::new(number, ReplyPart::Record(seed));
                let prepared = match job {
                    Ok(job) => self.batch.prepare(&job, seed, data).map_err(failure),
                    Err(failure) => Err(Ok(failure)),
                };
                match prepared {
                    Ok(request) => self.admit(request),
                    Err(failure) => self.replies.answer(number, Reply::Ours(Err(failure?))),
                }
            }
            Asked::OpenAi(call) => {
                let data = |choice| OpenAnswer::new(number, ReplyPart::Choice(choice));
                let prepared = match call {
                    Ok(call) => call.prepare(self.batch, &id, seed, &data)?,
                    Err(error) => Err(error),
                };
                match prepared {
                    Ok((call, requests)) => {
                        self.calls.insert(number, call);
                        self.waiting.extend(requests);
                        Ok(())
                    }
                    Err(error) => self.replies.answer(number, Reply::OpenAi(Err(error))),
                }
            }
        }
    }

    fn admit(&mut self, request: AnswerRequest<OpenAnswer>) -> Result<()> {
        match self.answers.admit(request) {
            Ok(_) => Ok(()),
            Err(finished) => self.reply(*finished),
        }
    }

    /// Writes the reply of a finished answer, unless an interruption came first.
    fn reply(&mut self, finished: Finished<OpenAnswer>) -> Result<()> {
        if matches!(finished.reason, Ok(FinishReason::Interrupted)) {
            return Ok(());
        }
        let number = finished.data.number;
        let reply = match finished.data.part {
            ReplyPart::Record(seed) => Some(Reply::Ours(record_answer(finished, seed)?)),
            ReplyPart::Choice(choice) => self.call_answer(finished, choice)?.map(Reply::OpenAi),
        };
        reply.map_or(Ok(()), |reply| self.replies.answer(number, reply))
    }

    /// Returns the response to a call after its last answer, or with its first error.
    fn call_answer(
        &mut self,
        finished: Finished<OpenAnswer>,
        choice: usize,
    ) -> Result<Option<Result<CallAnswer, ApiError>>> {
        let number = finished.data.number;
        // A call that failed has its reply already, so its other answers are dropped.
        let Some(call) = self.calls.get_mut(&number) else { return Ok(None) };
        let (prompt, completion) = (finished.prompt_tokens, finished.completion_tokens());
        let Finished { data, rest, reason, stop_string, log_probs, .. } = finished;
        let answer = match reason {
            Ok(reason) => {
                let (text, thought) = (data.text + &rest, data.reasoning);
                let answer = CollectedAnswer { text, thought, log_probs, reason, stop_string };
                call.take(choice, answer, prompt as u64, completion as u64);
                call.answer().map(Ok)
            }
            Err(error) => {
                self.waiting.retain(|request| request.data.number != number);
                Some(Err(refused(error)?))
            }
        };
        if answer.is_some() {
            self.calls.remove(&number);
        }
        Ok(answer)
    }
}

/// Returns the answer to a record, or its failure.
fn record_answer(
    finished: Finished<OpenAnswer>,
    seed: u64,
) -> Result<Result<RecordAnswer, Failure>> {
    let usage = Usage {
        prompt_tokens: finished.prompt_tokens,
        completion_tokens: finished.completion_tokens(),
    };
    let checked = match finished.reason {
        Ok(_) => finished.check().map_err(Error::from),
        Err(_) => Ok(()),
    };
    let Finished { data, rest, reason, .. } = finished;
    let (text, reasoning) = (data.text + &rest, data.reasoning);
    match checked.and(reason) {
        Ok(finish_reason) => Ok(Ok(RecordAnswer { text, reasoning, finish_reason, usage, seed })),
        Err(error) => failure(error).map(Err),
    }
}
