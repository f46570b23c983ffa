//! [`Words`] in AVX-512 VNNI, AVX2 and AVX-VNNI.

use super::words::{Words, dot_in_turn};
use crate::compute::cpu::simd::intrinsics;
use std::arch::x86_64::*;

/// A line in one register.
#[derive(Clone, Copy)]
pub struct Zmm(__m512i);

/// Half a line. Uses `vpdpbusd` if `VNNI`.
#[derive(Clone, Copy)]
pub struct Ymm<const VNNI: bool>(__m256i);

impl Words for Zmm {
    const LANES: usize = 16;
    #[inline(always)]
    fn zero() -> Self {
        intrinsics!(Zmm(_mm512_setzero_si512()))
    }
    #[inline(always)]
    unsafe fn load(line: *const u8, _part: usize) -> (Self, Self) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let own = _mm512_load_si512(line.cast());
            (Zmm(own), Zmm(_mm512_alignr_epi32::<15>(own, own)))
        }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            _mm512_storeu_si512(p.cast(), _mm512_add_epi32(_mm512_loadu_si512(p.cast()), self.0))
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        intrinsics!(Zmm(_mm512_add_epi32(self.0, other.0)))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        intrinsics!(Zmm(_mm512_or_si512(self.0, other.0)))
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        intrinsics!(Zmm(_mm512_and_si512(self.0, _mm512_set1_epi32(mask as i32))))
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        intrinsics!(Zmm(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(bits as i32))))
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        intrinsics!(Zmm(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(bits as i32))))
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        intrinsics!(Zmm(_mm512_mullo_epi32(self.0, _mm512_set1_epi32(factor as i32))))
    }
    #[inline(always)]
    fn splat(bytes: i32) -> Self {
        intrinsics!(Zmm(_mm512_set1_epi32(bytes)))
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        intrinsics! {
            // Indices count from the start of each 128 bits. All lanes have the same bytes, so the
            // first four can be used.
            Zmm(_mm512_shuffle_epi8(self.0, _mm512_set1_epi32(i32::from_le_bytes(places))))
        }
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        intrinsics!(Zmm(_mm512_dpbusd_epi32(self.0, bytes.0, x.0)))
    }
    #[inline(always)]
    fn byte_sums(words: [Self; 4]) -> Self {
        let sum = |word: Self| {
            intrinsics! {
                Zmm(_mm512_dpbusd_epi32(_mm512_setzero_si512(), word.0, _mm512_set1_epi8(1)))
            }
        };
        let [a, b, c, d] = words.map(sum);
        a.or(b.left(8)).or(c.left(16).or(d.left(24)))
    }
}

impl<const VNNI: bool> Words for Ymm<VNNI> {
    const LANES: usize = 8;
    #[inline(always)]
    fn zero() -> Self {
        intrinsics!(Ymm(_mm256_setzero_si256()))
    }
    #[inline(always)]
    unsafe fn load(line: *const u8, part: usize) -> (Self, Self) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let own = _mm256_load_si256(line.add(32 * part).cast());
            if part == 1 {
                return (Ymm(own), Ymm(_mm256_loadu_si256(line.add(28).cast())));
            }
            let turned =
                _mm256_permutevar8x32_epi32(own, _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6));
            let last = _mm256_set1_epi32(line.add(60).cast::<i32>().read());
            (Ymm(own), Ymm(_mm256_blend_epi32::<1>(turned, last)))
        }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            _mm256_storeu_si256(p.cast(), _mm256_add_epi32(_mm256_loadu_si256(p.cast()), self.0))
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        intrinsics!(Ymm(_mm256_add_epi32(self.0, other.0)))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        intrinsics!(Ymm(_mm256_or_si256(self.0, other.0)))
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        intrinsics!(Ymm(_mm256_and_si256(self.0, _mm256_set1_epi32(mask as i32))))
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        intrinsics!(Ymm(_mm256_sll_epi32(self.0, _mm_cvtsi32_si128(bits as i32))))
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        intrinsics!(Ymm(_mm256_srl_epi32(self.0, _mm_cvtsi32_si128(bits as i32))))
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        intrinsics!(Ymm(_mm256_mullo_epi32(self.0, _mm256_set1_epi32(factor as i32))))
    }
    #[inline(always)]
    fn splat(dword: i32) -> Self {
        intrinsics!(Ymm(_mm256_set1_epi32(dword)))
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        intrinsics!(Ymm(_mm256_shuffle_epi8(self.0, _mm256_set1_epi32(i32::from_le_bytes(places)))))
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        // The sum of two products is at most 2 * 63 * 127 = 16002 and does not saturate.
        intrinsics! {
            if VNNI {
                return Ymm(_mm256_dpbusd_avx_epi32(self.0, bytes.0, x.0));
            }
            let pairs = _mm256_maddubs_epi16(bytes.0, x.0);
            Ymm(_mm256_add_epi32(self.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }
    #[inline(always)]
    fn dot_four<const SETS: usize>(sums: &mut [Self; SETS], bytes: [Self; 4], x: [Self; 4]) {
        if VNNI {
            return dot_in_turn(sums, bytes, x);
        }
        // The sum of eight products is at most 8 * 15 * 127 = 15240, which fits in 16 bits.
        sums[0] = intrinsics! {
            let pairs = |i: usize| _mm256_maddubs_epi16(bytes[i].0, x[i].0);
            let left = _mm256_add_epi16(pairs(0), pairs(1));
            let all = _mm256_add_epi16(left, _mm256_add_epi16(pairs(2), pairs(3)));
            let wide = _mm256_madd_epi16(all, _mm256_set1_epi16(1));
            Ymm(_mm256_add_epi32(sums[0].0, wide))
        };
    }
    #[inline(always)]
    fn byte_sums(words: [Self; 4]) -> Self {
        let ones = intrinsics!(_mm256_set1_epi8(1));
        if VNNI {
            let sum = |word: Self| Self::zero().dot(word, Ymm(ones));
            let [a, b, c, d] = words.map(sum);
            return a.or(b.left(8)).or(c.left(16).or(d.left(24)));
        }
        // Adds pairs of bytes of two words, which are then interleaved, and then both halves of a
        // lane.
        let halves = |a: Self, b: Self| {
            intrinsics! {
                let (a, b) = (_mm256_maddubs_epi16(a.0, ones), _mm256_maddubs_epi16(b.0, ones));
                let both = Ymm(_mm256_or_si256(a, _mm256_slli_epi16::<8>(b)));
                both.add(both.right(16))
            }
        };
        let [a, b, c, d] = words;
        halves(a, b).and(0xffff).or(halves(c, d).left(16))
    }
}
