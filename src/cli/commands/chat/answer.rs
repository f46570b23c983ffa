//! Answers of a chat: the room for a prompt, the stream to the terminal, the figures.

use super::ChatSession;
use crate::cli::io::record::{FinishReason, Record, Usage, VERSION};
use crate::cli::io::stats;
use crate::cli::io::ui::{Ui, clean};
use crate::cli::io::wrap::{Wrap, columns};
use crate::cli::options::finish_prompts;
use crate::decode::{Flow, Request, Scheduler};
use crate::engine::EngineExt;
use crate::error::{Fault, Kind};
use crate::runtime::answers::{AnswerEvent, AnswerRequest, Answers, Finished};
use crate::runtime::drafting::Drafting;
use crate::tensor::Token;
use crate::util::units::thousands;
use anyhow::{Context, Result};
use std::io::Write;

/// At least this fraction of the context stays free for an answer, as long as there are older turns
/// to leave out.
const ANSWER_PART: usize = 8;

impl ChatSession<'_> {
    /// Answers a message.
    pub(super) fn answer(&mut self, text: &str) -> Result<()> {
        let history = self.room_for(text)?;
        self.stream_answer(text, history)
    }

    /// Returns the context size in tokens.
    pub(super) fn context(&self) -> usize {
        self.target.engine().context(0)
    }

    /// Returns the prompt for `text`.
    ///
    /// Older turns are left out if the answer would have too little room.
    fn room_for(&mut self, text: &str) -> Result<Vec<Token>> {
        let context = self.context();
        let most = context - context / ANSWER_PART;
        let mut history = self.talk.ask(text)?;
        let (before, mut left_out) = (self.talk.clone(), 0);
        if history.len() > most {
            // Older turns get half of the tokens that the message leaves free. If they got all of
            // them, each later message would drop old turns, and the whole prompt would be read
            // again each time.
            let alone = self.talk.alone(text)?;
            let enough = alone + most.saturating_sub(alone) / 2;
            while history.len() > enough && self.talk.leave_out_oldest() {
                left_out += 1;
                history = self.talk.ask(text)?;
            }
        }
        if history.len() >= context {
            self.talk = before;
            let (have, most) = (thousands(history.len() as u64), thousands(context as u64));
            let fault = Fault::new(
                Kind::Context,
                format!("the message has {have} tokens, and the context has room for {most}"),
            );
            return Err(fault
                .help("shorten it, or start gemma chat with a larger --ctx-size")
                .into());
        }
        let what = match left_out {
            0 => return Ok(history),
            1 => "message and its answer".to_owned(),
            n => format!("{n} messages and their answers"),
        };
        self.ui.line(&format!(
            "(the context of {} tokens is full: the model no longer sees the oldest {what}; \
             /save writes them all)",
            thousands(context as u64)
        ));
        Ok(history)
    }

    /// Streams an answer. After Ctrl-C the text so far is kept.
    fn stream_answer(&mut self, text: &str, history: Vec<Token>) -> Result<()> {
        let context = self.context();
        self.interrupt.reset();
        let mut screen = Screen { ui: self.ui, wrap: Wrap::new(columns()), in_thought: false };
        let mut answer = String::new();
        let bar = self.ui.bar("reading", history.len() as u64);
        let mut failure = None;
        let Drafting { drafter, policy, .. } = &mut self.drafting;
        let flag = self.interrupt.flag();
        let scheduler =
            Scheduler::new(&mut self.target, drafter.as_mut(), policy, self.stop_ids, flag)
                .with_prompt_cache(self.prompts.as_mut());
        let constrained = self.options.think.constrained(None, &history, self.tokenizer);
        let sampler = constrained.sampler(self.sampler.clone());
        let request = AnswerRequest {
            text: Request {
                images: self.talk.images(),
                ..Request::new(history, sampler, self.max_tokens)
            },
            constrained,
            stops: self.options.sampling.stop.clone(),
            shows_calls: false,
            data: (),
        };
        let finished =
            Answers::new(scheduler, self.tokenizer).complete(request, &mut |(), event| {
                let (piece, is_thought) = match event {
                    AnswerEvent::Read(done) => {
                        bar.set_position(done as u64);
                        return Flow::Continue;
                    }
                    AnswerEvent::Text(piece) => (piece, false),
                    AnswerEvent::Thought(piece) => (piece, true),
                };
                bar.finish_and_clear();
                if !is_thought {
                    answer.push_str(piece);
                }
                failure = screen.show(piece, is_thought).err();
                if failure.is_some() { Flow::Stop } else { Flow::Continue }
            });
        bar.finish_and_clear();
        answer.push_str(&finished.rest);
        let shown = screen.show(&format!("{}\n", finished.rest), false);
        if let Some(e) = failure.or(shown.err()) {
            return Err(e).context("cannot write to the terminal");
        }
        finish_prompts(&mut self.prompts, &mut self.target, flag, self.ui);
        let completion_tokens = finished.completion_tokens();
        let Finished { history, prompt_tokens, reason, stats, .. } = finished;
        let finish = reason?;
        match finish {
            FinishReason::Length if history.len() >= context => self.ui.line(
                "(the context is full; the next message has the oldest ones left out, \
                    /reset forgets all)",
            ),
            FinishReason::Length => self.ui.line("(cut off by --max-tokens)"),
            FinishReason::Interrupted => self.ui.line("(stopped)"),
            _ => {}
        }
        let usage = Usage { prompt_tokens, completion_tokens };
        // If the prompt was not read completely, there is no answer to continue from.
        if usage.completion_tokens > 0 {
            self.talk.answered(text, &answer, history);
        }
        self.last = Some((stats, usage, finish));
        Ok(())
    }

    /// Prints the figures of the last answer.
    pub(super) fn stats(&self) -> Result<()> {
        let Some((stats, usage, finish_reason)) = &self.last else {
            return self.say("(there is no answer yet)");
        };
        let figures = self.drafting.figures();
        let engine = self.target.engine();
        let report = engine.report();
        let disabled = self.drafting.disabled();
        let record = Record {
            v: VERSION,
            finish_reason: *finish_reason,
            usage: usage.clone(),
            timings: stats::timings(stats, 0.0),
            draft: stats::draft(stats, &figures, self.talk.position(), disabled),
            sampling: stats::sampling(self.sampler.config(), self.max_tokens),
            memory: stats::memory(&report),
            device: report.device,
            ..Record::default()
        };
        let (tokens, context) =
            (thousands(self.talk.position() as u64), thousands(engine.context(0) as u64));
        let line = stats::line(&record, stats, self.threads)?;
        // The demo's prompts do not contain earlier ones, so their tokens are not added up.
        let counted = match self.talk.position() {
            position if position == 0 || self.is_demo => String::new(),
            _ => format!("conversation: {tokens} of {context} tokens; "),
        };
        let read = thousands(stats.prefilled);
        self.say(&format!("{counted}{read} tokens of the last prompt were read"))?;
        self.say(&line)
    }
}

/// Prints an answer on the terminal, without control characters. Thoughts are dimmed.
struct Screen<'a> {
    ui: &'a Ui,
    wrap: Wrap,
    in_thought: bool,
}

impl Screen<'_> {
    fn show(&mut self, piece: &str, is_thought: bool) -> std::io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.wrap.resize(columns());
        let mut text = String::new();
        if self.in_thought && !is_thought {
            text = self.ui.dimmed_output(self.wrap.push("\n"));
        }
        self.in_thought = is_thought;
        let piece = self.wrap.push(&clean(piece));
        text += &if is_thought { self.ui.dimmed_output(piece) } else { piece };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    }
}
