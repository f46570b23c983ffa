//! Whether to draft while the target's device works: where that saves more than it costs.
//!
//! It saves the drafting that the next round finds done. It costs what the pass takes longer, where
//! both share memory, power or cores. Both are measured, now and then without overlap.

use super::super::Ahead;
use super::budget::BackOff;
use super::estimate::RATE;

#[derive(Clone, Debug)]
pub struct Overlap {
    wish: Ahead,
    /// How much longer passes take with work ahead than they would.
    pub stretch: f32,
    /// Seconds of drafting that the target waits for, without work ahead and behind it; 0 before
    /// anything is known.
    waited: [f32; 2],
    /// Of the way that is not taken.
    trial: BackOff,
    /// The last round worked ahead.
    was_ahead: bool,
}

impl Overlap {
    pub fn new(wish: Ahead) -> Self {
        Overlap {
            wish,
            stretch: 1.0,
            waited: [0.0; 2],
            trial: BackOff::default(),
            was_ahead: false,
        }
    }

    /// Whether to work ahead at all.
    pub fn is_wanted(&self) -> bool {
        self.wish != Ahead::Never
    }

    /// Share of the drafting that the target is expected to wait for in the round that begins.
    pub fn share(&self) -> f32 {
        let [without, behind] = self.waited;
        if self.was_ahead && without > 0.0 { (behind / without).min(1.0) } else { 1.0 }
    }

    /// Takes in the seconds that the target has waited for drafting.
    pub fn observe(&mut self, seconds: f32) {
        let known = &mut self.waited[self.was_ahead as usize];
        let first = if *known == 0.0 { 1.0 } else { RATE };
        *known += first * (seconds - *known);
    }

    /// Whether the round before has worked ahead.
    pub fn was_ahead(&self) -> bool {
        self.was_ahead
    }

    /// Whether to work ahead during a pass of `pass` seconds.
    pub fn begin(&mut self, pass: f32) -> bool {
        let [without, behind] = self.waited;
        let pays = without == 0.0 || (self.stretch - 1.0) * pass <= without - behind;
        self.was_ahead = match self.wish {
            Ahead::Never => false,
            Ahead::Always => true,
            Ahead::Auto if self.trial.is_due() => {
                self.trial.tried();
                !pays
            }
            Ahead::Auto => pays,
        };
        self.was_ahead
    }

    /// Nothing is drafted ahead in this round.
    pub fn rest(&mut self) {
        self.was_ahead = false;
    }
}
