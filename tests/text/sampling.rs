//! Promise 3, statistically: the sampler's draws have the right distribution, with and without
//! drafts.

use gemma::decode::verify;
use gemma::engine::{Scores, TokenTree};
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Token;

const VOCAB: usize = 5;
const DRAWS: usize = 1_000_000;

/// Returns the logits after a path of up to two tokens.
fn logits(path: &[Token]) -> [f32; VOCAB] {
    let at = path.iter().fold(1, |at, &t| at * 7 + t as usize);
    std::array::from_fn(|token| ((at * 13 + token * 29) % 17) as f32 / 6.0)
}

fn probabilities(path: &[Token]) -> [f64; VOCAB] {
    let weights = logits(path).map(|l| (l as f64).exp());
    weights.map(|w| w / weights.iter().sum::<f64>())
}

/// Returns ln gamma (Lanczos, g = 7, n = 9).
fn ln_gamma(x: f64) -> f64 {
    const C: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let t = x + 7.5;
    let sum = C[1..].iter().enumerate().fold(C[0], |sum, (i, c)| sum + c / (x + i as f64 + 1.0));
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

/// Returns the probability that a chi-square variable of `freedom` degrees exceeds `x`: 1 minus the
/// regularised lower gamma function.
fn chi_square_tail(x: f64, freedom: f64) -> f64 {
    let (a, x) = (freedom / 2.0, x / 2.0);
    let front = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum, mut n) = (1.0 / a, 1.0 / a, a);
        while term > sum * 1e-15 {
            n += 1.0;
            term *= x / n;
            sum += term;
        }
        1.0 - front * sum
    } else {
        // Continued fraction by Lentz's method.
        let mut b = x + 1.0 - a;
        let (mut c, mut d) = (1e300, 1.0 / b);
        let mut h = d;
        for i in 1..10_000 {
            let an = -(i as f64) * (i as f64 - a);
            b += 2.0;
            d = 1.0 / (an * d + b);
            c = b + an / c;
            h *= d * c;
            if (d * c - 1.0).abs() < 1e-15 {
                break;
            }
        }
        front * h
    }
}

/// Draws triples and returns the p-value of the G-test against the exact joint distribution.
fn p_value(mut draw: impl FnMut(usize) -> [Token; 3]) -> f64 {
    let mut seen = vec![0u64; VOCAB.pow(3)];
    for i in 0..DRAWS {
        let [a, b, c] = draw(i).map(|t| t as usize);
        seen[(a * VOCAB + b) * VOCAB + c] += 1;
    }
    let mut g = 0.0;
    for (cell, &count) in seen.iter().enumerate() {
        let [a, b, c] = [cell / VOCAB / VOCAB, cell / VOCAB % VOCAB, cell % VOCAB];
        let (first, second) = (a as Token, b as Token);
        let p =
            probabilities(&[])[a] * probabilities(&[first])[b] * probabilities(&[first, second])[c];
        if count > 0 {
            g += 2.0 * count as f64 * (count as f64 / (p * DRAWS as f64)).ln();
        }
    }
    chi_square_tail(g, VOCAB.pow(3) as f64 - 1.0)
}

fn sampler(seed: u64) -> Sampler {
    Sampler::new(SamplerConfig { temperature: 1.0, seed, ..Default::default() }).unwrap()
}

/// Draws three tokens. The nth one uses the noise of position `position(n)`.
fn triple(sampler: &Sampler, position: impl Fn(usize) -> usize) -> [Token; 3] {
    let a = sampler.pick(position(0), &logits(&[]), &[]).unwrap();
    let b = sampler.pick(position(1), &logits(&[a]), &[]).unwrap();
    let c = sampler.pick(position(2), &logits(&[a, b]), &[]).unwrap();
    [a, b, c]
}

#[test]
fn the_tail_function_gives_table_values() {
    for (x, freedom, want) in [
        (3.841_458_8, 1.0, 0.05),
        (18.307_038, 10.0, 0.05),
        (2.558_212_2, 10.0, 0.99),
        (149.449_25, 100.0, 0.001),
    ] {
        assert!((chi_square_tail(x, freedom) - want).abs() < 1e-6, "{x} {freedom}");
    }
}

#[test]
fn plain_draws_have_the_exact_joint_distribution() {
    // The tokens of one long text in order, and the first tokens of many texts.
    let one = sampler(11);
    let along = p_value(|i| triple(&one, |n| 3 * i + n));
    assert!(along > 1e-3, "p = {along}");
    let across = p_value(|i| triple(&sampler(i as u64), |n| n));
    assert!(across > 1e-3, "p = {across}");
}

#[test]
fn drafted_draws_have_the_exact_joint_distribution() {
    // A tree that contains some of the paths. Paths that leave it continue without drafts.
    let mut tree = TokenTree::root(0);
    let top = tree.push(0, 2);
    tree.push(top, 0);
    tree.push(top, 4);
    let other = tree.push(0, 1);
    tree.push(other, 3);
    let scores = Scores {
        vocab: VOCAB,
        logits: (0..tree.len() as u32).flat_map(|node| logits(&tree.path(node))).collect(),
        ..Scores::default()
    };
    let one = sampler(12);
    let p = p_value(|i| {
        let mut history = vec![0; 3 * (i % 1000) + 1];
        let sampler = if i % 2 == 0 { sampler(i as u64) } else { sampler((i as u64) << 20) };
        let mut drawn = verify(&tree, &scores, 0, &sampler, &history).unwrap().tokens(&tree);
        history.resize(history.len() + drawn.len(), 0);
        while drawn.len() < 3 {
            drawn.push(sampler.pick(history.len(), &logits(&drawn), &[]).unwrap());
            history.push(0);
        }
        [drawn[0], drawn[1], drawn[2]]
    });
    assert!(p > 1e-3, "p = {p}");
    // The tokens also equal those that are drawn without the tree.
    let history = vec![0; 9];
    let drawn = verify(&tree, &scores, 0, &one, &history).unwrap().tokens(&tree);
    assert_eq!(drawn, triple(&one, |n| 9 + n)[..drawn.len()]);
}

#[test]
fn faulty_noise_fails_the_same_test() {
    let same_position = p_value(|i| triple(&sampler(i as u64), |_| 0));
    assert!(same_position < 1e-9, "noise not keyed by position: p = {same_position}");
    let same_seed = p_value(|_| triple(&sampler(1), |n| n));
    assert!(same_seed < 1e-9, "noise of the token alone: p = {same_seed}");
    let overlapping = sampler(13);
    let overlap = p_value(|i| triple(&overlapping, |n| i / 2 * 3 + n));
    assert!(overlap < 1e-9, "every draw twice: p = {overlap}");
}
