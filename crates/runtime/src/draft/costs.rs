//! Cost of a target pass by its number of rows, c(M), for several ranges of context length.
//! `policy/passes.rs` updates it with measured passes.

use std::collections::BTreeMap;

use gemma_base::kv::PAGE;

/// Upper bound of a valid pass time in seconds.
const LONGEST: f32 = 3600.0;

/// Pass time in seconds by number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CostCurve {
    /// `[rows - 1]`
    seconds: Vec<f32>,
}

impl CostCurve {
    /// Creates a curve from measured (rows, seconds) in ascending order from 1 row. It is linear
    /// between the points.
    pub fn new(points: &[(usize, f32)]) -> Self {
        assert!(
            points.first().is_some_and(|p| p.0 == 1),
            "a cost curve begins with the pass of one row"
        );
        assert!(points.is_sorted_by(|a, b| a.0 < b.0), "a cost curve ascends");
        let mut seconds = vec![points[0].1];
        for pair in points.windows(2) {
            let [(from, low), (to, high)] = [pair[0], pair[1]];
            seconds.extend(
                (from + 1..=to)
                    .map(|rows| low + (high - low) * (rows - from) as f32 / (to - from) as f32),
            );
        }
        CostCurve { seconds }
    }

    /// Restores a curve from one value per number of rows, as returned by
    /// [`seconds`](Self::seconds). Returns `None` for impossible values.
    pub fn restored(seconds: Vec<f32>) -> Option<Self> {
        let sane = |s: &f32| s.is_normal() && (0.0..LONGEST).contains(s);
        (!seconds.is_empty() && seconds.iter().all(sane)).then_some(CostCurve { seconds })
    }

    pub fn max_rows(&self) -> usize {
        self.seconds.len()
    }

    /// Returns the seconds of a pass over `rows` rows. It is never below the time of one row, even
    /// if noise made a measurement lower.
    pub fn cost(&self, rows: usize) -> f32 {
        self.seconds[rows.clamp(1, self.max_rows()) - 1].max(self.seconds[0])
    }

    /// Returns the seconds by number of rows, from 1 upwards.
    pub fn seconds(&self) -> &[f32] {
        &self.seconds
    }

    /// Multiplies each entry by `factor` of its number of rows.
    pub fn scale(&mut self, factor: impl Fn(usize) -> f32) {
        self.seconds.iter_mut().enumerate().for_each(|(i, cost)| *cost *= factor(i + 1));
    }
}

/// Returns the index of the context range for a history of this length: one page, or up to 4, 16,
/// 64, ...
pub fn range(position: usize) -> usize {
    match position.div_ceil(PAGE) {
        0 | 1 => 0,
        pages => (pages - 1).ilog2() as usize / 2 + 1,
    }
}

/// Cost curves of the context ranges that occurred.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Curves by range; at least one.
    curves: BTreeMap<usize, CostCurve>,
}

impl Default for Costs {
    /// Assumes one second per pass.
    fn default() -> Self {
        Costs::new(CostCurve::new(&[(1, 1.0)]), 0)
    }
}

impl Costs {
    /// Creates costs from one curve, measured at this position.
    pub fn new(curve: CostCurve, position: usize) -> Self {
        Costs { curves: BTreeMap::from([(range(position), curve)]) }
    }

    /// Restores costs from curves by range. Returns `None` if there are none.
    pub fn restored(known: impl IntoIterator<Item = (usize, CostCurve)>) -> Option<Self> {
        let curves: BTreeMap<_, _> = known.into_iter().collect();
        (!curves.is_empty()).then_some(Costs { curves })
    }

    /// Returns the curves by range.
    pub fn known(&self) -> impl Iterator<Item = (usize, &CostCurve)> {
        self.curves.iter().map(|(range, curve)| (*range, curve))
    }

    /// Returns the curve for a history of this length. A new range starts with a copy of the
    /// nearest one.
    pub fn at(&mut self, position: usize) -> &mut CostCurve {
        let here = range(position);
        if !self.curves.contains_key(&here) {
            let nearest = self.curves.iter().min_by_key(|(range, _)| range.abs_diff(here));
            let nearest = nearest.expect("a curve was given").1.clone();
            self.curves.insert(here, nearest);
        }
        self.curves.get_mut(&here).expect("just put in")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_a_line_between_what_was_measured() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        assert_eq!((curve.max_rows(), curve.cost(6), curve.cost(50)), (8, 1.5, 2.0));
        curve.scale(|rows| if rows == 1 { 1.8 } else { 1.0 });
        assert_eq!((curve.cost(4), curve.cost(8)), (1.8, 2.0), "no less than one row");
    }

    #[test]
    fn ranges_of_context_have_curves_of_their_own() {
        assert_eq!(
            [0, 1, 256, 257, 1024, 1025, 4096, 4097, 16384, 16385, 1 << 18].map(range),
            [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5]
        );
        let mut costs = Costs::new(CostCurve::new(&[(1, 1.0), (8, 2.0)]), 10);
        costs.at(9000).scale(|_| 3.0);
        assert_eq!((costs.at(9000).cost(1), costs.at(0).cost(1)), (3.0, 1.0));
        assert_eq!(costs.at(100_000).cost(1), costs.at(9000).cost(1));
        assert_eq!(costs.known().map(|(range, _)| range).collect::<Vec<_>>(), [0, 3, 5]);
        let kept: Vec<_> = costs.known().map(|(range, curve)| (range, curve.clone())).collect();
        assert_eq!(Costs::restored(kept).unwrap().at(9000).cost(1), 3.0);
        assert_eq!(Costs::restored([]), None);
    }

    #[test]
    fn only_what_can_be_measured_is_restored() {
        let curve = CostCurve::new(&[(1, 1.0), (8, 2.0)]);
        assert_eq!(CostCurve::restored(curve.seconds().to_vec()), Some(curve));
        for bad in
            [vec![], vec![0.0], vec![1.0, -1.0], vec![f32::NAN], vec![f32::INFINITY], vec![1e9]]
        {
            assert_eq!(CostCurve::restored(bad), None);
        }
    }
}
