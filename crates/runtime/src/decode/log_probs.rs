//! Log-probabilities of the tokens of a text.
//!
//! They are the model's own, before bans, grammar, penalties, temperature and filters.

use anyhow::Result;
use gemma_base::tensor::{Token, math};
use gemma_model::sampler;

/// Log-probability of a token, and the most likely tokens at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbs {
    pub token: Token,
    /// `None` for the first token of a text, which has no prediction.
    pub log_prob: Option<f32>,
    /// The most likely tokens with their log-probabilities, best first.
    pub best: Vec<(Token, f32)>,
}

impl TokenLogProbs {
    /// Creates the entry of a text's first token.
    pub fn first(token: Token) -> TokenLogProbs {
        TokenLogProbs { token, log_prob: None, best: Vec::new() }
    }

    /// Computes log-probabilities from the logits that predict `token`, with the `n` most likely
    /// tokens. Fails if the row has no finite maximum.
    pub fn new(logits: &[f32], token: Token, n: usize) -> Result<TokenLogProbs> {
        let mut best = sampler::best(logits, n.max(1))?;
        let log_sum = math::log_sum_exp(logits);
        let log_prob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        best.truncate(n);
        best.iter_mut().for_each(|(_, logit)| *logit = log_prob(*logit));
        let log_prob = logits.get(token as usize).map_or(f32::NEG_INFINITY, |l| log_prob(*l));
        Ok(TokenLogProbs { token, log_prob: Some(log_prob), best })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_and_the_best_come_first() {
        let logits = [1.0f32, 3.0, -2.0, 3.0, 0.5];
        let all = TokenLogProbs::new(&logits, 2, 9).unwrap();
        let ids: Vec<Token> = all.best.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0, 4, 2]);
        let sum: f32 = all.best.iter().map(|(_, log_prob)| log_prob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!((all.token, all.log_prob), (all.best[4].0, Some(all.best[4].1)));
        assert_eq!(TokenLogProbs::new(&logits, 2, 2).unwrap().best, all.best[..2]);
        assert_eq!(TokenLogProbs::new(&logits, 1, 0).unwrap().best, []);
        assert!(TokenLogProbs::new(&[f32::NAN; 3], 1, 2).is_err());
    }
}
