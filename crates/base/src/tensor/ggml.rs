//! GGUF's storage of blocks: the side is interleaved with the codes, and codes have their own
//! order.
//!
//! | type | weights | bytes | value |
//! |------|--------:|------:|-------|
//! | Q4_0 | 32 | 18 | d (q - 8) |
//! | Q4_1 | 32 | 20 | d q + m |
//! | Q5_0 | 32 | 22 | d (q - 16) |
//! | Q5_1 | 32 | 24 | d q + m |
//! | Q8_0 | 32 | 34 | d q |
//! | Q4_K, Q5_K | 256 | 144, 176 | d s q - m t, with 6-bit s and t for each 32 weights |
//! | Q6_K | 256 | 210 | d s (q - 32), with int8 s for each 16 weights |
//! | Q2_K | 256 | 84 | d s q - m t, with 4-bit s and t for each 16 weights |
//! | Q3_K | 256 | 110 | d (s - 32) (q - 4), with 6-bit s for each 16 weights |
//! | IQ4_NL | 32 | 18 | d level(q) |
//! | IQ4_XS | 256 | 136 | d (s - 32) level(q), with 6-bit s for each 32 weights |
//!
//! | IQ2_XXS | 256 | 66 | d (2 s + 1) / 8 grid(q), with 4-bit s for each 32 weights |
//! | IQ2_XS, IQ2_S | 256 | 74, 82 | d (2 s + 1) / 8 grid(q), with 4-bit s for each 16 weights |
//! | IQ3_XXS | 256 | 98 | d (2 s + 1) / 4 grid(q), with 4-bit s for each 32 weights |
//! | IQ3_S | 256 | 110 | d (2 s + 1) grid(q), with 4-bit s for each 32 weights |
//!
//! d and m are f16. One function per type splits a block into codes and side; all other code reads
//! the table. Integers are unpacked to one per byte in column order; octets of a grid stay packed.
//! Source: ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c (meaning).

use super::integer::pack;

/// Most weights of a block.
pub const WEIGHTS: usize = 256;

/// The levels of the IQ4 types.
pub const IQ4_LEVELS: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// A type of a GGUF file.
#[derive(Clone, Copy, Debug)]
pub struct GgmlType {
    /// Its name in GGUF.
    pub name: &'static str,
    /// Weights of one block, 1 for plain floats.
    pub weights: usize,
    /// Bytes of one block.
    pub bytes: usize,
    /// `None` for plain floats.
    pub split: Option<BlockCodec>,
}

/// Functions that split a block and, if such files are written, join it.
#[derive(Clone, Copy, Debug)]
pub struct BlockCodec {
    pub open: OpenBlock,
    pub close: Option<CloseBlock>,
}

/// Joins stored codes, one per byte, and the side into a block.
pub type CloseBlock = fn(codes: &[u8], side: &[u8], block: &mut [u8]);

/// Splits a block into its codes and its side. Integers become one per byte; octets stay packed.
pub type OpenBlock = fn(block: &[u8], codes: &mut [u8], side: &mut [u8]);

impl GgmlType {
    /// Returns the bytes of `n` weights, which are whole blocks.
    pub fn bytes_of(&self, n: usize) -> usize {
        n / self.weights * self.bytes
    }
}

pub fn open_q8_0(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..2]);
    codes.copy_from_slice(&block[2..34]);
}

pub fn close_q8_0(codes: &[u8], side: &[u8], block: &mut [u8]) {
    block[..2].copy_from_slice(side);
    block[2..34].copy_from_slice(codes);
}

pub fn open_q4_0(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..2]);
    nibbles(&block[2..18], codes);
}

pub fn close_q4_0(codes: &[u8], side: &[u8], block: &mut [u8]) {
    block[..2].copy_from_slice(side);
    let (low, high) = codes.split_at(16);
    block[2..18].iter_mut().zip(low).zip(high).for_each(|((b, l), h)| *b = l | h << 4);
}

pub fn open_q4_1(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..4]);
    nibbles(&block[4..20], codes);
}

pub fn open_q5_0(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..2]);
    nibbles(&block[6..22], codes);
    fifth_bits(&block[2..6], codes);
}

pub fn open_q5_1(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..4]);
    nibbles(&block[8..24], codes);
    fifth_bits(&block[4..8], codes);
}

pub fn open_q4_k(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..16]);
    let halves = codes.chunks_exact_mut(64).zip(block[16..144].chunks_exact(32));
    halves.for_each(|(codes, bytes)| nibbles(bytes, codes));
}

pub fn open_q5_k(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..16]);
    let halves = codes.chunks_exact_mut(64).zip(block[48..176].chunks_exact(32));
    halves.for_each(|(codes, bytes)| nibbles(bytes, codes));
    for (group, codes) in codes.chunks_exact_mut(32).enumerate() {
        let fifth = codes.iter_mut().zip(&block[16..48]);
        fifth.for_each(|(code, high)| *code |= (high >> group & 1) << 4);
    }
}

