//! Sampling as a pure function of (seed, position, logits, context).
//!
//! The token at a position is `argmax(logit + T * gumbel(seed, position, token))` over the tokens
//! that pass the filters: one exact draw from their softmax at temperature T (the Gumbel-max
//! trick). The noise is a function of a key, not of a stream. A drafter that ranks its candidates
//! with the same noise therefore predicts the target's own draw, and drafts cannot change the
//! sampled token.
//!
//! Order: grammar, bans, biases and penalties ([`adjust`]), temperature, top-k, top-p, min-p. Ties
//! resolve to the lowest id. Sums are computed best first, in f64.

mod adjust;
mod budget;
mod noise;
mod rule;
mod select;

use std::sync::Arc;

use anyhow::{Result, bail};

use adjust::Adjustments;
#[cfg(any(test, feature = "testing"))]
pub use adjust::LOOKED_AT;
pub use budget::ThoughtBudget;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
pub use noise::gumbel;
pub use rule::{Mask, TokenRule};
use select::{LogitRow, top_lowered};

/// Number of candidates of a draft row that are ranked, unless top-k is smaller.
const RANKED: usize = 128;
/// Penalty in nats for a draft candidate that the filters drop. The target's own filters may keep
/// it.
const DROPPED: f32 = 3.0;
/// Tokens below `e^-40` of the best one are left out of the top-p sum.
const NEGLIGIBLE: f32 = 40.0;

#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// 0 picks the largest logit.
    pub temperature: f32,
    /// Keep the k best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest best tokens with probabilities that reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this probability relative to the best one; 0 keeps all.
    pub min_p: f32,
    /// Divides (if positive) or multiplies (if negative) the logits of tokens in prompt and answer;
    /// 1 has no effect.
    pub repeat_penalty: f32,
    /// Number of last tokens that the repetition penalty counts; -1 for the whole text.
    pub repeat_last_n: i64,
    /// Subtracted from the logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once per occurrence.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens; -100 bans. The last bias of a token applies.
    pub logit_bias: Vec<(Token, f32)>,
    pub seed: u64,
}

