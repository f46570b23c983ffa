//! Whether to draft while the target's device works: when what that saves is more than what it
//! costs.
//!
//! It saves the drafting that the next round finds done. It costs what the pass takes longer, where
//! both share memory, power or cores, and what drafting runs on after the pass is done. Both are
//! measured, now and then without overlap.

/// Whether work ahead is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ahead {
    /// Where it pays.
    #[default]
    Auto,
    Always,
    Never,
}

/// Rounds of a trial of the other way, the round at which the first one begins, and those between
/// two.
const TRIAL: u32 = 4;
const FIRST: u32 = 8;
const BETWEEN: u32 = 256;
/// How much a round moves what is known of the time exposed, and of the stretch. The latter slowly:
/// what is wrong about the usual time of a pass is put right by the cost curve, much faster.
const RATE: f32 = 0.15;
const SLOW: f32 = 0.03;

/// What rounds of one way took, fading.
#[derive(Clone, Copy, Debug)]
struct Way {
    rounds: u32,
    /// Seconds of drafting that the target waited for.
    exposed: f32,
    /// Time of the pass over what a pass of its size takes without overlap.
    stretch: f32,
}

impl Default for Way {
    fn default() -> Self {
        Way { rounds: 0, exposed: 0.0, stretch: 1.0 }
    }
}

impl Way {
    fn observe(&mut self, exposed: f32, stretch: f32) {
        self.rounds += 1;
        // The first rounds count alike.
        self.exposed += (1.0 / self.rounds as f32).max(RATE) * (exposed - self.exposed);
        self.stretch += (0.5 / (self.rounds + 4) as f32).max(SLOW) * (stretch - self.stretch);
    }

    fn seconds(&self, pass: f32) -> f32 {
        self.exposed + self.stretch * pass
    }
}

/// The two ways, and which one is taken.
#[derive(Clone, Debug)]
pub struct Overlap {
    wish: Ahead,
    /// Without work ahead, and with it.
    ways: [Way; 2],
    pass: f32,
    /// Rounds until the next trial, and those left of the one under way.
    wait: u32,
    trial: u32,
}

impl Overlap {
    pub fn new(wish: Ahead) -> Self {
        Overlap { wish, ways: Default::default(), pass: 0.0, wait: FIRST, trial: 0 }
    }

    /// What seems better by now. What was never tried is.
    fn better(&self) -> bool {
        let [without, with] = self.ways;
        without.rounds == 0
            || with.rounds == 0
            || with.seconds(self.pass) <= without.seconds(self.pass)
    }

    /// Whether to work ahead at all.
    pub fn is_wanted(&self) -> bool {
        self.wish != Ahead::Never
    }

    /// Whether to work ahead during the pass that begins.
    pub fn wants(&self) -> bool {
        match self.wish {
            Ahead::Auto => self.better() != (self.trial > 0),
            Ahead::Always => true,
            Ahead::Never => false,
        }
    }

    /// How much longer passes take with work ahead than they would.
    pub fn stretch(&self) -> f32 {
        self.ways[1].stretch
    }

    /// Takes in a round: whether it worked ahead, the seconds of drafting that the target waited
    /// for, and those of the pass, which would have been `usual` without.
    pub fn observe(&mut self, ahead: bool, exposed: f32, pass: f32, usual: f32) {
        let stretch = (pass / usual.max(1e-9)).clamp(0.5, 4.0);
        self.ways[ahead as usize].observe(exposed, if ahead { stretch } else { 1.0 });
        self.pass = usual;
        if self.trial > 0 {
            self.trial -= 1;
        } else {
            self.wait = self.wait.saturating_sub(1);
            if self.wait == 0 {
                (self.wait, self.trial) = (BETWEEN, TRIAL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `rounds`, those that worked ahead; drafting of 2 ms is hidden then, and a pass of 10 ms
    /// takes `stretch` as long.
    fn ahead(overlap: &mut Overlap, rounds: u32, stretch: f32) -> u32 {
        let mut count = 0;
        for _ in 0..rounds {
            let on = overlap.wants();
            let (exposed, pass) = if on { (0.0005, 0.01 * stretch) } else { (0.0025, 0.01) };
            overlap.observe(on, exposed, pass, 0.01);
            count += on as u32;
        }
        count
    }

    #[test]
    fn overlap_stays_where_it_pays() {
        assert!(ahead(&mut Overlap::new(Ahead::Auto), 1000, 1.05) > 970);
        let mut dear = Overlap::new(Ahead::Auto);
        assert!(ahead(&mut dear, 1000, 1.5) < 40);
        // The machine changes: noticed at the next trials.
        ahead(&mut dear, 1000, 1.0);
        assert!(ahead(&mut dear, 1000, 1.0) > 900);
        assert_eq!(ahead(&mut Overlap::new(Ahead::Never), 100, 1.0), 0);
        assert_eq!(ahead(&mut Overlap::new(Ahead::Always), 100, 9.0), 100);
    }
}
