//! Several sources' opinions made into one chance: logistic mixing, learnt while the text grows.
//!
//! Each source gives each candidate a log-probability. A candidate's score is a weighted sum of
//! them, its chance the softmax of the scores over all candidates and "none of these" (Hinton's
//! products of experts, as the mixers of PAQ). The weights depend on what is known of the place:
//! how long the context match is, how sure the draft model, how well known the table's entry. Each
//! token of the target's is one step of gradient descent on its log-loss, so a source that is right
//! gains weight where it was right, and chances are calibrated. With a temperature the noise that
//! target and drafter share is one more opinion.

use crate::tensor::Token;

/// Opinions about one candidate.
pub const FEATURES: usize = 7;
pub type Features = [f32; FEATURES];

/// Log-probability after the longest ending of the text that occurred before.
pub const LONG: usize = 0;
/// The same after a shorter ending that says more.
pub const SHORT: usize = 1;
/// Log-probability after the last two tokens, as the target once gave it; and after the last one.
pub const PAIR: usize = 2;
pub const LAST: usize = 3;
/// Log-probability by the draft model.
pub const MODEL: usize = 4;
/// The shared noise.
pub const NOISE: usize = 5;
/// 1 for the candidate "none of these".
pub const MISS: usize = 6;

/// No source calls a token less likely than this.
pub const FLOOR: f32 = -7.0;

/// Classes of contexts, by length of match, sureness of the model and record in the table.
const LENGTHS: usize = 7;
const SURENESS: usize = 6;
const RECORDS: usize = 5;
pub const SETS: usize = 1 + LENGTHS + SURENESS + RECORDS;

/// Class of a node's context, known before any candidate is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextClass([u8; 3]);

impl ContextClass {
    /// Makes a class of the length of the context match, the draft model's chance of its best
    /// token, and the table's record. `pair` is how often the table has seen the last two tokens;
    /// `last` is whether it knows the last one.
    pub fn new(matched: u32, model: Option<f32>, pair: u32, last: bool) -> Self {
        let length = match matched {
            0..=3 => matched as u8,
            4..=7 => 4,
            8..=15 => 5,
            _ => 6,
        };
        let sure = match model {
            None => 0,
            Some(p) => {
                1 + [0.25, 0.5, 0.75, 0.92].iter().filter(|bound| p >= **bound).count() as u8
            }
        };
        let record = match (pair, last) {
            (0, false) => 0,
            (0, true) => 1,
            (1, _) => 2,
            (2..=4, _) => 3,
            _ => 4,
        };
        ContextClass([length, sure, record])
    }

    fn sets(self) -> [usize; 4] {
        let [length, sure, record] = self.0.map(usize::from);
        [0, 1 + length, 1 + LENGTHS + sure, 1 + LENGTHS + SURENESS + record]
    }
}

/// Candidates to follow one node, with each source's log-probabilities.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    pub class: ContextClass,
    /// `[candidates]`
    pub tokens: Vec<Token>,
    /// `[candidates + 1]`: the last one is "none of these".
    pub features: Vec<Features>,
}

/// The weights: a sum of four sets, each chosen by one mark of the context. Learning in one context
/// so helps in others.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixer {
    sets: [Features; SETS],
    rate: f32,
}

/// Step of the descent. Larger follows the text sooner, smaller is steadier; 0 learns nothing.
pub const RATE: f32 = 0.003;
/// Weights stay within this.
const BOUND: f32 = 8.0;

impl Mixer {
    /// Makes a mixer with the weights learnt from other text ([`prior`](super::prior)). `warm` is
    /// for a temperature above 0.
    pub fn new(warm: bool) -> Self {
        Mixer { sets: super::prior::weights(warm), rate: RATE }
    }

    /// Makes a mixer with equal trust in all sources that does not learn: the baseline of the
    /// learnt weights.
    pub fn fixed(warm: bool) -> Self {
        let mut sets = [[0.0; FEATURES]; SETS];
        sets[0] = [0.4, 0.2, 0.4, 0.2, 1.0, warm as u8 as f32, 0.0];
        Mixer { sets, rate: 0.0 }
    }

    /// Returns the same weights with another learning rate.
    pub fn at_rate(self, rate: f32) -> Self {
        Mixer { rate, ..self }
    }

