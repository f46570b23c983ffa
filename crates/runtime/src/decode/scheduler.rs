//! The generation loop: draft, score, verify, and extend the histories. Usually there is one text.
//! Several texts share the target's passes. Plain decoding is the same loop without drafts.
//!
//! A pass reads the weights once regardless of its number of rows, so texts that share passes
//! finish sooner in total. The result of a row does not depend on the other rows, so each text is
//! the same as if it were generated alone.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Error, Result};

use super::growth::{GrowingText, TextStage, draft_requests};
use super::prefixes::Prefixes;
use super::reading::Planned;
use super::{
    Ended, Event, Flow, PromptCache, Refused, Request, StopReason, TokenLogProbs, Verdict, verify,
};
use crate::draft::{
    Allowance, DraftRequest, Drafter, Pass, Policy, Proposal, Round, RoundOutcome, grammar,
    verified,
};
use gemma_base::compute::best;
use gemma_base::error::{Fault, Kind, fault_of};
use gemma_base::kv::PAGE;
use gemma_base::tensor::Token;
use gemma_model::engine::{EngineExt, Input, Output, Rows, Scores, Timeline, TokenTree};

/// Sleep between polls while every text waits for a grammar mask.
const MOMENT: Duration = Duration::from_millis(1);

/// A target, its drafter, and the texts that share them.
pub struct Scheduler<'a> {
    pub(super) target: &'a mut Timeline,
    drafter: &'a mut dyn Drafter,
    policy: &'a mut Policy,
    stop_ids: &'a [Token],
    /// Checked before each pass.
    interrupt: &'a AtomicBool,
    /// By sequence of the target.
    pub(super) texts: Vec<Option<GrowingText>>,
    pub(super) prefixes: Prefixes,
    pub(super) prompts: Option<&'a mut PromptCache>,
    scores: Scores,
    passes: u64,
    pub(super) rounds: u64,
    /// An error that the next step returns.
    failure: Option<Error>,
}

impl<'a> Scheduler<'a> {
    /// Creates a scheduler without texts. `stop_ids` are tokens that end a text and are not part of
    /// it. The target's caches may have any content.
    pub fn new(
        target: &'a mut Timeline,
        drafter: &'a mut dyn Drafter,
        policy: &'a mut Policy,
        stop_ids: &'a [Token],
        interrupt: &'a AtomicBool,
    ) -> Self {
        let texts = (0..target.sequences()).map(|_| None).collect();
        let (prefixes, scores) = (Prefixes::new(target.sequences()), Scores::default());
        Scheduler {
            target,
            drafter,
            policy,
            stop_ids,
            interrupt,
            texts,
            prefixes,
            prompts: None,
            scores,
            passes: 0,
            rounds: 0,
            failure: None,
        }
    }

    /// Returns the most texts at once.
    pub fn sequences(&self) -> usize {
        self.texts.len()
    }

    /// Returns the number of texts that are being read or generated.
    pub fn running(&self) -> usize {
        self.texts.iter().flatten().count()
    }

    pub fn has_room(&self) -> bool {
        self.running() < self.texts.len()
    }

    /// Returns the number of passes that scored trees.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Returns the number of all passes, including those that only read prompts.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Assigns a free sequence to a request and returns it.
    ///
    /// Chooses the sequence that holds most of the history, and on ties the least recently used
    /// one. Nothing is read yet. Fails for an empty history and for one that fills the context.
    pub fn admit(&mut self, mut request: Request) -> Result<usize, Box<Refused>> {
        let room = room(self.target, &request.history).and_then(|room| {
            self.check_images(&request)?;
            Ok(room)
        });
        match room {
            Ok(room) => request.max_tokens = request.max_tokens.min(room),
            Err(error) => return Err(Box::new(Refused { request, error })),
        }
        let mut log_probs = Vec::new();
        if request.scored == Some(0) {
            log_probs.push(TokenLogProbs::first(request.history[0]));
            request.scored = Some(1);
        }
        let free = (0..self.texts.len()).filter(|s| self.texts[*s].is_none());
        let fitness = |s: &usize| {
            let is_read_anew = request.lacks_scores();
            let gain = match is_read_anew {
                true => 0,
                false => self.prefixes.gain(self.target, *s, &request.history),
            };
            (gain, Reverse(self.prefixes.last_use(*s)), Reverse(*s))
        };
        let sequence = free.max_by_key(fitness).expect("the caller has seen that there is room");
        self.prefixes.touch(sequence);
        self.texts[sequence] = Some(GrowingText {
            request,
            admitted: Instant::now(),
            stage: TextStage::Admitted,
            rests: false,
            proposal: Proposal::default(),
            scored: TokenTree::default(),
            scored_at: None,
            chunk: TokenTree::default(),
            fork: 0,
            log_probs,
        });
        Ok(sequence)
    }

