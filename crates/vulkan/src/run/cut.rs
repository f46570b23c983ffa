//! Divides a pass into submissions that are short enough not to trigger the driver's hang
//! detection.
//!
//! A driver resets a device if a submission runs too long: amdgpu after 2 s since Linux 7.0, others
//! after 10 s. A pass over a long prompt can take longer, so it is submitted in pieces, each with
//! an estimate below [`LIMIT`]. The estimate of a pass is its last time. A pass that was never
//! timed is submitted piece by piece, and the time of each piece sets the size of the next
//! ([`Probe`]).

/// Largest estimate of a submission in seconds: a tenth of the shortest known time-out, because
/// clocks, power limits and other programs make estimates wrong.
pub const LIMIT: f64 = 0.2;
/// Assumed seconds per multiply-add before any pass was timed: 50 times the modelled time of a
/// Radeon 780M for one row, limited by its memory.
pub const UNKNOWN: f64 = 3.5e-10;
/// Largest growth of a piece of a probed pass, relative to the largest earlier piece.
const GROWTH: f64 = 4.0;
/// Smallest share of the first piece's work for which a time counts. Startup dominates smaller
/// pieces.
const TELLS: f64 = 0.125;

/// Work of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSize {
    /// Multiply-adds.
    pub work: u64,
    /// Number of equal parts into which it can be divided: workgroups along one axis.
    pub parts: u32,
}

impl CallSize {
    /// Returns the multiply-adds from this part onwards.
    fn left(&self, part: u32) -> f64 {
        self.work as f64 * f64::from(self.parts - part) / f64::from(self.parts.max(1))
    }
}

/// End of a piece: before this part of this call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    pub call: usize,
    pub part: u32,
}

/// Returns the end of a piece that starts at `from` and has room for `room` multiply-adds. A call
/// that does not fit starts a new piece, and is divided if it is too long for one.
pub fn end(calls: &[CallSize], from: Cut, room: f64) -> Cut {
    let (mut at, mut piece) = (from, 0.0);
    while let Some(size) = calls.get(at.call) {
        let left = size.left(at.part);
        if piece + left <= room {
            piece += left;
            at = Cut { call: at.call + 1, part: 0 };
            continue;
        }
        if at != from {
            return at;
        }
        // No part is smaller than a workgroup.
        let fit = (room / size.work as f64 * f64::from(size.parts)).floor().max(1.0);
        let part = at.part.saturating_add(fit as u32);
        return if part < size.parts {
            Cut { part, ..at }
        } else {
            Cut { call: at.call + 1, part: 0 }
        };
    }
    at
}

fn total(calls: &[CallSize]) -> f64 {
    calls.iter().map(|c| c.work as f64).sum()
}

/// Returns the multiply-adds between two cuts.
pub fn work_between(calls: &[CallSize], from: Cut, to: Cut) -> f64 {
    let left = |at: Cut| {
        calls.get(at.call).map_or(0.0, |c| c.left(at.part))
            + total(calls.get(at.call + 1..).unwrap_or(&[]))
    };
    left(from) - left(to)
}

/// Returns the pieces between these cuts, as (from, to).
pub fn pieces(ends: &[Cut]) -> impl Iterator<Item = (Cut, Cut)> {
    std::iter::once(Cut::default()).chain(ends.iter().copied()).zip(ends.iter().copied())
}

/// Returns the ends of the pieces of a pass with an estimated time of `seconds`.
pub fn cut(calls: &[CallSize], seconds: f64) -> Vec<Cut> {
    let room = LIMIT / seconds * total(calls);
    let (mut ends, mut at) = (Vec::new(), Cut::default());
    while ends.is_empty() || at.call < calls.len() {
        at = end(calls, at, if room.is_nan() { f64::INFINITY } else { room });
        ends.push(at);
    }
    ends
}