pub fn open_q6_k(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..2].copy_from_slice(&block[208..]);
    side[2..].copy_from_slice(&block[192..208]);
    let (lows, highs) = (&block[..128], &block[128..192]);
    // Codes of one quarter of half a block share their shifts and are in neighbouring bytes.
    for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (i / 4, i % 4);
        let (low, high) = (&lows[64 * half + 32 * (quarter % 2)..], &highs[32 * half..]);
        let (low_shift, high_shift) = (4 * (quarter / 2), 2 * quarter);
        for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
            *code = low >> low_shift & 15 | (high >> high_shift & 3) << 4;
        }
    }
}

pub fn open_q2_k(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..4].copy_from_slice(&block[80..]);
    side[4..].copy_from_slice(&block[..16]);
    for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
        let bytes = &block[16 + 32 * (i / 4)..];
        codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (2 * (i % 4)) & 3);
    }
}

pub fn open_q3_k(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..2].copy_from_slice(&block[108..]);
    side[2..].copy_from_slice(&block[96..108]);
    for (i, codes) in codes.chunks_exact_mut(32).enumerate() {
        let (lows, highs) = (&block[32 + 32 * (i / 4)..], &block[..32]);
        for ((code, low), high) in codes.iter_mut().zip(lows).zip(highs) {
            *code = low >> (2 * (i % 4)) & 3 | (high >> i & 1) << 2;
        }
    }
}

pub fn open_iq4_xs(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side.copy_from_slice(&block[..8]);
    let groups = codes.chunks_exact_mut(32).zip(block[8..136].chunks_exact(16));
    groups.for_each(|(codes, bytes)| nibbles(bytes, codes));
}

pub fn open_iq2_xxs(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    let words = &block[2..];
    let index = |i: usize| words[i / 4 * 8 + i % 4] as u32;
    let signs = |group: usize| dword(words, 8 * group + 4);
    side[..2].copy_from_slice(&block[..2]);
    scales_of_signs(signs, &mut side[2..]);
    pack(15, (0..32).map(|i| index(i) | (signs(i / 4) >> (7 * (i % 4)) & 127) << 8), codes);
}

pub fn open_iq2_xs(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..2].copy_from_slice(&block[..2]);
    side[2..].copy_from_slice(&block[66..]);
    codes.copy_from_slice(&block[2..66]);
}

pub fn open_iq2_s(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..2].copy_from_slice(&block[..2]);
    side[2..].copy_from_slice(&block[74..]);
    let (lows, signs, highs) = (&block[2..34], &block[34..66], &block[66..74]);
    let index = |i: usize| lows[i] as u32 | (highs[i / 4] as u32 >> (2 * (i % 4)) & 3) << 8;
    pack(18, (0..32).map(|i| index(i) | (signs[i] as u32) << 10), codes);
}

pub fn open_iq3_xxs(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    let (indices, words) = (&block[2..66], &block[66..]);
    let both = |i: usize| indices[2 * i] as u32 | (indices[2 * i + 1] as u32) << 8;
    let signs = |group: usize| dword(words, 4 * group);
    side[..2].copy_from_slice(&block[..2]);
    scales_of_signs(signs, &mut side[2..]);
    pack(23, (0..32).map(|i| both(i) | (signs(i / 4) >> (7 * (i % 4)) & 127) << 16), codes);
}

pub fn open_iq3_s(block: &[u8], codes: &mut [u8], side: &mut [u8]) {
    side[..2].copy_from_slice(&block[..2]);
    side[2..].copy_from_slice(&block[106..]);
    let (lows, highs, signs) = (&block[2..66], &block[66..74], &block[74..106]);
    let index = |i: usize| lows[i] as u32 | (highs[i / 8] as u32 >> (i % 8) & 1) << 8;
    let octet = |i: usize| index(2 * i) | index(2 * i + 1) << 9 | (signs[i] as u32) << 18;
    pack(26, (0..32).map(octet), codes);
}

/// Extracts the 4-bit scales from the bits above the signs of each group of 32 weights.
fn scales_of_signs(signs: impl Fn(usize) -> u32, scales: &mut [u8]) {
    for (i, byte) in scales.iter_mut().enumerate() {
        *byte = (signs(2 * i) >> 28 | signs(2 * i + 1) >> 28 << 4) as u8;
    }
}

/// Reads the little-endian u32 at byte `at`.
#[inline(always)]
fn dword(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Splits n bytes into the n codes of their low nibbles and the n codes of their high ones.
#[inline(always)]
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    low.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte & 15);
    high.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> 4);
}

/// Adds bit j of a 32-bit word to code j as its fifth bit.
#[inline(always)]
fn fifth_bits(word: &[u8], codes: &mut [u8]) {
    let word = dword(word, 0);
    codes.iter_mut().enumerate().for_each(|(j, code)| *code |= ((word >> j & 1) as u8) << 4);
}