    fn weights(&self, class: ContextClass) -> Features {
        let mut sum = [0.0; FEATURES];
        for set in class.sets() {
            (0..FEATURES).for_each(|f| sum[f] += self.sets[set][f]);
        }
        sum
    }

    /// Computes the chance of each candidate, and last of none of them. `[candidates + 1]`
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

    /// Returns how much each source adds to a candidate's score beyond what it adds to the others,
    /// weighted by their chances. `None` stands for a source without an opinion.
    pub fn parts(
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
            let silent = candidates.features.iter().all(|row| row[f] == 0.0);
            (!silent).then_some(weights[f] * (candidates.features[candidate][f] - mean))
        })
    }

    /// Takes one learning step for the token that came. `chances` is scratch.
    pub fn learn(&mut self, candidates: &Candidates, came: Token, chances: &mut Vec<f32>) {
        if self.rate == 0.0 {
            return;
        }
        let which = candidates
            .tokens
            .iter()
            .position(|&token| token == came)
            .unwrap_or(candidates.tokens.len());
        self.chances(candidates, chances);
        let mut step = [0.0; FEATURES];
        for (i, (row, &chance)) in candidates.features.iter().zip(chances.iter()).enumerate() {
            let error = (i == which) as u8 as f32 - chance;
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
    pub fn sets(&self) -> &Sets {
        &self.sets
    }
}

/// Weights by set, as [`prior`](super::prior) spells them.
pub type Sets = [Features; SETS];

/// Returns a probability as a bounded logarithm.
pub fn opinion(p: f32) -> f32 {
    p.max(f32::MIN_POSITIVE).ln().max(FLOOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns candidates of two sources: the first is right with a chance of `right`, the second
    /// has no preference.
    fn candidates(sure: f32) -> Candidates {
        let row = |p: f32, miss: f32| {
            let mut row = [0.0; FEATURES];
            row[LONG] = opinion(p);
            row[MODEL] = opinion(0.5);
            row[MISS] = miss;
            row
        };
        let features =
            vec![row(sure, 0.0), row((1.0 - sure) / 2.0, 0.0), row((1.0 - sure) / 2.0, 1.0)];
        Candidates {
            class: ContextClass::new(2, Some(0.5), 0, false),
            tokens: vec![7, 8],
            features,
        }
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
        // The source claims .9; 7 comes in half of all cases, 8 in a fifth, something else in the
        // rest.
        for _ in 0..6000 {
            let x = next();
            mixer.learn(
                &candidates(0.9),
                if x < 0.5 {
                    7
                } else if x < 0.7 {
                    8
                } else {
                    9
                },
                &mut chances,
            );
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
        let there = Candidates { class: ContextClass::new(9, None, 3, true), ..here.clone() };
        mixer.chances(&there, &mut chances);
        let before = chances[0];
        (0..500).for_each(|_| mixer.learn(&here, 7, &mut chances));
        mixer.chances(&here, &mut chances);
        assert!(chances[0] > 0.95, "{chances:?}");
        mixer.chances(&there, &mut chances);
        assert!(chances[0] > before, "{chances:?}");
    }

    #[test]
    fn who_speaks_for_a_candidate_is_told_and_silence_is_no_voice() {
        let (mixer, mut chances) = (Mixer::fixed(false), Vec::new());
        let candidates = candidates(0.9);
        mixer.chances(&candidates, &mut chances);
        let parts = mixer.parts(&candidates, &chances, 0);
        assert!(parts[LONG].unwrap() > 0.5 && parts[MODEL].unwrap().abs() < 1e-6, "{parts:?}");
        assert_eq!((parts[SHORT], parts[PAIR], parts[NOISE]), (None, None, None));
    }

    #[test]
    fn places_are_told_apart() {
        let marks = |p: ContextClass| p.sets();
        assert_eq!(marks(ContextClass::default()), [0, 1, 8, 14]);
        assert_eq!(marks(ContextClass::new(99, Some(1.0), 99, true)), [0, 7, 13, SETS - 1]);
        assert_ne!(
            marks(ContextClass::new(1, None, 0, false)),
            marks(ContextClass::new(1, None, 0, true))
        );
    }
}
