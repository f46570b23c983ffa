//! Integer formats: how integers are stored, and how a scale is chosen for them.

/// An integer format of at most 8 bits.
///
/// The stored code is `c + zero`, truncated to `bits` bits. It represents `c - shift`.
#[derive(Clone, Copy, Debug)]
pub struct Integer {
    pub bits: u32,
    /// Smallest and largest `c` that weights are quantised to.
    pub low: f32,
    pub high: f32,
    /// 0, or an odd number of halves, in which case no code represents zero and kernels use the
    /// whole number `2 (c - shift)`.
    pub shift: f32,
    pub zero: i32,
    pub scale: ScaleRule,
    /// The integers of stored codes if they are not evenly spaced.
    pub levels: Option<&'static [i8; 16]>,
}

/// Rule for choosing the side of a group of weights.
#[derive(Clone, Copy, Debug)]
pub enum ScaleRule {
    /// The largest weight gets the largest code.
    Largest,
    /// The smallest weight is the minimum, the largest weight gets the largest code.
    Range,
    /// Search over the largest weight divided by `first`, `first + step`, and so on. With a
    /// Hadamard and one scale per row, the scale is the weights' standard deviation times
    /// `gauss_step` instead: the step of the optimal uniform quantiser of a unit Gaussian (Max
    /// 1960).
    Search {
        gauss_step: f32,
        first: f32,
        step: f32,
        steps: u16,
        /// Also tries negative scales: an asymmetric range has one more code on one side.
        both_signs: bool,
    },
    /// The block only occurs in files: no weight is quantised to it.
    Stored,
}

impl Integer {
    /// See [`Code::unit`].
    #[inline(always)]
    pub const fn unit(&self) -> f32 {
        if self.shift == 0.0 { 1.0 } else { 0.5 }
    }

    /// Returns the kernels' integer for column `col` of a row of packed codes.
    #[inline(always)]
    pub fn at(&self, row: &[u8], col: usize) -> i32 {
        let (first, part) = (col * self.bits as usize / 8, col * self.bits as usize % 8);
        let mut stored = row[first] as u32 >> part;
        if part + self.bits as usize > 8 {
            stored |= (row[first + 1] as u32) << (8 - part);
        }
        self.value((stored & ((1 << self.bits) - 1)) as u8)
    }

    /// Returns the kernels' integer for a stored code.
    #[inline(always)]
    pub fn value(&self, stored: u8) -> i32 {
        if let Some(levels) = self.levels {
            return levels[stored as usize & 15] as i32;
        }
        let c = stored as i32 - self.zero;
        let c = if c > self.high as i32 { c - (1 << self.bits) } else { c };
        if self.shift == 0.0 { c } else { 2 * c - (2.0 * self.shift) as i32 }
    }

    /// Packs stored codes, given one per byte. They must fill whole bytes.
    #[inline]
    pub fn pack(&self, codes: &[u8], out: &mut [u8]) {
        assert_eq!(codes.len() * self.bits as usize, out.len() * 8);
        match self.bits {
            8 => out.copy_from_slice(codes),
            4 => {
                let pairs = codes.as_chunks::<2>().0;
                out.iter_mut().zip(pairs).for_each(|(o, [low, high])| *o = low | high << 4);
            }
            bits => pack(bits as usize, codes.iter().map(|code| *code as u32), out),
        }
    }

    /// Returns the number that kernels subtract from non-negative integers. The difference has the
    /// range of signed integers of the same width.
    pub const fn bias(&self) -> i32 {
        if self.low == 0.0 && self.shift == 0.0 { 1 << (self.bits - 1) } else { 0 }
    }

    /// Returns the stored code for a scale of zero, for which any code decodes to zero.
    pub fn zero_code(&self) -> u8 {
        (self.shift as i32 + self.zero) as u8
    }
}

/// Packs codes of `bits` bits without gaps, the first one lowest. They must fill whole bytes.
#[inline]
pub fn pack(bits: usize, mut codes: impl Iterator<Item = u32>, out: &mut [u8]) {
    let (mut left, mut n) = (0u64, 0);
    for byte in out {
        while n < 8 {
            left |= (codes.next().unwrap_or(0) as u64) << n;
            n += bits;
        }
        *byte = left as u8;
        (left, n) = (left >> 8, n - 8);
    }
}

#[cfg(test)]
mod tests {
    use crate::tensor::Values;
    use crate::tensor::block::BLOCKS;

    /// Every code of every integer format is read back after packing, at any bit offset.
    #[test]
    fn packed_integers_are_read_back() {
        for spec in &BLOCKS {
            let Values::Integer(integer) = spec.values else { continue };
            assert_eq!(8 * integer.bits as usize, spec.bits_of_eight, "{}", spec.name);
            let all: Vec<i32> =
                (integer.low as i32..=integer.high as i32).cycle().take(512).collect();
            let mask = ((1u32 << integer.bits) - 1) as u8;
            let codes: Vec<u8> = all.iter().map(|c| (c + integer.zero) as u8 & mask).collect();
            let mut row = vec![0; 512 * spec.bits_of_eight / 64];
            integer.pack(&codes, &mut row);
            for (col, c) in all.iter().enumerate() {
                let value = match integer.levels {
                    Some(levels) => levels[*c as usize] as f32,
                    None => (*c as f32 - integer.shift) / integer.unit(),
                };
                assert_eq!(integer.at(&row, col) as f32, value, "{}, {col}", spec.name);
            }
        }
    }
}
