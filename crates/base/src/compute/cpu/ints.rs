//! The integer operations of vectors ([`Ints`]) in each instruction set.

use super::simd::{Ints, Scalar};

impl Ints for Scalar {
    type Sums = [i32; 16];
    type Pairs = [[i8; 2]; 16];
    #[inline(always)]
    fn no_sums() -> Self::Sums {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> Self::Pairs {
        // SAFETY: the caller upholds the contract.
        unsafe { p.cast::<[[i8; 2]; 16]>().read_unaligned() }
    }
    #[inline(always)]
    fn add_pairs(sums: Self::Sums, keys: Self::Pairs, query: i32) -> Self::Sums {
        let (low, high) = (query as i16 as i32, query >> 16);
        std::array::from_fn(|i| sums[i] + keys[i][0] as i32 * low + keys[i][1] as i32 * high)
    }
    #[inline(always)]
    fn floats(sums: Self::Sums) -> Self {
        Scalar(sums.map(|v| v as f32))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller upholds the contract.
        Scalar(unsafe { p.cast::<[i8; 16]>().read_unaligned() }.map(|v| v as f32))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::compute::cpu::simd::{Avx2, Avx512, Ints, intrinsics};
    use std::arch::x86_64::*;

    impl Ints for Avx2 {
        type Sums = [__m256i; 2];
        type Pairs = [__m256i; 2];
        #[inline(always)]
        fn no_sums() -> Self::Sums {
            intrinsics!([_mm256_setzero_si256(); 2])
        }
        #[inline(always)]
        unsafe fn load_pairs(p: *const i8) -> Self::Pairs {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { [0, 16].map(|i| _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(i).cast()))) }
        }
        #[inline(always)]
        fn add_pairs(sums: Self::Sums, keys: Self::Pairs, query: i32) -> Self::Sums {
            intrinsics! {
                let query = _mm256_set1_epi32(query);
                let add = |sum, key| _mm256_add_epi32(sum, _mm256_madd_epi16(key, query));
                [add(sums[0], keys[0]), add(sums[1], keys[1])]
            }
        }
        #[inline(always)]
        fn floats(sums: Self::Sums) -> Self {
            intrinsics!(Avx2(_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])))
        }
        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                let half =
                    |i| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(i).cast())));
                Avx2(half(0), half(8))
            }
        }
    }

    impl Ints for Avx512 {
        type Sums = __m512i;
        type Pairs = __m512i;
        #[inline(always)]
        fn no_sums() -> Self::Sums {
            intrinsics!(_mm512_setzero_si512())
        }
        #[inline(always)]
        unsafe fn load_pairs(p: *const i8) -> Self::Pairs {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())) }
        }
        #[inline(always)]
        fn add_pairs(sums: Self::Sums, keys: Self::Pairs, query: i32) -> Self::Sums {
            intrinsics!(_mm512_dpwssd_epi32(sums, keys, _mm512_set1_epi32(query)))
        }
        #[inline(always)]
        fn floats(sums: Self::Sums) -> Self {
            intrinsics!(Avx512(_mm512_cvtepi32_ps(sums)))
        }
        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
        }
    }
}
