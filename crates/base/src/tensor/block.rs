//! Weight formats as blocks. The row of a block in [`BLOCKS`] holds all its properties.
//!
//! A matrix stores the codes of its weights and a *side*: the data that maps the integers of a
//! group of columns to weights. The codes of a row are packed without gaps, the first column in the
//! lowest bits. docs/ADDING.md describes how to add a block.
//!
//! | code | stored value | real value | bits per weight |
//! |------|--------------|------------|----------------:|
//! | f32, f16, bf16 | the float | the float | 32, 16, 16 |
//! | i8 | q in -127..=127 (also -128 in GGUF files) | q * scale | 8 |
//! | i4 | q + 8, q in -8..=7 | q * scale | 4 |
//! | i2 | c in 0..=3 | (c - 1.5) * scale | 2 |
//! | i8a | q in 0..=255 | q * scale + min | 8 |
//! | t2, t2.5, t3, t4 | a path through a trellis ([`super::trellis`]) | integer * scale | 2 to 4 |
//! | q4_1, q5_1 | q in 0..=15, 0..=31 | q * scale + min | 4, 5 |
//! | q5_0 | q + 16, q in -16..=15 | q * scale | 5 |
//! | q4_k, q5_k | q in 0..=15, 0..=31 | q * (d * s) - dmin * m | 4, 5 |
//! | q6_k | q + 32, q in -32..=31 | q * (d * s) | 6 |
//! | q2_k | q in 0..=3 | q * (d * s) - dmin * m | 2 |
//! | q3_k | q + 4, q in -4..=3 | q * (d * s) | 3 |
//! | iq4_nl | index of one of sixteen levels | level * scale | 4 |
//! | iq4_xs | index of one of sixteen levels | level * (d * s) | 4 |
//! | iq2_xxs, iq2_xs, iq2_s | a point of a [grid](super::grid), signs | q * (d * s) / 8 | 2 |
//! | iq3_xxs | two points of a grid, signs | q * (d * s) / 4 | 3 |
//! | iq3_s | two points of a grid, signs | q * (d * s) | 3 |
//!
//! The small integers s and m apply to 32 columns in q4_k, q5_k, iq4_xs, iq2_xxs, iq3_xxs and
//! iq3_s, and to 16 in q2_k, q3_k, q6_k, iq2_xs and iq2_s. [`SideKind`] documents their bits.

use super::ggml::{self, BlockCodec, GgmlType};
use super::grid::{self, Grid};
use super::integer::{Integer, ScaleRule};
use super::side::SideKind;
use super::trellis::Trellis;

/// Identifies a block: its index in [`BLOCKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    F32,
    Bf16,
    I8,
    I4,
    I2,
    /// int8 with a minimum in addition to the scale
    I8a,
    T2,
    T25,
    T3,
    T4,
    F16,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    /// The block that tests add, following docs/ADDING.md.
    #[cfg(test)]
    Toy,
}

/// Number of consecutive columns of a row that share a scale. Activations use the same groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// The whole row.
    Row,
    /// This many columns.
    Cols(u16),
}

/// Properties of a block: a row of [`BLOCKS`].
#[derive(Clone, Copy, Debug)]
pub struct BlockSpec {
    pub code: Code,
    /// Name in files, options and messages.
    pub name: &'static str,
    /// Bits of eight stored weights, without the side.
    pub bits_of_eight: usize,
    pub values: Values,
    /// Data per group of columns in addition to the codes.
    pub side: SideKind,
    /// The group sizes that a matrix can have.
    pub groups: &'static [Group],
    /// Expected squared error of Gaussian weights relative to their squares, for each of `groups`.
    /// Empty if weights are never quantised to this block.
    pub distortion: &'static [f64],
    /// The layout that the CPU kernels read. `None`: there are no kernels, and the floats are
    /// converted to f32 when loaded.
    pub cpu: Option<CpuLayout>,
    /// Number of this block's integer type in `shaders/include/codes.glsl`. `None`: the GPU has no
    /// kernels for it.
    pub vulkan: Option<u32>,
    /// The GGUF type that stores this block.
    pub ggml: Option<GgmlType>,
}

/// Meaning of stored codes.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    Float,
    /// Integers, which the side maps to weights.
    Integer(Integer),
    /// Paths through a trellis.
    Trellis {
        trellis: Trellis,
        /// Scale with the least error on a Gaussian, as a multiple of the scale at which the
        /// integers of the trellis have the Gaussian's standard deviation. Measured by the search
        /// for multipliers.
        gain: f32,
    },
    /// Points of a grid, with signs.
    Grid(&'static Grid),
}

