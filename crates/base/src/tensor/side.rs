//! The side of a matrix: the floats and small integers that map the stored integers of a group of
//! columns to weights. An element serves one group, or all groups of a super-block.

use half::f16;

/// Layout of an element of the side, little-endian.
///
/// `shaders/include/side.glsl` numbers the kinds in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideKind {
    /// Nothing: the codes are floats.
    None,
    /// f16 scale of a group.
    Scale,
    /// f16 scale, f16 minimum of a group.
    ScaleMin,
    /// f16 d and f16 dmin of a super-block of 8 groups, then eight 6-bit scales s and eight 6-bit
    /// minima m in 12 bytes.
    ///
    /// The first four groups use the low six bits of a byte each. The others use a nibble of the
    /// last four bytes and the two remaining bits of the first eight. A group has the scale `d * s`
    /// and the minimum `-dmin * m`.
    SixBitMin,
    /// f16 d and f16 dmin of a super-block of 16 groups, then a byte per group: s in the low half,
    /// m in the high half.
    FourBitMin,
    /// f16 d of a super-block of 16 groups, then sixteen int8 scales s.
    EightBit,
    /// f16 d of a super-block of 16 groups, then sixteen 6-bit scales `s + 32` in 12 bytes, packed
    /// like ggml's.
    SixBit,
    /// f16 d of a super-block of 8 groups, then eight 6-bit scales `s + 32`: their high two bits in
    /// 2 bytes, their low four bits in 4.
    SixBitSplit,
    /// f16 d of a super-block of 16 groups, then sixteen 4-bit scales s, two per byte, the first in
    /// the low half. A group has the scale `d * (2 * s + 1)`.
    FourBit,
    /// Like `FourBit`, for a super-block of 8 groups.
    FourBitWide,
}

/// Largest valid f16 of a side.
///
/// Trained weights are below 100, so a larger factor means damage. It would dominate all sums of a
/// pass while they stay finite.
pub const LARGEST: f32 = 1024.0;

/// Most groups of an element.
pub const GROUPS: usize = 16;
/// Most bytes of an element.
pub const BYTES: usize = 20;

/// Scale and minimum of one group: a weight is `q * scale + min`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    pub scale: f32,
    pub min: f32,
}

impl SideKind {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            SideKind::None => 0,
            SideKind::Scale => 2,
            SideKind::ScaleMin => 4,
            SideKind::SixBitMin => 16,
            SideKind::FourBitMin => 20,
            SideKind::EightBit => 18,
            SideKind::SixBit => 14,
            SideKind::SixBitSplit => 8,
            SideKind::FourBit => 10,
            SideKind::FourBitWide => 6,
        }
    }

    /// Returns the groups of columns that share an element.
    pub const fn groups(self) -> usize {
        match self {
            SideKind::None | SideKind::Scale | SideKind::ScaleMin => 1,
            SideKind::SixBitMin | SideKind::SixBitSplit | SideKind::FourBitWide => 8,
            SideKind::FourBitMin | SideKind::EightBit | SideKind::SixBit | SideKind::FourBit => 16,
        }
    }

    /// Returns whether weights have a minimum.
    pub const fn has_min(self) -> bool {
        matches!(self, SideKind::ScaleMin | SideKind::SixBitMin | SideKind::FourBitMin)
    }

    /// Returns the number of f16 values at the start of an element.
    pub const fn floats(self) -> usize {
        match self {
            SideKind::None => 0,
            _ if self.has_min() => 2,
            _ => 1,
        }
    }

    /// Finds the first f16 above [`LARGEST`], or NaN, among elements that start at byte `at` of the
    /// side. Returns its byte offset and value. `at` is even.
    pub fn damage(self, at: usize, bytes: &[u8]) -> Option<(usize, f16)> {
        let (n, floats) = (self.bytes(), self.floats());
        let half = |i: usize| f16::from_le_bytes([bytes[i], bytes[i + 1]]);
        let is_bad = |half: f16| half.to_bits() & 0x7fff > f16::from_f32_const(LARGEST).to_bits();
        if n == 2 * floats {
            // All bytes are f16: one vectorised test of all of them passes for most sides.
            let halves = bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b) & 0x7fff);
            if !is_bad(f16::from_bits(halves.fold(0, u16::max))) {
                return None;
            }
        }
        // Occurrences of one float of the element are n bytes apart.
        let places = |float| ((2 * float + n - at % n) % n..bytes.len()).step_by(n);
        let bad = (0..floats).filter_map(|float| places(float).find(|i| is_bad(half(*i))));
        bad.min().map(|i| (at + i, half(i)))
    }

    /// Reads the scale and the minimum of one group of an element. Products of a float and an
    /// integer are exact.
    #[inline(always)]
    pub fn factors(self, element: &[u8], group: usize) -> Factors {
        if self == SideKind::None {
            return Factors { scale: 1.0, min: 0.0 };
        }
        let [scale, min] = self.integers(group, |at| element[at]).map(|v| v as f32);
        let min = if self.has_min() { half(element, 2) * min } else { 0.0 };
        Factors { scale: half(element, 0) * scale, min }
    }

    /// Reads the integers of one group of an element through `byte`, which returns its bytes by
    /// index. Returns the factors of the first float (scale) and of the second float (minimum).
    #[inline(always)]
    pub fn integers(self, group: usize, byte: impl Fn(usize) -> u8) -> [i32; 2] {
        let (scale, min) = match self {
            SideKind::None | SideKind::Scale | SideKind::ScaleMin => return [1, 1],
            SideKind::SixBitMin if group < 4 => (byte(4 + group) & 63, byte(8 + group) & 63),
            SideKind::SixBitMin => {
                let (both, high) = (byte(8 + group), [byte(group), byte(4 + group)]);
                (both & 15 | high[0] >> 6 << 4, both >> 4 | high[1] >> 6 << 4)
            }
            SideKind::FourBitMin => (byte(4 + group) & 15, byte(4 + group) >> 4),
            SideKind::EightBit => return [byte(2 + group) as i8 as i32, 0],
            SideKind::SixBit => {
                let low = byte(2 + group % 8) >> (4 * (group / 8)) & 15;
                return [
                    (low | (byte(10 + group % 4) >> (2 * (group / 4)) & 3) << 4) as i32 - 32,
                    0,
                ];
            }
            SideKind::SixBitSplit => {
                let low = byte(4 + group / 2) >> (4 * (group % 2)) & 15;
                return [
                    (low | (byte(2 + group / 4) >> (2 * (group % 4)) & 3) << 4) as i32 - 32,
                    0,
                ];
            }
            SideKind::FourBit | SideKind::FourBitWide => {
                let s = byte(2 + group / 2) >> (4 * (group % 2)) & 15;
                return [2 * s as i32 + 1, 0];
            }
        };
        [scale as i32, -(min as i32)]
    }
}

