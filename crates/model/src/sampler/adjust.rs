//! Penalties and biases: changes of logits that depend on the text so far.
//!
//! Order, as in vLLM: bias, repetition penalty, frequency and presence penalty. The repetition
//! penalty counts prompt and answer, within its window. The other two count only the answer.
//!
//! Each text is counted once: [`Adjustments::settle`] counts the committed part, and each draft
//! node adds only the tokens after it.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use anyhow::Result;

use super::SamplerConfig;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;

/// Repetition penalties that keep logits finite.
const REPEAT: RangeInclusive<f32> = 0.001..=1000.0;
/// Presence and frequency penalties, with OpenAI's limits.
const PRESENCE: RangeInclusive<f32> = -2.0..=2.0;
/// Biases. The lowest one bans its token.
const BIASES: RangeInclusive<f32> = -100.0..=100.0;

/// Penalties and biases of a sampler.
#[derive(Clone, Debug)]
pub(super) struct Adjustments {
    repeat: f32,
    /// Number of last tokens that the repetition penalty counts.
    window: usize,
    presence: f32,
    frequency: f32,
    /// In ascending order of tokens.
    biases: Vec<(Token, f32)>,
    /// Length of the prompt.
    answer_at: Option<usize>,
    settled: Settled,
}

/// Counts of the committed part of a text.
#[derive(Clone, Debug, Default)]
struct Settled {
    counts: HashMap<Token, Count>,
    /// Number of tokens in that part.
    len: usize,
}

/// Occurrences of a token, or their difference from a shorter text.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    answer: i64,
    /// Occurrences in the window of the repetition penalty.
    window: i64,
}

impl Adjustments {
    /// Returns the settings' penalties and biases, and the banned tokens. Fails for settings out of
    /// range.
    pub fn new(config: &SamplerConfig) -> Result<(Adjustments, Vec<Token>)> {
        in_range("the repeat penalty", config.repeat_penalty, REPEAT)?;
        in_range("the presence penalty", config.presence_penalty, PRESENCE)?;
        in_range("the frequency penalty", config.frequency_penalty, PRESENCE)?;
        for (token, bias) in &config.logit_bias {
            in_range(&format!("the logit bias of token {token}"), *bias, BIASES)?;
        }
        let window = match config.repeat_last_n {
            -1 => usize::MAX,
            n => n.try_into().map_err(|_| {
                Fault::usage(format!(
                    "the window of the repeat penalty is a number of tokens from 0 on, \
                     or -1 for the whole text, not {n}"
                ))
            })?,
        };
        // The last bias of a token applies.
        let biases: BTreeMap<Token, f32> = config.logit_bias.iter().copied().collect();
        let (banned, biases): (Vec<_>, Vec<_>) =
            biases.into_iter().partition(|(_, bias)| bias == BIASES.start());
        let adjustments = Adjustments {
            repeat: config.repeat_penalty,
            window,
            presence: config.presence_penalty,
            frequency: config.frequency_penalty,
            biases,
            answer_at: None,
            settled: Settled::default(),
        };
        Ok((adjustments, banned.into_iter().map(|(token, _)| token).collect()))
    }

    fn repeats(&self) -> bool {
        self.repeat != 1.0 && self.window > 0
    }

    fn counts(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// Returns whether the changes depend on the text.
    pub fn reads_context(&self) -> bool {
        self.repeats() || self.counts()
    }

    /// Returns whether no logit is changed.
    pub fn is_empty(&self) -> bool {
        !self.reads_context() && self.biases.is_empty()
    }

    /// Returns whether penalties never increase a logit.
    pub fn only_lower(&self) -> bool {
        let is_lower = self.presence >= 0.0 && self.frequency >= 0.0;
        is_lower && (self.repeat >= 1.0 || !self.repeats())
    }

    /// Sets the position where the answer begins. Only the first call has an effect.
    pub fn begin_answer(&mut self, at: usize) {
        if self.answer_at.is_none() {
            (self.answer_at, self.settled) = (Some(at), Settled::default());
        }
    }

    /// Counts the common beginning of all later texts.
    pub fn settle(&mut self, history: &[Token]) {
        let mut settled = std::mem::take(&mut self.settled);
        if settled.len > history.len() {
            // This is a different text.
            settled = Settled::default();
        }
        let Settled { mut counts, len } = settled;
        self.extend(&mut counts, history, len);
        self.settled = Settled { counts, len: history.len() };
    }

    /// Counts the tokens of a text: prompt and answer. It starts with the settled part, or is
    /// shorter.
    pub fn count(&self, context: &[Token]) -> TextCounts<'_> {
        let settled = Some(&self.settled).filter(|settled| settled.len <= context.len());
        let mut newer = HashMap::new();
        self.extend(&mut newer, context, settled.map_or(0, |settled| settled.len));
        let settled = settled.map(|settled| &settled.counts);
        TextCounts { adjustments: self, settled, newer }
    }

