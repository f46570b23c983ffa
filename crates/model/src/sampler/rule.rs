//! Rules for the next token: the sampler's interface to a grammar.

use std::fmt::Debug;
use std::sync::Arc;

use anyhow::Result;

use gemma_base::tensor::Token;

/// Tokens allowed at one position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// One bit per token, lowest first. `[tokens / 32]`
    words: Vec<u32>,
    only: Option<Token>,
    ends: bool,
}

impl Mask {
    /// Creates a mask. Bit `t % 32` of word `t / 32` allows token t. `ends` means that all allowed
    /// tokens end the text.
    pub fn new(words: Vec<u32>, ends: bool) -> Self {
        let mut allowed = words.iter().enumerate().filter(|(_, bits)| **bits != 0);
        let only = match (allowed.next(), allowed.next()) {
            (Some((word, bits)), None) if bits.count_ones() == 1 => {
                Some(word as Token * 32 + bits.trailing_zeros())
            }
            _ => None,
        };
        Mask { words, only, ends }
    }

    /// Returns one bit per token, lowest first. `[tokens / 32]`
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn allows(&self, token: Token) -> bool {
        self.words.get(token as usize / 32).is_some_and(|bits| bits >> (token % 32) & 1 == 1)
    }

    /// Returns the allowed token if there is exactly one.
    pub fn only(&self) -> Option<Token> {
        self.only
    }

    /// Returns whether only the end of the text may follow.
    pub fn ends(&self) -> bool {
        self.ends
    }

    /// Returns whether no token may follow.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|bits| *bits == 0)
    }

    /// Sets the logits of forbidden tokens to minus infinity; NaN is kept. `token_of` returns the
    /// token of a column.
    pub fn apply(&self, logits: &[f32], token_of: impl Fn(usize) -> Token, out: &mut Vec<f32>) {
        out.clear();
        let masked = |(column, &logit): (usize, &f32)| match self.allows(token_of(column))
            || logit.is_nan()
        {
            true => logit,
            false => f32::NEG_INFINITY,
        };
        out.extend(logits.iter().enumerate().map(masked));
    }
}

/// A rule for the tokens that may follow a text.
///
/// It is a pure function of the tokens so far; caches of an implementation only change its speed.
pub trait TokenRule: Debug + Send + Sync {
    /// Returns the tokens that may follow `history` (the prompt and all generated tokens), or
    /// `None` if all may.
    fn mask(&self, history: &[Token]) -> Result<Option<Arc<Mask>>>;
    /// Announces that all later histories begin with `history`. This only affects speed.
    fn settle(&self, _history: &[Token]) {}
    /// Returns whether masks may take so long that other texts should not wait for them. This only
    /// affects speed.
    fn is_slow(&self) -> bool {
        false
    }
    /// Returns whether the mask after `history` is already computed. Otherwise a background thread
    /// computes it, and the caller may poll.
    fn is_ready(&self, _history: &[Token]) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_knows_its_tokens() {
        let mask = |tokens: &[Token]| {
            let mut words = vec![0; 3];
            tokens.iter().for_each(|t| words[*t as usize / 32] |= 1 << (t % 32));
            Mask::new(words, false)
        };
        for token in [0, 31, 32, 95] {
            assert_eq!(mask(&[token]).only(), Some(token));
        }
        let two = mask(&[3, 64]);
        assert!(
            two.only().is_none()
                && two.allows(3)
                && two.allows(64)
                && !two.allows(4)
                && !two.allows(96)
                && !two.is_empty()
        );
        assert!(mask(&[]).is_empty() && mask(&[]).only().is_none());
        let mut out = Vec::new();
        two.apply(&[1.0, f32::NAN, 2.0], |column| column as Token + 2, &mut out);
        assert!(
            out[0] == f32::NEG_INFINITY && out[1].is_nan() && out[2] == f32::NEG_INFINITY,
            "{out:?}"
        );
    }
}
