//! Decision whether to draft while the target's device works.
//!
//! Overlap saves the drafting that the next round finds done. It makes the pass longer, because
//! both share memory, power or cores. Both times are measured, now and then without overlap.

use super::budget::BackOff;
use super::estimate::RATE;
use crate::draft::options::Ahead;

#[derive(Clone, Debug, Default)]
pub struct Overlap {
    pub wish: Ahead,
    /// Seconds of drafting that the target waits for, without work ahead and with it; 0 before the
    /// first measurement.
    waited: [f32; 2],
    /// Pause before the next trial of the unused choice.
    trial: BackOff,
    /// The last round worked ahead.
    pub was_ahead: bool,
}

impl Overlap {
    /// Returns the share of the drafting that the target is expected to wait for in the round that
    /// begins.
    pub fn share(&self) -> f32 {
        let [without, behind] = self.waited;
        if self.was_ahead && without > 0.0 { (behind / without).min(1.0) } else { 1.0 }
    }

    /// Records the seconds that the target has waited for drafting.
    pub fn observe(&mut self, seconds: f32) {
        let known = &mut self.waited[self.was_ahead as usize];
        *known += if *known == 0.0 { 1.0 } else { RATE } * (seconds - *known);
    }

    /// Returns whether to work ahead during a pass that becomes `longer` seconds longer by it.
    /// `used_model` says whether a draft model was used.
    pub fn begin(&mut self, used_model: bool, longer: f32) -> bool {
        let [without, behind] = self.waited;
        let pays = without == 0.0 || longer <= without - behind;
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