    /// Ends a text; `None` if there is none.
    pub fn cancel(&mut self, sequence: usize) -> Option<Ended> {
        self.texts[sequence].is_some().then(|| self.end(sequence, Ok(StopReason::Receiver)))
    }

    /// Returns the log-probabilities of a text's tokens since the last call.
    pub fn take_log_probs(&mut self, sequence: usize) -> Vec<TokenLogProbs> {
        self.texts[sequence].as_mut().map_or_else(Vec::new, |t| std::mem::take(&mut t.log_probs))
    }

    fn end(&mut self, sequence: usize, stop: Result<StopReason>) -> Ended {
        let mut text = self.texts[sequence].take().expect("the sequence has a text");
        if let TextStage::Grows(begun) = text.stage {
            text.request.stats.decode_time += begun.elapsed();
        }
        if let Some(prompts) = &mut self.prompts {
            prompts.cancel(sequence);
        }
        self.prefixes.touch(sequence);
        self.prefixes.retain(self.target, sequence, self.target.position(sequence));
        let GrowingText { request: text, log_probs, .. } = text;
        Ended { sequence, text, stop, log_probs }
    }

    /// Runs one pass. `on_event` receives the events of each text with its sequence, and may end
    /// it.
    ///
    /// Returns the texts that ended; their sequences are free again. An error affects all running
    /// texts. If a pass ends texts and then fails, their results are returned first, and the next
    /// step returns the error.
    pub fn step(&mut self, on_event: &mut dyn FnMut(usize, Event) -> Flow) -> Result<Vec<Ended>> {
        let mut ended = Vec::new();
        let passed = match self.failure.take() {
            Some(error) => Err(error),
            None => self.pass(on_event, &mut ended),
        };
        match passed {
            Err(error) if ended.is_empty() => return Err(error),
            passed => self.failure = passed.err(),
        }
        Ok(ended)
    }

    /// Runs one pass. Adds ended texts to `ended`, even before an error.
    fn pass(
        &mut self,
        on_event: &mut dyn FnMut(usize, Event) -> Flow,
        ended: &mut Vec<Ended>,
    ) -> Result<()> {
        let interrupted = self.interrupt.load(Ordering::Relaxed);
        for sequence in 0..self.texts.len() {
            match &self.texts[sequence] {
                Some(text) if text.request.max_tokens == 0 && !text.request.lacks_scores() => {
                    ended.push(self.end(sequence, Ok(StopReason::Length)))
                }
                Some(_) if interrupted => ended.push(self.end(sequence, Ok(StopReason::Interrupt))),
                _ => {}
            }
        }
        self.begin_texts()?;
        let Planned { rows: prompt_rows, alone } = self.plan_reading();
        let growing = self.find_growing(alone);
        if growing.is_empty() && prompt_rows == 0 {
            if self.texts.iter().flatten().any(|text| text.rests) {
                std::thread::sleep(MOMENT);
            }
            return Ok(());
        }
        let start = Instant::now();
        let allowed = self.propose(&growing, prompt_rows)?;
        let begun = Instant::now();
        let mut pass = self.score(&growing, prompt_rows, &allowed)?;
        self.rounds += 1;
        self.passes += !growing.is_empty() as u64;

        let verdicts = self.verify(&growing);
        for (sequence, error) in self.take_prompt_scores(&growing) {
            ended.push(self.end(sequence, Err(error)));
        }
        pass.time = begun.elapsed();
        if !growing.is_empty() {
            let path = |verdict: &Result<Verdict>| {
                verdict.as_ref().map_or_else(|_| vec![0], |verdict| verdict.path.clone())
            };
            let paths: Vec<Vec<u32>> = verdicts.iter().map(path).collect();
            self.policy.observe(&RoundOutcome { pass, paths: &paths });
        }
        for (&sequence, verdict) in growing.iter().zip(verdicts) {
            let stop = match verdict {
                Ok(verdict) => self.grow(sequence, &verdict, begun - start, pass, on_event),
                Err(error) => Err(error),
            }
            .transpose();
            ended.extend(stop.map(|stop| self.end(sequence, stop)));
        }
        self.commit()?;
        for sequence in self.sequences_where(|text| !text.grows()) {
            let text = self.texts[sequence].as_ref().expect("it is being read");
            let read = Event::Prefill(self.target.position(sequence), text.past().len());
            if !text.chunk.is_empty() && on_event(sequence, read) == Flow::Stop {
                // A receiver that sees an interruption may also ask to stop.
                let interrupted = self.interrupt.load(Ordering::Relaxed);
                let stop = if interrupted { StopReason::Interrupt } else { StopReason::Receiver };
                ended.push(self.end(sequence, Ok(stop)));
            }
        }
        Ok(())
    }

