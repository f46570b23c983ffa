//! Measures how likely a model finds a text, and how much two models differ.
//!
//! Token i of a window is predicted from the tokens before it in the window; the first one is not
//! predicted. A text longer than the window is cut into consecutive windows, each with an empty
//! cache. Rows of logits are processed and dropped, chunk by chunk.

use crate::engine::{Engine, EngineExt, Input, Output, Rows, Scores, TokenTree};
use crate::models::images::whole;
use anyhow::{Result, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::{Token, is_place, math};
use serde::Serialize;

/// Results of one model on one text.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Tokens of the text.
    pub tokens: usize,
    /// Mean of `nll`, in nats, and the standard error of that mean.
    pub mean_nll: f64,
    pub nll_stderr: f64,
    /// e^mean_nll
    pub perplexity: f64,
    /// Negative log-likelihood of each predicted token, in nats.
    pub nll: Vec<f64>,
    /// Most likely next token at each position of the text; the lowest id on a tie.
    pub top1: Vec<Token>,
}

/// KL divergence of the reference's next-token distribution from the model's, in nats, over
/// predicted positions.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Divergence {
    /// Mean, with its standard error.
    pub mean: f64,
    pub stderr: f64,
    pub median: f64,
    pub p99: f64,
    pub max: f64,
}

/// Results of a model compared with a reference.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    pub figures: Figures,
    pub reference: Figures,
    pub kld: Divergence,
    /// Share of scored positions at which both models have the same most likely token, and its
    /// standard error.
    pub top1_agreement: f64,
    pub top1_stderr: f64,
    /// Perplexity divided by the reference's. Its standard error follows from the per-token
    /// differences of `nll`.
    pub ppl_ratio: f64,
    pub ppl_ratio_stderr: f64,
    /// KL divergence of each scored position, in nats.
    #[serde(skip)]
    divergences: Vec<f64>,
    #[serde(skip)]
    agreed: Vec<bool>,
}

/// A text, and how it is cut into windows.
#[derive(Clone, Copy, Debug)]
pub struct EvalTask<'a> {
    /// Evaluated exactly as given: no BOS is added. Image placeholders are not scored.
    pub ids: &'a [Token],
    /// Tokens per window; each starts with an empty cache.
    pub window: usize,
    /// Leading tokens of each window that are context only: predictions from them are not scored.
    pub skip: usize,
}

