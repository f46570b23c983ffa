//! The codes of weights, a row of the table [`SPECS`] each: whatever the program has to know of a
//! code stands there, and `docs/ADDING.md` says how another one is added.
//!
//! | code | stored value | real value | bytes per weight |
//! |------|--------------|------------|------------------|
//! | f32, bf16 | the float | the float | 4, 2 |
//! | i8 | q in -127..=127 (-128 too in files of others) | q * scale | 1 |
//! | i4 | q + 8 as a nibble, q in -8..=7, even column in the low half | q * scale | 1/2 |
//! | i2 | c in 0..=3, four columns a byte, lowest first | (c - 1.5) * scale | 1/4 |
//! | i8a | q in 0..=255 | q * scale + min | 1 |
//! | t2, t2.5, t3, t4 | a path through a trellis, see [`super::trellis`] | a computed integer * scale | 1/4, 5/16, 3/8, 1/2 |

use super::trellis::Trellis;

/// How one weight is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    F32,
    Bf16,
    I8,
    I4,
    I2,
    /// int8 with a smallest value besides the scale
    I8a,
    T2,
    T25,
    T3,
    T4,
}

/// What is known of a code.
#[derive(Clone, Copy, Debug)]
pub struct FormatSpec {
    pub code: Code,
    /// What files and options call it.
    pub name: &'static str,
    /// Bits of two stored weights, without scales.
    pub bits_of_two: usize,
    pub values: Values,
    /// Columns that may share a scale, where not a whole row does.
    pub groups: &'static [u16],
    /// Expected squared error of Gaussian weights relative to their squares: with a scale a row,
    /// then with one for each of `groups`.
    pub distortion: &'static [f64],
    /// The layout that the CPU's kernels read it in.
    pub cpu: CpuLayout,
    /// Its number in `shaders/include/codes.glsl`; `None`: the GPU has no kernels for it.
    pub vulkan: Option<u32>,
    /// What GGUF files call the type that holds it.
    pub gguf: Option<&'static str>,
}

/// What stored codes stand for.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    Float,
    /// Integers times a scale.
    Integer(Integer),
    /// Bytes times a scale, and a smallest value besides.
    Asymmetric,
    /// Paths through a trellis.
    Trellis {
        trellis: Trellis,
        /// Scale with the least error on a Gaussian, as a multiple of the one that gives the
        /// trellis' states the Gaussian's spread; measured by the search for multipliers.
        gain: f32,
    },
}

/// Integers of at most 8 bits, as a string of bits with the first column's lowest: `c + zero` is
/// stored, cut to `bits` bits, and stands for `(c - shift) * scale`.
#[derive(Clone, Copy, Debug)]
pub struct Integer {
    pub bits: u32,
    /// Smallest and largest `c` that weights are rounded to.
    pub low: f32,
    pub high: f32,
    /// 0, or so many halves as leave no code for zero; then kernels take `2 (c - shift)`, which is
    /// whole.
    pub shift: f32,
    pub zero: i32,
    pub scale: ScaleRule,
}

/// How a scale is chosen for a group of weights.
#[derive(Clone, Copy, Debug)]
pub enum ScaleRule {
    /// The largest weight gets the largest code.
    Largest,
    /// By a search over the largest weight divided by `first`, `first + step`, and so on; behind a
    /// Hadamard, with a scale a row, by the weights' spread times `gauss_step`: the step of the
    /// uniform quantiser of a unit Gaussian with the least squared error (Max 1960).
    Search {
        gauss_step: f32,
        first: f32,
        step: f32,
        steps: u16,
        /// Negative scales too: a lopsided range has one more code on one side.
        both_signs: bool,
    },
}

/// A layout of packed weights that the CPU has kernels for, see `compute/cpu/linear/pack.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuLayout {
    F32,
    Bf16,
    /// Also what integer codes without a layout of their own are unpacked to when they are loaded.
    I8,
    I4,
    I2,
    I8a,
    /// By the place among the trellis codes.
    Tiles(usize),
}

