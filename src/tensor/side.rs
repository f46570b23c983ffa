//! The side of a matrix: for each group of columns the floats, and for each part of a group the
//! small integers, that turn stored integers into weights.

use half::f16;

/// Layout of the side of one group, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideKind {
    /// Nothing: the codes are floats.
    None,
    /// f16 scale.
    Scale,
    /// f16 scale, f16 minimum.
    ScaleMin,
    /// A super-block's f16 d, f16 dmin, then eight 6-bit scales and eight 6-bit minima in 12 bytes,
    /// packed as ggml does. A part has the scale `d * s` and the minimum `-dmin * m`.
    SixBit,
    /// A super-block's f16 d, then sixteen int8 scales. A part has the scale `d * s`.
    EightBit,
}

/// Most parts of a group.
pub const PARTS: usize = 16;
/// Most bytes of a group's side.
pub const BYTES: usize = 18;

/// The numbers of one group: a weight of part `p` is
/// `q * (scale * parts[p][0]) + min * parts[p][1]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    pub scale: f32,
    pub min: f32,
    pub parts: [[i32; 2]; PARTS],
}

impl SideKind {
    /// Bytes of a group.
    pub const fn bytes(self) -> usize {
        match self {
            SideKind::None => 0,
            SideKind::Scale => 2,
            SideKind::ScaleMin => 4,
            SideKind::SixBit => 16,
            SideKind::EightBit => 18,
        }
    }

    /// Parts of a group that have integers of their own.
    pub const fn parts(self) -> usize {
        match self {
            SideKind::None | SideKind::Scale | SideKind::ScaleMin => 1,
            SideKind::SixBit => 8,
            SideKind::EightBit => 16,
        }
    }

    /// Returns whether weights have a minimum.
    pub const fn has_min(self) -> bool {
        matches!(self, SideKind::ScaleMin | SideKind::SixBit)
    }

    /// Reads the side of one group.
    #[inline]
    pub fn factors(self, side: &[u8]) -> Factors {
        let mut f = Factors { scale: 1.0, min: 0.0, parts: [[1, 1]; PARTS] };
        if self != SideKind::None {
            f.scale = half(side, 0);
        }
        match self {
            SideKind::None | SideKind::Scale => {}
            SideKind::ScaleMin => f.min = half(side, 2),
            SideKind::SixBit => {
                f.min = -half(side, 2);
                let packed = &side[4..16];
                for (i, part) in f.parts[..8].iter_mut().enumerate() {
                    *part = six_bits(packed, i).map(i32::from);
                }
            }
            SideKind::EightBit => {
                let scales = side[2..18].iter().map(|s| *s as i8 as i32);
                f.parts.iter_mut().zip(scales).for_each(|(part, s)| part[0] = s);
            }
        }
        f
    }
}

/// The f16 at byte `at`.
#[inline(always)]
pub(super) fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Scale and minimum of part `i` of eight, from 12 bytes: the first four parts have the low six
/// bits of a byte, the others a nibble of the last four bytes and the two bits that are left over.
fn six_bits(packed: &[u8], i: usize) -> [u8; 2] {
    match i {
        0..4 => [packed[i] & 63, packed[i + 4] & 63],
        _ => {
            [packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4]
        }
    }
}

impl Factors {
    /// Turns the integers of a group into weights, `values.len() / parts` of each part in turn. All
    /// products are exact: an f16, an integer of 8 bits and one of 8 have 27 bits at most, and no
    /// block has all of them; so a fused multiply-add gives the same bits.
    #[inline]
    pub fn decode(
        &self,
        side: SideKind,
        unit: f32,
        integers: impl Fn(usize) -> i32,
        values: &mut [f32],
    ) {
        let width = values.len().div_ceil(side.parts()).max(1);
        for (p, values) in values.chunks_mut(width).enumerate() {
            let [s, m] = self.parts[p].map(|v| v as f32);
            let (scale, min) = (self.scale * unit * s, self.min * m);
            let products = values.iter_mut().enumerate();
            let products = products.map(|(i, v)| (v, integers(p * width + i) as f32 * scale));
            match side.has_min() {
                true => products.for_each(|(v, product)| *v = product + min),
                false => products.for_each(|(v, product)| *v = product),
            }
        }
    }
}
