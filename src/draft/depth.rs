//! How far ahead to draft, decided before drafting: what a level costs against how often the text
//! gets that far.
//!
//! With survival s(d), the share of rounds whose accepted path reaches depth d, k levels bring 1 +
//! s(1) + ... + s(k) tokens for one pass of about 1 + k r rows (r nodes kept a level) and k levels
//! of drafting. A level is dear where the target is small. What a level costs is what the target
//! waits for it: levels that were drafted during its pass are free. Tokens that come without
//! levels, of guesses that cost nothing, come either way: dear levels have to win over those too.

use super::cost::CostCurve;
use super::guard::MARGIN;

/// The greatest depth that is considered.
const DEEPEST: usize = 24;
/// What each round leaves of the memory of those before.
const MEMORY: f32 = 0.98;
/// Rounds that the first guess of survival weighs as much as.
const TRUST: f32 = 6.0;
/// The first guess: chance that a path goes on by one more token.
const FIRST: f32 = 0.65;
/// Rounds without drafts before a new trial, and rounds of a trial.
const REST: u32 = 64;
const TRIAL: u32 = 2;
/// Rounds that what was learnt on an earlier text weighs at most.
const INHERITED: f32 = 16.0;

/// What is known of depths and their price.
#[derive(Clone, Debug)]
pub struct Depth {
    /// Rounds that drafted this deep and rounds that got this far, fading; by depth - 1.
    tried: [f32; DEEPEST],
    reached: [f32; DEEPEST],
    /// Seconds that one level of drafting takes, fading.
    level: f32,
    /// Nodes kept per level, fading.
    nodes: f32,
    /// Tokens that a round brings without levels, fading.
    beside: f32,
    resting: u32,
    trial: u32,
}

impl Default for Depth {
    fn default() -> Self {
        Depth {
            tried: [0.0; DEEPEST],
            reached: [0.0; DEEPEST],
            level: 0.0,
            nodes: 1.2,
            beside: 0.0,
            resting: 0,
            trial: 0,
        }
    }
}

/// What is worth remembering from one text to the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// Share of rounds that got this far, and the rounds behind it; by depth - 1.
    pub survival: Vec<(f32, f32)>,
    /// Seconds that the target waits for one level.
    pub level: f32,
}

impl Depth {
    /// What is known, for [`inherit`](Self::inherit).
    pub fn habits(&self) -> Habits {
        let pair =
            |(tried, reached): (&f32, &f32)| (*tried >= 0.5).then(|| (reached / tried, *tried));
        Habits {
            survival: self.tried.iter().zip(&self.reached).map_while(pair).collect(),
            level: self.level,
        }
    }

    /// Begins with what earlier texts taught, as far as it makes sense.
    pub fn inherit(&mut self, habits: &Habits) {
        for (d, (share, rounds)) in habits.survival.iter().enumerate().take(DEEPEST) {
            if (0.0..=1.0).contains(share) && *rounds > 0.0 {
                self.tried[d] = rounds.min(INHERITED);
                self.reached[d] = share * self.tried[d];
            }
        }
        if habits.level.is_finite() && (0.0..60.0).contains(&habits.level) {
            self.level = habits.level;
        }
    }

    /// Takes in a round: levels kept, tokens taken of them and those that would have come without,
    /// nodes kept; levels drafted and the seconds that took.
    pub fn observe(
        &mut self,
        levels: usize,
        [taken, beside]: [usize; 2],
        nodes: usize,
        drafted: usize,
        seconds: f32,
    ) {
        if levels > 0 {
            for d in 0..DEEPEST {
                // What is not tried any more is forgotten too.
                self.tried[d] = self.tried[d] * MEMORY + (levels > d) as u8 as f32;
                self.reached[d] = self.reached[d] * MEMORY + (taken > d) as u8 as f32;
            }
        }
        self.beside += 0.1 * (beside as f32 - self.beside);
        if levels > 0 {
            self.nodes += 0.1 * (nodes as f32 / levels as f32 - self.nodes);
        }
        if drafted > 0 {
            let level = seconds / drafted as f32;
            let before = if self.level == 0.0 { level } else { self.level };
            // A stolen time slice must not look like the price of drafting.
            self.level = before + 0.1 * (level.min(2.0 * before) - before);
        }
    }

    /// Seconds that the target waits for one level.
    pub fn level(&self) -> f32 {
        self.level
    }

