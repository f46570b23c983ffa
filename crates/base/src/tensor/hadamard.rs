//! The 128-wide orthonormal Hadamard transform (Sylvester order) after a random change of signs,
//! applied to consecutive blocks of a row.
//!
//! `H[i][j] = (-1)^popcount(i & j) / sqrt(128)` is symmetric and its own inverse. The signs of
//! columns are changed first, see [`signs`]: otherwise weights or inputs of one sign would
//! accumulate in the first column of a block. Weights and inputs that are both transformed keep
//! their dot product. They look Gaussian, so one scale per row is nearly as good as one per group.

/// Columns in one block.
pub const WIDTH: usize = 128;

/// 1 / sqrt(128).
pub const SCALE: f32 = 0.088_388_35;

/// Returns the signs of columns `32 * word .. 32 * word + 32`, the first in the lowest bit; a set
/// bit means minus.
///
/// A fixed hash of `word`, so that every matrix, device and file agrees without storing it.
#[inline(always)]
pub const fn signs(word: u32) -> u32 {
    let mut x = word.wrapping_add(1).wrapping_mul(0x9e37_79b9);
    x = (x ^ x >> 16).wrapping_mul(0x21f0_aaad);
    x = (x ^ x >> 15).wrapping_mul(0x735a_2d97);
    x ^ x >> 15
}

/// Changes the signs of a row that starts at column `first` of its matrix.
#[inline(always)]
fn flip(row: &mut [f32], first: usize) {
    for (word, values) in row.chunks_mut(32).enumerate() {
        let signs = signs((first / 32 + word) as u32);
        for (bit, v) in values.iter_mut().enumerate() {
            *v = f32::from_bits(v.to_bits() ^ (signs >> bit & 1) << 31);
        }
    }
}

/// Applies the signs and transforms every 128-wide block, in place. `row.len()` must be a multiple
/// of 128.
#[inline(always)]
pub fn transform(row: &mut [f32]) {
    transform_at(row, 0);
}

/// Like [`transform`], for columns `first..` of a longer row; `first` must be a multiple of 128.
#[inline(always)]
pub fn transform_at(row: &mut [f32], first: usize) {
    assert!(first.is_multiple_of(WIDTH));
    flip(row, first);
    butterflies(row);
}

/// Undoes [`transform`].
#[inline(always)]
pub fn inverse(row: &mut [f32]) {
    butterflies(row);
    flip(row, 0);
}

/// Applies the butterflies of each block.
///
/// Their order is part of the format: every version of this kernel adds in this order, so results
/// are bit-identical.
#[inline(always)]
fn butterflies(row: &mut [f32]) {
    assert!(row.len().is_multiple_of(WIDTH));
    for block in row.as_chunks_mut::<WIDTH>().0 {
        let mut half = 64;
        while half > 0 {
            let mut start = 0;
            while start < WIDTH {
                for i in start..start + half {
                    let (a, b) = (block[i], block[i + half]);
                    block[i] = a + b;
                    block[i + half] = a - b;
                }
                start += 2 * half;
            }
            half /= 2;
        }
        for v in block {
            *v *= SCALE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition_and_comes_back() {
        let x: Vec<f32> = (0..2 * WIDTH).map(|i| ((i * 37 % 101) as f32 - 50.0) / 10.0).collect();
        let mut y = x.clone();
        transform(&mut y);
        for (i, got) in y.iter().enumerate() {
            let block = i / WIDTH * WIDTH;
            let term = |j: usize| {
                let minus = (i & j).count_ones() % 2 == 1;
                let turned = signs(((block + j) / 32) as u32) >> (j % 32) & 1 == 1;
                if minus != turned { -x[block + j] as f64 } else { x[block + j] as f64 }
            };
            let want = (0..WIDTH).map(term).sum::<f64>() / 128f64.sqrt();
            assert!((*got as f64 - want).abs() < 1e-4, "{i}: {got} vs {want}");
        }
        let mut second = x[WIDTH..].to_vec();
        transform_at(&mut second, WIDTH);
        assert_eq!(second, y[WIDTH..]);
        inverse(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn signs_are_balanced_and_differ_from_block_to_block() {
        let words: Vec<u32> = (0..1024).map(signs).collect();
        let minus: u32 = words.iter().map(|w| w.count_ones()).sum();
        assert!((minus as i32 - 16384).abs() < 400, "{minus} of 32768");
        let distinct: std::collections::HashSet<_> = words.iter().collect();
        assert_eq!(distinct.len(), words.len());
    }
}