/// Reads the f16 at byte `at`.
#[inline(always)]
pub(super) fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

impl Factors {
    /// Converts the integers of a group to weights.
    ///
    /// Products are exact, since an f16, the integer of a super-block and a code have at most 24
    /// bits together. A fused multiply-add therefore returns the same bits.
    #[inline]
    pub fn decode(
        self,
        side: SideKind,
        unit: f32,
        integers: impl Fn(usize) -> i32,
        values: &mut [f32],
    ) {
        let scale = self.scale * unit;
        let products = values.iter_mut().enumerate();
        let products = products.map(|(i, v)| (v, integers(i) as f32 * scale));
        match side.has_min() {
            true => products.for_each(|(v, product)| *v = product + self.min),
            false => products.for_each(|(v, product)| *v = product),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Damage is found at any start of the part and in any float; the surrounding bytes are 0xff.
    #[test]
    fn damage_is_found_at_its_byte() {
        let kinds = [
            SideKind::Scale,
            SideKind::ScaleMin,
            SideKind::SixBitMin,
            SideKind::FourBitMin,
            SideKind::EightBit,
            SideKind::SixBit,
            SideKind::SixBitSplit,
            SideKind::FourBit,
            SideKind::FourBitWide,
        ];
        for kind in kinds {
            let n = kind.bytes();
            let mut element = vec![0xff; n];
            let good = f16::from_f32(-LARGEST).to_le_bytes();
            element[..2 * kind.floats()].as_chunks_mut().0.fill(good);
            let side = element.repeat(40);
            for from in (0..2 * n).step_by(2) {
                assert!(kind.damage(from, &side[from..]).is_none(), "{kind:?} from {from}");
            }
            for bad in [f16::NAN, f16::NEG_INFINITY, f16::MAX, f16::from_f32(LARGEST + 1.0)] {
                for float in 0..kind.floats() {
                    let at = 17 * n + 2 * float;
                    let mut side = side.clone();
                    side[at..at + 2].copy_from_slice(&bad.to_le_bytes());
                    for from in [0, 2, n, 16 * n + 2, at] {
                        let (place, value) = kind.damage(from, &side[from..]).unwrap();
                        assert_eq!((place, value.to_bits()), (at, bad.to_bits()), "{kind:?}");
                    }
                    assert!(kind.damage(at + 2, &side[at + 2..]).is_none());
                }
            }
        }
        assert!(SideKind::None.damage(0, &[]).is_none());
    }
}
