//! The thread that owns the model: clients' requests as texts of one scheduler.
//!
//! It never waits for a client. Texts join and leave between passes; who goes away, or does not
//! read, is cut off before the next one. A device that is lost is opened again, and the texts go on
//! from their histories.

use super::error::ApiError;
use super::queue::{End, Event, Figures, Job, Piece, Queue};
use super::shares::Client;
use crate::cli::answer::Growing;
use crate::cli::record::FinishReason;
use crate::cli::ui::Ui;
use crate::decode::{self, Ended, Flow, Request, Scheduler, Stats, Stop};
use crate::error::{Kind, fault_of};
use crate::runtime::{Drafting, DraftingOptions, Room, Session, Started, npu};
use crate::sampler::Sampler;
use crate::tensor::Token;
use anyhow::Result;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

/// A device that is lost so often within so long is given up.
const LOSSES: usize = 3;
const WITHIN: Duration = Duration::from_secs(60);

/// What an engine serves with.
pub struct Engine<'a> {
    pub session: &'a Session,
    pub drafting: &'a DraftingOptions,
    pub room: Room,
    pub queue: &'a Queue,
    pub ui: &'a Ui,
}

/// A text of a client, in a sequence of the target.
struct Seat<'a> {
    client: Client,
    growing: Growing<'a>,
    sampler: Sampler,
    max_tokens: usize,
    chances: Option<usize>,
    choice: usize,
    events: Sender<(usize, Event)>,
    asked: Instant,
    /// What came since the client was told last, and when that was.
    piece: Piece,
    told: Option<Instant>,
    first_token: Option<Duration>,
}

/// A text that waits for a device to come back, or for its turn.
struct Stranded<'a> {
    seat: Seat<'a>,
    history: Vec<Token>,
    stats: Stats,
}