    /// Returns the sequences with texts that satisfy `predicate`.
    pub(super) fn sequences_where(&self, predicate: impl Fn(&GrowingText) -> bool) -> Vec<usize> {
        let is = |sequence: &usize| self.texts[*sequence].as_ref().is_some_and(&predicate);
        (0..self.texts.len()).filter(is).collect()
    }

    /// Starts to read admitted texts after their cached part, and to generate texts after they were
    /// read.
    fn begin_texts(&mut self) -> Result<()> {
        for sequence in self.sequences_where(|text| !text.grows()) {
            let text = self.texts[sequence].as_mut().expect("it does not grow");
            if text.stage == TextStage::Admitted {
                if !self.find_prefix(sequence)? {
                    continue;
                }
                self.begin_reading(sequence);
            }
            let past = self.texts[sequence].as_ref().map_or(0, |text| text.past().len());
            if self.target.position(sequence) == past {
                self.keep(sequence, past);
                let most = self.policy.reading(past);
                let text = self.texts[sequence].as_mut().expect("it is read");
                self.drafter.prepare(sequence, text.past(), most)?;
                self.policy.begin_text();
                text.request.stats.prefill_time += text.admitted.elapsed();
                text.stage = TextStage::Grows(Instant::now());
            }
        }
        Ok(())
    }

    /// Starts to read the part of a text that its sequence does not hold.
    fn begin_reading(&mut self, sequence: usize) {
        let text = self.texts[sequence].as_mut().expect("it is to be read");
        let cached = self.target.position(sequence);
        let info = self.target.engine().info();
        let on_disk = self.prompts.as_ref().map_or(0, |prompts| prompts.fork(info, text.past()));
        text.fork = self.prefixes.fork(self.target, sequence, text.past()).max(on_disk);
        text.request.stats.prompt_tokens += text.request.history.len() as u64;
        text.request.stats.prefilled += (text.past().len() - cached) as u64;
        text.stage = TextStage::Reads;
    }

    /// Drafts one tree per text. The policy limits the total number of nodes.
    fn propose(&mut self, growing: &[usize], prompt_rows: usize) -> Result<Allowance> {
        if growing.is_empty() {
            return Ok(Allowance::default());
        }
        let start = Instant::now();
        let drafter = &mut *self.drafter;
        let info = self.target.engine().info();
        let texts = || growing.iter().map(|s| self.texts[*s].as_ref().expect("it grows"));
        let mut recent_match = false;
        for (sequence, text) in growing.iter().zip(texts()) {
            recent_match |= drafter.has_recent_match(*sequence, &text.request.history);
        }
        let position = texts().map(|text| text.request.history.len()).max().unwrap_or(0);
        let most = info.max_rows.saturating_sub(growing.len() + prompt_rows);
        let round = Round { texts: growing.len(), position, most, recent_match };
        let allowed = self.policy.allow(&round);
        let vocab = info.vocab;
        let mut requests = draft_requests(&mut self.texts, &self.scores, &allowed, vocab, true);
        let steps = if allowed.only_forced {
            requests.iter_mut().for_each(|request| grammar::chain(&request.ctx, request.out));
            0
        } else {
            drafter.propose(&mut requests, self.target.assistant())?
        };
        for DraftRequest { ctx, out, .. } in &mut requests {
            out.limit(ctx.nodes, ctx.depth, ctx.vocab);
        }
        let mut proposals: Vec<&mut Proposal> =
            requests.into_iter().map(|request| request.out).collect();
        self.policy.choose(&mut proposals, start.elapsed(), steps);
        Ok(allowed)
    }

