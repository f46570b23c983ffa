//! Vectors of sixteen f32 lanes on each instruction set, for kernels that are written once.
//!
//! Every method is one IEEE operation per lane, so the instruction set never changes the bits of a
//! result.

use super::Isa;
use crate::tensor::math::magnitude;
use half::f16;

/// Integer operations for int8 keys and values: sixteen exact sums of products of pairs.
pub trait Ints: Copy {
    /// Sixteen i32.
    type Sums: Copy;
    /// Sixteen pairs of i16.
    type Pairs: Copy;
    fn no_sums() -> Self::Sums;
    /// Loads sixteen pairs of bytes and converts them to i16.
    /// # Safety
    /// 32 readable bytes at `p`.
    unsafe fn load_pairs(p: *const i8) -> Self::Pairs;
    /// Adds `keys[i].0 * query.0 + keys[i].1 * query.1` to sum i. The halves of `query` are i16,
    /// the first one low.
    fn add_pairs(sums: Self::Sums, keys: Self::Pairs, query: i32) -> Self::Sums;
    /// Converts the sums to floats, rounded to nearest even.
    fn floats(sums: Self::Sums) -> Self;
    /// # Safety
    /// Sixteen readable bytes at `p`.
    unsafe fn load_i8(p: *const i8) -> Self;
}

/// Sixteen lanes. The methods cost nothing extra only inside a function that is compiled for the
/// instruction set.
pub trait Lanes: Ints {
    const ISA: Isa;
    fn zero() -> Self;
    fn splat(v: f32) -> Self;
    /// Returns eight lanes of `low`, then eight lanes of `high`.
    fn pair(low: f32, high: f32) -> Self;
    /// # Safety
    /// Sixteen readable f32 at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// Sixteen readable f16 at `p`.
    unsafe fn load_f16(p: *const f16) -> Self;
    /// # Safety
    /// Sixteen writable f32 at `p`.
    unsafe fn store(self, p: *mut f32);
    /// Returns `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    /// Returns the larger of `self`, which must not be negative, and `|b|`, lane by lane. NaN is
    /// the largest.
    fn max_abs(self, b: Self) -> Self;
    /// Runs one stage of a Hadamard transform inside the vector. Lane i becomes `x[i] + x[i ^
    /// HALF]`, or `x[i ^ HALF] - x[i]` if bit `HALF` of i is set.
    fn butterfly<const HALF: usize>(self) -> Self;
    /// Changes the sign of lane i if bit i of `signs` is set.
    fn flip(self, signs: u16) -> Self;
    /// Rounds to the nearest int8, ties to even. Values must be within -127.5..127.5.
    /// # Safety
    /// Sixteen writable bytes at `p`.
    unsafe fn store_i8(self, p: *mut i8);
    /// Rounds to the nearest f16, ties to even.
    /// # Safety
    /// Sixteen writable f16 at `p`.
    unsafe fn store_f16(self, p: *mut f16);
}

