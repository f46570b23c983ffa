//! Trellis codes: weights computed from overlapping windows of a bit string, after QTIP (Tseng et
//! al. 2024, arXiv 2406.11235). They use sums of bytes, so that a linear layer stays one integer
//! dot product.
//!
//! A tile of 16 rows and 16 columns is one circular bit string, row after row. A *state* is a
//! window of 16 bits of it. Each next state shifts in `step` new bits and yields two neighbouring
//! weights of a row, each a sum of four nibbles of `word = (state * multiplier) mod 2^32`:
//!
//! - the first weight: the sum of the low nibbles of the word's bytes, minus 30;
//! - the second one: the sum of the high nibbles, minus 30.
//!
//! Sums of nibbles look Gaussian and fit int8. A dot product of four bytes computes them.
//!
//! The string is stored as little-endian u32 words, its first bit in the highest bit of the first
//! word. A state's new bits are the last bits of its window. Windows wrap around from the start of
//! the string to its end.

/// Rows and columns of a tile.
pub const TILE: usize = 16;
/// Bits of a state.
pub const STATE_BITS: u32 = 16;
pub const STATES: usize = 1 << STATE_BITS;
/// States of a row of a tile.
pub const ROW_STATES: usize = TILE / 2;
/// Constant that is subtracted from a sum of nibbles.
pub const OFFSET: i32 = 30;
/// Most columns for which a dot product with int8 activations fits an i32: 60 * 127 * 2^17 < 2^31.
pub const MAX_COLS: usize = 1 << 17;

/// A trellis code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trellis {
    /// New bits per state.
    pub step: u32,
    /// 24 bits, odd; found by search, see the test `search_for_multipliers`.
    pub multiplier: u32,
}

impl Trellis {
    /// Bits of a row of a tile: 32, 40, 48 or 64.
    #[inline(always)]
    pub const fn row_bits(self) -> u32 {
        self.step * ROW_STATES as u32
    }

    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> usize {
        self.row_bits() as usize * TILE / 8
    }

    /// Returns the approximate standard deviation of the states' integers: that of a sum of four
    /// uniform nibbles.
    pub fn deviation(self) -> f32 {
        f32::sqrt(4.0 * (16.0 * 16.0 - 1.0) / 12.0)
    }

    /// Returns the two integers of a state.
    #[inline(always)]
    pub const fn integers(self, state: u32) -> [i32; 2] {
        let word = state.wrapping_mul(self.multiplier);
        [nibble_sum(word) - OFFSET, nibble_sum(word >> 4) - OFFSET]
    }

    /// Returns the bits of a row, in the low end of the result.
    #[inline(always)]
    pub fn row(self, tile: &[u8], row: usize) -> u64 {
        let (bits, word) = (self.row_bits() as usize, |i: usize| {
            let bytes =
                tile.get(4 * i..).and_then(|b| b.first_chunk()).copied().unwrap_or_default();
            u32::from_le_bytes(bytes)
        });
        // A row of 32 or 64 bits starts at a word; a row of 40 or 48 bits starts at most 24 or 16
        // bits after one. Two words always hold it.
        let (first, skip) = (row * bits / 32, row * bits % 32);
        let two = (word(first) as u64) << 32 | word(first + 1) as u64;
        two << skip >> (64 - bits)
    }

    /// Writes the bits of a row into a tile of zeros.
    pub fn set_row(self, tile: &mut [u8], row: usize, value: u64) {
        let bits = self.row_bits() as usize;
        let first = row * bits / 32;
        let three = (value as u128) << (96 - row * bits % 32 - bits);
        for (i, bytes) in tile.chunks_exact_mut(4).skip(first).take(3).enumerate() {
            let word = (three >> (64 - 32 * i)) as u32;
            bytes.iter_mut().zip(word.to_le_bytes()).for_each(|(b, w)| *b |= w);
        }
    }

    /// Decodes the integers of a row from its bits and those of the row before it. The row before
    /// the first one is the last one.
    #[inline(always)]
    pub fn decode(self, before: u64, row: u64) -> [i32; TILE] {
        let bits = self.row_bits();
        let both = (before as u128) << bits | row as u128;
        let mut out = [0; TILE];
        for (i, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let state = (both >> (bits - self.step * (i as u32 + 1))) as u32 & (STATES as u32 - 1);
            *out = self.integers(state);
        }
        out
    }

    /// Decodes the integers of a row of a tile.
    #[inline(always)]
    pub fn decode_row(self, tile: &[u8], row: usize) -> [i32; TILE] {
        self.decode(self.row(tile, (row + TILE - 1) % TILE), self.row(tile, row))
    }
}

/// Returns the sum of the low nibbles of a word's bytes.
const fn nibble_sum(word: u32) -> i32 {
    let [a, b, c, d] = (word & 0x0f0f_0f0f).to_le_bytes();
    a as i32 + b as i32 + c as i32 + d as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Code;

    const ALL: [Code; 4] = [Code::T2, Code::T25, Code::T3, Code::T4];

    /// Decodes by the definition, bit by bit.
    fn by_bits(t: Trellis, tile: &[u8], row: usize) -> Vec<i32> {
        let bit = |i: usize| {
            let word = u32::from_le_bytes(tile[i / 32 * 4..][..4].try_into().unwrap());
            word >> (31 - i % 32) & 1
        };
        let total = tile.len() * 8;
        (0..ROW_STATES)
            .flat_map(|i| {
                let end = (row * ROW_STATES + i + 1) * t.step as usize;
                let state = (end + total - 16..end + total).fold(0, |s, b| s << 1 | bit(b % total));
                t.integers(state)
            })
            .collect()
    }

    #[test]
    fn a_row_is_what_the_bits_say() {
        for code in ALL {
            let t = code.trellis().unwrap();
            let tile: Vec<u8> =
                (0..t.tile_bytes()).map(|i| (i * 151 % 251) as u8 ^ (i / 3) as u8).collect();
            assert_eq!(tile.len(), 256 * code.bits_of_eight() / 64);
            for row in 0..TILE {
                assert_eq!(
                    t.decode_row(&tile, row).to_vec(),
                    by_bits(t, &tile, row),
                    "{code:?} {row}"
                );
            }
        }
    }

    #[test]
    fn rows_are_read_as_they_were_set() {
        for code in ALL {
            let t = code.trellis().unwrap();
            let mut tile = vec![0; t.tile_bytes()];
            let value = |row: usize| {
                (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - t.row_bits())
            };
            (0..TILE).for_each(|row| t.set_row(&mut tile, row, value(row)));
            assert!((0..TILE).all(|row| t.row(&tile, row) == value(row)), "{code:?}");
        }
    }

    #[test]
    fn multipliers_are_odd_and_of_24_bits() {
        for code in ALL {
            let m = code.trellis().unwrap().multiplier;
            assert!(m & 1 == 1 && m >> 20 > 0 && m < 1 << 24, "{code:?}");
        }
    }
}