/// Returns whether commands that were cut at `old` must be cut again at `new`.
///
/// That is so if a piece has become too long, or if there are at least four times as many pieces as
/// needed: each submission costs time.
pub fn is_stale(old: &[Cut], new: &[Cut], calls: &[CallSize], seconds: f64) -> bool {
    let each = seconds / total(calls).max(1.0);
    // A piece that cannot be divided further is kept.
    let is_long = |(from, to)| {
        work_between(calls, from, to) * each > LIMIT * 1.001 && end(calls, from, 0.0) != to
    };
    old.is_empty() || pieces(old).any(is_long) || old.len() >= 4 * new.len()
}

/// Chooses the sizes of the pieces of a pass that was never timed.
#[derive(Debug)]
pub struct Probe {
    /// Assumed seconds per multiply-add before a piece was timed.
    guess: f64,
    /// Most work of a piece so far.
    largest: f64,
    /// Seconds per multiply-add of the slowest piece that counts.
    slowest: Option<f64>,
}

impl Probe {
    /// Starts a pass. `known` is the seconds per multiply-add of the slowest other pass.
    pub fn new(known: Option<f64>) -> Probe {
        Probe { guess: known.unwrap_or(0.0).max(UNKNOWN), largest: 0.0, slowest: None }
    }

    /// Returns the most multiply-adds for the next piece.
    pub fn room(&self) -> f64 {
        let first = LIMIT / self.guess;
        self.slowest.map_or(first, |each| (LIMIT / each).min(GROWTH * self.largest.max(first)))
    }

