//! Lists of a row's largest logits, for devices that copy whole rows slowly to the host.
//!
//! Runs of 16 logits are dealt to [`CHUNKS`] chunks in turn. The threshold is the n-th largest
//! of the chunks' maxima, so at least n logits reach it. Neighbouring tokens are about equally
//! frequent. As they are in different chunks, few more than n logits reach the threshold. The list
//! holds all that reach it, in any order. Layout in u32 words: `[count, unused, (token, logit bits)
//! x MOST]`.

use crate::tensor::Token;

/// Chunks per row, which is also the largest valid n.
pub const CHUNKS: usize = 256;
/// Logits side by side that belong to one chunk.
const RUN: usize = 16;
/// Capacity of a list, in entries.
pub const MOST: usize = 1024;
/// Words of a list.
pub const WORDS: usize = 2 + 2 * MOST;

/// Bit of the count that is set if a logit is NaN or infinite.
const NAN_SEEN: u32 = 1 << 31;

/// Returns the entries of a list, best first, ties by lowest id.
///
/// Returns `None` if the list overflowed or a logit is not finite: then the caller reads all
/// logits.
pub fn parse(list: &[u32]) -> Option<Vec<(Token, f32)>> {
    let count = list[0] as usize;
    if list[0] & NAN_SEEN != 0 || count > MOST {
        return None;
    }
    let mut best: Vec<(Token, f32)> =
        list[2..][..2 * count].chunks_exact(2).map(|e| (e[0], f32::from_bits(e[1]))).collect();
    best.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    Some(best)
}

/// Builds the list of one row: the twin of the kernel.
pub fn list(logits: &[f32], n: usize, maxima: &mut [f32], out: &mut [u32]) {
    // Infinity marks a chunk with a NaN.
    let larger = |m: f32, v: &f32| if v.is_nan() { f32::INFINITY } else { m.max(*v) };
    maxima.fill(f32::NEG_INFINITY);
    for (i, run) in logits.chunks(RUN).enumerate() {
        let max = &mut maxima[i % CHUNKS];
        *max = run.iter().fold(*max, larger);
    }
    let mut sorted = maxima.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let threshold = sorted[n.clamp(1, CHUNKS) - 1];
    let reach = logits.iter().enumerate().filter(|(_, v)| **v >= threshold);
    out[0] = 0;
    for (token, logit) in reach {
        if (out[0] as usize) < MOST {
            let at = 2 + 2 * out[0] as usize;
            out[at..at + 2].copy_from_slice(&[token as u32, logit.to_bits()]);
        }
        out[0] += 1;
    }
    if maxima.contains(&f32::INFINITY) {
        out[0] |= NAN_SEEN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_the_best_and_gives_up_where_it_must() {
        let mut logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5003) as f32).collect();
        let (mut maxima, mut words) = (vec![0.0; CHUNKS], vec![0; WORDS]);
        for n in [1, 5, 64] {
            list(&logits, n, &mut maxima, &mut words);
            let mut all: Vec<(Token, f32)> = (0..).zip(logits.iter().copied()).collect();
            all.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let best = parse(&words).unwrap();
            assert!(best.len() >= n);
            assert_eq!(best[..n], all[..n]);
        }
        // The best tokens are neighbours.
        let falling: Vec<f32> = (0..1 << 16).map(|token| -(token as f32)).collect();
        list(&falling, 64, &mut maxima, &mut words);
        assert_eq!(parse(&words).unwrap()[63], (63, -63.0));
        list(&[1.0; 3000], 4, &mut maxima, &mut words);
        assert_eq!(parse(&words), None, "too many to list");
        logits[77] = f32::NAN;
        list(&logits, 4, &mut maxima, &mut words);
        assert_eq!(parse(&words), None, "not a number");
        logits[77] = f32::INFINITY;
        list(&logits, 4, &mut maxima, &mut words);
        assert_eq!(parse(&words), None, "infinite");
    }
}
