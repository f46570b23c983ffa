//! What keeps drafting honest: expectations are held to what came, and losses against plain decoding are counted and bounded.

/// Rounds that expectations are judged by, and the share of them that must come true.
const WINDOW: u32 = 32;
const TOLERATED: f32 = 0.9;

/// How far expectations are trusted.
#[derive(Clone, Debug)]
pub struct Trust {
    expected: f32,
    realised: f32,
    rounds: u32,
    factor: f32,
}

impl Default for Trust {
    fn default() -> Self {
        Trust { expected: 0.0, realised: 0.0, rounds: 0, factor: 1.0 }
    }
}

impl Trust {
    /// What to multiply expected tokens by.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Takes in a round with drafts: tokens that the chances promised, before any doubt, and tokens taken.
    pub fn observe(&mut self, expected: f32, realised: f32) {
        self.expected += expected;
        self.realised += realised;
        self.rounds += 1;
        // Enough to tell, or a failure that cannot be chance.
        let hopeless = self.expected > 8.0 && self.realised < 0.25 * self.expected;
        if self.rounds < WINDOW && !hopeless {
            return;
        }
        let share = self.realised / self.expected.max(1e-3);
        self.factor = if share < TOLERATED { share.max(0.1) } else { 1.0 };
        (self.expected, self.realised, self.rounds) = (0.0, 0.0, 0);
    }
}

/// Passes of plain decoding that drafting may lose at once, and for good of all that are spent.
const AT_ONCE: f32 = 1.0;
const SHARE: f32 = 0.01;
/// Passes that may be won in advance: a text that changes is noticed before all of its gains are lost again.
const CREDIT: f32 = 3.0;
/// Rounds without drafts after a loss; twice as many after each loss that follows.
const REST: u32 = 64;
const LONGEST: u32 = 512;

/// What drafting has won or lost against plain decoding. The unit is a plain pass, which brings one token.
///
/// However wrong chances and predictions are, no more than [`AT_ONCE`] passes and [`SHARE`] of the time are lost to them.
#[derive(Clone, Debug)]
pub struct Account {
    balance: f32,
    spent: f32,
    resting: u32,
    rest: u32,
}

impl Default for Account {
    fn default() -> Self {
        Account { balance: 0.0, spent: 0.0, resting: 0, rest: REST }
    }
}

impl Account {
    /// Books a round with drafts: tokens that came, and its time in plain passes.
    pub fn book(&mut self, tokens: f32, passes: f32) {
        self.balance = (self.balance + tokens - passes).min(CREDIT);
        self.spent += passes;
        if self.balance >= 1.0 {
            self.rest = REST;
        }
        if self.balance < self.limit() {
            self.resting = self.rest;
            self.rest = (2 * self.rest).min(LONGEST);
        }
    }

    /// Books a round without.
    pub fn pass(&mut self) {
        self.spent += 1.0;
        self.resting = self.resting.saturating_sub(1);
    }

    fn limit(&self) -> f32 {
        -AT_ONCE - SHARE * self.spent
    }

    /// Whether another round with drafts can be afforded.
    pub fn allows(&self) -> bool {
        self.resting == 0 && self.balance >= self.limit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_shrinks_by_what_did_not_come_true_and_returns() {
        let mut trust = Trust::default();
        (0..WINDOW).for_each(|_| trust.observe(1.0, 0.95));
        assert_eq!(trust.factor(), 1.0);
        (0..WINDOW - 1).for_each(|_| trust.observe(1.0, 0.5));
        assert_eq!(trust.factor(), 1.0, "too early to tell");
        trust.observe(1.0, 0.5);
        assert!((trust.factor() - 0.5).abs() < 1e-4);
        (0..WINDOW).for_each(|_| trust.observe(1.0, 1.0));
        assert_eq!(trust.factor(), 1.0);
        (0..5).for_each(|_| trust.observe(2.0, 0.0));
        assert!((trust.factor() - 0.1).abs() < 1e-4, "hopeless is noticed sooner");
    }

    /// Rounds with drafts that each bring `tokens` for `cost`, as far as the account allows. Returns how many, and the time of all.
    fn run(account: &mut Account, rounds: usize, tokens: f32, cost: f32) -> (usize, f32) {
        let (mut drafted, mut made, mut time) = (0, 0.0, 0.0);
        while made < rounds as f32 {
            if account.allows() {
                account.book(tokens, cost);
                (drafted, made, time) = (drafted + 1, made + tokens, time + cost);
            } else {
                account.pass();
                (made, time) = (made + 1.0, time + 1.0);
            }
        }
        (drafted, time)
    }

    #[test]
    fn losses_are_bounded_whatever_they_come_from() {
        for (tokens, cost) in [(1.0, 1.05), (1.0, 1.3), (1.5, 2.0), (1.0, 3.0)] {
            for rounds in [128, 1000] {
                let (drafted, time) = run(&mut Account::default(), rounds, tokens, cost);
                assert!(drafted > 0);
                assert!(time <= 1.013 * rounds as f32 + AT_ONCE + cost, "{rounds} tokens in {time}: {tokens} a round of {cost}");
            }
        }
    }

    #[test]
    fn what_pays_is_never_stopped_and_what_pays_again_is_found() {
        let mut account = Account::default();
        let (drafted, _) = run(&mut account, 1000, 2.0, 1.5);
        assert_eq!(drafted, 500);
        let (drafted, time) = run(&mut account, 1000, 1.0, 1.2);
        assert!(drafted < 100 && time < 1030.0, "{drafted} in {time}");
        let (drafted, _) = run(&mut account, 2000, 2.0, 1.5);
        assert!(drafted > 600, "{drafted}");
    }
}
