//! Sixteen f32 lanes on each instruction set, for kernels written once and compiled for all.
//!
//! Every method is one IEEE operation a lane, so the instruction set never changes a bit of a result.

use super::Isa;
use half::f16;

/// Sixteen lanes. Implementations are zero-cost only inside a function compiled for their instruction set.
pub trait Lanes: Copy {
    const ISA: Isa;
    fn zero() -> Self;
    fn splat(v: f32) -> Self;
    /// # Safety
    /// Sixteen readable f32 at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// Sixteen readable f16 at `p`.
    unsafe fn load_f16(p: *const f16) -> Self;
    /// # Safety
    /// Sixteen writable f32 at `p`.
    unsafe fn store(self, p: *mut f32);
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
}

/// A stored key or value element.
pub trait Element: bytemuck::Pod {
    /// # Safety
    /// Sixteen readable elements at `p`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: passed on to the caller.
        unsafe { L::load(p) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f16) -> L {
        // SAFETY: passed on to the caller.
        unsafe { L::load_f16(p) }
    }
}

/// Plain arrays: any processor.
#[derive(Clone, Copy)]
pub struct Scalar([f32; 16]);

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
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: passed on to the caller.
        Scalar(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: passed on to the caller.
        Scalar(unsafe { p.cast::<[f16; 16]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: passed on to the caller.
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
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Isa, Lanes, f16};
    use std::arch::x86_64::*;

    /// Two 256-bit halves.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256, __m256);

    /// One 512-bit register.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    // SAFETY (of every block below): these types are used only inside functions compiled for their instruction set and
    // called after it was detected; pointers are the caller's promise.
    impl Lanes for Avx2 {
        const ISA: Isa = Isa::Avx2;
        #[inline(always)]
        fn zero() -> Self {
            unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }
        #[inline(always)]
        fn splat(v: f32) -> Self {
            unsafe { Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            unsafe { Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            unsafe { Avx2(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            unsafe { Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
        }
    }

    impl Lanes for Avx512 {
        const ISA: Isa = Isa::Avx512Vnni;
        #[inline(always)]
        fn zero() -> Self {
            unsafe { Avx512(_mm512_setzero_ps()) }
        }
        #[inline(always)]
        fn splat(v: f32) -> Self {
            unsafe { Avx512(_mm512_set1_ps(v)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { Avx512(_mm512_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            unsafe { Avx512(_mm512_add_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
        }
    }
}

/// Defines `fn $name(isa, args)` that runs the always-inlined generic `$body::<L>` compiled for the instruction set.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        pub fn $name(isa: $crate::compute::cpu::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
            fn avx512($($arg: $ty),*) {
                $body::<$crate::compute::cpu::simd::Avx512>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2($($arg: $ty),*) {
                $body::<$crate::compute::cpu::simd::Avx2>($($arg),*)
            }
            match isa {
                // SAFETY: `Isa` values other than `Scalar` exist only on processors where they were detected.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::Isa::Avx512Vnni => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => $body::<$crate::compute::cpu::simd::Scalar>($($arg),*),
            }
        }
    };
}
pub(crate) use for_each_isa;
