//! Edge cases of the sampler that random logits do not reach: ties, thresholds, bans and padding.

use std::sync::Arc;

use anyhow::Result;
use gemma::sampler::{Mask, Sampler, SamplerConfig, Tempered, TokenRule, gumbel};
use gemma::tensor::Token;

fn sampler(config: SamplerConfig) -> Sampler {
    Sampler::new(config).unwrap()
}

/// Returns the tokens of 400 draws from one row, ascending.
fn drawn(config: SamplerConfig, logits: &[f32]) -> Vec<Token> {
    let sampler = sampler(config);
    let mut tokens: Vec<Token> =
        (0..400).map(|position| sampler.pick(position, logits, &[]).unwrap()).collect();
    tokens.sort();
    tokens.dedup();
    tokens
}

#[test]
fn equal_scores_go_to_the_lowest_id() {
    // At this low temperature the noise is negligible compared with the logits.
    for top_k in [0, 5] {
        let config = SamplerConfig { temperature: 1e-30, top_k, ..Default::default() };
        let mut logits = vec![0.0; 200];
        (logits[5], logits[7]) = (4.0, 4.0);
        assert_eq!(drawn(config, &logits), [5], "top-k {top_k}");
    }
}

#[test]
fn all_bits_of_the_seed_count() {
    let noise = [0, 1, 1 << 31, 1 << 32, 1 << 63].map(|seed| gumbel(seed, 3, 5));
    for (i, a) in noise.iter().enumerate() {
        assert!(noise[..i].iter().all(|b| a != b), "{noise:?}");
    }
}

#[test]
fn a_token_of_a_later_block_wins_with_little_noise_too() {
    // Both likely tokens often have noise far below 0, and no other token comes close to them.
    let mut logits = vec![-50.0; 200];
    (logits[3], logits[130]) = (1.0, 1.0);
    let sampler = sampler(SamplerConfig { temperature: 0.5, ..Default::default() });
    for position in 0..4000 {
        let want = [3, 130]
            .into_iter()
            .max_by(|&a, &b| gumbel(0, position, a).total_cmp(&gumbel(0, position, b)));
        assert_eq!(Some(sampler.pick(position, &logits, &[]).unwrap()), want, "{position}");
    }
}

#[test]
fn filters_keep_what_reaches_their_threshold() {
    let config = SamplerConfig { temperature: 1.0, ..Default::default() };
    // min-p 1 keeps only the best token.
    let logits = [0.0, 1.0, 2.0, 3.0];
    assert_eq!(drawn(SamplerConfig { min_p: 1.0, ..config.clone() }, &logits), [3]);
    // It also keeps a second token with the same probability.
    let pair = SamplerConfig { min_p: 1.0, top_k: 4, ..config.clone() };
    assert_eq!(drawn(pair, &[2.0, 3.0, 1.0, 3.0]), [1, 3]);
    // min-p compares probabilities at the temperature: the second token has exp(-1/2).
    let warm = SamplerConfig { temperature: 2.0, min_p: 0.5, ..config.clone() };
    assert_eq!(drawn(warm, &logits), [2, 3]);
    // top-p 1 keeps everything that top-k keeps.
    assert_eq!(drawn(SamplerConfig { top_k: 3, ..config.clone() }, &logits), [1, 2, 3]);
    // At a high temperature, tokens far below the best one have a share of the mass beyond top-p.
    let mut logits = vec![-60.0; 2000];
    logits[0] = 0.0;
    let hot = SamplerConfig { temperature: 10.0, top_p: 0.5, ..config };
    assert!(drawn(hot, &logits).len() > 1);
}

#[test]
fn a_list_is_drawn_from_as_the_row_is() {
    let logits = [0.5, 1.0, 0.0, 1.2, 9.0];
    let config = SamplerConfig { temperature: 1.0, top_k: 3, seed: 7, ..Default::default() };
    let sampler = sampler(config).usable(4).ban([2]);
    let (count, below) = sampler.decisive().unwrap();
    assert_eq!((count, below), (4, 4));
    // The list contains a padding token, which must not be picked.
    let best = sampler.clone().usable(5).best(&logits, 5).unwrap();
    for position in 0..400 {
        let token = sampler.pick(position, &logits, &[]).unwrap();
        assert_eq!(sampler.pick_best(position, &best).unwrap(), token);
    }
    assert!(sampler.pick_best(0, &[(1, f32::NEG_INFINITY)]).is_err());
}

