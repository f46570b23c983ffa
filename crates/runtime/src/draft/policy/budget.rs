//! Limits of the loss against plain decoding, and pauses before trials, which grow with each
//! failure.

/// Loss that is allowed from the start, in plain passes.
const AT_ONCE: f32 = 2.0;
/// Additional loss that is allowed for each token of the text, in plain passes.
const SHARE: f32 = 0.01;
/// Rounds before an unused choice is tried again: the first pause and the longest one.
const PAUSE: u32 = 8;
const LONGEST: u32 = 128;

/// Loss against plain decoding that drafting may still cause. The unit is a plain pass, which
/// yields one token for each text.
#[derive(Clone, Debug, Default)]
pub struct LossBudget {
    /// Plain passes that were saved since the text began, minus the losses of earlier texts.
    balance: f32,
    /// Tokens of this text.
    tokens: f32,
}

impl LossBudget {
    /// Begins a text. Gains of the last text are dropped. Its losses remain until later tokens have
    /// compensated for them.
    pub fn begin_text(&mut self) {
        *self = LossBudget { balance: (self.balance + SHARE * self.tokens).min(0.0), tokens: 0.0 };
    }

    /// Records a round: the tokens for each text, and the round's time in plain passes.
    pub fn book(&mut self, tokens: f32, passes: f32) {
        self.balance += tokens - passes;
        self.tokens += tokens;
    }

    /// Returns the plain passes that the next round may lose, in addition to the one for its first
    /// token.
    pub fn room(&self) -> f32 {
        self.balance + AT_ONCE + SHARE * self.tokens
    }
}

/// Pause before the next trial of an unused choice, which doubles with each failed trial.
#[derive(Clone, Debug, Default)]
pub struct BackOff {
    wait: u32,
    pause: u32,
}

impl BackOff {
    /// Counts a round. Returns whether a trial is due.
    pub fn is_due(&mut self) -> bool {
        self.wait = self.wait.saturating_sub(1);
        self.wait == 0
    }

    /// Records that the choice was used. `pays` is `false` for a mere trial.
    pub fn tried(&mut self, pays: bool) {
        self.pause = if pays { PAUSE } else { (2 * self.pause).clamp(PAUSE, LONGEST) };
        self.wait = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_lends_what_it_has_and_no_gains_of_another_text() {
        let mut budget = LossBudget::default();
        assert_eq!(budget.room(), AT_ONCE);
        (0..100).for_each(|_| budget.book(1.0, 1.0));
        assert!((budget.room() - AT_ONCE - 100.0 * SHARE).abs() < 1e-4);
        budget.book(1.0, 3.5);
        let left = budget.room();
        assert!((left - AT_ONCE - 101.0 * SHARE + 2.5).abs() < 1e-4);
        budget.begin_text();
        assert!((budget.room() - left).abs() < 1e-4, "losses stay");
        budget.book(20.0, 5.0);
        budget.begin_text();
        assert_eq!(budget.room(), AT_ONCE, "neither gains nor savings do");
    }

    #[test]
    fn trials_become_rare_until_one_succeeds() {
        let mut trial = BackOff::default();
        let count = |trial: &mut BackOff, rounds: usize| {
            (0..rounds).filter(|_| trial.is_due().then(|| trial.tried(false)).is_some()).count()
        };
        assert_eq!(
            count(&mut trial, 1000),
            11,
            "at once, after 8, 16, 32, 64, 128, 128, ... rounds"
        );
        assert_eq!(count(&mut trial, 1280), 10, "the pause has an end");
        trial.tried(true);
        assert_eq!((count(&mut trial, 7), count(&mut trial, 1)), (0, 1));
    }
}
