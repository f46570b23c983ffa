//! The engine thread of a model: answers requests in one scheduler.
//!
//! The thread never waits for a client. Texts start and end between passes. Clients that disconnect
//! or do not read are dropped before the next pass. A lost device is opened again, and the texts
//! continue from their histories.

use super::pool::Client;
use super::queue::{ClientEvent, ClientRequest, Delivery, RequestQueue};
use crate::cli::api::answer::{AnswerEnd, AnswerPiece, RequestFigures};
use crate::cli::api::error::ApiError;
use crate::cli::io::ui::Ui;
use crate::decode::{Flow, PageDirectory, PromptCache, Scheduler, StopReason};
use crate::error::{Kind, fault_of};
use crate::os::memory::release_freed;
use crate::runtime::answers::{AnswerEvent, Answers, FinishReason, Finished, Paused};
use crate::runtime::devices::npu;
use crate::runtime::{Drafting, DraftingOptions, Room, Session, Started};
use anyhow::Result;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;

/// Number of device losses within [`WITHIN`] after which the server gives up.
const LOSSES: usize = 3;
const WITHIN: Duration = Duration::from_secs(60);

/// The model and all settings that answers need.
pub struct AnswerEngine<'a> {
    pub session: &'a Session,
    pub drafting: &'a DraftingOptions,
    pub room: Room,
    /// Directory of the prompt cache, if prompts are kept on disk.
    pub prompts: Option<&'a PageDirectory>,
    pub queue: &'a RequestQueue,
    pub ui: &'a Ui,
}

type PausedAnswer<'a> = Paused<'a, Delivery>;

impl AnswerEngine<'_> {
    /// Answers requests until the queue ends.
    ///
    /// Calls `loaded` after each load of the engine. An error ends all texts.
    pub fn run(&self, loaded: &mut dyn FnMut(&Started)) -> Result<()> {
        let result = self.serve(loaded);
        let why = match &result {
            Ok(()) => ApiError::ending(),
            Err(error) => ApiError::of(error),
        };
        self.queue.end(&why);
        result
    }

    fn serve(&self, loaded: &mut dyn FnMut(&Started)) -> Result<()> {
        let start = || self.session.start(self.room, self.drafting, self.ui);
        let (mut started, mut paused, mut losses) = (start()?, Vec::new(), Vec::new());
        loop {
            // The threads that load weights leave freed memory in the allocator. It would grow with
            // each loss of the device.
            release_freed();
            loaded(&started);
            let Err((mut error, answers)) = self.grow(started, paused) else { return Ok(()) };
            paused = answers;
            started = loop {
                if !may_reopen(&error, &mut losses) {
                    for answer in paused {
                        let ended = answer.end(Ok(StopReason::Interrupt));
                        end(ended, Some(ApiError::of(&error)), self.queue);
                    }
                    return Err(error);
                }
                self.queue.metrics.device_losses.add(1);
                self.ui.line(&format!("the device is opened again: {error:#}"));
                match start() {
                    Ok(started) => break started,
                    Err(again) => error = again,
                }
            };
        }
    }

    /// Answers requests with one loaded engine. Paused answers continue.
    fn grow<'s>(
        &'s self,
        started: Started,
        paused: Vec<PausedAnswer<'s>>,
    ) -> Result<(), (anyhow::Error, Vec<PausedAnswer<'s>>)> {
        let Started { mut target, drafts: mut drafting, costs, .. } = started;
        let mut prompts = match self.session.prompt_cache(self.prompts, &target, self.ui) {
            Ok(prompts) => prompts,
            Err(error) => return Err((error, paused)),
        };
        let cut = AtomicBool::new(false);
        let Drafting { drafter, policy, .. } = &mut drafting;
        let stop_ids = &self.session.stop_ids;
        let scheduler = Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, &cut)
            .keeping_prefixes()
            .with_prompt_cache(prompts.as_mut());
        let answers = Answers::new(scheduler, &self.session.tokenizer);
        let (queue, ui, paused) = (self.queue, self.ui, paused.into());
        let mut turns = AnswerLoop { queue, ui, paused, answers, passes: 0, rounds: 0 };
        match turns.answer_all(&cut) {
            Ok(()) => {
                costs.keep(&drafting, self.ui);
                npu::say(target.engine(), self.ui);
                Ok(())
            }
            Err(error) => Err((error, turns.into_paused())),
        }
    }
}