/// A layout of packed weights that the CPU has kernels for, see `compute/cpu/linear/pack.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuLayout {
    F32,
    Bf16,
    /// Stored codes of this many bits, 2 to 6 or 8.
    Int(u32),
    /// Octets of a grid: eight columns each.
    Grid,
    /// Trellis codes, by index among them.
    Tiles(usize),
}

const ROW: &[Group] = &[Group::Row];
const ROW_OR_GROUP: &[Group] = &[Group::Row, Group::Cols(32), Group::Cols(64), Group::Cols(128)];
const BY_32: &[Group] = &[Group::Cols(32)];
const BY_16: &[Group] = &[Group::Cols(16)];

/// The table of blocks, in the order of [`Code`].
pub static BLOCKS: [BlockSpec; 26 + cfg!(test) as usize] = [
    BlockSpec {
        ggml: Some(GgmlType { name: "F32", weights: 1, bytes: 4, split: None }),
        vulkan: Some(5),
        cpu: Some(CpuLayout::F32),
        ..float(Code::F32, "f32", 32, &[0.0])
    },
    BlockSpec {
        ggml: Some(GgmlType { name: "BF16", weights: 1, bytes: 2, split: None }),
        vulkan: Some(4),
        cpu: Some(CpuLayout::Bf16),
        ..float(Code::Bf16, "bf16", 16, &[1.4e-6])
    },
    BlockSpec {
        groups: ROW_OR_GROUP,
        distortion: &[9.0e-5; 4],
        cpu: Some(CpuLayout::Int(8)),
        vulkan: Some(0),
        ggml: Some(GgmlType {
            name: "Q8_0",
            weights: 32,
            bytes: 34,
            split: Some(BlockCodec { open: ggml::open_q8_0, close: Some(ggml::close_q8_0) }),
        }),
        ..integer(Code::I8, "i8", 8, -127.0, 0, ScaleRule::Largest, SideKind::Scale)
    },
    BlockSpec {
        groups: ROW_OR_GROUP,
        distortion: &[0.0115, 0.0073, 0.0086, 0.0099],
        cpu: Some(CpuLayout::Int(4)),
        vulkan: Some(1),
        ggml: Some(GgmlType {
            name: "Q4_0",
            weights: 32,
            bytes: 18,
            split: Some(BlockCodec { open: ggml::open_q4_0, close: Some(ggml::close_q4_0) }),
        }),
        ..integer(Code::I4, "i4", 4, -8.0, 8, SEARCH_I4, SideKind::Scale)
    },
    BlockSpec {
        code: Code::I2,
        name: "i2",
        bits_of_eight: 16,
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
            levels: None,
        }),
        side: SideKind::Scale,
        groups: ROW_OR_GROUP,
        distortion: &[0.1188, 0.0990, 0.1085, 0.1154],
        cpu: Some(CpuLayout::Int(2)),
        vulkan: Some(2),
        ggml: None,
    },
    BlockSpec {
        groups: ROW,
        distortion: &[9.0e-5],
        cpu: Some(CpuLayout::Int(8)),
        vulkan: Some(3),
        ..integer(Code::I8a, "i8a", 8, 0.0, 0, ScaleRule::Range, SideKind::ScaleMin)
    },
    tiles(Code::T2, "t2", Trellis { step: 4, multiplier: 0x00a8_c5a3 }, 1.03, &[0.0702], 0),
    tiles(Code::T25, "t2.5", Trellis { step: 5, multiplier: 0x00b5_7c25 }, 1.05, &[0.0356], 1),
    tiles(Code::T3, "t3", Trellis { step: 6, multiplier: 0x00aa_0917 }, 1.08, &[0.0183], 2),
    tiles(Code::T4, "t4", Trellis { step: 8, multiplier: 0x00f3_3bdb }, 1.12, &[0.0049], 3),
    BlockSpec {
        ggml: Some(GgmlType { name: "F16", weights: 1, bytes: 2, split: None }),
        ..float(Code::F16, "f16", 16, &[])
    },
    file(
        BY_32,
        7,
        "Q4_1",
        32,
        20,
        ggml::open_q4_1,
        integer(Code::Q4_1, "q4_1", 4, 0.0, 0, ScaleRule::Stored, SideKind::ScaleMin),
    ),
    file(
        BY_32,
        9,
        "Q5_0",
        32,
        22,
        ggml::open_q5_0,
        integer(Code::Q5_0, "q5_0", 5, -16.0, 16, ScaleRule::Stored, SideKind::Scale),
    ),
    file(
        BY_32,
        8,
        "Q5_1",
        32,
        24,
        ggml::open_q5_1,
        integer(Code::Q5_1, "q5_1", 5, 0.0, 0, ScaleRule::Stored, SideKind::ScaleMin),
    ),
    file(
        BY_32,
        7,
        "Q4_K",
        256,
        144,
        ggml::open_q4_k,
        integer(Code::Q4K, "q4_k", 4, 0.0, 0, ScaleRule::Stored, SideKind::SixBitMin),
    ),
    file(
        BY_32,
        8,
        "Q5_K",
        256,
        176,
        ggml::open_q5_k,
        integer(Code::Q5K, "q5_k", 5, 0.0, 0, ScaleRule::Stored, SideKind::SixBitMin),
    ),
    file(
        BY_16,
        10,
        "Q6_K",
        256,
        210,
        ggml::open_q6_k,
        integer(Code::Q6K, "q6_k", 6, -32.0, 32, ScaleRule::Stored, SideKind::EightBit),
    ),
    file(
        BY_16,
        11,
        "Q2_K",
        256,
        84,
        ggml::open_q2_k,
        integer(Code::Q2K, "q2_k", 2, 0.0, 0, ScaleRule::Stored, SideKind::FourBitMin),
    ),
    file(
        BY_16,
        12,
        "Q3_K",
        256,
        110,
        ggml::open_q3_k,
        integer(Code::Q3K, "q3_k", 3, -4.0, 4, ScaleRule::Stored, SideKind::SixBit),
    ),
    file(
        BY_32,
        13,
        "IQ4_NL",
        32,
        18,
        ggml::open_q4_0,
        levels(Code::Iq4Nl, "iq4_nl", SideKind::Scale),
    ),
    file(
        BY_32,
        13,
        "IQ4_XS",
        256,
        136,
        ggml::open_iq4_xs,
        levels(Code::Iq4Xs, "iq4_xs", SideKind::SixBitSplit),
    ),
    file(
        BY_32,
        14,
        "IQ2_XXS",
        256,
        66,
        ggml::open_iq2_xxs,
        points(Code::Iq2Xxs, "iq2_xxs", &grid::IQ2_XXS, SideKind::FourBitWide),
    ),
    file(
        BY_16,
        15,
        "IQ2_XS",
        256,
        74,
        ggml::open_iq2_xs,
        points(Code::Iq2Xs, "iq2_xs", &grid::IQ2_XS, SideKind::FourBit),
    ),
    file(
        BY_16,
        16,
        "IQ2_S",
        256,
        82,
        ggml::open_iq2_s,
        points(Code::Iq2S, "iq2_s", &grid::IQ2_S, SideKind::FourBit),
    ),
    file(
        BY_32,
        17,
        "IQ3_XXS",
        256,
        98,
        ggml::open_iq3_xxs,
        points(Code::Iq3Xxs, "iq3_xxs", &grid::IQ3_XXS, SideKind::FourBitWide),
    ),
    file(
        BY_32,
        18,
        "IQ3_S",
        256,
        110,
        ggml::open_iq3_s,
        points(Code::Iq3S, "iq3_s", &grid::IQ3_S, SideKind::FourBitWide),
    ),
    #[cfg(test)]
    BlockSpec {
        distortion: &[0.051],
        ..integer(Code::Toy, "toy", 3, -4.0, 4, ScaleRule::Largest, SideKind::Scale)
    },
];

