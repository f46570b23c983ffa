//! What keeps drafting honest: expectations are held to what came, and losses against plain
//! decoding are counted and bounded.

/// Rounds that expectations are judged by, and the share of them that must come true.
const WINDOW: u32 = 32;
const TOLERATED: f32 = 0.9;
/// What each round without drafts takes of a doubt.
const FADING: f32 = 1.0 / 128.0;

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

    /// A round without drafts: what was seen before it says a little less of what follows.
    pub fn fade(&mut self) {
        self.factor += FADING * (1.0 - self.factor);
    }

    /// Takes in a round with drafts: tokens that the chances promised, before any doubt, and tokens
    /// taken.
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

/// What drafting must win by the prices that are known, to be worth their errors.
pub const MARGIN: f32 = 1.05;

/// Passes of plain decoding that drafting may lose in all, and the share of all tokens' passes that
/// it may lose beside.
const AT_ONCE: f32 = 0.7;
/// The part of the former that may be lost before the first token, and the tokens after which it
/// may be all: much for a short text.
const BEFORE: f32 = 0.4;
const GRANTED: f32 = 64.0;
const SHARE: f32 = 0.01;

/// What drafting may still lose against plain decoding. The unit is a plain pass, which brings one
/// token.
///
/// A round is begun only if it can be afforded even if it brings its one token alone. So however
/// wrong chances, trust and depths are, and whatever the text does, no text takes longer than plain
/// decoding would have by more than [`AT_ONCE`] passes and [`SHARE`] of them, as far as the prices
/// known beforehand hold.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Passes won since the text began, less what earlier texts have lost.
    balance: f32,
    /// Tokens of this text.
    tokens: f32,
}

impl Ledger {
    /// What one text has won or left is not for the next to lose; losses stay until later tokens
    /// have made up for them.
    pub fn begin_text(&mut self) {
        *self = Ledger { balance: (self.balance + SHARE * self.tokens).min(0.0), tokens: 0.0 };
    }

    /// Books a round: tokens that came, and its time in plain passes.
    pub fn book(&mut self, tokens: f32, passes: f32) {
        self.balance += tokens - passes;
        self.tokens += tokens;
    }

    /// Plain passes that the next round may take beyond the one that its first token is worth.
    pub fn room(&self) -> f32 {
        let granted = BEFORE + (1.0 - BEFORE) * (self.tokens / GRANTED).min(1.0);
        self.balance + AT_ONCE * granted + SHARE * self.tokens
    }
}

/// Passes that drafting of one kind may lose before it rests: at once, and of all that are spent.
const PATIENCE: f32 = 1.0;
const DRAIN: f32 = 0.005;
/// Passes that may be won in advance: a text that changes is noticed before all of its gains are
/// lost again.
const CREDIT: f32 = 3.0;
/// Rounds without drafts after a loss; twice as many after each loss that follows.
const REST: u32 = 64;
const LONGEST: u32 = 512;

/// Whether drafting of one kind has paid lately: where it has not, it rests, and others may use
/// what the [`Ledger`] has room for.
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
        -PATIENCE - DRAIN * self.spent
    }

    /// Whether another round with drafts can be afforded.
    pub fn allows(&self) -> bool {
        self.resting == 0 && self.balance >= self.limit()
    }
}

/// Times the usual from which a pass is out of the ordinary, and from which the first one of its
/// size is.
const FAR: f32 = 2.0;
const FIRST: f32 = 1.25;
/// Such passes that may be left out of the books at once, and the share of all rounds: where there
/// are more, they are the rule.
const PARDONS: f32 = 2.0;
const PARDONED: f32 = 1.0 / 64.0;

/// Passes whose time says nothing of what drafting costs: the first of a size, which may find its
/// kernels not compiled or its memory not touched yet, and now and then one that another program
/// held up. Neither is to be paid for by the drafts that follow.
#[derive(Clone, Debug)]
pub struct Pardons {
    /// Sizes that were met, by powers of two.
    met: u32,
    left: f32,
}

impl Default for Pardons {
    fn default() -> Self {
        Pardons { met: 0, left: PARDONS }
    }
}

impl Pardons {
    /// Whether a pass over so many rows that took `times` the usual time is left out.
    pub fn grants(&mut self, rows: usize, times: f32) -> bool {
        let size = 1u32 << rows.max(1).next_power_of_two().trailing_zeros().min(31);
        let first = self.met & size == 0;
        self.met |= size;
        self.left = (self.left + PARDONED).min(PARDONS);
        let granted = times > if first { FIRST } else { FAR } && (first || self.left >= 1.0);
        self.left -= (granted && !first) as u8 as f32;
        granted
    }
}