impl Default for SamplerConfig {
    /// Returns greedy settings.
    fn default() -> Self {
        SamplerConfig {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: -1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// A draft model's row of logits, with the target's sampling settings applied.
#[derive(Clone, Debug, Default)]
pub struct Tempered {
    /// The most likely tokens with log-probabilities normalised over the list, best first. Tokens
    /// that the filters may drop are at the end.
    pub list: Vec<(Token, f32)>,
    scale: f32,
    norm: f32,
}

impl Tempered {
    /// Returns the log-probability of an unlisted token, given its logit.
    pub fn log_prob(&self, logit: f32) -> f32 {
        logit * self.scale - self.norm - DROPPED
    }
}

/// Returns the `n` tokens with the largest logits, best first. Fails if the row has no finite
/// maximum.
pub fn best(logits: &[f32], n: usize) -> Result<Vec<(Token, f32)>> {
    Ok(LogitRow::new(logits, Vec::new())?.top(n))
}

#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    /// First id of the padding; it and larger ids are never picked.
    usable: usize,
    /// Ascending.
    banned: Vec<Token>,
    rule: Option<Arc<dyn TokenRule>>,
    adjustments: Adjustments,
}

impl Sampler {
    /// Creates a sampler. Fails for settings out of range.
    pub fn new(config: SamplerConfig) -> Result<Self> {
        let check = |ok: bool, what: String| if ok { Ok(()) } else { Err(Fault::usage(what)) };
        let SamplerConfig { temperature: t, top_p, min_p, .. } = config;
        check(t.is_finite() && t >= 0.0, format!("the temperature must be 0 or more, not {t}"))?;
        check(
            top_p > 0.0 && top_p <= 1.0,
            format!("top-p must be above 0 and at most 1, not {top_p}"),
        )?;
        check((0.0..=1.0).contains(&min_p), format!("min-p must be between 0 and 1, not {min_p}"))?;
        let (adjustments, banned) = Adjustments::new(&config)?;
        Ok(Sampler { config, usable: usize::MAX, banned, rule: None, adjustments })
    }

    /// Sets the start of the answer, after `prompt` tokens. Only the first call has an effect, so
    /// that a resumed answer keeps its start.
    pub fn answering(mut self, prompt: usize) -> Self {
        self.adjustments.begin_answer(prompt);
        self
    }

    /// Excludes ids from `usable` upwards: the padding rows of a checkpoint's vocabulary.
    pub fn usable(mut self, usable: usize) -> Self {
        self.usable = usable;
        self
    }

    /// Excludes these tokens.
    pub fn ban(mut self, tokens: impl IntoIterator<Item = Token>) -> Self {
        self.banned.extend(tokens);
        self.banned.sort_unstable();
        self
    }

    /// Excludes tokens that the rule forbids.
    pub fn under(mut self, rule: Arc<dyn TokenRule>) -> Self {
        self.rule = Some(rule);
        self
    }

    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Returns whether [`pick`](Self::pick) and [`temper`](Self::temper) read their `context`.
    pub fn reads_context(&self) -> bool {
        self.adjustments.reads_context() || self.rule.is_some()
    }

    /// Returns the mask of tokens that may follow a text, or `None` if there is no restriction.
    pub fn mask(&self, context: &[Token]) -> Result<Option<Arc<Mask>>> {
        self.rule.as_ref().map_or(Ok(None), |rule| rule.mask(context))
    }

    /// Announces that all later contexts begin with `history`. Penalties count its tokens now.
    pub fn settle(&mut self, history: &[Token]) {
        self.adjustments.settle(history);
        if let Some(rule) = &self.rule {
            rule.settle(history);
        }
    }

    /// Returns whether a rule's masks may take long, see [`TokenRule::is_slow`].
    pub fn is_slow(&self) -> bool {
        self.rule.as_ref().is_some_and(|rule| rule.is_slow())
    }

    /// Returns whether the mask after `history` is already computed, see [`TokenRule::is_ready`].
    pub fn is_ready(&self, history: &[Token]) -> bool {
        self.rule.as_ref().is_none_or(|rule| rule.is_ready(history))
    }

    /// Returns the token at `position`, given its logits and all tokens before it. Fails for NaN
    /// logits.
    pub fn pick(&self, position: usize, logits: &[f32], context: &[Token]) -> Result<Token> {
        let Some(mask) = self.mask(context)? else {
            return self.pick_any(position, logits, context);
        };
        if mask.is_empty() {
            // The latest token was allowed, but after it the grammar exceeded its work limit.
            let fault = Fault::usage("the grammar is too complex: nothing can follow the text");
            return Err(fault.help("use fewer optional parts, repetitions and properties").into());
        }
        match mask.only().filter(|&token| self.allows(token)) {
            Some(token) => Ok(token),
            None => {
                let mut masked = Vec::with_capacity(logits.len());
                mask.apply(logits, |column| column as Token, &mut masked);
                let picked = self.pick_any(position, &masked, context);
                let is_left = |(token, logit): (usize, &f32)| {
                    *logit != f32::NEG_INFINITY && self.allows(token as Token)
                };
                if picked.is_err() && !masked.iter().enumerate().any(is_left) {
                    let fault = Fault::usage("all tokens that the grammar allows are banned");
                    return Err(fault.help("ban fewer tokens, or change the grammar").into());
                }
                picked
            }
        }
    }

    fn pick_any(&self, position: usize, logits: &[f32], context: &[Token]) -> Result<Token> {
        let config = &self.config;
        let row = self.row(logits, context)?;
        if config.temperature == 0.0 {
            return Ok(row.top(1)[0].0);
        }
        if config.top_k == 0 && config.top_p >= 1.0 {
            return Ok(self.pick_at_least(
                row.max() + config.temperature * libm::logf(config.min_p),
                position,
                &row,
            ));
        }
        let mut best = (0, f64::NEG_INFINITY);
        for (token, logit) in self.survivors(&row) {
            self.improve(&mut best, token, logit, gumbel(config.seed, position, token));
        }
        Ok(best.0)
    }

    /// Returns (n, usable) if the n best logits of ids below `usable` determine the result of
    /// [`pick`](Self::pick). `None` means that all logits may matter.
    pub fn decisive(&self) -> Option<(usize, usize)> {
        let kept = match (self.config.temperature == 0.0, self.config.top_k) {
            (true, _) => 1,
            (false, 0) => return None,
            (false, k) => k,
        };
        let is_plain = self.rule.is_none() && self.adjustments.is_empty();
        is_plain.then_some((kept + self.banned.len(), self.usable))
    }

    /// Like [`pick`](Self::pick), from a list of at least the [`decisive`](Self::decisive) logits,
    /// best first.
    pub fn pick_best(&self, position: usize, best: &[(Token, f32)]) -> Result<Token> {
        let config = &self.config;
        let allowed = |(token, logit): &&(Token, f32)| {
            self.banned.binary_search(token).is_err()
                && (*token as usize) < self.usable
                && *logit > f32::NEG_INFINITY
        };
        let list: Vec<(Token, f32)> =
            best.iter().filter(allowed).take(config.top_k.max(1)).copied().collect();
        let Some(&(first, max)) = list.first() else {
            bail!("no token can be picked: all logits are banned or minus infinity")
        };
        if max == f32::INFINITY {
            bail!(Fault::damaged("the model gave an infinite logit"));
        }
        if config.temperature == 0.0 {
            return Ok(first);
        }
        let kept = self.passing(&list, self.mass(&list, max), max);
        let mut choice = (0, f64::NEG_INFINITY);
        for &(token, logit) in &list[..kept] {
            self.improve(&mut choice, token, logit, gumbel(config.seed, position, token));
        }
        Ok(choice.0)
    }

    /// Returns the `n` tokens with the largest logits, best first, without penalties, biases and
    /// bans.
    pub fn best(&self, logits: &[f32], n: usize) -> Result<Vec<(Token, f32)>> {
        best(&logits[..logits.len().min(self.usable)], n)
    }

    /// Computes a draft row's most likely tokens under the target's settings.
    ///
    /// Applies temperature, top-k, penalties and biases. Tokens that top-p and min-p would drop
    /// stay in the list with a penalty, because the draft may be wrong about them. Bans and the
    /// rule are not applied, because the list holds columns of the row, which may not be tokens:
    /// see [`allows`](Self::allows) and [`mask`](Self::mask). `column_of` returns a token's column,
    /// `token_of` the token of a column.
    pub fn temper(
        &self,
        logits: &[f32],
        context: &[Token],
        column_of: impl Fn(Token) -> Option<usize>,
        token_of: impl Fn(usize) -> Token,
        out: &mut Tempered,
    ) -> Result<()> {
        let counts = self.adjustments.count(context);
        let list = if self.adjustments.only_lower() {
            let row = LogitRow::new(logits, counts.biased(logits, column_of))?;
            let lower = |column, logit| counts.penalised(token_of(column as usize), logit);
            match self.adjustments.reads_context() {
                true => top_lowered(&row, self.ranked(), lower),
                false => row.top(self.ranked()),
            }
        } else {
            LogitRow::new(logits, counts.patches(logits, column_of))?.top(self.ranked())
        };
        if list.is_empty() {
            bail!("no token can be picked: the penalties leave no finite logit");
        }
        self.temper_list(list, out);
        Ok(())
    }

    /// Like [`temper`](Self::temper), from a list of a draft row's largest logits, best first.
    /// Unlisted tokens count as impossible.
    pub fn temper_best(
        &self,
        best: &[(Token, f32)],
        context: &[Token],
        out: &mut Tempered,
    ) -> Result<()> {
        let mut list = best.to_vec();
        if !self.adjustments.is_empty() {
            let counts = self.adjustments.count(context);
            list.iter_mut().for_each(|(token, logit)| *logit = counts.adjusted(*token, *logit));
            list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        }
        if !list.iter().all(|c| c.1.is_finite()) || list.is_empty() {
            bail!("the model gave no finite logit");
        }
        list.truncate(self.ranked());
        self.temper_list(list, out);
        Ok(())
    }

    /// Returns the number of ranked tokens of a draft row.
    fn ranked(&self) -> usize {
        let SamplerConfig { temperature, top_k, .. } = self.config;
        if top_k == 0 || temperature == 0.0 { RANKED } else { RANKED.min(top_k) }
    }

    /// Applies the temperature to a non-empty list, best first.
    fn temper_list(&self, list: Vec<(Token, f32)>, out: &mut Tempered) {
        let (temperature, max) = (self.config.temperature, list[0].1);
        out.list = list;
        let kept = if temperature == 0.0 {
            out.list.len()
        } else {
            self.passing(&out.list, self.mass(&out.list, max), max)
        };
        out.scale = if temperature == 0.0 { 1.0 } else { 1.0 / temperature };
        out.list.iter_mut().skip(kept).for_each(|(_, logit)| *logit -= DROPPED / out.scale);
        let max = max * out.scale;
        out.norm = max
            + out.list.iter().map(|(_, logit)| (logit * out.scale - max).exp()).sum::<f32>().ln();
        out.list.iter_mut().for_each(|(_, logit)| *logit = *logit * out.scale - out.norm);
    }

    /// Returns the noise that the target adds to a token's log-probability at `position`; 0 at
    /// temperature 0.
    pub fn noise(&self, position: usize, token: Token) -> f32 {
        if self.config.temperature == 0.0 {
            0.0
        } else {
            gumbel(self.config.seed, position, token) as f32
        }
    }

    /// Returns whether the token is neither padding nor banned.
    pub fn allows(&self, token: Token) -> bool {
        (token as usize) < self.usable && self.banned.binary_search(&token).is_err()
    }

    /// Applies bans, biases and penalties.
    fn row<'a>(&self, logits: &'a [f32], context: &[Token]) -> Result<LogitRow<'a>> {
        let logits = &logits[..logits.len().min(self.usable)];
        let mut patches = self.patches(logits, context, |token| Some(token as usize));
        if !self.banned.is_empty() {
            patches.retain(|(token, _)| self.banned.binary_search(token).is_err());
            patches.extend(
                self.banned
                    .iter()
                    .filter(|t| (**t as usize) < logits.len())
                    .map(|&t| (t, f32::NEG_INFINITY)),
            );
            patches.sort_unstable_by_key(|&(token, _)| token);
        }
        LogitRow::new(logits, patches)
    }