const SEARCH_I4: ScaleRule =
    ScaleRule::Search { gauss_step: 0.3352, first: 4.0, step: 0.25, steps: 24, both_signs: true };

/// A block of floats of `bits` bits, without kernels.
const fn float(
    code: Code,
    name: &'static str,
    bits: usize,
    distortion: &'static [f64],
) -> BlockSpec {
    BlockSpec {
        code,
        name,
        bits_of_eight: 8 * bits,
        values: Values::Float,
        side: SideKind::None,
        groups: ROW,
        distortion,
        cpu: None,
        vulkan: None,
        ggml: None,
    }
}

/// A block of integers of `bits` bits, from `low` upwards, in groups of 32.
const fn integer(
    code: Code,
    name: &'static str,
    bits: u32,
    low: f32,
    zero: i32,
    scale: ScaleRule,
    side: SideKind,
) -> BlockSpec {
    let high = (1 << (bits - if low == 0.0 { 0 } else { 1 })) as f32 - 1.0;
    BlockSpec {
        code,
        name,
        bits_of_eight: 8 * bits as usize,
        values: Values::Integer(Integer { bits, low, high, shift: 0.0, zero, scale, levels: None }),
        side,
        groups: BY_32,
        distortion: &[],
        cpu: Some(CpuLayout::Int(bits)),
        vulkan: None,
        ggml: None,
    }
}

