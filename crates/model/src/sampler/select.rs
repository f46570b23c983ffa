//! A row of logits, read in blocks so that a large vocabulary is scanned only once.

use anyhow::{Result, bail};

use super::noise::BLOCK;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;

/// Logits that are compared together.
const LANES: usize = 16;

/// Usable logits, some of them changed by penalties and bans, with the maximum of each block.
pub(super) struct LogitRow<'a> {
    logits: &'a [f32],
    /// Changed logits, in ascending order of tokens.
    patches: Vec<(Token, f32)>,
    /// `[blocks of 64 tokens]`
    maxima: Vec<f32>,
    max: f32,
}

impl<'a> LogitRow<'a> {
    /// Creates a row. Fails without a largest finite logit: NaN, infinity, or only bans.
    pub fn new(logits: &'a [f32], patches: Vec<(Token, f32)>) -> Result<Self> {
        let mut row = LogitRow {
            logits,
            patches,
            maxima: Vec::with_capacity(logits.len().div_ceil(BLOCK)),
            max: f32::NEG_INFINITY,
        };
        let mut buffer = [0.0; BLOCK];
        for index in 0..logits.len().div_ceil(BLOCK) {
            let (max, nan) = max_and_nan(row.block(index, &mut buffer));
            if nan {
                bail!(Fault::damaged("the model gave a logit that is not a number"));
            }
            row.maxima.push(max);
            row.max = row.max.max(max);
        }
        match row.max {
            f32::NEG_INFINITY => bail!(
                "no token can be picked: all {} logits are banned or minus infinity",
                logits.len()
            ),
            f32::INFINITY => bail!(Fault::damaged("the model gave an infinite logit")),
            _ => Ok(row),
        }
    }

    /// Returns the patched logits of one block.
    fn block<'b>(&'b self, index: usize, buffer: &'b mut [f32; BLOCK]) -> &'b [f32] {
        let first = index * BLOCK;
        let raw = &self.logits[first..self.logits.len().min(first + BLOCK)];
        let from = self.patches.partition_point(|&(token, _)| (token as usize) < first);
        let here = self.patches[from..]
            .iter()
            .take_while(|&&(token, _)| (token as usize) < first + raw.len());
        let mut patched = false;
        for &(token, logit) in here {
            if !patched {
                buffer[..raw.len()].copy_from_slice(raw);
                patched = true;
            }
            buffer[token as usize - first] = logit;
        }
        if patched { &buffer[..raw.len()] } else { raw }
    }

    pub fn max(&self) -> f32 {
        self.max
    }

    /// Returns the largest logit of each block.
    pub fn maxima(&self) -> &[f32] {
        &self.maxima
    }

    /// Calls `each` for every token of a block, in ascending order.
    pub fn visit(&self, block: usize, mut each: impl FnMut(Token, f32)) {
        let mut buffer = [0.0; BLOCK];
        for (i, &logit) in self.block(block, &mut buffer).iter().enumerate() {
            each((block * BLOCK + i) as Token, logit);
        }
    }

    /// Calls `each` for every token with a logit of at least `threshold`, in ascending order.
    pub fn at_least(&self, threshold: f32, mut each: impl FnMut(Token, f32)) {
        let mut buffer = [0.0; BLOCK];
        for (index, _) in self.maxima.iter().enumerate().filter(|(_, max)| **max >= threshold) {
            for (part, logits) in self.block(index, &mut buffer).chunks(LANES).enumerate() {
                // One test rejects a part at once; most parts have no such logit.
                if logits.iter().fold(false, |any, &logit| any | (logit >= threshold)) {
                    let first = (index * BLOCK + part * LANES) as Token;
                    let found = (first..).zip(logits).filter(|(_, logit)| **logit >= threshold);
                    found.for_each(|(token, &logit)| each(token, logit));
                }
            }
        }
    }

    /// Returns the `k` tokens with the largest logits, best first, ties by lowest id. Leaves out
    /// tokens at minus infinity.
    pub fn top(&self, k: usize) -> Vec<(Token, f32)> {
        // At least k blocks reach the k-th largest block maximum, so at least k tokens do.
        let mut threshold = f32::MIN;
        if k < self.maxima.len() {
            let mut maxima = self.maxima.clone();
            let (_, kth, _) = maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            threshold = threshold.max(*kth);
        }
        let mut best = Vec::with_capacity(4 * k.min(self.logits.len()));
        self.at_least(threshold, |token, logit| best.push(rank(token, logit)));
        if k < best.len() {
            best.select_nth_unstable(k);
            best.truncate(k);
        }
        best.sort_unstable();
        best.into_iter().map(ranked).collect()
    }
}