const GROUPS: &[u16] = &[32, 64, 128];

/// One row a code, in the order of [`Code`].
pub static SPECS: [FormatSpec; 10] = [
    FormatSpec {
        code: Code::F32,
        name: "f32",
        bits_of_two: 64,
        values: Values::Float,
        groups: &[],
        distortion: &[0.0],
        cpu: CpuLayout::F32,
        vulkan: Some(5),
        gguf: None,
    },
    FormatSpec {
        code: Code::Bf16,
        name: "bf16",
        bits_of_two: 32,
        values: Values::Float,
        groups: &[],
        distortion: &[1.4e-6],
        cpu: CpuLayout::Bf16,
        vulkan: Some(4),
        gguf: None,
    },
    FormatSpec {
        code: Code::I8,
        name: "i8",
        bits_of_two: 16,
        values: Values::Integer(Integer {
            bits: 8,
            low: -127.0,
            high: 127.0,
            shift: 0.0,
            zero: 0,
            scale: ScaleRule::Largest,
        }),
        groups: GROUPS,
        distortion: &[9.0e-5; 4],
        cpu: CpuLayout::I8,
        vulkan: Some(0),
        gguf: Some("Q8_0"),
    },
    FormatSpec {
        code: Code::I4,
        name: "i4",
        bits_of_two: 8,
        values: Values::Integer(Integer {
            bits: 4,
            low: -8.0,
            high: 7.0,
            shift: 0.0,
            zero: 8,
            scale: ScaleRule::Search {
                gauss_step: 0.3352,
                first: 4.0,
                step: 0.25,
                steps: 24,
                both_signs: true,
            },
        }),
        groups: GROUPS,
        distortion: &[0.0115, 0.0073, 0.0086, 0.0099],
        cpu: CpuLayout::I4,
        vulkan: Some(1),
        gguf: Some("Q4_0"),
    },
    FormatSpec {
        code: Code::I2,
        name: "i2",
        bits_of_two: 4,
        values: Values::Integer(Integer {
            bits: 2,
            low: 0.0,
            high: 3.0,
            shift: 1.5,
            zero: 0,
            scale: ScaleRule::Search {
                gauss_step: 0.9957,
                first: 1.5,
                step: 0.125,
                steps: 36,
                both_signs: false,
            },
        }),
        groups: GROUPS,
        distortion: &[0.1188, 0.0990, 0.1085, 0.1154],
        cpu: CpuLayout::I2,
        vulkan: Some(2),
        gguf: None,
    },
    FormatSpec {
        code: Code::I8a,
        name: "i8a",
        bits_of_two: 16,
        values: Values::Asymmetric,
        groups: &[],
        distortion: &[9.0e-5],
        cpu: CpuLayout::I8a,
        vulkan: Some(3),
        gguf: None,
    },
    tiles(Code::T2, "t2", Trellis { step: 4, multiplier: 0x00a8_c5a3 }, 1.03, &[0.0702], 0),
    tiles(Code::T25, "t2.5", Trellis { step: 5, multiplier: 0x00b5_7c25 }, 1.05, &[0.0356], 1),
    tiles(Code::T3, "t3", Trellis { step: 6, multiplier: 0x00aa_0917 }, 1.08, &[0.0183], 2),
    tiles(Code::T4, "t4", Trellis { step: 8, multiplier: 0x00f3_3bdb }, 1.12, &[0.0049], 3),
];

/// A trellis code: each state has two weights.
const fn tiles(
    code: Code,
    name: &'static str,
    trellis: Trellis,
    gain: f32,
    distortion: &'static [f64],
    place: usize,
) -> FormatSpec {
    FormatSpec {
        code,
        name,
        bits_of_two: trellis.step as usize,
        values: Values::Trellis { trellis, gain },
        groups: &[],
        distortion,
        cpu: CpuLayout::Tiles(place),
        vulkan: Some(6),
        gguf: None,
    }
}