    /// Updates the counts of the first `from` tokens of a text to those of the whole text.
    fn extend(&self, counts: &mut HashMap<Token, Count>, context: &[Token], from: usize) {
        let mut look = |tokens: Option<&[Token]>, change: fn(&mut Count)| {
            let tokens = tokens.unwrap_or_default();
            #[cfg(any(test, feature = "testing"))]
            LOOKED_AT.set(LOOKED_AT.get() + tokens.len());
            tokens.iter().for_each(|token| change(counts.entry(*token).or_default()));
        };
        if let Some(at) = self.answer_at.filter(|_| self.counts()) {
            look(context.get(from.max(at)..), |count| count.answer += 1);
        }
        if self.repeats() {
            let [before, begin] = [from, context.len()].map(|end| end.saturating_sub(self.window));
            look(context.get(from.max(begin)..), |count| count.window += 1);
            look(context.get(before..from.min(begin)), |count| count.window -= 1);
        }
    }
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// Number of tokens of texts that this thread has counted or listed.
    pub static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Returns an error for a value outside its range.
fn in_range(what: &str, value: f32, range: RangeInclusive<f32>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let (least, most) = (range.start(), range.end());
    Err(Fault::usage(format!("{what} must be from {least} to {most}, not {value}")).into())
}

/// The tokens of a text, counted for penalties.
pub(super) struct TextCounts<'a> {
    adjustments: &'a Adjustments,
    /// Counts of the settled part of the text.
    settled: Option<&'a HashMap<Token, Count>>,
    /// Differences due to the tokens after that part.
    newer: HashMap<Token, Count>,
}