    /// Scores all trees and reads the prompts' parts. The drafter may work ahead while the device
    /// runs.
    fn score(
        &mut self,
        growing: &[usize],
        prompt_rows: usize,
        allowed: &Allowance,
    ) -> Result<Pass> {
        let mut inputs = Vec::with_capacity(self.texts.len());
        let (mut lists, mut row) = (None, 0);
        // A list that suffices to pick a token may be too short for the drafter to learn from.
        let listed = if self.drafter.reads_target() { verified::BEST } else { 1 };
        for &sequence in growing {
            let text = self.texts[sequence].as_ref().expect("it grows");
            // A text that a list does not suffice for gets all logits of its own rows.
            let own = text.request.sampler.decisive().filter(|(n, _)| *n <= best::CHUNKS);
            let own = own.filter(|_| text.request.top_log_probs.is_none());
            let input = Input::new(sequence, &text.proposal.tree, Rows::All);
            inputs.push(input.with_logits(own.is_none()));
            if let Some((n, usable)) = own {
                let (most, least) = lists.unwrap_or((listed, usable));
                lists = Some((n.max(most), usable.min(least)));
            }
            row += text.proposal.len();
        }
        for (sequence, text) in self.texts.iter().enumerate() {
            if let Some(text) = text.as_ref().filter(|t| !t.grows() && !t.chunk.is_empty()) {
                let is_scored = text.request.lacks_scores();
                let rows = if is_scored { Rows::All } else { Rows::None };
                inputs.push(Input::new(sequence, &text.chunk, rows).with_logits(is_scored));
            }
        }
        let output = lists.map_or(Output::Logits, |(n, usable)| Output::Best { n, usable });
        let mut pass = Pass { rows: row + prompt_rows, ..Pass::default() };
        if self.target.begin(&inputs, output)? {
            self.work_ahead(growing, allowed, &mut pass)?;
        }
        self.target.finish(&mut self.scores)?;
        Ok(pass)
    }

    /// Lets the drafter work while the target's device runs.
    fn work_ahead(
        &mut self,
        growing: &[usize],
        allowed: &Allowance,
        pass: &mut Pass,
    ) -> Result<()> {
        let (target, drafter) = (&*self.target, &mut *self.drafter);
        if growing.is_empty() {
            let reading = self.texts.iter().enumerate().find_map(|(s, t)| Some((s, t.as_ref()?)));
            if let Some((sequence, text)) = reading.filter(|_| self.policy.works_ahead()) {
                drafter.read_ahead(sequence, text.past(), &mut || target.is_busy())?;
            }
            return Ok(());
        }
        let Some(usual) = self.policy.ahead() else { return Ok(()) };
        let vocab = target.engine().info().vocab;
        let requests = draft_requests(&mut self.texts, &self.scores, allowed, vocab, false);
        let start = Instant::now();
        let (mut at_work, mut looked, mut last) = (start, false, Duration::ZERO);
        drafter.draft_ahead(&requests, &mut || {
            let (busy, now) = (target.is_busy(), start.elapsed());
            (at_work, looked) = (if busy { start + now } else { at_work }, true);
            // Half of a batch may run past the end of the pass. This work is not lost if the guess
            // is right.
            let batch = now - std::mem::replace(&mut last, now);
            usual == Duration::MAX || busy && now + batch / 2 < usual
        })?;
        if looked {
            pass.ahead = start.elapsed();
            // The device was last seen busy at `at_work`, and may have been idle since.
            pass.late = match target.is_busy() {
                true => Duration::ZERO,
                false => pass.ahead.saturating_sub(at_work - start),
            };
        }
        Ok(())
    }

    /// Verifies each tree against the pass. If a text's rule fails, its result is an error.
    fn verify(&mut self, growing: &[usize]) -> Vec<Result<Verdict>> {
        let mut row = 0;
        let mut verdicts = Vec::with_capacity(growing.len());
        for &sequence in growing {
            let text = self.texts[sequence].as_mut().expect("it grows");
            let tree = &text.proposal.tree;
            verdicts.push(verify(
                tree,
                &self.scores,
                row,
                &text.request.sampler,
                &text.request.history,
            ));
            text.scored_at = Some((text.request.history.len(), row));
            row += tree.len();
        }
        verdicts
    }

