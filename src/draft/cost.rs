//! What a pass of the target costs by its rows: c(M), measured, for each of a few ranges of
//! context.

use crate::kv::PAGE;

/// How much a measured pass moves the cost of its size, and of the others: what one size gets wrong
/// must not change what plain decoding is believed to cost. A pass over one row moves all alike: it
/// says how fast the machine is at the moment, not what a row more costs.
const OWN: f32 = 0.1;
const OTHERS: f32 = 0.03;
/// How much each pass over one row returns the others to what was measured on purpose: sizes that
/// are not used any more may have been judged while something else kept the machine busy.
const HEALING: f32 = 1.0 / 64.0;
/// How far off a measured pass may be to count in full: on a busy machine every third pass is held
/// up, some for ten times their time, and that must not look like the price of a pass.
const SPIKE: f32 = 1.15;
/// Passes in a row that are further off on the same side: then it does not happen by chance, and
/// they count by more than their share.
const STREAK: i32 = 4;
/// The same where no pass over one row has shown whether it is the machine.
const UNCONFIRMED: i32 = 12;
const FAR: f32 = 2.0;
const SOON: f32 = 0.5;
/// Last page of each range of context but the last one.
const PAGES: [usize; 4] = [1, 4, 16, 64];

/// Seconds that a pass takes by its number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CostCurve {
    /// `[rows - 1]`
    seconds: Vec<f32>,
    /// The same as measured on purpose, in passes over one row.
    measured: Vec<f32>,
    /// Passes in a row that took far longer than was known, or, below 0, far less: over one row,
    /// and over several.
    streaks: [i32; 2],
    /// A pass over one row was as known since the streak of the others began: it is they that have
    /// another price.
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
        CostCurve {
            measured: seconds.iter().map(|s| s / seconds[0]).collect(),
            seconds,
            streaks: [0; 2],
            confirmed: false,
        }
    }

    /// One value per number of rows, as [`seconds`](Self::seconds) gave them; `None` for what no
    /// measurement can have given.
    pub fn restored(seconds: Vec<f32>) -> Option<Self> {
        let sane = |s: &f32| s.is_finite() && *s > 0.0 && *s < 3600.0;
        (!seconds.is_empty() && seconds.iter().all(sane)).then(|| Self::of(seconds))
    }

    /// Before anything is measured: a pass that costs nearly the same up to 8 rows.
    pub fn guess() -> Self {
        Self::new(&[(1, 0.1), (8, 0.11), (16, 0.13), (32, 0.18)])
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

    /// What a next run may begin with, by rows from 1 on: halfway between what was measured on
    /// purpose and what rounds have shown since.
    pub fn to_keep(&self) -> Vec<f32> {
        let plain = self.seconds[0];
        self.seconds
            .iter()
            .zip(&self.measured)
            .map(|(now, then)| (now * then * plain).sqrt())
            .collect()
    }

    /// Whether the last pass over one row took far longer than known, or far less, or those over
    /// several rows do and only one over one row can tell why: the machine may have changed.
    pub fn is_doubtful(&self) -> bool {
        self.streaks[0] != 0 || !self.confirmed && self.streaks[1].abs() >= STREAK
    }

    /// Takes in a measured pass.
    pub fn observe(&mut self, rows: usize, seconds: f32) {
        if rows == 0 || rows > self.max_rows() || seconds <= 0.0 {
            return;
        }
        let ratio = seconds / self.seconds[rows - 1];
        let streak = &mut self.streaks[(rows > 1) as usize];
        *streak = match ratio {
            r if r > SPIKE => (*streak).max(0) + 1,
            r if r < 1.0 / SPIKE => (*streak).min(0) - 1,
            _ => 0,
        };
        self.confirmed = match (rows, self.streaks) {
            (_, [_, 0]) => false,
            (1, [own, _]) => own == 0,
            _ => self.confirmed,
        };
        let sure = match (rows, self.streaks) {
            // All sizes agree, or this one does with itself.
            (1, [own, others]) => {
                own.abs() >= STREAK || others.abs() >= STREAK && own.signum() == others.signum()
            }
            (_, [_, others]) => others.abs() >= if self.confirmed { STREAK } else { UNCONFIRMED },
        };
        let near = ratio.clamp(1.0 / SPIKE, SPIKE) - 1.0;
        let own = if sure { SOON * (ratio.clamp(1.0 / FAR, FAR) - 1.0) } else { OWN * near };
        for (i, cost) in self.seconds.iter_mut().enumerate() {
            *cost *= 1.0 + if rows == 1 || i + 1 == rows { own } else { OTHERS * near };
        }
        if rows == 1 {
            let plain = self.seconds[0];
            let healed = |cost: &f32, measured: &f32| cost + HEALING * (measured * plain - cost);
            self.seconds
                .iter_mut()
                .zip(&self.measured)
                .for_each(|(cost, measured)| *cost = healed(cost, measured));
        }
    }

    /// Holds the other sizes to what is known of one: fewer rows take no longer, and more no longer
    /// than as many such passes. Where only one size is met, as in rounds of always as many texts,
    /// nothing else would correct what was measured on a busy machine.
    pub fn temper(&mut self, rows: usize) {
        if rows == 0 || rows > self.max_rows() {
            return;
        }
        let known = self.seconds[rows - 1];
        for (i, cost) in self.seconds.iter_mut().enumerate() {
            *cost = cost.min(known * (i + 1).div_ceil(rows) as f32);
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

    /// Of curves that are known from before, by range; `None` without any. Ranges that do not exist
    /// are passed over.
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

    /// The curve for a history of this length. A range that is met for the first time begins with
    /// what the nearest one has come to.
    pub fn at(&mut self, position: usize) -> &mut CostCurve {
        let here = range(position);
        if self.curves[here].is_none() {
            let nearest = self
                .known()
                .min_by_key(|(range, _)| range.abs_diff(here))
                .map(|(_, curve)| curve.clone());
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
        // What was wrong about one size says little about plain decoding; what all sizes say is
        // believed.
        assert!(curve.cost(1) < 1.1, "{}", curve.cost(1));
        (0..200).for_each(|i| curve.observe([1, 4, 8][i % 3], [1.5, 2.4, 3.0][i % 3]));
        assert!(
            (curve.cost(1) - 1.5).abs() < 0.05 && (curve.cost(8) - 3.0).abs() < 0.15,
            "{curve:?}"
        );
        curve.observe(1, 100.0);
        assert!(curve.cost(1) < 1.8, "a stolen time slice: {}", curve.cost(1));
    }

    #[test]
    fn what_holds_up_every_third_pass_is_no_price() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.2), (8, 2.0)]);
        for i in 0..600 {
            let rows = [1, 1, 4, 8][i % 4];
            let held = if i % 3 == 0 { 12.0 } else { 0.0 };
            curve.observe(rows, [1.0, 1.0, 1.2, 2.0][i % 4] + held);
        }
        assert!((1.0..1.12).contains(&curve.cost(1)), "{curve:?}");
        assert!((1.1..1.3).contains(&(curve.cost(4) / curve.cost(1))), "{curve:?}");
        assert!((1.8..2.2).contains(&(curve.cost(8) / curve.cost(1))), "{curve:?}");
    }

    #[test]
    fn a_machine_that_slows_down_does_so_for_all_sizes_and_old_doubts_fade() {
        let shape = |curve: &CostCurve| [2, 4, 8].map(|rows| curve.cost(rows) / curve.cost(1));
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        let before = shape(&curve);
        (0..50).for_each(|_| curve.observe(1, 3.0));
        assert!(
            (curve.cost(1) - 3.0).abs() < 0.01
                && shape(&curve).iter().zip(before).all(|(a, b)| (a - b).abs() < 1e-3)
        );
        // Eight rows were met while something else kept the machine busy, and were never tried
        // again.
        (0..20).for_each(|_| curve.observe(8, 18.0));
        assert!(shape(&curve)[2] > 4.0);
        (0..256).for_each(|_| curve.observe(1, 3.0));
        assert!(shape(&curve)[2] < 2.1, "{curve:?}");
        let kept = CostCurve::restored(curve.to_keep()).unwrap();
        assert!(shape(&kept)[2] < 2.1 && (kept.cost(1) - curve.cost(1)).abs() < 1e-5);
    }

    #[test]
    fn one_size_bounds_the_others() {
        let mut curve = CostCurve::new(&[(1, 4.0), (8, 6.0), (16, 8.0), (32, 20.0)]);
        (0..100).for_each(|_| curve.observe(8, 1.5));
        curve.temper(8);
        let costs = [1, 7, 8, 9, 16, 17, 32].map(|rows| curve.cost(rows));
        assert!(
            costs[2] < 1.6
                && costs[0] == costs[2]
                && costs[1] == costs[2]
                && costs[4] <= 2.0 * costs[2],
            "{costs:?}"
        );
        assert!(costs.is_sorted() && costs[6] <= 4.0 * costs[2], "{costs:?}");
        let true_to_life = CostCurve::new(&[(1, 1.0), (8, 1.4), (16, 2.4), (32, 4.8)]);
        let mut same = true_to_life.clone();
        [1, 8, 16].into_iter().for_each(|rows| same.temper(rows));
        assert_eq!(same, true_to_life);
    }

    #[test]
    fn ranges_of_context_have_curves_of_their_own() {
        assert_eq!(
            [0, 1, 256, 257, 1024, 1025, 4096, 4097, 16384, 16385, 1 << 20].map(range),
            [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        );
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
        for bad in
            [vec![], vec![0.0], vec![1.0, -1.0], vec![f32::NAN], vec![f32::INFINITY], vec![1e9]]
        {
            assert_eq!(CostCurve::restored(bad), None);
        }
    }
}
