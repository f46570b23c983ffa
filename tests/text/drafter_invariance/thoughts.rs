//! Promise 4 if a budget ends thoughts, also under a rule.

use super::{draft_of, settings, without_bans};
use crate::invariance::{Case, Strict, check};
use crate::toy::Toy;
use gemma::sampler::{SamplerConfig, ThoughtBudget, TokenRule};
use std::sync::Arc;

const BEGIN: u32 = 4;
const END: u32 = 6;
const MOST: usize = 5;

/// Returns the number of tokens in thoughts, and whether a thought is open at the end.
fn thoughts(answer: &[u32]) -> (usize, bool) {
    let (mut is_open, mut tokens) = (false, 0);
    for &token in answer {
        match token {
            BEGIN => is_open = true,
            END => is_open = false,
            _ => tokens += usize::from(is_open),
        }
    }
    (tokens, is_open)
}

#[test]
fn thoughts_end_at_their_budget_whatever_drafts() {
    let prompt = [3, BEGIN, 4, 1, 5];
    let mut ended = 0;
    for (i, config) in settings().iter().enumerate() {
        for seed in 0..2 {
            let target = Toy { order: 2, ..Toy::new(seed) };
            let draft = draft_of(&target, 0.25);
            let seed = seed + 100 * i as u64;
            // The marks are likely, so that there are thoughts.
            let mut config = SamplerConfig { seed, ..without_bans(config) };
            config.logit_bias.push((BEGIN, 3.0));
            let budget = ThoughtBudget::new(prompt.len(), (BEGIN, END), MOST);
            let rule: Arc<dyn TokenRule> = match i % 3 {
                0 => Arc::new(budget.with(Arc::new(Strict { vocab: target.vocab }))),
                _ => Arc::new(budget),
            };
            let case = Case { rule: Some(rule), ..Case::new(&prompt, config) };
            let (text, _) = check(&|| target.engine(), &|| draft.engine(), &case);
            let answer = &text.history[prompt.len()..];
            for at in 0..answer.len() {
                let (tokens, is_open) = thoughts(&answer[..at]);
                assert!(tokens <= MOST, "{answer:?}");
                if is_open && tokens == MOST {
                    assert_eq!(answer[at], END, "{answer:?} at {at}");
                    ended += 1;
                }
            }
        }
    }
    assert!(ended > 10, "{ended} thoughts were ended");
}