    /// Returns the logits that biases and penalties change, in ascending order of columns.
    fn patches(
        &self,
        logits: &[f32],
        context: &[Token],
        column_of: impl Fn(Token) -> Option<usize>,
    ) -> Vec<(Token, f32)> {
        match self.adjustments.is_empty() {
            true => Vec::new(),
            false => self.adjustments.count(context).patches(logits, column_of),
        }
    }

    /// Returns the tokens that pass top-k or top-p, and min-p, best first.
    fn survivors(&self, row: &LogitRow<'_>) -> Vec<(Token, f32)> {
        let SamplerConfig { temperature, top_k, .. } = self.config;
        let max = row.max();
        if top_k > 0 {
            let mut list = row.top(top_k);
            let kept = self.passing(&list, self.mass(&list, max), max);
            list.truncate(kept);
            return list;
        }
        let mut mass = 0.0;
        row.at_least(max - NEGLIGIBLE * temperature, |_, logit| mass += self.weight(logit, max));
        let mut k = RANKED;
        loop {
            let mut list = row.top(k);
            let kept = self.passing(&list, mass, max);
            if kept < list.len() || list.len() < k {
                list.truncate(kept);
                return list;
            }
            k *= 8;
        }
    }

    /// Returns the number of tokens of a best-first list that pass top-p and min-p, at least one.
    /// `mass` is the total weight that top-p refers to.
    fn passing(&self, list: &[(Token, f32)], mass: f64, max: f32) -> usize {
        let SamplerConfig { top_p, min_p, .. } = self.config;
        let mut sum = 0.0;
        let fails = |&(_, logit): &(Token, f32)| {
            let weight = self.weight(logit, max);
            let reached = top_p < 1.0 && sum >= top_p as f64 * mass;
            sum += weight;
            reached || weight < min_p as f64
        };
        list.iter().position(fails).unwrap_or(list.len()).max(1)
    }

