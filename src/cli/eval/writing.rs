//! `gemma eval --degeneration`: texts that the models write themselves, and how many end in loops.

use super::{Eval, Part};
use crate::cli::ui::Ui;
use crate::engine::Engine;
use crate::error::Fault;
use crate::eval::degeneration::{Difference, Mean, Runs, Writing, Written, write};
use crate::runtime::Model;
use crate::tensor::Token;
use anyhow::Result;
use serde_json::{Value, json};

/// Tokens of the beginnings, if the texts have so many.
const BEGINNING: usize = 64;

/// What the models are to write.
pub struct Assignment {
    beginnings: Vec<Vec<Token>>,
    tokens: usize,
    ends: Vec<Token>,
    usable: usize,
}

impl Assignment {
    /// `None` where nothing was asked for. Beginnings are spread evenly over the texts, those of
    /// texts behind a BOS of their own; ids are taken as they are.
    pub fn of(
        options: &Eval,
        model: &Model,
        parts: &[Part],
        ui: &Ui,
    ) -> Result<Option<Assignment>> {
        let Some(runs) = options.degeneration.map(usize::from) else { return Ok(None) };
        let (config, tokens) = (model.config(), options.run_tokens);
        if BEGINNING + tokens > config.max_position {
            let most = config.max_position.saturating_sub(BEGINNING);
            let what = format!(
                "runs of {tokens} tokens behind {BEGINNING} are more than the model's context of {}",
                config.max_position
            );
            return Err(Fault::usage(what)
                .help(format!("give --run-tokens {most} or fewer"))
                .into());
        }
        let behind_bos = options.ids.is_empty();
        let usable = if behind_bos { model.tokenizer(ui)?.vocab() } else { config.vocab };
        let bodies: Vec<Vec<Token>> = parts
            .iter()
            .map(|(_, ids)| {
                ids.iter().copied().filter(|id| !(behind_bos && *id == config.bos)).collect()
            })
            .collect();
        let of_each = runs.div_ceil(bodies.len());
        let beginning = |run: usize| {
            let body = &bodies[run % bodies.len()];
            let length = (BEGINNING - usize::from(behind_bos)).min(body.len());
            let at = run / bodies.len() * (body.len() - length) / of_each;
            let bos = behind_bos.then_some(config.bos);
            bos.into_iter().chain(body[at..at + length].iter().copied()).collect()
        };
        Ok(Some(Assignment {
            beginnings: (0..runs).map(beginning).collect(),
            tokens,
            ends: config.eos.clone(),
            usable,
        }))
    }

    /// Positions that a run takes.
    pub fn context(&self) -> usize {
        BEGINNING + self.tokens
    }

    pub fn write(&self, engine: &mut dyn Engine, who: &str, ui: &Ui) -> Result<Written> {
        let prompts: Vec<&[Token]> = self.beginnings.iter().map(Vec::as_slice).collect();
        let bar = ui.bar(&format!("{who} writes"), 2 * prompts.len() as u64);
        if bar.is_hidden() && !ui.is_quiet() {
            ui.line(&format!("{who} writes {} texts", 2 * prompts.len()));
        }
        let writing = Writing {
            prompts: &prompts,
            tokens: self.tokens,
            ends: &self.ends,
            usable: self.usable,
        };
        let written = write(engine, writing, &mut |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();
        Ok(written)
    }
}

/// JSON and text of what was written, beside the reference's if there is one.
pub fn render(
    assignment: &Assignment,
    own: &Written,
    reference: Option<&Written>,
) -> Result<(Value, String)> {
    let mut json = json!({"beginning_tokens": BEGINNING, "run_tokens": assignment.tokens});
    let mut text = String::new();
    for (name, of) in [
        ("greedy", (|w: &Written| w.greedy.clone()) as fn(&Written) -> _),
        ("sampled", |w: &Written| w.sampled.clone()),
    ] {
        let runs = Runs::of(&of(own));
        let mut found = serde_json::to_value(runs)?;
        let percent = |m: Mean| format!("{:.1} +- {:.1} %", 100.0 * m.mean, 100.0 * m.stderr);
        let share = |m: Mean| format!("{:.3} +- {:.3}", m.mean, m.stderr);
        let mut looped = percent(runs.looped);
        let mut distinct = share(runs.distinct_4);
        if let Some(other) = reference {
            let (others, beside) = (Runs::of(&of(other)), Difference::of(&of(own), &of(other)));
            let more = percent(beside.looped);
            looped += &format!(" (reference {}, difference {more})", percent(others.looped));
            let more = share(beside.distinct_4);
            distinct += &format!(" (reference {}, difference {more})", share(others.distinct_4));
            found["reference"] = serde_json::to_value(others)?;
            found["difference"] = serde_json::to_value(beside)?;
        }
        text += &format!(
            "{name:8}{} runs of up to {} tokens: {looped} end in a loop; distinct 4-grams \
                {distinct}\n",
            runs.runs, assignment.tokens
        );
        json[name] = found;
    }
    Ok((json, text))
}
