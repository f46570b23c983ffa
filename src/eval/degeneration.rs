//! Whether a model's own texts end in loops. Quantising to few bits can do that to a model whose
//! predictions on given text are still near the original's.
//!
//! From the beginnings of texts the model writes on, once greedily and once by sampling at
//! temperature 1. A run loops where its end repeats a stretch of at most [`PERIOD`] tokens over and
//! over. The reference writes on from the same beginnings with the same seeds, so that differences
//! are of pairs.

use super::{mean, pass};
use crate::engine::{Engine, Output, Scores};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use anyhow::Result;
use serde::Serialize;
use std::collections::HashSet;

/// Longest stretch whose repetition is a loop, in tokens.
pub const PERIOD: usize = 64;
/// A loop has repeated its stretch this often, and is at least so many tokens long.
const TIMES: usize = 4;
const LENGTH: usize = 32;
/// Tokens of the stretches that are counted as distinct.
const GRAM: usize = 4;

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Writing<'a> {
    /// One run of each kind begins with each of these.
    pub prompts: &'a [&'a [Token]],
    /// Most tokens of a run.
    pub tokens: usize,
    /// A run ends behind any of these.
    pub ends: &'a [Token],
    /// Ids from here on are never written.
    pub usable: usize,
}

/// A mean over runs with its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Mean {
    pub mean: f64,
    pub stderr: f64,
}

impl Mean {
    fn of(values: impl Iterator<Item = f64>) -> Mean {
        let (mean, stderr) = mean(&values.collect::<Vec<_>>());
        Mean { mean, stderr }
    }
}

/// What became of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    pub tokens: usize,
    pub looped: bool,
    /// Distinct stretches of four tokens over all of them.
    pub distinct: f64,
}

/// Runs of one kind by one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Runs {
    pub runs: usize,
    /// Share that ends in a loop.
    pub looped: Mean,
    /// Share of stretches of four tokens that are not a repetition.
    pub distinct_4: Mean,
    /// Tokens of a run.
    pub length: Mean,
}

/// How much more a model's runs loop, and how much more distinct they are, than the reference's
/// from the same beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    pub looped: Mean,
    pub distinct_4: Mean,
}

/// The two kinds of runs, each from every prompt.
#[derive(Clone, Debug, Default)]
pub struct Written {
    pub greedy: Vec<Run>,
    pub sampled: Vec<Run>,
}

/// Lets `engine` write. `progress` hears how many runs are done.
pub fn write(
    engine: &mut dyn Engine,
    writing: Writing<'_>,
    progress: &mut dyn FnMut(usize),
) -> Result<Written> {
    let mut written = Written::default();
    for (i, prompt) in writing.prompts.iter().enumerate() {
        for temperature in [0.0, 1.0] {
            let config = SamplerConfig { temperature, seed: i as u64, ..SamplerConfig::default() };
            let sampler = Sampler::new(config)?.usable(writing.usable.min(engine.info().vocab));
            let text = run(engine, prompt, &sampler, writing)?;
            let kind = if temperature == 0.0 { &mut written.greedy } else { &mut written.sampled };
            kind.push(Run::of(&text));
        }
        progress(2 * (i + 1));
    }
    Ok(written)
}

fn run(
    engine: &mut dyn Engine,
    prompt: &[Token],
    sampler: &Sampler,
    writing: Writing<'_>,
) -> Result<Vec<Token>> {
    engine.truncate(0, 0)?;
    let mut scores = Scores::default();
    for chunk in prompt.chunks(engine.info().max_rows) {
        pass(engine, chunk, Output::Logits, &mut scores)?;
    }
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + writing.tokens {
        let next = scores.pick(scores.rows() - 1, sampler, text.len(), &text)?;
        if writing.ends.contains(&next) {
            break;
        }
        text.push(next);
        pass(engine, &[next], Output::Logits, &mut scores)?;
    }
    Ok(text.split_off(prompt.len()))
}

