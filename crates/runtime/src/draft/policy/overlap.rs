//! Decision whether to draft while the target's device is working.
//!
//! Work ahead saves drafting time in the next round. It makes the pass longer, because both share
//! memory, power or cores. The times with and without work ahead are both measured, in occasional
//! trials.

use super::budget::BackOff;
use super::estimate::RATE;
use crate::draft::options::Ahead;

#[derive(Clone, Debug, Default)]
pub struct Overlap {
    pub wish: Ahead,
    /// Seconds that the target waits for drafting, without work ahead and with it; 0 before the
    /// first measurement.
    waited: [f32; 2],
    /// Pause before the next trial of the unused choice.
    trial: BackOff,
    /// Whether the drafter worked ahead in the last round.
    pub was_ahead: bool,
}

impl Overlap {
    /// Returns the expected share of the drafting time that the target waits for in the next round.
    pub fn share(&self) -> f32 {
        let [without, ahead] = self.waited;
        if self.was_ahead && without > 0.0 { (ahead / without).min(1.0) } else { 1.0 }
    }

    /// Records the seconds that the target waited for drafting.
    pub fn observe(&mut self, seconds: f32) {
        let known = &mut self.waited[self.was_ahead as usize];
        *known += if *known == 0.0 { 1.0 } else { RATE } * (seconds - *known);
    }

    /// Returns whether to work ahead during the pass, which would take `longer` seconds more.
    /// `used_model` is whether a draft model was used.
    pub fn begin(&mut self, used_model: bool, longer: f32) -> bool {
        let [without, ahead] = self.waited;
        let pays = without == 0.0 || longer <= without - ahead;
        self.was_ahead = used_model
            && match self.wish {
                Ahead::Never => false,
                Ahead::Always => true,
                Ahead::Auto if self.trial.is_due() => {
                    self.trial.tried(false);
                    !pays
                }
                Ahead::Auto => pays,
            };
        self.was_ahead
    }
}
