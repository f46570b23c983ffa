//! What a pass of the target costs by its rows: c(M), measured, for each of a few ranges of
//! context.

use std::collections::BTreeMap;

use super::estimate::{OutlierFilter, STREAK};
use crate::kv::PAGE;

/// Seconds that a pass takes by its number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CostCurve {
    /// `[rows - 1]`
    seconds: Vec<f32>,
    /// Of plain passes, which have no guesses, and of those with guesses.
    plain: OutlierFilter,
    drafted: OutlierFilter,
    /// A plain pass was ordinary since passes with guesses are outliers: it is they that have
    /// another price, and not the machine that has another speed.
    confirmed: bool,
}

impl CostCurve {
    /// From measured (rows, seconds), by ascending rows from 1 on; linear between them.
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
        Self::of(seconds)
    }

    fn of(seconds: Vec<f32>) -> Self {
        let (plain, drafted) = Default::default();
        CostCurve { seconds, plain, drafted, confirmed: false }
    }

    /// One value per number of rows, as [`seconds`](Self::seconds) gave them; `None` for what no
    /// measurement can have given.
    pub fn restored(seconds: Vec<f32>) -> Option<Self> {
        let sane = |s: &f32| s.is_normal() && *s > 0.0;
        (!seconds.is_empty() && seconds.iter().all(sane)).then(|| Self::of(seconds))
    }

    pub fn max_rows(&self) -> usize {
        self.seconds.len()
    }

    /// Seconds of a pass over so many rows: never less than one of one row, whatever each was last
    /// seen to take.
    pub fn cost(&self, rows: usize) -> f32 {
        self.seconds[rows.clamp(1, self.max_rows()) - 1].max(self.seconds[0])
    }

    /// By rows, from 1 on.
    pub fn seconds(&self) -> &[f32] {
        &self.seconds
    }

    /// Whether only a plain pass can tell if the price of guesses or the speed of the machine has
    /// changed.
    pub fn is_doubtful(&self) -> bool {
        self.plain.streak != 0 || self.drafted.streak.abs() >= 2 && !self.confirmed
    }

    /// Takes in a measured pass over `rows` rows, of which `plain` are the texts' own. A plain pass
    /// moves all sizes alike: it says how fast the machine is, not what a guess costs. One with
    /// guesses moves other sizes the less the further they are, and plain ones not at all; or,
    /// where something else makes it longer, `stretch` alone, which is how much. Returns the
    /// seconds to book: those measured, or those known where they are an outlier.
    pub fn observe(
        &mut self,
        plain: usize,
        rows: usize,
        seconds: f32,
        stretch: Option<&mut f32>,
    ) -> f32 {
        let known = self.cost(rows) * stretch.as_ref().map_or(1.0, |stretch| **stretch);
        if rows == 0 || rows > self.max_rows() || seconds <= 0.0 {
            return known;
        }
        let (ratio, is_plain) = (seconds / known, rows <= plain && stretch.is_none());
        let judged = if is_plain {
            let side = OutlierFilter::side(ratio);
            // Passes with guesses that went the same way say so too.
            let agreeing = (side * self.drafted.streak).max(0);
            let judged = self.plain.judge(ratio, STREAK - agreeing);
            if judged.is_some() && side != 0 {
                self.drafted = OutlierFilter::default();
            }
            self.confirmed = judged.is_some();
            judged
        } else {
            let needed = if self.confirmed { STREAK } else { i32::MAX };
            let judged = self.drafted.judge(ratio, needed);
            self.confirmed &= self.drafted.streak.abs() != 1;
            judged
        };
        let Some(factor) = judged else { return known };
        match stretch {
            Some(stretch) => *stretch *= factor,
            None => {
                for (i, cost) in self.seconds.iter_mut().enumerate() {
                    let size = i + 1;
                    let near = size.min(rows) as f32 / size.max(rows) as f32;
                    if is_plain {
                        *cost *= factor;
                    } else if size > plain {
                        *cost *= 1.0 + (factor - 1.0) * near;
                    }
                }
            }
        }
        seconds
    }
}

/// The range of context that a history of this length falls into: one page, or up to 4, 16, 64, ...
pub fn range(position: usize) -> usize {
    match position.div_ceil(PAGE) {
        0 | 1 => 0,
        pages => (pages - 1).ilog2() as usize / 2 + 1,
    }
}

