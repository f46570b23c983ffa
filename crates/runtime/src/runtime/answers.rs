//! Answers in generation: text pieces, stop strings, grammars and finish reasons on top of the
//! scheduler.
//!
//! `generate` and `chat` run one answer at a time ([`Answers::complete`]). A batch and the server
//! run several ([`Answers::admit`], [`Answers::step`]). The text of an answer does not depend on
//! the other answers.
//!
//! Each answer carries the caller's own data of type `T`.

use crate::decode::text::{TextPiece, TextStream};
use crate::decode::{
    self, Ended, Flow, Refused, Request, Scheduler, Stats, StopReason, TokenLogProbs,
};
use crate::grammar::tools::call_marks;
use crate::runtime::constraints::Constrained;
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_model::models::Tokenizer;
use gemma_model::sampler::{Sampler, SamplerConfig};
use serde::Serialize;

/// Reason for the end of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// The limit of --max-tokens or of the context was reached.
    #[default]
    Length,
    StopString,
    Interrupted,
    Error,
}

impl FinishReason {
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::StopString => "stop_string",
            FinishReason::Interrupted => "interrupted",
            FinishReason::Error => "error",
        }
    }
}

/// Creates the sampler of an answer. `ends` are the tokens that end it; `ignore_eos` bans them.
/// Fails for logit biases of unknown tokens.
pub fn sampler(
    config: SamplerConfig,
    constrained: &Constrained,
    tokenizer: &Tokenizer,
    ends: &[Token],
    ignore_eos: bool,
) -> Result<Sampler> {
    let vocab = tokenizer.vocab();
    if let Some((token, _)) = config.logit_bias.iter().find(|bias| bias.0 as usize >= vocab) {
        let what = format!("the logit bias of token {token}: tokens are numbers below {vocab}");
        return Err(Fault::usage(what).into());
    }
    let sampler = constrained.sampler(Sampler::new(config)?.usable(vocab));
    let sampler = if ignore_eos { sampler.ban(ends.iter().copied()) } else { sampler };
    if !(0..vocab as Token).any(|token| sampler.allows(token)) {
        let fault = Fault::usage("the logit bias bans all tokens");
        return Err(fault.help("leave at least one token without a bias of -100").into());
    }
    Ok(sampler)
}

/// A request for one answer.
pub struct AnswerRequest<T> {
    /// The prompt (at least one token) and the limits of the text.
    pub text: Request,
    /// The grammar for the text's sampler, if any.
    pub constrained: Constrained,
    /// Strings that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// Whether tokens of calls are shown as [`CALL_MARKS`](crate::grammar::tools::CALL_MARKS).
    pub shows_calls: bool,
    pub data: T,
}

/// Event of an answer within a pass.
pub enum AnswerEvent<'e> {
    /// Number of cached tokens of the prompt.
    Read(usize),
    /// A token was generated and made this text final, which is often empty.
    Text(&'e str),
    /// Final text of a thought, which is not part of the answer.
    Thought(&'e str),
}

/// An answer that has ended.
pub struct Finished<T> {
    pub data: T,
    /// Text that became final at the end.
    pub rest: String,
    /// Tokens of prompt and answer.
    pub history: Vec<Token>,
    pub prompt_tokens: usize,
    /// An error affects only this answer.
    pub reason: Result<FinishReason>,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
    pub stats: Stats,
    /// Log-probabilities of the tokens since the last request for them.
    pub log_probs: Vec<TokenLogProbs>,
    constrained: Constrained,
}

impl<T> Finished<T> {
    pub fn completion_tokens(&self) -> usize {
        self.history.len() - self.prompt_tokens
    }

    /// Returns an error if the answer ended before its grammar was complete.
    pub fn check(&self) -> Result<(), Fault> {
        let is_stopped = self.stop_string.is_some();
        self.constrained.check(&self.history, self.completion_tokens(), is_stopped)
    }
}

/// An answer that occupies a sequence of the target.
struct Answer<'a, T> {
    data: T,
    stream: TextStream<'a>,
    constrained: Constrained,
    prompt_tokens: usize,
}

/// An answer without a sequence, which can be resumed.
pub struct Paused<'a, T> {
    answer: Answer<'a, T>,
    text: Request,
    /// Log-probabilities of the tokens since the last request for them.
    pub log_probs: Vec<TokenLogProbs>,
}

impl<T> Paused<'_, T> {
    pub fn data(&self) -> &T {
        &self.answer.data
    }

    pub fn data_mut(&mut self) -> &mut T {
        &mut self.answer.data
    }

    /// Ends the paused answer.
    pub fn end(self, stop: Result<StopReason>) -> Finished<T> {
        let Paused { answer, text, log_probs } = self;
        answer.finish(text, stop, log_probs)
    }
}

impl<T> Answer<'_, T> {
    fn finish(
        mut self,
        text: Request,
        stop: Result<StopReason>,
        log_probs: Vec<TokenLogProbs>,
    ) -> Finished<T> {
        let rest = self.stream.finish().to_owned();
        let stop_string = self.stream.stop_string().map(str::to_owned);
        let reason = stop.map(|stop| match stop {
            _ if stop_string.is_some() => FinishReason::StopString,
            StopReason::Token(_) => FinishReason::Stop,
            StopReason::Length => FinishReason::Length,
            StopReason::Interrupt | StopReason::Receiver => FinishReason::Interrupted,
        });
        let Answer { data, constrained, prompt_tokens, .. } = self;
        let Request { history, stats, .. } = text;
        Finished {
            data,
            rest,
            history,
            prompt_tokens,
            reason,
            stop_string,
            stats,
            log_probs,
            constrained,
        }
    }
}