    /// Records the time of a piece.
    pub fn learn(&mut self, work: f64, seconds: f64) {
        self.largest = self.largest.max(work);
        if work >= TELLS * LIMIT / self.guess
            || self.slowest.is_some_and(|each| seconds > work * each)
        {
            self.slowest = Some(self.slowest.unwrap_or(0.0).max(seconds / work.max(1.0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of a layer of Gemma 3 27B, in multiply-adds per row: norm; q, k and v; attention;
    /// output; gate and up; down; norms.
    const LAYER: [u64; 7] =
        [5_000, 44_000_000, 2_000_000, 22_000_000, 231_000_000, 116_000_000, 100_000];

    fn pass(rows: u64) -> Vec<CallSize> {
        (0..62)
            .flat_map(|_| {
                LAYER.map(|w| CallSize { work: w * rows, parts: 1 + (w / 100_000) as u32 })
            })
            .collect()
    }

    /// Simulates passes like the executor, on a device with `compute` seconds per multiply-add and
    /// `memory` seconds to read all weights. Returns the longest submission in seconds, and the
    /// number of submissions of the last pass.
    fn run(compute: f64, memory: f64, passes: &[u64]) -> (f64, usize) {
        let mut slowest: Option<f64> = None;
        let mut known: std::collections::HashMap<u64, (Vec<Cut>, f64)> = Default::default();
        let (mut longest, mut pieces_of_last) = (0.0f64, 0);
        for rows in passes {
            let calls = pass(*rows);
            let all = total(&calls);
            let real = (all * compute).max(memory);
            let seconds = |from, to| work_between(&calls, from, to) / all * real;
            let is_new = !known.contains_key(rows);
            let ends = match known.remove(rows) {
                Some((old, took)) => {
                    let new = cut(&calls, took);
                    if is_stale(&old, &new, &calls, took) { new } else { old }
                }
                None => {
                    let (mut probe, mut at, mut ends) =
                        (Probe::new(slowest), Cut::default(), Vec::new());
                    while at.call < calls.len() {
                        let next = end(&calls, at, probe.room());
                        probe.learn(work_between(&calls, at, next), seconds(at, next));
                        ends.push(next);
                        at = next;
                    }
                    ends
                }
            };
            longest = pieces(&ends).fold(longest, |m, (from, to)| m.max(seconds(from, to)));
            pieces_of_last = ends.len();
            slowest = Some(slowest.unwrap_or(0.0).max(real / all));
            // A probed pass is cut again on its next run.
            let was_probed = is_new && ends.len() > 1;
            known.insert(*rows, (if was_probed { Vec::new() } else { ends }, real));
        }
        (longest, pieces_of_last)
    }

    #[test]
    fn no_submission_is_longer_than_the_limit_on_any_device() {
        // A prompt first, then decoding and wide passes; then decoding first.
        for passes in [&[128, 128, 1, 1, 8, 32, 128][..], &[1, 1, 16, 128, 128], &[2, 512, 512]] {
            // An H200, a 780M with its fastest and its slowest codes, and devices 50 times slower.
            for (compute, memory) in
                [(5e-15, 4e-3), (1.4e-13, 0.19), (2.8e-12, 0.19), (7e-12, 9.4), (1.4e-10, 9.4)]
            {
                let (longest, _) = run(compute, memory, passes);
                assert!(
                    longest <= LIMIT * 1.001,
                    "{longest} s at {compute} s a multiply-add, passes of {passes:?} rows"
                );
            }
        }
    }

    #[test]
    fn a_fast_device_soon_takes_a_pass_whole() {
        assert_eq!(run(5e-15, 4e-3, &[128, 128]).1, 1);
        assert_eq!(run(5e-15, 4e-3, &[1, 1]).1, 1);
        // Its first pass of a kind needs only a few extra pieces.
        assert!(run(5e-15, 4e-3, &[512]).1 <= 12);
        assert!(run(5e-15, 4e-3, &[1]).1 <= 6);
        // A second of prefill needs at most about twice the minimum number of pieces.
        let pieces = run(2.7e-13, 0.19, &[128, 128, 128]).1;
        assert!((5..=10).contains(&pieces), "{pieces} pieces");
    }

    /// Kernels differ in time per multiply-add, so one fast piece says little about the others.
    #[test]
    fn pieces_of_an_unknown_pass_grow_by_steps() {
        let mut probe = Probe::new(None);
        let first = probe.room();
        probe.learn(first, 1e-6);
        assert_eq!(probe.room(), GROWTH * first);
        probe.learn(GROWTH * first, 2.0 * LIMIT);
        assert_eq!(probe.room(), GROWTH * first / 2.0);
        assert!(Probe::new(Some(1.0)).room() < first && Probe::new(Some(0.0)).room() == first);
    }

    #[test]
    fn a_call_that_is_too_long_alone_is_divided_as_far_as_it_can_be() {
        let calls = [(1, 1), (100, 4), (1, 1)].map(|(work, parts)| CallSize { work, parts });
        let at = |call, part| Cut { call, part };
        // 25 multiply-adds per part. The last part is merged with the following calls.
        assert_eq!(cut(&calls, 102.0 * LIMIT / 60.0), [at(1, 0), at(1, 2), at(3, 0)]);
        assert_eq!(cut(&calls, 102.0 * LIMIT / 80.0), [at(1, 0), at(1, 3), at(3, 0)]);
        let smallest = cut(&calls, 102.0 * LIMIT / 3.0);
        assert_eq!(smallest, [at(1, 0), at(1, 1), at(1, 2), at(1, 3), at(2, 0), at(3, 0)]);
        assert!(
            !is_stale(&smallest, &smallest, &calls, 102.0 * LIMIT / 3.0),
            "it would be cut again in each pass"
        );
        assert_eq!(
            pieces(&smallest).map(|(from, to)| work_between(&calls, from, to)).sum::<f64>(),
            102.0
        );
        assert_eq!(cut(&[], 1.0), [at(0, 0)]);
        assert_eq!(cut(&[CallSize { work: 0, parts: 1 }; 2], 0.0), [at(2, 0)]);
        assert!(is_stale(&[], &[at(3, 0)], &calls, 0.1), "a probed pass is not recorded whole");
    }
}
