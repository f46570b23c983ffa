//! Weights as points of a grid. An *octet* is one integer that encodes eight columns. Its low bits
//! are the index of a point of eight coordinates, or two indices of points of four. Its high bits
//! are signs.

use super::grids;

/// Octet encoding of a type.
#[derive(Debug)]
pub struct Grid {
    /// Bits of an index.
    pub index_bits: u32,
    /// Indices of an octet.
    pub indices: u32,
    /// 8, or 7 if the number of negative weights is always even.
    pub sign_bits: u32,
    /// Factor of the scale.
    pub unit: f32,
    /// Indices of coordinates into their values; see [`grids`].
    pub places: &'static [u16],
    /// The coordinates themselves, four per word, one byte each.
    fours: &'static [u32],
}

const IQ2: [u8; 3] = [8, 25, 43];
pub static IQ2_XXS: Grid = {
    static FOURS: [u32; 512] = fours(&grids::IQ2_XXS, &IQ2);
    one(8, 7, &grids::IQ2_XXS, &FOURS)
};
pub static IQ2_XS: Grid = {
    static FOURS: [u32; 1024] = fours(&grids::IQ2_XS, &IQ2);
    one(9, 7, &grids::IQ2_XS, &FOURS)
};
pub static IQ2_S: Grid = {
    static FOURS: [u32; 2048] = fours(&grids::IQ2_S, &IQ2);
    one(10, 8, &grids::IQ2_S, &FOURS)
};
pub static IQ3_XXS: Grid = {
    static FOURS: [u32; 256] = fours(&grids::IQ3_XXS, &[4, 12, 20, 28, 36, 44, 52, 62]);
    two(8, 7, 0.25, &grids::IQ3_XXS, &FOURS)
};
pub static IQ3_S: Grid = {
    static FOURS: [u32; 512] = fours(&grids::IQ3_S, &[1, 3, 5, 7, 9, 11, 13, 15]);
    two(9, 8, 1.0, &grids::IQ3_S, &FOURS)
};

/// Grid with one point index per octet.
const fn one(
    index_bits: u32,
    sign_bits: u32,
    places: &'static [u16],
    fours: &'static [u32],
) -> Grid {
    Grid { index_bits, indices: 1, sign_bits, unit: 0.125, places, fours }
}

/// Grid with two point indices per octet.
const fn two(
    index_bits: u32,
    sign_bits: u32,
    unit: f32,
    places: &'static [u16],
    fours: &'static [u32],
) -> Grid {
    Grid { index_bits, indices: 2, sign_bits, unit, places, fours }
}

/// Replaces the coordinate indices of a grid by their values.
const fn fours<const N: usize, const M: usize>(places: &[u16; N], values: &[u8]) -> [u32; M] {
    let (mut fours, bits, mut i) = ([0; M], 4 * N / M, 0);
    while i < 4 * M {
        let place = places[i * bits / 16] >> (i * bits % 16) & ((1 << bits) - 1);
        fours[i / 4] |= (values[place as usize] as u32) << (i % 4 * 8);
        i += 1;
    }
    fours
}

impl Grid {
    /// Bits of an octet.
    pub const fn bits(&self) -> usize {
        (self.index_bits * self.indices + self.sign_bits) as usize
    }

    /// Reads an octet from a row of packed octets of at least 32 bits. Bits above it belong to the
    /// next one.
    #[inline(always)]
    pub fn octet(&self, packed: &[u8], octet: usize) -> u32 {
        let first = octet * self.bits();
        let at = (first / 8).min(packed.len() - 4);
        let dword = [packed[at], packed[at + 1], packed[at + 2], packed[at + 3]];
        u32::from_le_bytes(dword) >> (first - 8 * at)
    }

    /// Returns the integers of an octet for the kernels, as signed bytes.
    #[inline(always)]
    pub fn open(&self, octet: u32) -> [u32; 2] {
        let index = octet & ((1 << self.index_bits) - 1);
        let signs = octet >> (self.index_bits * self.indices);
        let (places, signs) = match self.indices {
            1 => ([2 * index, 2 * index + 1], signs),
            _ => ([index, octet >> self.index_bits & ((1 << self.index_bits) - 1)], signs),
        };
        let last = match self.sign_bits {
            8 => signs >> 7,
            // Bit i of the constant is the parity of i.
            _ => 0x6996 >> ((signs ^ signs >> 4 & 7) & 15),
        };
        let signs = [signs & 15, signs >> 4 & 7 | (last & 1) << 3];
        std::array::from_fn(|half| {
            let negative = signs[half].wrapping_mul(0x0020_4081) & 0x0101_0101;
            // No coordinate is zero, so the additions do not carry.
            (self.fours[places[half] as usize] ^ (negative * 255)) + negative
        })
    }

    /// Returns the kernels' integer for column `col` of a row of packed octets.
    #[inline(always)]
    pub fn at(&self, row: &[u8], col: usize) -> i32 {
        let four = self.open(self.octet(row, col / 8))[col / 4 % 2];
        four.to_le_bytes()[col % 4] as i8 as i32
    }

    /// Returns the root mean square of the grid's coordinates.
    pub fn deviation(&self) -> f32 {
        let squares = self.fours.iter().flat_map(|four| four.to_le_bytes());
        let sum: f32 = squares.map(|value| (value as f32).powi(2)).sum();
        (sum / (4 * self.fours.len()) as f32).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Values;
    use crate::tensor::block::BLOCKS;

    /// Decodes the integers of an octet bit by bit.
    fn slowly(grid: &Grid, octet: u64) -> [i32; 8] {
        let each = grid.index_bits;
        let signs = octet >> (each * grid.indices) & ((1 << grid.sign_bits) - 1);
        let even = if grid.sign_bits == 7 { signs.count_ones() as u64 % 2 } else { 0 };
        let signs = signs | even << 7;
        std::array::from_fn(|col| {
            let (point, coordinate) = match grid.indices {
                1 => (octet & ((1 << each) - 1), col),
                _ => (octet >> (each * (col as u32 / 4)) & ((1 << each) - 1), col % 4),
            };
            let four = grid.fours[(point as usize * 8 / grid.indices as usize + coordinate) / 4];
            let value = four.to_le_bytes()[coordinate % 4] as i32;
            if signs >> col & 1 == 1 { -value } else { value }
        })
    }

    /// Octets of all indices and many signs are read back from any offset in a row.
    #[test]
    fn octets_are_read_wherever_they_stand() {
        let mut grids = 0;
        for block in &BLOCKS {
            let Values::Grid(grid) = block.values else { continue };
            grids += 1;
            assert_eq!(grid.places.len(), 1 << grid.index_bits);
            assert_eq!(grid.bits(), block.bits_of_eight, "{}", block.name);
            let octets: Vec<u64> =
                (0..4096u64).map(|i| (i * 0x9e37_79b9) >> 4 & ((1 << grid.bits()) - 1)).collect();
            let mut row = vec![0; octets.len() * grid.bits() / 8];
            crate::tensor::integer::pack(grid.bits(), octets.iter().map(|o| *o as u32), &mut row);
            for (i, octet) in octets.iter().enumerate() {
                let got: [i32; 8] = std::array::from_fn(|col| grid.at(&row, 8 * i + col));
                assert_eq!(got, slowly(grid, *octet), "{}, octet {i}", block.name);
            }
        }
        assert_eq!(grids, 5);
    }
}
