//! Log-probabilities of the tokens of a text.
//!
//! They are the model's own, before bans, grammar, penalty, temperature and filters.

use crate::tensor::Token;

/// The log-probability of a token of a text, and the likeliest tokens in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbs {
    pub token: Token,
    pub log_prob: f32,
    /// The likeliest tokens with their log-probabilities, best first.
    pub best: Vec<(Token, f32)>,
}

impl TokenLogProbs {
    /// Computes the log-probabilities of a row of logits in which `token` was picked, with the `n`
    /// likeliest tokens.
    pub fn new(logits: &[f32], token: Token, n: usize) -> TokenLogProbs {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
        let log_prob = |logit: f32| (f64::from(logit - max) - sum.ln()) as f32;
        let order = |a: &Token, b: &Token| {
            logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b))
        };
        let mut ids: Vec<Token> = (0..logits.len() as Token).collect();
        let n = n.min(ids.len());
        if n < ids.len() && n > 0 {
            ids.select_nth_unstable_by(n - 1, order);
        }
        ids.truncate(n);
        ids.sort_unstable_by(order);
        let best = ids.into_iter().map(|id| (id, log_prob(logits[id as usize]))).collect();
        let log_prob = logits.get(token as usize).map_or(f32::NEG_INFINITY, |l| log_prob(*l));
        TokenLogProbs { token, log_prob, best }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_and_the_best_come_first() {
        let logits = [1.0f32, 3.0, -2.0, 3.0, 0.5];
        let all = TokenLogProbs::new(&logits, 2, 9);
        let ids: Vec<Token> = all.best.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0, 4, 2]);
        let sum: f32 = all.best.iter().map(|(_, log_prob)| log_prob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!((all.token, all.log_prob), all.best[4]);
        assert_eq!(TokenLogProbs::new(&logits, 2, 2).best, all.best[..2]);
        assert_eq!(TokenLogProbs::new(&logits, 1, 0).best, []);
    }
}
