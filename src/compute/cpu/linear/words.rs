//! [`Words`] in AVX-512 VNNI and AVX2.

use super::trellis::Words;
use std::arch::x86_64::*;

/// One register.
#[derive(Clone, Copy)]
pub struct Zmm(__m512i);

/// Two registers: lanes 0 to 7, lanes 8 to 15.
#[derive(Clone, Copy)]
pub struct TwoYmm(__m256i, __m256i);

// SAFETY of every unsafe block below: the type is only used inside functions compiled for its instruction set, which run only
// where the machine has it; memory accesses pass their promise on to the caller.

impl Words for Zmm {
    #[inline(always)]
    fn zero() -> Self {
        unsafe { Zmm(_mm512_setzero_si512()) }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Zmm(_mm512_load_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        unsafe { _mm512_storeu_si512(p.cast(), _mm512_add_epi32(_mm512_loadu_si512(p.cast()), self.0)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { Zmm(_mm512_add_epi32(self.0, other.0)) }
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        unsafe { Zmm(_mm512_or_si512(self.0, other.0)) }
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        unsafe { Zmm(_mm512_and_si512(self.0, _mm512_set1_epi32(mask as i32))) }
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        unsafe { Zmm(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(bits as i32))) }
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        unsafe { Zmm(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(bits as i32))) }
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        unsafe { Zmm(_mm512_mullo_epi32(self.0, _mm512_set1_epi32(factor as i32))) }
    }
    #[inline(always)]
    fn turned(self) -> Self {
        unsafe { Zmm(_mm512_alignr_epi32::<15>(self.0, self.0)) }
    }
    #[inline(always)]
    fn splat(bytes: i32) -> Self {
        unsafe { Zmm(_mm512_set1_epi32(bytes)) }
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        unsafe {
            // Within each 128 bits places count from their start; all lanes hold the same bytes, so the first four will do.
            Zmm(_mm512_shuffle_epi8(self.0, _mm512_set1_epi32(i32::from_le_bytes(places))))
        }
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        unsafe { Zmm(_mm512_dpbusd_epi32(self.0, bytes.0, x.0)) }
    }
}

impl TwoYmm {
    #[inline(always)]
    fn both(self, f: impl Fn(__m256i) -> __m256i) -> Self {
        TwoYmm(f(self.0), f(self.1))
    }
}

impl Words for TwoYmm {
    #[inline(always)]
    fn zero() -> Self {
        unsafe { TwoYmm(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { TwoYmm(_mm256_load_si256(p.cast()), _mm256_load_si256(p.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        unsafe {
            let p: *mut __m256i = p.cast();
            _mm256_storeu_si256(p, _mm256_add_epi32(_mm256_loadu_si256(p), self.0));
            _mm256_storeu_si256(p.add(1), _mm256_add_epi32(_mm256_loadu_si256(p.add(1)), self.1));
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { TwoYmm(_mm256_add_epi32(self.0, other.0), _mm256_add_epi32(self.1, other.1)) }
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        unsafe { TwoYmm(_mm256_or_si256(self.0, other.0), _mm256_or_si256(self.1, other.1)) }
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        self.both(|v| unsafe { _mm256_and_si256(v, _mm256_set1_epi32(mask as i32)) })
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        self.both(|v| unsafe { _mm256_sll_epi32(v, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        self.both(|v| unsafe { _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        self.both(|v| unsafe { _mm256_mullo_epi32(v, _mm256_set1_epi32(factor as i32)) })
    }
    #[inline(always)]
    fn turned(self) -> Self {
        unsafe {
            let places = _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6);
            let (low, high) = (_mm256_permutevar8x32_epi32(self.0, places), _mm256_permutevar8x32_epi32(self.1, places));
            TwoYmm(_mm256_blend_epi32::<1>(low, high), _mm256_blend_epi32::<1>(high, low))
        }
    }
    #[inline(always)]
    fn splat(bytes: i32) -> Self {
        unsafe { TwoYmm(_mm256_set1_epi32(bytes), _mm256_set1_epi32(bytes)) }
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        // Both halves hold the same.
        let x = unsafe { _mm256_shuffle_epi8(self.0, _mm256_set1_epi32(i32::from_le_bytes(places))) };
        TwoYmm(x, x)
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        // Pairs give at most 2 * 127 * 127 = 32258: no saturation.
        let one = |sum, bytes, x| unsafe {
            _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, x), _mm256_set1_epi16(1)))
        };
        TwoYmm(one(self.0, bytes.0, x.0), one(self.1, bytes.1, x.1))
    }
}