/// The answers that share a target.
pub struct Answers<'t, 'a, T> {
    scheduler: Scheduler<'t>,
    tokenizer: &'a Tokenizer,
    /// The answer of each sequence of the target; `None` for a free sequence.
    running: Vec<Option<Answer<'a, T>>>,
}

impl<'t, 'a, T> Answers<'t, 'a, T> {
    pub fn new(scheduler: Scheduler<'t>, tokenizer: &'a Tokenizer) -> Self {
        let running = (0..scheduler.sequences()).map(|_| None).collect();
        Answers { scheduler, tokenizer, running }
    }

    pub fn scheduler(&self) -> &Scheduler<'t> {
        &self.scheduler
    }

    pub fn scheduler_mut(&mut self) -> &mut Scheduler<'t> {
        &mut self.scheduler
    }

    pub fn has_room(&self) -> bool {
        self.scheduler.has_room()
    }

    pub fn is_empty(&self) -> bool {
        self.scheduler.running() == 0
    }

    /// Returns the running answers' sequences and data.
    pub fn running(&self) -> impl Iterator<Item = (usize, &T)> {
        let running = self.running.iter().enumerate();
        running.filter_map(|(sequence, answer)| Some((sequence, &answer.as_ref()?.data)))
    }

    /// Returns the data of a running answer, and the log-probabilities of its tokens since the last
    /// call.
    pub fn news(&mut self, sequence: usize) -> Option<(&mut T, Vec<TokenLogProbs>)> {
        let answer = self.running[sequence].as_mut()?;
        Some((&mut answer.data, self.scheduler.take_log_probs(sequence)))
    }

    /// Assigns a free sequence to an answer; there must be one. If the answer cannot begin, returns
    /// it with its error.
    pub fn admit(&mut self, request: AnswerRequest<T>) -> Result<usize, Box<Finished<T>>> {
        let AnswerRequest { text, constrained, stops, shows_calls, data } = request;
        let marks = if shows_calls { call_marks(self.tokenizer) } else { Vec::new() };
        let mut stream = TextStream::new(self.tokenizer, &stops).showing(marks);
        for token in &text.history[self.tokenizer.open_thought(&text.history)..] {
            stream.push(*token);
        }
        let answer = Answer { data, stream, constrained, prompt_tokens: text.history.len() };
        self.resume(Paused { answer, text, log_probs: Vec::new() })
    }

    /// Resumes a paused answer in a free sequence; there must be one.
    pub fn resume(&mut self, paused: Paused<'a, T>) -> Result<usize, Box<Finished<T>>> {
        let Paused { answer, text, .. } = paused;
        match self.scheduler.admit(text) {
            Ok(sequence) => {
                self.running[sequence] = Some(answer);
                Ok(sequence)
            }
            Err(refused) => {
                let Refused { request, error } = *refused;
                Err(Box::new(answer.finish(request, Err(error), Vec::new())))
            }
        }
    }

    /// Pauses an answer and frees its sequence.
    pub fn pause(&mut self, sequence: usize) -> Option<Paused<'a, T>> {
        let (answer, ended) = (self.running[sequence].take()?, self.scheduler.cancel(sequence)?);
        let Ended { text, log_probs, .. } = ended;
        Some(Paused { answer, text, log_probs })
    }

    /// Runs one pass. Returns the answers that ended; their sequences are free again. An error
    /// affects all answers.
    pub fn step(
        &mut self,
        on_event: &mut dyn FnMut(&mut T, AnswerEvent<'_>) -> Flow,
    ) -> Result<Vec<Finished<T>>> {
        let running = &mut self.running;
        let ended = self.scheduler.step(&mut |sequence, event| {
            let answer = running[sequence].as_mut().expect("each text belongs to an answer");
            let event = match event {
                decode::Event::Prefill(done, _) => AnswerEvent::Read(done),
                decode::Event::Token(token) => match answer.stream.push(token) {
                    TextPiece::Answer(text) => AnswerEvent::Text(text),
                    TextPiece::Thought(text) => AnswerEvent::Thought(text),
                },
            };
            let flow = on_event(&mut answer.data, event);
            if answer.stream.is_stopped() { Flow::Stop } else { flow }
        })?;
        let finish = |Ended { sequence, text, stop, log_probs }| {
            let answer = running[sequence].take().expect("each text belongs to an answer");
            answer.finish(text, stop, log_probs)
        };
        Ok(ended.into_iter().map(finish).collect())
    }

    /// Runs one answer to its end.
    pub fn complete(
        &mut self,
        request: AnswerRequest<T>,
        on_event: &mut dyn FnMut(&mut T, AnswerEvent<'_>) -> Flow,
    ) -> Finished<T> {
        let sequence = match self.admit(request) {
            Ok(sequence) => sequence,
            Err(finished) => return *finished,
        };
        loop {
            match self.step(on_event) {
                Ok(mut finished) => {
                    if let Some(finished) = finished.pop() {
                        return finished;
                    }
                }
                Err(error) => {
                    return self.pause(sequence).expect("it is running").end(Err(error));
                }
            }
        }
    }
}