impl TextCounts<'_> {
    /// Returns the logit of a token after bias and penalties.
    pub fn adjusted(&self, token: Token, logit: f32) -> f32 {
        let biases = &self.adjustments.biases;
        let bias = biases.binary_search_by_key(&token, |bias| bias.0);
        self.penalised(token, bias.map_or(logit, |at| logit + biases[at].1))
    }

    /// Returns the logit of a token after penalties, given its biased logit.
    pub fn penalised(&self, token: Token, mut logit: f32) -> f32 {
        let Adjustments { repeat, presence, frequency, .. } = self.adjustments;
        let [old, new] = [self.settled, Some(&self.newer)].map(|counts| {
            counts.and_then(|counts| counts.get(&token)).copied().unwrap_or_default()
        });
        if old.window + new.window > 0 {
            logit = if logit < 0.0 { logit * repeat } else { logit / repeat };
        }
        match old.answer + new.answer {
            0 => logit,
            count => logit - frequency * count as f32 - presence,
        }
    }

    /// Returns the logits of a row that biases change, in ascending order of columns. `column_of`
    /// returns the column of a token.
    pub fn biased(
        &self,
        logits: &[f32],
        column_of: impl Fn(Token) -> Option<usize>,
    ) -> Vec<(Token, f32)> {
        let biased = |&(token, bias): &(Token, f32)| {
            let column = column_of(token)?;
            Some((column as Token, logits.get(column)? + bias))
        };
        let mut patches: Vec<_> = self.adjustments.biases.iter().filter_map(biased).collect();
        patches.sort_unstable_by_key(|(column, _)| *column);
        patches
    }

    /// Returns the logits of a row that biases and penalties change, in ascending order of columns.
    pub fn patches(
        &self,
        logits: &[f32],
        column_of: impl Fn(Token) -> Option<usize>,
    ) -> Vec<(Token, f32)> {
        let mut tokens: Vec<Token> = self.newer.keys().copied().collect();
        tokens.extend(self.settled.iter().flat_map(|counts| counts.keys()));
        tokens.extend(self.adjustments.biases.iter().map(|(token, _)| token));
        #[cfg(any(test, feature = "testing"))]
        LOOKED_AT.set(LOOKED_AT.get() + tokens.len());
        tokens.sort_unstable();
        tokens.dedup();
        let patch = |&token: &Token| {
            let column = column_of(token)?;
            Some((column as Token, self.adjusted(token, *logits.get(column)?)))
        };
        let mut patches: Vec<_> = tokens.iter().filter_map(patch).collect();
        patches.sort_unstable_by_key(|(column, _)| *column);
        patches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies the definition: one token after the other.
    fn by_the_book(config: &SamplerConfig, token: Token, logit: f32, text: &[Token]) -> f32 {
        let bias = config.logit_bias.iter().rfind(|bias| bias.0 == token).map(|bias| bias.1);
        let mut logit = bias.map_or(logit, |bias| logit + bias);
        let window = match config.repeat_last_n {
            -1 => text,
            n => &text[text.len().saturating_sub(n as usize)..],
        };
        if window.contains(&token) && logit < 0.0 {
            logit *= config.repeat_penalty;
        } else if window.contains(&token) {
            logit /= config.repeat_penalty;
        }
        let count = text[PROMPT..].iter().filter(|other| **other == token).count();
        logit -= config.frequency_penalty * count as f32;
        logit - if count > 0 { config.presence_penalty } else { 0.0 }
    }

    const PROMPT: usize = 9;

    fn settings() -> Vec<SamplerConfig> {
        let base = SamplerConfig::default();
        let all = SamplerConfig {
            repeat_penalty: 1.25,
            repeat_last_n: 12,
            presence_penalty: 0.5,
            frequency_penalty: -0.75,
            logit_bias: vec![(7, 3.0), (199, -99.0), (66, 0.25), (7, -2.5), (5000, 1.0)],
            ..base.clone()
        };
        vec![
            SamplerConfig { repeat_penalty: 0.5, ..base.clone() },
            SamplerConfig { repeat_penalty: 2.0, repeat_last_n: 0, ..base.clone() },
            SamplerConfig { presence_penalty: 2.0, ..base.clone() },
            SamplerConfig { frequency_penalty: 1.5, ..base.clone() },
            SamplerConfig { logit_bias: all.logit_bias.clone(), ..base },
            SamplerConfig { repeat_last_n: 1_000_000, ..all.clone() },
            all,
        ]
    }

    #[test]
    fn negative_penalties_and_small_repeats_raise_logits() {
        let base = SamplerConfig::default;
        for (config, lowers) in [
            (base(), true),
            (SamplerConfig { presence_penalty: 0.5, ..base() }, true),
            (SamplerConfig { presence_penalty: -0.5, ..base() }, false),
            (SamplerConfig { frequency_penalty: -0.5, ..base() }, false),
            (SamplerConfig { repeat_penalty: 1.1, ..base() }, true),
            (SamplerConfig { repeat_penalty: 0.9, ..base() }, false),
        ] {
            assert_eq!(Adjustments::new(&config).unwrap().0.only_lower(), lowers, "{config:?}");
        }
    }

    /// A draft model's columns are not tokens: here every third token has a column, in reverse
    /// order.
    #[test]
    fn rows_change_as_the_definition_says() {
        let text: Vec<Token> = (0..40).map(|i| i * i * 7 % 230).collect();
        let logits: Vec<f32> = (0..200).map(|i| (i * 37 % 101) as f32 / 7.0 - 6.0).collect();
        for config in settings() {
            let (mut adjustments, _) = Adjustments::new(&config).unwrap();
            adjustments.begin_answer(PROMPT);
            // Settled parts: none, within the prompt, shorter and longer than the window after it,
            // all, more than all, and fewer than in the call before.
            let few = [(0, 9), (3, 20), (3, 40), (19, 40)];
            for (settled, end) in few.into_iter().chain([(33, 40), (40, 40), (40, 20), (5, 40)]) {
                adjustments.settle(&text[..settled]);
                let text = &text[..end];
                let counts = adjustments.count(text);
                let patched = |column_of: &dyn Fn(Token) -> Option<usize>| {
                    let mut row = logits.clone();
                    let patches = counts.patches(&logits, column_of);
                    assert!(patches.is_sorted_by_key(|patch| patch.0), "{patches:?}");
                    patches.iter().for_each(|&(column, logit)| row[column as usize] = logit);
                    row
                };
                let want = |token: Token, logit: f32| by_the_book(&config, token, logit, text);
                for (token, &logit) in logits.iter().enumerate() {
                    assert_eq!(counts.adjusted(token as Token, logit), want(token as Token, logit));
                }
                let (own, third) = (
                    patched(&|token| Some(token as usize)),
                    patched(&|token| token.is_multiple_of(3).then(|| 199 - token as usize / 3)),
                );
                for (column, &logit) in logits.iter().enumerate() {
                    assert_eq!(own[column], want(column as Token, logit), "{config:?}");
                    assert_eq!(third[column], want(3 * (199 - column as Token), logit));
                }
            }
        }
    }

    #[test]
    fn settings_without_effect_change_nothing_and_the_least_bias_bans() {
        let new = |config: SamplerConfig| Adjustments::new(&config).unwrap();
        assert!(new(SamplerConfig { repeat_last_n: 3, ..Default::default() }).0.is_empty());
        let window = SamplerConfig { repeat_penalty: 2.0, repeat_last_n: 0, ..Default::default() };
        assert!(new(window).0.is_empty());
        let logit_bias = vec![(4, -100.0), (9, -100.0), (4, 1.0), (2, 0.5)];
        let (kept, banned) = new(SamplerConfig { logit_bias, ..Default::default() });
        assert_eq!((kept.biases, banned), (vec![(2, 0.5), (4, 1.0)], vec![9]));
    }

    #[test]
    fn settings_out_of_range_are_refused_with_the_range() {
        let base = SamplerConfig::default;
        for (config, says) in [
            (SamplerConfig { repeat_penalty: 0.0, ..base() }, "from 0.001 to 1000, not 0"),
            (SamplerConfig { presence_penalty: 2.5, ..base() }, "from -2 to 2, not 2.5"),
            (SamplerConfig { frequency_penalty: f32::NAN, ..base() }, "from -2 to 2, not NaN"),
            (SamplerConfig { repeat_last_n: -2, ..base() }, "from 0 on, or -1"),
            (
                SamplerConfig { logit_bias: vec![(3, -101.0)], ..base() },
                "the logit bias of token 3 must be from -100 to 100, not -101",
            ),
        ] {
            let error = Adjustments::new(&config).err().unwrap();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
