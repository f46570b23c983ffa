//! Estimates of times from measurements.

/// Weight of an ordinary measurement in the new estimate.
pub(super) const RATE: f32 = 0.05;
/// Ratio to the estimate, or inverse ratio, above which a measurement is an outlier.
const OUTLIER: f32 = 1.25;
/// Number of successive outliers on one side that count as a change.
pub(super) const STREAK: i32 = 4;

/// Distinguishes ordinary measurements from outliers, and outliers from a change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutlierFilter {
    /// Number of successive outliers above the estimate; negative for outliers below it.
    pub streak: i32,
    /// The outlier closest to the estimate, as a ratio to it.
    nearest: f32,
}

impl OutlierFilter {
    /// Returns 0 for an ordinary measurement, 1 for an outlier above the estimate, and -1 for one
    /// below it.
    pub fn side(ratio: f32) -> i32 {
        (ratio > OUTLIER) as i32 - (ratio * OUTLIER < 1.0) as i32
    }

    /// Returns the factor by which a measurement of `ratio` times the estimate changes it.
    ///
    /// The factor is close to 1 for an ordinary measurement. An outlier returns `None`. After
    /// `needed` successive outliers it is the ratio of the closest one.
    pub fn judge(&mut self, ratio: f32, needed: i32) -> Option<f32> {
        let side = Self::side(ratio);
        if side == 0 || side != self.streak.signum() {
            *self = OutlierFilter { streak: 0, nearest: ratio };
        }
        if side == 0 {
            return Some(1.0 + RATE * (ratio - 1.0));
        }
        self.streak += side;
        self.nearest = if side > 0 { self.nearest.min(ratio) } else { self.nearest.max(ratio) };
        (self.streak.abs() >= needed).then(|| {
            self.streak = 0;
            self.nearest
        })
    }
}

/// An estimate of a time from repeated measurements.
#[derive(Clone, Debug, Default)]
pub struct Estimate {
    /// Seconds; 0 before the first measurement.
    pub mean: f32,
    filter: OutlierFilter,
}

impl Estimate {
    /// Records a measurement. Returns the seconds to charge: the measured time, or the estimate for
    /// an outlier.
    pub fn observe(&mut self, seconds: f32) -> f32 {
        if self.mean == 0.0 {
            self.mean = seconds;
        }
        let ratio = seconds / self.mean.max(f32::MIN_POSITIVE);
        let Some(factor) = self.filter.judge(ratio, STREAK) else { return self.mean };
        self.mean *= factor;
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_is_booked_as_known_and_a_change_is_believed_at_the_fourth() {
        let mut time = Estimate { mean: 1.0, ..Estimate::default() };
        assert_eq!((time.observe(1.2), time.observe(50.0)), (1.2, 1.01));
        assert!((time.mean - 1.01).abs() < 1e-5);
        let booked = [3.0, 9.0, 2.0, 2.5].map(|seconds| time.observe(seconds));
        assert_eq!(booked, [1.01, 1.01, 2.0, 2.5], "the third and the outlier before make four");
        assert!((2.0..2.06).contains(&time.mean), "{}", time.mean);
        for _ in 0..3 {
            time.observe(0.1);
        }
        assert!(time.mean > 2.0);
        time.observe(0.2);
        assert!((time.mean - 0.2).abs() < 1e-5, "the nearest of the four");
    }

    #[test]
    fn the_first_measurement_is_believed() {
        let mut time = Estimate::default();
        assert_eq!((time.observe(0.3), time.mean), (0.3, 0.3));
        time.observe(0.0);
        assert_eq!(time.mean, 0.3);
    }
}
