//! Timing of prefill, decode and passes over several rows, on any engine.

use crate::draft::sources::assistant::BEST;
use crate::engine::{
    Assistant, AssistantNode, Engine, EngineExt, Input, Output, Rows, Scores, TokenTree,
};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Repeated measurements of the same quantity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub runs: Vec<f64>,
}

impl Figure {
    pub fn of(runs: Vec<f64>) -> Self {
        let mut sorted = runs.clone();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let median = match n {
            0 => 0.0,
            _ => (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
        };
        let (min, max) =
            (sorted.first().copied().unwrap_or(0.0), sorted.last().copied().unwrap_or(0.0));
        Figure { median, min, max, runs }
    }

    /// Returns the first and the third quartile; 0 without measurements.
    pub fn quartiles(&self) -> [f64; 2] {
        let mut sorted = self.runs.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            sorted
                .get((share * sorted.len().saturating_sub(1) as f64).round() as usize)
                .copied()
                .unwrap_or(0.0)
        };
        [at(0.25), at(0.75)]
    }

    /// Converts each measurement, for example seconds to tokens per second.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Figure::of(self.runs.iter().map(|x| f(*x)).collect())
    }
}

/// Returns `n` pseudorandom token ids. They are the same each time.
pub fn tokens(vocab: usize, n: usize) -> Vec<Token> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as Token
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Evaluates and commits `tokens` in passes of the engine's maximum size. Returns the seconds.
pub fn prefill(engine: &mut dyn Engine, tokens: &[Token], scores: &mut Scores) -> Result<f64> {
    let start = Instant::now();
    for chunk in tokens.chunks(engine.info().max_rows) {
        engine.forward(&TokenTree::chain(chunk), Rows::Last, scores)?;
        let path: Vec<u32> = (0..chunk.len() as u32).collect();
        engine.commit(&[(0, &path)])?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Returns the kind of output that the sampler needs.
fn output(sampler: &Sampler) -> Output {
    sampler.decisive().map_or(Output::Logits, |(n, usable)| Output::Best { n, usable })
}

/// Generates `n` tokens one by one, sampling included. Returns the seconds.
pub fn decode(
    engine: &mut dyn Engine,
    sampler: &Sampler,
    n: usize,
    scores: &mut Scores,
) -> Result<f64> {
    let mut token = 0;
    let start = Instant::now();
    for _ in 0..n {
        let (tree, output) = (TokenTree::root(token), output(sampler));
        engine.run(&[Input::new(0, &tree, Rows::All)], output, scores)?;
        engine.commit(&[(0, &[0])])?;
        token = scores.pick(0, sampler, engine.position(0), &[])?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Evaluates a chain of `rows` tokens, samples each row, and commits nothing. Returns the seconds.
pub fn verify(
    engine: &mut dyn Engine,
    sampler: &Sampler,
    rows: usize,
    scores: &mut Scores,
) -> Result<f64> {
    let tree = TokenTree::chain(&tokens(engine.info().vocab, rows));
    let start = Instant::now();
    engine.run(&[Input::new(0, &tree, Rows::All)], output(sampler), scores)?;
    for row in 0..rows {
        std::hint::black_box(scores.pick(row, sampler, engine.position(0) + row, &[])?);
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Bits of logits, and the best tokens instead if the device lists them.
type Bits = Vec<(Vec<u32>, Vec<Vec<(Token, u32)>>)>;

/// Evaluates a chain of `rows` tokens, once as in generation and once with all logits.
///
/// Returns the scores of normal passes, then of passes with poisoned buffers.
pub fn poisoned(engine: &mut dyn Engine, sampler: &Sampler, rows: usize) -> Result<[Bits; 2]> {
    let tree = TokenTree::chain(&tokens(engine.info().vocab, rows));
    let (mut both, mut scores) = ([Vec::new(), Vec::new()], Scores::default());
    for (bits, on) in both.iter_mut().zip([false, true]) {
        for output in [output(sampler), Output::Logits] {
            engine.device().context("the engine has no device")?.set_poison(on);
            engine.run(&[Input::new(0, &tree, Rows::All)], output, &mut scores)?;
            let best = |list: &Option<Vec<(Token, f32)>>| {
                list.iter().flatten().map(|(token, logit)| (*token, logit.to_bits())).collect()
            };
            let logits = scores.logits.iter().map(|logit| logit.to_bits()).collect();
            bits.push((logits, scores.best.iter().map(best).collect()));
        }
    }
    engine.device().context("the engine has no device")?.set_poison(false);
    Ok(both)
}

/// Runs a round and returns its seconds.
///
/// The assistant drafts a chain of `drafts` tokens, a pass scores them, a token is chosen for each
/// row, and the first is committed. `token` is the newest token, before and after the round.
pub fn round(
    engine: &mut dyn Engine,
    sampler: &Sampler,
    drafts: usize,
    token: &mut Token,
    scores: &mut Scores,
) -> Result<f64> {
    let start = Instant::now();
    let mut chain = vec![*token];
    if drafts > 0 {
        let (assistant, output) = begun(engine)?;
        let greedy = Sampler::new(SamplerConfig::default())?;
        for depth in 0..drafts {
            let parent = depth.checked_sub(1).map(|parent| parent as u32);
            let node = AssistantNode { sequence: 0, parent, token: chain[depth] };
            assistant.evaluate(&[node], output, scores)?;
            chain.push(scores.pick(0, &greedy, 0, &[])?);
        }
    }
    engine.run(&[Input::new(0, &TokenTree::chain(&chain), Rows::All)], output(sampler), scores)?;
    let pick = |row| scores.pick(row, sampler, engine.position(0) + row + 1, &[]);
    *token = (0..chain.len()).map(pick).collect::<Result<Vec<Token>>>()?[0];
    engine.commit(&[(0, &[0])])?;
    Ok(start.elapsed().as_secs_f64())
}

/// Times a draft step over `nodes` children of a root. A round must have run before.
pub fn draft_step(
    engine: &mut dyn Engine,
    nodes: usize,
    token: Token,
    scores: &mut Scores,
) -> Result<f64> {
    let (assistant, output) = begun(engine)?;
    assistant.evaluate(&[AssistantNode { sequence: 0, parent: None, token }], output, scores)?;
    let child = |token| AssistantNode { sequence: 0, parent: Some(0), token };
    let children: Vec<AssistantNode> = (0..nodes as u32).map(child).collect();
    let start = Instant::now();
    assistant.evaluate(&children, output, scores)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Begins drafting after the newest committed token.
fn begun(engine: &mut dyn Engine) -> Result<(&mut dyn Assistant, Output)> {
    let output = Output::Best { n: BEST, usable: engine.info().vocab };
    let assistant = engine.assistant().context("there is no assistant")?;
    ensure!(assistant.begin(&[0])?[0], "the newest token was not scored");
    Ok((assistant, output))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Figure::of(vec![3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(Figure::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
        let rate = Figure::of(vec![2.0, 4.0]).map(|s| 8.0 / s);
        assert_eq!((rate.min, rate.max), (2.0, 4.0));
        assert_eq!(Figure::of(Vec::new()), Figure::default());
        assert_eq!(Figure::of((0..9).rev().map(f64::from).collect()).quartiles(), [2.0, 6.0]);
        assert_eq!(
            (Figure::of(vec![3.0]).quartiles(), Figure::default().quartiles()),
            ([3.0; 2], [0.0; 2])
        );
    }

    #[test]
    fn tokens_stay_in_the_vocabulary_and_repeat() {
        let a = tokens(100, 1000);
        assert!(a.iter().all(|t| *t < 100));
        assert_eq!(a, tokens(100, 1000));
        assert!(a.iter().collect::<std::collections::BTreeSet<_>>().len() > 50);
    }
}