/// Returns the result of [`LogitRow::top`] for a row after `lower` has changed its logits. No logit
/// may increase, so only the tokens near the top are examined.
pub(super) fn top_lowered(
    row: &LogitRow<'_>,
    k: usize,
    lower: impl Fn(Token, f32) -> f32,
) -> Vec<(Token, f32)> {
    let mut looked_at = k;
    loop {
        looked_at = looked_at.saturating_mul(4);
        let list = row.top(looked_at);
        // Upper bound of the logits of all other tokens.
        let rest = list.last().filter(|_| list.len() == looked_at).map(|(_, logit)| *logit);
        let lowered = list.iter().map(|&(token, logit)| (token, lower(token, logit)));
        let lowered = lowered.filter(|(_, logit)| *logit > f32::NEG_INFINITY);
        let mut ranks: Vec<u64> = lowered.map(|(token, logit)| rank(token, logit)).collect();
        ranks.sort_unstable();
        ranks.truncate(k);
        let best: Vec<_> = ranks.into_iter().map(ranked).collect();
        let is_above = |rest| best.len() == k && best.last().is_some_and(|last| last.1 > rest);
        if rest.is_none_or(is_above) {
            return best;
        }
    }
}

/// Returns a sort key: smaller for a larger logit, and on ties smaller for a lower id. One
/// comparison replaces two.
fn rank(token: Token, logit: f32) -> u64 {
    let bits = logit.to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    (!ascending as u64) << 32 | token as u64
}

/// Inverts [`rank`].
fn ranked(rank: u64) -> (Token, f32) {
    let ascending = !(rank >> 32) as u32;
    (
        rank as Token,
        f32::from_bits(if ascending >> 31 == 1 { ascending ^ 1 << 31 } else { !ascending }),
    )
}

/// Returns the largest value of a block, ignoring NaN, and whether the block has a NaN.
fn max_and_nan(block: &[f32]) -> (f32, bool) {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
            nan[i] |= chunk[i].is_nan();
        }
    }
    let max = rest.iter().chain(&max).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
    (max, nan.contains(&true) || rest.iter().any(|v| v.is_nan()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(logits: &[f32], k: usize) -> Vec<(Token, f32)> {
        let mut all: Vec<_> = logits.iter().enumerate().map(|(i, &v)| (i as Token, v)).collect();
        all.retain(|&(_, v)| v > f32::NEG_INFINITY);
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(k);
        all
    }

    #[test]
    fn top_equals_a_full_sort() {
        let logits: Vec<f32> =
            (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 22) as f32 / 16.0).collect();
        for (usable, k) in
            [(1000, 1), (1000, 8), (1000, 16), (1000, 64), (1000, 5000), (65, 3), (7, 7), (1, 1)]
        {
            let row = LogitRow::new(&logits[..usable], vec![]).unwrap();
            assert_eq!(row.top(k), sorted(&logits[..usable], k));
        }
    }

    #[test]
    fn ranks_are_of_logits_of_either_sign() {
        let logits = [-3.5, f32::MIN, -0.0, 0.0, f32::MIN_POSITIVE, 1.0, -1.0, 8e30, 1.0];
        let mut ranks: Vec<u64> =
            logits.iter().enumerate().map(|(i, &v)| rank(i as Token, v)).collect();
        for (i, &v) in logits.iter().enumerate() {
            assert_eq!(
                (ranked(ranks[i]).0, ranked(ranks[i]).1.to_bits()),
                (i as Token, v.to_bits())
            );
        }
        ranks.sort();
        assert_eq!(
            ranks.iter().map(|&r| ranked(r).0).collect::<Vec<_>>(),
            [7, 5, 8, 4, 3, 2, 6, 0, 1]
        );
    }

    #[test]
    fn patches_replace_logits() {
        let logits = vec![1.0; 200];
        let patches = vec![(0, f32::NEG_INFINITY), (63, 2.0), (64, 3.0), (199, 0.5)];
        let mut patched = logits.clone();
        patches.iter().for_each(|&(t, v)| patched[t as usize] = v);
        let row = LogitRow::new(&logits, patches).unwrap();
        assert_eq!(row.max(), 3.0);
        assert_eq!(row.top(300), sorted(&patched, 300));
    }

    #[test]
    fn lowered_logits_have_the_top_of_a_full_sort() {
        let logits: Vec<f32> =
            (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 22) as f32 / 16.0).collect();
        let equal = vec![1.0; 300];
        let lowers: [fn(Token, f32) -> f32; 4] = [
            |_, logit| logit,
            // Lowers all logits that the first attempt finds.
            |_, logit| if logit > 40.0 { logit - 50.0 } else { logit },
            |token, logit| if token % 3 == 0 { logit / 2.0 } else { logit },
            |token, logit| if token == 7 { logit } else { f32::NEG_INFINITY },
        ];
        for logits in [&logits[..], &logits[..65], &equal] {
            for lower in lowers {
                let all = logits.iter().enumerate();
                let lowered: Vec<f32> = all.map(|(i, &v)| lower(i as Token, v)).collect();
                let row = LogitRow::new(logits, vec![]).unwrap();
                for k in [1, 8, 64, 2000] {
                    assert_eq!(top_lowered(&row, k, lower), sorted(&lowered, k));
                }
            }
        }
    }

    #[test]
    fn rows_without_a_maximum_are_refused() {
        let mut logits = vec![0.0; 100];
        logits[70] = f32::NAN;
        assert!(LogitRow::new(&logits, vec![]).err().unwrap().to_string().contains("not a number"));
        logits[70] = f32::INFINITY;
        assert!(LogitRow::new(&logits, vec![]).is_err());
        assert!(LogitRow::new(&[f32::NEG_INFINITY; 9], vec![]).is_err());
        assert!(LogitRow::new(&[], vec![]).is_err());
    }
}
