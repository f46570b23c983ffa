//! What a pass of the target costs by its rows: c(M), measured, for each of a few ranges of context.

use crate::kv::PAGE;

/// How much a measured pass moves the cost of its size, and of the others: those follow only as the context grows or the machine
/// slows down, and what one size gets wrong must not change what plain decoding is believed to cost.
const OWN: f32 = 0.2;
const OTHERS: f32 = 0.03;
/// A stolen time slice must not look like the price of a pass.
const SPIKE: f32 = 1.5;
/// Last page of each range of context but the last one.
const PAGES: [usize; 4] = [1, 4, 16, 64];

/// Seconds that a pass takes by its number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CostCurve {
    /// `[rows - 1]`
    seconds: Vec<f32>,
}

impl CostCurve {
    /// From measured (rows, seconds), by ascending rows from 1 on; linear between them.
    pub fn new(points: &[(usize, f32)]) -> Self {
        assert!(points.first().is_some_and(|p| p.0 == 1), "a cost curve begins with the pass of one row");
        assert!(points.is_sorted_by(|a, b| a.0 < b.0), "a cost curve ascends");
        let mut seconds = vec![points[0].1];
        for pair in points.windows(2) {
            let [(from, low), (to, high)] = [pair[0], pair[1]];
            seconds.extend((from + 1..=to).map(|rows| low + (high - low) * (rows - from) as f32 / (to - from) as f32));
        }
        CostCurve { seconds }
    }

    /// One value per number of rows, as [`seconds`](Self::seconds) gave them; `None` for what no measurement can have given.
    pub fn restored(seconds: Vec<f32>) -> Option<Self> {
        let sane = |s: &f32| s.is_finite() && *s > 0.0 && *s < 3600.0;
        (!seconds.is_empty() && seconds.iter().all(sane)).then_some(CostCurve { seconds })
    }

    /// Before anything is measured: a pass that costs nearly the same up to 8 rows.
    pub fn guess() -> Self {
        Self::new(&[(1, 0.1), (8, 0.11), (16, 0.13), (32, 0.18)])
    }

    pub fn max_rows(&self) -> usize {
        self.seconds.len()
    }

    pub fn cost(&self, rows: usize) -> f32 {
        self.seconds[rows.clamp(1, self.max_rows()) - 1]
    }

    /// By rows, from 1 on.
    pub fn seconds(&self) -> &[f32] {
        &self.seconds
    }

    /// Takes in a measured pass.
    pub fn observe(&mut self, rows: usize, seconds: f32) {
        if rows == 0 || rows > self.max_rows() || seconds <= 0.0 {
            return;
        }
        let ratio = (seconds / self.cost(rows)).clamp(1.0 / SPIKE, SPIKE);
        for (i, cost) in self.seconds.iter_mut().enumerate() {
            *cost *= 1.0 + (ratio - 1.0) * if i + 1 == rows { OWN } else { OTHERS };
        }
    }
}

/// The range of context that a history of this length falls into.
pub fn range(position: usize) -> usize {
    PAGES.partition_point(|&last| last < position.div_ceil(PAGE))
}

/// A curve for each range of context that was met.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// `[ranges]`
    curves: [Option<CostCurve>; PAGES.len() + 1],
}

impl Costs {
    /// `curve` as measured at this position.
    pub fn new(curve: CostCurve, position: usize) -> Self {
        let mut costs = Costs { curves: Default::default() };
        costs.curves[range(position)] = Some(curve);
        costs
    }

    /// Of curves that are known from before, by range; `None` without any. Ranges that do not exist are passed over.
    pub fn restored(known: impl IntoIterator<Item = (usize, CostCurve)>) -> Option<Self> {
        let mut costs = Costs { curves: Default::default() };
        for (range, curve) in known.into_iter().filter(|(range, _)| *range <= PAGES.len()) {
            costs.curves[range] = Some(curve);
        }
        let found = costs.known().next().is_some();
        found.then_some(costs)
    }

    /// The curves known, by range.
    pub fn known(&self) -> impl Iterator<Item = (usize, &CostCurve)> {
        self.curves.iter().enumerate().filter_map(|(range, curve)| Some((range, curve.as_ref()?)))
    }

    /// The curve for a history of this length. A range that is met for the first time begins with what the nearest one has come to.
    pub fn at(&mut self, position: usize) -> &mut CostCurve {
        let here = range(position);
        if self.curves[here].is_none() {
            let nearest = self.known().min_by_key(|(range, _)| range.abs_diff(here)).map(|(_, curve)| curve.clone());
            self.curves[here] = Some(nearest.unwrap_or_else(CostCurve::guess));
        }
        self.curves[here].as_mut().expect("just put in")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_follows_measurements() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        assert_eq!((curve.max_rows(), curve.cost(6), curve.cost(50)), (8, 1.5, 2.0));
        (0..100).for_each(|_| curve.observe(4, 1.6));
        assert!((curve.cost(4) - 1.6).abs() < 0.01 && curve.cost(1) > 1.0 && curve.cost(8) > 2.0);
        // What was wrong about one size says little about plain decoding; what all sizes say is believed.
        assert!(curve.cost(1) < 1.1, "{}", curve.cost(1));
        (0..200).for_each(|i| curve.observe([1, 4, 8][i % 3], [1.5, 2.4, 3.0][i % 3]));
        assert!((curve.cost(1) - 1.5).abs() < 0.05 && (curve.cost(8) - 3.0).abs() < 0.1);
        curve.observe(1, 100.0);
        assert!(curve.cost(1) < 1.8, "a stolen time slice: {}", curve.cost(1));
    }

    #[test]
    fn ranges_of_context_have_curves_of_their_own() {
        assert_eq!([0, 1, 256, 257, 1024, 1025, 4096, 4097, 16384, 16385, 1 << 20].map(range), [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
        let mut costs = Costs::new(CostCurve::new(&[(1, 1.0), (8, 2.0)]), 10);
        (0..100).for_each(|_| costs.at(9000).observe(1, 3.0));
        assert!((costs.at(9000).cost(1) - 3.0).abs() < 0.01);
        assert_eq!(costs.at(0).cost(1), 1.0);
        assert_eq!(costs.at(100_000).cost(1), costs.at(9000).cost(1));
        assert_eq!(costs.known().map(|(range, _)| range).collect::<Vec<_>>(), [0, 3, 4]);
        let kept: Vec<_> = costs.known().map(|(range, curve)| (range, curve.clone())).collect();
        assert_eq!(Costs::restored(kept).unwrap(), costs);
        assert_eq!(Costs::restored([(9, CostCurve::guess())]), None);
    }

    #[test]
    fn only_what_can_be_measured_is_restored() {
        let curve = CostCurve::new(&[(1, 1.0), (8, 2.0)]);
        assert_eq!(CostCurve::restored(curve.seconds().to_vec()), Some(curve));
        for bad in [vec![], vec![0.0], vec![1.0, -1.0], vec![f32::NAN], vec![f32::INFINITY], vec![1e9]] {
            assert_eq!(CostCurve::restored(bad), None);
        }
    }
}
