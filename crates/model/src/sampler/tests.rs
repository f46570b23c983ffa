use super::*;

/// Samples by the definition, without any shortcut.
fn by_the_book(
    config: &SamplerConfig,
    position: usize,
    logits: &[f32],
    context: &[Token],
) -> Token {
    let t = config.temperature as f64;
    let mut list: Vec<(Token, f32)> =
        logits.iter().enumerate().map(|(i, &l)| (i as Token, l)).collect();
    for (token, logit) in &mut list {
        if context.contains(token) {
            *logit = if *logit < 0.0 {
                *logit * config.repeat_penalty
            } else {
                *logit / config.repeat_penalty
            };
        }
    }
    list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if t == 0.0 {
        return list[0].0;
    }
    if config.top_k > 0 {
        list.truncate(config.top_k);
    }
    let max = list[0].1 as f64;
    let weights: Vec<f64> = list.iter().map(|&(_, l)| ((l as f64 - max) / t).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut before = 0.0;
    let mut best = (0, f64::NEG_INFINITY);
    for (i, &(token, logit)) in list.iter().enumerate() {
        if i > 0
            && (config.top_p < 1.0 && before >= config.top_p as f64 * total
                || weights[i] < config.min_p as f64)
        {
            break;
        }
        before += weights[i];
        let score = logit as f64 + t * gumbel(config.seed, position, token);
        if score > best.1 || score == best.1 && token < best.0 {
            best = (token, score);
        }
    }
    best.0
}

/// The column of a token.
fn as_token(column: usize) -> Token {
    column as Token
}

fn own(token: Token) -> Option<usize> {
    Some(token as usize)
}

/// Logits between about -4 and 12, most of them low.
fn logits(seed: u64, n: usize) -> Vec<f32> {
    (0..n).map(|i| gumbel(seed, 1 << 20, i as Token) as f32).collect()
}

#[test]
fn pick_equals_the_definition() {
    let base = SamplerConfig { temperature: 1.0, ..Default::default() };
    let settings = [
        SamplerConfig::default(),
        base.clone(),
        SamplerConfig { temperature: 0.3, ..base.clone() },
        SamplerConfig { temperature: 3.0, ..base.clone() },
        SamplerConfig { top_k: 64, top_p: 0.95, ..base.clone() },
        SamplerConfig { top_k: 5, ..base.clone() },
        SamplerConfig { top_p: 0.8, ..base.clone() },
        SamplerConfig { top_p: 0.999, temperature: 2.0, ..base.clone() },
        SamplerConfig { min_p: 0.05, ..base.clone() },
        SamplerConfig { top_p: 0.9, min_p: 0.02, ..base.clone() },
        SamplerConfig { repeat_penalty: 1.3, top_k: 20, ..base.clone() },
        SamplerConfig { repeat_penalty: 0.7, ..Default::default() },
    ];
    for config in settings {
        for seed in 0..40 {
            let config = SamplerConfig { seed, ..config.clone() };
            let logits = logits(seed, [3, 64, 700, 3000][seed as usize % 4]);
            let context: Vec<Token> = (0..50).map(|i| i * 7 % 200).collect();
            let got = Sampler::new(config.clone())
                .unwrap()
                .pick(seed as usize, &logits, &context)
                .unwrap();
            assert_eq!(got, by_the_book(&config, seed as usize, &logits, &context), "{config:?}");
        }
    }
}

#[test]
fn ties_go_to_the_lowest_id() {
    let sampler = Sampler::new(SamplerConfig::default()).unwrap();
    assert_eq!(sampler.pick(0, &[0.0, 2.0, 1.0, 2.0], &[]).unwrap(), 1);
    let top = SamplerConfig { temperature: 1.0, top_k: 1, ..Default::default() };
    assert_eq!(Sampler::new(top).unwrap().pick(0, &[2.0; 500], &[]).unwrap(), 0);
}

#[test]
fn bans_and_padding_are_never_picked() {
    for temperature in [0.0, 1.0] {
        let config = SamplerConfig { temperature, repeat_penalty: 1.1, ..Default::default() };
        let sampler = Sampler::new(config).unwrap().usable(100).ban([90, 3, 400]);
        let mut logits = vec![0.0; 128];
        (logits[3], logits[90], logits[110], logits[120]) = (50.0, 60.0, 70.0, f32::NAN);
        logits[42] = 45.0;
        assert_eq!(sampler.pick(5, &logits, &[3, 90, 110]).unwrap(), 42);
    }
}

#[test]
fn the_penalty_counts_a_token_once_and_follows_the_sign() {
    let sampler =
        Sampler::new(SamplerConfig { repeat_penalty: 2.0, ..Default::default() }).unwrap();
    assert_eq!(sampler.pick(0, &[3.0, 2.0], &[0, 0, 0]).unwrap(), 1);
    assert_eq!(sampler.pick(0, &[5.0, 2.0], &[0, 0, 0]).unwrap(), 0);
    assert_eq!(sampler.pick(0, &[-1.0, -1.5], &[0]).unwrap(), 1);
    assert_eq!(sampler.pick(0, &[-1.0, -2.5], &[0]).unwrap(), 0);
}

#[test]
fn a_perfect_draft_with_the_shared_noise_finds_the_pick() {
    let mut tempered = Tempered::default();
    for seed in 0..200 {
        for temperature in [0.0, 0.7, 1.0] {
            let config = SamplerConfig { temperature, top_k: 64, seed, ..Default::default() };
            let sampler = Sampler::new(config).unwrap();
            let logits = logits(seed, 1000).iter().map(|l| 3.0 * l).collect::<Vec<_>>();
            sampler.temper(&logits, &[], own, as_token, &mut tempered).unwrap();
            let score = |&(token, p): &(Token, f32)| p + sampler.noise(9, token);
            let best = tempered.list.iter().max_by(|a, b| score(a).total_cmp(&score(b))).unwrap();
            assert_eq!(best.0, sampler.pick(9, &logits, &[]).unwrap());
            let sum: f32 = tempered.list.iter().map(|c| c.1.exp()).sum();
            assert!((sum - 1.0).abs() < 1e-4, "{sum}");
        }
    }
}

#[test]
fn tempering_follows_penalty_and_temperature() {
    let sampler =
        Sampler::new(SamplerConfig { temperature: 0.5, repeat_penalty: 2.0, ..Default::default() })
            .unwrap();
    let mut tempered = Tempered::default();
    sampler.temper(&[4.0, 3.0, 2.0], &[0], own, as_token, &mut tempered).unwrap();
    let want = [(1, 3.0f32), (0, 2.0), (2, 2.0)].map(|(t, l)| (t, 2.0 * l));
    let norm = want.iter().map(|(_, l)| l.exp()).sum::<f32>().ln();
    for (got, want) in tempered.list.iter().zip(want) {
        assert!(got.0 == want.0 && (got.1 - (want.1 - norm)).abs() < 1e-5, "{tempered:?}");
    }
    let sampler = sampler.ban([5]).usable(9);
    assert_eq!([4, 5, 8, 9].map(|t| sampler.allows(t)), [true, false, true, false]);
}

#[test]
fn settings_out_of_range_are_usage_errors() {
    let bad = [
        SamplerConfig { temperature: -1.0, ..Default::default() },
        SamplerConfig { temperature: f32::NAN, ..Default::default() },
        SamplerConfig { top_p: 0.0, ..Default::default() },
        SamplerConfig { top_p: 1.5, ..Default::default() },
        SamplerConfig { min_p: 2.0, ..Default::default() },
        SamplerConfig { repeat_penalty: 0.0, ..Default::default() },
    ];
    for config in bad {
        let error = Sampler::new(config).unwrap_err();
        assert_eq!(gemma_base::error::fault_of(&error).unwrap().kind.exit_code(), 2);
    }
}

#[derive(Debug)]
struct Only(Vec<u32>);

impl TokenRule for Only {
    fn mask(&self, _: &[Token]) -> Result<Option<Arc<Mask>>> {
        Ok(Some(Arc::new(Mask::new(self.0.clone(), false))))
    }
}

#[test]
fn a_grammar_of_banned_tokens_is_a_usage_error() {
    let logit_bias = vec![(1, -100.0), (3, -100.0)];
    let banning = SamplerConfig { logit_bias, ..SamplerConfig::default() };
    for (allowed, picks) in [(0b1010, None), (0b0010, None), (0b1110, Some(2))] {
        let sampler = Sampler::new(banning.clone()).unwrap().under(Arc::new(Only(vec![allowed])));
        let picked = sampler.pick(0, &[4.0, 3.0, 2.0, 1.0], &[]);
        match picks {
            Some(token) => assert_eq!(picked.unwrap(), token),
            None => {
                let said = picked.unwrap_err().to_string();
                assert_eq!(said, "all tokens that the grammar allows are banned");
            }
        }
    }
}

/// A device's list of the best tokens suffices for bans, but not for other changes.
#[test]
fn only_bans_leave_a_list_of_the_best_tokens_decisive() {
    let decisive = |config: SamplerConfig| Sampler::new(config).unwrap().usable(9).decisive();
    let base = SamplerConfig::default;
    let bans = vec![(1, -100.0), (3, -100.0)];
    let banning = SamplerConfig { logit_bias: bans, ..base() };
    assert_eq!(decisive(banning.clone()), Some((3, 9)));
    let best = [(1, 4.0), (3, 3.0), (2, 2.0)];
    assert_eq!(Sampler::new(banning).unwrap().pick_best(0, &best).unwrap(), 2);
    assert_eq!(decisive(SamplerConfig { logit_bias: vec![(1, -99.0)], ..base() }), None);
    assert_eq!(decisive(SamplerConfig { presence_penalty: 0.5, ..base() }), None);
}

/// A draft row's list of the best tokens must have a finite logit.
#[test]
fn lists_of_a_draft_are_tempered_or_refused() {
    let logit_bias = vec![(1, 3.0)];
    let config = SamplerConfig { temperature: 1.0, logit_bias, ..SamplerConfig::default() };
    let (sampler, mut out) = (Sampler::new(config).unwrap(), Tempered::default());
    sampler.temper_best(&[(5, 2.0), (1, 1.0)], &[], &mut out).unwrap();
    assert_eq!(out.list[0].0, 1, "the bias counts");
    for wrong in [&[][..], &[(5, 2.0), (1, f32::NAN)], &[(5, f32::INFINITY)]] {
        assert!(sampler.temper_best(wrong, &[], &mut out).is_err(), "{wrong:?}");
    }
}