#[test]
fn a_draft_row_is_normalised_and_its_dropped_tokens_lose_three_nats() {
    let (logits, temperature) = ([4.0, 3.0, 1.0], 0.5);
    let config = SamplerConfig { temperature, min_p: 0.1, ..Default::default() };
    let own = |token: Token| Some(token as usize);
    let as_token = |column| column as Token;
    let mut out = Tempered::default();
    sampler(config).temper(&logits, &[], own, as_token, &mut out).unwrap();
    // The second token has exp(-2), 0.135 of the best one; the third has exp(-6) and is dropped.
    let want = [0.0, -2.0, -6.0 - 3.0];
    let norm = want.iter().map(|l: &f32| l.exp()).sum::<f32>().ln();
    for ((token, log_prob), (index, want)) in out.list.iter().zip(want.iter().enumerate()) {
        assert_eq!(*token, index as Token);
        assert!((log_prob - (want - norm)).abs() < 1e-4, "{:?}", out.list);
    }
    assert!((out.log_prob(3.0) - (out.list[1].1 - 3.0)).abs() < 1e-4);
}

#[test]
fn a_draft_row_is_cut_to_top_k_unless_decoding_is_greedy() {
    let logits: Vec<f32> = (0..300).map(|i| (i % 17) as f32).collect();
    let length = |temperature, top_k| {
        let config = SamplerConfig { temperature, top_k, ..Default::default() };
        let mut out = Tempered::default();
        let own = |token: Token| Some(token as usize);
        let as_token = |column| column as Token;
        sampler(config).temper(&logits, &[], own, as_token, &mut out).unwrap();
        out.list.len()
    };
    assert_eq!((length(1.0, 2), length(1.0, 0), length(0.0, 2)), (2, 128, 128));
}

#[test]
fn a_list_of_a_draft_row_is_tempered_as_the_row_is() {
    let logits = [2.0, 1.5, 1.9, -1.0];
    for presence_penalty in [0.0, 1.0] {
        let config = SamplerConfig { temperature: 0.8, presence_penalty, ..Default::default() };
        // The context is an answer that contains token 0.
        let sampler = sampler(config).answering(0);
        let (mut row, mut list) = (Tempered::default(), Tempered::default());
        let own = |token: Token| Some(token as usize);
        let as_token = |column| column as Token;
        sampler.temper(&logits, &[0], own, as_token, &mut row).unwrap();
        let best = sampler.best(&logits, 4).unwrap();
        sampler.temper_best(&best, &[0], &mut list).unwrap();
        assert_eq!(row.list, list.list);
        assert_eq!(row.list[0].0, if presence_penalty == 0.0 { 0 } else { 2 });
    }
    let sampler = sampler(SamplerConfig::default());
    let mut out = Tempered::default();
    assert!(sampler.temper_best(&[], &[], &mut out).is_err());
    assert!(sampler.temper_best(&[(0, 1.0), (1, f32::NAN)], &[], &mut out).is_err());
}

/// Allows tokens 1 and 2.
#[derive(Debug)]
struct OneOrTwo {
    slow: bool,
}

impl TokenRule for OneOrTwo {
    fn mask(&self, _: &[Token]) -> Result<Option<Arc<Mask>>> {
        Ok(Some(Arc::new(Mask::new(vec![0b110], false))))
    }
    fn is_slow(&self) -> bool {
        self.slow
    }
    fn is_ready(&self, history: &[Token]) -> bool {
        !self.slow || history.is_empty()
    }
}

/// Allows token 1.
#[derive(Debug)]
struct One;

impl TokenRule for One {
    fn mask(&self, _: &[Token]) -> Result<Option<Arc<Mask>>> {
        Ok(Some(Arc::new(Mask::new(vec![0b10], false))))
    }
}

#[test]
fn a_rule_and_bans_that_leave_nothing_are_told_from_bad_logits() {
    let ruled = |slow| sampler(SamplerConfig::default()).under(Arc::new(OneOrTwo { slow }));
    let error =
        |sampler: Sampler, logits: &[f32]| sampler.pick(0, logits, &[]).unwrap_err().to_string();
    assert_eq!(Mask::new(vec![6, 1], false).words(), [6, 1]);
    assert_eq!(ruled(false).pick(0, &[9.0, 1.0, 2.0, 9.0], &[]).unwrap(), 2);
    let banned = error(ruled(false).ban([1, 2]), &[0.0, 1.0, 2.0, 3.0]);
    assert!(banned.contains("all tokens that the grammar allows are banned"), "{banned}");
    let bad = error(ruled(false), &[0.0, f32::NAN, 2.0, 3.0]);
    assert!(bad.contains("not a number"), "{bad}");
    // A rule that computes its masks in the background is polled until they are ready.
    for slow in [false, true] {
        let sampler = ruled(slow);
        assert_eq!((sampler.is_slow(), sampler.is_ready(&[1])), (slow, !slow));
        assert!(sampler.is_ready(&[]));
    }
    for plain in
        [sampler(SamplerConfig::default()), sampler(SamplerConfig::default()).under(Arc::new(One))]
    {
        assert!(!plain.is_slow() && plain.is_ready(&[1]));
    }
}