const _: () = {
    let mut i = 0;
    while i < SPECS.len() {
        assert!(SPECS[i].code as usize == i, "the rows stand in the order of `Code`");
        assert!(SPECS[i].distortion.len() == 1 + SPECS[i].groups.len());
        if let (CpuLayout::I8, Values::Integer(integer)) = (SPECS[i].cpu, SPECS[i].values) {
            assert!(integer.shift == 0.0, "kernels of bytes take whole codes");
        }
        i += 1;
    }
};

impl Code {
    #[inline(always)]
    pub const fn spec(self) -> &'static FormatSpec {
        &SPECS[self as usize]
    }

    /// Bits of two stored weights, without scales.
    pub const fn bits_of_two(self) -> usize {
        self.spec().bits_of_two
    }

    /// True for codes whose product with int8 activations is an exact integer.
    pub const fn is_integer(self) -> bool {
        !matches!(self.spec().values, Values::Float)
    }

    /// True for codes that are computed from a path through a trellis.
    pub const fn is_trellis(self) -> bool {
        matches!(self.spec().values, Values::Trellis { .. })
    }

    /// True for codes whose columns can be coded one after the other, each knowing the errors of
    /// those before it.
    pub const fn is_coded_by_columns(self) -> bool {
        matches!(self.spec().values, Values::Integer(_) | Values::Trellis { .. })
    }

    /// What a scale is multiplied by before it meets the integers that kernels take: 1/2 where
    /// these are doubled.
    pub const fn unit(self) -> f32 {
        match self.spec().values {
            Values::Integer(integer) => integer.unit(),
            _ => 1.0,
        }
    }
}

impl Integer {
    /// See [`Code::unit`].
    #[inline(always)]
    pub const fn unit(&self) -> f32 {
        if self.shift == 0.0 { 1.0 } else { 0.5 }
    }

    /// The integer that kernels take of column `col` in a row of codes.
    #[inline(always)]
    pub fn at(&self, row: &[u8], col: usize) -> i32 {
        let (first, part) = (col * self.bits as usize / 8, col * self.bits as usize % 8);
        let mut stored = row[first] as u32 >> part;
        if part + self.bits as usize > 8 {
            stored |= (row[first + 1] as u32) << (8 - part);
        }
        let c = (stored & ((1 << self.bits) - 1)) as i32 - self.zero;
        let c = if c > self.high as i32 { c - (1 << self.bits) } else { c };
        if self.shift == 0.0 { c } else { 2 * c - (2.0 * self.shift) as i32 }
    }

    /// The stored code of a weight, one a byte, for each of a whole number of bytes' worth.
    pub fn pack(&self, codes: impl Iterator<Item = u8>, out: &mut Vec<u8>) {
        if self.bits == 8 {
            out.extend(codes);
            return;
        }
        let (mut left, mut n) = (0u32, 0);
        for code in codes {
            left |= (code as u32) << n;
            n += self.bits;
            if n >= 8 {
                out.push(left as u8);
                (left, n) = (left >> 8, n - 8);
            }
        }
    }

    /// The code used where the scale is zero and any code decodes to zero.
    pub fn zero_code(&self) -> u8 {
        (self.shift as i32 + self.zero) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code of every integer format survives its packing, wherever in a byte it stands.
    #[test]
    fn packed_integers_are_read_back() {
        for spec in &SPECS {
            let Values::Integer(integer) = spec.values else { continue };
            assert_eq!(2 * integer.bits as usize, spec.bits_of_two, "{}", spec.name);
            let all: Vec<i32> =
                (integer.low as i32..=integer.high as i32).cycle().take(512).collect();
            let mask = ((1u32 << integer.bits) - 1) as u8;
            let mut row = Vec::new();
            integer.pack(all.iter().map(|c| (c + integer.zero) as u8 & mask), &mut row);
            assert_eq!(16 * row.len(), 512 * spec.bits_of_two, "{}", spec.name);
            for (col, c) in all.iter().enumerate() {
                let value = (*c as f32 - integer.shift) / integer.unit();
                assert_eq!(integer.at(&row, col) as f32, value, "{}, {col}", spec.name);
            }
        }
    }
}
