//! The noise that target and drafter share: a pure function of (seed, position, token).
//!
//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): counter =
//! (token / 4, position), key = seed, word = token mod 4. The generator has no state, so a rejected
//! draft has no side effect, and a shader can compute the same words. Logarithms come from the
//! crate `libm`, because C libraries differ in the last bit.

use gemma_base::tensor::Token;

/// Number of tokens with random words computed at once.
pub(super) const BLOCK: usize = 64;

/// Upper bound of the noise: `-ln(-ln(1 - 2^-33))`, rounded up.
const LARGEST: f64 = 22.874;

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Runs ten rounds on `N` counters in parallel, in place; `counter[word][lane]`.
#[inline(always)]
fn philox<const N: usize>(counter: &mut [[u32; N]; 4], mut key: [u32; 2]) {
    for _ in 0..10 {
        for lane in 0..N {
            let [a, b, c, d] = counter.each_ref().map(|words| words[lane]);
            let first = a as u64 * MULTIPLIER[0] as u64;
            let second = c as u64 * MULTIPLIER[1] as u64;
            counter[0][lane] = (second >> 32) as u32 ^ b ^ key[0];
            counter[1][lane] = second as u32;
            counter[2][lane] = (first >> 32) as u32 ^ d ^ key[1];
            counter[3][lane] = first as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
}

fn key(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// Returns the random word of one token at one position.
fn word(seed: u64, position: usize, token: Token) -> u32 {
    let position = position as u64;
    let mut counter = [[token / 4], [position as u32], [(position >> 32) as u32], [0]];
    philox(&mut counter, key(seed));
    counter[token as usize % 4][0]
}

/// Returns the words of the tokens `64 block .. 64 block + 64`.
pub(super) fn words(seed: u64, position: usize, block: usize) -> [u32; BLOCK] {
    const LANES: usize = BLOCK / 4;
    let position = position as u64;
    let mut counter =
        [[0; LANES], [position as u32; LANES], [(position >> 32) as u32; LANES], [0; LANES]];
    for (lane, first) in counter[0].iter_mut().enumerate() {
        *first = (block * LANES + lane) as u32;
    }
    philox(&mut counter, key(seed));
    std::array::from_fn(|i| counter[i % 4][i / 4])
}

/// Converts a word to a number strictly between 0 and 1, then to standard Gumbel noise: between
/// about -3.1 and 22.9.
pub(super) fn gumbel_of(word: u32) -> f64 {
    let uniform = (word as f64 + 0.5) / 4_294_967_296.0;
    -libm::log(-libm::log(uniform))
}

/// Returns the smallest word with noise that can exceed `noise`, or a slightly smaller one. The
/// result is above `u32::MAX` if there is no such word.
pub(super) fn word_above(noise: f64) -> u64 {
    if noise > LARGEST {
        return u64::MAX;
    }
    let uniform = libm::exp(-libm::exp(-noise));
    (uniform * 4_294_967_296.0 * (1.0 - 1e-9) - 2.0).max(0.0) as u64
}

/// Returns standard Gumbel noise for the key (seed, position of the token to draw, token).
pub fn gumbel(seed: u64, position: usize, token: Token) -> f64 {
    gumbel_of(word(seed, position, token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        // kat_vectors of the Random123 distribution, philox4x32-10.
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            let mut lanes = counter.map(|word: u32| [word]);
            philox(&mut lanes, key);
            assert_eq!(lanes.map(|[word]| word), want);
        }
    }

    #[test]
    fn blocks_and_single_words_agree() {
        for block in [0, 1, 4095] {
            for (i, &w) in words(7 << 40, 1 << 33, block).iter().enumerate() {
                assert_eq!(w, word(7 << 40, 1 << 33, (block * BLOCK + i) as Token));
            }
        }
    }

    #[test]
    fn the_bound_on_words_is_safe_and_tight() {
        for noise in [-3.5, -3.0, -1.0, 0.0, 0.5, 3.0, 10.0, 22.0] {
            let bound = word_above(noise) as u32;
            assert!(bound == 0 || gumbel_of(bound - 1) <= noise, "{noise}");
            assert!(gumbel_of(bound.saturating_add(16)) > noise, "{noise}");
        }
        let largest = gumbel_of(u32::MAX);
        assert!(
            largest < LARGEST && largest > LARGEST - 1e-3 && word_above(largest) <= u32::MAX as u64
        );
        assert!(word_above(23.0) > u32::MAX as u64);
    }
}