impl Run {
    fn of(text: &[Token]) -> Run {
        let grams: HashSet<&[Token]> = text.windows(GRAM).collect();
        let all = text.len().saturating_sub(GRAM - 1);
        let distinct = if all == 0 { 1.0 } else { grams.len() as f64 / all as f64 };
        Run { tokens: text.len(), looped: ends_in_a_loop(text), distinct }
    }
}

/// Whether the end of a text is one stretch over and over.
fn ends_in_a_loop(text: &[Token]) -> bool {
    (1..=PERIOD.min(text.len() / TIMES)).any(|period| {
        let repeated = text.iter().rev().zip(text.iter().rev().skip(period));
        let same = repeated.take_while(|(a, b)| a == b).count();
        period + same >= (TIMES * period).max(LENGTH)
    })
}

impl Runs {
    pub fn of(runs: &[Run]) -> Runs {
        Runs {
            runs: runs.len(),
            looped: Mean::of(runs.iter().map(|r| f64::from(r.looped))),
            distinct_4: Mean::of(runs.iter().map(|r| r.distinct)),
            length: Mean::of(runs.iter().map(|r| r.tokens as f64)),
        }
    }
}

impl Difference {
    /// Run by run; both lists begin with the same prompts.
    pub fn of(runs: &[Run], reference: &[Run]) -> Difference {
        let pairs = || runs.iter().zip(reference);
        Difference {
            looped: Mean::of(pairs().map(|(a, b)| f64::from(a.looped) - f64::from(b.looped))),
            distinct_4: Mean::of(pairs().map(|(a, b)| a.distinct - b.distinct)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_end_that_repeats_is_a_loop() {
        let text: Vec<Token> = (0..200).map(|i| i * i % 197).collect();
        assert!(!ends_in_a_loop(&text) && !ends_in_a_loop(&[]) && !ends_in_a_loop(&[5; 31]));
        assert!(ends_in_a_loop(&[5; 32]));
        for period in [1, 3, 20, PERIOD] {
            let stretch = &text[..period];
            let looped = |times: usize| [&text[..], &stretch.repeat(times)].concat();
            let enough = TIMES.max(LENGTH.div_ceil(period));
            assert!(ends_in_a_loop(&looped(enough)), "{period}");
            assert!(!ends_in_a_loop(&looped(enough - 2)), "{period}");
            // It ended the loop again.
            assert!(!ends_in_a_loop(&[&looped(enough)[..], &[190, 191]].concat()), "{period}");
        }
        let long = text[..PERIOD + 1].repeat(6);
        assert!(!ends_in_a_loop(&long));
    }

    #[test]
    fn runs_are_summed_with_standard_errors_and_compared_in_pairs() {
        let run = |looped, distinct| Run { tokens: 10, looped, distinct };
        let ours = [run(true, 0.25), run(true, 0.5), run(false, 1.0), run(false, 1.0)];
        let theirs = [run(false, 1.0), run(true, 0.5), run(false, 1.0), run(false, 1.0)];
        let sum = Runs::of(&ours);
        assert_eq!((sum.runs, sum.looped.mean, sum.distinct_4.mean), (4, 0.5, 0.6875));
        assert!((sum.looped.stderr - (1.0f64 / 12.0).sqrt()).abs() < 1e-12, "{:?}", sum.looped);
        assert_eq!(sum.length, Mean { mean: 10.0, stderr: 0.0 });
        let difference = Difference::of(&ours, &theirs);
        assert_eq!((difference.looped.mean, difference.looped.stderr), (0.25, 0.25));
        assert_eq!(difference.distinct_4.mean, -0.1875);
        assert_eq!(Difference::of(&ours, &ours).looped, Mean::default());
        let text: Vec<Token> = [7, 8, 9, 7, 8, 9, 7].to_vec();
        let run = Run::of(&text);
        // 7897, 8978, 9789 and 7897 again.
        assert_eq!((run.tokens, run.distinct, run.looped), (7, 0.75, false));
        assert_eq!(Run::of(&[1, 2]).distinct, 1.0);
    }
}