impl Engine<'_> {
    /// Answers requests until there are to be no more. `loaded` hears of each engine that is
    /// loaded. An error is one that no text survives.
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
        let start = || self.session.start(self.room, self.drafting, false, self.ui);
        let (mut started, mut stranded, mut losses) = (start()?, Vec::new(), Vec::new());
        loop {
            loaded(&started);
            let Err((mut error, texts)) = self.grow(started, stranded) else { return Ok(()) };
            stranded = texts;
            started = loop {
                if !may_reopen(&error, &mut losses) {
                    for Stranded { mut seat, history, stats } in stranded {
                        seat.tell_end(Err(ApiError::of(&error)), &history, &stats, self.queue);
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

    /// Answers requests with one loaded engine.
    fn grow<'s>(
        &'s self,
        started: Started,
        stranded: Vec<Stranded<'s>>,
    ) -> Result<(), (anyhow::Error, Vec<Stranded<'s>>)> {
        let Started { mut target, drafts: mut drafting, costs, .. } = started;
        let cut = AtomicBool::new(false);
        let Drafting { drafter, policy, .. } = &mut drafting;
        let stop_ids = &self.session.stop_ids;
        let texts = Scheduler::new(&mut target, drafter.as_mut(), policy, stop_ids, &cut)
            .keeping_prefixes();
        let seats = (0..self.room.sequences).map(|_| None).collect();
        let mut hall =
            Hall { engine: self, seats, paused: stranded.into(), texts, passes: 0, rounds: 0 };
        match hall.answer_all(&cut) {
            Ok(()) => {
                costs.keep(&mut drafting, self.ui);
                npu::say(target.engine(), self.ui);
                Ok(())
            }
            Err(error) => Err((error, hall.strand())),
        }
    }
}

/// Whether a device is worth opening again after this error.
fn may_reopen(error: &anyhow::Error, losses: &mut Vec<Instant>) -> bool {
    let now = Instant::now();
    losses.retain(|loss| now - *loss < WITHIN);
    losses.push(now);
    losses.len() < LOSSES && fault_of(error).is_some_and(|fault| fault.kind == Kind::Device)
}

struct Hall<'s, 't> {
    engine: &'s Engine<'s>,
    /// By sequence.
    seats: Vec<Option<Seat<'s>>>,
    /// Texts that gave their sequences to other clients, or lost a device. Oldest first.
    paused: VecDeque<Stranded<'s>>,
    texts: Scheduler<'t>,
    passes: u64,
    rounds: u64,
}

impl<'s> Hall<'s, '_> {
    fn answer_all(&mut self, cut: &AtomicBool) -> Result<()> {
        let queue = self.engine.queue;
        loop {
            self.make_room();
            while self.texts.has_room() {
                if self.resume() {
                    continue;
                }
                match queue.take(self.texts.running() == 0, |client| self.running(client)) {
                    Some(job) => self.admit(job),
                    None => break,
                }
            }
            if self.texts.running() == 0 {
                return Ok(());
            }
            cut.store(queue.is_over(), Ordering::Relaxed);
            self.drop_gone();
            self.step()?;
        }
    }

    /// Texts of a client that have a sequence.
    fn running(&self, client: Client) -> usize {
        self.seats.iter().flatten().filter(|seat| seat.client == client).count()
    }

    /// Pauses texts of clients that have more than their share while others wait: at the end no
    /// client that waits has two texts fewer than another one. A paused text goes on later, from
    /// where it was.
    fn make_room(&mut self) {
        while !self.texts.has_room() {
            let Some(next) = self.engine.queue.next(|client| self.running(client)) else { return };
            let most = |sequence: &usize| {
                let seat = self.seats[*sequence].as_ref().expect("every sequence has a text");
                (self.running(seat.client), seat.asked)
            };
            // Of the client with the most texts the one that came last.
            let Some(sequence) = (0..self.seats.len()).max_by_key(most) else { return };
            if most(&sequence).0 < self.running(next) + 2 {
                return;
            }
            let paused = self.take_out(sequence);
            self.paused.extend(paused);
            self.engine.queue.metrics.pauses.add(1);
            // The client that waits comes first, whoever else is paused.
            let job = self.engine.queue.take(false, |client| self.running(client));
            job.into_iter().for_each(|job| self.admit(job));
        }
    }

    /// Lets a paused text go on, unless a client that waits has fewer texts. Returns whether it did.
    fn resume(&mut self) -> bool {
        self.paused.retain(|text| !text.seat.events.is_closed());
        let running = |text: &Stranded| self.running(text.seat.client);
        let Some(at) = (0..self.paused.len()).min_by_key(|at| running(&self.paused[*at])) else {
            return false;
        };
        let next = self.engine.queue.next(|client| self.running(client));
        if next.is_some_and(|next| self.running(next) < running(&self.paused[at])) {
            return false;
        }
        let Stranded { seat, history, stats } = self.paused.remove(at).expect("it is there");
        self.seat(seat, history, stats);
        true
    }

    fn admit(&mut self, job: Job) {
        let Job { history, sampler, constrained, stops, max_tokens, chances, .. } = job;
        let tokenizer = &self.engine.session.tokenizer;
        let seat = Seat {
            client: job.client,
            growing: Growing::new(tokenizer, &stops, constrained, history.len()),
            sampler,
            max_tokens,
            chances,
            choice: job.choice,
            events: job.events,
            asked: job.asked,
            piece: Piece::default(),
            told: None,
            first_token: None,
        };
        self.seat(seat, history, Stats::default());
    }

    /// Gives a text a sequence, in which it begins or goes on.
    fn seat(&mut self, mut seat: Seat<'s>, history: Vec<Token>, stats: Stats) {
        let queue = self.engine.queue;
        let request = Request {
            history: history.clone(),
            sampler: seat.sampler.clone(),
            max_tokens: seat.max_tokens - seat.growing.completion_tokens(&history),
            stats: stats.clone(),
            chances: seat.chances,
        };
        match self.texts.admit(request) {
            Ok(sequence) => self.seats[sequence] = Some(seat),
            Err(error) => seat.tell_end(Err(ApiError::of(&error)), &history, &stats, queue),
        }
        queue.metrics.running.set(self.texts.running() as u64);
    }

    /// Texts whose clients have gone are not read or grown any further.
    fn drop_gone(&mut self) {
        for sequence in 0..self.seats.len() {
            if self.seats[sequence].as_ref().is_some_and(|seat| seat.events.is_closed()) {
                self.seats[sequence] = None;
                self.texts.cancel(sequence);
            }
        }
    }

    /// One pass, and what it brought to the clients.
    fn step(&mut self) -> Result<()> {
        let (seats, queue) = (&mut self.seats, self.engine.queue);
        let ended = self.texts.step(&mut |sequence, event| {
            let decode::Event::Token(token) = event else { return Flow::Continue };
            let seat = seats[sequence].as_mut().expect("a text has a seat");
            seat.piece.tokens += 1;
            let text = seat.growing.push(token);
            seat.piece.text.push_str(text);
            if seat.growing.is_stopped() { Flow::Stop } else { Flow::Continue }
        })?;
        queue.metrics.passes.add(self.texts.passes() - self.passes);
        self.passes = self.texts.passes();
        queue.metrics.rounds.add(self.texts.rounds() - self.rounds);
        self.rounds = self.texts.rounds();
        for Ended { sequence, history, stop, stats, chances } in ended {
            let mut seat = self.seats[sequence].take().expect("a text has a seat");
            seat.piece.chances.extend(chances);
            let rest = seat.growing.finish();
            seat.piece.text.push_str(rest);
            let reason = seat.reason(stop);
            seat.tell_end(reason, &history, &stats, queue);
        }
        for sequence in 0..self.seats.len() {
            let Some(seat) = &mut self.seats[sequence] else { continue };
            seat.piece.chances.extend(self.texts.take_chances(sequence));
            if !seat.tell(queue) {
                self.seats[sequence] = None;
                self.texts.cancel(sequence);
            }
        }
        queue.metrics.running.set(self.texts.running() as u64);
        Ok(())
    }

    /// Takes the texts out of an engine that is of no use any more.
    fn strand(mut self) -> Vec<Stranded<'s>> {
        let running: Vec<_> =
            (0..self.seats.len()).filter_map(|sequence| self.take_out(sequence)).collect();
        running.into_iter().chain(self.paused).collect()
    }

    /// Takes a text out of its sequence.
    fn take_out(&mut self, sequence: usize) -> Option<Stranded<'s>> {
        let (mut seat, ended) = (self.seats[sequence].take()?, self.texts.cancel(sequence)?);
        let Ended { history, stats, chances, .. } = ended;
        seat.piece.chances.extend(chances);
        Some(Stranded { seat, history, stats })
    }
}

