//! Updates of the cost curve c(M) by measured passes.

use super::estimate::{OutlierFilter, STREAK};
use crate::draft::costs::CostCurve;

/// Updates a cost curve by measured passes.
#[derive(Clone, Debug, Default)]
pub struct PassTimes {
    /// Outlier filters of plain passes, which have no draft nodes, and of passes with draft nodes.
    plain: OutlierFilter,
    drafted: OutlierFilter,
}

impl PassTimes {
    /// Returns whether a plain pass is needed, to tell whether the cost of nodes or the speed of
    /// the machine has changed.
    pub fn is_doubtful(&self) -> bool {
        self.drafted.streak == STREAK
    }

    /// Records a pass over `rows` rows. `plain` is the number of rows without draft nodes.
    ///
    /// A plain pass changes the estimates of all sizes by the same factor, because it measures the
    /// machine and not the cost of a node. A pass with nodes changes other sizes less the more they
    /// differ, and plain passes not at all. If the drafter worked ahead during the pass, only
    /// `stretch` changes. Returns the seconds to charge: the measured time, or the estimate for an
    /// outlier.
    pub fn observe(
        &mut self,
        curve: &mut CostCurve,
        [plain, rows]: [usize; 2],
        seconds: f32,
        stretch: Option<&mut f32>,
    ) -> f32 {
        let known = curve.cost(rows) * stretch.as_ref().map_or(1.0, |stretch| **stretch);
        let (ratio, is_plain) = (seconds / known, rows <= plain && stretch.is_none());
        let is_high = OutlierFilter::is_high(ratio);
        let judged = if is_plain {
            // Outliers of passes with nodes count too.
            self.plain.judge(ratio, STREAK.saturating_sub(self.drafted.streak))
        } else {
            self.drafted.judge(ratio, STREAK + 2)
        };
        if is_plain && is_high && judged.is_some() {
            self.drafted = OutlierFilter::default();
        } else if is_plain && !is_high && self.is_doubtful() {
            // After an ordinary plain pass, the next outlier is a change in the cost of nodes.
            self.drafted.streak += 1;
        }
        let Some(factor) = judged else { return known };
        match stretch {
            Some(stretch) => *stretch *= factor,
            None if is_plain => curve.scale(|_| factor),
            None => curve.scale(|size| {
                let near = size.min(rows) as f32 / size.max(rows) as f32;
                if size > plain { 1.0 + (factor - 1.0) * near } else { 1.0 }
            }),
        }
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Times {
        passes: PassTimes,
        curve: CostCurve,
    }

    impl Times {
        fn new(points: &[(usize, f32)]) -> Self {
            Times { passes: PassTimes::default(), curve: CostCurve::new(points) }
        }

        fn observe(&mut self, rows: [usize; 2], seconds: f32, stretch: Option<&mut f32>) -> f32 {
            self.passes.observe(&mut self.curve, rows, seconds, stretch)
        }
    }

    #[test]
    fn the_curve_follows_measurements() {
        let mut times = Times::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        let pass = |times: &mut Times, rows, seconds| {
            if times.passes.is_doubtful() {
                times.observe([1, 1], 1.0, None);
            }
            times.observe([1, rows], seconds, None)
        };
        for _ in 0..100 {
            pass(&mut times, 4, 1.6);
        }
        assert!(
            (times.curve.cost(4) - 1.6).abs() < 0.01 && times.curve.cost(8) > 2.0,
            "{:?}",
            times.curve
        );
        assert_eq!(times.curve.cost(1), 1.0, "what a guess costs says nothing of plain decoding");
        assert_eq!(pass(&mut times, 1, 100.0), 1.0, "a stolen time slice");
        assert_eq!(times.curve.cost(1), 1.0);
    }

    #[test]
    fn a_cost_that_was_measured_too_high_is_corrected_by_two_passes() {
        let mut times = Times::new(&[(1, 1.0), (8, 6.0)]);
        assert_eq!([(); 2].map(|()| times.observe([1, 8], 2.0, None)), [2.0, 2.0]);
        assert_eq!([1, 8].map(|rows| times.curve.cost(rows)), [1.0, 2.0]);
    }

    #[test]
    fn what_holds_up_every_third_pass_is_no_price() {
        let mut times = Times::new(&[(1, 1.0), (4, 1.2), (8, 2.0)]);
        for i in 0..600 {
            let rows = [1, 1, 4, 8][i % 4];
            let held = if i % 3 == 0 { 12.0 } else { 0.0 };
            times.observe([1, rows], [1.0, 1.0, 1.2, 2.0][i % 4] + held, None);
        }
        assert_eq!([1, 4, 8].map(|rows| times.curve.cost(rows)), [1.0, 1.2, 2.0]);
    }

    #[test]
    fn a_machine_that_slows_down_does_so_for_all_sizes() {
        let mut times = Times::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        // Passes with nodes become slow. One plain pass tells whether plain passes do so too.
        for _ in 0..4 {
            assert_eq!(times.observe([1, 8], 6.0, None), 2.0);
        }
        assert!(times.passes.is_doubtful());
        assert_eq!(times.observe([1, 1], 3.0, None), 3.0);
        assert_eq!([1, 4, 8].map(|rows| times.curve.cost(rows)), [3.0, 3.0, 6.0]);
        assert!(!times.passes.is_doubtful());
        // With eight texts at once, no pass is smaller.
        for _ in 0..4 {
            times.observe([8, 8], 3.0, None);
        }
        assert_eq!([1, 4, 8].map(|rows| times.curve.cost(rows)), [1.5, 1.5, 3.0]);
    }

    #[test]
    fn what_makes_passes_longer_beside_is_known_apart() {
        let (mut times, mut stretch) = (Times::new(&[(1, 1.0), (8, 2.0)]), 1.0);
        for _ in 0..90 {
            times.observe([1, 8], 2.4, Some(&mut stretch));
        }
        assert!((stretch - 1.2).abs() < 0.01 && times.curve.cost(8) == 2.0);
    }
}
