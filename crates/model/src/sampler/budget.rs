//! A limit on the tokens of thoughts.

use std::sync::Arc;

use anyhow::Result;

use super::{Mask, TokenRule};
use gemma_base::tensor::Token;

/// A rule that limits the thoughts of an answer. At the limit, only the mark that ends a thought
/// may follow.
///
/// The marks are not counted, but the name of a thought's channel is.
#[derive(Clone, Debug)]
pub struct ThoughtBudget {
    /// Tokens before the answer.
    prompt: usize,
    /// The marks around a thought: begin and end.
    marks: (Token, Token),
    most: usize,
    closing: Arc<Mask>,
    /// Rule for the tokens before the limit and after the thought.
    inner: Option<Arc<dyn TokenRule>>,
}

impl ThoughtBudget {
    /// Creates the rule for an answer that follows `prompt` tokens.
    pub fn new(prompt: usize, marks: (Token, Token), most: usize) -> ThoughtBudget {
        let end = marks.1;
        let mut words = vec![0; end as usize / 32 + 1];
        words[end as usize / 32] = 1 << (end % 32);
        let closing = Arc::new(Mask::new(words, false));
        ThoughtBudget { prompt, marks, most, closing, inner: None }
    }

    /// Combines this rule with another one.
    pub fn with(self, inner: Arc<dyn TokenRule>) -> ThoughtBudget {
        ThoughtBudget { inner: Some(inner), ..self }
    }

    /// Returns whether a thought must end after `history`.
    fn is_spent(&self, history: &[Token]) -> bool {
        let (mut thinks, mut tokens) = (false, 0);
        for &token in history.get(self.prompt..).unwrap_or_default() {
            match token {
                _ if token == self.marks.0 => thinks = true,
                _ if token == self.marks.1 => thinks = false,
                _ => tokens += usize::from(thinks),
            }
        }
        thinks && tokens >= self.most
    }
}

impl TokenRule for ThoughtBudget {
    fn mask(&self, history: &[Token]) -> Result<Option<Arc<Mask>>> {
        match &self.inner {
            _ if self.is_spent(history) => Ok(Some(self.closing.clone())),
            Some(inner) => inner.mask(history),
            None => Ok(None),
        }
    }

    fn settle(&self, history: &[Token]) {
        if let Some(inner) = &self.inner {
            inner.settle(history);
        }
    }

    fn is_slow(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_slow())
    }

    fn is_ready(&self, history: &[Token]) -> bool {
        self.is_spent(history) || self.inner.as_ref().is_none_or(|inner| inner.is_ready(history))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_a_thought_follows_its_last_token() {
        let (begin, end) = (40, 70);
        let rule = ThoughtBudget::new(2, (begin, end), 3);
        let forced = |history: &[Token]| {
            let mask = rule.mask(history).unwrap();
            mask.map(|mask| mask.only().unwrap())
        };
        // Thoughts in the prompt are not counted.
        for free in [
            &[][..],
            &[begin, 1],
            &[begin, 1, 5, 5, 5, 5],
            &[1, 1, begin],
            &[1, 1, begin, 5, 5],
            &[1, 1, begin, 5, 5, 5, end],
            &[1, 1, begin, 5, end, 5, 5, 5, 5],
        ] {
            assert_eq!(forced(free), None, "{free:?}");
        }
        for spent in [
            &[1, 1, begin, 5, 5, 5][..],
            &[1, 1, begin, 5, 5, end, 5, begin, 5],
            &[1, 1, begin, 5, 5, 5, end, begin],
        ] {
            assert_eq!(forced(spent), Some(end), "{spent:?}");
        }
        let none = ThoughtBudget::new(0, (begin, end), 0);
        assert_eq!(none.mask(&[begin]).unwrap().unwrap().only(), Some(end));
    }
}