    /// Computes log-probabilities of prompts from the scored rows of their parts, which follow the
    /// rows of the trees. Removes texts that fail and returns them with their errors.
    fn take_prompt_scores(&mut self, growing: &[usize]) -> Vec<(usize, Error)> {
        let trees = growing.iter().flat_map(|sequence| &self.texts[*sequence]);
        let mut row = trees.map(|text| text.proposal.len()).sum();
        let mut failed = Vec::new();
        for sequence in self.sequences_where(|t| t.is_read() && t.request.lacks_scores()) {
            let position = self.target.position(sequence);
            let text = self.texts[sequence].as_mut().expect("it is being read");
            let taken = text.take_prompt_scores(&self.scores, row, position);
            failed.extend(taken.err().map(|error| (sequence, error)));
            row += text.chunk.len();
        }
        failed
    }

    /// Adds the tokens of a verdict to a text. Returns the stop reason if the text ends.
    fn grow(
        &mut self,
        sequence: usize,
        verdict: &Verdict,
        draft_time: Duration,
        pass: Pass,
        on_event: &mut dyn FnMut(usize, Event) -> Flow,
    ) -> Result<Option<StopReason>> {
        let text = self.texts[sequence].as_mut().expect("it grows");
        text.request.stats.round(&text.proposal, verdict, draft_time, pass);
        std::mem::swap(&mut text.scored, &mut text.proposal.tree);
        let (_, first) = text.scored_at.expect("its tree was scored");
        for (token, node) in verdict.tokens(&text.scored).into_iter().zip(&verdict.path) {
            let is_end = self.stop_ids.contains(&token);
            let wants_scores = !is_end || text.request.scored.is_some();
            if let Some(n) = text.request.top_log_probs.filter(|_| wants_scores) {
                let row = self.scores.row(first + *node as usize);
                text.log_probs.push(TokenLogProbs::new(row, token, n)?);
            }
            if is_end {
                return Ok(Some(StopReason::Token(token)));
            }
            text.request.history.push(token);
            text.request.scored.iter_mut().for_each(|scored| *scored += 1);
            text.request.stats.tokens += 1;
            text.request.max_tokens -= 1;
            text.request.stats.first_token.get_or_insert_with(|| text.admitted.elapsed());
            if on_event(sequence, Event::Token(token)) == Flow::Stop {
                return Ok(Some(StopReason::Receiver));
            }
            if text.request.max_tokens == 0 {
                return Ok(Some(StopReason::Length));
            }
        }
        Ok(None)
    }

    /// Commits the accepted rows of all texts at once. They are still in scratch.
    fn commit(&mut self) -> Result<()> {
        let texts = self.texts.iter().enumerate();
        let pasts: Vec<_> =
            texts.filter_map(|(sequence, text)| Some((sequence, text.as_ref()?.past()))).collect();
        let mut pages = 0;
        for (sequence, text) in self.texts.iter().enumerate() {
            let now = self.target.position(sequence);
            let end = match text {
                Some(text) if text.grows() => text.past().len(),
                Some(text) if text.is_read() => now + text.chunk.len(),
                _ => now,
            };
            pages += end.div_ceil(PAGE).saturating_sub(now.div_ceil(PAGE));
        }
        self.prefixes.make_room(self.target, pages, |sequence| self.texts[sequence].is_none())?;
        while let Err(error) = self.target.adopt(&pasts) {
            let is_full = fault_of(&error).is_some_and(|fault| fault.kind == Kind::Memory);
            let prompts = self.prompts.as_mut().filter(|_| is_full);
            if !prompts.map_or(Ok(false), |prompts| prompts.release(self.target))? {
                return Err(error);
            }
        }
        for sequence in 0..self.texts.len() {
            let position = self.target.position(sequence);
            let text = self.texts[sequence].as_mut();
            let text = text.filter(|text| (1..=position).contains(&text.fork));
            if let Some(tokens) = text.map(|text| std::mem::take(&mut text.fork)) {
                self.keep(sequence, tokens);
            }
        }
        self.write_page().map(|_| ())
    }
}

/// Returns the number of tokens that fit in the context after `history`.
pub fn room(target: &Timeline, history: &[Token]) -> Result<usize> {
    let context = target.engine().context(0);
    if history.is_empty() {
        return Err(Fault::usage("the prompt is empty")
            .help("give at least one token, such as BOS")
            .into());
    }
    if history.len() >= context {
        let what =
            format!("the prompt has {} tokens, and the context holds {context}", history.len());
        return Err(Fault::new(Kind::Context, what)
            .help("raise --ctx-size or shorten the prompt")
            .into());
    }
    Ok(context - history.len())
}