/// Evaluates `ids`. `progress` receives the number of processed tokens.
pub fn evaluate(
    engine: &mut dyn Engine,
    ids: &[Token],
    window: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Figures> {
    evaluate_task(engine, EvalTask { ids, window, skip: 0 }, progress)
}

/// Like [`evaluate`], for any task.
pub fn evaluate_task(
    engine: &mut dyn Engine,
    task: EvalTask<'_>,
    progress: &mut dyn FnMut(usize),
) -> Result<Figures> {
    let mut tally = LossTally::default();
    walk(engine, None, task, progress, &mut |rows, next| tally.take(&rows[0], next))?;
    tally.finite(task.ids.len())
}

/// Evaluates both models and their divergence. Their vocabularies must agree.
pub fn compare(
    engine: &mut dyn Engine,
    reference: &mut dyn Engine,
    ids: &[Token],
    window: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Comparison> {
    compare_task(engine, reference, EvalTask { ids, window, skip: 0 }, progress)
}

/// Like [`compare`], for any task.
pub fn compare_task(
    engine: &mut dyn Engine,
    reference: &mut dyn Engine,
    task: EvalTask<'_>,
    progress: &mut dyn FnMut(usize),
) -> Result<Comparison> {
    let vocab = reference.info().vocab;
    if engine.info().vocab != vocab {
        let what = format!("the model has {} tokens, the reference {vocab}", engine.info().vocab);
        return Err(Fault::model(what).help("compare models of one vocabulary").into());
    }
    let (mut tally, mut other, mut out) =
        (LossTally::default(), LossTally::default(), Comparison::default());
    walk(engine, Some(reference), task, progress, &mut |rows, next| {
        if next.is_some() {
            out.divergences.push(math::kl_divergence(rows[1].logits, rows[0].logits));
            out.agreed.push(rows[0].best() == rows[1].best());
        }
        tally.take(&rows[0], next);
        other.take(&rows[1], next);
    })?;
    out.figures = tally.finite(task.ids.len())?;
    out.reference = other.finite(task.ids.len())?;
    out.summarise();
    Ok(out)
}

impl Comparison {
    /// Combines the results of several texts.
    pub fn all(parts: &[Comparison]) -> Comparison {
        let join = |part: &dyn Fn(&Comparison) -> &Figures| Figures::all(parts.iter().map(part));
        let mut out = Comparison {
            figures: join(&|c| &c.figures),
            reference: join(&|c| &c.reference),
            divergences: parts.iter().flat_map(|c| &c.divergences).copied().collect(),
            agreed: parts.iter().flat_map(|c| &c.agreed).copied().collect(),
            ..Comparison::default()
        };
        out.summarise();
        out
    }

    fn summarise(&mut self) {
        self.kld = summary(self.divergences.clone());
        let agreed: Vec<f64> = self.agreed.iter().map(|a| f64::from(*a)).collect();
        (self.top1_agreement, self.top1_stderr) = mean(&agreed);
        self.ppl_ratio = self.figures.perplexity / self.reference.perplexity;
        let both = self.figures.nll.iter().zip(&self.reference.nll);
        let more: Vec<f64> = both.map(|(own, other)| own - other).collect();
        self.ppl_ratio_stderr = self.ppl_ratio * mean(&more).1;
    }
}

impl Figures {
    /// Combines the results of several texts.
    pub fn all<'a>(parts: impl Iterator<Item = &'a Figures>) -> Figures {
        let (mut tally, mut tokens) = (LossTally::default(), 0);
        for part in parts {
            tokens += part.tokens;
            tally.nll.extend_from_slice(&part.nll);
            tally.top1.extend_from_slice(&part.top1);
        }
        tally.figures(tokens)
    }
}

/// Logits of one position with their log-sum-exp.
struct ScoredRow<'a> {
    logits: &'a [f32],
    log_sum: f64,
}

impl<'a> ScoredRow<'a> {
    /// Fails if a logit is NaN or infinite, since the row then has no probabilities.
    fn new(logits: &'a [f32]) -> Result<Self> {
        let log_sum = math::log_sum_exp(logits);
        ensure!(log_sum.is_finite(), Fault::damaged("the model gave a logit that is not a number"));
        Ok(ScoredRow { logits, log_sum })
    }

    /// Returns the most likely token; the lowest id on a tie.
    fn best(&self) -> Token {
        let better = |b: (usize, f32), (i, v): (usize, &f32)| if *v > b.1 { (i, *v) } else { b };
        self.logits.iter().enumerate().fold((0, f32::NEG_INFINITY), better).0 as Token
    }

    fn nll(&self, token: Token) -> f64 {
        self.log_sum - self.logits[token as usize] as f64
    }
}