impl Seat<'_> {
    /// Why the finished text ended. That its grammar is not complete is told by the reason, as
    /// OpenAI's server does.
    fn reason(&self, stop: Result<Stop>) -> Result<FinishReason, ApiError> {
        let stop = stop.map_err(|error| ApiError::of(&error))?;
        self.growing.reason(stop).ok_or_else(ApiError::ending)
    }

    /// Sends what came. Whether the client still takes it.
    fn tell(&mut self, queue: &Queue) -> bool {
        if self.piece == Piece::default() {
            return true;
        }
        let now = Instant::now();
        if self.piece.tokens > 0 {
            queue.metrics.tokens.add(self.piece.tokens);
            match self.told {
                None => {
                    let waited = now - self.asked;
                    self.first_token = Some(waited);
                    queue.metrics.first_token.observe(waited.as_secs_f64());
                }
                Some(told) => {
                    let each = (now - told).as_secs_f64() / self.piece.tokens as f64;
                    queue.metrics.between_tokens.observe_many(each, self.piece.tokens);
                }
            }
            self.told = Some(now);
        }
        let piece = std::mem::take(&mut self.piece);
        match self.events.try_send((self.choice, Event::Piece(piece))) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                queue.metrics.slow_clients.add(1);
                false
            }
            Err(TrySendError::Closed(_)) => false,
        }
    }

    fn tell_end(
        &mut self,
        reason: Result<FinishReason, ApiError>,
        history: &[Token],
        stats: &Stats,
        queue: &Queue,
    ) {
        if !self.tell(queue) {
            return;
        }
        let prompt_tokens = self.growing.prompt_tokens as u64;
        let figures = Figures {
            prompt_tokens,
            // The newest token of a prompt is never cached: a pass has to score it.
            cached_tokens: prompt_tokens.saturating_sub(1).saturating_sub(stats.prefilled),
            completion_tokens: self.growing.completion_tokens(history) as u64,
            passes: stats.passes,
            decode_time: stats.decode_time,
            first_token: self.first_token,
        };
        queue.metrics.prompt_tokens.add(figures.prompt_tokens);
        queue.metrics.cached_tokens.add(figures.cached_tokens);
        let stop_string = self.growing.stop_string().map(str::to_owned);
        let end = End { reason, stop_string, figures };
        let _ = self.events.try_send((self.choice, Event::End(Box::new(end))));
    }
}