/// Starts to load the cache line of `p` into the nearest cache. Any address is allowed.
#[inline(always)]
pub fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect that the program sees, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{}]",
            in(reg) p,
            options(readonly, nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// [`prefetch`] into the second-level cache.
#[inline(always)]
pub fn prefetch_far<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "prfm pldl2keep, [{}]",
            in(reg) p,
            options(readonly, nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Element of stored keys or values.
pub trait Element: bytemuck::Pod {
    /// # Safety
    /// Sixteen readable elements at `p`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
    /// # Safety
    /// Sixteen writable elements at `p`.
    unsafe fn store<L: Lanes>(v: L, p: *mut Self);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller upholds the contract.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(v: L, p: *mut f32) {
        // SAFETY: the caller upholds the contract.
        unsafe { v.store(p) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f16) -> L {
        // SAFETY: the caller upholds the contract.
        unsafe { L::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(v: L, p: *mut f16) {
        // SAFETY: the caller upholds the contract.
        unsafe { v.store_f16(p) }
    }
}

/// Plain arrays, for any processor.
#[derive(Clone, Copy)]
pub struct Scalar(pub(super) [f32; 16]);

impl Lanes for Scalar {
    const ISA: Isa = Isa::Scalar;
    #[inline(always)]
    fn zero() -> Self {
        Scalar([0.0; 16])
    }
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Scalar([v; 16])
    }
    #[inline(always)]
    fn pair(low: f32, high: f32) -> Self {
        Scalar(std::array::from_fn(|i| if i < 8 { low } else { high }))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller upholds the contract.
        Scalar(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: the caller upholds the contract.
        Scalar(unsafe { p.cast::<[f16; 16]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller upholds the contract.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i] + b.0[i]))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i] * b.0[i]))
    }
    #[inline(always)]
    fn max_abs(self, b: Self) -> Self {
        let most = |i: usize| magnitude(self.0[i]).max(magnitude(b.0[i]));
        Scalar(std::array::from_fn(|i| f32::from_bits(most(i))))
    }
    #[inline(always)]
    fn flip(self, signs: u16) -> Self {
        Scalar(std::array::from_fn(|i| {
            f32::from_bits(self.0[i].to_bits() ^ (signs as u32 >> i & 1) << 31)
        }))
    }
    #[inline(always)]
    fn butterfly<const HALF: usize>(self) -> Self {
        Scalar(std::array::from_fn(|i| {
            let partner = self.0[i ^ HALF];
            if i & HALF == 0 { self.0[i] + partner } else { partner - self.0[i] }
        }))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        // SAFETY: the caller upholds the contract.
        unsafe { p.cast::<[i8; 16]>().write_unaligned(self.0.map(|v| v.round_ties_even() as i8)) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: the caller upholds the contract.
        unsafe { p.cast::<[f16; 16]>().write_unaligned(self.0.map(f16::from_f32)) }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Isa, Lanes, f16, intrinsics};
    use std::arch::x86_64::*;

    /// Two 256-bit halves.
    #[derive(Clone, Copy)]
    pub struct Avx2(pub(in crate::compute::cpu) __m256, pub(in crate::compute::cpu) __m256);

    /// One 512-bit register.
    #[derive(Clone, Copy)]
    pub struct Avx512(pub(in crate::compute::cpu) __m512);

    impl Lanes for Avx2 {
        const ISA: Isa = Isa::Avx2;
        #[inline(always)]
        fn zero() -> Self {
            intrinsics!(Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()))
        }
        #[inline(always)]
        fn splat(v: f32) -> Self {
            intrinsics!(Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)))
        }
        #[inline(always)]
        fn pair(low: f32, high: f32) -> Self {
            intrinsics!(Avx2(_mm256_set1_ps(low), _mm256_set1_ps(high)))
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                Avx2(
                    _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
                )
            }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            intrinsics!(Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            intrinsics!(Avx2(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            intrinsics!(Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn max_abs(self, b: Self) -> Self {
            // Floats without a sign have the same order as their integers, including infinity and
            // NaN.
            intrinsics! {
                let sign = _mm256_set1_ps(-0.0);
                let one = |most, b| {
                    let b = _mm256_castps_si256(_mm256_andnot_ps(sign, b));
                    _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(most), b))
                };
                Avx2(one(self.0, b.0), one(self.1, b.1))
            }
        }
        #[inline(always)]
        fn flip(self, signs: u16) -> Self {
            intrinsics! {
                let bits = _mm256_set1_epi32(signs as i32);
                let low =
                    _mm256_sllv_epi32(bits, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
                let high =
                    _mm256_sllv_epi32(bits, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16));
                let minus = _mm256_set1_ps(-0.0);
                let one =
                    |x, bits| _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(bits), minus));
                Avx2(one(self.0, low), one(self.1, high))
            }
        }
        #[inline(always)]
        fn butterfly<const HALF: usize>(self) -> Self {
            intrinsics! {
                if HALF == 8 {
                    return Avx2(_mm256_add_ps(self.0, self.1), _mm256_sub_ps(self.0, self.1));
                }
                let one = |x: __m256| {
                    let (partner, signs) = match HALF {
                        4 => (
                            _mm256_permute2f128_ps::<1>(x, x),
                            _mm256_setr_ps(1., 1., 1., 1., -1., -1., -1., -1.),
                        ),
                        2 => (
                            _mm256_permute_ps::<0b01_00_11_10>(x),
                            _mm256_setr_ps(1., 1., -1., -1., 1., 1., -1., -1.),
                        ),
                        _ => (
                            _mm256_permute_ps::<0b10_11_00_01>(x),
                            _mm256_setr_ps(1., -1., 1., -1., 1., -1., 1., -1.),
                        ),
                    };
                    _mm256_fmadd_ps(x, signs, partner)
                };
                Avx2(one(self.0), one(self.1))
            }
        }
        #[inline(always)]
        unsafe fn store_i8(self, p: *mut i8) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                let words =
                    _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
                let bytes = _mm_packs_epi16(
                    _mm256_castsi256_si128(words),
                    _mm256_extracti128_si256::<1>(words),
                );
                _mm_storeu_si128(p.cast(), bytes);
            }
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
                _mm_storeu_si128(
                    p.add(8).cast(),
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
                );
            }
        }
    }

    impl Lanes for Avx512 {
        const ISA: Isa = Isa::Avx512Vnni;
        #[inline(always)]
        fn zero() -> Self {
            intrinsics!(Avx512(_mm512_setzero_ps()))
        }
        #[inline(always)]
        fn splat(v: f32) -> Self {
            intrinsics!(Avx512(_mm512_set1_ps(v)))
        }
        #[inline(always)]
        fn pair(low: f32, high: f32) -> Self {
            intrinsics!({
                let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
                Avx512(_mm512_mask_blend_ps(0xff00, low, high))
            })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { Avx512(_mm512_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            intrinsics!(Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            intrinsics!(Avx512(_mm512_add_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            intrinsics!(Avx512(_mm512_mul_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn max_abs(self, b: Self) -> Self {
            // As in AVX2.
            intrinsics! {
                let b = _mm512_castps_si512(_mm512_abs_ps(b.0));
                let most = _mm512_max_epi32(_mm512_castps_si512(self.0), b);
                Avx512(_mm512_castsi512_ps(most))
            }
        }
        #[inline(always)]
        fn flip(self, signs: u16) -> Self {
            intrinsics! {
                let x = _mm512_castps_si512(self.0);
                Avx512(_mm512_castsi512_ps(_mm512_mask_xor_epi32(
                    x,
                    signs,
                    x,
                    _mm512_set1_epi32(i32::MIN),
                )))
            }
        }
        #[inline(always)]
        fn butterfly<const HALF: usize>(self) -> Self {
            intrinsics! {
                let x = self.0;
                let (partner, negative) = match HALF {
                    8 => (_mm512_shuffle_f32x4::<0b01_00_11_10>(x, x), 0xff00),
                    4 => (_mm512_shuffle_f32x4::<0b10_11_00_01>(x, x), 0xf0f0),
                    2 => (_mm512_permute_ps::<0b01_00_11_10>(x), 0xcccc),
                    _ => (_mm512_permute_ps::<0b10_11_00_01>(x), 0xaaaa),
                };
                Avx512(_mm512_mask_sub_ps(_mm512_add_ps(x, partner), negative, partner, x))
            }
        }
        #[inline(always)]
        unsafe fn store_i8(self, p: *mut i8) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0))) }
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe {
                _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
            }
        }
    }
}

/// Evaluates intrinsics without pointer arguments, in a method of a type of their instruction set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: types of an instruction set are only used by functions that are compiled for it,
        // and the callers of those functions have checked that the machine has it.
        unsafe { $($body)* }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use intrinsics;
