//! Estimates of times from measurements.

/// Weight of an ordinary measurement in the new estimate.
pub(super) const RATE: f32 = 0.05;
/// Ratio to the estimate above which a measurement is an outlier. Below the inverse ratio it is
/// believed.
const OUTLIER: f32 = 1.25;
/// Number of successive outliers that count as a change.
pub(super) const STREAK: u32 = 4;

/// Distinguishes ordinary measurements from outliers, and outliers from a change.
///
/// Other programs only make a pass longer. A measurement far below the estimate therefore shows
/// that the estimate is too high, and is believed at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutlierFilter {
    /// Number of successive outliers above the estimate.
    pub streak: u32,
    /// The smallest of these outliers, as a ratio to the estimate.
    nearest: f32,
}

impl OutlierFilter {
    /// Returns whether a measurement of `ratio` times the estimate is an outlier above it.
    pub fn is_high(ratio: f32) -> bool {
        ratio > OUTLIER
    }

    /// Returns the factor by which a measurement of `ratio` times the estimate changes it.
    ///
    /// The factor is close to 1 for an ordinary measurement. For one far below the estimate it is
    /// `ratio`, but at least a half. An outlier above the estimate returns `None`. After `needed`
    /// successive outliers it is the ratio of the smallest one.
    pub fn judge(&mut self, ratio: f32, needed: u32) -> Option<f32> {
        if !Self::is_high(ratio) {
            *self = OutlierFilter::default();
            let is_low = ratio * OUTLIER < 1.0;
            return Some(if is_low { ratio.max(1.0 / 2.0) } else { 1.0 + RATE * (ratio - 1.0) });
        }
        self.nearest = if self.streak == 0 { ratio } else { self.nearest.min(ratio) };
        self.streak += 1;
        (self.streak >= needed).then(|| {
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
        time.mean = 2.0;
        assert_eq!((time.observe(1.2), time.mean), (1.2, 1.2), "a short one is believed at once");
    }

    #[test]
    fn the_first_measurement_is_believed() {
        let mut time = Estimate::default();
        assert_eq!((time.observe(0.3), time.mean), (0.3, 0.3));
        time.observe(0.0);
        assert_eq!(time.mean, 0.15);
    }
}