/// Returns whether the device should be opened again after this error.
fn may_reopen(error: &anyhow::Error, losses: &mut Vec<Instant>) -> bool {
    let now = Instant::now();
    losses.retain(|loss| now - *loss < WITHIN);
    losses.push(now);
    losses.len() < LOSSES && fault_of(error).is_some_and(|fault| fault.kind == Kind::Device)
}

/// The loop over the answers of all clients, which take turns.
struct AnswerLoop<'t, 's> {
    queue: &'s RequestQueue,
    ui: &'s Ui,
    /// Answers that gave their sequence to another client or lost their device, oldest first.
    paused: VecDeque<PausedAnswer<'s>>,
    answers: Answers<'t, 's, Delivery>,
    passes: u64,
    rounds: u64,
}

impl<'s> AnswerLoop<'_, 's> {
    fn answer_all(&mut self, cut: &AtomicBool) -> Result<()> {
        loop {
            self.make_room();
            while self.answers.has_room() {
                if self.resume() {
                    continue;
                }
                // While no text runs, prompts are written to disk page by page.
                let is_empty = self.answers.is_empty();
                let is_idle = is_empty && !self.answers.scheduler_mut().write_page()?;
                match self.queue.take(is_idle, |client| self.running(client)) {
                    Some(request) => self.admit(request),
                    None if is_empty && !is_idle && !self.queue.is_over() => {}
                    None => break,
                }
            }
            if self.answers.is_empty() {
                return Ok(());
            }
            cut.store(self.queue.is_over(), Ordering::Relaxed);
            self.drop_gone();
            self.step()?;
        }
    }

    /// Returns the number of running answers of a client.
    fn running(&self, client: Client) -> usize {
        self.answers.running().filter(|(_, delivery)| delivery.client == client).count()
    }

    /// Pauses answers of clients with more than their share while other clients wait.
    ///
    /// At the end no client has two or more answers more than a waiting client. A paused answer
    /// continues later where it stopped.
    fn make_room(&mut self) {
        while !self.answers.has_room() {
            let Some(next) = self.queue.next(|client| self.running(client)) else { return };
            // The latest answer of the client with the most answers is paused.
            let running = self.answers.running().map(|(sequence, delivery)| {
                (self.running(delivery.client), delivery.received, sequence)
            });
            let Some((most, _, sequence)) = running.max() else { return };
            if most < self.running(next) + 2 {
                return;
            }
            self.paused.extend(self.answers.pause(sequence));
            self.queue.metrics.pauses.add(1);
            // The waiting client comes before all paused answers.
            let request = self.queue.take(false, |client| self.running(client));
            request.into_iter().for_each(|request| self.admit(request));
        }
    }

    /// Continues a paused answer, unless a waiting client has fewer answers.
    ///
    /// Returns whether it continued one.
    fn resume(&mut self) -> bool {
        self.paused.retain(|answer| !answer.data().events.is_closed());
        let running = |answer: &PausedAnswer| self.running(answer.data().client);
        let Some(at) = (0..self.paused.len()).min_by_key(|at| running(&self.paused[*at])) else {
            return false;
        };
        let next = self.queue.next(|client| self.running(client));
        if next.is_some_and(|next| self.running(next) < running(&self.paused[at])) {
            return false;
        }
        let mut answer = self.paused.remove(at).expect("it is there");
        let log_probs = std::mem::take(&mut answer.log_probs);
        answer.data_mut().piece.log_probs.extend(log_probs);
        let resumed = self.answers.resume(answer);
        self.began(resumed);
        true
    }

    fn admit(&mut self, request: ClientRequest) {
        let admitted = self.answers.admit(request);
        self.began(admitted);
    }

    /// Ends an answer that could not begin.
    fn began(&mut self, result: Result<usize, Box<Finished<Delivery>>>) {
        if let Err(finished) = result {
            end(*finished, None, self.queue);
        }
        self.count_running();
    }

    fn count_running(&self) {
        self.queue.metrics.running.set(self.answers.scheduler().running() as u64);
    }

    /// Drops the answers of clients that disconnected.
    fn drop_gone(&mut self) {
        let gone = self.answers.running().filter(|(_, delivery)| delivery.events.is_closed());
        let gone: Vec<usize> = gone.map(|(sequence, _)| sequence).collect();
        gone.into_iter().for_each(|sequence| drop(self.answers.pause(sequence)));
    }

    /// Runs one pass and sends its text to the clients.
    fn step(&mut self) -> Result<()> {
        let finished = self.answers.step(&mut |delivery, event| {
            let piece = &mut delivery.piece;
            match event {
                AnswerEvent::Text(text) => piece.text.push_str(text),
                AnswerEvent::Thought(text) => piece.thought.push_str(text),
                AnswerEvent::Read(_) => return Flow::Continue,
            }
            piece.tokens += 1;
            Flow::Continue
        })?;
        let (metrics, scheduler) = (&self.queue.metrics, self.answers.scheduler());
        metrics.passes.add(scheduler.passes() - self.passes);
        self.passes = scheduler.passes();
        metrics.rounds.add(scheduler.rounds() - self.rounds);
        self.rounds = scheduler.rounds();
        finished.into_iter().for_each(|finished| end(finished, None, self.queue));
        let running: Vec<usize> = self.answers.running().map(|(sequence, _)| sequence).collect();
        for sequence in running {
            let Some((delivery, log_probs)) = self.answers.news(sequence) else { continue };
            delivery.piece.log_probs.extend(log_probs);
            if !delivery.tell(self.queue) {
                drop(self.answers.pause(sequence));
            }
        }
        self.count_running();
        let prompts = self.answers.scheduler_mut().prompt_cache();
        prompts.and_then(PromptCache::take_note).iter().for_each(|note| self.ui.note(note));
        Ok(())
    }

    /// Returns the unfinished answers of a lost engine.
    fn into_paused(mut self) -> Vec<PausedAnswer<'s>> {
        let running: Vec<usize> = self.answers.running().map(|(sequence, _)| sequence).collect();
        let running = running.into_iter().filter_map(|sequence| self.answers.pause(sequence));
        running.chain(self.paused).collect()
    }
}

