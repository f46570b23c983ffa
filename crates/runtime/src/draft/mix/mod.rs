//! Combines the log-probabilities of several sources into one probability: logistic mixing, with
//! weights that are learned during generation.
//!
//! A candidate's score is a weighted sum of its features. Its probability is the softmax of the
//! scores over all candidates and "none of these" (Hinton's products of experts, similar to PAQ's
//! mixers). The weights depend on the [`ContextClass`]: the length of the context match, the
//! confidence of the draft model, and how often the table saw the entry. Each token of the target
//! is one step of gradient descent on its log-loss. This increases the weight of sources in the
//! contexts where they are right, and calibrates the probabilities. Above temperature 0, the
//! sampling noise is an additional feature.

pub mod prior;

use super::sources::{ContextClass, FEATURES, FeatureRow, NOISE, SOURCES};
use gemma_base::tensor::Token;

/// Number of weight sets: one for all contexts, and one per class of each source.
pub const SETS: usize = {
    let (mut sets, mut row) = (1, 0);
    while row < SOURCES.len() {
        sets += SOURCES[row].classes;
        row += 1;
    }
    sets
};

/// Candidates after one node, with each source's log-probabilities.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    pub class: ContextClass,
    /// `[candidates]`
    pub tokens: Vec<Token>,
    /// `[candidates + 1]`: the last row is for "none of these".
    pub features: Vec<FeatureRow>,
}

/// Weights of the features: a sum of sets, selected by the class of the context. Learning in one
/// context therefore also helps in others.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixer {
    sets: [FeatureRow; SETS],
    rate: f32,
}

/// Learning rate. Larger values adapt faster, smaller ones are steadier; 0 disables learning.
pub const RATE: f32 = 0.003;
/// Bound of the weights' magnitude.
const BOUND: f32 = 8.0;

impl Mixer {
    /// Creates a mixer with the weights of [`prior`]. A feature without a prior starts with its
    /// weight in [`SOURCES`]. `warm` means a temperature above 0.
    pub fn new(warm: bool) -> Self {
        let Mixer { mut sets, .. } = Self::fixed(warm);
        for (set, weights) in sets.iter_mut().zip(prior::weights(warm)) {
            weights.iter().zip(set).for_each(|(weight, here)| *here = *weight);
        }
        Mixer { sets, rate: RATE }
    }

    /// Creates a mixer with the weights of [`SOURCES`] that does not learn: the baseline for
    /// trained weights.
    pub fn fixed(warm: bool) -> Self {
        let mut sets = [[0.0; FEATURES]; SETS];
        for &(feature, weight) in SOURCES.iter().flat_map(|row| row.features) {
            sets[0][feature] = weight;
        }
        sets[0][NOISE] = warm as u8 as f32;
        Mixer { sets, rate: 0.0 }
    }

    /// Returns the mixer with another learning rate.
    pub fn at_rate(self, rate: f32) -> Self {
        Mixer { rate, ..self }
    }

    fn weights(&self, class: ContextClass) -> FeatureRow {
        let mut sum = [0.0; FEATURES];
        for set in class.sets() {
            (0..FEATURES).for_each(|f| sum[f] += self.sets[set][f]);
        }
        sum
    }

    /// Computes the probability of each candidate, and last of "none of these". `[candidates + 1]`
    pub fn chances(&self, candidates: &Candidates, out: &mut Vec<f32>) {
        let weights = self.weights(candidates.class);
        out.clear();
        out.extend(
            candidates
                .features
                .iter()
                .map(|row| (0..FEATURES).map(|f| weights[f] * row[f]).sum::<f32>()),
        );
        let max = out.iter().fold(f32::NEG_INFINITY, |max, &score| max.max(score));
        let mut sum = 0.0;
        for score in out.iter_mut() {
            *score = (*score - max).exp();
            sum += *score;
        }
        out.iter_mut().for_each(|chance| *chance /= sum);
    }