/// Runs the text through the engine and the reference in parallel windows. `each` receives the rows
/// of a position, and the token that follows it in the window if that is scored.
fn walk(
    engine: &mut dyn Engine,
    mut reference: Option<&mut dyn Engine>,
    task: EvalTask<'_>,
    progress: &mut dyn FnMut(usize),
    each: &mut dyn FnMut(&[ScoredRow<'_>], Option<Token>),
) -> Result<()> {
    let info = engine.info();
    let is_shown = |id: Token| info.images.as_ref().is_some_and(|images| images.name(id).is_some());
    let is_known = |id: &Token| (*id as usize) < info.vocab || is_shown(*id);
    if let Some(bad) = task.ids.iter().find(|id| !is_known(id)) {
        let what = format!(
            "token {bad} is outside the vocabulary, which has {} tokens",
            engine.info().vocab
        );
        return Err(Fault::model(what)
            .help("were the ids made with this model's tokenizer?")
            .into());
    }
    let mut chunk = engine.info().max_rows;
    if let Some(other) = &reference {
        chunk = chunk.min(other.info().max_rows);
    }
    let mut scores = [Scores::default(), Scores::default()];
    let mut done = 0;
    for window in task.ids.chunks(task.window.max(1)) {
        engine.truncate(0, 0)?;
        if let Some(other) = &mut reference {
            other.truncate(0, 0)?;
        }
        let mut start = 0;
        while start < window.len() {
            let rest = &window[start..];
            let tokens = &rest[..whole(rest, chunk.min(rest.len()))];
            let [own, others] = &mut scores;
            pass(engine, tokens, own)?;
            if let Some(other) = &mut reference {
                pass(*other, tokens, others)?;
            }
            let sides = if reference.is_some() { 2 } else { 1 };
            for i in 0..tokens.len() {
                let rows = scores[..sides].iter().map(|s| ScoredRow::new(s.row(i)));
                let rows = rows.collect::<Result<Vec<_>>>()?;
                let at = start + i;
                let is_scored = |next: &Token| at >= task.skip && !is_place(*next);
                each(&rows, window.get(at + 1).copied().filter(is_scored));
            }
            start += tokens.len();
            done += tokens.len();
            progress(done);
        }
    }
    Ok(())
}

/// Runs one chunk of a window.
fn pass(engine: &mut dyn Engine, tokens: &[Token], scores: &mut Scores) -> Result<()> {
    engine.run(&[Input::new(0, &TokenTree::chain(tokens), Rows::All)], Output::Logits, scores)?;
    engine.commit(&[(0, &(0..tokens.len() as u32).collect::<Vec<_>>())])
}

#[derive(Default)]
struct LossTally {
    nll: Vec<f64>,
    top1: Vec<Token>,
}

impl LossTally {
    fn take(&mut self, row: &ScoredRow<'_>, next: Option<Token>) {
        self.top1.push(row.best());
        self.nll.extend(next.map(|token| row.nll(token)));
    }

    fn figures(self, tokens: usize) -> Figures {
        let (mean_nll, nll_stderr) = mean(&self.nll);
        Figures {
            tokens,
            mean_nll,
            nll_stderr,
            perplexity: mean_nll.exp(),
            nll: self.nll,
            top1: self.top1,
        }
    }

    /// Returns the results of a text. Fails if the perplexity is infinite.
    fn finite(self, tokens: usize) -> Result<Figures> {
        let figures = self.figures(tokens);
        let is_finite = figures.perplexity.is_finite();
        ensure!(is_finite, Fault::damaged("the model's perplexity is infinite"));
        Ok(figures)
    }
}

fn summary(mut values: Vec<f64>) -> Divergence {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        values.get(((values.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0.0)
    };
    let (median, p99, max) = (at(0.5), at(0.99), at(1.0));
    let (mean, stderr) = mean(&values);
    Divergence { mean, stderr, median, p99, max }
}

/// Returns the mean and its standard error, treating the values as independent: the standard
/// deviation divided by the root of their number.
fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (mean, if n > 1.0 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::PlannedEngine;
    use crate::engine::planned::EngineOptions;
    use crate::models::{Config, Weights};
    use gemma_base::compute::KvFormat;
    use gemma_base::compute::cpu::{CpuExecutor, CpuOptions};
    use gemma_base::tensor::Format;

    #[test]
    fn an_infinite_perplexity_is_an_error() {
        let finite = |nll: f64| LossTally { nll: vec![nll; 3], top1: vec![0] }.finite(4);
        assert_eq!(finite(1.0).unwrap().perplexity, 1f64.exp());
        for nll in [f64::INFINITY, 800.0] {
            let error = finite(nll).unwrap_err().to_string();
            assert!(error.contains("infinite"), "{error}");
        }
    }

    fn engine(format: Format) -> PlannedEngine {
        let json = serde_json::json!({
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "vocab_size": 50, "sliding_window": 20,
        });
        let weights = Weights::synthetic(Config::from_json(&json).unwrap(), move |_| format, 3);
        let exec = CpuExecutor::new(CpuOptions::default()).unwrap();
        PlannedEngine::new(
            &weights,
            Box::new(exec),
            EngineOptions { context: 400, kv: KvFormat::F32 },
        )
        .unwrap()
    }

    fn ids() -> Vec<Token> {
        (0..300).map(|i| i * i % 47).collect()
    }

    #[test]
    fn windows_start_afresh_and_predict_all_but_their_first_token() {
        let whole = evaluate(&mut engine(Format::F32), &ids(), 300, &mut |_| {}).unwrap();
        assert_eq!((whole.nll.len(), whole.top1.len()), (299, 300));
        let cut = evaluate(&mut engine(Format::F32), &ids(), 100, &mut |_| {}).unwrap();
        assert_eq!(cut.nll.len(), 297);
        assert_eq!(cut.nll[..99], whole.nll[..99]);
        let second =
            evaluate(&mut engine(Format::F32), &ids()[100..200], 100, &mut |_| {}).unwrap();
        assert_eq!(cut.nll[99..198], second.nll[..]);
    }

    #[test]
    fn a_mean_has_the_standard_error_of_its_values() {
        assert_eq!(mean(&[]), (0.0, 0.0));
        assert_eq!(mean(&[3.0]), (3.0, 0.0));
        // Four values with a standard deviation of 2.
        let (at, error) = mean(&[1.0, 1.0, 1.0, 5.0]);
        assert!((at - 2.0).abs() < 1e-12 && (error - 1.0).abs() < 1e-12, "{at} +- {error}");
    }

    #[test]
    fn a_model_is_no_distance_from_itself_and_some_from_a_coarser_one() {
        let same =
            compare(&mut engine(Format::F32), &mut engine(Format::F32), &ids(), 300, &mut |_| {})
                .unwrap();
        assert_eq!((same.kld.max, same.top1_agreement, same.ppl_ratio), (0.0, 1.0, 1.0));
        assert_eq!((same.kld.stderr, same.top1_stderr, same.ppl_ratio_stderr), (0.0, 0.0, 0.0));
        let other = compare(
            &mut engine(Format::I4_G32),
            &mut engine(Format::F32),
            &ids(),
            300,
            &mut |_| {},
        )
        .unwrap();
        assert!(
            other.kld.mean > 0.0
                && other.kld.median <= other.kld.p99
                && other.kld.p99 <= other.kld.max,
            "{:?}",
            other.kld
        );
        // The standard error of a share p over n positions is the root of p (1 - p) / (n - 1).
        let (p, n) = (other.top1_agreement, other.figures.nll.len() as f64);
        assert!((other.top1_stderr - (p * (1.0 - p) / (n - 1.0)).sqrt()).abs() < 1e-12);
        // The standard error of the ratio is that of the mean difference, times the ratio.
        let both = other.figures.nll.iter().zip(&other.reference.nll);
        let (mut sum, mut squares) = (0.0, 0.0);
        for (own, others) in both {
            sum += own - others;
            squares += (own - others) * (own - others);
        }
        let error = other.ppl_ratio * ((squares / n - (sum / n) * (sum / n)) / (n - 1.0)).sqrt();
        assert!(error > 0.0 && (other.ppl_ratio_stderr - error).abs() < 1e-9, "{error}");
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_refused_wherever_it_stands() {
        for place in [0, 1, 128, 299] {
            let mut ids = ids();
            ids[place] = 50;
            let error = evaluate(&mut engine(Format::F32), &ids, 300, &mut |_| {}).unwrap_err();
            assert!(
                gemma_base::error::fault_of(&error).unwrap().what.contains("token 50"),
                "{error}"
            );
        }
    }
}