/// Sends the end of an answer: `failure`, or else the answer's own reason.
///
/// An incomplete grammar is not an error, but a finish reason, as with OpenAI's server.
fn end(finished: Finished<Delivery>, failure: Option<ApiError>, queue: &RequestQueue) {
    let completion_tokens = finished.completion_tokens() as u64;
    let Finished { data: mut delivery, rest, prompt_tokens, stats, log_probs, .. } = finished;
    delivery.piece.text.push_str(&rest);
    delivery.piece.log_probs.extend(log_probs);
    if !delivery.tell(queue) {
        return;
    }
    let reason = match (failure, finished.reason) {
        (Some(error), _) => Err(error),
        (None, Ok(FinishReason::Interrupted)) => Err(ApiError::ending()),
        (None, Ok(reason)) => Ok(reason),
        (None, Err(error)) => Err(ApiError::of(&error)),
    };
    let prompt_tokens = prompt_tokens as u64;
    let figures = RequestFigures {
        prompt_tokens,
        // The newest token of a prompt is never cached, because a pass has to score it.
        cached_tokens: prompt_tokens.saturating_sub(1).saturating_sub(stats.prefilled),
        completion_tokens,
        // A pass also picked the token that ended the text.
        picked_tokens: completion_tokens + u64::from(matches!(reason, Ok(FinishReason::Stop))),
        passes: stats.passes,
        decode_time: stats.decode_time,
        first_token: delivery.first_token,
    };
    queue.metrics.prompt_tokens.add(figures.prompt_tokens);
    queue.metrics.cached_tokens.add(figures.cached_tokens);
    let end = AnswerEnd { reason, stop_string: finished.stop_string, figures };
    let _ = delivery.events.try_send((delivery.choice, ClientEvent::End(Box::new(end))));
}

impl Delivery {
    /// Sends the new text. Returns whether the client still reads.
    fn tell(&mut self, queue: &RequestQueue) -> bool {
        if self.piece == AnswerPiece::default() {
            return true;
        }
        let now = Instant::now();
        if self.piece.tokens > 0 {
            queue.metrics.tokens.add(self.piece.tokens);
            match self.delivered {
                None => {
                    let waited = now - self.received;
                    self.first_token = Some(waited);
                    queue.metrics.first_token.observe(waited.as_secs_f64());
                }
                Some(delivered) => {
                    let each = (now - delivered).as_secs_f64() / self.piece.tokens as f64;
                    queue.metrics.between_tokens.observe_many(each, self.piece.tokens);
                }
            }
            self.delivered = Some(now);
        }
        let piece = std::mem::take(&mut self.piece);
        match self.events.try_send((self.choice, ClientEvent::AnswerPiece(piece))) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                queue.metrics.slow_clients.add(1);
                false
            }
            Err(TrySendError::Closed(_)) => false,
        }
    }
}
