//! [`Lanes`] and [`Ints`] in NEON, which every ARM64 processor has.

use super::Isa;
use super::simd::{Ints, Lanes, intrinsics};
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

/// Four registers of 128 bits.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; 4]);

/// Converts four f16 to f32. The intrinsic for it is newer than the Rust version that a build
/// needs.
#[inline(always)]
fn widen(halves: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: every ARM64 processor has the instruction, and it only uses registers.
    unsafe {
        asm!(
            "fcvtl {0:v}.4s, {1:v}.4h",
            lateout(vreg) floats,
            in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    floats
}

/// Converts four f32 to f16, rounded to nearest even.
#[inline(always)]
fn narrow(floats: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: as for `widen`.
    unsafe {
        asm!(
            "fcvtn {0:v}.4h, {1:v}.4s",
            lateout(vreg) halves,
            in(vreg) floats,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    halves
}

impl Lanes for Neon {
    const ISA: Isa = Isa::NeonDot;
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }
    #[inline(always)]
    fn splat(v: f32) -> Self {
        intrinsics!(Neon([vdupq_n_f32(v); 4]))
    }
    #[inline(always)]
    fn pair(low: f32, high: f32) -> Self {
        intrinsics!({
            let (low, high) = (vdupq_n_f32(low), vdupq_n_f32(high));
            Neon([low, low, high, high])
        })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        Neon(from_fn(|i| unsafe { vld1q_f32(p.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        Neon(from_fn(|i| widen(unsafe { vld1_u16(p.cast::<u16>().add(4 * i)) })))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for (i, v) in self.0.into_iter().enumerate() {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { vst1q_f32(p.add(4 * i), v) }
        }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Neon(from_fn(|i| intrinsics!(vfmaq_f32(c.0[i], self.0[i], b.0[i]))))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Neon(from_fn(|i| intrinsics!(vaddq_f32(self.0[i], b.0[i]))))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Neon(from_fn(|i| intrinsics!(vmulq_f32(self.0[i], b.0[i]))))
    }
    #[inline(always)]
    fn max_abs(self, b: Self) -> Self {
        Neon(from_fn(|i| intrinsics!(vmaxq_f32(self.0[i], vabsq_f32(b.0[i])))))
    }
    #[inline(always)]
    fn flip(self, signs: u16) -> Self {
        intrinsics! {
            let shifts = [31, 30, 29, 28];
            let shifts = vld1q_s32(shifts.as_ptr());
            Neon(from_fn(|i| {
                let bits = vshlq_u32(vdupq_n_u32(signs as u32 >> (4 * i)), shifts);
                let sign = vandq_u32(bits, vdupq_n_u32(1 << 31));
                vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(self.0[i]), sign))
            }))
        }
    }
    #[inline(always)]
    fn butterfly<const HALF: usize>(self) -> Self {
        intrinsics! {
            if HALF >= 4 {
                return Neon(from_fn(|i| {
                    let (own, partner) = (self.0[i], self.0[i ^ HALF / 4]);
                    let is_low = i & HALF / 4 == 0;
                    if is_low { vaddq_f32(own, partner) } else { vsubq_f32(partner, own) }
                }));
            }
            let signs = if HALF == 2 { [1., 1., -1., -1.] } else { [1., -1., 1., -1.] };
            let signs = vld1q_f32(signs.as_ptr());
            Neon(self.0.map(|x| {
                let partner = if HALF == 2 { vextq_f32::<2>(x, x) } else { vrev64q_f32(x) };
                vfmaq_f32(partner, x, signs)
            }))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let words = self.0.map(|v| vqmovn_s32(vcvtnq_s32_f32(v)));
            let low = vqmovn_s16(vcombine_s16(words[0], words[1]));
            let high = vqmovn_s16(vcombine_s16(words[2], words[3]));
            vst1q_s8(p, vcombine_s8(low, high));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        for (i, v) in self.0.into_iter().enumerate() {
            // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
            unsafe { vst1_u16(p.cast::<u16>().add(4 * i), narrow(v)) }
        }
    }
}

/// The two i16 of a pair are in different registers: eight first ones, then eight second ones.
impl Ints for Neon {
    type Sums = [int32x4_t; 4];
    type Pairs = [[int16x8_t; 2]; 2];
    #[inline(always)]
    fn no_sums() -> Self::Sums {
        intrinsics!([vdupq_n_s32(0); 4])
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> Self::Pairs {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let int8x16x2_t(first, second) = vld2q_s8(p);
            [first, second].map(|v| [vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v)])
        }
    }
    #[inline(always)]
    fn add_pairs(sums: Self::Sums, keys: Self::Pairs, query: i32) -> Self::Sums {
        intrinsics! {
            let mut sums = sums;
            for (keys, query) in keys.into_iter().zip([query as i16, (query >> 16) as i16]) {
                for (keys, sums) in keys.into_iter().zip(sums.as_chunks_mut::<2>().0) {
                    sums[0] = vmlal_n_s16(sums[0], vget_low_s16(keys), query);
                    sums[1] = vmlal_high_n_s16(sums[1], keys, query);
                }
            }
            sums
        }
    }
    #[inline(always)]
    fn floats(sums: Self::Sums) -> Self {
        Neon(sums.map(|v| intrinsics!(vcvtq_f32_s32(v))))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let bytes = vld1q_s8(p);
            let words = [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)];
            Self::floats([
                vmovl_s16(vget_low_s16(words[0])),
                vmovl_high_s16(words[0]),
                vmovl_s16(vget_low_s16(words[1])),
                vmovl_high_s16(words[1]),
            ])
        }
    }
}