/// The most rounds in a row that are left out behind rounds of which nothing was kept, as a power
/// of two.
const LEFT_OUT: u32 = 3;

/// How often guesses are asked for where none is worth its row: after two such rounds in a row one
/// is left out, then three, then seven. What asking takes is a few hundredths of a fast target's
/// pass, and a text may go on like that for long.
#[derive(Clone, Debug, Default)]
pub struct Idle {
    /// Rounds in a row that asked and kept nothing, and those to leave out.
    empty: u32,
    wait: u32,
}

impl Idle {
    /// Takes in a round that asked for guesses: whether any was kept.
    pub fn asked(&mut self, kept: bool) {
        self.empty = if kept { 0 } else { self.empty + 1 };
        self.wait = (1 << self.empty.saturating_sub(1).min(LEFT_OUT)) - 1;
    }

    /// Whether the round that begins is left out.
    pub fn skips(&mut self) -> bool {
        let skips = self.wait > 0;
        self.wait -= skips as u32;
        skips
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_passes_of_a_size_and_rare_ones_are_pardoned_and_no_others() {
        let mut pardons = Pardons::default();
        assert!(pardons.grants(3, 400.0) && pardons.grants(8, 1.3) && !pardons.grants(2, 1.1));
        assert!(!pardons.grants(4, 1.3), "of the size of three");
        assert!(pardons.grants(4, 50.0) && pardons.grants(8, 3.0));
        assert!(!pardons.grants(8, 3.0), "the third in a row");
        let mut granted = 0;
        (0..640).for_each(|_| granted += pardons.grants(8, 9.0) as u32);
        assert!((9..=11).contains(&granted), "{granted}");
        (0..200).for_each(|_| assert!(!pardons.grants(8, 1.0)));
        assert!(
            pardons.grants(8, 9.0) && pardons.grants(8, 9.0) && !pardons.grants(8, 9.0),
            "saved up, but not without end"
        );
    }

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
        (0..64).for_each(|_| trust.fade());
        assert!((0.4..0.6).contains(&trust.factor()), "and tried again");
    }

    /// Rounds with drafts that each bring `tokens` for `cost`, as far as the account allows.
    /// Returns how many, and the time of all.
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
    fn what_does_not_pay_rests() {
        for (tokens, cost) in [(1.0, 1.05), (1.0, 1.3), (1.5, 2.0), (1.0, 3.0)] {
            for rounds in [128, 1000] {
                let (drafted, time) = run(&mut Account::default(), rounds, tokens, cost);
                assert!(drafted > 0);
                assert!(
                    time <= 1.008 * rounds as f32 + PATIENCE + cost,
                    "{rounds} tokens in {time}: {tokens} a round of {cost}"
                );
            }
        }
    }

    #[test]
    fn a_ledger_lends_what_it_has_and_no_gains_of_another_text() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.room(), BEFORE * AT_ONCE);
        (0..32).for_each(|_| ledger.book(1.0, 1.0));
        assert!((ledger.room() - AT_ONCE * (1.0 + BEFORE) / 2.0 - 32.0 * SHARE).abs() < 1e-4);
        (0..68).for_each(|_| ledger.book(1.0, 1.0));
        assert!((ledger.room() - AT_ONCE - 100.0 * SHARE).abs() < 1e-4);
        ledger.book(1.0, 3.5);
        let left = ledger.room();
        assert!((left - AT_ONCE - 101.0 * SHARE + 2.5).abs() < 1e-4);
        ledger.begin_text();
        assert!((ledger.room() - (left - (1.0 - BEFORE) * AT_ONCE)).abs() < 1e-4, "losses stay");
        ledger.book(20.0, 5.0);
        ledger.begin_text();
        assert_eq!(ledger.room(), BEFORE * AT_ONCE, "neither gains nor savings do");
    }

    #[test]
    fn asking_in_vain_becomes_rare_and_one_success_ends_that() {
        let mut idle = Idle::default();
        let asked = |idle: &mut Idle, kept: bool| {
            (0..80)
                .filter(|_| {
                    let asks = !idle.skips();
                    if asks {
                        idle.asked(kept);
                    }
                    asks
                })
                .count()
        };
        assert_eq!(asked(&mut idle, true), 80);
        assert_eq!(asked(&mut idle, false), 13, "0, 1, 3, and then always 7 left out");
        assert!((73..=80).contains(&asked(&mut idle, true)));
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