/// A block of indices into the sixteen levels of the IQ4 types.
const fn levels(code: Code, name: &'static str, side: SideKind) -> BlockSpec {
    let values = Values::Integer(Integer {
        bits: 4,
        low: 0.0,
        high: 15.0,
        shift: 0.0,
        zero: 0,
        scale: ScaleRule::Stored,
        levels: Some(&ggml::IQ4_LEVELS),
    });
    BlockSpec { values, ..integer(code, name, 4, 0.0, 0, ScaleRule::Stored, side) }
}

/// A block of octets of a grid.
const fn points(code: Code, name: &'static str, grid: &'static Grid, side: SideKind) -> BlockSpec {
    BlockSpec {
        bits_of_eight: grid.bits(),
        values: Values::Grid(grid),
        side,
        cpu: Some(CpuLayout::Grid),
        ..float(code, name, 0, &[])
    }
}

/// A block that only GGUF files use; `vulkan` is its number on the GPU.
const fn file(
    groups: &'static [Group],
    vulkan: u32,
    name: &'static str,
    weights: usize,
    bytes: usize,
    open: ggml::OpenBlock,
    block: BlockSpec,
) -> BlockSpec {
    let split = Some(BlockCodec { open, close: None });
    let ggml = Some(GgmlType { name, weights, bytes, split });
    BlockSpec { groups, vulkan: Some(vulkan), ggml, ..block }
}

/// A trellis block: each state encodes two weights.
const fn tiles(
    code: Code,
    name: &'static str,
    trellis: Trellis,
    gain: f32,
    distortion: &'static [f64],
    index: usize,
) -> BlockSpec {
    BlockSpec {
        code,
        name,
        bits_of_eight: 4 * trellis.step as usize,
        values: Values::Trellis { trellis, gain },
        side: SideKind::Scale,
        groups: ROW,
        distortion,
        cpu: Some(CpuLayout::Tiles(index)),
        vulkan: Some(6),
        ggml: None,
    }
}

const _: () = {
    let mut i = 0;
    while i < BLOCKS.len() {
        let block = &BLOCKS[i];
        assert!(block.code as usize == i, "rows must have the order of `Code`");
        assert!(block.distortion.is_empty() || block.distortion.len() == block.groups.len());
        assert!(block.cpu.is_some() || (block.vulkan.is_none() && block.ggml.is_some()));
        if let (Some(CpuLayout::Int(8)), Values::Integer(integer)) = (block.cpu, block.values) {
            assert!(integer.shift == 0.0, "kernels for bytes need whole codes");
        }
        i += 1;
    }
};

impl Code {
    /// Returns the code's row in the table.
    #[inline(always)]
    pub const fn spec(self) -> &'static BlockSpec {
        &BLOCKS[self as usize]
    }

    /// Bits of eight stored weights, without the side.
    pub const fn bits_of_eight(self) -> usize {
        self.spec().bits_of_eight
    }

    /// Returns whether products with int8 activations are exact integers.
    pub const fn is_integer(self) -> bool {
        !matches!(self.spec().values, Values::Float)
    }

    /// Returns whether the block only occurs in files, so that weights are never quantised to it.
    pub const fn is_stored(self) -> bool {
        self.spec().distortion.is_empty()
    }

    /// Returns whether weights are decoded from a path through a trellis.
    pub const fn is_trellis(self) -> bool {
        matches!(self.spec().values, Values::Trellis { .. })
    }

    /// Returns the trellis of a code, if it has one.
    #[inline(always)]
    pub const fn trellis(self) -> Option<Trellis> {
        match self.spec().values {
            Values::Trellis { trellis, .. } => Some(trellis),
            _ => None,
        }
    }

    /// Returns whether columns can be coded one after the other, with feedback of the errors of
    /// earlier columns.
    pub const fn is_coded_by_columns(self) -> bool {
        let block = self.spec();
        self.is_integer() && matches!(block.side, SideKind::Scale) && !self.is_stored()
    }

    /// Returns the factor between the stored scale and the scale of the kernels' integers: 1/2 if
    /// the integers are doubled, else 1.
    pub const fn unit(self) -> f32 {
        match self.spec().values {
            Values::Integer(integer) => integer.unit(),
            Values::Grid(grid) => grid.unit,
            _ => 1.0,
        }
    }
}