    /// Returns the name of the source that contributes most to a candidate's score relative to the
    /// others.
    pub fn main_source(
        &self,
        candidates: &Candidates,
        chances: &[f32],
        candidate: usize,
    ) -> &'static str {
        let parts = self.parts(candidates, chances, candidate);
        let features = SOURCES.iter().flat_map(|row| row.features.iter().map(|f| (f.0, row.name)));
        let part = |feature: usize| parts[feature].unwrap_or(f32::NEG_INFINITY);
        let main = features.max_by(|a, b| part(a.0).total_cmp(&part(b.0)).then(b.0.cmp(&a.0)));
        main.map_or("", |(_, name)| name)
    }

    /// Returns each feature's contribution to a candidate's score minus its mean contribution over
    /// all candidates, weighted by their probabilities. `None` means that the feature has no
    /// opinion.
    fn parts(
        &self,
        candidates: &Candidates,
        chances: &[f32],
        candidate: usize,
    ) -> [Option<f32>; FEATURES] {
        let weights = self.weights(candidates.class);
        let others = (1.0 - chances[candidate]).max(1e-6);
        std::array::from_fn(|f| {
            let rows = candidates
                .features
                .iter()
                .zip(chances)
                .enumerate()
                .filter(|(i, _)| *i != candidate);
            let mean: f32 = rows.map(|(_, (row, chance))| row[f] * chance / others).sum();
            let is_silent = candidates.features.iter().all(|row| row[f] == 0.0);
            (!is_silent).then_some(weights[f] * (candidates.features[candidate][f] - mean))
        })
    }

    /// Takes one learning step for the actual token `came`. `chances` is a buffer.
    pub fn learn(&mut self, candidates: &Candidates, came: Token, chances: &mut Vec<f32>) {
        if self.rate == 0.0 {
            return;
        }
        let listed = candidates.tokens.iter().position(|&token| token == came);
        let right = listed.unwrap_or(candidates.tokens.len());
        self.chances(candidates, chances);
        let mut step = [0.0; FEATURES];
        for (i, (row, &chance)) in candidates.features.iter().zip(chances.iter()).enumerate() {
            let error = (i == right) as u8 as f32 - chance;
            (0..FEATURES).for_each(|f| step[f] += error * row[f]);
        }
        for set in candidates.class.sets() {
            for f in 0..FEATURES {
                let weight = &mut self.sets[set][f];
                *weight = (*weight + self.rate * step[f]).clamp(-BOUND, BOUND);
            }
        }
    }

    /// Returns the weights. `[SETS][FEATURES]`
    pub fn sets(&self) -> &[FeatureRow; SETS] {
        &self.sets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::sources::{
        CandidateSource, LONG, MISS, MODEL, PAIR, SHORT, bounded_log, context, model, table,
    };

    fn class(length: u32, sure: Option<f32>, record: usize) -> ContextClass {
        let mut class = ContextClass::default();
        class.set(CandidateSource::Context, context::class(length));
        class.set(CandidateSource::Model, model::class(sure));
        class.set(CandidateSource::Table, record);
        class
    }

    /// Returns candidates of two sources: the first assigns the probability `sure`, the second has
    /// no preference.
    fn candidates(sure: f32) -> Candidates {
        let row = |p: f32, miss: f32| {
            let mut row = [0.0; FEATURES];
            row[LONG] = bounded_log(p);
            row[MODEL] = bounded_log(0.5);
            row[MISS] = miss;
            row
        };
        let features =
            vec![row(sure, 0.0), row((1.0 - sure) / 2.0, 0.0), row((1.0 - sure) / 2.0, 1.0)];
        Candidates { class: class(2, Some(0.5), 0), tokens: vec![7, 8], features }
    }

    #[test]
    fn chances_become_what_happens() {
        let mut mixer = Mixer::new(false).at_rate(0.001);
        let (mut chances, mut state) = (Vec::new(), 1u64);
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        // The source assigns .9. Token 7 comes in half of all cases, 8 in a fifth, otherwise
        // another token.
        for _ in 0..6000 {
            let came = match next() {
                x if x < 0.5 => 7,
                x if x < 0.7 => 8,
                _ => 9,
            };
            mixer.learn(&candidates(0.9), came, &mut chances);
        }
        mixer.chances(&candidates(0.9), &mut chances);
        assert!((chances.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        for (chance, want) in chances.iter().zip([0.5, 0.2, 0.3]) {
            assert!((chance - want).abs() < 0.1, "{chances:?}");
        }
    }

    #[test]
    fn a_source_that_is_right_gains_weight_there_and_elsewhere() {
        let mut mixer = Mixer::new(false).at_rate(0.01);
        let (here, mut chances) = (candidates(0.8), Vec::new());
        let there = Candidates { class: class(9, None, table::class(3, true)), ..here.clone() };
        mixer.chances(&there, &mut chances);
        let before = chances[0];
        (0..500).for_each(|_| mixer.learn(&here, 7, &mut chances));
        mixer.chances(&here, &mut chances);
        assert!(chances[0] > 0.95, "{chances:?}");
        mixer.chances(&there, &mut chances);
        assert!(chances[0] > before, "{chances:?}");
    }

    #[test]
    fn a_feature_without_an_opinion_has_no_part() {
        let (mixer, mut chances) = (Mixer::fixed(false), Vec::new());
        let candidates = candidates(0.9);
        mixer.chances(&candidates, &mut chances);
        let parts = mixer.parts(&candidates, &chances, 0);
        assert!(parts[LONG].unwrap() > 0.5 && parts[MODEL].unwrap().abs() < 1e-6, "{parts:?}");
        assert_eq!((parts[SHORT], parts[PAIR], parts[NOISE]), (None, None, None));
    }
}
