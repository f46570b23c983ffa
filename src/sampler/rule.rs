//! Rules on which token may follow which text: a grammar, as the sampler sees it.

use std::fmt::Debug;
use std::sync::Arc;

use anyhow::Result;

use crate::tensor::Token;

/// Tokens that may be picked at one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// A bit a token, lowest first. `[tokens / 32]`
    words: Vec<u32>,
    only: Option<Token>,
    ends: bool,
}

impl Mask {
    /// Bit `t % 32` of word `t / 32` says whether token t may be picked; `ends` where only tokens
    /// may that end the text.
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

    /// A bit a token, lowest first. `[tokens / 32]`
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn allows(&self, token: Token) -> bool {
        self.words.get(token as usize / 32).is_some_and(|bits| bits >> (token % 32) & 1 == 1)
    }

    /// The one token allowed, where there is no other.
    pub fn only(&self) -> Option<Token> {
        self.only
    }

    /// Whether nothing but the end of the text may follow.
    pub fn ends(&self) -> bool {
        self.ends
    }

    /// Whether nothing at all may follow.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|bits| *bits == 0)
    }

    /// Logits with minus infinity for what is not allowed; what is not a number stays so.
    /// `token_of` gives each column's token.
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

/// Which tokens may follow a text: a pure function of the tokens so far, whatever the
/// implementation remembers.
pub trait Rule: Debug + Send + Sync {
    /// `history` holds the prompt and what was generated.
    fn mask(&self, history: &[Token]) -> Result<Arc<Mask>>;
    /// Says that whatever is asked from now on begins with `history`. Only speed depends on it.
    fn settle(&self, _history: &[Token]) {}
    /// Whether masks may take so long that others should not wait for them. Only speed depends on
    /// it.
    fn is_slow(&self) -> bool {
        false
    }
    /// Whether the mask behind `history` is there at once. Where it is not, it is being made beside
    /// the caller, who may ask again.
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