    /// Returns the unnormalised probability: 1 for the best token.
    fn weight(&self, logit: f32, max: f32) -> f64 {
        libm::exp((logit as f64 - max as f64) / self.config.temperature as f64)
    }

    fn mass(&self, list: &[(Token, f32)], max: f32) -> f64 {
        if self.config.top_p < 1.0 {
            list.iter().map(|&(_, logit)| self.weight(logit, max)).sum()
        } else {
            1.0
        }
    }

    fn improve(&self, best: &mut (Token, f64), token: Token, logit: f32, noise: f64) {
        let score = logit as f64 + self.config.temperature as f64 * noise;
        if score > best.1 || score == best.1 && token < best.0 {
            *best = (token, score);
        }
    }

    /// Draws from all tokens with logits of at least `threshold`.
    ///
    /// Two logarithms per token would take milliseconds. The random words of a block are therefore
    /// compared with the smallest word that could beat the best score so far. Only few tokens then
    /// need a logarithm.
    fn pick_at_least(&self, threshold: f32, position: usize, row: &LogitRow<'_>) -> Token {
        let SamplerConfig { temperature, seed, .. } = self.config;
        let mut best = (0, f64::NEG_INFINITY);
        let mut visit = |block: usize| {
            if row.maxima()[block] < threshold {
                return;
            }
            let lead = (best.1 - row.maxima()[block] as f64) / temperature as f64;
            let least = noise::word_above(lead);
            if least > u32::MAX as u64 {
                return;
            }
            let words = noise::words(seed, position, block);
            if words.iter().any(|&word| word as u64 >= least) {
                row.visit(block, |token, logit| {
                    let word = words[token as usize % noise::BLOCK];
                    if word as u64 >= least && logit >= threshold {
                        self.improve(&mut best, token, logit, noise::gumbel_of(word));
                    }
                });
            }
        };
        // The block of the largest logit comes first, to raise the bar early.
        let first = row.maxima().iter().position(|&max| max == row.max()).unwrap_or(0);
        visit(first);
        (0..row.maxima().len()).filter(|&block| block != first).for_each(visit);
        best.0
    }
}

#[cfg(test)]
mod tests;