/// A curve for each range of context that was met.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// By range, at least one.
    curves: BTreeMap<usize, CostCurve>,
}

impl Costs {
    /// `curve` as measured at this position.
    pub fn new(curve: CostCurve, position: usize) -> Self {
        Costs { curves: BTreeMap::from([(range(position), curve)]) }
    }

    /// Of curves that are known from before, by range; `None` without any.
    pub fn restored(known: impl IntoIterator<Item = (usize, CostCurve)>) -> Option<Self> {
        let curves: BTreeMap<_, _> = known.into_iter().collect();
        (!curves.is_empty()).then_some(Costs { curves })
    }

    /// The curves known, by range.
    pub fn known(&self) -> impl Iterator<Item = (usize, &CostCurve)> {
        self.curves.iter().map(|(range, curve)| (*range, curve))
    }

    /// The curve for a history of this length. A range that is met for the first time begins with
    /// what the nearest one has come to.
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
    fn the_curve_follows_measurements() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        assert_eq!((curve.max_rows(), curve.cost(6), curve.cost(50)), (8, 1.5, 2.0));
        let pass = |curve: &mut CostCurve, rows, seconds| {
            if curve.is_doubtful() {
                curve.observe(1, 1, 1.0, None);
            }
            curve.observe(1, rows, seconds, None)
        };
        for _ in 0..100 {
            pass(&mut curve, 4, 1.6);
        }
        assert!((curve.cost(4) - 1.6).abs() < 0.01 && curve.cost(8) > 2.0, "{curve:?}");
        assert_eq!(curve.cost(1), 1.0, "what a guess costs says nothing of plain decoding");
        assert_eq!(pass(&mut curve, 1, 100.0), 1.0, "a stolen time slice");
        assert_eq!(curve.cost(1), 1.0);
    }

    #[test]
    fn what_holds_up_every_third_pass_is_no_price() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.2), (8, 2.0)]);
        for i in 0..600 {
            let rows = [1, 1, 4, 8][i % 4];
            let held = if i % 3 == 0 { 12.0 } else { 0.0 };
            curve.observe(1, rows, [1.0, 1.0, 1.2, 2.0][i % 4] + held, None);
        }
        assert_eq!([1, 4, 8].map(|rows| curve.cost(rows)), [1.0, 1.2, 2.0]);
    }

    #[test]
    fn a_machine_that_slows_down_does_so_for_all_sizes() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        // Passes with guesses become slow: whether they alone, one plain pass tells.
        for _ in 0..3 {
            assert_eq!(curve.observe(1, 8, 6.0, None), 2.0);
        }
        assert!(curve.is_doubtful());
        assert_eq!(curve.observe(1, 1, 3.0, None), 3.0);
        assert_eq!([1, 4, 8].map(|rows| curve.cost(rows)), [3.0, 3.0, 6.0]);
        assert!(!curve.is_doubtful());
        // Eight texts at once have no smaller pass.
        for _ in 0..4 {
            curve.observe(8, 8, 3.0, None);
        }
        assert_eq!([1, 4, 8].map(|rows| curve.cost(rows)), [1.5, 1.5, 3.0]);
    }

    #[test]
    fn what_makes_passes_longer_beside_is_known_apart() {
        let (mut curve, mut stretch) = (CostCurve::new(&[(1, 1.0), (8, 2.0)]), 1.0);
        for _ in 0..90 {
            curve.observe(1, 8, 2.4, Some(&mut stretch));
        }
        assert!((stretch - 1.2).abs() < 0.01 && curve.cost(8) == 2.0);
    }

    #[test]
    fn ranges_of_context_have_curves_of_their_own() {
        assert_eq!(
            [0, 1, 256, 257, 1024, 1025, 4096, 4097, 16384, 16385, 1 << 18].map(range),
            [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5]
        );
        let mut costs = Costs::new(CostCurve::new(&[(1, 1.0), (8, 2.0)]), 10);
        for _ in 0..4 {
            costs.at(9000).observe(1, 1, 3.0, None);
        }
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
        for bad in [vec![], vec![0.0], vec![1.0, -1.0], vec![f32::NAN], vec![f32::INFINITY]] {
            assert_eq!(CostCurve::restored(bad), None);
        }
    }
}
