//! How a pass is cut into submissions, so that none of them is taken for a hang.
//!
//! A driver resets a device whose submission runs too long: amdgpu after 2 s since Linux 7.0, others after 10 s. A pass over a
//! long prompt can take longer than that, so it goes out in pieces, each of which is estimated to stay below [`LIMIT`].

/// Most that the calls of one submission are estimated to take together, in seconds: a tenth of the shortest time-out known,
/// since clocks, power limits and other programs make estimates wrong.
pub const LIMIT: f64 = 0.2;
/// Seconds that a multiply-add is taken to need at least where a pass has not run yet: ten times what a Radeon 780M, bound by its
/// memory, is modelled to need for one row.
const UNKNOWN: f64 = 1e-10;

/// What passes took so far, for estimates of those that have not run yet.
#[derive(Debug, Default)]
pub struct Pace {
    /// Seconds per multiply-add of the slowest pass.
    slowest: f64,
}

impl Pace {
    /// Seconds that a pass of `work` multiply-adds is estimated to take, which took `last` where it has run before. What never ran
    /// counts as slow as the slowest pass, and no faster than [`UNKNOWN`].
    pub fn estimate(&self, work: u64, last: Option<f64>) -> f64 {
        last.unwrap_or_else(|| work as f64 * self.slowest.max(UNKNOWN))
    }

    /// Takes note of a pass that has run.
    pub fn learn(&mut self, work: u64, seconds: f64) {
        self.slowest = self.slowest.max(seconds / work.max(1) as f64);
    }
}

/// Where the pieces of a pass end, as counts of its calls: a piece ends before the call that would make it too long. `work`: multiply-adds
/// of each call, of which all together are estimated to take `seconds`. A call by itself is not cut.
pub fn cut(work: &[u64], seconds: f64) -> Vec<usize> {
    let each = seconds / work.iter().sum::<u64>().max(1) as f64;
    let (mut ends, mut piece) = (Vec::new(), 0.0);
    for (i, call) in work.iter().map(|w| *w as f64 * each).enumerate() {
        if piece > 0.0 && piece + call > LIMIT {
            ends.push(i);
            piece = 0.0;
        }
        piece += call;
    }
    ends.push(work.len());
    ends
}

/// Whether commands that were cut at `old` have to be cut anew at `new`: where a piece became too long, and where there are so many
/// more of them than needed that submitting them costs time.
pub fn is_stale(old: &[usize], new: &[usize], work: &[u64], seconds: f64) -> bool {
    let each = seconds / work.iter().sum::<u64>().max(1) as f64;
    let starts = std::iter::once(0).chain(old.iter().copied());
    let too_long = starts.zip(old).any(|(from, to)| to - from > 1 && work[from..*to].iter().sum::<u64>() as f64 * each > LIMIT);
    too_long || old.len() >= 4 * new.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of a layer of Gemma 3 27B, in multiply-adds per row: q, k and v; attention; output; gate and up; down; norms.
    const LAYER: [u64; 6] = [44_000_000, 2_000_000, 22_000_000, 231_000_000, 116_000_000, 100_000];

    fn pass(rows: u64) -> Vec<u64> {
        (0..62).flat_map(|_| LAYER.map(|w| w * rows)).collect()
    }

    /// Runs passes on a device that needs `compute` seconds a multiply-add and `memory` seconds to read all weights, as the executor
    /// does, and returns the longest submission of several calls and how many submissions the last pass took.
    fn run(compute: f64, memory: f64, passes: &[u64]) -> (f64, usize) {
        let mut pace = Pace::default();
        let mut known: std::collections::HashMap<u64, (Vec<usize>, f64)> = Default::default();
        let (mut longest, mut pieces) = (0.0f64, 0);
        for rows in passes {
            let work = pass(*rows);
            let all: u64 = work.iter().sum();
            let seconds = pace.estimate(all, known.get(rows).map(|k| k.1));
            let new = cut(&work, seconds);
            let ends = match known.get(rows) {
                Some((old, _)) if !is_stale(old, &new, &work, seconds) => old.clone(),
                _ => new,
            };
            let real = (all as f64 * compute).max(memory);
            for (from, to) in std::iter::once(0).chain(ends.iter().copied()).zip(&ends) {
                let took = work[from..*to].iter().sum::<u64>() as f64 / all as f64 * real;
                if to - from > 1 {
                    longest = longest.max(took);
                }
            }
            pieces = ends.len();
            pace.learn(all, real);
            known.insert(*rows, (ends, real));
        }
        (longest, pieces)
    }

    #[test]
    fn no_submission_is_longer_than_the_limit_on_any_device() {
        // A prompt first, then decoding and wide passes; then decoding first.
        for passes in [&[128, 128, 1, 1, 8, 32, 128][..], &[1, 1, 16, 128, 128], &[2, 512, 512]] {
            // An H200, a 780M with its fastest and its slowest codes, and one that is ten times slower still.
            for (compute, memory) in [(5e-15, 4e-3), (1.4e-13, 0.19), (5e-12, 0.19), (5e-11, 1.9)] {
                let (longest, _) = run(compute, memory, passes);
                assert!(longest <= LIMIT * 1.001, "{longest} s at {compute} s a multiply-add, passes of {passes:?} rows");
            }
        }
    }

    #[test]
    fn a_fast_device_soon_takes_a_pass_whole() {
        assert_eq!(run(5e-15, 4e-3, &[128, 128]).1, 1);
        assert_eq!(run(5e-15, 4e-3, &[1, 1]).1, 1);
        // A second of prefill takes no more than what fills the limit once or twice over.
        let pieces = run(2.7e-13, 0.19, &[128, 128, 128]).1;
        assert!((5..=10).contains(&pieces), "{pieces} pieces");
    }

    #[test]
    fn calls_that_are_too_long_alone_stand_alone() {
        assert_eq!(cut(&[1, 100, 1], 10.2), [1, 2, 3]);
        assert_eq!(cut(&[], 1.0), [0]);
        assert_eq!(cut(&[0, 0], 0.0), [2]);
    }
}