    /// Chance that the accepted path is at least this long, by depth - 1.
    fn survival(&self) -> [f32; DEEPEST] {
        let mut out = [0f32; DEEPEST];
        let mut before = 1.0f32;
        for d in 0..DEEPEST {
            // What was never tried goes on as the depth before did.
            let ratio = if d == 0 { FIRST } else { out[0].max(0.05).powf(0.8) };
            let guess = before * ratio.min(0.98);
            let s = (self.reached[d] + TRUST * guess) / (self.tried[d] + TRUST);
            before = s.min(before);
            out[d] = before;
        }
        out
    }

    /// The depth that makes the most tokens per second; 0 where plain decoding does.
    pub fn best(&self, curve: &CostCurve) -> usize {
        let survival = self.survival();
        let mut tokens = 1.0 + self.beside;
        let mut best = (0, MARGIN * tokens / curve.cost(1));
        for k in 1..=DEEPEST {
            tokens += survival[k - 1];
            let rows = 1 + (k as f32 * self.nodes.max(1.0)).round() as usize;
            let rate = tokens / (curve.cost(rows) + k as f32 * self.level);
            if rows <= curve.max_rows() && rate > best.1 {
                best = (k, rate);
            }
        }
        best.0
    }

    /// [`Depth::best`], with a short trial now and then where that is 0.
    pub fn choose(&mut self, curve: &CostCurve) -> usize {
        let best = self.best(curve);
        if best > 0 {
            (self.resting, self.trial) = (0, 0);
            return best;
        }
        if self.trial > 0 {
            self.trial -= 1;
            return 1;
        }
        self.resting += 1;
        if self.resting >= REST {
            (self.resting, self.trial) = (0, TRIAL);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(curve: &CostCurve, rounds: usize, taken: usize, level: f32) -> Depth {
        let mut depth = Depth::default();
        for _ in 0..rounds {
            let k = depth.choose(curve);
            depth.observe(k, [taken.min(k), 0], k, k, level * k as f32);
        }
        depth
    }

    #[test]
    fn levels_have_to_win_over_what_comes_without() {
        let flat = CostCurve::new(&[(1, 1.0), (32, 1.3)]);
        let depth = |beside: usize| {
            let mut depth = Depth::default();
            (0..100).for_each(|_| depth.observe(2, [1, beside], 3, 2, 0.5));
            depth.best(&flat)
        };
        assert!(depth(0) > 0, "1 + 1 tokens for 1.25");
        assert_eq!(depth(4), 0, "5 + 1 for 1.25, where 5 come for 1");
    }

    #[test]
    fn depth_follows_what_is_accepted() {
        let flat = CostCurve::new(&[(1, 1.0), (32, 1.3)]);
        assert!(after(&flat, 200, 20, 0.01).best(&flat) >= 16);
        assert!((1..=3).contains(&after(&flat, 200, 2, 0.1).best(&flat)));
        assert_eq!(after(&flat, 200, 0, 0.1).best(&flat), 0);
    }

    #[test]
    fn dear_levels_make_short_drafts() {
        let steep = CostCurve::new(&[(1, 1.0), (2, 1.2), (4, 1.7), (8, 2.6), (32, 9.0)]);
        assert!((1..=3).contains(&after(&steep, 1, 1, 0.1).best(&steep)));
        assert_eq!(after(&steep, 50, 1, 0.9).best(&steep), 0);
    }

    #[test]
    fn a_new_text_begins_with_what_the_last_one_taught() {
        let flat = CostCurve::new(&[(1, 1.0), (32, 1.3)]);
        let old = after(&flat, 200, 20, 0.01);
        let mut new = Depth::default();
        new.inherit(&old.habits());
        assert!(new.best(&flat) > Depth::default().best(&flat).min(12));
        assert_eq!(new.level, old.level);
        // It is forgotten where it does not hold.
        (0..200).for_each(|_| new.observe(8, [0; 2], 8, 8, 0.08));
        assert!(new.best(&flat) <= 4, "{}", new.best(&flat));
        let mut odd = Depth::default();
        odd.inherit(&Habits {
            survival: vec![(f32::NAN, 3.0), (2.0, 1.0), (0.5, -1.0)],
            level: f32::INFINITY,
        });
        assert_eq!(odd.habits(), Habits::default());
    }

    #[test]
    fn plain_decoding_is_rarely_interrupted_by_trials() {
        let steep = CostCurve::new(&[(1, 1.0), (32, 32.0)]);
        let mut depth = Depth::default();
        let drafted = (0..1000).filter(|_| depth.choose(&steep) > 0).count();
        assert!(drafted > 10 && drafted < 40, "{drafted}");
    }
}
